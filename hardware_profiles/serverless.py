"""Constants of serverless serving: CPU experts, container starts, model loading, prices.

``load_constants()`` reads what was measured and fitted; the rest is what the environments assume.
Units: seconds, tokens, MB of 2**20 bytes, GB of 1024 MB, vCPUs, USD.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from servegym._files import read_json
from servegym.hardware_profiles.load import data_path, load, unknown_name
from servegym.hardware_profiles.moe import list_moe_layers, load_moe

MB = float(2**20)


@functools.cache
def load_constants() -> dict[str, Any]:
    """What was measured and fitted, as it stands in the file that ships.

    The parts ``cpu_expert``, ``thread_scaling``, ``container_start``, ``model_load`` and
    ``prices``, each with its ``kind`` and ``provenance``, and with the errors of its fits.
    """
    return read_json(data_path("serverless/constants.json"))


# --------------------------------------------------------- experts: theta1 exp(-theta2 y) + theta3

# Times of a call on CPU with y GB are those of DeepSeek-V2-Lite's expert, of so many weights in two
# bytes each; other experts take times in proportion to their weights.
_EXPERT_PARAMETERS = 3 * 2048 * 1408
# Derived: one token takes 0.80 ms at 1 GB given theta2 and theta3; half of the 1.50 ms measured in
# float32 is 0.75 ms.
_THETA1_S = 6.86e-3
# Published: Remoe, Fig. 6; DeepSeek-V2-Lite's for models that are not in it.
_THETA2_PER_GB = {"deepseek-v2-lite": 2.4363, "gpt2-moe": 11.8665}
# Chosen: floor of a call at any memory.
_THETA3_S = 0.20e-3
# Derived: theta1 and theta3 of a model whose theta2 does not go with those above. Least relative
# squares with the paper's theta2: 0.978 ms measured in float32 on one vCPU, below it the share of
# the processor, above it the measured scaling over threads; off by up to 52 %, since these points
# ask for a theta2 of 3.0.
_OWN_THETAS_S = {"gpt2-moe": (56.8e-3, 0.796e-3)}
# Measured: each further token of a call on one vCPU. 37.9 ms for 256 tokens, float32, one thread of
# a Xeon; the fit on an EPYC gives 0.172 ms.
_EXPERT_TOKEN_S = 0.148e-3

MAX_VCPUS = 16.0
"""vCPUs beyond which a further token gets no faster. Chosen: no measurement beyond it is used."""


def expert_law(model: str, parameters: float) -> tuple[float, float, float, float]:
    """theta1 (s), theta2 (per GB), theta3 (s) and seconds of a further token on one vCPU.

    Of a model whose experts have so many weights.
    """
    scale = parameters / _EXPERT_PARAMETERS
    theta1, theta3 = _OWN_THETAS_S.get(model, (_THETA1_S * scale, _THETA3_S * scale))
    theta2 = _THETA2_PER_GB.get(model, _THETA2_PER_GB["deepseek-v2-lite"])
    return theta1, theta2, theta3, _EXPERT_TOKEN_S * scale


# ------------------------------------------------------------------- functions, network and prices

SWAP_BASE_S = 20e-6
"""Latency of a GPU-CPU move of token vectors, one way. Chosen: that of a small copy."""
SWAP_MB_S = 16.0 * 1024.0
"""Its rate. Chosen: PCIe 4.0 x16 in use."""
BANDWIDTH_MB_S = 1250.0
"""Network rate between functions. Chosen: 10 Gbit/s."""
LOAD_MB_S = 2600.0
"""Rate at which a starting function reads its weights. Measured: ServerlessLLM, safetensors on an
A5000, median 2,568 MB/s."""
CONTAINER_START_S = 1.0
"""Container start. Chosen: an image with a model's runtime; a bare Lambda image needs .17 s."""
PRICE_CPU_USD_MB_S = 1.6276e-8
"""Price of CPU memory. Published: list price of AWS Lambda x86-64, us-east-1."""
PRICE_RATIO = 3.0
"""Price of GPU memory over that of CPU memory. Published: Remoe, IV-E; Alibaba's list price gives
1.83."""
Z_MAX = 8
"""Most replicas of a remote function. Chosen: the paper gives none."""
PAYLOAD_MB = 6.0
"""Largest body of one invocation. Published: limit of AWS Lambda's synchronous invocations."""


@dataclass(frozen=True)
class GpuProfile:
    """Times of one block of a MoE model on the GPU, in seconds.

    Attributes:
        layer_base_s: non-expert module, one token.
        layer_token_s: each further token.
        experts_base_s: routed experts, one token (only deployments with experts on the GPU).
        experts_token_s: each further token.
        experts_table: tokens and seconds, which go before the two terms of the routed experts.
    """

    layer_base_s: float
    layer_token_s: float
    experts_base_s: float
    experts_token_s: float
    experts_table: tuple[np.ndarray, np.ndarray] | None = None


GPU_PROFILES: dict[str, GpuProfile] = {
    # A framework that launches its kernels one by one, experts in a loop.
    "eager": GpuProfile(0.4e-3, 1e-6, 1.1e-3, 1e-6),
    # Grouped kernels; the layer profiles of DeepSeek-V2-Lite give 0.06 (H100) to 0.16 ms (L40S) for
    # the experts of one token.
    "fused": GpuProfile(0.15e-3, 1e-6, 0.10e-3, 1e-6),
}
"""Profiles whose times are chosen."""

CARDS = {"a100": "a100-80g", "h100": "h100", "l40s": "l40s"}
"""GPU profiles that follow from the laws of this package, and the card of those laws."""
GPUS = (*GPU_PROFILES, *CARDS)
"""Names of all GPU profiles."""
_LLAMA_LAYER_MB = 2 * 218_103_808 / MB  # weights of a block of Llama-3.1-8B, in 16 bits
_CONTEXT = 256  # tokens that attention looks back on, about the mean of a request
_LONG = 1024  # tokens of the prompt that gives the time of a further token


def gpu_profile(
    name: str,
    model: str,
    *,
    non_expert_mb: float,
    expert_mb: float,
    parameters: float,
    experts: int,
    top_k: int,
) -> GpuProfile:
    """Times of a block of a model: a chosen profile of `GPUS`, or one from a card's laws.

    A card's times are those of vLLM's fused kernels, without the launches and the framework that
    ``eager`` has. Routed experts: the card's law of the model's layer where there is one; else
    ``base_s + max(active experts x time to read one, tokens x arithmetic)`` with the numbers of
    DeepSeek-V2-Lite's law, reading in proportion to the bytes of an expert (``expert_mb``) and
    arithmetic to its ``parameters`` that a token uses. Non-expert module (``non_expert_mb``, a mean
    over its blocks): the card's dense law of Llama-3.1-8B in proportion to the bytes, and its
    attention. ValueError for an unknown name; the nearest is named.
    """
    if name in GPU_PROFILES:
        return GPU_PROFILES[name]
    if name not in CARDS:
        raise ValueError(unknown_name("gpu", name, list(GPUS)))
    card = CARDS[name]
    listed = f"{card}-{model}" in list_moe_layers()
    law = load_moe(f"{card}-{model if listed else 'deepseek-v2-lite'}")
    tokens, seconds = law.layer_tokens, law.layer_times_s
    if not listed:
        active = experts * (1.0 - (1.0 - top_k / experts) ** tokens)
        read = active * law.expert_read_s * expert_mb * MB / law.model["expert_bytes"]
        work = top_k * parameters / (law.model["top_k"] * _EXPERT_PARAMETERS)
        slope = (seconds[-1] - seconds[-2]) / (tokens[-1] - tokens[-2])
        seconds = law.base_s + np.maximum(read, tokens * slope * work)
    llama = load(f"{card}-llama-3.1-8b")
    layers, size = llama.model["layers"], non_expert_mb / _LLAMA_LAYER_MB
    one, many = llama.dense_s(1) / layers, llama.dense_s(_LONG) / layers
    attention = llama.chunk_attention_s(_LONG, 0) / layers / _LONG
    return GpuProfile(
        one * size + llama.decode_attention_s(1, _CONTEXT) / layers,
        (many - one) / (_LONG - 1) * size + attention,
        float(seconds[0]),
        float(seconds[-1] - seconds[0]) / float(tokens[-1] - tokens[0]),
        (tokens, seconds),
    )


class Fees(NamedTuple):
    """What a platform bills besides memory and time: USD each invocation, and a duration's grain.

    Each billed duration is rounded up to a multiple of ``granularity_s``; 0: none is.
    """

    invocation_usd: float
    granularity_s: float


FEES: dict[str, Fees] = {
    # Remoe, Eq. 6, 8 and 9: memory and time alone.
    "none": Fees(0.0, 0.0),
    # List prices: 0.20 USD per million requests, durations rounded up to 1 ms.
    "aws_lambda": Fees(2e-7, 1e-3),
    # List prices: 75 units of 0.00002 USD per 10,000 invocations, durations by the millisecond.
    "alibaba_fc": Fees(1.5e-7, 1e-3),
}
"""Fees by platform; memory keeps the price that ``price_cpu_usd_mb_s`` says."""

Grid = tuple[float, float, float]
"""Memory specifications: lowest, highest, step in MB."""
_GRIDS: dict[str, tuple[Grid, Grid]] = {
    # Published: Remoe, V-A.
    "deepseek-v2-lite": ((1000.0, 40000.0, 100.0), (1000.0, 5000.0, 100.0)),
    "gpt2-moe": ((200.0, 5000.0, 100.0), (200.0, 2000.0, 100.0)),
    # Chosen: they hold the model.
    "mixtral-8x7b": ((1000.0, 120000.0, 100.0), (1000.0, 10000.0, 100.0)),
    "toy": ((100.0, 2000.0, 100.0), (20.0, 1000.0, 20.0)),
}


def memory_grids(model: str) -> tuple[Grid, Grid]:
    """Memory specifications of main and remote functions, DeepSeek-V2-Lite's if unknown."""
    return _GRIDS.get(model, _GRIDS["deepseek-v2-lite"])
