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
    shipped = routing_measuring.shipped_runs(("sac_han", "sac_rows"))
    assert {run.label for run in shipped} == {"sac_han (shipped)", "sac_rows (shipped)"}
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
def test_end_to_end_parts_add_up_and_the_long_run_agrees_with_the_evaluator(tmp_path):
    argv = ["--quick", "--out", str(tmp_path), "--profiles", HET, "--routers", "sac_rows"]
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
