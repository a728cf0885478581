"""Serverless figures on routing, laws and starts: requests and starts by hand, files."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from servegym.baselines.serverless_moe.system import SPREADS, ServerlessSystem
from servegym.envs.serverless_moe.config import build_system
from servegym.envs.workloads.activations import load_activations
from servegym.experiments.evaluation.tables import read_record
from servegym.experiments.papers.serverless import cold_start as serverless_coldstart
from servegym.experiments.papers.serverless import fits as serverless_fits
from servegym.experiments.papers.serverless import workload as serverless_workload
from servegym.experiments.papers.serverless.billing import recorded_request
from servegym.hardware_profiles.serverless import ThetaLaw

DEEPSEEK = "deepseek-v2-lite"


def test_recorded_request_counts_tokens_one_by_one():
    book = load_activations(DEEPSEEK)
    prompt, n_in, n_out = 3, 200, 150
    request = recorded_request(book, prompt, n_in, n_out, 2e-4)
    bank = book.bank[book.bank_start[prompt] : book.bank_start[prompt + 1]]
    assert n_in > len(bank)  # so that it begins anew
    counts = np.zeros_like(request.prefill_counts)
    for i in range(n_in):
        for layer, mask in enumerate(bank[i % len(bank)].tolist()):
            for k in range(64):
                counts[layer, k] += mask >> k & 1
    assert (request.prefill_counts == counts).all()
    assert (request.decode_sets[0] == bank[n_in % len(bank)]).all()
    assert request.n_out == n_out and (request.trem_s == 2e-4).all()


@pytest.mark.parametrize("b", [0.0, 0.5, 1.0])
def test_starts_by_hand(b):
    system = build_system(DEEPSEEK)
    count = int(64 * b)
    remote = np.zeros((26, 64), bool)
    remote[:, :count] = True
    replicas = np.full(26, 3)
    own = serverless_coldstart.starts(system, remote, replicas)
    fixed = float(system.non_expert_mb.sum())
    main = 1.0 + (fixed + 26 * (64 - count) * 16.5) / system.load_mb_s
    assert own[0] == pytest.approx(main, rel=1e-9)
    assert own[1] == pytest.approx(1.0 + count * 16.5 / system.load_mb_s if count else 0.0)
    at_once = replace(system, load_shared=True)
    shared = serverless_coldstart.starts(at_once, remote, replicas)
    total = fixed + 26 * (64 - count) * 16.5 + 3 * 26 * count * 16.5
    assert shared[0] == pytest.approx(1.0 + total / system.load_mb_s, rel=1e-9)


def test_spreads_are_those_of_the_committed_table():
    committed = Path(serverless_workload.__file__).parents[2] / "results" / "serverless"
    for one in read_record(committed / "spreads.csv")["notes"]:
        taken = SPREADS.get(one["model"], SPREADS["default"])
        assert list(taken) == one["spreads"]
        assert ServerlessSystem.from_kwargs(model=one["model"]).load_spread == taken[0]


def test_fit_finds_the_law_that_made_the_points():
    law = ThetaLaw(6.86e-3, 2.4363, 0.2e-3)
    gb = np.linspace(1, 5, 9)
    points = [law.seconds(y) for y in gb]
    for found in (
        serverless_fits.fit_theta(gb, points),
        serverless_fits.fit_theta(gb, points, 2.4363),
    ):
        assert found.theta2_per_gb == pytest.approx(2.4363, rel=1e-4)
        assert found.theta1_s == pytest.approx(6.86e-3, rel=1e-3)
        assert found.theta3_s == pytest.approx(0.2e-3, rel=1e-3)
    held = serverless_fits.fit_theta(gb, points, 1.0)
    assert held.theta2_per_gb == 1.0
    assert max(abs(held.seconds(y) / p - 1) for y, p in zip(gb, points, strict=True)) > 0.05
