"""A server's law from outside: requests served under a known law give it back."""

import csv

import numpy as np
import pytest

from servegym.envs.llm_routing import replay
from servegym.hardware_profiles import load
from servegym.hardware_profiles.calibrate import calibrate
from servegym.hardware_profiles.calibrate.calibrate_server import ServerOptions, calibrate_server
from servegym.hardware_profiles.measure.server import COLUMNS

SLOTS = 4
TABLE = (0.002, 0.004, 0.0035, 0.006)  # three at a time take less than two
CONTEXT_S, PROMPT_S = 4e-6, 3e-4


def serve(times, random, noise):
    """A literal server: all that have come join the next iteration; each gives a token."""
    rows, running, now, queue = [], [], 0.0, sorted(times)
    while queue or running:
        if not running:
            now = max(now, queue[0][0])
        while queue and queue[0][0] <= now and len(running) < SLOTS:
            arrived, prompt, output = queue.pop(0)
            running.append({"started_s": arrived, "p": prompt, "n": output, "at": []})
        held = sum(r["p"] + len(r["at"]) for r in running if r["at"])
        new = sum(r["p"] for r in running if not r["at"])
        step = TABLE[len(running) - 1] + CONTEXT_S * held + PROMPT_S * new
        now += step * np.exp(random.normal(0.0, noise))
        for r in running:
            r["at"].append(now)
        for r in [r for r in running if len(r["at"]) == r["n"]]:
            running.remove(r)
            rows.append(r)
    return rows


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    random = np.random.default_rng(0)
    out = []
    for cell, gap in enumerate((0.4, 0.12, 0.06, 0.04)):
        arrivals = np.cumsum(random.exponential(gap, 60)).tolist()
        lengths = random.integers([5, 8], [60, 40], (60, 2)).tolist()
        requests = [(t, *each) for t, each in zip(arrivals, lengths, strict=True)]
        for k, r in enumerate(serve(requests, random, 0.05)):
            # The client is up to 1 ms late to see a token.
            at = np.array(r["at"]) + random.uniform(0.0, 1e-3, len(r["at"]))
            at = np.maximum.accumulate(at)
            start = r["started_s"]
            values = (
                0,
                1 / gap,
                cell,
                k,
                start,
                at[0] - start,
                0.0,
                at[-1] - start,
                r["p"],
                r["n"],
            )
            tokens = " ".join(f"{t - at[0]:.6f}" for t in at)
            out.append(dict(zip(COLUMNS, (*values, tokens, ""), strict=True)))
    out.append({**dict.fromkeys(COLUMNS, ""), "error": "status 503"})
    path = tmp_path_factory.mktemp("server") / "server.csv"
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows(out)
    return path


def test_the_law_comes_back_and_needs_not_rise(file, tmp_path, capsys):
    out = tmp_path / "one.json"
    words = ["server", str(file), "--slots", str(SLOTS), "--kv-tokens", "4096"]
    assert calibrate.main([*words, "--name", "one", "--out", str(out)]) == 0
    assert "table, ms" in capsys.readouterr().out
    profile = load(str(out))
    assert profile.kind == "measured" and profile.kv_capacity_tokens == 4096
    for n, seconds in enumerate(TABLE, 1):
        assert profile.decode_s(n, 30.0 * n) == pytest.approx(
            seconds + 30 * n * CONTEXT_S, rel=0.06
        )
    assert profile.decode_s(3, 90.0) < profile.decode_s(2, 60.0)
    assert profile.prefill_s(50) == pytest.approx(TABLE[0] + 50 * PROMPT_S, rel=0.07)
    error = profile.fit_error["request_random_third"]
    assert error["median"] < 0.04 and error["p90"] < 0.12
    assert profile.fit_error["request_load_left_out"]["points"] > 100
    served = replay([0.0, 0.0], [40, 20], [10, 10], profile=profile, max_num_seqs=SLOTS)
    alone = (
        TABLE[1] + 60 * PROMPT_S + 9 * TABLE[1] + CONTEXT_S * sum(60 + 2 * k for k in range(1, 10))
    )
    assert served["finish_s"][0] == pytest.approx(alone, rel=0.05)


def later(row, started_s):
    """The file's first row with another beginning."""
    cells = row.split(",")
    cells[COLUMNS.index("started_s")] = started_s
    return ",".join(cells)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("token_s", "token", "token_s"),
        ("\n0,", "\nx,", ":2: field 'load'"),
        (None, "1700000000000", ":2: field 'started_s': '1700000000000' cannot be seconds"),
        (None, "-1", ":2: field 'started_s': '-1' is negative"),
    ],
)
def test_a_bad_file_is_refused_by_line_and_field(file, tmp_path, old, new, what):
    path = tmp_path / "bad.csv"
    text = file.read_text().replace("\r\n", "\n")
    if old is None:
        old = text.splitlines()[1]
        new = later(old, new)
    path.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=what):
        calibrate_server(path, ServerOptions(SLOTS, 4096, "x"))
