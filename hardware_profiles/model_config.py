"""Shapes of decoder models, read from a Hugging Face ``config.json`` as transformers reads it.

Dense decoders with gated feed-forward layers, the fleets' older Falcon and ChatGLM, and mixtures of
experts; a field that is missing or null has the default of its architecture.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from servegym._files import read_json
from servegym.hardware_profiles.load import data_path, unknown_name
from servegym.hardware_profiles.schema import Fields

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Phi3ForCausalLM",
    "GemmaForCausalLM",
    "FalconForCausalLM",
    "ChatGLMModel",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "GptOssForCausalLM",
    "DeepseekV3ForCausalLM",
)
# Architectures whose queries, keys and values carry biases and the output product none.
_QKV_BIAS = ("Qwen2ForCausalLM", "ChatGLMModel")
_QK_NORM = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
# Bytes of a weight: 4-bit formats have a scale for every 32 (mxfp4) or 16 (nvfp4) of them.
VALUE_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "mxfp4": 4.25 / 8.0, "nvfp4": 4.5 / 8.0}
# DeepSeek-V3's multi-head latent attention, which was timed as a whole with its products.
_LATENT = {"hidden_size": 7168, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
           "qk_rope_head_dim": 64, "v_head_dim": 128}  # fmt: skip
_SOME_DENSE = "some layers have no experts; only models that have them in all are known"
_TIED_BY_DEFAULT = ("GemmaForCausalLM", "FalconForCausalLM")
_FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
    *("sliding_window", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
)
# Defaults of `_FIELDS` in the configuration classes of transformers 5.24. None: as many key-value
# heads as attention heads, the hidden size over these for the head, no window, no experts.
_DEFAULTS = {
    "LlamaForCausalLM": (4096, 11008, 32, 32, None, None, 32000, 2048),
    "MistralForCausalLM": (4096, 14336, 32, 32, 8, None, 32000, 131072, 4096),
    "Qwen2ForCausalLM": (4096, 22016, 32, 32, 32, None, 151936, 32768, 4096),
    "Qwen3ForCausalLM": (4096, 22016, 32, 32, 32, 128, 151936, 32768, 4096),
    "Phi3ForCausalLM": (3072, 8192, 32, 32, None, None, 32064, 4096),
    "GemmaForCausalLM": (3072, 24576, 28, 16, 16, 256, 256000, 8192),
    "FalconForCausalLM": (4544, None, 32, 71, None, None, 65024, 2048),
    "MixtralForCausalLM": (4096, 14336, 32, 32, 8, None, 32000, 131072, None, 8, 2),
    "Qwen3MoeForCausalLM": (2048, 6144, 24, 32, 4, None, 151936, 32768, 4096, 128, 8, 768),
    "GptOssForCausalLM": (2880, 2880, 36, 64, 8, 64, 201088, 131072, 128, 128, 4),
}
# Where a config holds its language model apart, and where it says that weights are quantised.
_LANGUAGE = ("text_config", "llm_config", "language_config")
_QUANTISED = (
    *("quantization_config", "compression_config", "quantization", "quant_config"),
    *("quantize_config", "quantization_bit"),
)
_BLOCK = [128, 128]
_DTYPES, _UNQUANTISED = ("dtype", "torch_dtype"), (None, "auto", "bfloat16", "float16", "float32")
# Files beside a ``config.json`` that say so: of ModelOpt, GPTQ and AWQ.
_QUANTISED_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
# What a nested config may have of its own.
_ABOUT = ("_name_or_path", "model_type", "transformers_version", *_DTYPES)
# Sizes under older names, which would be taken for missing.
_OLDER = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size"}
# Where all layers have the window, and where ``layer_types`` tells of each.
_ALL_WINDOWED = (
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
)
_WINDOW_BY_LAYER = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "GptOssForCausalLM")


@dataclass(frozen=True)
class ModelShape:
    """What of a decoder model its kernels and memory depend on.

    Attributes:
        name: for people and file names.
        architecture: one of :data:`ARCHITECTURES`.
        layers: transformer layers.
        hidden: hidden size.
        heads: query heads.
        kv_heads: key-value heads.
        head_size: values a head.
        intermediate: width of the feed-forward layer, or of one expert.
        vocabulary: rows of the embedding.
        tied: whether the head is the embedding.
        gated: whether the feed-forward layer has a gate (three matrices) or not (two).
        qkv_bias: whether queries, keys and values have biases.
        mlp_bias: whether the products of the feed-forward layer have biases.
        qk_norm: whether queries and keys are normalised.
        norms: normalisations a layer.
        experts: routed experts a layer, 0 for a dense model.
        top_k: experts a token goes to.
        expert_dtype: format of the experts' weights if not that of the rest (``"mxfp4"``), or None.
        window: sliding window in tokens, or None.
        windowed_layers: layers that have it.
        quantised: ``"fp8"`` if the config says that the weights are in 8 bits, ``"fp8_block"`` with
            a scale for every block of them, or None.
        latent: whether it has DeepSeek-V3's multi-head latent attention; keys and values of a token
            then are those of one KV head of ``head_size``.
        shared: experts a layer that every token goes to.
        dense_layers: first layers that have a dense feed-forward layer in place of experts,
        dense_width: and its width.
    """

    name: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    tied: bool
    gated: bool = True
    qkv_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms: int = 2
    experts: int = 0
    top_k: int = 0
    expert_dtype: str | None = None
    window: int | None = None
    windowed_layers: int = 0
    quantised: str | None = None
    latent: bool = False
    shared: int = 0
    dense_layers: int = 0
    dense_width: int = 0

    @property
    def qkv_features(self) -> int:
        """Output features of queries, keys and values together."""
        return (self.heads + 2 * self.kv_heads) * self.head_size

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's attention products."""
        if self.latent:
            rank, kv, inner, rope, value = (_LATENT[key] for key in list(_LATENT)[1:])
            queries = rank * (self.hidden + self.heads * (inner + rope))
            keys = self.hidden * (kv + rope) + kv * self.heads * (inner + value)
            return queries + keys + self.heads * value * self.hidden
        return self.hidden * (self.qkv_features + self.heads * self.head_size)

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert, or of the feed-forward layer."""
        return (3 if self.gated else 2) * self.hidden * self.intermediate

    @property
    def feed_forward_parameters(self) -> int:
        """Weights of all layers' feed-forward products, without the routers."""
        routed = (max(self.experts, 1) + self.shared) * self.expert_parameters
        dense = 3 * self.hidden * self.dense_width
        return (self.layers - self.dense_layers) * routed + self.dense_layers * dense

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding and, if it has its own, the head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def small_parameters(self) -> int:
        """Norms, biases and routers of all layers."""
        norm = self.hidden * (2 if self.architecture == "FalconForCausalLM" else 1)
        layer = self.norms * norm
        if self.qkv_bias:
            # Most have one at the output product, too.
            layer += self.qkv_features + (self.architecture not in _QKV_BIAS) * self.hidden
        layer += self.mlp_bias * (2 * self.intermediate + self.hidden)
        layer += 2 * self.head_size if self.qk_norm else 0
        if self.architecture == "GptOssForCausalLM":
            # Biases of the router and the experts, and one sink a head.
            layer += self.experts + self.heads
            layer += self.experts * (2 * self.intermediate + self.hidden)
        routers = self.hidden * self.experts
        if self.latent:
            # Norms of the two ranks, and a bias an expert.
            layer += _LATENT["q_lora_rank"] + _LATENT["kv_lora_rank"]
            routers += self.experts
        return self.layers * layer + (self.layers - self.dense_layers) * routers + norm

    @property
    def parameters(self) -> int:
        """All weights of the model."""
        matrices = self.layers * self.attention_parameters + self.feed_forward_parameters
        return matrices + self.embedding_parameters + self.small_parameters

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of the weights.

        Embedding, head, norms, biases and routers stay in 16 bits; every other product takes
        ``VALUE_BYTES``.
        """
        experts = self.expert_dtype or dtype
        total = self.layers * self.attention_parameters * VALUE_BYTES[dtype]
        total += self.feed_forward_parameters * VALUE_BYTES[experts]
        return round(total + 2.0 * (self.embedding_parameters + self.small_parameters))

    def facts(self, value_bytes: int = 2, kv_heads: int | None = None) -> dict[str, Any]:
        """The field ``model`` of a profile, with weights in 16 bits and ``value_bytes`` of a key.

        ``kv_heads`` are those in memory, with copies where cards hold more; by default its own.
        """
        kv_heads = self.kv_heads if kv_heads is None else kv_heads
        return {
            "name": self.name,
            "layers": self.layers,
            "hidden_size": self.hidden,
            "attention_heads": self.heads,
            "kv_heads": kv_heads,
            "head_size": self.head_size,
            "bytes_per_value": value_bytes,
            "parameters": self.parameters,
            "weight_bytes": self.weight_bytes("bf16"),
            "kv_bytes_per_token": 2 * value_bytes * self.layers * kv_heads * self.head_size,
        }


def parse_config(config: Mapping[str, Any], name: str, where: str) -> ModelShape:
    """The shape of a decoder model by its decoded ``config.json``.

    ``where`` is the file's name; ValueError names it and the field, or the unknown architecture.
    """
    top, places = _flat(Fields(config, where))
    listed = top.get("architectures")
    if not isinstance(listed, list) or len(listed) != 1:
        raise top.error("architectures", f"got {listed!r}; must be a list of one name")
    kind = listed[0]
    if kind not in ARCHITECTURES:
        raise top.error("architectures", unknown_name("architecture", kind, list(ARCHITECTURES)))
    expert_dtype, quantised = _quantised(places, kind)
    shape = _shape(_with_defaults(top, kind), name, kind)
    return replace(shape, expert_dtype=expert_dtype, quantised=quantised)


def _nested(top: Fields) -> list[Fields]:
    """The config and the objects in it, at any depth, each with its place."""
    result = [top]
    for part in result:  # which grows
        inner = (key for key, value in part.data.items() if isinstance(value, Mapping))
        result += [part.child(key) for key in inner]
    return result


def _flat(top: Fields) -> tuple[Fields, list[tuple[Fields, str]]]:
    """The config with its language model's fields at the top, and what says it is quantised.

    ValueError: a nested object has sizes of another part, or a field has two values.
    """
    data, places = dict(top.data), []
    sizes = {*_FIELDS, "num_layers", "ffn_hidden_size", *_OLDER}
    for part in _nested(top):
        places += [(part, key) for key in _QUANTISED if part.data.get(key)]
        places += [(part, key) for key in _DTYPES if part.data.get(key) not in _UNQUANTISED]
        if part.path and sizes & part.data.keys():
            name = part.path.rpartition(".")[2]
            if name not in _LANGUAGE:
                message = f"has sizes of its own; only {', '.join(_LANGUAGE)} are read"
                raise top.error(part.path, f"{message}: write the language model's at the top")
            for key, value in part.data.items():
                outer = data.setdefault(key, value)
                exempt = key in _ABOUT or key.endswith("_token_id") or isinstance(value, Mapping)
                if outer is None:
                    data[key] = value
                elif value is not None and outer != value and not exempt:
                    raise part.error(key, f"got {value!r}, but {outer!r} outside of {name}")
    return Fields(data, top.where), places


def _quantised(places: list[tuple[Fields, str]], kind: str) -> tuple[str | None, str | None]:
    """Format of the experts, if they alone have one (gpt-oss), and of all weights."""
    scheme, result = "mxfp4" if kind == "GptOssForCausalLM" else "fp8", None
    for part, key in places:
        stated = part.data[key]
        method = stated.get("quant_method", stated) if isinstance(stated, Mapping) else stated
        if method != scheme:
            message = f"got {method!r:.60}; must be {scheme!r}, or left out for weights in 16 bits"
            raise part.error(key, message)
        block = stated.get("weight_block_size") if isinstance(stated, Mapping) else None
        if block not in (None, _BLOCK):
            message = f"got {block!r:.60}; products were timed with a scale for every {_BLOCK}"
            raise part.error(f"{key}.weight_block_size", message)
        result = f"{scheme}_block" if block else result or scheme
    return (result, None) if scheme == "mxfp4" else (None, result)


def _with_defaults(top: Fields, kind: str) -> Fields:
    """The config with the architecture's defaults where a field is missing or null."""
    config = top.data
    for older, name in _OLDER.items():
        if older in config and config.get(name) is None:
            raise top.error(older, f"is not read; write it as {name}")
    if kind not in _DEFAULTS:  # nothing is left out of their configs
        return top
    defaults = {k: v for k, v in zip(_FIELDS, _DEFAULTS[kind], strict=False) if v is not None}
    if config.get("num_key_value_heads", 0) is None:
        defaults.pop("num_key_value_heads", None)  # as many as attention heads
    # A window of null is none; of every other field null is the default.
    stated = {k: v for k, v in config.items() if v is not None or k == "sliding_window"}
    if "num_experts" in stated and "num_local_experts" in defaults:  # two names for one field
        result = stated.setdefault("num_local_experts", stated["num_experts"])
        if result != stated["num_experts"]:
            message = f"got {stated['num_experts']!r}, but num_local_experts is {result!r}"
            raise top.error("num_experts", message)
    return Fields({**defaults, **stated}, top.where)


def _shape(top: Fields, name: str, kind: str) -> ModelShape:
    if kind == "ChatGLMModel":
        return _chatglm(top, name)
    heads, hidden = top.integer("num_attention_heads"), top.integer("hidden_size")
    layers = top.integer("num_hidden_layers")
    common: dict[str, Any] = {
        "name": name,
        "architecture": kind,
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "vocabulary": top.integer("vocab_size"),
        "tied": top.flag("tie_word_embeddings", kind in _TIED_BY_DEFAULT),
    }
    if kind == "DeepseekV3ForCausalLM":
        return _deepseek(top, common)
    size = top.integer("head_dim") if "head_dim" in top.data else hidden // heads
    if "head_dim" not in top.data and hidden % heads:
        raise top.error("num_attention_heads", f"got {heads}; must divide hidden_size {hidden}")
    if kind == "FalconForCausalLM":
        return _falcon(top, common)
    kv_heads = top.integer("num_key_value_heads") if "num_key_value_heads" in top.data else heads
    if heads % kv_heads:
        raise top.error("num_key_value_heads", f"got {kv_heads}; must divide {heads} heads")
    experts, top_k, width = _experts(top, kind, layers)
    window, windowed = _window(top, kind, layers)
    biased = False
    if kind not in ("MistralForCausalLM", "Phi3ForCausalLM", "MixtralForCausalLM"):
        biased = top.flag("attention_bias", kind == "GptOssForCausalLM")
    return ModelShape(
        **common,
        kv_heads=kv_heads,
        head_size=size,
        intermediate=width,
        qkv_bias=kind in _QKV_BIAS or biased,
        mlp_bias=kind == "LlamaForCausalLM" and top.flag("mlp_bias", False),
        qk_norm=kind in _QK_NORM,
        experts=experts,
        top_k=top_k,
        window=window,
        windowed_layers=windowed,
    )


def _experts(top: Fields, kind: str, layers: int) -> tuple[int, int, int]:
    """Experts, top-k and the width of the feed-forward layer."""
    if kind not in ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM"):
        return 0, 0, top.integer("intermediate_size")
    width = "intermediate_size"
    if kind == "Qwen3MoeForCausalLM":
        width = "moe_intermediate_size"
        _experts_everywhere(top, "decoder_sparse_step")
        stated = top.data.get("mlp_only_layers", [])
        wrong = not isinstance(stated, list) or any(type(row) is not int for row in stated)
        if wrong or any(row in range(layers) for row in stated):
            raise top.error("mlp_only_layers", f"got {stated!r}: {_SOME_DENSE}")
    return top.integer("num_local_experts"), _top_k(top, "num_local_experts"), top.integer(width)


def _experts_everywhere(top: Fields, key: str) -> None:
    """Refuse models that have experts in every second layer or so."""
    if top.data.get(key) not in (None, 1):
        raise top.error(key, f"got {top.data[key]!r}: {_SOME_DENSE}")


def _top_k(top: Fields, key: str) -> int:
    """Experts that a token goes to, of the number in a field."""
    top_k, experts = top.integer("num_experts_per_tok"), top.integer(key)
    if top_k > experts:
        raise top.error("num_experts_per_tok", f"got {top_k} of {experts} experts")
    return top_k


def _window(top: Fields, kind: str, layers: int) -> tuple[int | None, int]:
    """Sliding window and the number of layers that have it."""
    kinds = top.data.get("layer_types")
    allowed = ("sliding_attention", "full_attention")
    if kinds is not None:
        right = isinstance(kinds, list) and len(kinds) == layers
        if not right or any(one not in allowed for one in kinds):
            names = " or ".join(allowed)
            raise top.error("layer_types", f"must be a list of {layers} names, {names}")
    # Qwen's configs name a window that the models do not use unless they say so.
    used = not kind.startswith("Qwen") or top.flag("use_sliding_window", False)
    windowed = 0
    if used and top.data.get("sliding_window") is not None:
        if kind in _ALL_WINDOWED:
            windowed = layers
        elif kind in _WINDOW_BY_LAYER and kinds is not None:
            windowed = kinds.count("sliding_attention")
        elif kind == "GptOssForCausalLM":
            windowed = (layers + 1) // 2
        elif kind in _WINDOW_BY_LAYER:
            full = top.integer("max_window_layers", 0) if "max_window_layers" in top.data else 28
            windowed = max(layers - full, 0)
    if kinds is not None and kind not in _WINDOW_BY_LAYER:
        if kinds.count("sliding_attention") != windowed:
            raise top.error("layer_types", f"names layers that {kind} does not have")
    window = top.integer("sliding_window") if windowed else None
    if window is None or window >= top.integer("max_position_embeddings"):
        return None, 0
    return window, windowed


def _deepseek(top: Fields, common: dict[str, Any]) -> ModelShape:
    """DeepSeek-V3: latent attention, dense first layers, shared experts."""
    for key, timed in _LATENT.items():
        if top.integer(key) != timed:
            raise top.error(key, f"got {top.data[key]}; latent attention was timed with {timed}")
    _experts_everywhere(top, "moe_layer_freq")
    dense = top.integer("first_k_dense_replace", 0)
    if dense > common["layers"]:
        raise top.error("first_k_dense_replace", f"got {dense} of {common['layers']} layers")
    return ModelShape(
        **common,
        kv_heads=1,
        head_size=(_LATENT["kv_lora_rank"] + _LATENT["qk_rope_head_dim"]) // 2,
        intermediate=top.integer("moe_intermediate_size"),
        experts=top.integer("n_routed_experts"),
        top_k=_top_k(top, "n_routed_experts"),
        latent=True,
        shared=top.integer("n_shared_experts", 0),
        dense_layers=dense,
        dense_width=top.integer("intermediate_size"),
    )


def _falcon(top: Fields, common: dict[str, Any]) -> ModelShape:
    """Falcon: one KV head (multi-query), no gate, one norm a layer, four times as wide."""
    for field, value in (
        ("new_decoder_architecture", False),
        ("multi_query", True),
        ("parallel_attn", True),
        ("bias", False),
    ):
        if top.flag(field, value) is not value:
            known = "the multi-query form with parallel attention and without biases"
            raise top.error(field, f"got {not value}; only {known} is known")
    wide = "ffn_hidden_size" in top.data
    return ModelShape(
        **common,
        kv_heads=1,
        head_size=common["hidden"] // common["heads"],
        intermediate=top.integer("ffn_hidden_size") if wide else 4 * common["hidden"],
        gated=False,
        norms=1,
    )


def _chatglm(top: Fields, name: str) -> ModelShape:
    """ChatGLM2: the same parts under names of its own."""
    grouped = top.flag("multi_query_attention", True)
    group = "multi_query_group_num" if grouped else "num_attention_heads"
    heads, kv_heads = top.integer("num_attention_heads"), top.integer(group)
    if heads % kv_heads:
        raise top.error(group, f"got {kv_heads}; must divide {heads} heads")
    return ModelShape(
        name=name,
        architecture="ChatGLMModel",
        layers=top.integer("num_layers"),
        hidden=top.integer("hidden_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_size=top.integer("kv_channels"),
        intermediate=top.integer("ffn_hidden_size"),
        vocabulary=top.integer("padded_vocab_size"),
        tied=False,
        qkv_bias=True,
    )


@functools.cache
def _shipped() -> dict[str, str]:
    """File stems by every name a shipped config answers to, in lower case."""
    names: dict[str, str] = {}
    for file in sorted(data_path("models").glob("*.json")):
        names[file.stem] = file.stem
        for other in read_json(file)["_model_cards"]:
            names[other.rpartition("/")[2].lower()] = file.stem
    return names


def list_models() -> list[str]:
    """Names of the configs that ship with the package, sorted."""
    return sorted(set(_shipped().values()))


def model_shape(name_or_path: str | os.PathLike[str]) -> ModelShape:
    """The shape of a shipped model, or of a ``config.json``.

    Args:
        name_or_path: a name of :func:`list_models`, the name of a model card that a shipped config
            answers to, with its owner or without, in any case, or a path (anything else that ends
            in ``.json`` or holds a separator).

    Raises:
        ValueError: for an unknown name, or naming the file and field that is wrong.
    """
    text, shipped = os.fspath(name_or_path), _shipped()
    path = text.endswith(".json") or "/" in text or os.sep in text
    owner, _, card = text.lower().rpartition("/")
    if path and card in shipped and "/" not in owner and not os.path.exists(text):
        text, path = card, False
    if path:
        config = read_json(text)
        stem = os.path.splitext(os.path.basename(text))[0]
        if stem == "config":
            stem = os.path.basename(os.path.dirname(os.path.abspath(text))) or stem
        stated = config.get("_name_or_path") if isinstance(config, Mapping) else None
        name = stated if isinstance(stated, str) and stated.strip() else stem
        for other in _QUANTISED_FILES if os.path.basename(text) == "config.json" else ():
            if os.path.exists(os.path.join(os.path.dirname(text), other)):
                message = "it quantises the weights; give a folder of the model in 16 bits or fp8"
                raise ValueError(f"{text}: {other} lies beside it: {message}")
        return parse_config(config, name.rpartition("/")[2], os.path.basename(text))
    if text.lower() not in shipped:
        raise ValueError(unknown_name("model", text, list_models()))
    stem = shipped[text.lower()]
    return parse_config(read_json(data_path("models") / f"{stem}.json"), stem, f"{stem}.json")
