"""Layers of experts: recomputed from the published tables, and laws with a known answer."""

import numpy as np
import pytest

from servegym.hardware_profiles.build.fit_moe import (
    L2_BYTES,
    MODELS,
    fit_layer,
    other_shape,
    small_call_law,
)
from servegym.hardware_profiles.load import data_path
from servegym.hardware_profiles.schema import read_json


# The derived layer goes through the fit of a timed one as well.
@pytest.mark.parametrize(
    "model",
    [m if m == "deepseek-v2-lite" else pytest.param(m, marks=pytest.mark.slow) for m in MODELS],
)
def test_layers_are_recomputed(model, measured):
    data = measured("aiconfigurator").parent
    for card in L2_BYTES:
        shipped = read_json(data_path(f"moe-{card}-{model}.json"))
        assert fit_layer(card, model, data) == shipped


def test_small_call_law_recovers_a_line_and_skips_cached_calls():
    model = MODELS["qwen3-30b-a3b"]
    size = model["expert_bytes"]
    times = {}
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 1024):
        active = min(128, 8 * tokens)
        cached = active * size <= 200e6
        times[tokens] = (1e-5 if cached else 2e-5 + 6e-6 * active) + 1e-9 * tokens
    base, read = small_call_law(times, model, 100e6, even=True)
    assert (base, read) == pytest.approx((2e-5, 6e-6), rel=5e-3)
    base, read = small_call_law(
        {1: 1e-5 + 2e-5, 32: 4e-5, 2: 1.0}, MODELS["mixtral-8x7b"], 1, False
    )
    assert base >= 0 and read > 0


def test_other_shape_is_exact_for_a_reading_and_a_working_layer():
    timed = MODELS["qwen3-30b-a3b"]
    wanted = MODELS["deepseek-v2-lite"]
    size = wanted["expert_bytes"] / timed["expert_bytes"]
    tokens = np.array([1.0, 4, 16, 64, 256, 1024, 4096])

    def seconds(model, scale):
        active = np.minimum(model["experts"], tokens * model["top_k"])
        return 1e-5 + active * 5e-6 * scale + tokens * model["top_k"] * scale * 1e-8

    predicted, law = other_shape(tokens, seconds(timed, 1.0), timed, (1e-5, 5e-6), wanted)
    np.testing.assert_allclose(predicted, seconds(wanted, size), rtol=1e-9)
    assert law == pytest.approx((1e-5, 5e-6 * size))
    same, _ = other_shape(tokens, seconds(timed, 1.0), timed, (1e-5, 5e-6), timed)
    np.testing.assert_allclose(same, seconds(timed, 1.0), rtol=1e-12)
