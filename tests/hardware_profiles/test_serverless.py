"""Constants of serverless serving: the laws, their files, and what the environments assume."""

import json
import math

import numpy as np
import pytest

from servegym.hardware_profiles import serverless
from servegym.hardware_profiles.moe import load_moe
from servegym.hardware_profiles.schema import KINDS
from servegym.hardware_profiles.serverless import (
    CARDS,
    GPU_PROFILES,
    GPUS,
    ORIGINS,
    SERVING,
    ServingConstants,
    gpu_profile,
    load_constants,
    memory_grids,
)


def test_shipped_constants():
    constants = load_constants()
    experts = constants["cpu_expert"]["shapes"]
    assert {"deepseek-v2-lite", "mixtral-8x7b", "gpt2-moe"} <= set(experts)
    for expert in experts.values():
        assert 0.5e-3 < expert["one_token_s"] < 50e-3 and expert["per_token_s"] > 0.0
    prices = constants["prices"]["values"]
    assert prices["aws_cpu_usd_per_mb_s"] == pytest.approx(1.6276e-8, rel=1e-4)
    assert prices["alibaba_gpu_tesla_over_cpu"] == pytest.approx(1.826, rel=1e-3)
    assert 2000 < constants["model_load"]["rates"]["a5000-safetensors"]["mb_per_s"] < 3000
    assert 0.05 < constants["container_start"]["laws"]["zip-x86_64"]["median_s"] < 0.2
    for part in ("cpu_expert", "thread_scaling", "container_start", "model_load", "prices"):
        assert constants[part]["kind"] in KINDS
        assert {"source", "licence"} <= set(constants[part]["provenance"])


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


DEEPSEEK = {"non_expert_mb": 63.0, "expert_mb": 16.5, "parameters": 8_650_752.0}
DEEPSEEK |= {"experts": 64, "top_k": 6}


@pytest.mark.parametrize(("name", "ms"), [("a100", 0.078), ("h100", 0.059), ("l40s", 0.158)])
def test_cards_by_the_laws_of_the_package(name, ms):
    card = gpu_profile(name, "deepseek-v2-lite", **DEEPSEEK)
    assert card.kind == "derived" and card.experts_table is not None
    assert card.experts_base_s == pytest.approx(1e-3 * ms, rel=0.02)
    law = load_moe(f"{CARDS[name]}-deepseek-v2-lite")
    assert card.experts_table == (law.layer_tokens, law.layer_times_s)
    # Reading the non-expert weights at the card's peak rate takes at least so long.
    peak = law.device["memory_bandwidth_bytes_per_s"]
    assert 63.0 * 2**20 / peak < card.layer_base_s < 3 * 63.0 * 2**20 / peak
    # A model without a law: the same sizes come near the law, others go by their bytes.
    other = gpu_profile(name, "other", **DEEPSEEK)
    assert other.experts_table is not None
    tokens = law.layer_tokens[law.layer_tokens <= 1024]
    found = np.interp(tokens, *other.experts_table)
    assert found == pytest.approx(law.layer_times_s[: len(tokens)], rel=0.5)
    assert found[0] == pytest.approx(card.experts_base_s, rel=0.01)
    half = gpu_profile(name, "other", **(DEEPSEEK | {"expert_mb": 8.25}))
    assert half.experts_base_s - law.base_s == pytest.approx(
        0.5 * (other.experts_base_s - law.base_s), rel=1e-9
    )


def test_gpu_profiles_are_chosen_by_name():
    assert GPUS == ("eager", "fused", "a100", "h100", "l40s")
    assert gpu_profile("eager", "any", **DEEPSEEK) is GPU_PROFILES["eager"]
    with pytest.raises(ValueError, match="h100"):
        gpu_profile("h1000", "any", **DEEPSEEK)


def test_what_was_measured_is_read_from_the_file_and_has_no_second_copy(monkeypatch):
    measured = load_constants()
    assert SERVING.load_mb_s == pytest.approx(
        measured["model_load"]["rates"]["a5000-safetensors"]["mb_per_s"], rel=0.02
    )
    assert SERVING.price_cpu_usd_mb_s == pytest.approx(1.6276e-8, rel=1e-12)
    assert SERVING.theta2_per_gb("gpt2-moe") == 11.8665
    assert SERVING.theta2_per_gb("deepseek-v2-lite") == SERVING.theta2_per_gb("other") == 2.4363
    one = SERVING.expert_theta1_s * math.exp(-2.4363) + SERVING.expert_theta3_s
    assert one == pytest.approx(0.80e-3, rel=1e-3)
    raw = json.loads(json.dumps(measured))
    raw["prices"]["values"]["aws_cpu_usd_per_mb_s"] = 3e-8
    raw["model_load"]["rates"]["a5000-safetensors"]["mb_per_s"] = 5234.0
    raw["thread_scaling"]["paper_theta2_per_gb"]["gpt2-moe"] = 7.0
    monkeypatch.setattr(serverless, "load_constants", lambda: raw)
    changed = ServingConstants()
    assert (changed.price_cpu_usd_mb_s, changed.load_mb_s) == (3e-8, 5200.0)
    assert changed.theta2_per_gb("gpt2-moe") == 7.0
