"""The routing studies: the trainings that they find, and a table at smoke size."""

import json
from dataclasses import asdict

import pytest
import torch

from servegym.agents import sac_han, sac_rows
from servegym.agents.lib.checkpoint import write_checkpoint
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.papers.routing import load_sweeps
from servegym.experiments.papers.routing.claims import RETRAINED
from servegym.experiments.papers.routing.measuring import find_runs, shipped_runs

HET = "edge-6-heterogeneous"


def checkpoint(run, agent, *given, seed=1):
    """An untrained checkpoint as a training leaves one."""
    torch.manual_seed(seed)
    args = agent.Args(set=("rate=8", *given), seed=seed)
    if agent is sac_rows:
        args.rows = "experts"
    state = args.nodes if agent is sac_han else args.rows
    net = agent.Agent(state, True, RoutingSystem.from_kwargs())
    run.mkdir(parents=True)
    meta = {"agent": agent.__name__.rpartition(".")[2], "args": json.dumps(asdict(args))}
    write_checkpoint(net, meta, run / "last.safetensors")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed in (1, 2):
        checkpoint(folder / "graph" / f"sac_han_seed_{seed}", sac_han, seed=seed)
    checkpoint(folder / "rows" / "sac_rows_seed_1", sac_rows)
    blind = ('score_predictor="zero"', 'length_predictor="zero"')
    checkpoint(folder / "blind" / "sac_han_seed_1", sac_han, *blind)
    return folder


def test_finds_trainings(trained):
    found = find_runs(trained)
    assert sorted((run.label, run.seed) for run in found) == [
        ("baseline_rl", 1),
        ("sac_han", 1),
        ("sac_han", 2),
        (f"sac_han{RETRAINED}", 1),
    ]
    serve = {run.label: run.any_experts for run in found}
    assert serve == {"baseline_rl": False, "sac_han": True, f"sac_han{RETRAINED}": True}
    shipped = shipped_runs(("sac_han", "sac_rows"))
    assert {run.label for run in shipped} == {"sac_han (shipped)", "sac_rows (shipped)"}
    with pytest.raises(ValueError, match="routers"):
        shipped_runs(("rip",))
    with pytest.raises(ValueError, match="checkpoints"):
        find_runs(trained / "nowhere")


@pytest.mark.slow
def test_parts_of_the_time_from_end_to_end_add_up(tmp_path):
    argv = ["--quick", "--out", str(tmp_path), "--profiles", HET, "--routers", "sac_rows"]
    assert load_sweeps.main([*argv, "--figure", "fig10"]) == 0
    for row in read_rows(tmp_path / "fig10_end_to_end.csv"):
        parts = sum(row[part] for part in load_sweeps.PARTS)
        assert parts == pytest.approx(row["e2e_s"], rel=1e-3)
