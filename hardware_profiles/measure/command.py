"""Measure a machine: GPU kernels, CPU experts, or a running server.

``servegym measure gpu | cpu-expert | server`` (or ``python -m
servegym.hardware_profiles.measure.command``) write CSV files that can be interrupted and resumed:
every row is on disk as soon as it is measured, and a second run measures only what is missing.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym.envs._command_line import run_main
from servegym.hardware_profiles.profiles import read_json

__all__ = ["ResumableTable", "calibrate_arguments", "main", "progress", "repeat", "whole_numbers"]

# Written beside GPU measurements: what `servegym calibrate` needs to know of them.
SETTINGS_FILE = "calibrate.json"


class ResumableTable:
    """A CSV file that grows row by row and survives being interrupted.

    Args:
        path: The file; its folder must exist. A last line without an end is what an interrupted
            run leaves and is dropped.
        columns: All columns, in order.
        key: The columns that tell one measurement from another.

    Raises:
        ValueError: If there is a file that holds something else.
    """

    def __init__(
        self, path: str | os.PathLike[str], columns: Sequence[str], key: Sequence[str]
    ) -> None:
        self.path = Path(path)
        self.columns = tuple(columns)
        self.key = tuple(key)
        self.rows: dict[tuple[str, ...], dict[str, str]] = {}
        if not self.path.parent.is_dir():
            raise ValueError(f"out is {str(self.path)!r}, but its folder does not exist")
        if not self.path.is_file() or self.path.stat().st_size == 0:
            self._append(self.columns)
            return
        try:
            text = self.path.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]
            reader = csv.DictReader(io.StringIO(whole))
            found = [(reader.line_num, row) for row in reader]
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{self.path}: not a CSV text file: {error}") from error
        if tuple(reader.fieldnames or ()) != self.columns:
            raise ValueError(
                f"{self.path}:1: the columns are {', '.join(reader.fieldnames or ()) or 'none'}, "
                f"not {', '.join(self.columns)}: name another file to start afresh"
            )
        for line, row in found:
            if None in row or None in row.values():
                raise ValueError(f"{self.path}:{line}: not {len(self.columns)} values; remove it")
            self.rows[tuple(row[name] for name in self.key)] = row
        if whole != text:
            temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
            temporary.write_text(whole, encoding="utf-8")
            os.replace(temporary, self.path)

    def __contains__(self, key: Sequence[Any]) -> bool:
        return tuple(str(value) for value in key) in self.rows

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, row: Mapping[str, Any]) -> None:
        """Append one row and force it to the disk."""
        values = {name: str(row[name]) for name in self.columns}
        self._append(list(values.values()))
        self.rows[tuple(values[name] for name in self.key)] = values

    def sort(self) -> None:
        """Rewrite the file with its rows in the order of the key, in one move."""

        def order(key: tuple[str, ...]) -> list[tuple[int, float, str]]:
            parts: list[tuple[int, float, str]] = []
            for text in key:
                try:
                    parts.append((0, float(text), ""))
                except ValueError:
                    parts.append((1, 0.0, text))
            return parts

        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(self.columns)
        for key in sorted(self.rows, key=order):
            writer.writerow(self.rows[key].values())
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        temporary.write_text(stream.getvalue(), encoding="utf-8")
        os.replace(temporary, self.path)

    def _append(self, values: Sequence[str]) -> None:
        stream = io.StringIO()
        csv.writer(stream, lineterminator="\n").writerow(values)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(stream.getvalue())
            file.flush()
            os.fsync(file.fileno())


def repeat(
    once: Callable[[], float], *, warm_up: int = 3, repeats: int = 20, seconds: float = 2.0
) -> np.ndarray:
    """Time something again and again.

    Args:
        once: Runs it once and returns the seconds that it took.
        warm_up: Runs that are thrown away.
        repeats: Most runs that count.
        seconds: Time after which no further run starts, once three have been made.

    Returns:
        Sorted times in seconds.
    """
    for _ in range(warm_up):
        once()
    times: list[float] = []
    stop = time.perf_counter() + seconds
    while len(times) < repeats and (len(times) < min(3, repeats) or time.perf_counter() < stop):
        times.append(once())
    return np.sort(times)


@contextlib.contextmanager
def progress(total: int, label: str) -> Iterator[Callable[[str], None]]:
    """A progress bar with the time left; without ``rich`` a line every few seconds.

    Args:
        total: Steps to come.
        label: What is being measured.

    Yields:
        A function to call after each step with a short text on what was done.
    """
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed
        from rich.progress import TimeRemainingColumn as Remaining
    except ImportError:
        rich = None
    else:
        console = Console(file=sys.stderr)
        rich = console if console.is_terminal else None
    if rich is not None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            Elapsed(),
            TextColumn("left"),
            Remaining(),
            TextColumn("{task.fields[doing]}"),
        )
        with Progress(*columns, console=rich) as bar:
            task = bar.add_task(label, total=total, doing="")
            yield lambda text: bar.update(task, advance=1, doing=text)
        return
    start = shown = time.monotonic()
    done = 0

    def step(text: str) -> None:
        nonlocal done, shown
        done += 1
        now = time.monotonic()
        if now - shown > 5.0 or done == total:
            left = (now - start) / done * (total - done)
            print(f"{label}: {done}/{total}, {left:.0f} s left, {text}", file=sys.stderr)
            shown = now

    yield step


def whole_numbers(name: str, text: str) -> list[int]:
    """Parse ``1,2,4`` into sorted whole numbers, 1 or more.

    Args:
        name: The argument, for the message.
        text: What was given.

    Returns:
        The numbers, each once.

    Raises:
        ValueError: If one is no whole number of at least 1.
    """
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise ValueError(f"{name} is {text!r}; give whole numbers >= 1 such as 1,2,4")
    return numbers


def positive(name: str, value: float) -> float:
    """The value, if it is a finite number above zero.

    Raises:
        ValueError: If it is not.
    """
    if not math.isfinite(value) or value <= 0.0:
        raise ValueError(f"{name} is {value}; it must be a finite number > 0")
    return value


def calibrate_arguments(arguments: Sequence[str]) -> list[str]:
    """Arguments of ``servegym calibrate``, with what the measured folder says of itself.

    ``servegym measure gpu`` leaves a file beside its tables that names the model, the device and
    its memory; whatever the user gives wins. ``-o`` stands for ``--out``.

    Args:
        arguments: As given.

    Returns:
        The arguments to parse.

    Raises:
        ValueError: If that file is malformed.
    """
    out = ["--out" if word == "-o" else word for word in arguments]
    given = {word.partition("=")[0] for word in out if word.startswith("--")}
    folder = next((Path(word) for word in out if (Path(word) / SETTINGS_FILE).is_file()), None)
    if folder is None:
        return out
    settings = read_json(folder / SETTINGS_FILE)
    if not isinstance(settings, dict):
        raise ValueError(f"{folder / SETTINGS_FILE}: must be an object of arguments")
    for option, value in settings.items():
        if option in given:
            continue
        if not option.startswith("--") or not isinstance(value, str | int | float):
            raise ValueError(f"{folder / SETTINGS_FILE}: field {option!r}: got {value!r}")
        out += [option, str(folder / str(value)) if option == "--model" else str(value)]
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: ``gpu``, ``cpu-expert`` or ``server``, and their arguments.

    Args:
        arguments: The command line; ``sys.argv`` by default.

    Returns:
        The exit status.

    Raises:
        ValueError: If an argument cannot be used.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    kinds = ("gpu", "cpu-expert", "server")
    what = words[0] if words else "--help"
    if what in ("-h", "--help"):
        print(
            "usage: servegym measure {gpu,cpu-expert,server} ...\n\n"
            "  gpu         kernels of a model shape with random weights, through torch\n"
            "  cpu-expert  one expert's feed-forward pass, through numpy\n"
            "  server      any server that speaks OpenAI's protocol\n\n"
            "Each has --help of its own."
        )
        return 0
    if what == "gpu":
        from servegym.hardware_profiles.measure import gpu as measure_gpu

        return measure_gpu.main(words[1:])
    if what == "cpu-expert":
        from servegym.hardware_profiles.measure import cpu as measure_cpu

        return measure_cpu.main(words[1:])
    if what == "server":
        from servegym.hardware_profiles.measure import server as measure_server

        return measure_server.main(words[1:])
    raise ValueError(f"measure: got {what!r}; must be one of {', '.join(kinds)}")


if __name__ == "__main__":
    run_main(main)
