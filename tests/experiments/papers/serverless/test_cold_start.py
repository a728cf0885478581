"""Cold starts by hand, and the requests that walk through a recording."""

from pathlib import Path

import numpy as np
import pytest

from servegym.baselines.serverless_moe.system import SPREADS, ServerlessSystem
from servegym.envs.serverless_moe.config import build_system
from servegym.envs.workloads.activations import load_activations
from servegym.experiments.evaluation.tables import read_record
from servegym.experiments.papers.serverless import cold_start as serverless_coldstart
from servegym.experiments.papers.serverless.setting import recorded_request

DEEPSEEK = "deepseek-v2-lite"


def test_recorded_request_counts_tokens_one_by_one():
    book = load_activations(DEEPSEEK)
    prompt, n_in, n_out = 3, 200, 150
    request = recorded_request(book, prompt, n_in, n_out)
    bank = book.bank[book.bank_start[prompt] : book.bank_start[prompt + 1]]
    assert n_in > len(bank)  # so that it begins anew
    counts = np.zeros_like(request.prefill_counts)
    for i in range(n_in):
        for layer, mask in enumerate(bank[i % len(bank)].tolist()):
            for k in range(64):
                counts[layer, k] += mask >> k & 1
    assert (request.prefill_counts == counts).all()
    assert (request.decode_sets[0] == bank[n_in % len(bank)]).all()
    assert request.n_out == n_out and (request.trem_s == 3e-4).all()


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
