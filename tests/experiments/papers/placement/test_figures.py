"""The placement studies at smoke size, and what they compute against formulas of their own."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from servegym.envs.expert_placement.config import build_problem  # noqa: E402
from servegym.experiments.evaluation.evaluate import evaluate  # noqa: E402
from servegym.experiments.evaluation.tables import read_record  # noqa: E402
from servegym.experiments.papers.placement import measuring as placement_measuring
from servegym.experiments.papers.placement import migration as placement_migration
from servegym.experiments.papers.placement import scale as placement_scale
from servegym.experiments.papers.placement.claims import unpaired  # noqa: E402
from servegym.experiments.papers.placement.latency import PAPER, layer_times  # noqa: E402
from servegym.experiments.papers.placement.measuring import (  # noqa: E402
    ENV_ID,
    change,
    drive,
    interval,
    measure,
)
from servegym.experiments.papers.placement.workload import covered, skew_of  # noqa: E402

from ..tables import rows_of  # noqa: E402

PNG = b"\x89PNG\r\n\x1a\n"


def made(folder, stem):
    """The rows of a result whose three files are there."""
    assert (folder / f"{stem}.png").read_bytes()[:8] == PNG
    assert read_record(folder / f"{stem}.csv")["quick"]
    return rows_of(folder / f"{stem}.csv")


def test_the_printed_table_says_what_the_paper_claims():
    def less(workload, model):
        own = PAPER[workload, model]
        return 100 * (1 - own["prism"][3] / own["eplb_global"][3])

    assert less("BigBench", "DeepSeek-V2-Lite") == pytest.approx(30.6, abs=0.05)
    assert less("MultiData", "DeepSeek-V2-Lite") == pytest.approx(10.9, abs=0.1)
    assert less("MultiData", "Mixtral-8x7B") == pytest.approx(2.0, abs=0.05)
    # The mean over requests lies between those of the servers.
    for table in PAPER.values():
        assert all(min(row[:3]) < row[3] < max(row[:3]) for row in table.values())


def test_layer_times_by_hand():
    """Eq. 1 for one token whose six experts are all local, or all remote, with nothing queued."""
    dense, call = 0.25e-3 + 1.5e-6, 14e-6 + 0.18e-6
    here = layer_times(0.0, 0, "per_expert", 5)
    assert here["decode_ms"] == pytest.approx(1e3 * (dense + 6 * call), rel=1e-7)
    assert here["remote_calls"] == 0.0
    message = 4096 / (500e6 / 8) + 1.5e-3
    staging = 4096 / 12e9 + 20e-6
    away = layer_times(1.0, 0, "per_expert", 5)
    # Six messages leave one after another; the last one's answer follows alone.
    wanted = dense + 6 * message + 0.5e-3 + staging + call + staging + message + 0.5e-3
    assert away["decode_ms"] == pytest.approx(1e3 * wanted, rel=1e-6)
    assert away["remote_calls"] == 1.0
    joint = layer_times(1.0, 0, "per_server", 5)
    assert here["decode_ms"] < joint["decode_ms"] < away["decode_ms"]
    assert here["prefill_ms"] < joint["prefill_ms"] < away["prefill_ms"]


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


def test_a_static_run_changes_once():
    kwargs = {"scenario": "paper_testbed", "epochs": 3, "epoch_s": 60.0}
    _, kept = drive(kwargs, "prism", 1, 2, pooled_start=True, static=True)
    _, moved = drive(kwargs, "prism", 1, 2, pooled_start=True)
    assert [look["adopted"] for look in kept] == [1, 0, 0, 0, 0, 0]
    assert sum(look["adopted"] for look in moved) > 1
    assert all(look["adopted"] == 0 for look in moved[1::2])


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


def test_skew_by_hand():
    shares = np.array([[0.25] * 4, [1, 0, 0, 0], [0.5, 0.5, 0, 0]])
    found = skew_of(shares)
    assert found["top_share"].tolist() == [0.25, 1.0, 0.5]
    assert found["entropy"] == pytest.approx([1.0, 0.0, 0.5])


def test_coverage_can_force_half():
    """Two servers of four slots that both use experts 0 to 3 only: Theorem 1 is no guarantee."""
    counts = np.zeros((2, 1, 8))
    counts[:, 0, :4] = 10
    view = np.zeros((2, 1, 8), dtype=bool)
    view[0, 0, [0, 1, 4, 5]] = view[1, 0, [2, 3, 6, 7]] = True
    found = covered(counts, view, np.array([4, 4]))
    assert found["ratio"].tolist() == [0.5, 0.5] == found["held"].tolist()
    all_held = covered(counts, np.ones_like(view), np.array([2, 4]))
    assert all_held["ratio"] == pytest.approx([2.0, 1.0]) and (all_held["held"] == 1).all()


def test_changes_are_of_the_means_on_the_same_episodes():
    other = np.array([10.0, 20.0, 30.0])
    assert change(0.7 * other, other) == pytest.approx((-30.0, -30.0, -30.0))
    alone = change(other[:1], other[1:2])
    assert alone.value == -50.0 and np.isnan(alone.low)


def test_intervals_of_few_episodes_are_students():
    found = interval([9.0, 11.0, 10.0], "x")
    assert found["x"] == 10.0  # t(0.975, 2) = 4.3027, standard error 1 / sqrt(3)
    assert found["x_high"] - 10.0 == pytest.approx(4.302653 / 3**0.5) == 10.0 - found["x_low"]
    assert interval([1.0, 3.0], "x")["x_low"] == 0.0  # no latency is negative
    many = interval(np.arange(10.0), "x")
    assert 2.5 < many["x_low"] < 3.0 and 6.0 < many["x_high"] < 6.5


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


def test_the_mean_over_requests_lies_between_those_of_the_servers():
    kwargs = {"scenario": "paper_testbed", "model": "mixtral-8x7b", "epochs": 1}
    (row,) = measure({"x": 1}, ("prism",), 2, **kwargs)
    servers = [row[f"mean_latency_s_server_{n}"] for n in range(3)]
    assert row["mean_of_servers_s"] == pytest.approx(np.mean(servers))
    assert min(servers) < row["mean_latency_s"] < max(servers) and row["x"] == 1


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
        (link, gpus) for link in ("nic", "pairwise") for gpus in ("4", "8")
    }
    assert read_record(tmp_path / "fig8a_gpus.csv")["notes"]
    cell = {
        (r["h_ms"], r["gpus"], r["mbps"]): float(r["mean_latency_s"])
        for r in made(tmp_path, "fig8b_bandwidth")
        if r["link_model"] == "nic"
    }
    for (h, gpus, mbps), seconds in cell.items():
        if mbps == "200":
            assert cell[h, gpus, "1000"] < seconds
        if h == "1.5":
            assert cell["0.2", gpus, mbps] < seconds
    argv = ["--quick", "--episodes", "1", "--out", str(tmp_path)]
    assert placement_migration.main(argv) == 0
    assert len(rows_of(tmp_path / "fig7_migration.csv")) == 4 * 3 * placement_migration.LOOKS
    loads = {row["variant"]: row["expert_loads"] for row in made(tmp_path, "fig7_summary")}
    assert float(loads["kept"]) == 0 < float(loads["migrating"])
    assert float(loads["kept, planned for both phases"]) == 0
    known = placement_migration.both_phases()
    layers = known.sum(axis=2)  # every token takes 6 experts of each layer
    assert known.shape == (3, 26, 64) and (np.ptp(layers, axis=1) <= 64).all()
    assert layers.min() > 6 * placement_migration.EACH * (19 + 4)
