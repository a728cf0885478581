"""The placement studies at smoke size, and what they compute against formulas of their own."""

import numpy as np
import pytest

from servegym.envs.expert_placement.config import build_problem
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.evaluation.tables import read_record
from servegym.experiments.papers.placement import measuring as placement_measuring
from servegym.experiments.papers.placement import migration as placement_migration
from servegym.experiments.papers.placement import scale as placement_scale
from servegym.experiments.papers.placement.claims import unpaired
from servegym.experiments.papers.placement.measuring import ENV_ID, change, drive, interval, measure

PNG = b"\x89PNG\r\n\x1a\n"


def made(folder, stem):
    """The rows of a result whose three files are there."""
    assert (folder / f"{stem}.png").read_bytes()[:8] == PNG
    assert read_record(folder / f"{stem}.csv")["quick"]
    return read_rows(folder / f"{stem}.csv")


@pytest.mark.parametrize("policy", ["redundance", "prism"])
def test_looking_on_changes_nothing(policy):
    kwargs = {"scenario": "paper_testbed", "epochs": 2, "epoch_s": 60.0}
    (wanted,) = evaluate(ENV_ID, [policy], 1, seed=5, env_kwargs=kwargs)
    system, looks = drive(kwargs, policy, 5, slices=3)
    kpis = system.kpis()
    for key in ("mean_latency_s", "p99_latency_s", "local_token_ratio", "migrations"):
        assert kpis[key] == pytest.approx(wanted[key], rel=1e-12), key
    assert len(looks) == 6 and looks[-1]["end_s"] == 120.0
    tokens = {
        place: sum(look[f"all_{place}_tokens"] for look in looks) for place in ("local", "remote")
    }
    ratio = tokens["local"] / (tokens["local"] + tokens["remote"])
    assert ratio == pytest.approx(wanted["local_token_ratio"], rel=1e-12)


def test_two_phases():
    make = placement_migration.two_phases(7)
    problem = build_problem(scenario="paper_testbed_multi", split="eval")
    requests = make(problem, np.random.default_rng(0))
    assert (np.diff(requests.arrival) >= 0).all() and len(requests.arrival) == 3 * 14
    change = 7 * 20.0
    for after, tasks, outputs in (
        (False, ("translation", "law", "summary"), 20),
        (True, ("law", "intent", "translation"), 5),
    ):
        own = (requests.arrival >= change) == after
        assert np.bincount(requests.home[own]).tolist() == [7, 7, 7]
        assert set(requests.outputs[own]) == {outputs}
        activations = problem.activations
        names = np.array(activations.tasks)[activations.task[requests.prompt[own]]]
        assert (names == np.array(tasks)[requests.home[own]]).all()
        assert (activations.split[requests.prompt[own]] == 2).all()
    assert requests.arrival[-1] < change + 7 * 10.0


@pytest.mark.parametrize("count, paired", [(3, True), (5, True), (2, False)])
def test_intervals_of_changes_hold_the_truth(count, paired):
    """95 % of intervals, within chance; a bootstrap of three holds it in about 71 %."""
    rng, held, runs = np.random.default_rng(0), 0, 600
    for _ in range(runs):
        shared = rng.normal(0, 1.0, count)
        one = 8.0 + (shared if paired else rng.normal(0, 1.0, count)) + rng.normal(0, 0.3, count)
        other = 10.0 + shared + rng.normal(0, 0.3, count)
        rows = [interval(x, "mean_latency_s") | {"episodes": count} for x in (one, other)]
        low, high = change(one, other)[1:] if paired else unpaired(*rows)
        held += low <= -20.0 <= high
    assert 0.92 < held / runs < 0.985


@pytest.mark.slow
def test_scale_and_migration_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(placement_scale, "GPUS", (4, 8))
    monkeypatch.setattr(placement_scale, "GAPS_S", (15.0, 8.0))
    monkeypatch.setattr(placement_scale, "LINKS", ("nic", "pairwise"))
    monkeypatch.setattr(placement_scale, "MBPS", (200, 1000))
    argv = ["--quick", "--episodes", "1", "--out", str(tmp_path), "--figure", "fig8a", "fig8b"]
    assert placement_scale.main(argv) == 0
    sizes = made(tmp_path, "fig8a_gpus")
    assert {(r["link_model"], r["gpus"]) for r in sizes} == {
        (link, gpus) for link in ("nic", "pairwise") for gpus in (4, 8)
    }
    assert read_record(tmp_path / "fig8a_gpus.csv")["notes"]
    cell = {
        (r["h_ms"], r["gpus"], r["mbps"]): r["mean_latency_s"]
        for r in made(tmp_path, "fig8b_bandwidth")
        if r["link_model"] == "nic"
    }
    for (h, gpus, mbps), seconds in cell.items():
        if mbps == 200:
            assert cell[h, gpus, 1000] < seconds
        if h == 1.5:
            assert cell[0.2, gpus, mbps] < seconds
    argv = ["--quick", "--episodes", "1", "--out", str(tmp_path)]
    assert placement_migration.main(argv) == 0
    assert len(read_rows(tmp_path / "fig7_migration.csv")) == 4 * 3 * placement_migration.LOOKS
    loads = {row["variant"]: row["expert_loads"] for row in made(tmp_path, "fig7_summary")}
    assert loads["kept"] == 0 < loads["migrating"]
    assert loads["kept, planned for both phases"] == 0
    known = placement_migration.both_phases()
    layers = known.sum(axis=2)  # every token takes 6 experts of each layer
    assert known.shape == (3, 26, 64) and (np.ptp(layers, axis=1) <= 64).all()
    assert layers.min() > 6 * placement_migration.EACH * (19 + 4)


def test_a_mean_that_grows_with_the_run_is_marked(monkeypatch):
    played = []

    def evaluate(env_id, policies, episodes, env_kwargs):
        """Latency in proportion to the time of arrivals, but of the second policy."""
        played.append((policies[0], env_kwargs["epochs"], env_kwargs.get("epoch_s", 300)))
        seconds = 0.2 * 300 * (env_kwargs["epochs"] if policies[0] == "prism" else 4)
        keys = "p99_latency_s mean_ttft_s local_token_ratio local_call_ratio remote_layer_ratio"
        row = dict.fromkeys([*keys.split(), "migrations", "requests"], 1.0)
        return [row | {"mean_latency_s": seconds}] * episodes

    monkeypatch.setattr(placement_measuring, "evaluate", evaluate)
    rows = measure({}, ("prism", "eplb"), 2, epochs=4)
    assert [f"{name} {epochs}" for name, epochs, _ in played] == [
        *("prism 4", "prism 8", "eplb 4", "eplb 8")
    ]
    assert [row["overloaded"] for row in rows] == [1.0, 0.0]
    assert rows[0]["doubled_s"] == 480.0
    assert placement_measuring.growing(rows, "policy")["overloaded"] == ["prism"]
    measure({}, ("prism",), 2, epochs=1)  # no second decision: one epoch of twice the length
    assert played[-2:] == [("prism", 1, 300), ("prism", 1, 600)]
