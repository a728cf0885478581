"""Synthetic catalogs of any size with the statistics of the real one.

A Gaussian copula. For prompt i and LLM j, for the score (q = s) and the length (q = l)

    z_qij = sqrt(v_q) a_qj + sqrt(1 - v_q) (sqrt(r_q) c_qi + sqrt(1 - r_q) e_qij)

with standard normal LLM effects a, prompt effects c and residuals e: v is the share of the
variance that lies between LLMs, r the correlation of two LLMs over prompts. (a_s, a_l), (e_s, e_l)
and (c_s, c_l, c_p) are correlated among themselves; c_p is the prompt's own length. Values are the
pooled quantiles of the real catalog at Phi(z). ``servegym.envs.workloads.build.synthetic_catalog``
fits the parameters and writes ``data/synthetic.json``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from servegym._checks import whole
from servegym.envs.workloads.catalog import MAX_OUTPUT_TOKENS, Catalog, make_split
from servegym.envs.workloads.files import read_fitted

QUANTILES = 101


def _pair(rng: np.random.Generator, size: int, correlation: float) -> np.ndarray:
    """float64 (2, size): standard normals of the given correlation."""
    draws = rng.standard_normal((2, size))
    draws[1] = correlation * draws[0] + np.sqrt(1 - correlation**2) * draws[1]
    return draws


def draw_values(
    fit: dict[str, Any], num_models: int, num_prompts: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw a catalog's values by ``parameters`` and ``quantiles``, as in ``data/synthetic.json``.

    Returns:
        Prompt tokens (P,), scores (P, M) and output tokens (P, M), float64, not yet rounded.
    """
    from scipy.special import ndtr

    latent = fit["parameters"]
    prompt = np.array(
        [
            [1.0, latent["prompt_score_length"], latent["prompt_score_tokens"]],
            [latent["prompt_score_length"], 1.0, latent["prompt_length_tokens"]],
            [latent["prompt_score_tokens"], latent["prompt_length_tokens"], 1.0],
        ]
    )
    rng = np.random.default_rng([seed, 0])
    common = np.linalg.cholesky(prompt) @ rng.standard_normal((3, num_prompts))
    grid = np.linspace(0, 1, QUANTILES)
    table = {name: np.asarray(values) for name, values in fit["quantiles"].items()}
    values = np.empty((2, num_prompts, num_models))
    for model in range(num_models):
        # A generator per LLM: the first ones stay the same when more are asked for.
        rng = np.random.default_rng([seed, model + 1])
        effect = _pair(rng, 1, latent["effects"])
        residual = _pair(rng, num_prompts, latent["residuals"])
        for q, name in enumerate(("score", "length")):
            v, r = latent[f"{name}_between"], latent[f"{name}_common"]
            z = np.sqrt(r) * common[q] + np.sqrt(1 - r) * residual[q]
            z = np.sqrt(v) * effect[q] + np.sqrt(1 - v) * z
            values[q, :, model] = np.interp(ndtr(z), grid, table[name])
    return np.interp(ndtr(common[2]), grid, table["prompt"]), values[0], values[1]


def synthetic_catalog(
    num_models: int = 12,
    num_prompts: int = 1000,
    seed: int = 0,
    max_output_tokens: int = MAX_OUTPUT_TOKENS,
) -> Catalog:
    """Draw a synthetic catalog; the LLMs are called ``synthetic-00``, ``synthetic-01``, ...

    Args:
        num_models: Number of LLMs, >= 1. The first ones do not depend on how many follow.
        num_prompts: Number of prompts, >= 10.
        seed: Seed, >= 0.
        max_output_tokens: Cut outputs here, in 1..300.

    Returns:
        The catalog, split 60/10/30.

    Raises:
        ValueError: An argument out of range.
    """
    num_models = whole("num_models", num_models, 1)
    num_prompts = whole("num_prompts", num_prompts, 10)
    seed = whole("seed", seed, 0)
    cap = whole("max_output_tokens", max_output_tokens, 1, MAX_OUTPUT_TOKENS)
    fit = read_fitted("synthetic.json")
    prompts, scores, lengths = draw_values(fit, num_models, num_prompts, seed)
    return Catalog(
        name="synthetic",
        models=tuple(f"synthetic-{model:02d}" for model in range(num_models)),
        prompt_tokens=np.maximum(np.rint(prompts), 1),
        scores=np.clip(scores, 0, 1),
        output_tokens=np.clip(np.rint(lengths), 1, cap),
        split=make_split(np.zeros(num_prompts), seed),
        max_output_tokens=cap,
        provenance={"kind": "synthetic", "seed": seed, "fitted_to": fit["fitted_to"]},
    )
