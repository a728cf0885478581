"""Fit the generator of synthetic catalogs to the real one; writes ``data/synthetic.json``.

    python -m servegym.envs.workloads.build.synthetic_catalog

The model is that of ``servegym.envs.workloads.synthetic_catalog``, fitted to the train prompts of
``alpaca_eval_7b``. As outputs are cut at a cap, correlations of z are not those of the values; the
fit moves the parameters until simulated moments equal the measured ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.envs.workloads.build import write_made
from servegym.envs.workloads.catalog import Catalog
from servegym.envs.workloads.catalog_names import load_catalog
from servegym.envs.workloads.files import DATA_DIR
from servegym.envs.workloads.synthetic_catalog import QUANTILES, draw_values

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
    """The moments that a synthetic catalog reproduces, of (P,), (P, M) and (P, M) values.

    Pooled means and standard deviations, standard deviation of the LLMs' means, mean Pearson
    correlation of two LLMs over prompts, and correlations of score and length between LLM means,
    between prompt means (with log prompt tokens too) and between what is left.
    """
    out = {
        "prompt_log_tokens_mean": np.log(prompt_tokens).mean(),
        "prompt_log_tokens_std": np.log(prompt_tokens).std(),
    }
    upper = np.triu_indices(scores.shape[1], 1)
    rest, per_model, per_prompt = [], [], [np.log(prompt_tokens)]
    for name, values in (("score", scores), ("length", output_tokens)):
        out[f"{name}_mean"] = values.mean()
        out[f"{name}_std"] = values.std()
        out[f"{name}_model_std"] = values.mean(axis=0).std(ddof=1)
        out[f"{name}_correlation"] = np.asarray(np.corrcoef(values.T))[upper].mean()
        rows, columns = values.mean(axis=1), values.mean(axis=0)
        per_prompt.append(rows)
        per_model.append(columns)
        rest.append((values - rows[:, None] - columns + values.mean()).ravel())
    between = np.corrcoef(per_prompt)
    out["model_score_length"] = np.corrcoef(per_model)[0, 1]
    out["residual_score_length"] = np.corrcoef(rest)[0, 1]
    out["prompt_score_length"] = between[1, 2]
    out["prompt_score_tokens"] = between[0, 1]
    out["prompt_length_tokens"] = between[0, 2]
    return {key: float(value) for key, value in out.items()}


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
        model = moments(*draw_values(result, 150, 2000, 1000 + step % 3))
        for name, moment in _STEERED.items():
            if name.endswith("_between"):
                latent[name] *= measured[moment] / model[moment]
            else:
                latent[name] += 0.5 * (measured[moment] - model[moment])
            low = 0.001 if name.endswith(("_between", "_common")) else -0.95
            latent[name] = float(np.clip(latent[name], low, 0.95))
    result["parameters"] = {name: float(f"{value:.4g}") for name, value in latent.items()}
    runs = [
        moments(*draw_values(result, catalog.num_models, len(rows), 5000 + k)) for k in range(50)
    ]
    result["fit_error"] = {
        name: {
            "measured": float(f"{value:.4g}"),
            "model_mean": float(f"{np.mean([run[name] for run in runs]):.4g}"),
            "model_std": float(f"{np.std([run[name] for run in runs]):.4g}"),
        }
        for name, value in measured.items()
    }
    return result


def main() -> None:
    """Write the fit."""
    content = fit(load_catalog("alpaca_eval_7b"))
    write_made(DATA_DIR / "synthetic.json", "synthetic_catalog", content)


if __name__ == "__main__":
    run_main(main)
