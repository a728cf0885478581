"""What the measurements share: numbers of a command line, repeating, the time left."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np


def whole_numbers(name: str, text: str) -> list[int]:
    """Parse ``1,2,4`` of an argument into sorted whole numbers, each once; ValueError below 1."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise ValueError(f"{name} is {text!r}; give whole numbers >= 1 such as 1,2,4")
    return numbers


def repeat(
    once: Callable[[], float], *, warm_up: int = 3, repeats: int = 20, seconds: float = 2.0
) -> np.ndarray:
    """Sorted seconds of something timed again and again; ``once`` runs it and returns its seconds.

    After ``warm_up`` runs that are thrown away come ``repeats`` at most; none starts after so many
    ``seconds``, once three have been made.
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
    """Lines on standard error with the time left, every few seconds.

    Yields a function to call after each of ``total`` steps with a short text on what was done.
    """
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
