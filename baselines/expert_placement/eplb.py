"""Balancing of expert loads over GPUs by replicas (EPLB), for servers of different memory.

A replica takes an equal share of its expert's load. Unlike the published algorithm `eplb` and
`eplb_global` never put two replicas of an expert on one GPU, which frees slots for replicas that
help, and then swap, move and copy experts off the heaviest GPU. Arguments as in `feasibility`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servegym.baselines.expert_placement.feasibility import Bools, Floats, Ints, as_instance
from servegym.baselines.expert_placement.kernel import balancing


def layer_quotas(slots: ArrayLike, layers: int, experts: int) -> Ints:
    """Split each GPU's slots evenly over the layers: int64 (L, G), at most E each.

    Every layer has at least E slots in all, as sum_g min(slots_g, L E) >= L E.
    """
    room = np.minimum(np.asarray(slots, dtype=np.int64), layers * experts)
    quota = np.repeat((room // layers)[None], layers, axis=0)
    for g, left in enumerate(room % layers):
        # The odd slots go to the layers with the fewest, so that layers differ by one at most.
        quota[np.argsort(quota.sum(axis=1), kind="stable")[:left], g] += 1
    return quota


def eplb_global(counts: ArrayLike, slots: ArrayLike, gpu_server: ArrayLike) -> Bools:
    """Global EPLB over GPUs of different memory; it does not see the servers.

    Each GPU's slots are split evenly over the layers. Invariants: never two copies of an expert on
    one GPU; sees only the sum of the counts over servers.
    """
    f, room, _, _ = as_instance(counts, slots, gpu_server)
    quota = layer_quotas(room, *f.shape[1:])
    everywhere = np.zeros(f.shape[1:], dtype=np.int64)
    on = balancing.balance_layers(f.sum(axis=0), quota, np.zeros_like(room), everywhere)
    return np.ascontiguousarray(on.transpose(1, 0, 2))


def eplb(counts: ArrayLike, slots: ArrayLike, gpu_server: ArrayLike) -> Bools:
    """Hierarchical EPLB over servers of different memory.

    Layer by layer, every expert gets a home server: numbers in proportion to the servers' slots,
    loads in proportion to their GPUs (heaviest expert first). Replicas are made and packed inside
    the server; slots that a server cannot use so (it never has two replicas on one GPU) take the
    experts with the heaviest replicas of all servers.

    Invariants: never two copies of an expert on one GPU; sees only the sum of the counts over
    servers.
    """
    f, room, home, _ = as_instance(counts, slots, gpu_server)
    servers, layers, experts = f.shape
    loads = f.sum(axis=0)
    quota = layer_quotas(room, layers, experts)
    owner = np.stack([_share_out(loads[x], quota[x], home, servers) for x in range(layers)])
    on = balancing.balance_layers(loads, quota, home, owner)
    balancing.fill_layers(loads, quota, on)
    return np.ascontiguousarray(on.transpose(1, 0, 2))


def _share_out(load: Floats, quota: Ints, home: Ints, servers: int) -> NDArray[Any]:
    """Home server (E,) of each expert of a layer."""
    room = np.bincount(home, weights=quota, minlength=servers)
    gpus = np.bincount(home, minlength=servers)
    exact = load.size * room / room.sum()
    number = np.floor(exact).astype(np.int64)
    # Largest remainder; a server's number stays within its slots, as there are E or more.
    for n in np.argsort(number - exact, kind="stable")[: load.size - number.sum()]:
        number[n] += 1
    owner = np.zeros(load.size, dtype=np.int64)
    work = np.zeros(servers)
    for e in np.argsort(-load, kind="stable"):
        n = int(np.argmin(np.where(number > 0, work / gpus, np.inf)))
        owner[e] = n
        number[n] -= 1
        work[n] += load[e]
    return owner
