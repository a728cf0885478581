"""The table of SAC-HAN with and without labels, from untrained checkpoints."""

import csv

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tyro")

from servegym.agents import sac_han  # noqa: E402
from servegym.baselines.llm_routing.system import RoutingSystem  # noqa: E402
from servegym.experiments.figures.beyond.routing import labels_factorial  # noqa: E402
from servegym.experiments.figures.routing.training_runs import select  # noqa: E402
from servegym.experiments.tables import read_record  # noqa: E402


def test_every_cell_has_its_gains_over_both_heuristics(tmp_path):
    cells = {"labels": 2, "sac": 1}
    for run in select(["labels_labels_het4-11", "labels_sac_het4-11"]):
        if run.seed <= cells[run.variant]:
            torch.manual_seed(run.seed)
            args = sac_han.Args(**run.arguments, seed=run.seed)
            net = sac_han.Agent(args, RoutingSystem.from_kwargs(**sac_han.ENV))
            path = tmp_path / "runs" / run.name / "best.safetensors"
            path.parent.mkdir(parents=True)
            for name in ("best", "last"):
                sac_han.save_policy(net, args, path.with_stem(name))
    argv = ["--quick", "--out", str(tmp_path), "--checkpoints", str(tmp_path / "runs")]
    argv += ["--episodes", "2"]
    assert labels_factorial.main(argv) == 0
    rows = list(csv.DictReader(open(tmp_path / "labels_factorial.csv")))
    found = {(float(row["rate"]), row["policy"]): row for row in rows}
    assert len(found) == len(rows) == 8
    for (rate, name), row in found.items():
        assert int(row["trainings"]) == cells.get(name, 0)
        for heuristic in labels_factorial.HEURISTICS:
            gap = float(row["qos"]) - float(found[rate, heuristic]["qos"])
            assert float(row[f"over_{heuristic}"]) == pytest.approx(gap, abs=2e-6)
    for one in read_record(tmp_path / "labels_factorial.csv")["notes"]:
        row = found[one["rate"], one["policy"]]
        low, high = (float(row[f"over_{one['rival']}_{end}"]) for end in ("low", "high"))
        verdict = "above" if low > 0 else "below" if high < 0 else "not distinguished from"
        assert one["verdict"] == verdict
