"""The routing studies at smoke size: tables, numbers that can be checked."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from servegym.agents import sac_han, sac_rows
from servegym.agents.lib.checkpoint import write_checkpoint
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.evaluation.stats import paired_difference
from servegym.experiments.evaluation.tables import read_record
from servegym.experiments.papers.routing import episodes as routing_episodes
from servegym.experiments.papers.routing import learning as routing_learning
from servegym.experiments.papers.routing import load_sweeps as routing_sweeps
from servegym.experiments.papers.routing import measuring as routing_measuring
from servegym.experiments.papers.routing import workload as routing_workload
from servegym.experiments.papers.routing.claims import RETRAINED
from servegym.experiments.papers.routing.measuring import find_runs

HET = "edge-6-heterogeneous"


def checkpoint(run, agent, *given, seed=1):
    """An untrained checkpoint as a training leaves one, in a folder with its arguments."""
    torch.manual_seed(seed)
    args = agent.Args(set=("rate=8", *given), seed=seed)
    if agent is sac_rows:
        args.rows = "experts"
    state = args.nodes if agent is sac_han else args.rows
    net = agent.Agent(state, True, RoutingSystem.from_kwargs())
    run.mkdir(parents=True)
    meta = {"agent": agent.__name__.rpartition(".")[2], "args": json.dumps(asdict(args))}
    write_checkpoint(net, meta, run / "last.safetensors")
    (run / "arguments.json").write_text(json.dumps(asdict(args)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed in (1, 2):
        checkpoint(folder / "graph" / f"sac_han_seed_{seed}", sac_han, seed=seed)
    checkpoint(folder / "graph" / "sac_han_shuffled_1", sac_han)
    checkpoint(folder / "rows" / "sac_rows_seed_1", sac_rows)
    blind = ('score_predictor="zero"', 'length_predictor="zero"')
    checkpoint(folder / "blind" / "sac_han_seed_1", sac_han, *blind)
    return folder


def test_finds_trainings_without_controls(trained):
    found = find_runs(trained)
    assert sorted((run.label, run.seed) for run in found) == [
        ("baseline_rl", 1),
        ("sac_han", 1),
        ("sac_han", 2),
        (f"sac_han{RETRAINED}", 1),
    ]
    serve = {run.label: run.any_experts for run in found}
    assert serve == {"baseline_rl": False, "sac_han": True, f"sac_han{RETRAINED}": True}
    shipped = routing_measuring.shipped_runs(("rpi", "sac_rows"))
    assert {run.label for run in shipped} == {"rpi (shipped)", "sac_rows (shipped)"}
    with pytest.raises(ValueError, match="routers"):
        routing_measuring.shipped_runs(("rip",))
    with pytest.raises(ValueError, match="checkpoints"):
        find_runs(trained / "nowhere")


def test_differences_to_the_heuristics_are_paired():
    options = routing_measuring.Options(quick=False, episodes=3)
    names = ("shortest_queue", "greedy_qos", "priced_greedy")
    at = {"point": "a", "_env": {"rate": 8.0, "episode_requests": 60}}
    found = routing_measuring.measure(options, at, names)
    by = {row["policy"]: row for row in found}
    for reference in ("greedy_qos", "priced_greedy"):
        assert by[reference][f"over_{reference}"] == by[reference][f"over_{reference}_high"] == 0
    played = {
        name: routing_measuring.play([name], 3, {"rate": 8.0, "episode_requests": 60})
        for name in names
    }
    qos = {name: np.array([row["avg_qos"] for row in part]) for name, part in played.items()}
    gain = paired_difference(qos["shortest_queue"], qos["greedy_qos"])
    row = by["shortest_queue"]
    assert [row[f"over_greedy_qos{end}"] for end in ("", "_low", "_high")] == pytest.approx(
        list(gain), abs=1e-6
    )


def test_workload_figures(tmp_path):
    assert routing_workload.main(["--quick", "--out", str(tmp_path)]) == 0
    rows = read_rows(tmp_path / "fig4_distributions.csv")
    share = {}
    for row in rows:
        key = row["model"], row["quantity"]
        share[key] = share.get(key, 0) + row["share"]
    assert len(share) == 12 and all(v == pytest.approx(1, abs=1e-4) for v in share.values())
    for stem in ("fig4_distributions", "fig5_interference", "fig8_trace"):
        assert (tmp_path / f"{stem}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        record = read_record(tmp_path / f"{stem}.csv")
        assert record["quick"] and record["notes"]
    assert {row["series"] for row in read_rows(tmp_path / "fig8_trace.csv")} == {
        "burstgpt",
        "poisson",
    }


@pytest.mark.slow
def test_sweep_with_trained_routers(tmp_path, trained, monkeypatch):
    monkeypatch.setattr(routing_sweeps, "RATES", (5.0, 8.0))
    argv = ["--quick", "--out", str(tmp_path), "--checkpoints", str(trained)]
    assert routing_sweeps.main([*argv, "--figure", "fig12", "--profiles", HET]) == 0
    rows = read_rows(tmp_path / "fig12_rate.csv")
    assert len(rows) == 2 * (len(routing_measuring.BASELINES) + 2)
    assert {r["policy"]: r["trainings"] for r in rows}["sac_han"] == 2
    # The same episodes for every policy: one ceiling at a rate.
    assert all(len({r["ceiling"] for r in rows if r["rate"] == v}) == 1 for v in (5, 8))
    record = read_record(tmp_path / "fig12_rate.csv")
    assert record["settings"]["trained_routers"]["sac_han"] == [1, 2]


def test_number_of_experts(tmp_path, trained, monkeypatch):
    monkeypatch.setattr(routing_sweeps, "BASELINES", ("shortest_queue",))
    argv = ["--quick", "--out", str(tmp_path), "--checkpoints", str(trained), "--episodes", "1"]
    assert routing_sweeps.main([*argv, "--figure", "fig11", "--profiles", HET]) == 0
    rows = read_rows(tmp_path / "fig11_experts.csv")
    assert {row["experts"] for row in rows} == {3, 12}
    for count in (3, 12):
        served = {row["policy"] for row in rows if row["experts"] == count}
        assert "sac_han" in served and "baseline_rl" not in served  # made for six experts


@pytest.mark.slow
def test_end_to_end_parts_add_up_and_the_long_run_agrees_with_the_evaluator(tmp_path):
    argv = ["--quick", "--out", str(tmp_path), "--profiles", HET, "--routers", "rpi"]
    assert routing_episodes.main(argv) == 0
    for row in read_rows(tmp_path / "fig10_end_to_end.csv"):
        parts = sum(row[part] for part in routing_episodes.PARTS)
        assert parts == pytest.approx(row["e2e_s"], rel=1e-3)
    kwargs = {"profiles": HET, "rate": 8.0, "episode_requests": 200}
    found = routing_episodes.long_run("greedy_qos", kwargs, 2, window_s=5.0)
    weight = found["requests"]
    from servegym.experiments.evaluation.evaluate import evaluate

    wanted = evaluate("servegym/LLMRouting-v1", ["greedy_qos"], 2, env_kwargs=kwargs)
    got = np.nansum(found["qos"] * weight) / weight.sum()
    assert got == pytest.approx(np.mean([row["avg_qos"] for row in wanted]), rel=1e-6)
    memory = np.nansum(found["memory_use"] * weight) / weight.sum()
    assert memory == pytest.approx(np.mean([row["memory_use"] for row in wanted]), rel=0.05)


@pytest.mark.slow
def test_learning_figures(tmp_path, trained, monkeypatch):
    monkeypatch.setattr("servegym.agents.lib.checkpoint.SHIPPED", tmp_path / "nothing")
    argv = ["--quick", "--out", str(tmp_path), "--profiles", HET, "--checkpoints", str(trained)]
    assert routing_learning.main([*argv, "--episodes", "1"]) == 0
    predictors = read_rows(tmp_path / "fig18_predictors.csv")
    assert len({row["predictors"] for row in predictors}) == 7
    for name in ("shortest_queue", "baseline_rl"):  # neither reads a prediction
        own = [row["qos"] for row in predictors if row["policy"] == name]
        assert len(own) == 7 and len(set(own)) == 1
    so = [row["predictors"] for row in predictors if row["policy"] == f"sac_han{RETRAINED}"]
    assert so == ["PS+PL", "ZS+ZL"]
    assert "sac_han" not in {row["policy"] for row in predictors}
    table = {row["component"]: row for row in read_rows(tmp_path / "table2_router.csv")}
    assert 10_000 < table["HAN"]["parameters"] < 60_000
    one = table["one decision"]
    assert 0 < one["p50_ms"] <= one["p99_ms"]
