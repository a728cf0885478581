"""Shapes of decoder models, read from a Hugging Face ``config.json``.

Dense decoders with gated feed-forward layers (Llama, Mistral, Qwen2, Qwen3, Phi-3, Gemma), the
two older forms of the fleets (Falcon, ChatGLM) and mixtures of experts (Mixtral, Qwen3-MoE,
gpt-oss, DeepSeek-V3). Configs of the models asked for most ship in ``data/models``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from servegym.hardware_profiles.load import data_path, unknown_name
from servegym.hardware_profiles.schema import Fields, read_json

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
# Architectures whose queries, keys and values carry biases; gpt-oss has one at every product.
_QKV_BIAS = ("Qwen2ForCausalLM", "ChatGLMModel", "GptOssForCausalLM")
_QK_NORM = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
# Bytes of a weight: 4-bit formats have a scale for every 32 (mxfp4) or 16 (nvfp4) of them.
VALUE_BYTES = {"bf16": 2.0, "fp8": 1.0, "mxfp4": 4.25 / 8.0, "nvfp4": 4.5 / 8.0}
# DeepSeek-V3's multi-head latent attention, which was timed as a whole with its products.
_LATENT = {"hidden_size": 7168, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
           "qk_rope_head_dim": 64, "v_head_dim": 128}  # fmt: skip
# The library's defaults for configs that leave the field out.
_TIED_BY_DEFAULT = ("GemmaForCausalLM",)


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
        qk_norm: whether queries and keys are normalised.
        norms: normalisations a layer.
        experts: routed experts a layer, 0 for a dense model.
        top_k: experts a token goes to.
        expert_dtype: format of the experts' weights if not that of the rest (``"mxfp4"``), or None.
        window: sliding window in tokens, or None.
        windowed_layers: layers that have it.
        quantised: ``"fp8"`` if the config says that the weights are in 8 bits, or None.
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
        layer += self.qkv_features if self.qkv_bias else 0
        layer += 2 * self.head_size if self.qk_norm else 0
        if self.architecture == "GptOssForCausalLM":
            # Biases of the output product, the router and the experts, and one sink a head.
            layer += self.hidden + self.experts + self.heads
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


def parse_config(config: Mapping[str, Any], name: str, where: str) -> ModelShape:
    """The shape of a decoder model.

    Args:
        config: the decoded ``config.json``.
        name: of the model.
        where: the file's name, for messages.

    Returns:
        The shape.

    Raises:
        ValueError: naming the field that is missing or wrong, or the unknown architecture.
    """
    top = Fields(config, where)
    listed = top.get("architectures")
    if not isinstance(listed, list) or len(listed) != 1:
        raise top.error("architectures", f"got {listed!r}; must be a list of one name")
    kind = listed[0]
    if kind not in ARCHITECTURES:
        raise top.error("architectures", unknown_name("architecture", kind, list(ARCHITECTURES)))
    return replace(_shape(top, name, kind), quantised=_quantised(top, kind))


def _quantised(top: Fields, kind: str) -> str | None:
    """Format of the weights; gpt-oss has one for its experts alone, see `_experts`."""
    given = top.data.get("quantization_config")
    if not given or kind == "GptOssForCausalLM":
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else given
    if method != "fp8":
        told = f"got {method!r}; must be 'fp8', or left out for weights in 16 bits"
        raise top.error("quantization_config", told)
    return "fp8"


def _shape(top: Fields, name: str, kind: str) -> ModelShape:
    config = top.data
    if kind == "ChatGLMModel":
        return _chatglm(top, name)
    heads, hidden = top.integer("num_attention_heads"), top.integer("hidden_size")
    if kind == "DeepseekV3ForCausalLM":
        return _deepseek(top, name)
    if kind == "FalconForCausalLM":
        return _falcon(top, name, heads, hidden)
    given = config.get("head_dim")
    size = top.integer("head_dim") if given is not None else hidden // heads
    if given is None and hidden % heads:
        raise top.error("num_attention_heads", f"got {heads}; must divide hidden_size {hidden}")
    kv_heads = top.integer("num_key_value_heads") if "num_key_value_heads" in config else heads
    if heads % kv_heads:
        raise top.error("num_key_value_heads", f"got {kv_heads}; must divide {heads} heads")
    layers = top.integer("num_hidden_layers")
    experts, top_k, width, experts_dtype = _experts(top, kind)
    window, windowed = _window(top, kind, layers)
    return ModelShape(
        name=name,
        architecture=kind,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        intermediate=width,
        vocabulary=top.integer("vocab_size"),
        tied=_flag(top, "tie_word_embeddings", kind in _TIED_BY_DEFAULT),
        qkv_bias=kind in _QKV_BIAS or _flag(top, "attention_bias", False),
        qk_norm=kind in _QK_NORM,
        experts=experts,
        top_k=top_k,
        expert_dtype=experts_dtype,
        window=window,
        windowed_layers=windowed,
    )


def _flag(top: Fields, key: str, default: bool) -> bool:
    value = top.data.get(key, default)
    if not isinstance(value, bool):
        raise top.error(key, f"got {value!r}; must be true or false")
    return value


def _experts(top: Fields, kind: str) -> tuple[int, int, int, str | None]:
    """Experts, top-k, width of the feed-forward layer, and a format of its own."""
    if kind == "MixtralForCausalLM":
        found = top.integer("num_local_experts"), top.integer("num_experts_per_tok")
        return *found, top.integer("intermediate_size"), None
    if kind == "Qwen3MoeForCausalLM":
        if top.data.get("mlp_only_layers") or top.data.get("decoder_sparse_step", 1) != 1:
            raise top.error("mlp_only_layers", "layers without experts; only all-expert models")
        found = top.integer("num_experts"), top.integer("num_experts_per_tok")
        return *found, top.integer("moe_intermediate_size"), None
    if kind == "GptOssForCausalLM":
        quantised = top.data.get("quantization_config") or {}
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
        if method not in (None, "mxfp4"):
            raise top.error("quantization_config", f"got {method!r}; must be 'mxfp4' or left out")
        found = top.integer("num_local_experts"), top.integer("num_experts_per_tok")
        return *found, top.integer("intermediate_size"), method
    return 0, 0, top.integer("intermediate_size"), None


def _window(top: Fields, kind: str, layers: int) -> tuple[int | None, int]:
    """Sliding window and the number of layers that have it."""
    if top.data.get("sliding_window") is None or top.data.get("use_sliding_window") is False:
        return None, 0
    # Qwen's configs name a window that the models do not use unless they say so.
    if kind.startswith("Qwen") and not _flag(top, "use_sliding_window", False):
        return None, 0
    window = top.integer("sliding_window")
    if window >= top.data.get("max_position_embeddings", window + 1):
        return None, 0
    kinds = top.data.get("layer_types")
    if kinds is None:
        return window, (layers + 1) // 2 if kind == "GptOssForCausalLM" else layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise top.error("layer_types", f"must be a list of {layers} names")
    return window, sum(one == "sliding_attention" for one in kinds)


def _deepseek(top: Fields, name: str) -> ModelShape:
    """DeepSeek-V3: latent attention, dense first layers, shared experts."""
    for key, timed in _LATENT.items():
        if top.integer(key) != timed:
            raise top.error(key, f"got {top.data[key]}; latent attention was timed with {timed}")
    return ModelShape(
        name=name,
        architecture="DeepseekV3ForCausalLM",
        layers=top.integer("num_hidden_layers"),
        hidden=top.integer("hidden_size"),
        heads=top.integer("num_attention_heads"),
        kv_heads=1,
        head_size=(_LATENT["kv_lora_rank"] + _LATENT["qk_rope_head_dim"]) // 2,
        intermediate=top.integer("moe_intermediate_size"),
        vocabulary=top.integer("vocab_size"),
        tied=_flag(top, "tie_word_embeddings", False),
        experts=top.integer("n_routed_experts"),
        top_k=top.integer("num_experts_per_tok"),
        latent=True,
        shared=top.integer("n_shared_experts"),
        dense_layers=top.integer("first_k_dense_replace"),
        dense_width=top.integer("intermediate_size"),
    )


def _falcon(top: Fields, name: str, heads: int, hidden: int) -> ModelShape:
    """Falcon: one KV head (multi-query), no gate, one norm a layer, four times as wide."""
    if _flag(top, "new_decoder_architecture", False) or not _flag(top, "multi_query", True):
        raise top.error("new_decoder_architecture", "only the multi-query form is known")
    return ModelShape(
        name=name,
        architecture="FalconForCausalLM",
        layers=top.integer("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=1,
        head_size=hidden // heads,
        intermediate=4 * hidden,
        vocabulary=top.integer("vocab_size"),
        tied=_flag(top, "tie_word_embeddings", True),
        gated=False,
        norms=1,
    )


def _chatglm(top: Fields, name: str) -> ModelShape:
    """ChatGLM2: the same parts under names of its own."""
    return ModelShape(
        name=name,
        architecture="ChatGLMModel",
        layers=top.integer("num_layers"),
        hidden=top.integer("hidden_size"),
        heads=top.integer("num_attention_heads"),
        kv_heads=top.integer("multi_query_group_num"),
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
            answers to, or a path (anything that ends in ``.json`` or holds a separator).

    Returns:
        The shape.

    Raises:
        ValueError: for an unknown name, or naming the file and field that is wrong.
    """
    text = os.fspath(name_or_path)
    if text.endswith(".json") or "/" in text or os.sep in text:
        config = read_json(text)
        stem = os.path.splitext(os.path.basename(text))[0]
        if stem == "config":
            stem = os.path.basename(os.path.dirname(os.path.abspath(text))) or stem
        given = config.get("_name_or_path") if isinstance(config, Mapping) else None
        name = given if isinstance(given, str) and given.strip() else stem
        return parse_config(config, name.rpartition("/")[2], os.path.basename(text))
    known = _shipped()
    if text.lower() not in known:
        raise ValueError(unknown_name("model", text, list_models()))
    stem = known[text.lower()]
    return parse_config(read_json(data_path("models") / f"{stem}.json"), stem, f"{stem}.json")
