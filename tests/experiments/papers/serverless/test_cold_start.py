"""Cold starts by hand, and the planners' spreads."""

from pathlib import Path

import pytest

from servegym.baselines.serverless_moe.system import SPREADS, ServerlessSystem
from servegym.envs.serverless_moe.config import build_system
from servegym.experiments.evaluation.tables import read_record
from servegym.experiments.papers.serverless import cold_start as serverless_coldstart

DEEPSEEK = "deepseek-v2-lite"


def test_rows_of_a_model():
    system, rows = build_system(DEEPSEEK), serverless_coldstart.cold_rows(DEEPSEEK, 1)
    by = {(row["link"], row["method"]): row for row in rows}
    weights = float(system.non_expert_mb.sum()) + 26 * 64 * 16.5
    assert by["separate", "mix"]["cold_s"] == pytest.approx(1 + weights / system.load_mb_s)
    own, shared = by["separate", "remoe_cost"], by["shared", "remoe_cost"]
    remote = 26 * round(64 * own["b"]) * 16.5
    assert own["main_s"] == pytest.approx(1 + (weights - remote) / system.load_mb_s)
    assert own["remote_s"] == pytest.approx(1 + remote / 26 / system.load_mb_s)
    assert own["cold_s"] == max(own["main_s"], own["remote_s"])
    # Replicas read the weights of a layer once more each.
    assert shared["main_s"] == shared["remote_s"] >= 1 + weights / system.load_mb_s


def test_spreads_are_those_of_the_committed_table():
    committed = Path(serverless_coldstart.__file__).parents[2] / "results" / "serverless"
    for one in read_record(committed / "spreads.csv")["notes"]:
        taken = SPREADS.get(one["model"], SPREADS["default"])
        assert list(taken) == one["spreads"]
        assert ServerlessSystem.from_kwargs(model=one["model"]).load_spread == taken[0]
