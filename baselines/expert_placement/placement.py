"""Placements as arrays: memory, coverage, the proxy of Eq. 2, migration (Eq. 3, Eq. 4).

The equations are those of the Prism paper in the readings of this project: slots are counted per
GPU and then added, the frequencies are *counts* (never normalised per server), an expert on another
GPU of the same server is local, and freeing memory costs nothing.

Shapes everywhere: N servers, G GPUs of all servers, L MoE layers, E routed experts a layer.
``counts`` (N, L, E) are token-to-expert assignments of the requests that arrived at a server,
``slots`` (G,) expert slots of a GPU, ``gpu_server`` (G,) its server, ``z`` (G, L, E) bool the
placement, ``held`` (N, L, E) bool its server view.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def check_instance(
    counts: ArrayLike, slots: ArrayLike, gpu_server: ArrayLike, expert_bytes: int | None = None
) -> tuple[Floats, Ints, Ints, Ints]:
    """Check the inputs of a placement algorithm and that all experts fit somewhere.

    Args:
        counts: (N, L, E), finite and not negative.
        slots: (G,) expert slots of each GPU, not negative.
        gpu_server: (G,) server of each GPU, 0..N-1; every server has at least one.
        expert_bytes: Size of one expert, for the message only.

    Returns:
        counts as float64, slots and gpu_server as int64, and cap (N,) = slots of each server.

    Raises:
        ValueError: If a shape or a value is wrong or sum_n min(cap_n, L E) < L E.
    """
    f = np.asarray(counts, dtype=np.float64)
    if f.ndim != 3 or 0 in f.shape:
        raise ValueError(f"counts must have shape (servers, layers, experts), got {f.shape}")
    if not np.isfinite(f).all() or (f < 0).any():
        raise ValueError("counts must be finite and not negative")
    room = np.asarray(slots)
    home = np.asarray(gpu_server)
    if room.ndim != 1 or room.shape != home.shape or not room.size:
        raise ValueError(
            f"slots and gpu_server must have one entry a GPU, got shapes {room.shape} and "
            f"{home.shape}"
        )
    if room.dtype.kind not in "iu" or (room < 0).any():
        raise ValueError(f"slots must be whole numbers, at least 0, got {room.tolist()}")
    if home.dtype.kind not in "iu" or set(home.tolist()) != set(range(f.shape[0])):
        raise ValueError(
            f"gpu_server must name every server 0..{f.shape[0] - 1}, got {home.tolist()}"
        )
    room, home = room.astype(np.int64), home.astype(np.int64)
    cap = np.bincount(home, weights=room, minlength=f.shape[0]).astype(np.int64)
    check_memory(cap, f.shape[1] * f.shape[2], expert_bytes)
    return f, room, home, cap


def check_memory(cap: ArrayLike, experts: int, expert_bytes: int | None = None) -> None:
    """Check that the servers can hold every expert once.

    Args:
        cap: (N,) slots of each server.
        experts: L E.
        expert_bytes: Size of one expert, for the message.

    Raises:
        ValueError: If sum_n min(cap_n, L E) < L E; names what is missing.
    """
    missing = experts - int(np.minimum(cap, experts).sum())
    if missing > 0:
        size = "" if expert_bytes is None else f" ({missing * int(expert_bytes):,} bytes)"
        raise ValueError(
            f"slots: the servers hold {experts - missing} of {experts} experts; "
            f"{missing} slots{size} are missing"
        )


def server_view(z: ArrayLike, gpu_server: ArrayLike, servers: int | None = None) -> Bools:
    """Which experts a server holds on any of its GPUs.

    Args:
        z: (G, L, E).
        gpu_server: (G,).
        servers: N; default the largest server + 1.

    Returns:
        bool (N, L, E).
    """
    plan = np.asarray(z).astype(np.bool_)
    home = np.asarray(gpu_server, dtype=np.int64)
    held = np.zeros((int(home.max()) + 1 if servers is None else servers, *plan.shape[1:]), bool)
    for g, n in enumerate(home):
        held[n] |= plan[g]
    return held


def check_placement(z: ArrayLike, slots: ArrayLike) -> Bools:
    """Check a placement's memory and coverage.

    Args:
        z: (G, L, E).
        slots: (G,).

    Returns:
        z as bool.

    Raises:
        ValueError: If a GPU holds more experts than it has slots or an expert is nowhere.
    """
    plan = np.asarray(z).astype(np.bool_)
    room = np.asarray(slots)
    if plan.ndim != 3 or plan.shape[0] != room.size:
        raise ValueError(f"z must have shape ({room.size}, layers, experts), got {plan.shape}")
    used = plan.sum(axis=(1, 2))
    if (used > room).any():
        g = int(np.argmax(used - room))
        raise ValueError(f"z: GPU {g} holds {used[g]} experts in {room[g]} slots")
    nowhere = ~plan.any(axis=0)
    if nowhere.any():
        layer, expert = np.argwhere(nowhere)[0]
        raise ValueError(
            f"z: {nowhere.sum()} experts are on no GPU, first expert {expert} of layer {layer}"
        )
    return plan


def assign_gpus(
    held: ArrayLike, counts: ArrayLike, slots: ArrayLike, gpu_server: ArrayLike
) -> Bools:
    """Spread each server's experts over its GPUs so that every layer's load is even.

    Layer by layer, experts by falling total count go to the GPU with free slots and the least
    load so far in that layer (ties: most free slots, then the lowest GPU).

    Args:
        held: (N, L, E) bool; at most cap_n experts a server.
        counts: (N, L, E).
        slots: (G,).
        gpu_server: (G,).

    Returns:
        bool (G, L, E) with at most one copy of an expert a server.

    Raises:
        ValueError: If a server holds more experts than its GPUs have slots.
    """
    view = np.asarray(held).astype(np.bool_)
    room = np.asarray(slots, dtype=np.int64)
    home = np.asarray(gpu_server, dtype=np.int64)
    total = np.asarray(counts, dtype=np.float64).sum(axis=0)
    rank = np.argsort(-total, axis=1, kind="stable")
    z = np.zeros((room.size, *view.shape[1:]), dtype=np.bool_)
    for n in range(view.shape[0]):
        gpus = np.flatnonzero(home == n)
        if view[n].sum() > room[gpus].sum():
            raise ValueError(
                f"held: server {n} holds {view[n].sum()} experts in {room[gpus].sum()} slots"
            )
        if gpus.size == 1:
            z[gpus[0]] = view[n]
            continue
        free = room[gpus].tolist()
        for layer in range(view.shape[1]):
            load = [0.0] * gpus.size
            for e in rank[layer]:
                if not view[n, layer, e]:
                    continue
                best = min(
                    (g for g in range(gpus.size) if free[g]), key=lambda g: (load[g], -free[g], g)
                )
                z[gpus[best], layer, e] = True
                load[best] += total[layer, e]
                free[best] -= 1
    return z


def proxy(counts: ArrayLike, held: ArrayLike) -> float:
    """Eq. 2: token-to-expert assignments whose expert is not on the server they arrived at.

    Args:
        counts: (N, L, E).
        held: (N, L, E) bool.

    Returns:
        Their number.
    """
    return float(np.sum(counts, where=~np.asarray(held).astype(np.bool_), dtype=np.float64))


def remote_share(counts: ArrayLike, held: ArrayLike) -> float:
    """Eq. 2 over all assignments, in [0, 1] (in tokens; 0 without counts)."""
    total = float(np.sum(counts, dtype=np.float64))
    return proxy(counts, held) / total if total > 0 else 0.0


def local_utility(counts: ArrayLike, held: ArrayLike) -> Floats:
    """U_n(A_n) of Theorem 1 over the mass of the server's top |A_n| experts.

    The denominator ignores layer budgets and coverage, so no constant bounds the ratio from below.

    Args:
        counts: (N, L, E).
        held: (N, L, E) bool.

    Returns:
        (N,) ratios in [0, 1]; 1 for a server without counts.
    """
    f = np.asarray(counts, dtype=np.float64)
    view = np.asarray(held).astype(np.bool_)
    ratios = np.ones(f.shape[0])
    for n in range(f.shape[0]):
        best = np.sort(f[n].ravel())[::-1][: view[n].sum()].sum()
        if best > 0:
            ratios[n] = f[n][view[n]].sum() / best
    return ratios


def migration_time(
    old: ArrayLike,
    new: ArrayLike,
    expert_bytes: float,
    bytes_per_s: ArrayLike,
    *,
    count_removals: bool = False,
) -> float:
    """Eq. 3: seconds of loading, added over all GPUs.

    Args:
        old: (G, L, E) placement before.
        new: (G, L, E) placement after.
        expert_bytes: Bytes of one expert.
        bytes_per_s: Loading speed, one number or (G,).
        count_removals: Also count experts that go, as the equation is printed.

    Returns:
        Seconds.
    """
    before, after = np.asarray(old).astype(np.bool_), np.asarray(new).astype(np.bool_)
    changed = before ^ after if count_removals else after & ~before
    per_gpu = changed.sum(axis=(1, 2)) * float(expert_bytes)
    return float((per_gpu / np.asarray(bytes_per_s, dtype=np.float64)).sum())


def expected_cost(
    counts: ArrayLike, held: ArrayLike, extra_s: ArrayLike, horizon_s: float, window_s: float
) -> float:
    """C(P) of Eq. 4: seconds that remote calls will cost over the decision horizon.

    C = horizon / window * sum_n extra_n * (remote assignments of server n).

    Args:
        counts: (N, L, E) assignments of the window.
        held: (N, L, E) bool.
        extra_s: (N,) mean seconds per assignment of a remote call less those of a local one.
        horizon_s: Time the plan is for.
        window_s: Time the counts were taken over.

    Returns:
        Seconds; 0 if nothing was seen.

    Raises:
        ValueError: If a time is not positive.
    """
    if horizon_s <= 0 or window_s <= 0:
        raise ValueError(
            f"horizon_s and window_s must be above 0, got {horizon_s!r} and {window_s!r}"
        )
    remote = np.sum(counts, where=~np.asarray(held).astype(np.bool_), axis=(1, 2), dtype=np.float64)
    return float(horizon_s / window_s * (np.asarray(extra_s, dtype=np.float64) * remote).sum())


def adopts(cost_new: float, migration_s: float, cost_old: float) -> bool:
    """Eq. 4: whether the new plan pays for its migration, C(P') + T_mig < C(P)."""
    return cost_new + migration_s < cost_old


def fill_slots(held: Any, counts: Floats, cap: Ints) -> Bools:
    """Use up free slots: each server takes its most frequent experts not yet held.

    Args:
        held: (N, L, E) bool, at most cap_n a server.
        counts: (N, L, E).
        cap: (N,).

    Returns:
        bool (N, L, E), a superset of ``held``.
    """
    view = np.array(held, dtype=np.bool_)
    for n in range(view.shape[0]):
        flat = view[n].reshape(-1)
        free = min(int(cap[n]), flat.size) - int(flat.sum())
        if free > 0:
            missing = np.flatnonzero(~flat)
            order = np.argsort(-counts[n].reshape(-1)[missing], kind="stable")
            flat[missing[order[:free]]] = True
    return view
