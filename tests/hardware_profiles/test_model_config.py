"""Model configs: published sizes, architectures, bad input."""

import json

import pytest

from servegym.hardware_profiles.fleet import served_models
from servegym.hardware_profiles.load import data_path
from servegym.hardware_profiles.model_config import model_shape, parse_config

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
    ours = shape.facts() | {"parameters": shape.parameters + own_head}
    same = ("layers", "hidden_size", "attention_heads", "kv_heads", "head_size", "parameters")
    assert {key: facts[key] for key in same} == {key: ours[key] for key in same}


def test_weights_by_format():
    dense = model_shape("llama-3.1-8b")
    assert dense.weight_bytes("bf16") == 2 * dense.parameters
    products = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    assert dense.weight_bytes("fp8") == 2 * dense.parameters - products
    # The published checkpoint of gpt-oss-20b takes 13.76 GB.
    assert model_shape("gpt-oss-20b").weight_bytes("bf16") == pytest.approx(13.76e9, rel=1e-3)


def _config(**changes):
    config = json.loads((data_path("models") / "llama-3.1-8b.json").read_text())
    config |= changes
    return {key: value for key, value in config.items() if value is not _config}


MIXTRAL = {"architectures": ["MixtralForCausalLM"]}
MOE = {"architectures": ["Qwen3MoeForCausalLM"]}
FALCON = {"architectures": ["FalconForCausalLM"]}
GPT_OSS = {"architectures": ["GptOssForCausalLM"]}
DEEPSEEK, CHATGLM = (
    json.loads((data_path("models") / f"{name}.json").read_text())
    for name in ("deepseek-v3", "chatglm2-6b")
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCasualLM"]}, "did you mean 'LlamaForCausalLM'"),
        ({"architectures": _config}, "field 'architectures': missing"),
        ({"hidden_size": 4095}, "must divide hidden_size 4095"),
        ({"intermediate_size": "wide"}, "field 'intermediate_size': got 'wide'"),
        ({"num_key_value_heads": 5}, "field 'num_key_value_heads': got 5; must divide 32 heads"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "field 'num_experts_per_tok': got 9 of 8"),
        ({**MOE, "decoder_sparse_step": 2}, "field 'decoder_sparse_step': got 2: some layers"),
        ({"layer_types": ["full_attention"]}, "field 'layer_types': must be a list of 32"),
        ({**FALCON, "multi_query": False}, "field 'multi_query': got False; only"),
        ({**MOE, "mlp_only_layers": ["0"]}, r"field 'mlp_only_layers': got \['0'\]: some layers"),
        ({**DEEPSEEK, "first_k_dense_replace": 62}, "'first_k_dense_replace': got 62 of 61 layers"),
        ({**CHATGLM, "quantization_bit": 4}, "field 'quantization_bit': got 4; must be 'fp8'"),
        ({**FALCON, "hidden_size": None, "n_embd": 64}, "field 'n_embd': is not read.*hidden_size"),
        ({"quantization_config": {"quant_method": "awq"}}, "got 'awq'; must be 'fp8', or left out"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 32]}},
            "weight_block_size': got .1, 32.; products were timed",
        ),
        ({"torch_dtype": "float8_e4m3fn"}, "field 'torch_dtype': got 'float8_e4m3fn'; must be"),
        ({**GPT_OSS, "compression_config": {"quant_method": "fp8"}}, "got 'fp8'; must be 'mxfp4'"),
        ({"text_config": {"num_hidden_layers": 3}}, "'text_config.num_hidden_layers': got 3, but"),
        ({"vision_config": {"hidden_size": 64}}, "field 'vision_config': has sizes of its own"),
    ],
)
def test_bad_configs(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_config(_config(**changes), "mine", "mine.json")
    assert "mine.json" in str(caught.value)


SMALL = {
    **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    **{"max_position_embeddings": 131072, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("nested", ["text_config", "llm_config"])
@pytest.mark.parametrize("inside", [[], ["rope_theta"], ["hidden_size", "vocab_size"]])
def test_a_nested_language_model_is_that_at_the_top(nested, inside):
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llava", "eos_token_id": 1}
    about = {"model_type": "llama", "eos_token_id": 2, "rope_theta": 5e5}
    outside = {key: SMALL[key] for key in inside if key in SMALL} | {"rope_theta": None}
    found = parse_config(kind | outside | {nested: SMALL | about}, "m", "m.json")
    assert found == parse_config(kind | SMALL, "m", "m.json")
    assert (found.parameters, found.kv_heads, found.layers) == (1_235_814_400, 8, 16)
    eight = {"quantization_config": {"quant_method": "fp8"}}
    assert parse_config(kind | {nested: SMALL | eight}, "m", "m.json").quantised == "fp8"


@pytest.mark.parametrize("other", ["hf_quant_config.json", "quantize_config.json"])
def test_quantisation_published_beside_the_config_is_refused(tmp_path, other):
    config = {"architectures": ["LlamaForCausalLM"], **SMALL}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_shape(tmp_path / "config.json").parameters == 1_235_814_400
    (tmp_path / other).write_text("{}")
    with pytest.raises(ValueError, match=f"config.json: {other} lies beside it"):
        model_shape(tmp_path / "config.json")


# Parameters and (kv heads, head size, window, layers that have it) of a config that has nothing but
# its architecture: those of the model that transformers 5.24 makes of it.
EMPTY = {
    "LlamaForCausalLM": (6_738_415_616, 32, 128, None, 0),
    "MistralForCausalLM": (7_241_732_096, 8, 128, 4096, 32),
    "Qwen2ForCausalLM": (12_049_846_272, 32, 128, None, 0),
    "Qwen3ForCausalLM": (12_049_461_248, 32, 128, None, 0),
    "Phi3ForCausalLM": (3_821_079_552, 32, 96, None, 0),
    "GemmaForCausalLM": (8_537_680_896, 16, 256, None, 0),
    "FalconForCausalLM": (6_921_720_704, 1, 64, None, 0),
    "MixtralForCausalLM": (46_702_792_704, 8, 128, None, 0),
    "Qwen3MoeForCausalLM": (15_350_731_776, 4, 64, None, 0),
    "GptOssForCausalLM": (116_829_156_672, 8, 64, 128, 18),
}


@pytest.mark.parametrize("kind", EMPTY)
def test_missing_and_null_fields_have_the_default_of_the_architecture(kind):
    empty = parse_config({"architectures": [kind]}, "mine", "mine.json")
    found = (empty.parameters, empty.kv_heads, empty.head_size, empty.window, empty.windowed_layers)
    assert found == EMPTY[kind]
    names = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    names += ["head_dim", "vocab_size", "tie_word_embeddings", "attention_bias", "layer_types"]
    names += ["use_sliding_window", "max_window_layers", "max_position_embeddings", "num_experts"]
    names += ["decoder_sparse_step", "mlp_only_layers", "multi_query", "ffn_hidden_size"]
    nulls = dict.fromkeys(names)
    assert parse_config({"architectures": [kind], **nulls}, "mine", "mine.json") == empty


ONE_FULL = ["full_attention"] + ["sliding_attention"] * 31


@pytest.mark.parametrize(
    ("kind", "changes", "window", "windowed"),
    [
        ("LlamaForCausalLM", {"sliding_window": 512}, None, 0),  # which the architecture ignores
        ("MistralForCausalLM", {"use_sliding_window": False}, 4096, 32),
        ("Phi3ForCausalLM", {"sliding_window": 2047}, 2047, 32),
        ("Qwen2ForCausalLM", {"sliding_window": 512}, None, 0),
        ("Qwen2ForCausalLM", {"use_sliding_window": True}, 4096, 4),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "max_window_layers": 0}, 4096, 32),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "layer_types": ONE_FULL}, 4096, 31),
        ("Qwen3MoeForCausalLM", {"use_sliding_window": True}, 4096, 24),
        ("GptOssForCausalLM", {"num_hidden_layers": 5}, 128, 3),
    ],
)
def test_windows_hold_for_the_layers_that_have_them(kind, changes, window, windowed):
    found = parse_config({"architectures": [kind], **changes}, "mine", "mine.json")
    assert (found.window, found.windowed_layers) == (window, windowed)


def test_a_config_from_a_path(tmp_path):
    folder = tmp_path / "MyModel"
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(json.dumps(_config(num_key_value_heads=_config, num_hidden_layers=3)))
    shape = model_shape(path)
    assert (shape.name, shape.kv_heads, shape.layers) == ("MyModel", 32, 3)
    for same in ("Qwen/Qwen3-8B", "QWEN3-8B", "qwen/qwen3-8b"):
        assert model_shape(same) == model_shape("qwen3-8b")
    with pytest.raises(ValueError, match="model: got 'lama-3.1-8b'; did you mean 'llama-3.1-8b'"):
        model_shape("lama-3.1-8b")
    with pytest.raises(ValueError, match=r"nowhere\.json: cannot be read"):
        model_shape(tmp_path / "nowhere.json")
