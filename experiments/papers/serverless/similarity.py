"""Are similar prompts' experts alike? Similarity against divergence of activations (Fig. 3).

``python -m servegym.experiments.papers.serverless.similarity`` compares every held-out prompt with
all training prompts of recorded routing: GPT-OSS-20B by the similarity of Eq. 11 and by a sentence
encoder; DeepSeek-V2-Lite, recorded without texts, by its tasks. Intervals are over held-out
prompts; the training prompts are the same throughout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from servegym._command_line import run_main
from servegym.baselines.serverless_moe.prediction import js_divergence
from servegym.envs.workloads.activations import Activations, load_activations
from servegym.experiments.evaluation.tables import Note
from servegym.experiments.papers.plotting import error_bars, pyplot, tidy
from servegym.experiments.papers.run import Picture, Pictures, save
from servegym.experiments.papers.serverless.common import (
    MODELS,
    Options,
    held_out,
    run_figures,
    verdict,
    with_interval,
)

__all__ = [
    "by_similarity",
    "by_task",
    "half_divergences",
    "main",
    "pair_divergences",
    "rank_correlation",
    "similarities",
]

MODULE = "servegym.experiments.papers.serverless.similarity"
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
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Divergence by tenths of similarity, and rank correlations.

    Args:
        activations: The recordings.
        kind: Key of their embeddings.
        queries: (Q,) held-out prompts.

    Returns:
        Rows of the table, and as an example the similarities and divergences of `FEW` random
        training prompts to the query whose rank correlation is the middle one.
    """
    near, far = similarities(activations, kind, queries), pair_divergences(activations, queries)
    order, rows = np.argsort(near, axis=1, kind="stable"), []
    for k, part in enumerate(np.array_split(order, 10, axis=1), 1):
        values = np.take_along_axis(far, part, axis=1).mean(axis=1)
        at = float(np.take_along_axis(near, part, axis=1).mean())
        rows.append(_row(activations.name, kind, f"tenth {k}", values, similarity=at))
    whole = rank_correlation(near, far)
    same = _same_task(activations, queries)
    inside = [
        rank_correlation(n[s][None], f[s][None])[0] for n, f, s in zip(near, far, same, strict=True)
    ]
    rng = np.random.default_rng(0)
    drawn = np.array([rng.permutation(far.shape[1])[:FEW] for _ in range(DRAWS)])
    few = np.array([rank_correlation(near[:, d], far[:, d]) for d in drawn])
    for group, values in (
        ("rank correlation", whole),
        ("rank correlation within the task", np.array(inside)),
        (f"samples of {FEW} with the opposite sign", (few > 0).mean(axis=0)),
    ):
        rows.append(_row(activations.name, kind, group, values, unit="1"))
    middle = int(np.argsort(whole)[len(whole) // 2])
    return rows, {"near": near[middle, drawn[0]], "far": far[middle, drawn[0]]}


def _notes(name: str, rows: Sequence[dict[str, Any]]) -> list[Note]:
    def text(row: dict[str, Any]) -> str:
        return f"{row['value']:.3f} [{row['value_low']:.3f}, {row['value_high']:.3f}]"

    tasks = [row for row in rows if row["embedding"] == "none"]
    notes: list[Note] = [
        f"{name}, {tasks[0]['queries']} held-out prompts, divergence in bit: "
        + ", ".join(f"{row['group']} {text(row)}" for row in tasks)
    ]
    for kind in dict.fromkeys(row["embedding"] for row in rows if row["embedding"] != "none"):
        *tenths, whole, inside, few = (row for row in rows if row["embedding"] == kind)
        notes.append(
            verdict(
                "semantic similarity correlates with similarity of activations",
                whole["value_high"] < 0,
                f"{name}, {kind} embeddings: rank correlation of similarity and divergence "
                f"{text(whole)}, within a task {text(inside)}; divergence to the most similar "
                f"tenth {text(tenths[-1])} bit, to the least similar {text(tenths[0])}. It is a "
                f"weak relation: {100 * few['value']:.0f} % of samples of {FEW} prompts, of which "
                "the paper shows one, have the opposite sign",
            )
        )
    if len(notes) == 1:
        same, other = tasks[1], tasks[2]
        notes.append(
            verdict(
                "similar prompts activate similar experts",
                same["value_high"] < other["value_low"],
                f"{name} has no texts; prompts of one task differ by {text(same)} bit, those of "
                f"other tasks by {text(other)}",
            )
        )
    return notes


def fig3(options: Options) -> None:
    """Divergence of activations against similarity of prompts."""
    rows: list[dict[str, Any]] = []
    examples: list[dict[str, Any]] = []
    notes: list[Note] = []
    for name in MODELS:
        activations = load_activations(name)
        queries = held_out(activations, options.episodes)
        mine = by_task(activations, queries)
        for kind in sorted(activations.embeddings, reverse=True):
            found, example = by_similarity(activations, kind, queries)
            mine += found
            if kind == "token":
                examples += [
                    {"model": name, "similarity": float(near), "divergence_bits": float(far)}
                    for near, far in zip(example["near"], example["far"], strict=True)
                ]
        rows += mine
        notes += _notes(name, mine)
    notes.append(
        "'Halves of one prompt' are random halves of its tokens: the noise of short recordings."
    )
    save(options, "fig03_example", examples)
    save(options, "fig03_similarity", rows, *notes)


def _plot(rows: Sequence[Mapping[str, Any]], example: Sequence[Mapping[str, Any]]) -> Any:
    figure, axes = pyplot().subplots(1, 3, figsize=(13, 3.9), layout="constrained")
    for m, name in enumerate(dict.fromkeys(row["model"] for row in rows)):
        tasks = [row for row in rows if (row["model"], row["embedding"]) == (name, "none")]
        value, bars = error_bars(tasks, "value")
        at = np.arange(len(tasks)) + 0.4 * (m - 0.5)
        axes[2].bar(at, value, 0.38, yerr=bars, capsize=2, label=name, color=f"C{m}")
    name = example[0]["model"]
    own = [row for row in rows if row["model"] == name]
    words = {"token": "token embeddings (Eq. 11)", "output": "encoder's output"}
    for kind in dict.fromkeys(row["embedding"] for row in own if row["embedding"] in words):
        tenths = [
            row for row in own if row["embedding"] == kind and row["group"].startswith("tenth")
        ]
        value, bars = error_bars(tenths, "value")
        look = {"capsize": 2, "marker": "o", "ms": 3}
        axes[0].errorbar(range(1, 11), value, bars, label=words[kind], **look)
    floor = next(row["value"] for row in own if row["embedding"] == "none")
    axes[0].axhline(floor, color="grey", linestyle=":", label="halves of one prompt")
    axes[0].set_title(f"{name}, {own[0]['queries']} held-out prompts", fontsize=10)
    near, far = (
        np.array([row[key] for row in example]) for key in ("similarity", "divergence_bits")
    )
    axes[1].scatter(near, far, s=18)
    one = rank_correlation(near[None], far[None])[0]
    title = f"{name}, middle prompt, {len(near)} others: rank correlation {one:.2f}"
    axes[1].set_title(title, fontsize=10)
    axes[0].set(xlabel="training prompts, tenths by similarity (10: most similar)")
    axes[1].set(xlabel="similarity (Eq. 11)")
    axes[2].set_xticks(range(3), ["halves of\none prompt", "same task", "other task"])
    axes[2].set_title("held-out to training prompts, 95 % intervals", fontsize=10)
    for axis in axes:
        axis.set_ylabel("JS divergence of activations, bit")
        axis.set_ylim(bottom=0)
        tidy(axis)
    axes[0].legend(fontsize=8)
    axes[2].legend(fontsize=8)
    return figure


FIGURES = {"fig3": fig3}
PICTURES: Pictures = {"fig03_similarity": Picture(_plot, ("fig03_similarity", "fig03_example"))}


def main(argv: Sequence[str] | None = None) -> int:
    """Compute, print and save; see ``--help``."""
    return run_figures(FIGURES, PICTURES, argv, __doc__, MODULE)


if __name__ == "__main__":
    run_main(main)
