"""What the benchmarks of all families share: timers, rows with yardsticks, command line, files.

A speed says more about the machine than about the code, so a row has a yardstick of the same run
and the ratio to the yardstick. Times are processor time of one thread, so that other load on the
machine matters less; the compared calls are timed in turn, and the median counts.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from servegym.experiments.evaluation.output import print_table
from servegym.experiments.evaluation.tables import Note, provenance, write_result

__all__ = [
    "BenchOptions",
    "bench_options",
    "interleave",
    "report",
    "row",
    "seconds",
    "short",
]

TIMES = ("s", "ms", "us", "ns")
"""Units of which less is better."""


class BenchOptions(argparse.Namespace):
    """The command line of a benchmark; its own options are further attributes.

    Attributes:
        out: Folder of the results.
        quick: Whether this is a smoke run.
        repeats: Timings of each number; the median counts.
        command: The command line, for the record.
    """

    out: Path
    quick: bool
    repeats: int
    command: str


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
    yardstick: tuple[str, Sequence[float]] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """A row: the median, lowest and highest value, and the yardstick.

    Args:
        what: What was measured.
        values: All measurements.
        unit: Unit of the measurements.
        yardstick: Name and measurements of the yardstick, in the same unit.
        **settings: The setting, for the record.

    Returns:
        The row; its ``ratio`` is how many times as fast as the yardstick it is.
    """
    value = statistics.median(values)
    found: dict[str, Any] = {
        "what": what,
        "value": value,
        "low": min(values),
        "high": max(values),
        "unit": unit,
        "yardstick": "",
        "yardstick_value": "",
        "ratio": "",
        "about": " ".join(f"{key}={setting}" for key, setting in settings.items()),
    }
    if yardstick is not None:
        reference = statistics.median(yardstick[1])
        ratio = reference / value if unit in TIMES else value / reference
        found |= {"yardstick": yardstick[0], "yardstick_value": reference, "ratio": ratio}
    return found


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
    parser.add_argument("--quick", action="store_true", help="a smoke run, numbers not to quote")
    parser.add_argument("--repeats", type=int, default=repeats, help=f"timings ({repeats})")
    extra(parser)
    words = sys.argv[1:] if argv is None else argv
    options = parser.parse_args(words, BenchOptions())
    if options.repeats < 1:
        raise ValueError(f"repeats is {options.repeats}; allowed is 1 or more")
    options.out.mkdir(parents=True, exist_ok=True)
    options.command = shlex.join([*parser.prog.split(), *map(str, words)])
    return options


def short(value: float | str) -> str:
    """A number of a table; nothing for a missing one."""
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def report(options: BenchOptions, rows: Sequence[Mapping[str, Any]], *notes: Note) -> None:
    """Print the rows and write the table ``bench``."""
    print_table(
        "Medians of one thread's processor time",
        ["what", "value", "unit", "yardstick", "of the yardstick", "ratio"],
        [
            [
                row["what"],
                short(row["value"]),
                row["unit"],
                row["yardstick"],
                *(short(row[key]) for key in ("yardstick_value", "ratio")),
            ]
            for row in rows
        ],
    )
    write_result(options.out / "bench", rows, provenance(options.command, options.quick), notes)
    print(f"{options.out / 'bench'}.csv, .json")
