"""``servegym presubmit``: a router passes or fails as a pull request's check."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from servegym.experiments.evaluation import presubmit as presubmission
from servegym.experiments.evaluation import stats
from servegym.experiments.evaluation.presubmit import (
    Played,
    Rules,
    _compared,
    main,
    presubmit,
    time_per_token,
)

LEAST_LOAD = """
import numpy as np

def act(observation, action_mask):
    load = observation["replicas"][:, 6]
    return int(np.where(action_mask > 0, load, np.inf).argmin())
"""
ALWAYS_FIRST = "def act(observation, action_mask):\n    return 0\n"


def run(tmp_path, text, *more):
    file, out = tmp_path / "mine.py", tmp_path / "out.json"
    file.write_text(text)
    arguments = [str(file), "--rates", "260", "--episodes", "2", "--json", str(out), *more]
    return main(arguments), json.loads(out.read_text())


def test_a_router_as_good_as_the_baseline_passes_and_one_that_sends_all_to_one_fails(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(presubmission.REQUESTS, presubmission.GIE, 300)
    monkeypatch.setattr(stats, "ENOUGH", 2)  # with margins that two episodes can show
    words = ["--against", "least_load", "--margin", "0.3", "--margin-time", "0.3"]
    status, found = run(tmp_path, LEAST_LOAD, *words)
    assert status == 0 and found["passed"] and found["margin"] == 0.3
    (row,) = found["rows"]
    assert row["verdict"] == "passed" and 0 < row["decision_s"] <= row["slowest_decision_s"]
    # Ties are broken otherwise, so that the episodes differ a little.
    assert row["gain"] == pytest.approx(0.0, abs=0.01)
    assert "2 episodes show a loss that comes in 78 % of them" in capsys.readouterr().out
    assert row["ratio"] == pytest.approx(1.0, abs=0.03)
    status, found = run(tmp_path, ALWAYS_FIRST, *words)
    assert status == 1 and not found["passed"]
    assert found["rows"][0]["gain"] < -0.3
    printed = capsys.readouterr()
    assert "60 % KV" in printed.out
    assert "FAILED" in printed.out
    assert "260 requests/s: episodes 1 to 2" in printed.err


def test_a_router_that_crashes_leaves_its_error(tmp_path, capsys):
    status, found = run(tmp_path, "def act(observation, action_mask):\n    return 1 / 0\n")
    assert status == 4 and not found["passed"] and found["rows"] == []
    assert "ZeroDivisionError" in found["error"] and "ZeroDivision" in capsys.readouterr().out


NOISE = np.resize([0.0, 0.02, -0.02, 0.0], 64)


@pytest.mark.parametrize(
    ("gain", "slower", "verdict"),
    [
        (NOISE + 0.1, 1.0, "passed"),
        (NOISE[:32] + 0.1, 1.0, "not told"),  # too few to pass
        (NOISE * 8, 1.0, "not told"),  # down to the margin, and up to a gain
        (NOISE[:4] - 0.5, 1.0, "failed"),  # clear at the first look
        (NOISE[:4] - 0.05, 1.0, "not told"),
        (NOISE - 0.01, 1.0, "passed"),  # worse, and less so than the margin
        (NOISE * 3 - 0.019, 1.0, "failed"),  # worse, and perhaps more so than the margin
        (NOISE, 1.05, "passed"),
        (NOISE, 1.2, "failed"),
        (np.where(np.arange(64) == 5, -0.4, 0.0), 1.0, "not told"),  # one large loss
    ],
)
def test_verdicts(gain, slower, verdict):
    base, times = np.full(len(gain), 0.5), np.linspace(0.1, 0.13, len(gain))
    row = _compared(Played(base + gain, slower * times), Played(base, times), Rules())
    assert row["verdict"] == verdict
    assert row["gain_low"] < row["gain"] < row["gain_high"]
    assert row["ratio_low"] < row["ratio"] < row["ratio_high"]


def test_a_rare_loss_of_time_or_of_everything_does_not_pass():
    base, times = np.full(64, 0.5), np.full(64, 0.1)
    rare = np.arange(64) % 10 == 3
    row = _compared(Played(base, np.where(rare, 0.4, 0.1)), Played(base, times), Rules())
    assert row["verdict"] != "passed" and row["ratio"] == pytest.approx(4 ** (7 / 64))
    # An episode in which nothing was completed has no time: it does not count as seen.
    row = _compared(Played(base, np.where(rare, np.nan, 0.1)), Played(base, times), Rules())
    assert row["verdict"] == "not told"
    nothing = Played(base - 0.5, np.where(np.arange(64), np.nan, 1))
    nothing = _compared(nothing, Played(base, times), Rules())
    assert nothing["verdict"] == "failed" and nothing["ratio"] is None


def stub(monkeypatch, *gains):
    """The episodes of a policy with these gains over each baseline; returns what was asked for."""
    asked, begin = [], 0

    def played(policies, arguments, first, more, **how):
        nonlocal begin
        goes_on = asked and asked[-1][:2] == (arguments["rate"], first - asked[-1][2])
        begin = begin if goes_on else first
        asked.append((arguments["rate"], first, more))
        where = slice(first - begin, first - begin + more)
        bases = [Played(0.5 - gain[where], np.ones(more)) for gain in gains[: len(policies) - 1]]
        return [Played(np.full(more, 0.5), np.ones(more)), *bases]

    monkeypatch.setattr(presubmission, "episodes_of", played)
    return asked


BOUND = {"rates": [260.0], "against": ["llm_d"], "seed": 10}


def test_what_is_not_told_is_played_on_up_to_the_bound(monkeypatch):
    asked = stub(monkeypatch, np.resize([0.3, -0.3], 64))
    (row,) = presubmit("least_load", rules=Rules(max_episodes=12), **BOUND)
    assert row["verdict"] == "not told" and row["episodes"] == 12
    first = row["seed"]
    assert asked == [(260.0, first, 4), (260.0, first + 4, 4), (260.0, first + 8, 4)]
    # Each rate has its own episodes, and the seed repeats them all.
    rows = presubmit("least_load", rules=Rules(max_episodes=4), **BOUND | {"rates": [260.0, 345.0]})
    assert rows[0]["seed"] == first != rows[1]["seed"]
    rows = presubmit("least_load", rules=Rules(max_episodes=4), **BOUND | {"seed": None})
    assert rows[0]["seed"] != first


def test_an_equal_policy_passes_after_64_episodes_and_a_failure_ends_a_rate(monkeypatch):
    asked = stub(monkeypatch, np.zeros(64), np.full(64, -0.5))
    (row,) = presubmit("least_load", **BOUND)
    assert row["verdict"] == "passed" and asked[-1] == (260.0, row["seed"] + 32, 32)
    asked.clear()
    stub(monkeypatch, np.zeros(299))
    (row,) = presubmit("least_load", rules=Rules(rare=0.01), **BOUND)
    assert row["verdict"] == "passed" and row["episodes"] == 299
    asked = stub(monkeypatch, np.zeros(64), np.full(64, -0.5))
    rows = presubmit("least_load", **(BOUND | {"against": ["llm_d", "lmetric"]}))
    assert [row["verdict"] for row in rows] == ["not told", "failed"] and len(asked) == 1


def test_two_files_of_a_gateway_are_better_not_worse_or_worse(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(stats, "ENOUGH", 8)
    old = "--policy cache_aware --cache-threshold .9 --balance-abs-threshold "
    ways = {"old": f"{old} 2", "same": f"{old} 2.0", "new": "--policy cache_aware"}
    files = {name: str(tmp_path / f"{name}.flags") for name in ways}
    for name, text in ways.items():
        Path(files[name]).write_text(text)
    fleet = ["--cards", "h100,h100,h100", "--model", "llama-3.1-8b", "--seed", "3", "--set"]
    fleet += ["episode_requests=80", "warmup_requests=20"]
    answers = {}
    for name in ("same", "new"):
        status = presubmission.main([files["old"], files[name], *fleet, "--rates", "24"])
        printed = capsys.readouterr().out
        answers[name] = status, printed[printed.index(f"{files[name]} is ") :].splitlines()[0]
    assert answers["same"] == (0, f"{files['same']} is not worse than {files['old']}")
    assert answers["new"] == (0, f"{files['new']} is better than {files['old']}")
    status = presubmission.main([files["new"], files["old"], *fleet, "--rates", "24"])
    assert status == 1 and "old.flags is worse than" in capsys.readouterr().out
    # Without rates they are those around the knee.
    monkeypatch.setattr(
        presubmission, "presubmit", lambda *a, rates, **kw: asked.append(rates) or []
    )
    asked = []
    presubmission.main([files["old"], files["new"], *fleet])
    assert len(asked[0]) == 4 and asked[0][0] < asked[0][3]
    for words in ([*files.values(), *fleet], [files["old"], files["new"], "--against", "llm_d"]):
        with pytest.raises(ValueError, match="policy: give one"):
            presubmission.main(words)
    with pytest.raises(ValueError, match="--scenario"):
        presubmission.main([files["old"], "--scenario", "drift", *fleet])
    with pytest.raises(ValueError, match="--rates"):
        presubmission.main(["llm_d", *fleet])
    with pytest.raises(ValueError, match="--time-limit"):
        presubmission.main(["llm_d", "--time-limit", "nan"])
    with pytest.raises(ValueError, match=r"old.flags', a gateway's file; servegym/LLMRouting-v1"):
        presubmission.evaluate("servegym/LLMRouting-v1", [files["old"]], 1, 0, {})


def test_time_per_token_is_the_mean_over_completed_requests():
    log = np.zeros(3, [("arrival_s", "f8"), ("finish_s", "f8"), ("output_tokens", "i4")])
    log["arrival_s"] = 1.0
    log["finish_s"] = [3.0, 5.0, np.nan]
    log["output_tokens"] = [4, 2, 7]
    assert time_per_token(log) == pytest.approx((2 / 4 + 4 / 2) / 2)
    assert np.isnan(time_per_token(log[2:]))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"scenario": "gie709"}, "Did you mean 'gie-709'"),
        ({"rates": [-1.0]}, "rates"),
        ({"policy": "no_such"}, "no_such"),
        ({"policy": "greedy_qos"}, "is a policy for llm_routing, not for prefix_routing"),
    ],
)
def test_bad_input_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        presubmit(**({"policy": "least_load"} | arguments))


@pytest.mark.parametrize(
    "rules",
    [{"episodes": 1}, {"max_episodes": 3}, {"margin": -0.1}, {"rare": 0.0}],
)
def test_rules_out_of_range_are_refused_by_name(rules):
    with pytest.raises(ValueError, match=next(iter(rules))):
        Rules(**rules)
