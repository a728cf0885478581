"""Constants of serverless serving: the laws, the fits on known truth, and refusals."""

import csv
import json
import math

import numpy as np
import pytest

from servegym.hardware_profiles import serverless
from servegym.hardware_profiles.build import fit_serverless
from servegym.hardware_profiles.serverless import (
    GPU_PROFILES,
    ORIGINS,
    SERVING,
    ServingConstants,
    load_constants,
    memory_grids,
)


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


def test_shipped_constants():
    constants = load_constants()
    assert {"deepseek-v2-lite", "mixtral-8x7b", "gpt2-moe"} <= set(constants.experts)
    expert = constants.expert("deepseek-v2-lite")
    assert 0.5e-3 < expert.seconds(1) < 5e-3
    assert expert.seconds(0) == 0.0
    assert expert.seconds(1) == pytest.approx(expert.one_token_s, rel=1e-4)
    for vcpus in (1, 2, 4, 16):
        times = [expert.seconds(n, vcpus) for n in (1, 2, 16, 256)]
        assert times == sorted(times)
    assert expert.seconds(64, 1) > expert.seconds(64, 4) > expert.theta.theta3_s
    assert constants.prices["aws_cpu_usd_per_mb_s"] == pytest.approx(1.6276e-8, rel=1e-4)
    assert constants.prices["alibaba_gpu_tesla_over_cpu"] == pytest.approx(1.826, rel=1e-3)
    assert 2000 < constants.load_mb_per_s["a5000-safetensors"] < 3000
    assert constants.load_s(2600.0, "a5000-safetensors") == pytest.approx(1.0, rel=0.1)
    assert 0.05 < constants.container_start["zip-x86_64"].mean_s < 0.2
    for part in ("cpu_expert", "thread_scaling", "container_start", "model_load", "prices"):
        assert {"source", "licence"} <= set(constants.raw[part]["provenance"])


def test_start_law_draws_its_own_median():
    law = load_constants().container_start["image-x86_64"]
    draws = law.sample(np.random.default_rng(0), 20_000)
    assert np.median(draws) == pytest.approx(law.median_s, rel=0.02)
    assert draws.mean() == pytest.approx(law.mean_s, rel=0.02)


def test_fits_recover_the_truth(data, tmp_path):
    out = tmp_path / "constants.json"
    assert fit_serverless.main([str(data), "--out", str(out)]) == 0
    constants = load_constants(out)
    expert = constants.expert("made-up")
    assert expert.seconds(1) == pytest.approx(1e-3, rel=1e-4)
    assert expert.seconds(10) == pytest.approx(3e-3, rel=1e-3)
    assert expert.fit_error["left_out_one_by_one"]["max"] < 1e-3
    assert expert.theta.theta2_per_gb == pytest.approx(1.0, rel=1e-2)
    one = 1.5 * math.exp(-1) + 0.4
    assert expert.seconds(1, 4) == pytest.approx(1e-3 * (1.5 * math.exp(-4) + 0.4) / one, rel=1e-2)
    start = constants.container_start["zip-x86_64"]
    assert start.median_s == pytest.approx(0.1, rel=0.05)
    assert start.sigma == pytest.approx(0.25, rel=0.1)
    assert constants.load_mb_per_s["a-sllm"] == pytest.approx(
        2 * 6_658_473_984 / 2**20 / 2, rel=1e-3
    )
    assert constants.prices["aws_cpu_usd_per_mb_s"] == pytest.approx(1e-8)
    assert constants.prices["alibaba_gpu_tesla_over_cpu"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (expert_rows(scale=1e-3), "ms_min.*milliseconds"),  # seconds
        (expert_rows(scale=1e6), "ms_min.*milliseconds"),  # nanoseconds
        (expert_rows()[:3], "only 3 rows"),
        (expert_rows()[1:], "tokens"),
        ([*expert_rows()[:-1], ("made-up", 1, 64, 10**6, "nan")], "ms_min.*nan"),
        ([*expert_rows()[:-1], ("made-up", 1, -4, 10**6, 1.0)], "tokens.*-4"),
        (expert_rows(noise=2.0, seed=1), "R2"),
    ],
)
def test_bad_expert_tables_are_refused(data, rows, words):
    path = write(data / "local_cpu_expert/expert_ffn_ms.csv", EXPERT, rows)
    with pytest.raises(ValueError, match=words) as caught:
        fit_serverless.fit_experts(path)
    assert "expert_ffn_ms.csv" in str(caught.value)


def test_a_missing_column_is_named(data):
    path = write(data / "x.csv", EXPERT[:-1], [row[:-1] for row in expert_rows()])
    with pytest.raises(ValueError, match=r"x\.csv:1: field 'ms_min'"):
        fit_serverless.fit_experts(path)


def test_other_bad_tables_are_refused(data):
    threads = data / "moe_prefetch/x2_cpu_expert_cost.csv"
    rng = np.random.default_rng(3)
    write(
        threads,
        ("threads", "experts_per_call", "us_p50"),
        [(n, 1, 100 * rng.lognormal(0, 1)) for n in range(1, 12)],
    )
    with pytest.raises(ValueError, match="R2"):
        fit_serverless.fit_threads(threads)
    starts = data / "lambda_perf/lambda_cold_starts.csv"
    text = starts.read_text()
    starts.write_text(text.replace("python3.12", "cobol"))
    with pytest.raises(ValueError, match="Python"):
        fit_serverless.fit_starts(starts)
    loads = data / "serverlessllm/load_times.csv"
    loads.write_text(loads.read_text().replace("1.0", "1060.0"))
    with pytest.raises(ValueError, match="loading_time_s.*seconds"):
        fit_serverless.fit_loads(loads)
    prices = data / "serverless_pricing/prices.csv"
    prices.write_text(prices.read_text().replace("CU price", "CU"))
    with pytest.raises(ValueError, match="CU price"):
        fit_serverless.read_prices(prices)
    with pytest.raises(ValueError, match="R2"):
        fit_serverless.main([str(data), "--out", str(data / "no.json")])
    assert not (data / "no.json").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(format="other"), "format"),
        (lambda d: d.pop("prices"), "prices"),
        (lambda d: d["cpu_expert"].update(kind="guessed"), "cpu_expert.kind"),
        (lambda d: d["cpu_expert"]["provenance"].pop("licence"), "provenance.licence"),
        (
            lambda d: d["cpu_expert"]["shapes"]["gpt2-moe"].update(one_token_s=978.0),
            "gpt2-moe.one_token_s.*milliseconds",
        ),
        (
            lambda d: d["cpu_expert"]["shapes"]["gpt2-moe"].pop("per_token_s"),
            "gpt2-moe.per_token_s",
        ),
        (lambda d: d["thread_scaling"].update(theta2_per_vcpu=-1.0), "theta2_per_vcpu"),
    ],
)
def test_a_broken_file_is_refused(tmp_path, change, words):
    content = json.loads(json.dumps(load_constants().raw))
    change(content)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=words) as caught:
        load_constants(path)
    assert "mine.json" in str(caught.value)


def test_bad_arguments_are_refused():
    constants = load_constants()
    with pytest.raises(ValueError, match="deepseek-v2-lite"):
        constants.expert("deepseek-v2")
    with pytest.raises(ValueError, match="a5000-safetensors"):
        constants.load_s(1.0, "a5000-safetensor")
    with pytest.raises(ValueError, match="tokens"):
        constants.expert("gpt2-moe").seconds(-1)
    with pytest.raises(ValueError, match="vcpus"):
        constants.expert("gpt2-moe").seconds(1, 0.0)


def test_every_constant_of_the_environments_says_where_it_is_from():
    for name, said in SERVING.provenance().items():
        kind, _, source = said.partition(": ")
        assert kind in ORIGINS and len(source) > 5, name
    for profile in GPU_PROFILES.values():
        assert profile.kind in ORIGINS and profile.source
    assert memory_grids("deepseek-v2-lite")[:2] == (
        (1000.0, 40000.0, 100.0),
        (1000.0, 5000.0, 100.0),
    )
    assert memory_grids("gpt-oss-20b")[:2] == memory_grids("deepseek-v2-lite")[:2]
    assert memory_grids("gpt-oss-20b")[2].startswith("chosen")


def test_what_was_measured_is_read_from_the_file_and_has_no_second_copy(monkeypatch):
    measured = load_constants()
    assert pytest.approx(measured.load_mb_per_s["a5000-safetensors"], rel=0.02) == SERVING.load_mb_s
    assert SERVING.price_cpu_usd_mb_s == pytest.approx(1.6276e-8, rel=1e-12)
    assert SERVING.theta2_per_gb("gpt2-moe") == 11.8665
    assert SERVING.theta2_per_gb("deepseek-v2-lite") == SERVING.theta2_per_gb("other") == 2.4363
    one = SERVING.expert_theta1_s * math.exp(-2.4363) + SERVING.expert_theta3_s
    assert one == pytest.approx(0.80e-3, rel=1e-3)
    raw = json.loads(json.dumps(measured.raw))
    raw["prices"]["values"]["aws_cpu_usd_per_mb_s"] = 3e-8
    raw["model_load"]["rates"]["a5000-safetensors"]["mb_per_s"] = 5234.0
    raw["thread_scaling"]["paper_theta2_per_gb"]["gpt2-moe"] = 7.0
    other = serverless.parse_constants(raw, "other")
    monkeypatch.setattr(serverless, "load_constants", lambda: other)
    changed = ServingConstants()
    assert (changed.price_cpu_usd_mb_s, changed.load_mb_s) == (3e-8, 5200.0)
    assert changed.theta2_per_gb("gpt2-moe") == 7.0
