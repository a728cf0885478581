"""Where independent jobs run: in this process, in several of this machine, or on a Ray cluster."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from multiprocessing import get_context, parent_process
from typing import Any

from servegym.agents.lib import ray_cluster

Executor = Callable[
    [Callable[..., Any], Sequence[Sequence[Any]], Sequence[str]], Iterator[tuple[int, Any]]
]
"""Called as ``executor(function, jobs, names)``: see `Workers.__call__`."""


class Workers:
    """The `Executor` of this process, of several, or of a Ray cluster, until it is closed.

    Processes or a cluster start with the first job, after all checks of the caller.

    Args:
        workers: Processes of this machine.
        ray: A Ray cluster in their place, see `ray_cluster.check_ray`.

    Raises:
        ValueError: If ``workers`` is below 1, ``ray`` is not valid, or both are asked for.
        ModuleNotFoundError: If Ray is asked for and missing; says what to install.
    """

    def __init__(self, workers: int = 1, ray: str | None = None) -> None:
        if workers < 1:
            raise ValueError(f"workers is {workers}; allowed is 1 or more")
        if ray is not None:
            if workers > 1:
                raise ValueError(f"workers is {workers} and ray {ray!r}; give one (ray='local:N')")
            ray_cluster.check_ray(ray)
        self.workers, self.ray = workers, ray
        self._stack = ExitStack()
        self._pool: ProcessPoolExecutor | None = None
        self._joined = False

    def __call__(
        self,
        function: Callable[..., Any],
        jobs: Sequence[Sequence[Any]],
        names: Sequence[str] = (),
    ) -> Iterator[tuple[int, Any]]:
        """Run ``function(*job)`` for every job; yields index and result as the jobs end.

        ``function`` is importable and changes nothing outside: on a cluster a job whose worker is
        lost runs again. ``names`` of the jobs, for errors, are by default the function's and a
        number.
        """
        if self.ray is not None and jobs:
            if not self._joined:
                self._stack.enter_context(ray_cluster.cluster(self.ray))
                self._joined = True
            names = names or [f"{function.__name__}, job {k}" for k in range(len(jobs))]
            yield from ray_cluster.run_jobs(function, jobs, names)
        elif self.workers > 1:
            yield from self._in_processes(function, jobs)
        else:
            for index, job in enumerate(jobs):
                yield index, function(*job)

    def _in_processes(
        self, function: Callable[..., Any], jobs: Sequence[Sequence[Any]]
    ) -> Iterator[tuple[int, Any]]:
        if self._pool is None:
            # Spawned: a forked child would inherit the locks of the compiled kernels' threads.
            spawn = get_context("spawn")
            self._pool = ProcessPoolExecutor(self.workers, spawn, initializer=_end_with_parent)
            self._stack.enter_context(self._pool)
        # Signals are for this process alone: one that starts with them blocked never sees them.
        stops = {signal.SIGINT, signal.SIGTERM}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, stops)
        try:
            running = {self._pool.submit(function, *job): k for k, job in enumerate(jobs)}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            for future in as_completed(running):
                yield running[future], future.result()
        except KeyboardInterrupt:  # nobody waits for what runs
            for process in list(vars(self._pool)["_processes"].values()):
                process.kill()
            raise
        finally:
            for future in running:
                future.cancel()

    def close(self) -> None:
        """End the processes, or leave the cluster; one that was started here ends."""
        self._stack.close()
        self._pool, self._joined = None, False


def _end_with_parent() -> None:
    """In a process of the pool: end when the parent does, which a signal may have ended."""

    def wait() -> None:
        if (parent := parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


SERIAL = Workers()
"""Runs jobs one after another in this process."""
