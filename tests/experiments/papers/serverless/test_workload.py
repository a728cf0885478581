"""Serverless figures on routing, laws and starts: requests and starts by hand, files."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from servegym.baselines.serverless_moe.system import SPREADS, ServerlessSystem
from servegym.envs.serverless_moe.config import build_system
from servegym.envs.serverless_moe.kernel.cost import swap_s
from servegym.envs.workloads.activations import load_activations
from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.evaluation.tables import read_record
from servegym.experiments.papers.serverless import cold_start as serverless_coldstart
from servegym.experiments.papers.serverless import fits as serverless_fits
from servegym.experiments.papers.serverless import overhead as serverless_overhead
from servegym.experiments.papers.serverless import similarity as serverless_similarity
from servegym.experiments.papers.serverless import workload as serverless_workload
from servegym.experiments.papers.serverless.billing import recorded_request
from servegym.hardware_profiles.serverless import ThetaLaw

DEEPSEEK = "deepseek-v2-lite"


def made(main, tmp_path, stems, *argv):
    """Run a script at smoke size; the rows of its tables, after a look at the other files."""
    assert main(["--quick", "--out", str(tmp_path), *argv]) == 0
    for stem in stems:
        assert (tmp_path / f"{stem}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        record = read_record(tmp_path / f"{stem}.csv")
        assert record["command"].startswith("python -m servegym.experiments.papers.serverless.")
        assert record["quick"] and record["notes"]
    return [read_rows(tmp_path / f"{stem}.csv") for stem in stems]


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


def test_fig3(tmp_path):
    (rows,) = made(serverless_similarity.main, tmp_path, ["fig03_similarity"], "--episodes", "6")
    tenths = [r for r in rows if r["embedding"] == "token" and r["group"].startswith("tenth")]
    near = [r["similarity"] for r in tenths]
    assert len(near) == 10 and near == sorted(near)
    # The tenths hold all training prompts once: their mean is that of all pairs.
    book = load_activations("gpt-oss-20b")
    far = serverless_similarity.pair_divergences(book, book.rows("eval")[:6])
    parts = [len(x) for x in np.array_split(np.arange(far.shape[1]), 10)]
    values = [r["value"] for r in tenths]
    assert np.average(values, weights=parts) == pytest.approx(far.mean(), rel=1e-9)


@pytest.mark.slow
def test_fig6(tmp_path):
    (rows,) = made(serverless_fits.main, tmp_path, ["fig06_fits"])
    found = {(r["model"], r["part"], r["series"], r["x"]): r["value"] for r in rows}
    system = build_system(DEEPSEEK)
    assert found[DEEPSEEK, "memory in GB", "environment", 2] == pytest.approx(
        1e3 * float(system.expert_cpu_s(2048.0, 1)), rel=1e-9
    )
    assert found["gpt2-moe", "law", "environment", "theta2_per_gb"] == 11.8665
    one, many = (found[DEEPSEEK, "tokens on one vCPU", "measured, float32", n] for n in (1, 256))
    assert 0 < one < many


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


@pytest.mark.slow
def test_calculate(tmp_path):
    (rows,) = made(serverless_overhead.main, tmp_path, ["fig11_calculate"])
    ms = {(r["model"], r["step"]): r["ms"] for r in rows}
    assert 0 < ms[DEEPSEEK, "MMP"] < ms[DEEPSEEK, "decide (remoe_cost)"] < 5_000
    system = build_system(DEEPSEEK)
    assert ms[DEEPSEEK, "container start"] == 1e3 * system.container_start_s
    assert ("gpt-oss-20b", "predict (sps)") in ms and (DEEPSEEK, "predict (category)") in ms


def test_spreads_are_those_of_the_committed_table():
    committed = Path(serverless_workload.__file__).parents[2] / "results" / "serverless"
    for one in read_record(committed / "spreads.csv")["notes"]:
        taken = SPREADS.get(one["model"], SPREADS["default"])
        assert list(taken) == one["spreads"]
        assert ServerlessSystem.from_kwargs(model=one["model"]).load_spread == taken[0]


def test_expert_times_at_the_ends():
    book, system = load_activations(DEEPSEEK), build_system(DEEPSEEK)
    request = recorded_request(book, 5, 40, 30, 3e-4)
    shape = system.moe_layers, system.num_experts
    one = float(system.expert_cpu_s(5 * 1024.0, 1))
    wire = 2 * system.token_mb / system.bandwidth_mb_s
    swap = 2 * swap_s(system, system.top_k)
    _, none, slower = serverless_workload.expert_times(system, request, np.zeros(shape, bool), 5)
    assert none == pytest.approx(system.moe_layers * (6 * one + swap), rel=1e-9) and slower == 0
    prefill, every, slower = serverless_workload.expert_times(
        system, request, np.ones(shape, bool), 5
    )
    assert every == pytest.approx(system.moe_layers * (6 * (one + wire + 3e-4) + swap), rel=1e-9)
    assert slower == 1
    longhand = 0.0
    for layer in range(system.moe_layers):
        n = request.prefill_counts[layer]
        calls = sum(float(system.expert_cpu_s(5 * 1024.0, int(k))) + int(k) * wire for k in n if k)
        longhand += calls + 3e-4 + 2 * swap_s(system, 40)
    assert prefill == pytest.approx(longhand, rel=1e-9)


def test_nothing_is_remote_at_one_end_and_everything_at_the_other():
    rows = serverless_workload.remote_ratios(DEEPSEEK, (0.0, 1.0), 2)
    assert all(row["remote_is_slower"] == row["b"] for row in rows)
    # Nothing is remote at b = 0: neither the order nor the overhead matters.
    first = {r["decode_ms_per_token"] for r in rows if (r["b"], r["cores"]) == (0.0, 5)}
    assert len(first) == 1


def test_decoding_of_mix_takes_a_constant_time_a_token():
    rows = serverless_workload.stage_rows(DEEPSEEK, 1, [(16, 16), (128, 128)])
    assert {row["deployment"] for row in rows} == set(serverless_workload.DEPLOYMENTS)
    few, many = (r["decode_s"] for r in rows if (r["gpu"], r["deployment"]) == ("fused", "MIX"))
    assert many == pytest.approx(8 * few, rel=0.01)


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


def test_cold_starts_against_mix():
    rows = serverless_coldstart.cold_rows(DEEPSEEK, 1, (0.0, 1.0))
    default = {r["method"]: r for r in rows if (r["setting"], r["link"]) == ("default", "separate")}
    assert default["mix"]["over_mix"] == default["b = 0"]["over_mix"] == 1
    assert 0.5 < default["b = 0.5"]["over_mix"] < 0.6
    for row in rows:  # a mean of maxima
        assert row["cold_s"] >= max(row["main_s"], row["remote_s"]) - 1e-9
