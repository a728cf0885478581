"""Constants of serverless serving: the laws, their files, and what the environments assume."""

import numpy as np
import pytest

from servegym.hardware_profiles.moe import load_moe
from servegym.hardware_profiles.serverless import (
    CARDS,
    GPU_PROFILES,
    GPUS,
    ORIGINS,
    SERVING,
    gpu_profile,
    memory_grids,
)


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
