"""Jitted inner loops of load balancing by replicas (EPLB).

All are pure functions of their arguments but for the arrays named as changed in place. One layer
of E experts on G GPUs is a table ``slot`` (G, S) of expert numbers, of which GPU g uses the first
``used[g]`` <= ``quota[g]``, with ``on`` (G, E) and ``copies`` (E,) saying the same. A replica takes
``weight[e] / copies[e]``.
"""

from __future__ import annotations

import numpy as np

from servegym._jit import jit

# Changes of `refine`: two GPUs swap an expert; one moves to a free slot; one gets one more copy in
# a free slot, or in place of another expert's replica.
NO_CHANGE, SWAP, MOVE, COPY, REPLACE = range(5)


@jit
def replicate(weight, extra, limit):
    """Copies int64 (E,): each of ``extra`` slots goes to the expert with the heaviest replicas.

    No expert of ``weight`` (E,) gets more than ``limit``; if all have so many, there are fewer than
    E + extra in all.
    """
    copies = np.ones(weight.size, np.int64)
    for _ in range(extra):
        best = -1
        for e in range(weight.size):
            if copies[e] < limit and (
                best < 0 or weight[e] * copies[best] > weight[best] * copies[e]
            ):
                best = e
        if best < 0:
            break
        copies[best] += 1
    return copies


@jit
def gpu_loads(weight, slot, used, copies):
    """Load (G,) of each GPU."""
    load = np.zeros(used.size)
    for g in range(used.size):
        for i in range(used[g]):
            e = slot[g, i]
            load[g] += weight[e] / copies[e]
    return load


@jit
def place_replicas(weight, quota, slot, used, on, copies):
    """Replicas to GPUs, never two of an expert on one, and no slot left free that could be used.

    Experts by falling replica weight, the copies of one to the lightest GPUs with a free slot.
    Copies that find no GPU are given up; their slots go to the expert with the heaviest replicas
    that fits.

    ``quota`` (G,) is at most E each and at least E in all. ``slot`` (G, S), ``used`` (G,), zeros,
    ``on`` (G, E), all False, and ``copies`` (E,), the number of each, are changed in place.
    """
    gpus = quota.size
    load = np.zeros(gpus)
    for e in np.argsort(-(weight / copies), kind="mergesort"):
        share = weight[e] / copies[e]
        number = copies[e]
        copies[e] = 0
        for _ in range(number):
            best = -1
            for g in range(gpus):
                if used[g] < quota[g] and not on[g, e] and (best < 0 or load[g] < load[best]):
                    best = g
            if best < 0:
                break
            slot[best, used[best]] = e
            used[best] += 1
            on[best, e] = True
            load[best] += share
            copies[e] += 1
    fill_free(weight, quota, slot, used, on, copies)


@jit
def fill_free(weight, quota, slot, used, on, copies):
    """Free slots, lightest GPU first, take the missing expert with the heaviest replicas.

    The arguments are those of `place_replicas`; every expert has at least one copy.
    """
    gpus = quota.size
    load = gpu_loads(weight, slot, used, copies)
    while True:
        best = -1
        for g in range(gpus):
            if used[g] < quota[g] and (best < 0 or load[g] < load[best]):
                best = g
        if best < 0:
            return
        e = -1
        for x in range(weight.size):
            if not on[best, x] and (e < 0 or weight[x] * copies[e] > weight[e] * copies[x]):
                e = x
        change = weight[e] / (copies[e] + 1) - weight[e] / copies[e]
        for g in range(gpus):
            if on[g, e]:
                load[g] += change
        copies[e] += 1
        load[best] += weight[e] / copies[e]
        slot[best, used[best]] = e
        used[best] += 1
        on[best, e] = True


@jit
def refine(weight, quota, slot, used, on, copies, budget):
    """Lower the heaviest GPU's load by the best change per loaded expert, until none helps.

    Changes: two GPUs swap an expert (2 loads), an expert moves to a free slot, or gets one more
    copy in a free slot or in place of another expert's replica (1 load each). A change counts by
    the highest load among the GPUs it touches, so the sorted loads fall lexicographically and the
    search ends; ``budget`` loads at most, for what rounding might never end. The other arguments
    are those of `place_replicas`.
    """
    gpus = quota.size
    moves = 0
    while moves < budget:
        load = gpu_loads(weight, slot, used, copies)
        a = int(np.argmax(load))
        top = load[a]
        best = 1e-9 * top
        kind, at, b, other = NO_CHANGE, -1, -1, -1
        for i in range(used[a]):
            x = slot[a, i]
            share = weight[x] / copies[x]
            thinner = weight[x] / (copies[x] + 1)
            relief = share - thinner
            for g in range(gpus):
                if on[g, x]:
                    continue
                if used[g] < quota[g]:
                    gain = top - max(top - share, load[g] + share)
                    if gain > best:
                        best, kind, at, b = gain, MOVE, i, g
                    gain = top - max(top - relief, load[g] + thinner)
                    if gain > best:
                        best, kind, at, b = gain, COPY, i, g
                for j in range(used[g]):
                    y = slot[g, j]
                    share_y = weight[y] / copies[y]
                    if not on[a, y] and moves + 2 <= budget and share_y < share:
                        step = share - share_y
                        gain = 0.5 * (top - max(top - step, load[g] + step))
                        if gain > best:
                            best, kind, at, b, other = gain, SWAP, i, g, j
                    if copies[y] > 1:
                        rise = weight[y] / (copies[y] - 1) - share_y
                        high = max(
                            top - relief + (rise if on[a, y] else 0.0), load[g] + thinner - share_y
                        )
                        if top - high <= best:
                            continue
                        for h in range(gpus):
                            if on[h, y] and h != g and h != a:
                                high = max(high, load[h] + rise - (relief if on[h, x] else 0.0))
                        if top - high > best:
                            best, kind, at, b, other = top - high, REPLACE, i, g, j
        if kind == NO_CHANGE:
            return
        moves += 2 if kind == SWAP else 1
        _apply_change(slot, used, on, copies, kind, a, at, b, other)


@jit
def _apply_change(slot, used, on, copies, kind, a, i, b, j):
    """Carry out a change of `refine`: expert in slot i of GPU a, slot j of GPU b."""
    x = slot[a, i]
    on[b, x] = True
    if kind == SWAP:
        y = slot[b, j]
        slot[b, j] = x
        slot[a, i] = y
        on[a, x], on[a, y], on[b, y] = False, True, False
    elif kind == MOVE:
        slot[b, used[b]] = x
        used[b] += 1
        used[a] -= 1
        slot[a, i] = slot[a, used[a]]
        on[a, x] = False
    elif kind == COPY:
        slot[b, used[b]] = x
        used[b] += 1
        copies[x] += 1
    else:
        y = slot[b, j]
        slot[b, j] = x
        on[b, y] = False
        copies[x] += 1
        copies[y] -= 1


@jit
def balance_layers(loads, quota, node, home):
    """Balance every layer on its own: the placement, bool (L, G, E).

    An expert of ``loads`` (L, E) is on the GPUs of the node ``home`` (L, E) alone; ``node`` (G,) is
    that of each GPU and ``quota`` (L, G) its slots of a layer.
    """
    layers, experts = loads.shape
    on = np.zeros((layers, node.size, experts), np.bool_)
    for layer in range(layers):
        for m in range(node.max() + 1):
            gpus = np.flatnonzero(node == m)
            members = np.flatnonzero(home[layer] == m)
            weight = loads[layer][members]
            limit = np.minimum(quota[layer][gpus], members.size)
            slot = np.zeros((gpus.size, max(1, limit.max())), np.int64)
            used = np.zeros(gpus.size, np.int64)
            here = np.zeros((gpus.size, members.size), np.bool_)
            copies = replicate(weight, limit.sum() - members.size, np.sum(limit > 0))
            place_replicas(weight, limit, slot, used, here, copies)
            refine(weight, limit, slot, used, here, copies, 4 * limit.sum())
            for g in range(gpus.size):
                for i in range(members.size):
                    on[layer, gpus[g], members[i]] = here[g, i]
    return on


@jit
def fill_layers(loads, quota, on):
    """`fill_free` over all GPUs of every layer; ``on`` (L, G, E), covered, is changed in place.

    ``loads`` is (L, E) and ``quota`` (L, G), at most E each.
    """
    layers, gpus, experts = on.shape
    for layer in range(layers):
        slot = np.zeros((gpus, max(1, quota[layer].max())), np.int64)
        used = np.zeros(gpus, np.int64)
        copies = np.zeros(experts, np.int64)
        here = on[layer].copy()
        for g in range(gpus):
            for e in range(experts):
                if here[g, e]:
                    slot[g, used[g]] = e
                    used[g] += 1
                    copies[e] += 1
        fill_free(loads[layer], quota[layer], slot, used, here, copies)
        on[layer] = here
