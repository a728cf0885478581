"""Layers of experts: times that a card can reach."""

import numpy as np
import pytest

from servegym.hardware_profiles import list_moe_layers, load_moe


@pytest.mark.parametrize("name", list_moe_layers())
def test_a_shipped_layer_respects_the_card(name):
    layer = load_moe(name)
    assert layer.name == name and not layer.layer_times_s.flags.writeable
    assert layer.kind == ("derived" if "deepseek" in name else "fitted")
    assert (np.diff(layer.layer_tokens) > 0).all()
    read = layer.model["expert_bytes"] / layer.device["memory_bandwidth_bytes_per_s"]
    assert 0.85 * read < layer.expert_read_s < 2.0 * read
    # One token reads the weights of top_k experts, many read those of all.
    top_k, experts = layer.model["top_k"], layer.model["experts"]
    few, many, most = np.interp([1, 256, 4096], layer.layer_tokens, layer.layer_times_s)
    assert few > 0.85 * top_k * read and many > 0.85 * experts * read
    flop = 6 * layer.model["hidden_size"] * layer.model["expert_intermediate_size"]
    assert most > 4096 * top_k * flop / layer.device["tensor_flop_per_s"]


def test_an_unknown_layer_is_refused():
    with pytest.raises(ValueError, match="did you mean 'h100-mixtral-8x7b'"):
        load_moe("h100-mixtral-8x7")
