"""Layers of experts, recomputed from the published tables."""

import pytest

from servegym._files import read_json
from servegym.hardware_profiles.build.fit_moe import L2_BYTES, MODELS, fit_layer
from servegym.hardware_profiles.load import data_path


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
