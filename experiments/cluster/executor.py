"""The executor of evaluations, tunings and leaderboards on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from servegym.agents.lib.ray_cluster import check_ray, cluster, run_jobs
from servegym.experiments.evaluation.executor import Executor

__all__ = ["ray_executor"]


def ray_executor(where: str) -> Executor:
    """The `Executor` whose jobs run on a cluster, one processor each.

    The cluster is joined or started with the first job, after all checks of the caller.

    Args:
        where: See `check_ray`.

    Raises:
        ValueError: If ``where`` is not valid.
        ModuleNotFoundError: If Ray is missing.
    """
    check_ray(where)

    def run(
        function: Callable[..., Any], jobs: Sequence[Sequence[Any]], names: Sequence[str]
    ) -> Iterator[tuple[int, Any]]:
        if jobs:
            with cluster(where):
                yield from run_jobs(function, jobs, names)

    return run
