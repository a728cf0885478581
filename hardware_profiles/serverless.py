"""Constants of serverless serving: CPU experts, container starts, model loading, prices.

Two things are here:

* ``load_constants()`` reads what was measured and fitted; ``build/fit_serverless.py`` made it.
* ``SERVING``, ``GPU_PROFILES``, ``FEES`` and ``memory_grids`` hold what the serverless environments
  assume.
  Each value says whether it is measured, derived, published or chosen, and from what; those with
  a measurement behind them are read from the same file.

Units: seconds, tokens, MB of 2**20 bytes, GB of 1024 MB, vCPUs, USD.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from servegym._files import read_json
from servegym.hardware_profiles.load import data_path, load, unknown_name
from servegym.hardware_profiles.moe import list_moe_layers, load_moe

MB = float(2**20)


@dataclass(frozen=True)
class ThetaLaw:
    """Time of one expert call against memory: ``theta1 exp(-theta2 y) + theta3`` (Eq. 12 ff.).

    Attributes:
        theta1_s: Seconds.
        theta2_per_gb: Per GB of memory, 1 GB being one vCPU.
        theta3_s: Seconds that no memory takes away.
    """

    theta1_s: float
    theta2_per_gb: float
    theta3_s: float

    def seconds(self, memory_gb: float) -> float:
        """Seconds of one call for one token with ``memory_gb`` of memory."""
        return self.theta1_s * math.exp(-self.theta2_per_gb * memory_gb) + self.theta3_s


@functools.cache
def load_constants() -> dict[str, Any]:
    """What was measured and fitted, as it stands in the file that ships.

    Returns:
        The parts ``cpu_expert``, ``thread_scaling``, ``container_start``, ``model_load`` and
        ``prices``, each with its ``kind`` and ``provenance``, and with the errors of its fits.
    """
    return read_json(data_path("serverless/constants.json"))


# ------------------------------------------------------------------- what the environments assume

ORIGINS = ("measured", "derived", "published", "chosen")
Grid = tuple[float, float, float]
"""Memory specifications: lowest, highest, step in MB."""


def _value(default: Any, kind: str, source: str) -> Any:
    """A field that knows where its value is from; a callable default is called when it is made."""
    about = {"kind": kind, "source": source}
    if callable(default):
        return field(default_factory=default, metadata=about)
    return field(default=default, metadata=about)


def _fitted(read: Any, digits: int) -> Any:
    return lambda: float(f"{read(load_constants()):.{digits}g}")


@dataclass(frozen=True)
class ServingConstants:
    """Constants of the serverless environments; ``SERVING`` is the default.

    The expert's times are those of DeepSeek-V2-Lite's expert of ``expert_parameters`` weights in
    two bytes each; other experts take times in proportion to their weights, but for the laws of
    one token in ``expert_own_s``.

    Attributes:
        expert_parameters: weights of the expert that the times are for.
        expert_theta1_s: theta1 of ``theta1 exp(-theta2 y) + theta3``, one token with y GB.
        expert_theta2_per_gb: theta2 by model; ``default`` for the others.
        expert_theta3_s: theta3.
        expert_own_s: theta1 and theta3 of models whose theta2 does not go with those above.
        expert_token_s: each further token of a call on one vCPU.
        max_vcpus: vCPUs beyond which a further token gets no faster.
        swap_base_s: latency of a GPU-CPU move of token vectors, one way.
        swap_mb_s: its rate, MB/s.
        bandwidth_mb_s: network rate between functions, MB/s.
        load_mb_s: rate at which a starting function reads its weights, MB/s.
        container_start_s: start of a container with the runtime of a model.
        price_cpu_usd_mb_s: CPU memory, USD per MB s.
        price_ratio: price of GPU memory over that of CPU memory.
        z_max: most replicas of a remote function.
        payload_mb: largest body of one invocation, MB.
    """

    expert_parameters: int = _value(
        3 * 2048 * 1408, "published", "DeepSeek-V2-Lite's configuration"
    )
    expert_theta1_s: float = _value(
        6.86e-3,
        "derived",
        "one token takes 0.80 ms at 1 GB given theta2 and theta3; half of the 1.50 ms measured in "
        "float32 is 0.75 ms",
    )
    expert_theta2_per_gb: Mapping[str, float] = _value(
        lambda: _theta2(load_constants()["thread_scaling"]["paper_theta2_per_gb"]),
        "published",
        "Remoe, Fig. 6; DeepSeek-V2-Lite's for models that are not in it",
    )
    expert_theta3_s: float = _value(0.20e-3, "chosen", "floor of a call at any memory")
    expert_own_s: Mapping[str, tuple[float, float]] = _value(
        lambda: {"gpt2-moe": (56.8e-3, 0.796e-3)},
        "derived",
        "least relative squares with the paper's theta2: 0.978 ms measured in float32 on one vCPU, "
        "below it the share of the processor, above it the measured scaling over threads; off by "
        "up to 52 %, since these points ask for a theta2 of 3.0",
    )
    expert_token_s: float = _value(
        0.148e-3,
        "measured",
        "37.9 ms for 256 tokens, float32, one thread of a Xeon; the fit on an EPYC gives 0.172 ms",
    )
    max_vcpus: float = _value(16.0, "chosen", "no measurement beyond 16 threads is used")
    swap_base_s: float = _value(20e-6, "chosen", "latency of a small copy")
    swap_mb_s: float = _value(16.0 * 1024.0, "chosen", "16 GB/s, PCIe 4.0 x16 in use")
    bandwidth_mb_s: float = _value(1250.0, "chosen", "10 Gbit/s")
    load_mb_s: float = _value(
        _fitted(lambda c: c["model_load"]["rates"]["a5000-safetensors"]["mb_per_s"], 2),
        "measured",
        "ServerlessLLM, safetensors on an A5000: median 2,568 MB/s, to two digits",
    )
    container_start_s: float = _value(
        1.0, "chosen", "an image with a model's runtime; a bare Lambda image takes 0.17 s"
    )
    price_cpu_usd_mb_s: float = _value(
        _fitted(lambda c: c["prices"]["values"]["aws_cpu_usd_per_mb_s"], 5),
        "published",
        "list price of AWS Lambda x86-64, us-east-1",
    )
    price_ratio: float = _value(3.0, "published", "Remoe, IV-E; Alibaba's list price gives 1.83")
    z_max: int = _value(8, "chosen", "the paper gives none")
    payload_mb: float = _value(6.0, "published", "limit of AWS Lambda's synchronous invocations")

    def theta2_per_gb(self, model: str) -> float:
        """theta2 of a model."""
        return self.expert_theta2_per_gb.get(model, self.expert_theta2_per_gb["default"])

    def expert_thetas_s(self, model: str, parameters: float) -> tuple[float, float]:
        """theta1 and theta3 of a model whose experts have so many weights."""
        if model in self.expert_own_s:
            return self.expert_own_s[model]
        scale = parameters / self.expert_parameters
        return self.expert_theta1_s * scale, self.expert_theta3_s * scale

    def provenance(self, model: str = "") -> dict[str, str]:
        """``kind: source`` of every constant by name, those of a model's own law for its own."""
        sources = {f.name: f"{f.metadata['kind']}: {f.metadata['source']}" for f in fields(self)}
        if model in self.expert_own_s:
            source = sources["expert_own_s"]
            sources |= dict.fromkeys(("expert_theta1_s", "expert_theta3_s"), source)
        return sources


def _theta2(paper: Mapping[str, float]) -> dict[str, float]:
    return {**paper, "default": paper["deepseek-v2-lite"]}


@dataclass(frozen=True)
class GpuProfile:
    """Times of one block of a MoE model on the GPU, in seconds.

    Attributes:
        layer_base_s: non-expert module, one token.
        layer_token_s: each further token.
        experts_base_s: routed experts, one token (only deployments with experts on the GPU).
        experts_token_s: each further token.
        kind: where the values are from.
        source: the same in words.
        experts_table: tokens and seconds, which go before the two terms of the routed experts.
    """

    layer_base_s: float
    layer_token_s: float
    experts_base_s: float
    experts_token_s: float
    kind: str
    source: str
    experts_table: tuple[np.ndarray, np.ndarray] | None = None


SERVING = ServingConstants()
GPU_PROFILES: dict[str, GpuProfile] = {
    "eager": GpuProfile(
        0.4e-3,
        1e-6,
        1.1e-3,
        1e-6,
        "chosen",
        "a framework that launches its kernels one by one, experts in a loop",
    ),
    "fused": GpuProfile(
        0.15e-3,
        1e-6,
        0.10e-3,
        1e-6,
        "chosen",
        "grouped kernels; the layer profiles of DeepSeek-V2-Lite give 0.06 (H100) to 0.16 ms "
        "(L40S) for the experts of one token",
    ),
}

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
    """Times of a block of a model: a chosen profile, or one that follows from a card's laws.

    A card's times are those of vLLM's fused kernels, without the launches and the framework that
    ``eager`` has. Routed experts: the card's law of the model's layer where there is one; else
    ``base_s + max(active experts x time to read one, tokens x arithmetic)`` with the numbers of
    DeepSeek-V2-Lite's law, reading in proportion to the bytes of an expert and arithmetic to the
    weights that a token uses. Non-expert module: the card's dense law of Llama-3.1-8B in proportion
    to the bytes, and its attention.

    Args:
        name: One of `GPUS`.
        model: Name of the model.
        non_expert_mb: Mean over its blocks of the weights apart from routed experts.
        expert_mb: A routed expert.
        parameters: Weights of a routed expert.
        experts: Routed experts of a layer.
        top_k: Experts of a token.

    Raises:
        ValueError: For an unknown name; the nearest is named.
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
        work = top_k * parameters / (law.model["top_k"] * SERVING.expert_parameters)
        slope = (seconds[-1] - seconds[-2]) / (tokens[-1] - tokens[-2])
        seconds = law.base_s + np.maximum(read, tokens * slope * work)
    llama = load(f"{card}-llama-3.1-8b")
    layers, size = llama.model["layers"], non_expert_mb / _LLAMA_LAYER_MB
    one, many = llama.dense_s(1) / layers, llama.dense_s(_LONG) / layers
    attention = llama.chunk_attention_s(_LONG, 0) / layers / _LONG
    source = (
        f"vLLM's fused kernels on {law.device['name']}, no launches: routed experts by the law "
        f"{law.name}{'' if listed else ', scaled to the size of the expert'}; other weights and "
        f"attention by {llama.name}"
    )
    return GpuProfile(
        one * size + llama.decode_attention_s(1, _CONTEXT) / layers,
        (many - one) / (_LONG - 1) * size + attention,
        float(seconds[0]),
        float(seconds[-1] - seconds[0]) / float(tokens[-1] - tokens[0]),
        "derived",
        source,
        (tokens, seconds),
    )


@dataclass(frozen=True)
class Fees:
    """What a platform bills besides memory and time.

    Attributes:
        invocation_usd: USD for each invocation.
        granularity_s: Each billed duration is rounded up to a multiple of so many seconds; 0: none
            is.
        kind: One of `ORIGINS`.
        source: Where the values are from, in words.
    """

    invocation_usd: float
    granularity_s: float
    kind: str
    source: str


FEES: dict[str, Fees] = {
    "none": Fees(0.0, 0.0, "published", "Remoe, Eq. 6, 8 and 9: memory and time alone"),
    "aws_lambda": Fees(
        load_constants()["prices"]["values"]["aws_request_usd"],
        1e-3,
        "published",
        "list prices of AWS Lambda: 0.20 USD per million requests, durations rounded up to 1 ms",
    ),
    "alibaba_fc": Fees(
        load_constants()["prices"]["values"]["alibaba_request_usd"],
        1e-3,
        "published",
        "list prices of Alibaba Function Compute: 75 units of 0.00002 USD per 10,000 invocations, "
        "durations billed by the millisecond",
    ),
}
"""Fees by platform; memory keeps the price that ``price_cpu_usd_mb_s`` says."""

_GRIDS: dict[str, tuple[Grid, Grid, str]] = {
    "deepseek-v2-lite": ((1000.0, 40000.0, 100.0), (1000.0, 5000.0, 100.0), "published: V-A"),
    "gpt2-moe": ((200.0, 5000.0, 100.0), (200.0, 2000.0, 100.0), "published: V-A"),
    "mixtral-8x7b": ((1000.0, 120000.0, 100.0), (1000.0, 10000.0, 100.0), "chosen: holds it"),
    "toy": ((100.0, 2000.0, 100.0), (20.0, 1000.0, 20.0), "chosen: holds it"),
}


def memory_grids(model: str) -> tuple[Grid, Grid, str]:
    """Memory specifications of the main and of the remote functions, and where they are from.

    Args:
        model: its name; one that is not listed gets DeepSeek-V2-Lite's.
    """
    if model in _GRIDS:
        return _GRIDS[model]
    main, remote, _ = _GRIDS["deepseek-v2-lite"]
    return main, remote, "chosen: those of deepseek-v2-lite"
