"""Where a training's independent jobs run: in this process or in several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any


def run_jobs(
    function: Callable[..., Any],
    jobs: Sequence[Sequence[Any]],
    pool: ProcessPoolExecutor | None,
) -> Iterator[tuple[int, Any]]:
    """Run ``function(*job)`` for every job; yields index and result in the order of their ends.

    Args:
        function: An importable function that changes nothing outside.
        jobs: Arguments of each job.
        pool: Of `open_pool`.
    """
    if pool is None:
        for index, job in enumerate(jobs):
            yield index, function(*job)
    else:
        running = {pool.submit(function, *job): index for index, job in enumerate(jobs)}
        for future in as_completed(running):
            yield running[future], future.result()


def open_pool(workers: int) -> ProcessPoolExecutor | None:
    """A pool for `run_jobs`; None for one worker.

    Raises:
        ValueError: If ``workers`` is below 1.
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}; allowed is 1 or more")
    # Spawned: a forked child would inherit the locks of the compiled kernels' threads.
    return None if workers == 1 else ProcessPoolExecutor(workers, get_context("spawn"))
