"""Constants of serverless serving: the laws, their files, and what the environments assume."""

import numpy as np
import pytest

from servegym.hardware_profiles.moe import load_moe
from servegym.hardware_profiles.serverless import (
    CARDS,
    FEES,
    GPU_PROFILES,
    GPUS,
    LOAD_MB_S,
    PRICE_CPU_USD_MB_S,
    expert_law,
    gpu_profile,
    load_constants,
    memory_grids,
)


def test_constants_are_those_of_the_file():
    measured = load_constants()
    prices = measured["prices"]["values"]
    paper = measured["thread_scaling"]["paper_theta2_per_gb"]
    rate = measured["model_load"]["rates"]["a5000-safetensors"]["mb_per_s"]
    assert pytest.approx(rate, rel=0.02) == LOAD_MB_S
    assert pytest.approx(prices["aws_cpu_usd_per_mb_s"], rel=1e-4) == PRICE_CPU_USD_MB_S
    for model, theta2 in paper.items():
        assert expert_law(model, 1e6)[1] == theta2
    for platform in ("aws", "alibaba"):
        (fees,) = (FEES[name] for name in FEES if name.startswith(platform))
        assert fees.invocation_usd == prices[f"{platform}_request_usd"]
    assert memory_grids("gpt-oss-20b") == memory_grids("deepseek-v2-lite")


DEEPSEEK = {"non_expert_mb": 63.0, "expert_mb": 16.5, "parameters": 8_650_752.0}
DEEPSEEK |= {"experts": 64, "top_k": 6}


@pytest.mark.parametrize(("name", "ms"), [("a100", 0.078), ("h100", 0.059), ("l40s", 0.158)])
def test_cards_by_the_laws_of_the_package(name, ms):
    card = gpu_profile(name, "deepseek-v2-lite", **DEEPSEEK)
    assert card.experts_table is not None
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
