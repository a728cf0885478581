"""Are similar prompts' experts alike? Similarity against divergence of activations (Fig. 3).

``python -m servegym.experiments.papers.serverless.similarity`` compares every held-out prompt with
all training prompts of recorded routing: GPT-OSS-20B by the similarity of Eq. 11 and by a sentence
encoder; DeepSeek-V2-Lite, recorded without texts, by its tasks. Intervals are over held-out
prompts; the training prompts are the same throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from servegym._command_line import run_main
from servegym.envs.workloads.activations import Activations, load_activations
from servegym.experiments.papers.plotting import Bars
from servegym.experiments.papers.serverless.billing import MODELS, PROMPTS, held_out, with_interval
from servegym.experiments.papers.serverless.claims import CLAIMS
from servegym.experiments.papers.serverless.predictors import js_divergence
from servegym.experiments.papers.study import Options, Study, command
from servegym.experiments.papers.verdicts import found_for

FEW = 15
"""Training prompts that the paper's Fig. 3 compares one test prompt with."""
DRAWS = 50

Array = NDArray[np.float64]


def rank_correlation(first: Array, second: Array) -> Array:
    """Spearman's correlation of the rows of two arrays (Q, N): (Q,)."""
    ranks = [rankdata(x, axis=1) for x in (first, second)]
    a, b = (r - r.mean(axis=1, keepdims=True) for r in ranks)
    return (a * b).sum(axis=1) / np.sqrt((a**2).sum(axis=1) * (b**2).sum(axis=1))


def pair_divergences(activations: Activations, queries: NDArray[np.int64]) -> Array:
    """JS divergence, mean over layers, of queries to all training prompts: (Q, N) bits."""
    shares = activations.frequencies()
    train = shares[activations.rows("train")]
    return np.array([js_divergence(train, shares[q][None]).mean(axis=1) for q in queries])


def half_divergences(activations: Activations, queries: NDArray[np.int64]) -> Array:
    """JS divergence between two random halves of a prompt's own tokens: (Q,) bits."""
    rng = np.random.default_rng(0)
    counts = activations.counts[queries].astype(np.int64)
    tokens = activations.tokens[queries].astype(np.int64)[:, None, None]
    one = rng.hypergeometric(counts, tokens - counts, tokens // 2)
    # Each expert's share of a half is drawn alone, so a layer's counts are brought to one again.
    halves = [x / np.maximum(x.sum(axis=2, keepdims=True), 1) for x in (one, counts - one)]
    return js_divergence(*halves).mean(axis=1)


def similarities(activations: Activations, kind: str, queries: NDArray[np.int64]) -> Array:
    """Cosine of queries to all training prompts, (Q, N); of ``token`` embeddings it is Eq. 11."""
    vectors = activations.embeddings[kind].astype(np.float64)
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors[queries] @ vectors[activations.rows("train")].T


def _row(model: str, embedding: str, group: str, values: Array, **more: Any) -> dict[str, Any]:
    head = {"model": model, "embedding": embedding, "group": group, "queries": len(values)}
    return head | with_interval("value", values) | {"unit": "bit", "similarity": ""} | more


def by_task(activations: Activations, queries: NDArray[np.int64]) -> list[dict[str, Any]]:
    """Divergence between halves of a prompt, to prompts of its task, and to those of others."""
    far = pair_divergences(activations, queries)
    same = _same_task(activations, queries)
    groups = {
        "halves of one prompt": half_divergences(activations, queries),
        "same task": np.array([x[s].mean() for x, s in zip(far, same, strict=True)]),
        "other task": np.array([x[~s].mean() for x, s in zip(far, same, strict=True)]),
    }
    return [_row(activations.name, "none", group, values) for group, values in groups.items()]


def _same_task(activations: Activations, queries: NDArray[np.int64]) -> NDArray[np.bool_]:
    task = activations.task
    return task[queries][:, None] == task[activations.rows("train")]


def by_similarity(
    activations: Activations, kind: str, queries: NDArray[np.int64]
) -> list[dict[str, Any]]:
    """Divergence by tenths of similarity by an embedding, and rank correlations."""
    near, far = similarities(activations, kind, queries), pair_divergences(activations, queries)
    order, rows = np.argsort(near, axis=1, kind="stable"), []
    for k, part in enumerate(np.array_split(order, 10, axis=1), 1):
        values = np.take_along_axis(far, part, axis=1).mean(axis=1)
        at = float(np.take_along_axis(near, part, axis=1).mean())
        rows.append(_row(activations.name, kind, f"tenth {k}", values, similarity=at))
    same = _same_task(activations, queries)
    inside = [
        rank_correlation(n[s][None], f[s][None])[0] for n, f, s in zip(near, far, same, strict=True)
    ]
    rng = np.random.default_rng(0)
    drawn = np.array([rng.permutation(far.shape[1])[:FEW] for _ in range(DRAWS)])
    few = np.array([rank_correlation(near[:, d], far[:, d]) for d in drawn])
    groups = {
        "rank correlation": rank_correlation(near, far),
        "rank correlation within the task": np.array(inside),
        f"samples of {FEW} with the opposite sign": (few > 0).mean(axis=0),
    }
    return rows + [
        _row(activations.name, kind, group, values, unit="1") for group, values in groups.items()
    ]


def _fig3(options: Options, at: dict[str, Any], _: Sequence[str]) -> list[dict[str, Any]]:
    """Divergence of activations against similarity of prompts."""
    activations = load_activations(at["model"])
    queries = held_out(activations, options.episodes)
    rows = by_task(activations, queries)
    for kind in sorted(activations.embeddings, reverse=True):
        rows += by_similarity(activations, kind, queries)
    return rows


STUDIES = (
    Study(
        "fig03_similarity",
        "fig3",
        _fig3,
        lambda options: [{"model": model} for model in MODELS],
        notes=found_for(
            CLAIMS,
            "fig03_similarity",
            "'Halves of one prompt' are random halves of its tokens, the noise of short recordings",
        ),
        picture=Bars(
            x=("embedding", "group"),
            y="value",
            panels="model",
            where=lambda row: row["unit"] == "bit",
            labels={"value": "JS divergence, bit"},
        ),
    ),
)

main = command(__spec__.name, __doc__, STUDIES, PROMPTS)

if __name__ == "__main__":
    run_main(main)
