"""Where independent jobs run: one after another in this process, or on a cluster.

`servegym.experiments.cluster.executor.ray_executor` is the other `Executor`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

__all__ = ["Executor", "run_serially"]


class Executor(Protocol):
    """Runs a function for every job."""

    def __call__(
        self, function: Callable[..., Any], jobs: Sequence[Sequence[Any]], names: Sequence[str]
    ) -> Iterator[tuple[int, Any]]:
        """Run ``function(*job)`` for every job.

        Args:
            function: An importable function that changes nothing outside.
            jobs: Arguments of each job.
            names: A name of each job, for error messages.

        Yields:
            Index of a job and its result, in the order in which the jobs end; every index once.
        """
        ...


def run_serially(
    function: Callable[..., Any], jobs: Sequence[Sequence[Any]], names: Sequence[str]
) -> Iterator[tuple[int, Any]]:
    """The `Executor` that runs the jobs in their order in this process."""
    for index, job in enumerate(jobs):
        yield index, function(*job)
