"""How a request can be served: memory, replicas and their experts, and what 10d-10i ask of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from servegym.envs.serverless_moe.kernel.cost import planned_job_s
from servegym.envs.serverless_moe.records import Plan
from servegym.envs.serverless_moe.system import SystemModel


def smallest_specs(specs: np.ndarray, need_mb: np.ndarray) -> np.ndarray:
    """Smallest specification that holds each of ``need_mb``; the largest one if none does."""
    return specs[np.minimum(np.searchsorted(specs, need_mb), len(specs) - 1)]


def smallest_spec(specs: np.ndarray, need_mb: float) -> float:
    """:func:`smallest_specs` of one number."""
    return float(smallest_specs(specs, np.asarray(need_mb)))


def remote_memory_mb(system: SystemModel, counts: np.ndarray, remote: np.ndarray) -> np.ndarray:
    """Left side of 10e: MB ``(L,)`` that a remote function needs; ``counts`` (L, K) tokens."""
    weights = system.expert_mb * remote.sum(axis=1)
    return weights + system.token_mb * np.where(remote, counts, 0.0).sum(axis=1)


def main_memory_mb(system: SystemModel, remote: np.ndarray, n_out: float) -> float:
    """Left side of 10f: CPU memory in MB that the main function needs."""
    local = (system.expert_mb * (~remote).sum(axis=1)).sum()
    return float(local) + system.token_mb * n_out


def main_choices(
    system: SystemModel, members: np.ndarray, headroom_mb: ArrayLike, n_out: int
) -> np.ndarray:
    """W for numbers of remote experts a layer ``(S,)`` and MB above the least, ``(S, W)``."""
    local = (system.num_experts - members) * float(system.expert_mb.sum())
    least = smallest_specs(system.main_specs_mb, local + system.token_mb * n_out)
    return smallest_specs(system.main_specs_mb, least[:, None] + np.asarray(headroom_mb))


def replica_sums(plan: Plan, weights: np.ndarray) -> np.ndarray:
    """Sums of the remote experts' weights ``(L, K)`` on each replica: ``(L, z_max')``."""
    layers, width = len(plan.replicas), max(int(plan.replicas.max(initial=0)), 1)
    placed = plan.remote & (plan.assignment >= 0) & (plan.assignment < plan.replicas[:, None])
    place = np.arange(layers)[:, None] * width + np.where(placed, plan.assignment, 0)
    there = np.where(placed, weights, 0.0)
    return np.bincount(place.ravel(), there.ravel(), layers * width).reshape(layers, width)


def violated(system: SystemModel, counts: np.ndarray, n_out: float, plan: Plan) -> dict[str, bool]:
    """Which of 10d-10g and 10i the plan violates, by name.

    ``counts`` (L, K) are the prompt tokens of each expert, true or expected.
    """
    used = plan.remote.any(axis=1)
    need = remote_memory_mb(system, counts, plan.remote)
    body = replica_sums(plan, counts).max(axis=1) * system.token_mb
    z, y = plan.replicas[used], plan.remote_mb[used]
    placed = plan.assignment[plan.remote]
    limit = np.broadcast_to(plan.replicas[:, None], plan.remote.shape)[plan.remote]
    on_the_grids = plan.main_mb in system.main_specs_mb and bool(
        np.isin(y, system.remote_specs_mb).all()
    )
    return {
        "main_memory": main_memory_mb(system, plan.remote, n_out) > plan.main_mb,
        "remote_memory": bool((need[used] > y).any()),
        "payload": bool((body > system.payload_mb).any()),
        "replicas": bool(
            ((z < 1) | (z > system.z_max)).any() or ((placed < 0) | (placed >= limit)).any()
        ),
        "specification": not on_the_grids,
    }


def lpt(jobs: np.ndarray, replicas: int) -> np.ndarray:
    """Longest processing time first: replica of each job, int64 ``(J,)``.

    Jobs of equal length go in the order of their index, to the least loaded replica, ties to the
    lower number.
    """
    load = np.zeros(replicas)
    chosen = np.zeros(len(jobs), dtype=np.int64)
    for job in np.argsort(-jobs, kind="stable"):
        chosen[job] = int(np.argmin(load))
        load[chosen[job]] += jobs[job]
    return chosen


def make_plan(
    system: SystemModel,
    remote: np.ndarray,
    counts: np.ndarray,
    n_out: float,
    *,
    main_headroom_mb: float = 0.0,
    remote_headroom_mb: float | np.ndarray = 0.0,
    extra_replicas: int | np.ndarray = 0,
) -> Plan:
    """The smallest plan for these remote sets that meets 10d-10g and 10i, plus headroom.

    W is the smallest specification that 10f allows plus the headroom, rounded up to a
    specification; Y_l likewise by 10e. Experts go to replicas by LPT on the expected job times;
    z_l is the least number with which 10g holds, plus ``extra_replicas``. What no specification or
    no z_l <= z_max can meet takes the largest.

    ``counts`` (L, K) are the expected prompt tokens of each expert, ``n_out`` the most tokens that
    may be generated. Headrooms of the remote functions are numbers or ``(L,)``.
    """
    layers = system.moe_layers
    more_mb = np.broadcast_to(remote_headroom_mb, (layers,))
    more_z = np.broadcast_to(extra_replicas, (layers,))
    remote_mb, replicas = np.zeros(layers), np.zeros(layers, dtype=np.int64)
    assignment = np.full(remote.shape, -1, dtype=np.int64)
    need = remote_memory_mb(system, counts, remote)
    for layer in np.flatnonzero(remote.any(axis=1)):
        specs, members = system.remote_specs_mb, np.flatnonzero(remote[layer])
        least = smallest_spec(specs, need[layer])
        remote_mb[layer] = smallest_spec(specs, least + more_mb[layer])
        tokens = counts[layer, members]
        jobs = planned_job_s(system, *system.expert_law(remote_mb[layer]), tokens)
        z = 1
        while z < system.z_max:
            loads = np.bincount(lpt(jobs, z), weights=tokens, minlength=z)
            if loads.max() * system.token_mb <= system.payload_mb:
                break
            z += 1
        replicas[layer] = min(z + more_z[layer], system.z_max)
        assignment[layer, members] = lpt(jobs, int(replicas[layer]))
    least = smallest_spec(system.main_specs_mb, main_memory_mb(system, remote, n_out))
    main_mb = smallest_spec(system.main_specs_mb, least + main_headroom_mb)
    return Plan(remote, main_mb, remote_mb, replicas, assignment)


def mix_plan(system: SystemModel, n_out: float) -> Plan:
    """MIX: every expert local (b = 0) in the smallest main function that holds them."""
    shape = (system.moe_layers, system.num_experts)
    return make_plan(system, np.zeros(shape, bool), np.zeros(shape), n_out)
