"""Repeating what is timed, and showing how long it will go on."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np


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
