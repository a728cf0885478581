"""Placements as arrays: their shapes, and from servers to GPUs.

Shapes everywhere: N servers, G GPUs of all servers, L MoE layers, E routed experts a layer.
``counts`` (N, L, E) are token-to-expert assignments of the requests that arrived at a server,
``slots`` (G,) expert slots of a GPU, ``gpu_server`` (G,) its server, ``z`` (G, L, E) bool the
placement, ``resident`` (N, L, E) bool its server view. A *placement algorithm* takes ``counts``,
``slots`` and ``gpu_server``, which have room for every expert, and returns ``z``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servegym.envs.expert_placement import decode

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def as_instance(
    counts: ArrayLike, slots: ArrayLike, gpu_server: ArrayLike
) -> tuple[Floats, Ints, Ints, Ints]:
    """Counts as float64, slots and gpu_server as int64, and cap (N,) = slots of each server."""
    f = np.asarray(counts, dtype=np.float64)
    room, home = np.asarray(slots, dtype=np.int64), np.asarray(gpu_server, dtype=np.int64)
    return f, room, home, np.bincount(home, room, len(f)).astype(np.int64)


def assign_gpus(resident: Bools, counts: Floats, slots: Ints, gpu_server: Ints) -> Bools:
    """Spread each server's experts over its GPUs so that every layer's load is even.

    Layer by layer, experts by falling total count go to the GPU with free slots and the least
    load so far in that layer (ties: most free slots, then the lowest GPU). The result, bool
    (G, L, E), has at most one copy of an expert a server.
    """
    nothing = np.zeros((len(slots), *resident.shape[1:]), dtype=np.bool_)
    z = decode.assign_gpus(slots, gpu_server, resident, counts.sum(axis=0), nothing)
    return z.astype(np.bool_)


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
