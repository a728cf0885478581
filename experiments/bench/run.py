"""What the benchmarks of all families share: rows with goals and yardsticks, command line, files.

A speed says more about the machine than about the code, so a row has a yardstick of the same run
beside it, and a goal is put on the value or on the ratio to that yardstick. Times are processor
time of one thread, so that other load on the machine matters less; what is compared is timed in
turn, and the median counts.
"""

from __future__ import annotations

import argparse
import operator
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servegym.experiments.figures import script as figure_run
from servegym.experiments.output import print_table

__all__ = [
    "BenchOptions",
    "Goal",
    "bench_options",
    "interleave",
    "report",
    "row",
    "seconds",
    "short",
]

SIGNS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "<": operator.lt,
}
TIMES = ("s", "ms", "us", "ns")
"""Units of which less is better."""


class BenchOptions(figure_run.FigureOptions):
    """The command line of a benchmark.

    Attributes:
        repeats: Timings of each figure; the median counts.
    """

    repeats: int


@dataclass(frozen=True)
class Goal:
    """What a figure should reach.

    Attributes:
        sign: ``>=``, ``<=`` or ``<``.
        bound: The number to reach.
        of: Whether it is about the ``value``, or the ``ratio``: how many times as fast it is as
            the yardstick.
    """

    sign: str
    bound: float
    of: str = "value"

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:,.10g}" + (" x" if self.of == "ratio" else "")


def seconds(work: Callable[[], object]) -> float:
    """Processor time of a call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def interleave(timers: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Values of every timer, taken in turn so that drift hits all alike; a first turn compiles."""
    for timer in timers.values():
        timer()
    values: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(repeats):
        for name, timer in timers.items():
            values[name].append(timer())
    return values


def row(
    what: str,
    values: Sequence[float],
    unit: str,
    goal: Goal | None = None,
    yardstick: tuple[str, Sequence[float]] | None = None,
    **about: Any,
) -> dict[str, Any]:
    """A row: the median, lowest and highest value, the yardstick and whether the goal is met.

    Args:
        what: What was measured.
        values: All measurements.
        unit: Their unit.
        goal: What should be reached, if anything.
        yardstick: Name and measurements of what it is compared with, in the same unit.
        **about: The setting, for the record.

    Returns:
        The row; its ``ratio`` is how many times as fast it is as the yardstick.
    """
    value = statistics.median(values)
    against = statistics.median(yardstick[1]) if yardstick else float("nan")
    of = {"value": value, "ratio": against / value if unit in TIMES else value / against}
    return {
        "what": what,
        "value": value,
        "low": min(values),
        "high": max(values),
        "unit": unit,
        "yardstick": yardstick[0] if yardstick else "",
        "yardstick_value": against if yardstick else "",
        "ratio": of["ratio"] if yardstick else "",
        "goal": str(goal) if goal else "",
        "met": SIGNS[goal.sign](of[goal.of], goal.bound) if goal else "",
        "about": " ".join(f"{k}={v}" for k, v in about.items()),
    }


def bench_options(
    family: str,
    description: str | None,
    argv: Sequence[str] | None,
    extra: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
    repeats: int = 7,
) -> BenchOptions:
    """Parse the command line of a benchmark and make the folder of its results.

    Args:
        family: Folder below ``experiments/results`` and word of ``servegym bench``.
        description: The script's docstring.
        argv: Arguments; those of the process by default.
        extra: Adds the script's own options.
        repeats: Default number of timings.

    Raises:
        ValueError: If ``--repeats`` is below one.
    """
    parser = argparse.ArgumentParser(
        prog=f"servegym bench {family}", description=(description or "").partition("\n")[0]
    )
    out = Path("experiments", "results", family)
    parser.add_argument("--out", type=Path, default=out, help=f"folder of the results ({out})")
    parser.add_argument("--quick", action="store_true", help="a smoke run, figures not to quote")
    parser.add_argument("--repeats", type=int, default=repeats, help=f"timings ({repeats})")
    parser.set_defaults(default_episodes=1, episodes=1)
    extra(parser)
    options = figure_run.command_line(parser, argv, BenchOptions())
    if options.repeats < 1:
        raise ValueError(f"repeats is {options.repeats}; allowed is 1 or more")
    return options


def short(value: float | str) -> str:
    """A number of a table; nothing for a missing one."""
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def report(options: BenchOptions, rows: Sequence[Mapping[str, Any]], *notes: str) -> None:
    """Print the rows and write ``bench.csv`` and ``bench.txt``, with the goals that are missed."""
    print_table(
        "Medians of one thread's processor time",
        ["what", "value", "unit", "yardstick", "of it", "ratio", "goal", "met"],
        [
            [
                r["what"],
                short(r["value"]),
                r["unit"],
                r["yardstick"],
                *(short(r[key]) for key in ("yardstick_value", "ratio")),
                r["goal"],
                {True: "yes", False: "NO"}.get(r["met"], ""),
            ]
            for r in rows
        ],
    )
    missed = [
        f"{r['what']}: {short(r['ratio' if r['goal'].endswith('x') else 'value'])} ({r['goal']})"
        for r in rows
        if r["met"] is False
    ]
    first = f"missed: {'; '.join(missed)}" if missed else "every goal is met"
    figure_run.save(options, "bench", rows, None, first, *notes)
