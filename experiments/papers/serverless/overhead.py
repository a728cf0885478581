"""The time of prediction and decision against the request's own times (Fig. 11, CALCULATE).

``python -m servegym.experiments.papers.serverless.overhead`` times each step on one core for every
held-out prompt. The other times are model output in the paper's setting (preset ``seed``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.baselines.serverless_moe.prediction import make_predictor
from servegym.baselines.serverless_moe.remoe import READINGS, remoe
from servegym.baselines.serverless_moe.remoe.mmp import worst_cases
from servegym.envs.serverless_moe import equations as eq
from servegym.envs.serverless_moe.config import build_system, predict
from servegym.envs.serverless_moe.loads import Load
from servegym.envs.workloads.activations import Activations, load_activations
from servegym.experiments.evaluation.tables import Note
from servegym.experiments.papers.plotting import error_bars, pyplot, tidy
from servegym.experiments.papers.run import Pictures, save
from servegym.experiments.papers.serverless.common import (
    MODELS,
    N_IN,
    N_OUT,
    TPOT_S,
    TREM_S,
    TTFT_S,
    Options,
    held_out,
    recorded_request,
    run_figures,
    verdict,
    with_interval,
)

__all__ = ["decision_times", "main"]

MODULE = "servegym.experiments.papers.serverless.overhead"
NEGLIGIBLE = 0.02
"""Share of a cold TTFT up to which a decision is called negligible."""


def _fitted_search(activations: Activations) -> tuple[str, Callable[[int], object]]:
    """The search that predicts one prompt: SPS, or the mean of its task without embeddings."""
    train, shares, task = activations.rows("train"), activations.frequencies(), activations.task
    vectors = activations.embeddings.get("token")
    kind = "category" if vectors is None else "sps"
    vectors = np.zeros((len(task), 1)) if vectors is None else vectors
    predictor = make_predictor(kind)
    predictor.fit(vectors[train], shares[train], tasks=task[train])
    return kind, lambda q: predictor.predict(vectors[[q]], task=task[[q]])


def _processor_s(work: Callable[[], object], repeats: int = 3) -> float:
    least = np.inf
    for _ in range(repeats):
        start = time.thread_time()
        work()
        least = min(least, time.thread_time() - start)
    return float(least)


def decision_times(name: str, prompts: int) -> list[dict[str, Any]]:
    """Processor time of each step of a decision and the request's own times, one row a step.

    Args:
        name: The model.
        prompts: Most held-out prompts.

    Returns:
        Rows with ``ms``, its interval and 95 % quantile over prompts.
    """
    activations, system = load_activations(name), build_system(name)
    predicted = predict(activations).astype(np.float64)
    queries = [int(q) for q in held_out(activations, prompts)]
    kind, search = _fitted_search(activations)
    limits = {"ttft_limit_s": TTFT_S, "tpot_limit_s": TPOT_S}
    taken: dict[str, list[float]] = {}
    own: dict[str, float] = {}
    for i, q in enumerate([queries[0], *queries]):  # the first one compiles
        load = Load.predicted(system, predicted[q], N_IN, N_OUT, TREM_S)
        found = {
            f"predict ({kind})": _processor_s(lambda q=q: search(q)),
            "MMP": _processor_s(lambda load=load: worst_cases(system, load, TTFT_S, TPOT_S)),
        }
        for reading in READINGS:
            found[f"decide ({reading})"] = _processor_s(
                lambda load=load, r=reading: remoe(system, load, reading=r, **limits)
            )
        request = recorded_request(activations, q, N_IN, N_OUT, TREM_S)
        own = {"container start": system.container_start_main_s}
        for reading in READINGS:
            plan = remoe(system, load, reading=reading, **limits).plan
            outcome = eq.evaluate_plan(system, request, plan)
            own[f"cold start ({reading})"] = outcome.cold_s
            own[f"prefill ({reading})"] = outcome.prefill_s
            own[f"decoding ({reading})"] = outcome.decode_s
        if i:
            for step, value in (found | own).items():
                taken.setdefault(step, []).append(1e3 * value)
    return [
        {
            "model": name,
            "step": step,
            "measured": step not in own,
            "prompts": len(values),
            **with_interval("ms", values),
            "ms_p95": float(np.percentile(values, 95)),
        }
        for step, values in taken.items()
    ]


def calculate(options: Options) -> None:
    """Time of prediction and decision against the request's own times."""
    rows: list[dict[str, Any]] = []
    notes: list[Note] = [
        "A decision is timed as processor time of one core, the least of 3 runs a prompt; the "
        "other times are model output. The embedding of the prompt is not timed: for Eq. 11 it "
        "is a sum of table rows."
    ]
    for name in MODELS:
        mine = decision_times(name, options.episodes)
        rows += mine
        by = {r["step"]: r for r in mine}
        search = next(r for r in mine if r["step"].startswith("predict"))
        for reading in READINGS:
            step = by[f"decide ({reading})"]
            prefill, decoding = (
                by[f"{part} ({reading})"]["ms"] for part in ("prefill", "decoding")
            )
            ttft = by[f"cold start ({reading})"]["ms"] + prefill
            whole = step["ms_p95"] + search["ms_p95"]
            notes.append(
                verdict(
                    "CALCULATE is negligible and adds no waiting",
                    whole < by["container start"]["ms"] and whole / ttft <= NEGLIGIBLE,
                    f"{name}, {reading}: {step['ms']:.1f} ms [{step['ms_low']:.1f}, "
                    f"{step['ms_high']:.1f}], 95 % {step['ms_p95']:.1f}, of which MMP, which sizes "
                    f"the main function, {by['MMP']['ms']:.2f}; with the search "
                    f"({search['ms']:.3f} ms) {100 * whole / ttft:.1f} % of a cold TTFT and "
                    f"{100 * whole / (ttft + decoding):.2f} % of the request; a warm "
                    f"request has only its prefill to hide it behind, of which it is "
                    f"{100 * whole / prefill:.0f} %",
                )
            )
    save(options, "fig11_calculate", rows, *notes)


def _plot(rows: Sequence[Mapping[str, Any]]) -> Any:
    names = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = pyplot().subplots(1, len(names), figsize=(11, 4.4), layout="constrained")
    for axis, name in zip(axes, names, strict=True):
        mine = [row for row in rows if row["model"] == name]
        value, bars = error_bars(mine, "ms")
        at = np.arange(len(mine))[::-1]
        colours = ["C1" if r["measured"] else "C0" for r in mine]
        axis.barh(at, value, xerr=bars, color=colours, capsize=2)
        axis.set_yticks(at, [r["step"] for r in mine])
        axis.set(xscale="log", xlabel="ms")
        axis.set_title(f"{name}, {mine[0]['prompts']} held-out prompts", fontsize=10)
        tidy(axis)
    return figure


FIGURES = {"calculate": calculate}
PICTURES: Pictures = {"fig11_calculate": _plot}


def main(argv: Sequence[str] | None = None) -> int:
    """Compute, print and save; see ``--help``."""
    return run_figures(FIGURES, PICTURES, argv, __doc__, MODULE)


if __name__ == "__main__":
    run_main(main)
