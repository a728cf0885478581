"""Real servers beside their simulation: the errors, and tiny servers from calibration to tables."""

import pytest

from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.live import compare
from servegym.experiments.live.compare import Plan
from servegym.experiments.live.fleet_file import ServerSpec


def test_a_bad_fleet_is_refused_before_a_server_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    simulated = tmp_path / "fleet.toml"
    simulated.write_text('[[server]]\nname = "a"\nengine = "simulated"\nprofile = "any"\n')
    for fleet, what in (("nowhere.toml", "nowhere"), (str(simulated), "'a': engine")):
        with pytest.raises((ValueError, OSError), match=what):
            compare.main(["compare", fleet])
    assert [one.name for one in tmp_path.iterdir()] == ["fleet.toml"]


@pytest.mark.slow
def test_tiny_servers_from_calibration_to_tables(tmp_path):
    pytest.importorskip("xllamacpp")
    specs = [
        ServerSpec("small", "llama.cpp", "random:1x64", slots=2, context=128),
        ServerSpec("large", "llama.cpp", "random:2x64", slots=2, context=128),
    ]
    plan = Plan(("least_outstanding", "greedy_qos"), (0.8,), 1, requests=20, sweep=3)
    rows, rates, latency_s = compare.run(specs, plan, tmp_path)
    assert [(row["world"], row["served"] > 0) for row in rows] == [
        ("real", True),
        ("simulated", True),
    ] * 2
    assert len(rates) == 2 and min(*rates, latency_s) > 0
    compare.write_tables(rows, tmp_path, {"command": "servegym real compare"})
    assert [row["world"] for row in read_rows(tmp_path / "runs.csv")] == ["real", "simulated"] * 2
    assert len(read_rows(tmp_path / "qos.csv")) == 2 * 2


def test_errors_are_of_the_simulation_over_the_measured():
    rows = []
    for world, policy, scale in (
        ("real", "a", 1.0),
        ("real", "b", 0.9),
        ("simulated", "a", 1.2),
        ("simulated", "b", 1.08),
    ):
        for repetition in (0, 1):
            times = dict.fromkeys(compare.QUANTITIES, 2.0 * scale * (1 + repetition))
            key = {"world": world, "load": 0.8, "policy": policy}
            rows.append({**key, "qos": 0.5 * scale, **times})
    errors, qos = compare.error_rows(rows), compare.qos_rows(rows)
    assert [one["quantity"] for one in errors] == sorted(compare.QUANTITIES)
    assert {(one["error"], one["low"], one["absolute"]) for one in errors} == {(0.2, 0.2, 0.2)}
    assert {one["measured_s"] for one in errors} == {2.85}
    assert [(one["policy"], one["world"], one["qos"], one["runs"]) for one in qos] == [
        ("a", "real", 0.5, 2),
        ("a", "simulated", 0.6, 2),
        ("b", "real", 0.45, 2),
        ("b", "simulated", 0.54, 2),
    ]
    note = compare.agreement_note(0.8, qos)
    assert note["mean_apart"] == 0.095 and note["most_apart"] == 0.1
    assert "best in reality a, in the simulation a" in note["text"]
