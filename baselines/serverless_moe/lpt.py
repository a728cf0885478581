"""Remote experts over replicas: longest processing time first, then the payload limit (10g)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servegym.baselines.serverless_moe import kernel


@dataclass(frozen=True, eq=False)
class Assignment:
    """Jobs on replicas.

    Attributes:
        replica: int (K,) replica of each job.
        replicas: z, at least what was asked for.
        load_s: (z,) seconds of each replica, without the common invocation overhead.
        payload_mb: (z,) MB sent to each replica.
        fits: True if every replica is within the payload limit.
    """

    replica: NDArray[np.int64]
    replicas: int
    load_s: NDArray[np.float64]
    payload_mb: NDArray[np.float64]
    fits: bool

    @property
    def makespan_s(self) -> float:
        """Seconds of the slowest replica."""
        return float(self.load_s.max(initial=0.0))


def lpt(jobs_s: ArrayLike, replicas: int) -> NDArray[np.int64]:
    """Longest processing time first: jobs by falling time, each to the least loaded replica.

    The makespan is at most ``4/3 - 1/(3 z)`` times the optimum. Ties go to the lower index.

    Args:
        jobs_s: (K,) times, not negative.
        replicas: z >= 1.

    Returns:
        int (K,).
    """
    jobs = np.ascontiguousarray(jobs_s, dtype=np.float64)
    if replicas < 1:
        raise ValueError(f"replicas must be at least 1, got {replicas}")
    if jobs.ndim != 1 or (jobs < 0).any():
        raise ValueError("jobs_s must be a row of times that are not negative")
    return kernel.lpt(jobs, replicas)


def least_replicas(payload_mb: ArrayLike, limit_mb: float) -> int:
    """No fewer replicas can carry these payloads: ``ceil(total / limit)``, at least 1."""
    total = float(np.asarray(payload_mb, dtype=np.float64).sum())
    return max(1, int(np.ceil(total / limit_mb - 1e-9)))


def assign(
    jobs_s: ArrayLike,
    replicas: int,
    payload_mb: ArrayLike | None = None,
    limit_mb: float = np.inf,
    max_replicas: int | None = None,
) -> Assignment:
    """LPT, then moves and, if these do not help, more replicas until 10g holds.

    Args:
        jobs_s: (K,) seconds of each job.
        replicas: z to begin with.
        payload_mb: (K,) MB of each job; None for no limit.
        limit_mb: U_payload.
        max_replicas: z_max; the result has ``fits=False`` if even so many do not do. Default z.
    """
    jobs = np.asarray(jobs_s, dtype=np.float64)
    size = np.zeros_like(jobs) if payload_mb is None else np.asarray(payload_mb, np.float64)
    if size.shape != jobs.shape:
        raise ValueError(f"payload_mb must have shape {jobs.shape}, got {size.shape}")
    most = replicas if max_replicas is None else max(int(max_replicas), replicas)
    z = min(max(replicas, least_replicas(size, limit_mb)), most)
    while True:
        replica = lpt(jobs, z)
        fits = _repair(replica, jobs, size, z, limit_mb)
        if fits or z >= most:
            break
        z += 1
    load = np.bincount(replica, weights=jobs, minlength=z).astype(np.float64)
    payload = np.bincount(replica, weights=size, minlength=z).astype(np.float64)
    return Assignment(replica, z, load, payload, fits)


def _repair(
    replica: NDArray[np.int64],
    jobs: NDArray[np.float64],
    size: NDArray[np.float64],
    z: int,
    limit: float,
) -> bool:
    """Move jobs from replicas above the limit to the least loaded that has room; in place."""
    if not np.isfinite(limit):
        return True
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
