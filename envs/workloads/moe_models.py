"""MoE models: the sizes of what is served, computed from the published architectures."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from servegym._checks import choose
from servegym.envs.workloads.files import frozen

MB = 2**20


@dataclass(frozen=True, eq=False)
class MoeModel:
    """Sizes of a mixture-of-experts transformer. The arrays are read-only.

    Attributes:
        name: Name of the model.
        layers: All transformer blocks.
        moe_layers: Indexes of the L blocks with routed experts, ascending.
        experts: E, routed experts of a MoE layer, at most 64.
        top_k: Routed experts a token takes in a MoE layer.
        hidden: Width of a token vector, values.
        bytes_per_value: Mean bytes of one weight of a routed expert. Token vectors are float32 in
            ``gpt2-moe`` and 2 bytes a value in the others: see ``token_bytes``.
        expert_bytes: Bytes of one routed expert, biases and quantisation scales included.
        non_expert_mb: float64 (layers,), weights of each block apart from its routed experts
            (attention, norms, router, shared experts, dense FFN), MB of 2**20 bytes.
        embedding_mb: Embeddings, output head and final norm, MB of 2**20 bytes.
        kv_bytes_per_token_layer: Bytes of the KV cache of one token in one block.
    """

    name: str
    layers: int
    moe_layers: tuple[int, ...]
    experts: int
    top_k: int
    hidden: int
    bytes_per_value: float
    expert_bytes: int
    non_expert_mb: np.ndarray = field(repr=False)
    embedding_mb: float
    kv_bytes_per_token_layer: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "non_expert_mb", frozen(self.non_expert_mb, np.float64))

    @property
    def num_moe_layers(self) -> int:
        """L, the number of MoE layers."""
        return len(self.moe_layers)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token vector between layers (hidden x 4 in ``gpt2-moe``, else x 2)."""
        return self.hidden * (4 if self.bytes_per_value == 4 else 2)


def _deepseek_v2_lite() -> MoeModel:
    # bfloat16; first block dense (10,944); 102,400 words, head apart.
    hidden, inner, blocks = 2048, 1408, 27
    # Multi-head latent attention: 16 heads, 128 + 64 (rotary) query dims, 512-dim latent KV.
    attention = hidden * 16 * 192 + hidden * (512 + 64) + 512
    attention += 512 * 16 * (128 + 128) + 16 * 128 * hidden
    block = attention + 2 * hidden
    expert = 3 * hidden * inner
    sizes = np.full(blocks, (block + 64 * hidden + 2 * expert) * 2 / MB)
    sizes[0] = (block + 3 * hidden * 10944) * 2 / MB
    return MoeModel(
        name="deepseek-v2-lite",
        layers=blocks,
        moe_layers=tuple(range(1, blocks)),
        experts=64,
        top_k=6,
        hidden=hidden,
        bytes_per_value=2.0,
        expert_bytes=2 * expert,
        non_expert_mb=sizes,
        embedding_mb=(2 * 102400 * hidden + hidden) * 2 / MB,
        kv_bytes_per_token_layer=(512 + 64) * 2,
    )


def _gpt_oss_20b() -> MoeModel:
    # Experts MXFP4 with bfloat16 biases, the rest bfloat16; 201,088 words, head apart; every other
    # block attends to the last 128 tokens only, which the KV size does not use.
    hidden, inner, blocks = 2880, 2880, 24
    # 64 query and 8 KV heads of 64, with biases and one sink a head; router with bias.
    attention = 2 * hidden * 4096 + 2 * hidden * 512 + 4096 + 2 * 512 + hidden + 64
    block = attention + 2 * hidden + 32 * hidden + 32
    # MXFP4: blocks of 32 values of 4 bits share a scale of 8 bits; biases are bfloat16.
    per_value = 4.25 / 8
    weights = int(3 * hidden * inner * per_value)
    return MoeModel(
        name="gpt-oss-20b",
        layers=blocks,
        moe_layers=tuple(range(blocks)),
        experts=32,
        top_k=4,
        hidden=hidden,
        bytes_per_value=per_value,
        expert_bytes=weights + 2 * (2 * inner + hidden),
        non_expert_mb=np.full(blocks, block * 2 / MB),
        embedding_mb=(2 * 201088 * hidden + hidden) * 2 / MB,
        kv_bytes_per_token_layer=2 * 8 * 64 * 2,
    )


def _mixtral_8x7b() -> MoeModel:
    # bfloat16; 32 query, 8 KV heads of 128; 32,000 words, head apart.
    hidden, inner, blocks = 4096, 14336, 32
    block = 2 * hidden * hidden + 2 * hidden * 1024 + 2 * hidden + 8 * hidden
    return MoeModel(
        name="mixtral-8x7b",
        layers=blocks,
        moe_layers=tuple(range(blocks)),
        experts=8,
        top_k=2,
        hidden=hidden,
        bytes_per_value=2.0,
        expert_bytes=3 * hidden * inner * 2,
        non_expert_mb=np.full(blocks, block * 2 / MB),
        embedding_mb=(2 * 32000 * hidden + hidden) * 2 / MB,
        kv_bytes_per_token_layer=2 * 8 * 128 * 2,
    )


def _gpt2_moe() -> MoeModel:
    # GPT-2 (124M) with each FFN made 8 experts and a router without bias; float32 chosen, as GPT-2
    # is published; head tied to the embedding.
    hidden, inner, blocks = 768, 3072, 12
    block = 4 * hidden * hidden + 4 * hidden + 4 * hidden + 8 * hidden
    return MoeModel(
        name="gpt2-moe",
        layers=blocks,
        moe_layers=tuple(range(blocks)),
        experts=8,
        top_k=2,
        hidden=hidden,
        bytes_per_value=4.0,
        expert_bytes=(2 * hidden * inner + inner + hidden) * 4,
        non_expert_mb=np.full(blocks, block * 4 / MB),
        embedding_mb=(50257 * hidden + 1024 * hidden + 2 * hidden) * 4 / MB,
        kv_bytes_per_token_layer=2 * hidden * 4,
    )


_MODELS = {
    "deepseek-v2-lite": _deepseek_v2_lite,
    "gpt-oss-20b": _gpt_oss_20b,
    "mixtral-8x7b": _mixtral_8x7b,
    "gpt2-moe": _gpt2_moe,
}


def list_models() -> list[str]:
    """Names of the models that :func:`load_model` knows."""
    return list(_MODELS)


def load_model(name: str) -> MoeModel:
    """Return a model's sizes.

    Args:
        name: One of :func:`list_models`.

    Returns:
        The model.

    Raises:
        ValueError: Another name; the message has the nearest one.

    Example:
        >>> load_model("deepseek-v2-lite").expert_bytes
        17301504
    """
    return _MODELS[choose("model", name, _MODELS)]()
