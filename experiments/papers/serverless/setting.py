"""The setting of the paper's figures: models, limits and requests; intervals over prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from servegym.envs.serverless_moe.config import PRESETS
from servegym.envs.serverless_moe.records import Request, recorded_request
from servegym.envs.workloads.activations import Activations
from servegym.experiments.evaluation.stats import mean, stratified_bootstrap
from servegym.experiments.papers.study import interval_columns

MODELS = ("deepseek-v2-lite", "gpt-oss-20b")
"""Models with recorded routing."""
SYNTHETIC = "gpt2-moe"
"""The paper's small model; its routing is drawn, not recorded."""
N_IN, N_OUT = PRESETS["seed"]["prompt_tokens"], PRESETS["seed"]["output_tokens"]
"""Tokens of the paper's requests: 500 characters in, 200 tokens out (V-C)."""
(TREM_S,) = PRESETS["seed"]["trem_s"]
LIMITS = dict(zip(("ttft_limit_s", "tpot_limit_s"), *PRESETS["seed"]["slo"], strict=True))


def paper_request(
    activations: Activations, prompt: int, n_in: int = N_IN, n_out: int = N_OUT
) -> Request:
    """A request that walks through the recorded tokens of a prompt, with the paper's overhead."""
    overhead = np.full(activations.bank.shape[1], TREM_S)
    return recorded_request(activations, prompt, 0, n_in, n_out, overhead)


def with_interval(key: str, values: ArrayLike) -> dict[str, Any]:
    """Mean over prompts as ``key``, its 95 % bootstrap interval as ``key_low``, ``key_high``."""
    return interval_columns(key, stratified_bootstrap(values, mean))
