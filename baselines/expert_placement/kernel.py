"""Jitted inner loops of the placement algorithms.

All are pure functions of their arguments but for the arrays named as changed in place. One layer
of E experts on G GPUs is a table ``slot`` (G, S) of expert numbers, of which GPU g uses the first
``used[g]`` <= ``quota[g]``, with ``on`` (G, E) and ``copies`` (E,) saying the same. A replica takes
``weight[e] / copies[e]``.
"""

from __future__ import annotations

import numpy as np

from servegym.envs._jit import jit


@jit
def pack(weight, packs):
    """Heaviest first, each to the lightest pack that is not full; equal numbers a pack.

    Args:
        weight: float64 (n,), n a multiple of packs.
        packs: Number of packs.

    Returns:
        int64 (n,) pack of each item.
    """
    size = weight.size // packs
    load = np.zeros(packs)
    count = np.zeros(packs, np.int64)
    place = np.zeros(weight.size, np.int64)
    for item in np.argsort(-weight, kind="mergesort"):
        best = -1
        for p in range(packs):
            if count[p] < size and (best < 0 or load[p] < load[best]):
                best = p
        place[item] = best
        load[best] += weight[item]
        count[best] += 1
    return place


@jit
def replicate(weight, extra, limit):
    """Give each extra slot to the expert with the heaviest replicas.

    Args:
        weight: float64 (E,).
        extra: Slots beyond one an expert.
        limit: Most copies of an expert.

    Returns:
        int64 (E,) copies; fewer than E + extra in all if every expert is at the limit.
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
def eplb_published(loads, groups, nodes, out):
    """The published algorithm: groups to nodes, replicas in a node, replicas to its GPUs.

    Args:
        loads: float64 (L, E).
        groups: Groups of consecutive experts, a multiple of nodes.
        nodes: Nodes of equally many GPUs.
        out: int64 (L, G, S), changed in place: expert of each slot.
    """
    layers, experts = loads.shape
    gpus, slots = out.shape[1], out.shape[2]
    size = experts // groups
    inside, local = gpus // nodes, experts // nodes
    members = np.zeros(local, np.int64)
    for layer in range(layers):
        group_load = np.zeros(groups)
        for e in range(experts):
            group_load[e // size] += loads[layer, e]
        node_of = pack(group_load, nodes)
        for node in range(nodes):
            at = 0
            for e in range(experts):
                if node_of[e // size] == node:
                    members[at] = e
                    at += 1
            weight = loads[layer][members]
            copies = replicate(weight, inside * slots - local, 1 << 40)
            expert = np.zeros(inside * slots, np.int64)
            share = np.zeros(inside * slots)
            at = 0
            for i in range(local):
                for _ in range(copies[i]):
                    expert[at] = members[i]
                    share[at] = weight[i] / copies[i]
                    at += 1
            place = pack(share, inside)
            filled = np.zeros(inside, np.int64)
            for i in range(expert.size):
                g = place[i]
                out[layer, node * inside + g, filled[g]] = expert[i]
                filled[g] += 1


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

    Args:
        weight: float64 (E,).
        quota: int64 (G,), at most E each, at least E in all.
        slot: int64 (G, S), changed in place.
        used: int64 (G,), changed in place; zeros.
        on: bool (G, E), changed in place; all False.
        copies: int64 (E,), changed in place; wanted copies on entry, placed ones on return.
    """
    gpus = quota.size
    load = np.zeros(gpus)
    for e in np.argsort(-(weight / copies), kind="mergesort"):
        share = weight[e] / copies[e]
        wanted = copies[e]
        copies[e] = 0
        for _ in range(wanted):
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
    search ends.

    Args:
        weight: float64 (E,).
        quota: int64 (G,).
        slot: int64 (G, S), changed in place.
        used: int64 (G,), changed in place.
        on: bool (G, E), changed in place.
        copies: int64 (E,), changed in place.
        budget: Most loads.

    Returns:
        The loads made.
    """
    gpus = quota.size
    moves = 0
    while moves < budget:
        load = gpu_loads(weight, slot, used, copies)
        a = int(np.argmax(load))
        top = load[a]
        best = 1e-9 * top
        kind, at, b, other = 0, -1, -1, -1
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
                        best, kind, at, b = gain, 2, i, g
                    gain = top - max(top - relief, load[g] + thinner)
                    if gain > best:
                        best, kind, at, b = gain, 3, i, g
                for j in range(used[g]):
                    y = slot[g, j]
                    theirs = weight[y] / copies[y]
                    if not on[a, y] and moves + 2 <= budget and theirs < share:
                        step = share - theirs
                        gain = 0.5 * (top - max(top - step, load[g] + step))
                        if gain > best:
                            best, kind, at, b, other = gain, 1, i, g, j
                    if copies[y] > 1:
                        rise = weight[y] / (copies[y] - 1) - theirs
                        high = max(
                            top - relief + (rise if on[a, y] else 0.0), load[g] + thinner - theirs
                        )
                        if top - high <= best:
                            continue
                        for h in range(gpus):
                            if on[h, y] and h != g and h != a:
                                high = max(high, load[h] + rise - (relief if on[h, x] else 0.0))
                        if top - high > best:
                            best, kind, at, b, other = top - high, 4, i, g, j
        if kind == 0:
            return moves
        x = slot[a, at]
        moves += 2 if kind == 1 else 1
        on[b, x] = True
        if kind == 1:
            y = slot[b, other]
            slot[b, other] = x
            slot[a, at] = y
            on[a, x], on[a, y], on[b, y] = False, True, False
        elif kind == 2:
            slot[b, used[b]] = x
            used[b] += 1
            used[a] -= 1
            slot[a, at] = slot[a, used[a]]
            on[a, x] = False
        elif kind == 3:
            slot[b, used[b]] = x
            used[b] += 1
            copies[x] += 1
        else:
            y = slot[b, other]
            slot[b, other] = x
            on[b, y] = False
            copies[x] += 1
            copies[y] -= 1
    return moves


@jit
def balance_layers(loads, quota, node, home, budget, on):
    """Balance every layer on its own, from nothing or from a placement.

    Args:
        loads: float64 (L, E).
        quota: int64 (L, G) slots of a layer on a GPU.
        node: int64 (G,) node of each GPU, 0..M-1.
        home: int64 (L, E) node whose GPUs hold the expert.
        budget: int64 (L, M) most loads, or -1 in [0, 0] to start from nothing without a bound.
        on: bool (L, G, E), changed in place: the placement, on entry the one to start from.

    Returns:
        The loads made by refinement.
    """
    layers, experts = loads.shape
    fresh = budget[0, 0] < 0
    total = 0
    for layer in range(layers):
        for m in range(budget.shape[1]):
            gpus = np.flatnonzero(node == m)
            members = np.flatnonzero(home[layer] == m)
            weight = loads[layer][members]
            limit = quota[layer][gpus]
            slot = np.zeros((gpus.size, max(1, limit.max())), np.int64)
            used = np.zeros(gpus.size, np.int64)
            here = np.zeros((gpus.size, members.size), np.bool_)
            if fresh:
                for g in range(gpus.size):
                    limit[g] = min(limit[g], members.size)
                open_gpus = np.sum(limit > 0)
                copies = replicate(weight, limit.sum() - members.size, open_gpus)
                place_replicas(weight, limit, slot, used, here, copies)
                bound = 4 * limit.sum()
            else:
                copies = np.zeros(members.size, np.int64)
                for g in range(gpus.size):
                    for i in range(members.size):
                        if on[layer, gpus[g], members[i]]:
                            slot[g, used[g]] = i
                            used[g] += 1
                            here[g, i] = True
                            copies[i] += 1
                bound = budget[layer, m]
            total += refine(weight, limit, slot, used, here, copies, bound)
            for g in range(gpus.size):
                for i in range(members.size):
                    on[layer, gpus[g], members[i]] = here[g, i]
    return total


@jit
def fill_layers(loads, quota, on):
    """`fill_free` over all GPUs of every layer.

    Args:
        loads: float64 (L, E).
        quota: int64 (L, G), at most E each.
        on: bool (L, G, E), changed in place; every expert is on a GPU.
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


# Columns of the parameters of a server in `layer_cost`.
WEIGHT, PROMPT, DECODES, ROUND_TRIP, TOKEN, MESSAGE, TARGETS = range(7)


@jit
def layer_cost(par, any_share, volume, hits):
    """Estimated seconds that one layer's remote calls add to a server's requests.

    Args:
        par: float64 (7,): requests per time, prompt tokens, decode steps, seconds of a round trip,
            seconds a remote token occupies links, seconds of one more message and its answer, most
            messages of a step.
        any_share: Share of tokens with a remote expert.
        volume: Mean remote messages of a token.
        hits: Expected remote experts of a whole prompt.

    Returns:
        Seconds, times the weight.
    """
    touched = 1.0 - (1.0 - any_share) ** par[PROMPT]
    messages = min(hits, par[TARGETS])
    prefill = (
        par[PROMPT] * volume * par[TOKEN]
        + touched * par[ROUND_TRIP]
        + max(0.0, messages - touched) * par[MESSAGE]
    )
    decode = any_share * par[ROUND_TRIP] + volume * par[TOKEN] + (volume - any_share) * par[MESSAGE]
    return par[WEIGHT] * (prefill + par[DECODES] * decode)


@jit
def missing_of(row, held, targets):
    """Remote messages of a token whose experts are ``row`` where ``held`` are local (masks)."""
    left = row & ~held
    number = 0
    while left != np.uint64(0) and number < targets:
        left &= left - np.uint64(1)
        number += 1
    return number


@jit
def remote_share(rows, hit, held, targets):
    """What the tokens of one layer of a server need that is not there.

    Args:
        rows: uint64 (T,) expert sets of its tokens in this layer, T >= 1.
        hit: float64 (E,) chance that a prompt has a token for the expert.
        held: uint64 mask of the experts that are local.
        targets: Most messages of a step.

    Returns:
        Share of tokens with a remote expert, mean remote messages of a token, expected remote
        experts of a prompt.
    """
    some, total = 0, 0
    for t in range(rows.size):
        number = missing_of(rows[t], held, targets)
        total += number
        if number:
            some += 1
    hits = 0.0
    for e in range(hit.size):
        if not (held >> np.uint64(e)) & np.uint64(1):
            hits += hit[e]
    return some / rows.size, total / rows.size, hits


@jit
def cost_of(par, rows, hit, held):
    """`layer_cost` of one layer of a server, see `remote_share`; par: float64 (7,)."""
    some, total, hits = remote_share(rows, hit, held, par[TARGETS])
    return layer_cost(par, some, total, hits)


@jit
def prefix_costs(par, rows, hit, order):
    """Cost of each layer of a server if it holds its c first experts, c = 0..E.

    Args:
        par: float64 (L, 7).
        rows: uint64 (L, T).
        hit: float64 (L, E).
        order: int64 (L, E) experts, first those to hold first.

    Returns:
        float64 (L, E + 1).
    """
    layers, experts = order.shape
    costs = np.zeros((layers, experts + 1))
    for layer in range(layers):
        held = np.uint64(0)
        for c in range(experts + 1):
            if c:
                held |= np.uint64(1) << np.uint64(order[layer, c - 1])
            costs[layer, c] = cost_of(par[layer], rows[layer], hit[layer], held)
    return costs


@jit
def knapsack(costs, cap):
    """Choose c_l with sum c_l = cap and the least sum of costs[l, c_l], exactly.

    Args:
        costs: float64 (L, C + 1).
        cap: 0 <= cap <= L C.

    Returns:
        int64 (L,); of equal solutions the one with the smallest last entries.
    """
    layers, most = costs.shape[0], costs.shape[1] - 1
    best = np.full(cap + 1, np.inf)
    best[0] = 0.0
    choice = np.zeros((layers, cap + 1), np.int64)
    for layer in range(layers):
        value = np.full(cap + 1, np.inf)
        for total in range(cap + 1):
            for c in range(min(most, total) + 1):
                found = best[total - c] + costs[layer, c]
                if found < value[total]:
                    value[total] = found
                    choice[layer, total] = c
        best = value
    out = np.zeros(layers, np.int64)
    left = cap
    for layer in range(layers - 1, -1, -1):
        out[layer] = choice[layer, left]
        left -= out[layer]
    return out


@jit
def anneal(par, rows, hit, held, cost, steps, hot, cold, seed):
    """Simulated annealing over exchanges that keep memory and coverage.

    Half of the proposals replace, on one server, an expert that is held elsewhere too by one it
    lacks; the other half let two servers exchange an expert each.

    Args:
        par: float64 (N, L, 7).
        rows: uint64 (N, L, T).
        hit: float64 (N, L, E).
        held: uint64 (N, L), changed in place to the best placement found.
        cost: float64 (N, L) of `held`, changed in place.
        steps: Proposals.
        hot: First temperature, seconds.
        cold: Last temperature.
        seed: Of the proposals.

    Returns:
        The sum of cost.
    """
    np.random.seed(seed)
    servers, layers, experts = hit.shape
    one = np.uint64(1)
    copies = np.zeros((layers, experts), np.int64)
    for n in range(servers):
        for layer in range(layers):
            for e in range(experts):
                copies[layer, e] += (held[n, layer] >> np.uint64(e)) & one
    now, best = cost.sum(), cost.sum()
    best_held, best_cost = held.copy(), cost.copy()
    change_n, change_l = np.zeros(4, np.int64), np.zeros(4, np.int64)
    old_held, old_cost = np.zeros(4, np.uint64), np.zeros(4)
    for step in range(steps):
        warm = hot * (cold / hot) ** (step / steps)
        n = np.random.randint(servers)
        lx, x = np.random.randint(layers), np.random.randint(experts)
        ly, y = np.random.randint(layers), np.random.randint(experts)
        bit_x, bit_y = one << np.uint64(x), one << np.uint64(y)
        if not held[n, lx] & bit_x or held[n, ly] & bit_y:
            continue
        other = -1
        if np.random.random() < 0.5 and servers > 1:
            other = (n + 1 + np.random.randint(servers - 1)) % servers
            if held[other, lx] & bit_x or not held[other, ly] & bit_y:
                continue
        elif copies[lx, x] < 2:
            continue
        changes = 0
        for m in (n, other):
            for k in range(2 if lx != ly else 1):
                if m < 0:
                    continue
                layer = ly if k else lx
                change_n[changes], change_l[changes] = m, layer
                old_held[changes], old_cost[changes] = held[m, layer], cost[m, layer]
                changes += 1
        held[n, lx] &= ~bit_x
        held[n, ly] |= bit_y
        if other >= 0:
            held[other, ly] &= ~bit_y
            held[other, lx] |= bit_x
        delta = 0.0
        for i in range(changes):
            m, layer = change_n[i], change_l[i]
            cost[m, layer] = cost_of(par[m, layer], rows[m, layer], hit[m, layer], held[m, layer])
            delta += cost[m, layer] - old_cost[i]
        if delta <= 0 or np.random.random() < np.exp(-delta / warm):
            now += delta
            if other < 0:
                copies[lx, x] -= 1
                copies[ly, y] += 1
            if now < best - 1e-12 * abs(best):
                best = now
                best_held[:] = held
                best_cost[:] = cost
        else:
            for i in range(changes):
                held[change_n[i], change_l[i]] = old_held[i]
                cost[change_n[i], change_l[i]] = old_cost[i]
    held[:] = best_held
    cost[:] = best_cost
    return cost.sum()


@jit
def descend(par, rows, hit, held, cap, budget):
    """Best-improvement search: one server adds an expert and, if it is full, drops another.

    Args:
        par: float64 (N, 7).
        rows: uint64 (N, L, T).
        hit: float64 (N, L, E).
        held: uint64 (N, L), changed in place.
        cap: int64 (N,) slots.
        budget: Most experts added.

    Returns:
        The experts added.
    """
    servers, layers, experts = hit.shape
    one = np.uint64(1)
    copies = np.zeros((layers, experts), np.int64)
    used = np.zeros(servers, np.int64)
    cost = np.zeros((servers, layers))
    # Change of a layer's cost if the expert comes (not held) or goes (held).
    change = np.zeros((servers, layers, experts))
    dirty = np.ones((servers, layers), np.bool_)
    for n in range(servers):
        for layer in range(layers):
            for e in range(experts):
                if (held[n, layer] >> np.uint64(e)) & one:
                    copies[layer, e] += 1
                    used[n] += 1
    drop, add = np.zeros(layers, np.int64), np.zeros(layers, np.int64)
    for moves in range(budget):
        best, where, go_l, go_e, come_l, come_e = -1e-12, -1, -1, -1, -1, -1
        for n in range(servers):
            full = used[n] >= cap[n]
            for layer in range(layers):
                if dirty[n, layer]:
                    dirty[n, layer] = False
                    now = held[n, layer]
                    cost[n, layer] = cost_of(par[n], rows[n, layer], hit[n, layer], now)
                    for e in range(experts):
                        change[n, layer, e] = (
                            cost_of(
                                par[n], rows[n, layer], hit[n, layer], now ^ (one << np.uint64(e))
                            )
                            - cost[n, layer]
                        )
                drop[layer], add[layer] = -1, -1
                for e in range(experts):
                    value = change[n, layer, e]
                    if not (held[n, layer] >> np.uint64(e)) & one:
                        if add[layer] < 0 or value < change[n, layer, add[layer]]:
                            add[layer] = e
                    elif copies[layer, e] > 1 and (
                        drop[layer] < 0 or value < change[n, layer, drop[layer]]
                    ):
                        drop[layer] = e
            for ly in range(layers):
                y = add[ly]
                if y < 0:
                    continue
                if not full:
                    if change[n, ly, y] < best:
                        best, where, go_l, come_l, come_e = change[n, ly, y], n, -1, ly, y
                    continue
                for lx in range(layers):
                    x = drop[lx]
                    if x < 0:
                        continue
                    if lx == ly:
                        mask = held[n, lx] ^ (one << np.uint64(x)) ^ (one << np.uint64(y))
                        value = cost_of(par[n], rows[n, lx], hit[n, lx], mask) - cost[n, lx]
                    else:
                        # Layers add up, so two changes in different layers do, too.
                        value = change[n, ly, y] + change[n, lx, x]
                    if value < best:
                        best, where = value, n
                        go_l, go_e, come_l, come_e = lx, x, ly, y
        if where < 0:
            return moves
        held[where, come_l] ^= one << np.uint64(come_e)
        copies[come_l, come_e] += 1
        used[where] += 1
        dirty[where, come_l] = True
        if go_l >= 0:
            held[where, go_l] ^= one << np.uint64(go_e)
            copies[go_l, go_e] -= 1
            used[where] -= 1
            dirty[where, go_l] = True
    return budget
