"""What decides the cost of a request: invocation overhead, price of GPU memory, network rate.

::

    python -m servegym.experiments.figures.beyond.serverless.cost_sweeps --figure trem

makes one figure, without ``--figure`` all, in the setting of
`servegym.experiments.figures.serverless.costs` but for the swept number, with a GPU whose times are
chosen (``eager``) and one whose times are derived (``l40s``).

* ``trem``: the overhead t_rem up to 10 ms, with both readings of a remote call in decoding, without
  fees and with those of AWS Lambda; from which overhead on nothing is remote.
* ``prices``: GPU memory at 1.83 (a list price), 3 (the paper) and 5 times the price of CPU memory.
* ``slo``: the TPOT limit, at a TTFT limit of 8 s.
* ``bandwidth``: network rate between the main and the remote functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.baselines.serverless_moe.remoe import READINGS
from servegym.envs.serverless_moe.equations import DECODE_INVOCATIONS
from servegym.experiments.figures.run import Pictures, first_and_last, save
from servegym.experiments.figures.serverless.common import GPUS, MODELS
from servegym.experiments.figures.serverless.methods import (
    Options,
    Setting,
    gap_notes,
    main_of,
    panels,
    plot_lines,
    show,
    sweep,
    title_of,
)
from servegym.experiments.figures.verdicts import pick, values

__all__ = ["break_even", "main", "nothing_remote"]

MODULE = "servegym.experiments.figures.beyond.serverless.cost_sweeps"
OVERHEADS_MS = (0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0)
SWEPT_BILLS = ("none", "aws_lambda")
NOTHING = 0.005
"""A mean remote ratio below which nothing is remote."""
PRICE_RATIOS = (1.83, 3.0, 5.0)
TPOT_LIMITS_MS = (45.0, 50.0, 60.0, 80.0, 120.0)
BANDWIDTHS_MB_S = (75.0, 150.0, 300.0, 600.0, 1250.0)


def break_even(overheads: Sequence[float], over_mix: Sequence[float]) -> float:
    """The first overhead at which the cost over MIX passes 1, linear between points.

    Returns:
        0 if it is above 1 from the first point on, infinity if it stays below.
    """
    if over_mix[0] > 1.0:
        return 0.0
    for at in range(1, len(over_mix)):
        low, high = over_mix[at - 1], over_mix[at]
        if high > 1.0:
            step = overheads[at] - overheads[at - 1]
            return overheads[at - 1] + step * (1.0 - low) / (high - low)
    return float("inf")


def nothing_remote(overheads: Sequence[float], ratios: Sequence[float]) -> float | None:
    """The overhead from which on no mean remote ratio reaches `NOTHING`, None if there is none."""
    left = None
    for ms, ratio in zip(overheads, ratios, strict=True):
        left = (left or ms) if ratio < NOTHING else None
    return left


def trem(options: Options) -> None:
    """Cost over MIX against t_rem; the break-even of each method, and where nothing is remote."""
    overheads = first_and_last(options, OVERHEADS_MS)
    rows = sweep(
        options,
        "cost_trem",
        [
            Setting(model, gpu, bill, trem_ms=ms, invocation=how)
            for model in MODELS
            for how in DECODE_INVOCATIONS
            for bill in SWEPT_BILLS
            for gpu in (GPUS[0], GPUS[-1])
            for ms in overheads
        ],
    )
    show("Cost / MIX against t_rem", rows, "trem_ms")
    lines = []
    for panel in panels(rows, "model", "gpu", "bill", "invocation"):
        parts = []
        for method in (*READINGS, "per_expert", "optimum"):
            own = pick(rows, method=method, **panel)
            costs = [row["over_mix"] for row in own]
            even = break_even(overheads, costs)
            where = f"{even:.2f} ms" if np.isfinite(even) else f"none up to {overheads[-1]:g} ms"
            if even == 0.0:
                where = f"below {overheads[0]:g} ms"
            listed = "/".join(f"{cost:.2f}" for cost in costs)
            parts.append(f"{method} {listed} of MIX, break-even {where}")
            if method in ("remoe_cost", "optimum"):
                near = nothing_remote(overheads, [row["remote"] for row in own])
                parts[-1] += f", nothing remote from {near:g} ms on" if near else ""
            if min(np.diff(costs)) < -0.01:
                parts[-1] += " (falls where the TPOT limit forbids the largest b)"
        lines.append(f"{title_of(panel)}: {'; '.join(parts)}")
    at = "Costs are at t_rem = " + "/".join(f"{ms:g}" for ms in overheads) + " ms."
    save(options, "cost_trem", rows, at, *lines, *gap_notes(rows))


def prices(options: Options) -> None:
    """Cost over MIX against the price of GPU memory."""
    rows = sweep(
        options,
        "cost_prices",
        [
            Setting(model, gpu, price_ratio=ratio)
            for model in MODELS
            for gpu in (GPUS[0], GPUS[-1])
            for ratio in first_and_last(options, PRICE_RATIOS)
        ],
    )
    show("Cost / MIX against the price of GPU memory", rows, "price_ratio")
    save(options, "cost_prices", rows, *_points(rows, "price_ratio"), *gap_notes(rows))


def slo(options: Options) -> None:
    """Cost over MIX and missed SLOs against the TPOT limit."""
    limits = first_and_last(options, TPOT_LIMITS_MS)
    rows = sweep(
        options,
        "cost_slo",
        [
            Setting(model, gpu, ttft_limit_s=8.0, tpot_limit_s=1e-3 * limit)
            for model in MODELS
            for gpu in (GPUS[0], GPUS[-1])
            for limit in limits
        ],
    )
    for row in rows:
        row["tpot_limit_ms"] = round(1e3 * row["tpot_limit_s"], 6)
    show("Cost / MIX against the TPOT limit", rows, "tpot_limit_ms")
    lines = _points(rows, "tpot_limit_ms")
    for panel in panels(rows):
        parts = []
        for method in values(rows, "method"):
            own = pick(rows, method=method, **panel)
            if any(row["late"] for row in own):
                parts.append(f"{method} " + "/".join(f"{100 * row['late']:.0f}" for row in own))
        at = "/".join(f"{limit:g}" for limit in limits)
        found = "; ".join(parts) or "none of any method"
        lines.append(f"{title_of(panel)}, % late (or no plan) at {at} ms: {found}")
    save(options, "cost_slo", rows, *lines, *gap_notes(rows))


def bandwidth(options: Options) -> None:
    """Cost over MIX against the network rate."""
    rows = sweep(
        options,
        "cost_bandwidth",
        [
            Setting(model, gpu, bandwidth_mb_s=rate)
            for model in MODELS
            for gpu in (GPUS[0], GPUS[-1])
            for rate in first_and_last(options, BANDWIDTHS_MB_S)
        ],
    )
    show("Cost / MIX against the network rate", rows, "bandwidth_mb_s")
    lines = _points(rows, "bandwidth_mb_s")
    save(options, "cost_bandwidth", rows, *lines, *gap_notes(rows))


def _points(rows: Sequence[dict[str, Any]], key: str) -> list[str]:
    """Cost over MIX of every method along a sweep, a sentence a panel."""
    lines = []
    for panel in panels(rows):
        parts = []
        for method in values(rows, "method"):
            own = pick(rows, method=method, **panel)
            parts.append(f"{method} " + "/".join(f"{row['over_mix']:.2f}" for row in own))
        at = "/".join(f"{row[key]:g}" for row in own)
        lines.append(f"{title_of(panel)}, of MIX at {key} = {at}: {'; '.join(parts)}")
    return lines


def _plot_trem(rows: Sequence[Mapping[str, Any]]) -> Any:
    shown = panels(rows, "model", "gpu", "bill", "invocation")
    return plot_lines(rows, "trem_ms", "t_rem, ms", shown, 4)


def _plot_prices(rows: Sequence[Mapping[str, Any]]) -> Any:
    return plot_lines(rows, "price_ratio", "c_g / c_c", panels(rows), 4, top=None)


def _plot_slo(rows: Sequence[Mapping[str, Any]]) -> Any:
    return plot_lines(rows, "tpot_limit_ms", "TPOT limit, ms", panels(rows), 4)


def _plot_bandwidth(rows: Sequence[Mapping[str, Any]]) -> Any:
    return plot_lines(rows, "bandwidth_mb_s", "MB/s", panels(rows), 4)


FIGURES = {"trem": trem, "prices": prices, "slo": slo, "bandwidth": bandwidth}
PICTURES: Pictures = {
    "cost_trem": _plot_trem,
    "cost_prices": _plot_prices,
    "cost_slo": _plot_slo,
    "cost_bandwidth": _plot_bandwidth,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; ``--figure`` names figures, all by default. Returns 0."""
    return main_of(FIGURES, PICTURES, argv, __doc__, MODULE, 8)


if __name__ == "__main__":
    run_main(main)
