"""What the figures of the serverless experiments share: models, requests, intervals."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servegym.envs.serverless_moe.config import PRESETS, build_system
from servegym.envs.serverless_moe.loads import Load
from servegym.envs.serverless_moe.records import Request
from servegym.envs.serverless_moe.system import SystemModel
from servegym.envs.workloads.activations import Activations
from servegym.envs.workloads.expert_sets import set_bits
from servegym.experiments.evaluation.stats import mean, stratified_bootstrap
from servegym.experiments.evaluation.tables import note
from servegym.experiments.papers.study import interval_columns
from servegym.hardware_profiles.serverless import GPU_PROFILES, SERVING, load_constants

MODELS = ("deepseek-v2-lite", "gpt-oss-20b")
"""Models with recorded routing."""
SYNTHETIC = "gpt2-moe"
"""The paper's small model; its routing is drawn, not recorded."""
N_IN, N_OUT = PRESETS["seed"]["prompt_tokens"], PRESETS["seed"]["output_tokens"]
"""Tokens of the paper's requests: 500 characters in, 200 tokens out (V-C)."""
(TREM_S,) = PRESETS["seed"]["trem_s"]
((TTFT_S, TPOT_S),) = PRESETS["seed"]["slo"]
LIMITS = {"ttft_limit_s": TTFT_S, "tpot_limit_s": TPOT_S}


def gpu_kind(gpu: str) -> str:
    """Whether the times of a GPU profile are ``chosen`` or ``derived`` from a card's laws."""
    return GPU_PROFILES[gpu].kind if gpu in GPU_PROFILES else "derived"


class Bill(NamedTuple):
    """What a platform charges: in words, c_c in USD per MB s, and c_g / c_c."""

    words: str
    price_cpu: float
    price_ratio: float


_PRICES = load_constants()["prices"]["values"]
BILLS = {
    "none": Bill("no fees", SERVING.price_cpu_usd_mb_s, SERVING.price_ratio),
    "aws_lambda": Bill("AWS fees", SERVING.price_cpu_usd_mb_s, SERVING.price_ratio),
    "alibaba_fc": Bill(
        "Alibaba's fees and prices",
        _PRICES["alibaba_cpu_usd_per_mb_s"],
        round(_PRICES["alibaba_gpu_tesla_over_cpu"], 2),
    ),
}
"""By the environment's ``fees``: the paper's bill, without fees or rounding; with those of AWS
Lambda, whose list has no GPU; and all of Alibaba Function Compute's list prices. Without fees only
the ratio of the prices matters."""

PROMPTS = 1_000
"""Default of ``--episodes``: held-out prompts of a model, at most."""


def billed_system(
    model: Any, bill: str = "none", gpu: str = "eager", **changes: Any
) -> SystemModel:
    """The system of a model as a bill of `BILLS` charges it, see `build_system`.

    ``changes`` are its further arguments, with ``price_ratio`` in the bill's place.
    """
    _, price_cpu, price_ratio = BILLS[bill]
    prices = {"fees": bill, "price_cpu_usd_mb_s": price_cpu, "price_ratio": price_ratio}
    return build_system(model, gpu, **(prices | changes))


def held_out(activations: Activations, most: int) -> NDArray[np.int64]:
    """Rows of the eval split, the first ``most`` of them."""
    return activations.rows("eval")[:most]


def seed_load(system: SystemModel, share: ArrayLike) -> Load:
    """The expected load of a request of the paper's setting, from predicted shares ``(L, K)``."""
    return Load.predicted(system, share, N_IN, N_OUT, TREM_S)


def recorded_request(
    activations: Activations,
    prompt: int,
    n_in: int = N_IN,
    n_out: int = N_OUT,
    trem_s: ArrayLike = TREM_S,
) -> Request:
    """A request that walks through the recorded tokens of a prompt, from the first one on.

    Where it is longer than the recording, the walk begins anew. It has ``n_in`` prompt tokens,
    ``n_out`` after the first generated one, and an invocation overhead, a number or (L,).
    """
    bank = activations.bank[activations.bank_start[prompt] : activations.bank_start[prompt + 1]]
    tokens = bank[np.arange(n_in + n_out) % len(bank)]
    counts = set_bits(tokens[:n_in], activations.model.experts).sum(axis=0)
    overhead = np.broadcast_to(np.asarray(trem_s, np.float64), bank.shape[1:]).copy()
    return Request(counts.astype(np.int64), tokens[n_in:], overhead, n_in)


def with_interval(key: str, values: ArrayLike) -> dict[str, Any]:
    """Mean over prompts as ``key``, its 95 % bootstrap interval as ``key_low``, ``key_high``."""
    return interval_columns(key, stratified_bootstrap(values, mean))


def verdict(claim: str, holds: bool, numbers: str) -> dict[str, Any]:
    """A note on a claim of the paper: ``claim``, ``verdict``, and the numbers as a sentence."""
    agrees = "agrees" if holds else "disagrees"
    return note(f"{numbers} ({agrees} with the paper: {claim}).", claim=claim, verdict=agrees)
