"""Where a training's independent jobs run: in this process, in several, or on a Ray cluster."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from multiprocessing import get_context
from typing import Any

from servegym.agents.lib import ray_cluster


class RayPool:
    """A Ray cluster for `run_jobs`, joined or started when made, and left by `shutdown`.

    Args:
        where: ``"auto"``, ``"local"`` or ``"local:N"``, as in ``servegym evaluate --ray``.

    Raises:
        ValueError: If ``where`` is none of these, or there is no such cluster.
        ModuleNotFoundError: If Ray is missing; says what to install.
    """

    def __init__(self, where: str) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(ray_cluster.cluster(where))

    def run(
        self, function: Callable[..., Any], jobs: Sequence[Sequence[Any]]
    ) -> Iterator[tuple[int, Any]]:
        """See `run_jobs`; a job whose worker is lost runs again."""
        names = [f"{function.__name__}, job {index}" for index in range(len(jobs))]
        yield from ray_cluster.run_jobs(function, jobs, names)

    def shutdown(self) -> None:
        """Leave the cluster; one that was started here ends."""
        self._stack.close()


Pool = ProcessPoolExecutor | RayPool | None
"""Of `open_pool`."""


def run_jobs(
    function: Callable[..., Any], jobs: Sequence[Sequence[Any]], pool: Pool
) -> Iterator[tuple[int, Any]]:
    """Run ``function(*job)`` for every job; yields index and result in the order of their ends.

    The function is importable and changes nothing outside; the pool is of `open_pool`.
    """
    if pool is None:
        for index, job in enumerate(jobs):
            yield index, function(*job)
    elif isinstance(pool, RayPool):
        yield from pool.run(function, jobs)
    else:
        # Ctrl-C is for this process alone: one that starts with the signal blocked never sees it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            running = {pool.submit(function, *job): index for index, job in enumerate(jobs)}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            for future in as_completed(running):
                yield running[future], future.result()
        finally:
            for future in running:
                future.cancel()


def open_pool(workers: int = 1, ray: str = "") -> Pool:
    """A pool for `run_jobs`; None for one worker.

    Args:
        workers: Processes of this machine.
        ray: A Ray cluster in their place, see `RayPool`; none if empty.

    Raises:
        ValueError: If ``workers`` is below 1, or both are asked for.
        ModuleNotFoundError: If Ray is asked for and missing.
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}; allowed is 1 or more")
    if ray:
        if workers > 1:
            raise ValueError(f"workers is {workers} and ray {ray!r}; give one (ray='local:N')")
        return RayPool(ray)
    # Spawned: a forked child would inherit the locks of the compiled kernels' threads.
    return None if workers == 1 else ProcessPoolExecutor(workers, get_context("spawn"))
