"""The evaluator on a Ray cluster: the same blocks of episodes, and so the same rows, bit for bit.

A job is one policy's block of episodes (``num_envs`` of them). An episode's chance is drawn from
its own seed and a policy starts afresh with every block, so that a block gives the same rows
wherever it runs. More and smaller blocks (a lower ``num_envs``) occupy more workers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from servegym.baselines.protocol import Policy
from servegym.experiments.cluster.jobs import check_ray, cluster, run_jobs
from servegym.experiments.evaluate import DEFAULT_SEED, Plan, Progress, plan_for

__all__ = ["evaluate"]


def evaluate(
    env_id: str,
    policies: Sequence[str | os.PathLike[str] | Policy],
    episodes: int = 20,
    seed: int = DEFAULT_SEED,
    env_kwargs: Mapping[str, Any] | None = None,
    num_envs: int | None = None,
    progress: Progress | None = None,
    logs: dict[str, list[NDArray[Any]]] | None = None,
    ray: str = "auto",
) -> list[dict[str, Any]]:
    """Run every policy on the same episodes, spread over a cluster.

    Policies are made here and sent to the workers, so that checkpoints and policy files need to
    lie on this machine only. Files that ``env_kwargs`` names must lie on all of them.

    Args:
        env_id: As `evaluate.evaluate`, like the following.
        policies: Names, paths or policy objects that can be pickled.
        episodes: Episodes a policy.
        seed: Seed of the first episode.
        env_kwargs: Arguments of the environment.
        num_envs: Episodes of a job, by default up to 16.
        progress: Called after every job.
        logs: A dict to fill with request logs.
        ray: ``"auto"``, ``"local"`` or ``"local:N"``, see `ray_cluster.check_ray`.

    Returns:
        The rows of `evaluate.evaluate`, equal and in the same order.

    Raises:
        ValueError: If an argument is not valid, before a cluster is started.
        RuntimeError: If a job's worker is lost again and again.
    """
    check_ray(ray)
    plan, resolved = plan_for(env_id, policies, episodes, seed, env_kwargs, num_envs)
    with cluster(ray) as connected:
        shared = {name: connected.put(policy) for name, policy in resolved}
        whole = connected.put(plan)
        keys = [(name, start) for name, _ in resolved for start in plan.starts]
        jobs = [(whole, name, shared[name], start) for name, start in keys]
        names = [f"{name}, episodes {start} to {start + plan.count - 1}" for name, start in keys]
        found: dict[tuple[str, int], Any] = {}
        ended = dict.fromkeys(shared, 0)
        for index, result in run_jobs(_block, jobs, names):
            found[keys[index]] = result
            name = keys[index][0]
            ended[name] += len(result[0])
            if progress is not None:
                progress(name, ended[name], episodes)
    rows: list[dict[str, Any]] = []
    for name, start in keys:
        own, kept = found[name, start]
        rows += own
        if logs is not None and kept:
            logs.setdefault(name, []).extend(kept)
    return rows


def _block(plan: Plan, name: str, policy: Policy, start: int) -> Any:
    """A job: one block of episodes of one policy."""
    envs = plan.envs(policy)
    try:
        return plan.block(envs, name, policy, start)
    finally:
        envs.close()
