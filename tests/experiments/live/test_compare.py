"""Real servers beside their simulation: the parts, and tiny servers from calibration to tables."""

import csv
import json

import numpy as np
import pytest

from servegym.experiments.live import compare


def read(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_a_servers_speed_is_judged_by_the_others_alone():
    middles = np.array([0.0, 10.0])
    found = [(middles, np.array([1.0, 2.0])), (middles, np.array([3.0, 3.0])), ([], [])]
    speed = compare.others_speed(found, np.array([0.0, 5.0, 20.0]))
    assert speed[:, 0].tolist() == [3.0, 3.0, 3.0]
    assert speed[:, 1].tolist() == [1.0, 1.5, 2.0]
    assert speed[:, 2].tolist() == [2.0, 2.25, 2.5]


def test_requests_come_at_the_rate_and_at_all_loads(tmp_path):
    compare.write_requests(tmp_path / "one.csv", ["a", "b"], 4.0, 2000, 1)
    rows = compare.read_rows(tmp_path / "one.csv")
    assert 2000 / rows[-1]["arrival_s"] == pytest.approx(4.0, rel=0.1)
    assert {row["prompt_tokens"] for row in rows} == set(range(24, 73))
    assert {"score_a", "score_b", "predicted_tokens_a", "output_tokens_b"} <= set(rows[0])


def test_errors_are_of_the_simulation_over_the_measured(tmp_path):
    def row(world, repetition, scale):
        times = dict.fromkeys(compare.QUANTITIES, 2.0 * scale * (1 + repetition))
        cell = {"world": world, "load": 0.8, "policy": "random", "repetition": repetition}
        return {**cell, "expert": "all", "served": 9, "share": 1.0, **times, "qos": 0.5 * scale}

    rows = [row(w, k, s) for k in (0, 1) for w, s in (("real", 1.0), ("plain", 1.2))]
    saved = {
        "plan": {"policies": ["random"]},
        "capacity_rps": [1.0],
        "latency_requirement_s": 0.1,
        "servers": [
            {"name": "a", "engine": "vllm", "slots": 8, "context": 64, "cores": [0], "pid": 7}
        ],
    }
    lines = []
    compare.write_tables(rows, tmp_path, {}, saved, ["a"], [], [0.001], 0, lines.append)
    errors = read(tmp_path / "errors.csv")
    assert {(one["quantity"], one["error"], one["low"]) for one in errors} == {
        (name, "0.2", "0.2") for name in compare.QUANTITIES
    }
    assert {(one["world"], one["qos"]) for one in read(tmp_path / "qos.csv")} == {
        ("real", "0.5"),
        ("plain", "0.6"),
    }
    assert any("QoS apart by 0.100" in line for line in lines)
    made = json.loads((tmp_path / "errors.json").read_text())
    assert made["settings"]["servers"] == [
        {"name": "a", "engine": "vllm", "slots": 8, "context": 64, "cores": [0]}
    ]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--loads", "fast"], "loads"),
        (["--loads", "0"], "loads"),
        (["--requests", "0"], "requests"),
        (["no such fleet.toml"], "no such fleet"),
    ],
)
def test_a_bad_plan_is_refused_before_a_server_starts(words, what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, OSError), match=what):
        compare.main(words)
    assert not list(tmp_path.iterdir())


FLEET = """
[[server]]
name = "small"
engine = "llama.cpp"
model = "random:1x64"
slots = 2
context = 128

[[server]]
name = "large"
engine = "llama.cpp"
model = "random:2x64"
slots = 2
context = 128
"""


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A folder with what two tiny servers did, and the tables."""
    pytest.importorskip("xllamacpp")
    folder = tmp_path_factory.mktemp("compared")
    (folder / "fleet.toml").write_text(FLEET)
    words = [str(folder / "fleet.toml"), "--policies", "least_outstanding,greedy_qos"]
    words += ["--loads", "0.8", "--repetitions", "1", "--requests", "20", "--sweep", "3"]
    assert compare.main([*words, "--folder", str(folder)]) == 0
    return folder


@pytest.mark.slow
def test_tiny_servers_from_calibration_to_tables(compared):
    rows = read(compared / "tables" / "runs.csv")
    shares = {(r["world"], r["policy"], r["expert"]): int(r["served"]) for r in rows}
    for policy in ("least_outstanding", "greedy_qos"):
        for expert in ("all", "small", "large"):
            cell = policy, expert
            assert shares["replayed", *cell] == shares["real", *cell]  # where they went in reality
    for path in (compared / "raw").glob("*.json"):
        records = json.loads(path.read_text())["records"]
        assert len(records) == 20 and not any(r.get("error") for r in records)
        for r in records:
            assert r["expert"] < 0 or 0 < r["first_s"] <= r["finish_s"]
    for name in ("small", "large"):
        assert compare.law_of(compare.load(str(compared / f"{name}.json"))).table.min() > 0
    assert len(read(compared / "tables" / "qos.csv")) == 2 * 4
    made = json.loads((compared / "tables" / "qos.json").read_text())
    assert made["command"].startswith("servegym real compare fleet.toml --policies")
