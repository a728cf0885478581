"""Balancing of expert loads over GPUs by replicas (EPLB), and placements made of it.

`eplb_slots` gives the published algorithm's balance, layer for layer. `balance_experts` never puts
two replicas of an expert on one GPU, which frees slots for replicas that help, and then swaps,
moves and copies experts off the heaviest GPU. `rebalance_experts` starts from a placement and makes
a bounded number of loads. `eplb` and `eplb_global` carry the idea over to servers of different
memory.

``loads`` (L, E) is the work of each expert; its replicas share it equally. Balancedness is the mean
over layers of mean GPU load / highest GPU load.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servegym.baselines.expert_placement.feasibility import Bools, Floats, Ints, check_instance
from servegym.baselines.expert_placement.kernel import balancing


def _check_loads(loads: ArrayLike) -> Floats:
    work = np.ascontiguousarray(loads, dtype=np.float64)
    if work.ndim != 2 or 0 in work.shape:
        raise ValueError(f"loads must have shape (layers, experts), got {work.shape}")
    if not np.isfinite(work).all() or (work < 0).any():
        raise ValueError("loads must be finite and not negative")
    return work


def _check_nodes(experts: int, gpus: int, groups: int, nodes: int) -> None:
    if gpus < 1 or nodes < 1 or groups < 1:
        raise ValueError(
            f"gpus, nodes and groups must be at least 1, got {gpus}, {nodes} and {groups}"
        )
    if gpus % nodes or groups % nodes or experts % groups:
        raise ValueError(
            f"nodes must divide gpus and groups, and groups must divide the experts; got "
            f"{nodes} nodes, {gpus} GPUs, {groups} groups, {experts} experts"
        )


def eplb_slots(loads: ArrayLike, gpus: int, slots: int, *, groups: int = 1, nodes: int = 1) -> Ints:
    """The published algorithm: hierarchical, or global with one group and one node.

    Groups of experts are packed onto nodes, the extra slots of a node go one by one to the expert
    with the heaviest replicas, and the replicas are packed onto the node's GPUs: heaviest first,
    each to the lightest place that is not full.

    Args:
        loads: (L, E).
        gpus: G.
        slots: S, of one layer on one GPU.
        groups: Groups of consecutive experts; a group stays on one node.
        nodes: Nodes of equally many GPUs.

    Returns:
        int64 (L, G, S), the expert of each slot. A GPU may hold one expert twice.

    Raises:
        ValueError: If the numbers do not divide or the slots do not suffice.
    """
    work = _check_loads(loads)
    _check_nodes(work.shape[1], gpus, groups, nodes)
    if gpus * slots < work.shape[1]:
        raise ValueError(
            f"slots={slots!r}: {gpus} GPUs hold {gpus * slots} of {work.shape[1]} experts"
        )
    out = np.zeros((work.shape[0], gpus, slots), dtype=np.int64)
    balancing.eplb_published(work, groups, nodes, out)
    return out


def slot_copies(slots: ArrayLike, experts: int) -> Ints:
    """Copies of each expert on each GPU.

    Args:
        slots: (L, G, S) expert numbers.
        experts: E.

    Returns:
        int64 (L, G, E).
    """
    table = np.asarray(slots, dtype=np.int64)
    return (table[..., None] == np.arange(experts)).sum(axis=2)


def balancedness(loads: ArrayLike, copies: ArrayLike) -> float:
    """Mean over layers of mean GPU load / highest GPU load, in (0, 1].

    Args:
        loads: (L, E).
        copies: (L, G, E) copies of an expert on a GPU, 0/1 or more.

    Returns:
        The mean; a layer without load counts as 1.

    Raises:
        ValueError: If an expert has no copy.
    """
    work, held = _check_loads(loads), np.asarray(copies, dtype=np.float64)
    total = held.sum(axis=1)
    if (total <= 0).any():
        raise ValueError(f"copies: {(total <= 0).sum()} experts have none")
    load = np.einsum("lge,le->lg", held, work / total)
    top = load.max(axis=1)
    ratio = np.divide(load.mean(axis=1), top, out=np.ones_like(top), where=top > 0)
    return float(ratio.mean())


def moved_slots(old: ArrayLike, new: ArrayLike) -> int:
    """Experts that a GPU must load to get from one placement to another.

    Args:
        old: (L, G, E) copies before.
        new: (L, G, E) copies after.

    Returns:
        Their number, a second copy on a GPU counted as one more.
    """
    return int(np.maximum(np.asarray(new, np.int64) - np.asarray(old, np.int64), 0).sum())


def _quotas(quota: ArrayLike, layers: int, experts: int) -> Ints:
    table = np.asarray(quota)
    if table.dtype.kind not in "iu" or (table < 0).any() or table.ndim not in (1, 2):
        raise ValueError("quota must be whole numbers, at least 0, of shape (G,) or (L, G)")
    try:
        wide = np.broadcast_to(table, (layers, table.shape[-1]))
    except ValueError:
        raise ValueError(f"quota must have shape (G,) or (L, G), got {table.shape}") from None
    return np.minimum(wide, experts).astype(np.int64)


def _homes(work: Floats, groups: int, nodes: int) -> Ints:
    """Node of each expert (L, E): groups packed as the published algorithm does."""
    layers, experts = work.shape
    group_load = work.reshape(layers, groups, -1).sum(axis=2)
    place = np.stack([balancing.pack(row, nodes) for row in group_load])
    return np.repeat(place, experts // groups, axis=1)


def balance_experts(
    loads: ArrayLike, quota: ArrayLike, *, groups: int = 1, nodes: int = 1
) -> Bools:
    """Balance the GPUs with at most one replica of an expert on each.

    Args:
        loads: (L, E).
        quota: Slots of a layer on each GPU, (G,) or (L, G); more than E are not used.
        groups: Groups of consecutive experts; a group stays on one node.
        nodes: Nodes of equally many consecutive GPUs, each with room for its experts.

    Returns:
        bool (L, G, E).

    Raises:
        ValueError: If the numbers do not divide or the slots do not suffice.
    """
    work = _check_loads(loads)
    layers, experts = work.shape
    limit = _quotas(quota, layers, experts)
    gpus = limit.shape[1]
    _check_nodes(experts, gpus, groups, nodes)
    room = limit.reshape(layers, nodes, -1).sum(axis=2)
    if (room < experts // nodes).any():
        raise ValueError(f"quota: a node has {room.min()} slots for {experts // nodes} experts")
    on = np.zeros((layers, gpus, experts), dtype=np.bool_)
    node = np.repeat(np.arange(nodes), gpus // nodes)
    unbounded = np.full((layers, nodes), -1, dtype=np.int64)
    balancing.balance_layers(work, limit, node, _homes(work, groups, nodes), unbounded, on)
    return on


def rebalance_experts(
    old: ArrayLike,
    loads: ArrayLike,
    quota: ArrayLike,
    *,
    max_moved_share: float = 0.1,
    nodes: int = 1,
) -> Bools:
    """Improve a placement for new loads with few loads of experts.

    Args:
        old: (L, G, E) bool placement, every expert on a GPU, none above its quota. With several
            nodes the GPUs of only one node hold an expert.
        loads: (L, E), the new ones.
        quota: Slots of a layer on each GPU, (G,) or (L, G).
        max_moved_share: Loads in a layer over its slots, at most.
        nodes: Nodes of equally many consecutive GPUs; experts stay on theirs.

    Returns:
        bool (L, G, E).

    Raises:
        ValueError: If ``old`` does not fit or misses an expert, or a number is out of range.
    """
    work = _check_loads(loads)
    layers, experts = work.shape
    limit = _quotas(quota, layers, experts)
    gpus = limit.shape[1]
    _check_nodes(experts, gpus, nodes, nodes)
    on = np.array(old, dtype=np.bool_)
    if on.shape != (layers, gpus, experts):
        raise ValueError(f"old must have shape {(layers, gpus, experts)}, got {on.shape}")
    if (on.sum(axis=2) > limit).any():
        raise ValueError("old: a GPU holds more experts of a layer than its quota")
    if not 0 <= max_moved_share <= 1:
        raise ValueError(f"max_moved_share must be between 0 and 1, got {max_moved_share!r}")
    per_node = on.reshape(layers, nodes, -1, experts).any(axis=2)
    if (per_node.sum(axis=1) != 1).any():
        raise ValueError("old: every expert must be on the GPUs of exactly one node")
    room = limit.reshape(layers, nodes, -1).sum(axis=2)
    budget = np.floor(max_moved_share * room + 1e-9).astype(np.int64)
    node = np.repeat(np.arange(nodes), gpus // nodes)
    balancing.balance_layers(work, limit, node, per_node.argmax(axis=1), budget, on)
    return on


def layer_quotas(slots: ArrayLike, layers: int, experts: int) -> Ints:
    """Split each GPU's slots evenly over the layers.

    Args:
        slots: (G,), with sum_g min(slots_g, L E) >= L E.
        layers: L.
        experts: E.

    Returns:
        int64 (L, G), at most E each; every layer has at least E slots in all.
    """
    room = np.minimum(np.asarray(slots, dtype=np.int64), layers * experts)
    quota = np.repeat((room // layers)[None], layers, axis=0)
    for g, left in enumerate(room % layers):
        # The odd slots go to the layers with the fewest, so that layers differ by one at most.
        quota[np.argsort(quota.sum(axis=1), kind="stable")[:left], g] += 1
    return quota


def eplb_global(counts: ArrayLike, slots: ArrayLike, gpu_server: ArrayLike) -> Bools:
    """Global EPLB over GPUs of different memory; it does not see the servers.

    Invariants: never two copies of an expert on one GPU; sees only the sum of the counts over
    servers.

    Args:
        counts: (N, L, E); only their sum over servers matters.
        slots: (G,), split evenly over the layers.
        gpu_server: (G,).

    Returns:
        z, bool (G, L, E); an expert may be on several GPUs of a server.

    Raises:
        ValueError: On a wrong shape or value, or too little memory.
    """
    f, room, _, _ = check_instance(counts, slots, gpu_server)
    on = balance_experts(f.sum(axis=0), layer_quotas(room, *f.shape[1:]))
    return np.ascontiguousarray(on.transpose(1, 0, 2))


def eplb(counts: ArrayLike, slots: ArrayLike, gpu_server: ArrayLike) -> Bools:
    """Hierarchical EPLB over servers of different memory.

    Layer by layer, every expert gets a home server: numbers in proportion to the servers' slots,
    loads in proportion to their GPUs (heaviest expert first). Replicas are made and packed inside
    the server; slots that a server cannot use so (it never has two replicas on one GPU) take the
    experts with the heaviest replicas of all servers.

    Invariants: never two copies of an expert on one GPU; sees only the sum of the counts over
    servers.

    Args:
        counts: (N, L, E); only their sum over servers matters.
        slots: (G,), split evenly over the layers.
        gpu_server: (G,).

    Returns:
        z, bool (G, L, E); an expert may be on several GPUs of a server.

    Raises:
        ValueError: On a wrong shape or value, or too little memory.
    """
    f, room, home, _ = check_instance(counts, slots, gpu_server)
    servers, layers, experts = f.shape
    loads = f.sum(axis=0)
    quota = layer_quotas(room, layers, experts)
    owner = np.stack([_share_out(loads[x], quota[x], home, servers) for x in range(layers)])
    on = np.zeros((layers, room.size, experts), dtype=np.bool_)
    unbounded = np.full((layers, servers), -1, dtype=np.int64)
    balancing.balance_layers(loads, quota, home, owner, unbounded, on)
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
