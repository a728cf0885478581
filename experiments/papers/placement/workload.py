"""Skew of expert activations by task and layer (Fig. 2 and 3 of Prism).

How uneven the experts of a layer are used, with the recorded activations and with the narrow tasks
of ``skew="paper"``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.envs.workloads.activations import Activations, load_activations
from servegym.experiments.evaluation.tables import Note
from servegym.experiments.papers.plotting import Lines
from servegym.experiments.papers.study import Options, Study, command, ends, interval_columns
from servegym.experiments.papers.verdicts import pick, split

Row = dict[str, Any]
MODELS = ("deepseek-v2-lite", "mixtral-8x7b", "gpt-oss-20b")


def skew_of(shares: np.ndarray) -> dict[str, np.ndarray]:
    """How unevenly experts are used, from their shares ``(..., E)``, each summing to 1.

    ``top_share``, of the most used expert, and ``entropy``, as a share of log2 E, ``(...)`` each.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = np.where(shares > 0, shares * np.log2(shares), 0.0)
    return {
        "top_share": shares.max(axis=-1),
        "entropy": -bits.sum(axis=-1) / math.log2(shares.shape[-1]),
    }


def _resampled(activations: Activations, rows: np.ndarray, number: int) -> dict[str, np.ndarray]:
    """Skew by layer ``(number, L)`` of prompts drawn again with replacement."""
    rng = np.random.default_rng(0)
    times = rng.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), size=number)
    sums = np.tensordot(times.astype(np.float64), activations.counts[rows], axes=1)
    return skew_of(sums / sums.sum(axis=2, keepdims=True))


def _skew(options: Options, at: Row, _: Sequence[str]) -> Iterator[Row]:
    """Share of the most used expert and entropy, by task and layer."""
    activations = load_activations(at["model"], skew=at["skew"])
    for t, task in enumerate(activations.tasks):
        ids = np.flatnonzero(activations.task == t)
        counts = activations.counts[ids].sum(axis=0, dtype=np.float64)
        skew = skew_of(counts / counts.sum(axis=1, keepdims=True))
        drawn = _resampled(activations, ids, 50 if options.quick else 500)
        tokens = int(activations.tokens[ids].sum())
        point = at | {"kind": activations.kind, "task": task, "prompts": len(ids), "tokens": tokens}
        for layer in ("mean", *range(activations.model.num_moe_layers)):
            row = point | {"layer": layer}
            part = slice(None) if layer == "mean" else slice(layer, layer + 1)
            for key, values in skew.items():
                low, high = np.percentile(drawn[key][:, part].mean(axis=1), [2.5, 97.5])
                row |= interval_columns(key, (float(values[part].mean()), float(low), float(high)))
            yield row


def _skew_notes(options: Options, rows: Sequence[Row]) -> Iterator[Note]:
    for at, part in split(rows, "model", "skew"):
        sizes = load_activations(at["model"]).model
        means = pick(part, layer="mean")
        top = [row["top_share"] for row in part if row["layer"] != "mean"]
        yield (
            f"{at['model']}, {at['skew']} skew ({means[0]['kind']}): the most used expert of a "
            f"layer takes {100 * np.mean([row['top_share'] for row in means]):.1f} % of a task's "
            f"choices (from {100 * min(top):.1f} to {100 * max(top):.1f} %; equal use "
            f"{100 / sizes.experts:.1f} %, at most {100 / sizes.top_k:.1f} %); entropy "
            f"{np.mean([row['entropy'] for row in means]):.3f} of log2 E"
        )
    yield (
        "Fig. 2 and 3 of the paper (one expert dominates a task's first layer, the next layer is "
        "even) are not in the recorded activations; skew='paper' makes tasks as narrow as that"
    )
    yield "intervals: prompts drawn again; 'mean' over layers"


STUDIES = (
    Study(
        "fig2_3_skew",
        "skew",
        _skew,
        lambda options: [
            {"model": model, "skew": kind}
            for model in ends(options, MODELS)
            for kind in ("measured", "paper")
        ],
        notes=_skew_notes,
        picture=Lines(
            x="layer",
            y=("top_share", "entropy"),
            line="task",
            panels=("model", "skew"),
            where=lambda row: row["layer"] != "mean",
        ),
    ),
)

main = command(__spec__.name, __doc__, STUDIES, episodes=1)

if __name__ == "__main__":
    run_main(main)
