"""Prism: Algorithm 1 (how many experts of a layer) and Algorithm 2 (which), corrected.

Corrections to the print: the layer counts are clamped at E; what floor and clamp leave over is
spent; only layers above E give experts away; a server without duplicates is passed over.
`prism_printed` leaves slots unused as the print does, for comparison.

Theorem 1 does not bound Algorithm 2: the algorithm has to keep layer counts and coverage, which the
theorem's optimum does not. Arguments, results and errors are those of `feasibility`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from servegym.baselines.expert_placement.feasibility import (
    Bools,
    Floats,
    Ints,
    assign_gpus,
    check_instance,
)


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


def layer_counts(counts: Floats, cap: Ints, *, fill: bool = True) -> Ints:
    """Algorithm 1: experts (N, L) of each layer on each server, 0 to E each.

    Each layer's sum is at least E, for ``cap`` (N,) slots that hold all experts. With ``fill`` what
    floor and clamp leave over is spent, so that each server's sum is min(cap_n, L E); the printed
    algorithm does not.

    Raises:
        ValueError: If the slots left by ``fill=False`` cannot cover every expert.
    """
    servers, layers, experts = counts.shape
    v = activation_entropy(counts)
    q = cap[:, None] * v / v.sum(axis=1, keepdims=True)
    c = np.minimum(experts, np.floor(q)).astype(np.int64)
    # Rounding of q may push a floor above the server's memory by one.
    while (over := np.flatnonzero(c.sum(axis=1) > cap)).size:
        c[over[0], np.argmax(c[over[0]] - q[over[0]])] -= 1
    if fill:
        for n in range(servers):
            for _ in range(min(int(cap[n]), layers * experts) - int(c[n].sum())):
                wish = np.where(c[n] < experts, q[n] - c[n], -np.inf)
                c[n, np.argmax(wish)] += 1
    total = c.sum(axis=0)
    if total.sum() < layers * experts:
        raise ValueError(
            f"counts: rounding down leaves {total.sum()} slots for {layers * experts} experts, so "
            "the printed Algorithm 1 cannot cover them"
        )
    order = np.argsort(-cap, kind="stable")
    for layer in range(layers):
        while total[layer] < experts:
            moved = False
            for n in order:
                if total[layer] == experts:
                    break
                donors = (total > experts) & (c[n] > 0)
                if c[n, layer] == experts or not donors.any():
                    continue
                donor = int(np.argmax(np.where(donors, total, -1)))
                c[n, donor] -= 1
                c[n, layer] += 1
                total[donor] -= 1
                total[layer] += 1
                moved = True
            if not moved:
                raise RuntimeError("Algorithm 1 found no donor although slots suffice")
    return c


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


def prism(counts: ArrayLike, slots: ArrayLike, gpu_server: ArrayLike) -> Bools:
    """Prism's placement, Algorithms 1 and 2 corrected.

    Invariants: every expert somewhere; every GPU within its slots; every server's slots used up,
    one copy of an expert a server. Apart from the GPUs of a server, nothing changes if all counts
    are multiplied by one number.
    """
    f, room, home, cap = check_instance(counts, slots, gpu_server)
    return assign_gpus(assign_experts(layer_counts(f, cap), f), f, room, home)


def prism_printed(counts: ArrayLike, slots: ArrayLike, gpu_server: ArrayLike) -> Bools:
    """Prism without spending the slots that rounding down leaves over.

    Invariants: those of `prism` but for unused slots, at most L of each server.

    Raises:
        ValueError: Also when the remaining slots cannot cover every expert (with Mixtral's tight
            memory they often cannot).
    """
    f, room, home, cap = check_instance(counts, slots, gpu_server)
    return assign_gpus(assign_experts(layer_counts(f, cap, fill=False), f), f, room, home)
