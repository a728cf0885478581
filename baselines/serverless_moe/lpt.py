"""Experts over replicas: longest processing time first (LPT), and the payload limit (10g)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym import _jit
from servegym._jit import jit

Floats = NDArray[np.float64]


@jit
def lpt_rows(jobs, z_max):
    """LPT of rows of jobs ``(N, K)`` on 1..z_max replicas: int8 ``(N, z_max, K)``.

    Ties go to the lower index; jobs of 0 are put on replica 0.
    """
    replica = np.zeros((jobs.shape[0], z_max, jobs.shape[1]), np.int8)
    load = np.empty(z_max)
    for row in range(jobs.shape[0]):
        order = np.argsort(-jobs[row], kind="mergesort")
        for z in range(z_max):
            load[: z + 1] = 0.0
            for k in order:
                if not jobs[row, k] > 0.0:
                    break
                least = 0
                for j in range(1, z + 1):
                    if load[j] < load[least]:
                        least = j
                load[least] += jobs[row, k]
                replica[row, z, k] = least
    return replica


def replica_sums(replica: NDArray[np.int8], weight: Floats) -> Floats:
    """Sums of weights (..., K) on each replica, (..., Z, Z) for the replicas (..., Z, K).

    Row z - 1 is of z replicas; those beyond have 0.
    """
    z_max = replica.shape[-2]
    place = np.arange(replica[..., 0].size).reshape(*replica.shape[:-1], 1) * z_max + replica
    weights = np.broadcast_to(weight[..., None, :], replica.shape)
    sums: Any = np.bincount(place.ravel(), weights.ravel(), replica[..., 0].size * z_max)
    return sums.reshape(*replica.shape[:-1], z_max)


def assign(
    jobs_s: Floats, replicas: int, payload_mb: Floats, limit_mb: float, max_replicas: int
) -> tuple[NDArray[np.int64], int]:
    """LPT, then moves and, if these do not help, more replicas until 10g holds.

    Jobs (K,) of seconds and MB begin on ``replicas``; ``max_replicas`` are taken if even so many
    do not do.

    Returns:
        int (K,) replica of each job, and how many there are.
    """
    # No fewer can carry the payloads.
    least = int(np.ceil(payload_mb.sum() / limit_mb - 1e-9))
    z = min(max(replicas, least), max_replicas)
    while True:
        replica = lpt_rows(jobs_s[None], z)[0, -1].astype(np.int64)
        if _repair(replica, jobs_s, payload_mb, z, limit_mb) or z >= max_replicas:
            return replica, z
        z += 1


def _repair(replica: NDArray[np.int64], jobs: Floats, size: Floats, z: int, limit: float) -> bool:
    """Move jobs from replicas above the limit to the least loaded that has room; in place."""
    slack = limit * (1.0 + 1e-12)
    payload = np.bincount(replica, weights=size, minlength=z).astype(np.float64)
    if (payload <= slack).all():
        return True
    load = np.bincount(replica, weights=jobs, minlength=z).astype(np.float64)
    for full in np.flatnonzero(payload > slack):
        # Small jobs first would need more moves; large ones seldom find room. Falling size.
        members = np.flatnonzero(replica == full)
        for job in members[np.argsort(-size[members], kind="stable")]:
            if payload[full] <= slack:
                break
            room = np.flatnonzero(payload + size[job] <= slack)
            room = room[room != full]
            if room.size:
                to = room[np.argmin(load[room])]
                replica[job] = to
                for total, amount in ((payload, size[job]), (load, jobs[job])):
                    total[full] -= amount
                    total[to] += amount
    return bool((payload <= slack).all())


def compile_kernels() -> None:
    """Compile `lpt_rows`, or load it from the cache on disk."""
    _jit.compile_kernels("serverless MoE policies", [(lpt_rows, (np.zeros((1, 1)), 1))])
