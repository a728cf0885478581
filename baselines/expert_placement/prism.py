"""Prism: Algorithm 1 (how many experts of a layer) and Algorithm 2 (which), corrected.

Corrections to the print: the layer counts are clamped at E; what floor and clamp leave over is
spent; only layers above E give experts away; a server without duplicates is passed over.
`prism_printed` leaves slots unused as the print does, for comparison. Theorem 1 does not bound
Algorithm 2, which has to keep layer counts and coverage, as the theorem's optimum does not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from servegym.baselines.expert_placement.feasibility import (
    Bools,
    Floats,
    Ints,
    as_instance,
    assign_gpus,
)
from servegym.envs.expert_placement.decode import layer_sizes


def activation_entropy(counts: Floats) -> Floats:
    """Entropy v (N, L) of Algorithm 1: the Shannon entropy in bits of each server's layers.

    It is log2 E for a layer without counts, 1 everywhere for a server with no entropy at all.
    """
    total = counts.sum(axis=2, keepdims=True)
    p = np.divide(counts, total, out=np.full_like(counts, 1.0 / counts.shape[2]), where=total > 0)
    v = -(p * np.log2(p, out=np.zeros_like(p), where=p > 0)).sum(axis=2)
    v = np.maximum(v, 0.0)
    v[v.sum(axis=1) <= 0] = 1.0
    return v


def assign_experts(c: Ints, counts: Floats) -> Bools:
    """Algorithm 2: each server's most frequent experts, then every expert somewhere.

    Returns bool (N, L, E) with c[n, l] experts in (n, l); a layer's sum of c (N, L) is E or more.
    """
    servers, layers, experts = counts.shape
    rank = np.argsort(np.argsort(-counts, axis=2, kind="stable"), axis=2, kind="stable")
    resident = rank < c[:, :, None]
    for layer in range(layers):
        view, f = resident[:, layer], counts[:, layer]
        copies = view.sum(axis=0)
        while (copies == 0).any():
            placed = False
            duplicates = (view & (copies > 1)).sum(axis=1)
            for n in np.argsort(duplicates, kind="stable"):
                spare = view[n] & (copies > 1)
                if not spare.any():
                    continue
                missing = copies == 0
                if not missing.any():
                    break
                e = int(np.argmax(np.where(missing, f[n], -1.0)))
                x = int(np.argmin(np.where(spare, f[n], np.inf)))
                view[n, x], view[n, e] = False, True
                copies[x] -= 1
                copies[e] += 1
                placed = True
            if not placed:
                raise RuntimeError("Algorithm 2 found no duplicate although places suffice")
    return resident


def prism(
    counts: ArrayLike, slots: ArrayLike, gpu_server: ArrayLike, *, fill: bool = True
) -> Bools:
    """Prism's placement, Algorithms 1 and 2 corrected.

    Invariants: every expert somewhere; every GPU within its slots; every server's slots used up
    (without ``fill`` at most L of each server are not), one copy of an expert a server. Apart from
    the GPUs of a server, nothing changes if all counts are multiplied by one number.

    Raises:
        ValueError: Without ``fill`` the slots cannot cover every expert.
    """
    f, room, home, cap = as_instance(counts, slots, gpu_server)
    sizes = layer_sizes(activation_entropy(f), cap, f.shape[2], fill=fill)
    return assign_gpus(assign_experts(sizes, f), f, room, home)


def prism_printed(counts: ArrayLike, slots: ArrayLike, gpu_server: ArrayLike) -> Bools | None:
    """Prism without spending the slots that rounding down leaves over.

    None where the others cannot cover every expert, as often with Mixtral's tight memory.
    """
    try:
        return prism(counts, slots, gpu_server, fill=False)
    except ValueError:
        return None
