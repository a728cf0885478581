"""Model configs: published sizes, architectures, bad input."""

import json

import pytest

from servegym.hardware_profiles.fleet import served_models
from servegym.hardware_profiles.load import data_path
from servegym.hardware_profiles.model_config import (
    ARCHITECTURES,
    list_models,
    model_shape,
    parse_config,
)

# Parameter counts that the model cards' weights have.
PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_419_200,
    "mixtral-8x7b": 46_702_792_704,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "phi-3.5-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "gemma-7b": 8_537_680_896,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_published_parameters(name, parameters):
    assert model_shape(name).parameters == parameters


@pytest.mark.parametrize("name", served_models())
def test_the_fleets_models(name):
    facts, shape = served_models()[name], model_shape(name)
    # The catalog counts Falcon's head apart from its embedding; the config ties them.
    own_head = shape.vocabulary * shape.hidden if "falcon" in name else 0
    assert shape.parameters + own_head == facts["parameters"]
    for theirs, ours in (
        ("layers", shape.layers),
        ("hidden_size", shape.hidden),
        ("attention_heads", shape.heads),
        ("kv_heads", shape.kv_heads),
        ("head_size", shape.head_size),
    ):
        assert facts[theirs] == ours


def test_every_architecture_ships():
    found = {model_shape(name).architecture for name in list_models()}
    assert found == set(ARCHITECTURES)


def test_weights_by_format():
    dense = model_shape("llama-3.1-8b")
    assert dense.weight_bytes("bf16") == 2 * dense.parameters
    products = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    assert dense.weight_bytes("fp8") == 2 * dense.parameters - products
    # The published checkpoint of gpt-oss-20b takes 13.76 GB.
    assert model_shape("gpt-oss-20b").weight_bytes("bf16") == pytest.approx(13.76e9, rel=1e-3)


def test_sliding_windows():
    assert model_shape("gpt-oss-20b").windowed_layers == 12
    old = model_shape("mistral-7b-v0.1")
    assert (old.window, old.windowed_layers) == (4096, 32)
    # A window no shorter than the longest prompt, or one that is switched off, is none.
    assert model_shape("phi-3.5-mini").window is None
    assert model_shape("qwen2.5-7b").window is None


def _config(**changes):
    config = json.loads((data_path("models") / "llama-3.1-8b.json").read_text())
    config |= changes
    return {key: value for key, value in config.items() if value is not _config}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCasualLM"]}, "did you mean 'LlamaForCausalLM'"),
        ({"architectures": ["DeepseekV2ForCausalLM"]}, "'architectures': architecture: got"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "'hidden_size': got 4096; latent attention"),
        ({"architectures": ["Gemma2ForCausalLM"]}, r"got 'Gemma2ForCausalLM' \(allowed"),
        ({"architectures": _config}, "field 'architectures': missing"),
        ({"architectures": []}, "must be a list of one name"),
        ({"hidden_size": _config}, "field 'hidden_size': missing"),
        ({"hidden_size": 4095}, "must divide hidden_size 4095"),
        ({"intermediate_size": "wide"}, "field 'intermediate_size': got 'wide'"),
        ({"num_key_value_heads": 5}, "field 'num_key_value_heads': got 5; must divide 32 heads"),
        ({"tie_word_embeddings": "no"}, "field 'tie_word_embeddings': got 'no'"),
        ({"architectures": ["MixtralForCausalLM"]}, "field 'num_local_experts': missing"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "field 'num_experts': missing"),
        ({"quantization_config": {"quant_method": "awq"}}, "got 'awq'; must be 'fp8', or left out"),
    ],
)
def test_bad_configs(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_config(_config(**changes), "mine", "mine.json")
    assert "mine.json" in str(caught.value)


def test_a_config_from_a_path(tmp_path):
    folder = tmp_path / "MyModel"
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(json.dumps(_config(num_key_value_heads=_config, num_hidden_layers=3)))
    shape = model_shape(path)
    assert (shape.name, shape.kv_heads, shape.layers) == ("MyModel", 32, 3)
    with pytest.raises(ValueError, match="model: got 'lama-3.1-8b'; did you mean 'llama-3.1-8b'"):
        model_shape("lama-3.1-8b")
    with pytest.raises(ValueError, match=r"nowhere\.json: cannot be read"):
        model_shape(tmp_path / "nowhere.json")
