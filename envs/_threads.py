"""Rows of a batch split over threads: the calls release the interpreter's lock."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

MAX_THREADS = 256

Call = Callable[[int, int], int]


class _Worker:
    """A thread that makes one call at a time.

    A lock each way: a `concurrent.futures` executor hands the interpreter's lock to and fro several
    times a call, which costs more than a step of hundreds of systems.
    """

    def __init__(self) -> None:
        self._call: Call | None = None
        self._share = 0, 0
        self._found: int | BaseException = 0
        self._go, self._done = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._done.acquire()
        self.thread = threading.Thread(target=self._work, name="servegym", daemon=True)
        self.thread.start()

    def start(self, call: Call | None, share: tuple[int, int] = (0, 0)) -> None:
        """Begin a call; without one the thread ends."""
        self._call, self._share = call, share
        self._go.release()

    def result(self) -> int:
        """What the call returned, or raised, once it has."""
        self._done.acquire()
        if isinstance(self._found, BaseException):
            raise self._found
        return self._found

    def _work(self) -> None:
        while True:
            self._go.acquire()
            if self._call is None:
                return
            try:
                self._found = self._call(*self._share)
            except BaseException as error:
                self._found = error
            self._call = None  # which may hold the batch
            self._done.release()


def _end(workers: list[_Worker], process: int) -> None:
    if process == os.getpid():
        for worker in workers:
            worker.start(None)


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
        self._workers: list[_Worker] = []
        self._process = 0
        self._ending: weakref.finalize | None = None

    def run(self, call: Call) -> list[int]:
        """What ``call(start, stop)`` returns for every share."""
        first, *others = self.shares
        if not others:
            return [call(*first)]
        if self._process != os.getpid():
            self._workers, self._process = [_Worker() for _ in others], os.getpid()
            self._ending = weakref.finalize(self, _end, self._workers, self._process)
        for worker, share in zip(self._workers, others, strict=True):
            worker.start(call, share)
        try:
            found = call(*first)
        finally:
            rest = [worker.result() for worker in self._workers]
        return [found, *rest]

    def close(self) -> None:
        """End the threads; the next call starts them anew."""
        if self._ending is not None:
            self._ending()
        if self._process == os.getpid():
            for worker in self._workers:
                worker.thread.join()
        self._workers, self._process, self._ending = [], 0, None
