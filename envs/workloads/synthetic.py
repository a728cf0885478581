"""Synthetic catalogs of any size with the statistics of the real one.

A Gaussian copula. For prompt i and LLM j, for the score (q = s) and the length (q = l)

    z_qij = sqrt(v_q) a_qj + sqrt(1 - v_q) (sqrt(r_q) c_qi + sqrt(1 - r_q) e_qij)

with standard normal LLM effects a, prompt effects c and residuals e: v is the share of the
variance that lies between LLMs, r the correlation of two LLMs over prompts. (a_s, a_l), (e_s, e_l)
and (c_s, c_l, c_p) are correlated among themselves; c_p is the prompt's own length. Values are the
pooled quantiles of the real catalog at Phi(z). The parameters are fitted on the train prompts:

    python -m servegym.envs.workloads.synthetic

writes ``data/synthetic.json``. As outputs are cut at a cap, correlations of z are not those of the
values; the fit moves the parameters until simulated moments equal the measured ones.
"""

from __future__ import annotations

import argparse
import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from servegym.envs._checks import whole
from servegym.envs.workloads._util import DATA_DIR, read_fitted, write_json
from servegym.envs.workloads.catalog import MAX_OUTPUT_TOKENS, Catalog, load_catalog, make_split

QUANTILES = 101
# Parameter -> the moment that it steers.
_STEERED = {
    "score_between": "score_model_std",
    "length_between": "length_model_std",
    "score_common": "score_correlation",
    "length_common": "length_correlation",
    "effects": "model_score_length",
    "residuals": "residual_score_length",
    "prompt_score_length": "prompt_score_length",
    "prompt_score_tokens": "prompt_score_tokens",
    "prompt_length_tokens": "prompt_length_tokens",
}


def moments(
    prompt_tokens: np.ndarray, scores: np.ndarray, output_tokens: np.ndarray
) -> dict[str, float]:
    """The moments that a synthetic catalog reproduces.

    Args:
        prompt_tokens: (P,).
        scores: (P, M), M >= 3.
        output_tokens: (P, M).

    Returns:
        Pooled means and standard deviations, standard deviation of the LLMs' means, mean Pearson
        correlation of two LLMs over prompts, and correlations of score and length between LLM
        means, between prompt means (with log prompt tokens too) and between what is left.
    """
    found = {
        "prompt_log_tokens_mean": np.log(prompt_tokens).mean(),
        "prompt_log_tokens_std": np.log(prompt_tokens).std(),
    }
    upper = np.triu_indices(scores.shape[1], 1)
    rest, per_model, per_prompt = [], [], [np.log(prompt_tokens)]
    for name, values in (("score", scores), ("length", output_tokens)):
        values = np.asarray(values, dtype=np.float64)
        found[f"{name}_mean"] = values.mean()
        found[f"{name}_std"] = values.std()
        found[f"{name}_model_std"] = values.mean(axis=0).std(ddof=1)
        found[f"{name}_correlation"] = np.asarray(np.corrcoef(values.T))[upper].mean()
        rows, columns = values.mean(axis=1), values.mean(axis=0)
        per_prompt.append(rows)
        per_model.append(columns)
        rest.append((values - rows[:, None] - columns + values.mean()).ravel())
    between = np.corrcoef(per_prompt)
    found["model_score_length"] = np.corrcoef(per_model)[0, 1]
    found["residual_score_length"] = np.corrcoef(rest)[0, 1]
    found["prompt_score_length"] = between[1, 2]
    found["prompt_score_tokens"] = between[0, 1]
    found["prompt_length_tokens"] = between[0, 2]
    return {key: float(value) for key, value in found.items()}


def _pair(rng: np.random.Generator, size: int, correlation: float) -> np.ndarray:
    """float64 (2, size): standard normals of the given correlation."""
    draws = rng.standard_normal((2, size))
    draws[1] = correlation * draws[0] + np.sqrt(1 - correlation**2) * draws[1]
    return draws


def _generate(
    fit: dict[str, Any], num_models: int, num_prompts: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Prompt tokens (P,), scores (P, M) and output tokens (P, M), float64, not yet rounded."""
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


@lru_cache(maxsize=1)
def fitted() -> dict[str, Any]:
    """Contents of ``data/synthetic.json``."""
    return read_fitted("synthetic.json", "synthetic")


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
    fit = fitted()
    prompts, scores, lengths = _generate(fit, num_models, num_prompts, seed)
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


def fit(catalog: Catalog) -> dict[str, Any]:
    """Fit the generator to the train prompts of a catalog; the contents of ``synthetic.json``."""
    rows = catalog.rows("train")
    tokens = catalog.prompt_tokens[rows].astype(np.float64)
    scores = catalog.scores[rows].astype(np.float64)
    lengths = catalog.output_tokens[rows].astype(np.float64)
    grid = np.linspace(0, 1, QUANTILES)
    measured = moments(tokens, scores, lengths)
    result: dict[str, Any] = {
        "kind": "fitted",
        "fitted_to": f"{catalog.name}, {len(rows)} train prompts x {catalog.num_models} LLMs",
        "quantiles": {
            name: [float(f"{value:.4g}") for value in np.quantile(values, grid)]
            for name, values in (("prompt", tokens), ("score", scores), ("length", lengths))
        },
    }
    latent = {"score_between": 0.1, "length_between": 0.1}
    latent |= {name: measured[moment] for name, moment in _STEERED.items() if name not in latent}
    for step in range(30):
        result["parameters"] = latent
        model = moments(*_generate(result, 150, 2000, 1000 + step % 3))
        for name, moment in _STEERED.items():
            if name.endswith("_between"):
                latent[name] *= measured[moment] / model[moment]
            else:
                latent[name] += 0.5 * (measured[moment] - model[moment])
            low = 0.001 if name.endswith(("_between", "_common")) else -0.95
            latent[name] = float(np.clip(latent[name], low, 0.95))
    result["parameters"] = {name: float(f"{value:.4g}") for name, value in latent.items()}
    runs = [moments(*_generate(result, catalog.num_models, len(rows), 5000 + k)) for k in range(50)]
    result["fit_error"] = {
        name: {
            "measured": float(f"{value:.4g}"),
            "model_mean": float(f"{np.mean([run[name] for run in runs]):.4g}"),
            "model_std": float(f"{np.std([run[name] for run in runs]):.4g}"),
        }
        for name, value in measured.items()
    }
    result["command"] = "python -m servegym.envs.workloads.synthetic"
    result["date"] = datetime.date.today().isoformat()
    return result


def main(argv: list[str] | None = None) -> None:
    """Command line entry; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=DATA_DIR / "synthetic.json")
    args = parser.parse_args(argv)
    write_json(args.out, fit(load_catalog("alpaca_eval_7b")))
    print(args.out)


if __name__ == "__main__":
    main()
