"""Constants of serverless serving fitted to tables whose law is known."""

import csv
import math

import numpy as np
import pytest

from servegym._files import read_json
from servegym.hardware_profiles.build import fit_serverless


def write(path, header, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([header, *rows])
    return path


EXPERT = ("model", "threads", "tokens", "expert_params", "ms_min")


def expert_rows(noise=0.0, scale=1.0, seed=0):
    """A shape of 1e6 weights: 1 ms for one token, 2 + 0.1 n ms for more."""
    rng = np.random.default_rng(seed)
    rows = [("made-up", 1, 1, 10**6, scale)]
    for n in (2, 4, 8, 16, 32, 64):
        rows.append(("made-up", 1, n, 10**6, scale * (2 + 0.1 * n) * np.exp(noise * rng.normal())))
    return rows


@pytest.fixture
def data(tmp_path):
    """A folder of measurements with known laws behind them."""
    rng = np.random.default_rng(0)
    write(tmp_path / "local_cpu_expert/expert_ffn_ms.csv", EXPERT, expert_rows())
    threads = [
        (n, 1, 100 * (1.5 * math.exp(-n) + 0.4) / (1.5 * math.exp(-1) + 0.4))
        for n in (1, 2, 3, 4, 8, 16, 32)
    ]
    write(
        tmp_path / "moe_prefetch/x2_cpu_expert_cost.csv",
        ("threads", "experts_per_call", "us_p50"),
        threads,
    )
    starts = [
        (f"2026-{m:02d}-01", "python3.12", "zip", "x86_64", 256)
        + (" ".join(f"{v:.2f}" for v in 100 * rng.lognormal(0, 0.25, 40)),)
        for m in range(1, 13)
    ]
    write(
        tmp_path / "lambda_perf/lambda_cold_starts.csv",
        ("date", "runtime", "package", "arch", "memory_mb", "init_ms_samples"),
        starts,
    )
    write(
        tmp_path / "serverlessllm/load_times.csv",
        ("testbed", "mode", "model", "format", "loading_time_s"),
        [("a_1", "random", "facebook/opt-6.7b", "sllm", t) for t in (1.0, 2.0, 3.0)],
    )
    write(
        tmp_path / "serverless_pricing/prices.csv",
        ("provider", "item", "value", "unit", "tier_or_note"),
        [
            ("AWS Lambda x86_64", "memory-duration", 1.024e-5, "USD/GB-s", "us-east-1 and more"),
            ("AWS Lambda arm64", "memory-duration", 0.5e-5, "USD/GB-s", "us-east-1"),
            ("AWS Lambda", "requests", 0.2, "USD/million", "all"),
            ("Alibaba FC", "CU price", 2e-5, "USD/CU", "tier 1: to 100M"),
            ("Alibaba FC", "active vCPU", 1, "CU", ""),
            ("Alibaba FC", "memory", 0.25, "CU/GB-s", ""),
            ("Alibaba FC", "Tesla GPU active", 2.5, "CU/GB-s", ""),
            ("Alibaba FC", "Ada GPU active", 1.5, "CU/GB-s", ""),
            ("Alibaba FC", "invocations", 75, "CU/10k", ""),
        ],
    )
    return tmp_path


def test_fits_recover_the_truth(data, tmp_path):
    out = tmp_path / "constants.json"
    assert fit_serverless.main([str(data), "--out", str(out)]) == 0
    constants = read_json(out)
    expert, scaling = constants["cpu_expert"]["shapes"]["made-up"], constants["thread_scaling"]
    assert expert["one_token_s"] == pytest.approx(1e-3, rel=1e-4)
    assert expert["batch_floor_s"] + 10 * expert["per_token_s"] == pytest.approx(3e-3, rel=1e-3)
    assert expert["fit_error"]["left_out_one_by_one"]["max"] < 1e-3
    assert scaling["theta2_per_vcpu"] == pytest.approx(1.0, rel=1e-2)
    one = 1.5 * math.exp(-1) + 0.4
    assert scaling["theta1_relative"] == pytest.approx(1.5 / one, rel=1e-2)
    assert scaling["theta3_relative"] == pytest.approx(0.4 / one, rel=1e-2)
    start = constants["container_start"]["laws"]["zip-x86_64"]
    assert start["median_s"] == pytest.approx(0.1, rel=0.05)
    assert start["sigma"] == pytest.approx(0.25, rel=0.1)
    assert constants["model_load"]["rates"]["a-sllm"]["mb_per_s"] == pytest.approx(
        2 * 6_658_473_984 / 2**20 / 2, rel=1e-3
    )
    prices = constants["prices"]["values"]
    assert prices["aws_cpu_usd_per_mb_s"] == pytest.approx(1e-8)
    assert prices["alibaba_gpu_tesla_over_cpu"] == pytest.approx(2.0)
