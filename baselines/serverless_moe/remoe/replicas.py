"""Replicas of the remote functions by their potential (Eq. 15)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.serverless_moe.lpt import assign, lpt_rows, replica_sums
from servegym.baselines.serverless_moe.remoe.bounds import predicted_bound, theorem4
from servegym.envs.serverless_moe.kernel.cost import (
    Phase,
    Start,
    bill,
    block_s,
    experts_s,
    layer_s,
    main_usd_s,
    remote_prefill,
    transfer_s,
)
from servegym.envs.serverless_moe.loads import Load
from servegym.envs.serverless_moe.outcomes import job_s, local_s
from servegym.envs.serverless_moe.system import SystemModel

Floats = NDArray[np.float64]

PAYLOAD_MARGIN = 1.25
"""10g is kept for this multiple of the expected payload where z_max allows, as the true routing
differs from the expected one."""


def choose_replicas(
    system: SystemModel,
    load: Load,
    remote: NDArray[np.bool_],
    main_mb: float,
    remote_mb: Floats,
    *,
    ttft_limit_s: float = np.inf,
    cold_s: float = 0.0,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Replicas by Eq. 15: first for 10g, then for the TTFT, then for the cost.

    1. The least z that holds the payloads. 2. While the worst-case TTFT is missed: among the layers
    whose increment lowers the prefill time, the greatest potential (fall of the cost) goes up.
    3. While a potential is positive: the best goes up. Nowhere above z_max.

    The result is int (L,), 0 for a layer without remote experts, and the replica of each expert int
    (L, K), -1 for a local one. ``cold_s`` is the cold start in the TTFT.
    """
    used = np.asarray(remote.any(axis=1))
    z_max = system.z_max
    safe = np.where(remote_mb > 0, remote_mb, 1024.0)
    jobs = np.where(remote, job_s(system, load, safe), 0.0)
    body = load.tokens * system.token_mb
    replica = lpt_rows(jobs, z_max)
    busy = replica_sums(replica, jobs)
    largest_mb = replica_sums(replica, np.where(remote, body, 0.0)).max(axis=2)

    fit = largest_mb * PAYLOAD_MARGIN <= system.payload_mb
    # Where no number holds the margin the smallest largest body is what can be done.
    fallback = np.argmin(largest_mb, axis=1)
    z = np.where(fit.any(axis=1), fit.argmax(axis=1), fallback) + 1

    local = local_s(system, load, remote, main_mb)[:, None]
    numbers = np.arange(1.0, z_max + 1)
    trem, mb = load.trem_s[:, None], remote_mb[:, None]
    slowest, prefill = remote_prefill(system, np.moveaxis(busy, -1, 0), trem, mb)
    prefill = prefill._replace(seconds=layer_s(system, local, slowest, load.n_in))
    rate = main_usd_s(system, load.n_in + load.n_out, main_mb)
    cost = bill(system, rate, 0.0, prefill, Phase(), Start()).cost_usd

    upper = predicted_bound(load.frequency, load.n_in, system.top_k)
    upper = np.where(remote, upper, 0.0).max(axis=1)
    largest = experts_s(*system.expert_law(safe), transfer_s(system), 1.0, upper)
    largest = np.where(upper > 0, largest, 0.0)
    total = jobs.sum(axis=1)
    worst_slowest = theorem4(largest[:, None], total[:, None], numbers, load.trem_worst_s[:, None])
    worst_slowest[~used] = 0.0
    worst = layer_s(system, local, worst_slowest, load.n_in)

    fixed = system.layers * block_s(system, load.n_in) + cold_s
    at = np.arange(len(used))

    def potential() -> Floats:
        gain = cost[at, z - 1] - cost[at, np.minimum(z, z_max - 1)]
        gain[~used | (z >= z_max)] = -np.inf
        return gain

    while fixed + worst[at, z - 1].sum() > ttft_limit_s:
        higher = np.minimum(z, z_max - 1)
        lowers = worst[at, higher] < worst[at, z - 1]
        gain = np.where(lowers, potential(), -np.inf)
        best = int(np.argmax(gain))
        if not np.isfinite(gain[best]):
            break
        z[best] += 1
    while True:
        gain = potential()
        best = int(np.argmax(gain))
        if not gain[best] > 0.0:
            break
        z[best] += 1

    assignment = np.full(remote.shape, -1, dtype=np.int64)
    for layer in np.flatnonzero(used):
        members = np.flatnonzero(remote[layer])
        assignment[layer, members], z[layer] = assign(
            jobs[layer, members], int(z[layer]), body[layer, members], system.payload_mb, z_max
        )
    return np.where(used, z, 0), assignment
