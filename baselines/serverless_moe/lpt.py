"""Experts over replicas: longest processing time first (LPT), and the payload limit (10g)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from servegym import _jit
from servegym._jit import jit

Floats = NDArray[np.float64]


@jit
def _place(jobs, order, z, load, replica):
    """LPT of one row of jobs ``(K,)`` in falling ``order``; jobs of 0 stay where they are."""
    load[:z] = 0.0
    for i in range(order.shape[0]):
        k = order[i]
        if not jobs[k] > 0.0:
            break
        least = 0
        for j in range(1, z):
            if load[j] < load[least]:
                least = j
        load[least] += jobs[k]
        replica[k] = least


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
            _place(jobs[row], order, z + 1, load, replica[row, z])
    return replica


@jit
def _replica_loads(jobs, body, z_max):
    """`replica_loads` of rows (N, K): (N, Z, Z) and (N, Z)."""
    busy = np.zeros((jobs.shape[0], z_max, z_max))
    largest = np.zeros((jobs.shape[0], z_max))
    carried = np.empty(z_max)
    replica = np.zeros(jobs.shape[1], np.int64)
    for row in range(jobs.shape[0]):
        order = np.argsort(-jobs[row], kind="mergesort")
        for z in range(1, z_max + 1):
            _place(jobs[row], order, z, busy[row, z - 1], replica)
            carried[:z] = 0.0
            for k in range(jobs.shape[1]):
                if jobs[row, k] > 0.0:
                    carried[replica[k]] += body[row, k]
            for j in range(z):
                largest[row, z - 1] = max(largest[row, z - 1], carried[j])
    return busy, largest


@jit
def _largest_replica_sums(replica, weight):
    """`largest_replica_sums` of rows (N, Z, K) of replicas and (N, K) of weights: (N, Z)."""
    rows, z_max, width = replica.shape
    largest = np.zeros((rows, z_max))
    total = np.empty(z_max)
    for row in range(rows):
        for z in range(z_max):
            total[: z + 1] = 0.0
            for k in range(width):
                total[replica[row, z, k]] += weight[row, k]
            for j in range(z + 1):
                largest[row, z] = max(largest[row, z], total[j])
    return largest


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


def replica_loads(jobs_s: Floats, body_mb: Floats, z_max: int) -> tuple[Floats, Floats]:
    """LPT of many rows of jobs at once, for each number of replicas up to z_max.

    Jobs (..., K) are 0 for what is no job; the bodies are broadcast against them.

    Returns:
        By z - 1: busy seconds of each replica (..., Z, Z), without overhead; and the largest
        one-way body (..., Z).
    """
    width = jobs_s.shape[-1]
    jobs = np.ascontiguousarray(jobs_s, np.float64).reshape(-1, width)
    body = np.array(np.broadcast_to(body_mb, jobs_s.shape), np.float64, order="C")  # writable
    busy, largest = _replica_loads(jobs, body.reshape(-1, width), z_max)
    shape = jobs_s.shape[:-1]
    return busy.reshape(*shape, z_max, z_max), largest.reshape(*shape, z_max)


def largest_replica_sums(replica: NDArray[np.int8], weight: Floats) -> Floats:
    """Largest sum of weights (S, L, K) on a replica (S, L, Z, K), (S, L, Z) for 1..Z of them."""
    shape = replica.shape
    rows = np.ascontiguousarray(weight, np.float64).reshape(-1, shape[-1])
    largest = _largest_replica_sums(np.ascontiguousarray(replica).reshape(-1, *shape[2:]), rows)
    return largest.reshape(shape[:3])


def compile_kernels() -> None:
    """Compile the functions of this module, or load them from the cache on disk."""
    rows, replica = np.zeros((1, 1)), np.zeros((1, 1, 1), dtype=np.int8)
    _jit.compile_kernels(
        "serverless MoE policies",
        [
            (lpt_rows, (rows, 1)),
            (_replica_loads, (rows, rows, 1)),
            (_largest_replica_sums, (replica, rows)),
        ],
    )
