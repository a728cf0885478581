"""Placements as arrays: checks of memory and coverage, from servers to GPUs.

Shapes everywhere: N servers, G GPUs of all servers, L MoE layers, E routed experts a layer.
``counts`` (N, L, E) are token-to-expert assignments of the requests that arrived at a server,
``slots`` (G,) expert slots of a GPU, ``gpu_server`` (G,) its server, ``z`` (G, L, E) bool the
placement, ``resident`` (N, L, E) bool its server view. A *placement algorithm* takes ``counts``,
``slots`` and ``gpu_server``, returns ``z``, and raises what `check_instance` raises.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servegym.envs.expert_placement import decode

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def check_instance(
    counts: ArrayLike, slots: ArrayLike, gpu_server: ArrayLike
) -> tuple[Floats, Ints, Ints, Ints]:
    """Check the inputs of a placement algorithm and that all experts fit somewhere.

    Returns:
        counts as float64, slots and gpu_server as int64, and cap (N,) = slots of each server.

    Raises:
        ValueError: If a shape or a value is wrong, a server has no GPU, or
            sum_n min(cap_n, L E) < L E.
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
    experts = f.shape[1] * f.shape[2]
    missing = experts - int(np.minimum(cap, experts).sum())
    if missing > 0:
        raise ValueError(
            f"slots: the servers hold {experts - missing} of {experts} experts; {missing} slots "
            "are missing"
        )
    return f, room, home, cap


def assign_gpus(
    resident: ArrayLike, counts: ArrayLike, slots: ArrayLike, gpu_server: ArrayLike
) -> Bools:
    """Spread each server's experts over its GPUs so that every layer's load is even.

    Layer by layer, experts by falling total count go to the GPU with free slots and the least
    load so far in that layer (ties: most free slots, then the lowest GPU).

    Returns:
        bool (G, L, E) with at most one copy of an expert a server.

    Raises:
        ValueError: If a server holds more experts than its GPUs have slots.
    """
    view = np.asarray(resident).astype(np.bool_)
    room, home = np.asarray(slots, dtype=np.int64), np.asarray(gpu_server, dtype=np.int64)
    total = np.asarray(counts, dtype=np.float64).sum(axis=0)
    for n, has in enumerate(view.sum(axis=(1, 2))):
        if has > (most := room[home == n].sum()):
            raise ValueError(f"resident: server {n} holds {has} experts in {most} slots")
    nothing = np.zeros((room.size, *view.shape[1:]), dtype=np.bool_)
    return decode.assign_gpus(room, home, view, total, nothing).astype(np.bool_)


def reassign_gpus(
    resident: ArrayLike, old: ArrayLike, counts: ArrayLike, slots: ArrayLike, gpu_server: ArrayLike
) -> Bools:
    """Place a server view on GPUs with the fewest loads: what stays on a server stays put.

    ``old`` is the z in use; the result, bool (G, L, E), has one copy of an expert a server.
    """
    view, before = np.asarray(resident).astype(np.bool_), np.asarray(old).astype(np.bool_)
    home = np.asarray(gpu_server, dtype=np.int64)
    total = np.asarray(counts, dtype=np.float64).sum(axis=0)
    z = np.zeros(before.shape, dtype=np.bool_)
    for n in range(view.shape[0]):
        gpus = np.flatnonzero(home == n)
        placed = np.zeros(view.shape[1:], dtype=np.bool_)
        for g in gpus:
            z[g] = before[g] & view[n] & ~placed
            placed |= z[g]
        free = np.asarray(slots, dtype=np.int64)[gpus] - z[gpus].sum(axis=(1, 2))
        load = (z[gpus] * total).sum(axis=2)
        for layer, e in np.argwhere(view[n] & ~placed):
            at = int(np.argmin(np.where(free > 0, load[:, layer], np.inf)))
            z[gpus[at], layer, e] = True
            free[at] -= 1
            load[at, layer] += total[layer, e]
    return z


def fill_slots(resident: Any, counts: Floats, cap: Ints) -> Bools:
    """Use up free slots: each server takes its most frequent experts not yet there.

    The result is a superset of ``resident`` (N, L, E), which has at most cap_n experts a server.
    """
    view = np.array(resident, dtype=np.bool_)
    for n in range(view.shape[0]):
        flat = view[n].reshape(-1)
        free = min(int(cap[n]), flat.size) - int(flat.sum())
        if free > 0:
            missing = np.flatnonzero(~flat)
            order = np.argsort(-counts[n].reshape(-1)[missing], kind="stable")
            flat[missing[order[:free]]] = True
    return view
