"""Where independent jobs run: one after another in this process, or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from servegym.agents.lib.ray_cluster import check_ray, cluster, run_jobs

Executor = Callable[
    [Callable[..., Any], Sequence[Sequence[Any]], Sequence[str]], Iterator[tuple[int, Any]]
]
"""Called as ``executor(function, jobs, names)``: runs ``function(*job)`` for every job.

The function is importable and changes nothing outside; an error names its job. The index of a job
and its result are yielded in the order in which the jobs end.
"""


def run_serially(
    function: Callable[..., Any], jobs: Sequence[Sequence[Any]], names: Sequence[str]
) -> Iterator[tuple[int, Any]]:
    """The `Executor` that runs the jobs in their order in this process."""
    for index, job in enumerate(jobs):
        yield index, function(*job)


def ray_executor(where: str | None) -> Executor:
    """The `Executor` whose jobs run on a cluster, one processor each; without one `run_serially`.

    The cluster is joined or started with the first job, after all checks of the caller.

    Args:
        where: See `check_ray`; None for no cluster.

    Raises:
        ValueError: If ``where`` is not valid.
        ModuleNotFoundError: If Ray is missing.
    """
    if where is None:
        return run_serially
    check_ray(where)

    def run(function: Any, jobs: Any, names: Any) -> Iterator[tuple[int, Any]]:
        if jobs:
            with cluster(where):
                yield from run_jobs(function, jobs, names)

    return run
