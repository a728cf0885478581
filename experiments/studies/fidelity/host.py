"""What of the host can be seen in a measured run: admissions, decode iterations, light load.

Three looks at a run of an engine that plans iterations ahead::

    python -m servegym.experiments.studies.fidelity.host RUN --light OTHER_RUN --first 40

- *Lone admissions.* A request that nobody else's admission overlaps has its first token after its
  own iteration, and before that the decode iteration that was planned already. What is left over is
  the host's (a median over admissions; preempted requests that return unseen lengthen some).
- *Decode iterations.* Of two requests with one first token, the longer answer takes as many more
  iterations as it has more tokens, if neither was preempted. Where nothing is admitted between
  their ends, the time between them over the law's is the share that the law misses, for an exact
  number of iterations. Pairs are left out for a cause alone, see :func:`decode_windows`.
- *Light load.* TTFT of the first requests of a run, before its memory fills, replayed with every
  iteration planned when it starts and one ahead.

Intervals are 95 % percentiles of a bootstrap over admissions, windows or requests.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._command_line import run_main
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.evaluation.tables import provenance, write_result
from servegym.experiments.fidelity.comparison import matching_profile, simulate
from servegym.experiments.fidelity.measured_run import MeasuredRun, load_run
from servegym.experiments.studies.fidelity.markdown import Table, percent, update_document
from servegym.hardware_profiles import Profile, load

__all__ = ["decode_windows", "first_requests", "interval", "light_load", "lone_admissions", "main"]

Floats = NDArray[np.float64]

MARGIN_S = 0.25
"""No other request is scheduled so shortly before a lone one."""

SAME_S = 1e-4
"""First tokens of one iteration are noted within such a time of one another."""

SHORTEST = 0.9
"""No iteration takes less than this share of the law's shortest one."""

ROOM = 0.9
"""Decode windows hold at most this share of the KV memory, so that nobody is preempted."""


def _times(run: MeasuredRun) -> tuple[Floats, Floats]:
    """First and last token of every request, seconds since the run began."""
    return run.arrival_s + run.ttft_s, run.arrival_s + run.e2e_s


def _held(run: MeasuredRun, which: NDArray[np.intp], time: float) -> float:
    """KV tokens of decoding requests at a time, their answers taken to grow evenly."""
    first, last = _times(run)
    share = (time - first[which]) / np.maximum(last[which] - first[which], 1e-9)
    return float(np.sum(run.prompt_tokens[which] + share * run.output_tokens[which]))


def lone_admissions(run: MeasuredRun, profile: Profile) -> Floats:
    """Scheduled to first token of lone requests, ``(K, 3)`` seconds: measured, own, the one before.

    "Own" is the law's time of the iteration with the whole prompt beside the running decodes, "the
    one before" that of the decodes alone.
    """
    scheduled = run.scheduled_s
    if scheduled is None or np.isnan(scheduled).any():
        raise ValueError(f"run {run.name!r} lacks scheduled_ts in requests.jsonl")
    first, last = _times(run)
    rows = []
    for i in range(len(scheduled)):
        near = (scheduled > scheduled[i] - MARGIN_S) & (scheduled < first[i])
        running = np.flatnonzero((first < scheduled[i]) & (last > first[i]))
        room = run.engine["max_num_batched_tokens"] - len(running)
        if near.sum() > 1 or len(running) == 0 or run.prompt_tokens[i] > room:
            continue
        tokens = _held(run, running, float(scheduled[i]))
        own = profile.mixed_step_s([(float(run.prompt_tokens[i]), 0.0)], len(running), tokens)
        before = profile.decode_s(len(running), tokens)
        rows.append((first[i] - scheduled[i], own, before))
    return np.array(rows, dtype=np.float64).reshape(-1, 3)


def preempted(run: MeasuredRun, shortest_s: float) -> NDArray[np.bool_]:
    """Requests that were preempted, proved from the tokens of all requests.

    Between its first and its last token a request takes part in at most as many iterations as
    there are, and in all of them unless it is preempted. Chains of requests bound their number
    from below, whatever a law says; one with fewer tokens than that was preempted.

    Args:
        run: the run.
        shortest_s: no iteration is shorter.

    Returns:
        ``(J,)``.
    """
    times = [np.round(t, 4) for t in _times(run)]
    at = np.unique(np.concatenate(times))
    begin, end = (np.searchsorted(at, t) for t in times)
    # Fewest iterations from one time to another; going back takes away the most there can be.
    least = np.minimum(at[None, :] - at[:, None], 0.0) / shortest_s
    np.maximum.at(least, (begin, end), run.output_tokens - 1.0)
    for k in range(len(at)):
        np.maximum(least, least[:, k : k + 1] + least[k : k + 1, :], out=least)
    return least[begin, end] > run.output_tokens - 0.5


def decode_windows(run: MeasuredRun, profile: Profile) -> Floats:
    """Windows of decode iterations alone, ``(K, 4)``: iterations, sequences, measured s, law s.

    The sequences are the mean over the window; both times are of the whole window. Left out are
    windows in which memory may have been full (:data:`ROOM`), and pairs of which one was preempted
    before: proved (:func:`preempted`, at :data:`SHORTEST` of the law's shortest iteration), or in
    the replay of the run.
    """
    first, last = _times(run)
    gone = preempted(run, SHORTEST * profile.decode_s(1.0, 1.0))
    gone |= simulate(run, profile)["preemptions"] > 0
    capacity = run.engine["kv_tokens"] or profile.kv_capacity_tokens
    order = np.lexsort((last, first))
    rows = []
    for i, j in zip(order[:-1], order[1:], strict=True):
        if abs(first[i] - first[j]) > SAME_S or last[j] - last[i] < SAME_S or gone[[i, j]].any():
            continue
        if ((first > last[i]) & (first <= last[j])).any():
            continue
        alive = np.flatnonzero((first < last[i]) & (last > last[i] + SAME_S))
        if _held(run, alive, float(last[i])) > ROOM * capacity:
            continue
        # Between two ends the batch is constant; the exact count is shared out by the law.
        ends = np.unique(np.round(last[(last >= last[i]) & (last <= last[j])], 4))
        spans, costs, counts = np.diff(ends), [], []
        for begin, span in zip(ends, spans, strict=False):
            batch = np.flatnonzero((first < begin) & (last > begin + SAME_S))
            counts.append(len(batch))
            costs.append(profile.decode_s(len(batch), _held(run, batch, begin + span / 2)))
        exact = int(run.output_tokens[j] - run.output_tokens[i])
        weights = spans / np.array(costs)
        if exact < 1:  # the one that ends later has fewer tokens: it was preempted
            continue
        steps = exact * weights / weights.sum()
        rows.append((exact, steps @ counts / exact, spans.sum(), steps @ np.array(costs)))
    return np.array(rows, dtype=np.float64).reshape(-1, 4)


def first_requests(run: MeasuredRun, count: int) -> MeasuredRun:
    """The run as if only its first ``count`` requests had come."""
    cut = {
        name: getattr(run, name)[:count]
        for name in ("arrival_s", "prompt_tokens", "output_tokens", "ttft_s", "tpot_s", "e2e_s")
    }
    return replace(run, **cut)


def light_load(run: MeasuredRun, profile: Profile, count: int) -> list[tuple[bool, Floats, Floats]]:
    """TTFT of the first ``count`` requests by planning: whether ahead, measured, simulated."""
    early = first_requests(run, count)
    return [
        (ahead, early.ttft_s, simulate(early, profile, async_scheduling=ahead)["ttft_s"])
        for ahead in (False, True)
    ]


def interval(
    rows: Floats, statistic: Callable[[Floats], float], resamples: int = 2000
) -> tuple[float, float, float]:
    """The statistic of the rows, and its 95 % interval over resampled rows."""
    rng = np.random.default_rng(0)
    draws = [statistic(rows[rng.integers(len(rows), size=len(rows))]) for _ in range(resamples)]
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(statistic(rows)), float(low), float(high)


def found_rows(run: MeasuredRun, profile: Profile) -> list[dict[str, Any]]:
    """What is seen in one run: rows of quantity, points, unit, estimate and interval."""
    out = []

    def add(quantity: str, points: int, unit: str, values: tuple[float, float, float]) -> None:
        value, low, high = (round(v, 6) for v in values)
        row = {"run": run.name, "quantity": quantity, "points": points, "unit": unit}
        out.append({**row, "value": value, "low": low, "high": high})

    lone = 1e3 * lone_admissions(run, profile)
    if len(lone) > 1:
        beyond = "lone admission beyond its own iteration"
        add(beyond, len(lone), "ms", interval(lone, lambda x: float(np.median(x[:, 0] - x[:, 1]))))
        rest = interval(lone, lambda x: float(np.median(x[:, 0] - x[:, 1] - x[:, 2])))
        add(f"{beyond} and the one before", len(lone), "ms", rest)
        share = interval(lone, lambda x: float(np.median(np.log((x[:, 0] - x[:, 2]) / x[:, 1]))))
        add("log of prefill iteration over the law", len(lone), "", share)
    windows = decode_windows(run, profile)
    if len(windows) > 1:
        steps = int(windows[:, 0].sum())
        gap = interval(windows, lambda x: float(1e3 * np.sum(x[:, 2] - x[:, 3]) / x[:, 0].sum()))
        add("decode iteration beyond the law", steps, "ms", gap)
        share = interval(windows, lambda x: float(np.log(x[:, 2].sum() / x[:, 3].sum())))
        add("log of decode iteration over the law", steps, "", share)
    return out


def light_rows(run: MeasuredRun, profile: Profile, count: int) -> list[dict[str, Any]]:
    """Errors of TTFT under light load: a row for each way of planning."""
    rows = []
    for ahead, measured, simulated in light_load(run, profile, count):
        both = np.column_stack([measured, simulated])
        mean, low, high = interval(both, lambda x: float(x[:, 1].mean() / x[:, 0].mean() - 1.0))
        row = {"run": run.name, "planned": "one ahead" if ahead else "at its start"}
        row |= {"requests": len(both), "error_of_mean": round(mean, 5)}
        row |= {"low": round(low, 5), "high": round(high, 5)}
        row["median_error"] = round(float(np.median(np.abs(simulated / measured - 1.0))), 5)
        rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: print and write what is seen of the host."""
    parser = argparse.ArgumentParser(prog="python -m servegym.experiments.studies.fidelity.host")
    add = parser.add_argument
    add("run", type=Path, help="folder of a measured run")
    add("--light", type=Path, help="folder of a run whose first requests find room")
    add("--first", type=int, default=40, help="how many of its requests (default 40)")
    add("--profile", help="profile, by name or file (default: that of the run's device and model)")
    add("--out", type=Path, default=Path("experiments", "results", "fidelity"))
    add("--document", type=Path, help="Markdown file whose marked tables are replaced")
    words = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(words)
    run = load_run(options.run)
    profile = load(options.profile) if options.profile else matching_profile(run)
    seen = found_rows(run, profile)
    options.out.mkdir(parents=True, exist_ok=True)
    made = provenance(shlex.join([*parser.prog.split(), *map(str, words)]))
    write_result(options.out / "host", seen, made)
    tables = [
        Table(
            "host",
            "What is seen of the host",
            ["quantity", "points", "value", "95 % interval"],
            [[row["quantity"], str(row["points"]), *_shown(row["unit"], row)] for row in seen],
        )
    ]
    if options.light is not None:
        light = light_rows(load_run(options.light), profile, options.first)
        write_result(options.out / "light", light, made)
        tables.append(
            Table(
                "light",
                f"TTFT of the first {options.first} requests",
                [
                    "iterations planned",
                    "requests",
                    "error of mean",
                    "95 % interval",
                    "median error",
                ],
                [
                    [
                        row["planned"],
                        str(row["requests"]),
                        percent(row["error_of_mean"], signed=True),
                        " to ".join(percent(row[end], signed=True) for end in ("low", "high")),
                        percent(row["median_error"]),
                    ]
                    for row in light
                ],
            )
        )
    for table in tables:
        print_table(table.title, table.columns, table.rows)
    if options.document is not None:
        update_document(options.document, tables)
    return 0


def _shown(unit: str, row: dict[str, Any]) -> tuple[str, str]:
    digits = 2 if unit == "ms" else 4
    tail = f" {unit}" if unit else ""
    return (
        f"{row['value']:+.{digits}f}{tail}",
        f"{row['low']:+.{digits}f} to {row['high']:+.{digits}f}",
    )


if __name__ == "__main__":
    run_main(main)
