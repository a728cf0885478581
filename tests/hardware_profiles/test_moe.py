"""Layer profiles: schema, laws, the domain, bad files."""

import copy
import csv
import warnings

import numpy as np
import pytest

from servegym.hardware_profiles import MoeLayer, load_moe
from servegym.hardware_profiles.build.fit_moe import (
    L2_BYTES,
    MODELS,
    PROFILED_KERNELS,
)
from servegym.hardware_profiles.law import WARNED_PROFILES
from servegym.hardware_profiles.load import data_path
from servegym.hardware_profiles.schema import read_json

NAME = "rtxpro6000-qwen3-30b-a3b"
NAMES = [f"{card}-{model}" for card in L2_BYTES for model in MODELS]


@pytest.fixture
def raw():
    return load_moe(NAME).to_dict()


@pytest.mark.parametrize("name", NAMES)
def test_shipped_layer_obeys_schema_and_round_trips(name, tmp_path):
    jsonschema = pytest.importorskip("jsonschema")
    schema = read_json(data_path("schema-moe-layer.json"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(read_json(data_path(f"moe-{name}.json")), schema)
    layer = load_moe(name)
    layer.save(tmp_path / "copy.json")
    assert load_moe(tmp_path / "copy.json").to_dict() == layer.to_dict()
    assert [p.name for p in tmp_path.iterdir()] == ["copy.json"]
    assert layer.kind == ("derived" if "deepseek" in name else "fitted")
    assert not layer.layer_times_s.flags.writeable


@pytest.mark.parametrize("name", NAMES)
def test_times_respect_the_card(name):
    layer = load_moe(name)
    bandwidth = layer.device["memory_bandwidth_bytes_per_s"]
    read = layer.model["expert_bytes"] / bandwidth
    assert 0.85 * read < layer.expert_read_s < 2.0 * read
    assert layer.expert_s(1) >= layer.expert_read_s
    # One token reads the weights of top_k experts, many read those of all.
    top_k, experts = layer.model["top_k"], layer.model["experts"]
    assert layer.layer_s(1) > 0.85 * top_k * read
    assert layer.layer_s(256) > 0.85 * experts * read
    flop = 6 * layer.model["hidden_size"] * layer.model["expert_intermediate_size"]
    work = 4096 * flop / layer.device["tensor_flop_per_s"]
    assert work < layer.expert_s(4096) < 5 * work
    assert layer.layer_s(4096) > top_k * work


def test_share_and_group_are_parts_of_the_layer():
    layer = load_moe(NAME)
    experts, top_k = layer.model["experts"], layer.model["top_k"]
    for tokens in (64, 512, 4096):
        each = tokens * top_k / experts
        assert layer.group_s([each] * experts) == pytest.approx(layer.layer_s(tokens), rel=1e-9)
    assert layer.group_s([]) == layer.group_s([0, 0]) == 0.0
    assert layer.expert_s(0) == layer.share_s(0) == layer.layer_s(0) == 0.0
    one = layer.group_s([1])
    assert one == pytest.approx(layer.base_s + layer.share_s(1))
    assert layer.group_s([1, 1, 0]) == pytest.approx(layer.base_s + 2 * layer.share_s(1))


def test_layer_agrees_with_another_profiler_of_the_card(measured):
    layer = load_moe(NAME)
    whole, small = [], []
    with measured(PROFILED_KERNELS, "moe.csv").open() as file:
        for row in csv.DictReader(file):
            tokens, active = int(row["tokens"]), int(row["activated_experts"])
            seconds = 1e-6 * float(row["time_us"])
            if active == 128:
                whole.append(layer.layer_s(tokens) / seconds - 1)
            elif tokens <= 128 and active >= 16:
                guess = layer.group_s([tokens * 8 / active] * active)
                small.append(guess / seconds - 1)
    assert np.median(np.abs(whole)) < 0.03 and np.abs(whole).max() < 0.3
    assert np.median(np.abs(small)) < 0.1


def test_check_domain_warns_once_and_names_the_domain():
    layer = load_moe("h100-mixtral-8x7b")
    WARNED_PROFILES.discard("moe-h100-mixtral-8x7b")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert layer.check_domain(expert_tokens=4096, layer_tokens=16384)
    with pytest.warns(UserWarning, match=r"layer_tokens <= 16384\): layer_tokens 20000 > 16384"):
        assert not layer.check_domain(layer_tokens=20000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not layer.check_domain(layer_tokens=20000)


_GONE = object()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "servegym-hardware-profile/1", "field 'format'"),
        (("model", "expert_bytes"), 1000, "must be 3 x hidden_size"),
        (("model", "top_k"), 200, "must be <= 128 experts"),
        (("model", "experts"), _GONE, "'model.experts': missing"),
        (("law", "layer_s", 2), float("nan"), r"'law.layer_s\[2\]': got nan"),
        (("law", "layer_s", 2), 850.0, "are the times in milliseconds or microseconds"),
        (("law", "layer_s", -1), 1e-5, "falls at the end of layer_tokens"),
        (("law", "expert_s"), [1e-3], "has 1 entries; must have"),
        (("law", "expert_s", 0), 1e-8, "reading an expert takes at least"),
        (("law", "layer_tokens", 3), 2, "must exceed"),
        (("fit_error", "layer_random_third", "max"), _GONE, "layer_random_third.max': missing"),
    ],
)
def test_bad_field_is_refused(raw, path, value, message):
    bad = copy.deepcopy(raw)
    where = bad
    for key in path[:-1]:
        where = where[key]
    if value is _GONE:
        del where[path[-1]]
    else:
        where[path[-1]] = value
    with pytest.raises(ValueError, match=message) as caught:
        MoeLayer.from_dict(bad, "bad.json")
    assert "bad.json" in str(caught.value)
