"""Skew of expert activations by task and layer (Fig. 2 and 3 of Prism) and what it is worth.

``skew`` shows how uneven the experts of a layer are used, with the recorded activations and with
the narrow tasks of ``skew="paper"``; ``coverage`` shows how much of a server's traffic the experts
that Prism gives it cover, against the most they could and against Theorem 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.baselines.expert_placement.linear_program import proxy_optimum
from servegym.baselines.expert_placement.prism import prism
from servegym.envs.expert_placement.config import build_problem
from servegym.envs.workloads.activations import Activations, load_activations
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.papers.placement.common import interval, run_figures, setting
from servegym.experiments.papers.plotting import legend, pyplot, tidy
from servegym.experiments.papers.run import FigureOptions, Pictures, first_and_last, save

__all__ = ["covered", "main", "skew_of"]

MODULE = "servegym.experiments.papers.placement.workload"
MODELS = ("deepseek-v2-lite", "mixtral-8x7b", "gpt-oss-20b")
FRACTIONS = (0.232, 0.24, 0.27, 0.30, 0.36, 0.45, 0.60)
"""Shares of a GPU's memory; DeepSeek-V2-Lite fits from 0.232 on."""


# ---------------------------------------------------------------------------------- Fig. 2 and 3


def skew_of(shares: np.ndarray) -> dict[str, np.ndarray]:
    """How unevenly experts are used.

    Args:
        shares: ``(..., E)``, each summing to 1.

    Returns:
        ``top_share``, of the most used expert, and ``entropy``, as a share of log2 E, ``(...)``.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = np.where(shares > 0, shares * np.log2(shares), 0.0)
    return {
        "top_share": shares.max(axis=-1),
        "entropy": -bits.sum(axis=-1) / math.log2(shares.shape[-1]),
    }


def _shares(activations: Activations, rows: np.ndarray) -> np.ndarray:
    """``(L, E)`` shares of the tokens of some prompts."""
    counts = activations.counts[rows].sum(axis=0, dtype=np.float64)
    return counts / counts.sum(axis=1, keepdims=True)


def _resampled(activations: Activations, rows: np.ndarray, number: int) -> dict[str, np.ndarray]:
    """Skew by layer ``(number, L)`` of prompts drawn again with replacement."""
    rng = np.random.default_rng(0)
    times = rng.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), size=number)
    sums = np.tensordot(times.astype(np.float64), activations.counts[rows], axes=1)
    return skew_of(sums / sums.sum(axis=2, keepdims=True))


def skew(options: FigureOptions) -> None:
    """Share of the most used expert and entropy, by model, task and layer, with both skews."""
    rows: list[dict[str, Any]] = []
    for model in first_and_last(options, MODELS):
        for kind in ("measured", "paper"):
            activations = load_activations(model, skew=kind)
            for t, task in enumerate(activations.tasks):
                own = np.flatnonzero(activations.task == t)
                found = skew_of(_shares(activations, own))
                drawn = _resampled(activations, own, 50 if options.quick else 500)
                point = {
                    "model": model,
                    "skew": kind,
                    "kind": activations.kind,
                    "task": task,
                    "prompts": len(own),
                    "tokens": int(activations.tokens[own].sum()),
                }
                for layer in ("mean", *range(activations.model.num_moe_layers)):
                    row = point | {"layer": layer}
                    for key, values in found.items():
                        at = slice(None) if layer == "mean" else slice(layer, layer + 1)
                        ends = np.percentile(drawn[key][:, at].mean(axis=1), [2.5, 97.5])
                        row |= {key: float(values[at].mean())}
                        row |= {f"{key}_low": float(ends[0]), f"{key}_high": float(ends[1])}
                    rows.append(row)
    means = [row for row in rows if row["layer"] == "mean"]
    print_table(
        "Mean over layers",
        ["model, skew, task", "prompts", "top expert", "equal use", "entropy / log2 E"],
        [
            [
                f"{r['model']} {r['skew']} {r['task']}",
                str(r["prompts"]),
                f"{r['top_share']:.3f} [{r['top_share_low']:.3f}, {r['top_share_high']:.3f}]",
                f"{1 / load_activations(r['model']).model.experts:.3f}",
                f"{r['entropy']:.3f}",
            ]
            for r in means
        ],
    )
    notes = []
    for model in first_and_last(options, MODELS):
        sizes = load_activations(model).model
        for kind in ("measured", "paper"):
            part = [r for r in rows if r["model"] == model and r["skew"] == kind]
            top = [r["top_share"] for r in part if r["layer"] != "mean"]
            means = [r for r in part if r["layer"] == "mean"]
            mean = np.mean([r["top_share"] for r in means])
            notes.append(
                f"{model}, {kind} skew ({means[0]['kind']}): the most used expert of a layer takes "
                f"{100 * mean:.1f} % of a task's choices (from {100 * min(top):.1f} to "
                f"{100 * max(top):.1f} %; equal use {100 / sizes.experts:.1f} %, at most "
                f"{100 / sizes.top_k:.1f} %); entropy {np.mean([r['entropy'] for r in means]):.3f} "
                "of log2 E"
            )
    notes += [
        "Fig. 2 and 3 of the paper (one expert dominates a task's first layer, the next layer is "
        "even) are not in the recorded activations; skew='paper' makes tasks as narrow as that",
        "intervals: prompts drawn again; 'mean' over layers",
    ]
    save(options, "fig2_3_skew", rows, *notes)


def _plot_skew(rows: Sequence[dict[str, Any]]) -> Any:
    plt = pyplot()
    figure, axes = plt.subplots(2, 3, figsize=(13, 7), layout="constrained")
    for axis, kind in zip(axes[:, 0], ("measured", "paper"), strict=True):
        activations = load_activations(MODELS[0], skew=kind)
        for t in (0, 3):
            shares = _shares(activations, np.flatnonzero(activations.task == t))[0]
            axis.bar(np.arange(64) + 0.4 * (t > 0), shares, 0.4, label=activations.tasks[t])
        axis.axhline(1 / 64, color="black", lw=0.8, ls=":")
        axis.set_title(f"Fig. 2: first layer, {MODELS[0]}, {kind}", fontsize=10)
        axis.set_xlabel("expert")
    for axis, kind in zip(axes[:, 1], ("measured", "paper"), strict=True):
        activations = load_activations(MODELS[1], skew=kind)
        shares = _shares(activations, np.flatnonzero(activations.task == 0))
        for k, layer in enumerate((0, 1, 15)):
            axis.bar(np.arange(8) + 0.27 * k, shares[layer], 0.27, label=f"layer {layer}")
        axis.axhline(1 / 8, color="black", lw=0.8, ls=":")
        axis.set_title(f"Fig. 3: {activations.tasks[0]}, {MODELS[1]}, {kind}", fontsize=10)
        axis.set_xlabel("expert")
    for axis in axes[:, :2].ravel():
        axis.set_ylabel("share of choices")
        axis.margins(y=0.25)
        axis.legend(fontsize=8, frameon=False, ncols=3)
        tidy(axis)
    for axis, key in zip(axes[:, 2], ("top_share", "entropy"), strict=True):
        for k, model in enumerate(dict.fromkeys(r["model"] for r in rows)):
            for kind, style in (("measured", "-"), ("paper", "--")):
                own = [r for r in rows if (r["model"], r["skew"]) == (model, kind)]
                layers = sorted({r["layer"] for r in own if r["layer"] != "mean"})
                values = [np.mean([r[key] for r in own if r["layer"] == x]) for x in layers]
                axis.plot(layers, values, style, color=f"C{k}", label=f"{model}, {kind}")
        axis.set_xlabel("layer")
        axis.set_ylabel("share of the top expert" if key == "top_share" else "entropy / log2 E")
        axis.set_ylim(0)
        axis.set_title("mean over tasks", fontsize=10)
        tidy(axis)
    legend(figure, axes[0, 2], columns=3)
    return figure


# --------------------------------------------------------------------------- Theorem 1, coverage


def covered(counts: np.ndarray, view: np.ndarray, cap: np.ndarray) -> dict[str, np.ndarray]:
    """How much of each server's traffic its experts cover.

    Args:
        counts: ``(N, L, E)`` assignments of a server's requests.
        view: bool ``(N, L, E)``, experts on the server.
        cap: ``(N,)`` slots of the server.

    Returns:
        ``held``, U_n of Theorem 1: share of the server's assignments on experts it holds;
        ``ratio``, that over the share of its ``cap`` most frequent experts, ``(N,)`` each.
    """
    flat = counts.reshape(len(counts), -1).astype(np.float64)
    total = flat.sum(axis=1)
    held = (flat * view.reshape(flat.shape)).sum(axis=1)
    order = -np.sort(-flat, axis=1)
    top = np.array([row[:size].sum() for row, size in zip(order, cap, strict=True)])
    return {"held": held / total, "ratio": held / top}


def coverage(options: FigureOptions) -> None:
    """U_n of Prism and of the exact optimum of Eq. 2 against memory, and Theorem 1's bound."""
    rows: list[dict[str, Any]] = []
    methods = {"prism": prism, "proxy_optimum": proxy_optimum}
    for fraction in first_and_last(options, FRACTIONS):
        problem = build_problem(
            scenario="paper_testbed", split="eval", cluster_kwargs={"memory_fraction": fraction}
        )
        cluster = problem.cluster
        of_task = [problem.prompts.counts[rows_] for rows_ in problem.rows]
        for name, place in methods.items():
            runs = []
            for s in range(options.episodes):
                # Other prompts of the same tasks each time.
                rng = np.random.default_rng(s)
                counts = np.array(
                    [part[rng.integers(0, len(part), 100)].sum(axis=0) for part in of_task]
                )
                z = place(counts, cluster.slots, cluster.gpu_server)
                runs.append(covered(counts, cluster.server_view(z), cluster.cap))
            row: dict[str, Any] = {"memory_fraction": fraction, "policy": name}
            row["slots"] = int(cluster.slots.sum())
            for key in ("held", "ratio"):
                for n in range(cluster.num_servers):
                    row |= interval([r[key][n] for r in runs], f"{key}_server_{n + 1}")
            rows.append(row)
    prism_rows = [row for row in rows if row["policy"] == "prism"]
    worst = min(row[f"ratio_server_{n}"] for row in prism_rows for n in (1, 2, 3))
    default = min(prism_rows, key=lambda row: abs(row["memory_fraction"] - 0.3))
    shares = [f"{default[f'ratio_server_{n}']:.3f}" for n in (1, 2, 3)]
    notes = [
        f"at {default['memory_fraction']:g} of the memory Prism covers {', '.join(shares)} of what "
        f"the servers' most frequent experts would; the least at any memory is {worst:.3f}",
        "Theorem 1 promises 1 - 1/e = 0.632 of the optimum: met on these activations at every "
        "memory, but it is no guarantee, since coverage can force 0.5 (one layer of 8 experts, "
        "two servers of 4 slots that both use experts 0 to 3 only)"
        if worst >= 1 - 1 / math.e
        else "Theorem 1's 1 - 1/e = 0.632 is not met on these activations",
    ]
    problem = build_problem(scenario="paper_testbed", split="eval")
    save(options, "theorem1_coverage", rows, *notes, settings={"setting": setting(problem)})


def _plot_coverage(rows: Sequence[Mapping[str, Any]]) -> Any:
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    for name, style in (("prism", "-"), ("proxy_optimum", "--")):
        part = [row for row in rows if row["policy"] == name]
        for n in range(3):
            key = f"ratio_server_{n + 1}"
            axis.plot(
                [r["memory_fraction"] for r in part],
                [r[key] for r in part],
                style,
                color=f"C{n}",
                marker="o",
                ms=3,
                label=f"{name}, server {n + 1}",
            )
    axis.axhline(1 - 1 / math.e, color="black", lw=0.8, ls=":")
    axis.text(FRACTIONS[-1], 1 - 1 / math.e, "1 - 1/e", ha="right", va="bottom", fontsize=8)
    axis.set_xlabel("share of GPU memory for weights")
    axis.set_ylabel("U_n over the mass of its top B_n experts")
    axis.set_title("DeepSeek-V2-Lite, 1, 1, 2 GPUs", fontsize=10)
    tidy(axis)
    legend(figure, axis, columns=3)
    return figure


FIGURES = {"skew": skew, "coverage": coverage}
PICTURES: Pictures = {"fig2_3_skew": _plot_skew, "theorem1_coverage": _plot_coverage}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save; see ``--help``."""
    return run_figures(FIGURES, PICTURES, argv, __doc__, MODULE, episodes=5)


if __name__ == "__main__":
    run_main(main)
