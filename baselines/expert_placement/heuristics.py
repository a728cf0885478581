"""Placements of a few lines: uniform, redundance, SmartMoE's balance, whole layers, chains.

Arguments and results are those of `feasibility`; ``seed`` is that of a random placement.
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
    fill_slots,
)


def even_quotas(layers: int, experts: int, slots: Ints) -> Ints:
    """Deal every layer's experts evenly over the GPUs, passing over full ones.

    Returns (G, L) experts of a layer on a GPU, E a layer; ``slots`` (G,) are at least L E in all.
    """
    quota = np.zeros((slots.size, layers), dtype=np.int64)
    used = np.zeros(slots.size, dtype=np.int64)
    for layer in range(layers):
        left = experts
        while left:
            # One round: one each, first to the GPUs that hold least (ties: most free slots).
            order = np.lexsort((used - slots, used))
            turn = order[(used < slots)[order]][:left]
            quota[turn, layer] += 1
            used[turn] += 1
            left -= turn.size
    return quota


def uniform(
    counts: ArrayLike, slots: ArrayLike, gpu_server: ArrayLike, *, seed: int | None = 0
) -> Bools:
    """Every expert once, the same number of random experts of a layer on each GPU.

    Invariants: blind to the counts; of a layer, two GPUs that are not full have the same number or
    one more.
    """
    f, room, _, _ = as_instance(counts, slots, gpu_server)
    return _deal(f, room, np.random.default_rng(seed))


def _deal(f: Floats, room: Ints, rng: np.random.Generator) -> Bools:
    _, layers, experts = f.shape
    quota = even_quotas(layers, experts, room)
    z = np.zeros((room.size, layers, experts), dtype=np.bool_)
    for layer in range(layers):
        z[np.repeat(np.arange(room.size), quota[:, layer]), layer, rng.permutation(experts)] = True
    return z


def redundance(
    counts: ArrayLike, slots: ArrayLike, gpu_server: ArrayLike, *, seed: int | None = 0
) -> Bools:
    """`uniform`, then every GPU's free slots take random experts it does not hold.

    Invariants: blind to the counts; a superset of `uniform` with the same seed; every GPU full, or
    with all experts.
    """
    f, room, _, _ = as_instance(counts, slots, gpu_server)
    rng = np.random.default_rng(seed)
    z = _deal(f, room, rng)
    for g in range(room.size):
        flat = z[g].reshape(-1)
        missing = np.flatnonzero(~flat)
        take = min(int(room[g] - flat.sum()), missing.size)
        flat[rng.choice(missing, take, replace=False)] = True
    return z


def smartmoe(counts: ArrayLike, slots: ArrayLike, gpu_server: ArrayLike) -> Bools:
    """SmartMoE's placement: every expert once, equally many a GPU, loads as even as may be.

    Layer by layer, experts by falling total count go to the GPU with the least load in that layer
    among those whose quota is not used up (ties: the lowest GPU).

    Invariants: every expert once; sees only the sum of the counts over servers.
    """
    f, room, _, _ = as_instance(counts, slots, gpu_server)
    _, layers, experts = f.shape
    total = f.sum(axis=0)
    quota = even_quotas(layers, experts, room)
    z = np.zeros((room.size, layers, experts), dtype=np.bool_)
    for layer in range(layers):
        load = np.where(quota[:, layer] > 0, 0.0, np.inf)
        for e in np.argsort(-total[layer], kind="stable"):
            g = int(np.argmin(load))
            z[g, layer, e] = True
            quota[g, layer] -= 1
            load[g] = load[g] + total[layer, e] if quota[g, layer] else np.inf
    return z


def whole_layer(counts: ArrayLike, slots: ArrayLike, gpu_server: ArrayLike) -> Bools:
    """Whole layers on each server; a layer that is all there never waits for a link.

    Layers are dealt in order and then again in order, to the largest server first, as many as fit
    whole. What is left of the slots first takes experts that are nowhere (each where it is most
    frequent), then each server's most frequent experts.

    Invariants: every server's slots used up, one copy of an expert a server; which layers are whole
    does not depend on the counts.
    """
    f, room, home, cap = as_instance(counts, slots, gpu_server)
    _, layers, experts = f.shape
    view = np.zeros(f.shape, dtype=np.bool_)
    turn = 0
    for n in np.argsort(-cap, kind="stable"):
        whole = min(int(cap[n]) // experts, layers)
        view[n, np.arange(turn, turn + whole) % layers] = True
        turn += whole
    return assign_gpus(_use_up_slots(view, f, cap), f, room, home)


def _use_up_slots(view: Bools, f: Floats, cap: Ints) -> Bools:
    """Place the experts that are nowhere, each where it is most frequent, then fill the slots."""
    for layer, e in np.argwhere(~view.any(axis=0)):
        free = view.sum(axis=(1, 2)) < cap
        view[np.argmax(np.where(free, f[:, layer, e], -1.0)), layer, e] = True
    return fill_slots(view, f, cap)


def layer_chains(counts: ArrayLike, slots: ArrayLike, gpu_server: ArrayLike) -> Bools:
    """Runs of consecutive whole layers on each server, for requests that are forwarded.

    Servers form chains of all layers, as many as there is room for: the largest server takes the
    first layers, and so on, and the smallest one that can end a chain ends it. A server that is
    left over repeats a stage of a chain if one fits, the one of fewest copies. Slots that hold no
    whole layer are used as in `whole_layer`.

    Invariants: every server's slots used up, one copy of an expert a server; which layers are whole
    does not depend on the counts.
    """
    f, room, home, cap = as_instance(counts, slots, gpu_server)
    _, layers, experts = f.shape
    size = np.minimum(cap // experts, layers)
    view = np.zeros(f.shape, dtype=np.bool_)
    left = [int(n) for n in np.argsort(-size, kind="stable")]
    stages: list[tuple[int, int]] = []
    while not stages or size[left].sum() >= layers:
        begin = 0
        while begin < layers and left:
            ends = [n for n in left if size[n] >= layers - begin]
            n = ends[-1] if ends else left[0]
            left.remove(n)
            end = min(begin + int(size[n]), layers)
            view[n, end - size[n] : end] = True
            stages.append((begin, end))
            begin = end
    for n in left:
        starts = {min(begin, layers - size[n]) for begin, _ in stages}
        starts |= {max(end - size[n], 0) for _, end in stages}
        copies = view.all(axis=2).sum(axis=0)

        def rank(start: int, n: int = n, copies: Ints = copies) -> tuple[bool, int, int]:
            end = start + size[n]
            repeats = any(start <= begin and last <= end for begin, last in stages)
            return not repeats, int(copies[start:end].sum()), start

        best = min(starts, key=rank)
        view[n, best : best + size[n]] = True
    return assign_gpus(_use_up_slots(view, f, cap), f, room, home)
