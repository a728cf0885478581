"""Rows of a batch split over threads: the calls release the interpreter's lock."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

MAX_THREADS = 256

Call = Callable[[int, int], int]


class RowThreads:
    """Contiguous shares of B rows, one for each thread; the caller's thread has the first.

    The threads start at the first call, and anew in a process forked since; they end with `close`
    or with the object.

    Attributes:
        num_threads: As asked for; no more threads than rows are used.
        shares: First row of each share and the row after its last.
    """

    def __init__(self, num_rows: int, num_threads: int) -> None:
        self.num_threads = num_threads
        used = min(num_threads, num_rows)
        edges = [num_rows * k // used for k in range(used + 1)]
        self.shares = list(zip(edges[:-1], edges[1:], strict=True))
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def run(self, call: Call) -> list[int]:
        """What ``call(start, stop)`` returns for every share."""
        first, *others = self.shares
        if not others:
            return [call(*first)]
        if self._pool is None or self._process != os.getpid():
            self._pool, self._process = ThreadPoolExecutor(len(others), "servegym"), os.getpid()
        running = [self._pool.submit(call, *share) for share in others]
        try:
            result = call(*first)
        finally:
            wait(running)
        return [result, *(each.result() for each in running)]

    def close(self) -> None:
        """End the threads; the next call starts them anew."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown()
        self._pool = None
