"""How predictors of scores and lengths are measured, and against what. Not an agent."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from servegym.envs.workloads import Catalog
from servegym.envs.workloads.predictions import QUANTITIES

# Published accuracies of the paper's DistilBERT predictors on MixInstruct, its own buckets.
PAPER = {"score": (0.6339, 0.9778), "length": (0.7297, 0.8471)}
NEIGHBOURS = (5, 10, 20, 40, 80)
PENALTIES = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


def one_hot(classes: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """1 in the place of each class, float64 with one axis more."""
    return np.eye(count)[classes]


def nearest(
    embeddings: NDArray[np.float64], target: NDArray[np.float64], train: NDArray[np.int64], k: int
) -> NDArray[np.float64]:
    """Mean ``target`` (P, M, K) of the k train prompts with the highest cosine, not itself."""
    likeness = embeddings @ embeddings[train].T
    likeness[train, np.arange(len(train))] = -np.inf
    found = train[np.argsort(-likeness, axis=1, kind="stable")[:, :k]]
    return target[found].mean(axis=1)


def ridge(
    embeddings: NDArray[np.float64],
    target: NDArray[np.float64],
    train: NDArray[np.int64],
    penalty: float,
) -> NDArray[np.float64]:
    """Ridge regression of ``target`` (P, M, K); train prompts get their leave-one-out fit."""
    centre, base = embeddings[train].mean(0), target[train].mean(0)
    x = embeddings - centre
    flat = target.reshape(len(target), -1)
    gram = x[train].T @ x[train] + penalty * np.eye(x.shape[1])
    fit = x @ np.linalg.solve(gram, x[train].T @ (flat[train] - base.ravel())) + base.ravel()
    lever = np.einsum("ij,ij->i", x[train], np.linalg.solve(gram, x[train].T).T)
    lever = lever + 1.0 / len(train)
    fit[train] = flat[train] - (flat[train] - fit[train]) / (1.0 - lever)[:, None]
    return fit.reshape(target.shape)


def by_embeddings(
    embeddings: NDArray[np.float64], classes: NDArray[np.int64], count: int, catalog: Catalog
) -> dict[str, tuple[NDArray[np.float64], str]]:
    """Predictions without fine-tuning: name -> ((P, M, K), parameter); the best on val counts."""
    train, val = (catalog.rows(split).astype(np.int64) for split in ("train", "val"))
    target = one_hot(classes, count)
    common = np.broadcast_to(target[train].mean(axis=0), target.shape)
    found = {"most common": (common, "")}
    tries = {
        "nearest": [(f"k={k}", nearest(embeddings, target, train, k)) for k in NEIGHBOURS],
        "ridge": [(f"penalty={p:g}", ridge(embeddings, target, train, p)) for p in PENALTIES],
    }
    for name, options in tries.items():
        error = [float(((x[val] - target[val]) ** 2).mean()) for _, x in options]
        label, best = options[int(np.argmin(error))]
        found[name] = (best, label)
    return found


def measure(
    chances: NDArray[np.float64],
    classes: NDArray[np.int64],
    truth: NDArray[np.float64],
    centres: NDArray[np.float64],
    rows: NDArray[np.int64],
) -> dict[str, float]:
    """How good predictions are on some prompts.

    Returns:
        ``top1``, ``top3`` (the right one among the three likeliest), ``near`` (off by one bucket
        at most), ``mae`` (of the mean over the buckets, in the quantity's unit) and ``chosen`` (the
        mean truth of the LLM that is predicted highest: a router's share for scores).
    """
    chance, right = chances[rows], classes[rows]
    order = np.argsort(-chance, axis=-1, kind="stable")
    value = chance @ centres
    best = value.argmax(axis=1)
    return {
        "top1": float((order[..., 0] == right).mean()),
        "top3": float((order[..., :3] == right[..., None]).any(-1).mean()),
        "near": float((abs(order[..., 0] - right) <= 1).mean()),
        "mae": float(abs(value - truth[rows]).mean()),
        "chosen": float(truth[rows, best].mean()),
    }


def report(rows: list[dict[str, Any]], catalog: Catalog, note: str) -> None:
    """Print the accuracies on val and eval beside the paper's."""
    for quantity in QUANTITIES:
        lines = []
        for name in dict.fromkeys(row["predictor"] for row in rows):
            cells = [name]
            for split in ("val", "eval"):
                row = next(
                    r
                    for r in rows
                    if (r["predictor"], r["quantity"], r["split"]) == (name, quantity, split)
                )
                cells += [f"{100 * row[k]:.2f}" for k in ("top1", "top3", "near")]
                cells.append(f"{row['mae']:.4g}")
                if quantity == "score":
                    cells.append(f"{row['chosen']:.4f}")
            lines.append(cells)
        heads = ["top-1 %", "top-3 %", "within 1 %", "MAE"]
        heads += ["chosen"] if quantity == "score" else []
        first, third = PAPER[quantity]
        blank = [""] * (len(heads) - 2)
        paper = ["paper (its own data)", *[""] * len(heads)]
        lines.append([*paper, f"{100 * first:.2f}", f"{100 * third:.2f}", *blank])
        notes = [note]
        if quantity == "score":
            means = catalog.scores[catalog.rows("train")].mean(axis=0)
            on_eval = catalog.scores[catalog.rows("eval")]
            notes.append(
                "chosen: mean score of the LLM predicted best; on eval always the best of train "
                f"has {on_eval[:, means.argmax()].mean():.4f}, the best of each prompt "
                f"{on_eval.max(axis=1).mean():.4f}"
            )
        columns = ["predictor", *[f"{s} {h}" for s in ("val", "eval") for h in heads]]
        table = Table(title=f"{quantity} buckets ({rows[0]['buckets']})", caption="; ".join(notes))
        for column in columns:
            table.add_column(column, justify="left" if column == "predictor" else "right")
        for line in lines:
            table.add_row(*line)
        Console(width=160).print(table)  # numbers are not to be broken
