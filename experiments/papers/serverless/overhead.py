"""The time of prediction and decision against the request's own times (Fig. 11, CALCULATE).

``python -m servegym.experiments.papers.serverless.overhead`` times each step on one core for every
held-out prompt. The other times are model output in the paper's setting (preset ``seed``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.baselines.serverless_moe.remoe import READINGS, remoe
from servegym.baselines.serverless_moe.remoe.mmp import worst_cases
from servegym.envs.serverless_moe.config import build_system, predict
from servegym.envs.serverless_moe.outcomes import evaluate_plan
from servegym.envs.workloads.activations import load_activations
from servegym.experiments.evaluation.tables import Note
from servegym.experiments.papers.plotting import Bars
from servegym.experiments.papers.serverless import billing
from servegym.experiments.papers.serverless.predictors import fitted
from servegym.experiments.papers.study import Options, Study, command
from servegym.experiments.papers.verdicts import split

NEGLIGIBLE = 0.02
"""Share of a cold TTFT up to which a decision is called negligible."""


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """The least of three runs' processor time, ms, and the result."""
    least, result = np.inf, None
    for _ in range(3):
        start = time.thread_time()
        result = work()
        least = min(least, time.thread_time() - start)
    return 1e3 * float(least), result


def decision_times(name: str, prompts: int) -> list[dict[str, Any]]:
    """Processor time of each step of a decision and the request's own times, one row a step.

    Over at most so many held-out prompts of a model; rows have ``ms``, its interval and its 95 %
    quantile over prompts.
    """
    activations, system = load_activations(name), build_system(name)
    predicted = predict(activations).astype(np.float64)
    queries = [int(q) for q in billing.held_out(activations, prompts)]
    kind = "sps" if activations.embeddings else "category"
    search = fitted(activations, "token", kind)
    times: dict[str, list[float]] = {}
    modelled: dict[str, float] = {}
    for i, q in enumerate([queries[0], *queries]):  # the first one compiles
        load = billing.seed_load(system, predicted[q])
        request = billing.recorded_request(activations, q)
        timed = {f"predict ({kind})": _timed(lambda q=q: search(np.array([q])))[0]}
        timed["MMP"], _ = _timed(
            lambda load=load: worst_cases(system, load, billing.TTFT_S, billing.TPOT_S)
        )
        modelled = {"container start": 1e3 * system.container_start_s}
        for reading in READINGS:
            timed[f"decide ({reading})"], decision = _timed(
                lambda load=load, r=reading: remoe(system, load, reading=r, **billing.LIMITS)
            )
            bill = evaluate_plan(system, request, decision.plan).bill
            modelled[f"cold start ({reading})"] = 1e3 * bill.cold_s
            modelled[f"prefill ({reading})"] = 1e3 * bill.prefill_s
            modelled[f"decoding ({reading})"] = 1e3 * bill.decode_s
        if i:
            for step, ms in (timed | modelled).items():
                times.setdefault(step, []).append(ms)
    return [
        {
            "model": name,
            "step": step,
            "measured": step not in modelled,
            "prompts": len(values),
            **billing.with_interval("ms", values),
            "ms_p95": float(np.percentile(values, 95)),
        }
        for step, values in times.items()
    ]


def _notes(options: Options, rows: Sequence[dict[str, Any]]) -> Iterator[Note]:
    yield (
        "A decision is timed as processor time of one core, the least of 3 runs a prompt; the "
        "other times are model output. The embedding of the prompt is not timed: for Eq. 11 it "
        "is a sum of table rows."
    )
    for at, group in split(rows, "model"):
        by = {row["step"]: row for row in group}
        search = next(row for row in group if row["step"].startswith("predict"))
        for reading in READINGS:
            step = by[f"decide ({reading})"]
            cold, prefill, decoding = (
                by[f"{part} ({reading})"]["ms"] for part in ("cold start", "prefill", "decoding")
            )
            ttft = cold + prefill
            whole = step["ms_p95"] + search["ms_p95"]
            yield billing.verdict(
                "CALCULATE is negligible and adds no waiting",
                whole < by["container start"]["ms"] and whole / ttft <= NEGLIGIBLE,
                f"{at['model']}, {reading}: {step['ms']:.1f} ms [{step['ms_low']:.1f}, "
                f"{step['ms_high']:.1f}], 95 % {step['ms_p95']:.1f}, of which MMP, which sizes "
                f"the main function, {by['MMP']['ms']:.2f}; with the search "
                f"({search['ms']:.3f} ms) {100 * whole / ttft:.1f} % of a cold TTFT and "
                f"{100 * whole / (ttft + decoding):.2f} % of the request; a warm "
                f"request has only its prefill to hide it behind, of which it is "
                f"{100 * whole / prefill:.0f} %",
            )


STUDIES = (
    Study(
        "fig11_calculate",
        "calculate",
        lambda options, at, _: decision_times(at["model"], options.episodes),
        lambda options: [{"model": model} for model in billing.MODELS],
        notes=_notes,
        picture=Bars(x="step", y="ms", panels="model", log="y"),
    ),
)

main = command(__spec__.name, __doc__, STUDIES, billing.PROMPTS)

if __name__ == "__main__":
    run_main(main)
