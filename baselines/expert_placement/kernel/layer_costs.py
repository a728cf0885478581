"""Estimated latency by server and layer from recorded tokens, knapsack and searches by it.

Sets of experts are masks of 64 bits: ``held`` uint64 (N, L) has a bit for each expert that a server
holds of a layer. The estimate adds up over servers and layers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from servegym._jit import jit

LAYER_COST = np.dtype(
    (
        np.record,
        np.dtype(
            [
                ("weight", "f8"),  # requests a second, or another weight of the server
                ("prompt_tokens", "f8"),  # mean tokens of a prompt
                ("decode_steps", "f8"),  # mean decode steps of a request
                ("round_trip_s", "f8"),  # one remote call and its answer, without their volume
                ("token_s", "f8"),  # time that a remote token occupies links and devices
                ("message_s", "f8"),  # one more message and its answer
                ("max_messages", "f8"),  # most messages of a step
            ]
        ),
    )
)
"""What a remote expert costs a server in a layer."""

_ONE = np.uint64(1)


class Tables(NamedTuple):
    """What the estimate reads, for N servers, L layers, E experts and T recorded tokens.

    Attributes:
        cost: `LAYER_COST` (N, L).
        rows: uint64 (N, L, T) expert sets of tokens of each server.
        hit: float64 (N, L, E) chance that a prompt has a token for the expert.
    """

    cost: np.ndarray
    rows: np.ndarray
    hit: np.ndarray


@jit
def remote_messages(row, held, limit):
    """Messages of a token with the experts ``row`` where ``held`` are local, at most ``limit``."""
    left = row & ~held
    number = 0
    while left != np.uint64(0) and number < limit:
        left &= left - _ONE
        number += 1
    return number


@jit
def remote_calls(tables, n, layer, held):
    """What the tokens of a server need in a layer that is not there.

    Args:
        tables: `Tables`, T >= 1.
        n: Server.
        layer: Layer.
        held: uint64 mask of the experts that are local.

    Returns:
        Share of tokens with a remote expert, mean remote messages of a token, expected remote
        experts of a prompt.
    """
    rows, hit = tables.rows[n, layer], tables.hit[n, layer]
    limit = tables.cost[n, layer].max_messages
    some, total = 0, 0
    for t in range(rows.size):
        number = remote_messages(rows[t], held, limit)
        total += number
        if number:
            some += 1
    hits = 0.0
    for e in range(hit.size):
        if not (held >> np.uint64(e)) & _ONE:
            hits += hit[e]
    return some / rows.size, total / rows.size, hits


@jit
def layer_cost(tables, n, layer, held):
    """Estimated seconds that the remote calls of a layer add to a server's requests.

    Args:
        tables: `Tables`.
        n: Server.
        layer: Layer.
        held: uint64 mask of the experts that are local.

    Returns:
        Seconds, times the server's weight.
    """
    cost = tables.cost[n, layer]
    share, volume, hits = remote_calls(tables, n, layer, held)
    touched = 1.0 - (1.0 - share) ** cost.prompt_tokens
    messages = min(hits, cost.max_messages)
    prefill = (
        cost.prompt_tokens * volume * cost.token_s
        + touched * cost.round_trip_s
        + max(0.0, messages - touched) * cost.message_s
    )
    decode = share * cost.round_trip_s + volume * cost.token_s + (volume - share) * cost.message_s
    return cost.weight * (prefill + cost.decode_steps * decode)


@jit
def prefix_costs(tables, n, order):
    """Cost of each layer of a server if it holds its c first experts, c = 0..E.

    Args:
        tables: `Tables`.
        n: Server.
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
                held |= _ONE << np.uint64(order[layer, c - 1])
            costs[layer, c] = layer_cost(tables, n, layer, held)
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
def anneal(tables, held, cost, steps, hot, cold, seed):
    """Simulated annealing over exchanges that keep memory and coverage.

    Half of the proposals replace, on one server, an expert that is held elsewhere too by one it
    lacks; the other half let two servers exchange an expert each.

    Args:
        tables: `Tables`.
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
    copies = _count_copies(held, tables.hit.shape[2])
    now, best = cost.sum(), cost.sum()
    best_held, best_cost = held.copy(), cost.copy()
    # The at most four (server, layer) that a proposal changes, and what they cost before.
    changed, old_cost = np.zeros((4, 2), np.int64), np.zeros(4)
    for step in range(steps):
        n, other, lx, x, ly, y = _draw_exchange(held, copies)
        if n < 0:
            continue
        _exchange(held, n, other, lx, x, ly, y)
        changes = _changed_layers(n, other, lx, ly, changed)
        delta = 0.0
        for i in range(changes):
            m, layer = changed[i]
            old_cost[i] = cost[m, layer]
            cost[m, layer] = layer_cost(tables, m, layer, held[m, layer])
            delta += cost[m, layer] - old_cost[i]
        temperature = hot * (cold / hot) ** (step / steps)
        if delta <= 0 or np.random.random() < np.exp(-delta / temperature):
            now += delta
            if other < 0:
                copies[lx, x] -= 1
                copies[ly, y] += 1
            if now < best - 1e-12 * abs(best):
                best = now
                best_held[:] = held
                best_cost[:] = cost
        else:
            _exchange(held, n, other, lx, x, ly, y)
            for i in range(changes):
                cost[changed[i, 0], changed[i, 1]] = old_cost[i]
    held[:] = best_held
    cost[:] = best_cost
    return cost.sum()


@jit
def _draw_exchange(held, copies):
    """A random exchange that keeps memory and coverage.

    Args:
        held: uint64 (N, L).
        copies: int64 (L, E).

    Returns:
        n, other, lx, x, ly, y: server n gives expert x of layer lx for y of ly, and ``other``, if
        not -1, does the reverse. All -1 where what was drawn cannot be exchanged.
    """
    servers = held.shape[0]
    layers, experts = copies.shape
    none = (-1, -1, -1, -1, -1, -1)
    n = np.random.randint(servers)
    lx, x = np.random.randint(layers), np.random.randint(experts)
    ly, y = np.random.randint(layers), np.random.randint(experts)
    bit_x, bit_y = _ONE << np.uint64(x), _ONE << np.uint64(y)
    if not held[n, lx] & bit_x or held[n, ly] & bit_y:
        return none
    if np.random.random() < 0.5 and servers > 1:
        other = (n + 1 + np.random.randint(servers - 1)) % servers
        if held[other, lx] & bit_x or not held[other, ly] & bit_y:
            return none
        return n, other, lx, x, ly, y
    if copies[lx, x] < 2:
        return none
    return n, -1, lx, x, ly, y


@jit
def _exchange(held, n, other, lx, x, ly, y):
    """Carry out an exchange of `_draw_exchange` in ``held``, or take it back."""
    for m in (n, other):
        if m >= 0:
            held[m, lx] ^= _ONE << np.uint64(x)
            held[m, ly] ^= _ONE << np.uint64(y)


@jit
def _changed_layers(n, other, lx, ly, changed):
    """Write the (server, layer) of an exchange into ``changed`` (4, 2); returns their number."""
    changes = 0
    for m in (n, other):
        for k in range(2 if lx != ly else 1):
            if m >= 0:
                changed[changes, 0], changed[changes, 1] = m, ly if k else lx
                changes += 1
    return changes


@jit
def _count_copies(held, experts):
    """Copies (L, E) of each expert, of masks (N, L)."""
    servers, layers = held.shape
    copies = np.zeros((layers, experts), np.int64)
    for n in range(servers):
        for layer in range(layers):
            for e in range(experts):
                copies[layer, e] += np.int64((held[n, layer] >> np.uint64(e)) & _ONE)
    return copies


@jit
def descend(tables, held, cap, budget):
    """Best-improvement search: one server adds an expert and, if it is full, drops another.

    Args:
        tables: `Tables`.
        held: uint64 (N, L), changed in place.
        cap: int64 (N,) slots.
        budget: Most experts added.

    Returns:
        The experts added.
    """
    servers, layers, experts = tables.hit.shape
    copies = _count_copies(held, experts)
    free = cap.copy()
    for n in range(servers):
        free[n] -= _count_copies(held[n : n + 1], experts).sum()
    cost = np.zeros((servers, layers))
    # Change of a layer's cost if the expert comes (not held) or goes (held).
    change = np.zeros((servers, layers, experts))
    stale = np.ones((servers, layers), np.bool_)
    drop, add = np.zeros(layers, np.int64), np.zeros(layers, np.int64)
    for moves in range(budget):
        best, where, go_l, go_e, come_l, come_e = -1e-12, -1, -1, -1, -1, -1
        for n in range(servers):
            for layer in range(layers):
                if stale[n, layer]:
                    stale[n, layer] = False
                    cost[n, layer] = _flip_costs(tables, n, layer, held, change)
            _best_of_layers(held[n], copies, change[n], drop, add)
            if free[n] > 0:
                for ly in range(layers):
                    if add[ly] >= 0 and change[n, ly, add[ly]] < best:
                        best, where, go_l = change[n, ly, add[ly]], n, -1
                        come_l, come_e = ly, add[ly]
            else:
                value, lx, ly = _best_exchange(tables, n, held, cost, change, drop, add, best)
                if value < best:
                    best, where = value, n
                    go_l, go_e, come_l, come_e = lx, drop[lx], ly, add[ly]
        if where < 0:
            return moves
        held[where, come_l] ^= _ONE << np.uint64(come_e)
        copies[come_l, come_e] += 1
        free[where] -= 1
        stale[where, come_l] = True
        if go_l >= 0:
            held[where, go_l] ^= _ONE << np.uint64(go_e)
            copies[go_l, go_e] -= 1
            free[where] += 1
            stale[where, go_l] = True
    return budget


@jit
def _flip_costs(tables, n, layer, held, change):
    """Cost of a layer of a server; writes what each expert's coming or going adds to ``change``."""
    now = held[n, layer]
    cost = layer_cost(tables, n, layer, now)
    for e in range(change.shape[2]):
        change[n, layer, e] = layer_cost(tables, n, layer, now ^ (_ONE << np.uint64(e))) - cost
    return cost


@jit
def _best_exchange(tables, n, held, cost, change, drop, add, bound):
    """The layers whose candidates a full server should exchange, where that is below ``bound``.

    Args:
        tables: `Tables`.
        n: Server.
        held: uint64 (N, L).
        cost: float64 (N, L).
        change: float64 (N, L, E), see `_flip_costs`.
        drop: int64 (L,) expert of each layer to drop, or -1.
        add: int64 (L,) expert of each layer to add, or -1.
        bound: Change of cost to be below of.

    Returns:
        Change of cost, layer that drops, layer that adds; ``bound``, -1, -1 if none is below.
    """
    best, go_l, come_l = bound, -1, -1
    for ly in range(add.size):
        y = add[ly]
        if y < 0:
            continue
        for lx in range(drop.size):
            x = drop[lx]
            if x < 0:
                continue
            if lx == ly:
                mask = held[n, lx] ^ (_ONE << np.uint64(x)) ^ (_ONE << np.uint64(y))
                value = layer_cost(tables, n, lx, mask) - cost[n, lx]
            else:
                # Layers add up, so two changes in different layers do, too.
                value = change[n, ly, y] + change[n, lx, x]
            if value < best:
                best, go_l, come_l = value, lx, ly
    return best, go_l, come_l


@jit
def _best_of_layers(held, copies, change, drop, add):
    """The expert of each layer to drop and to add on a server, -1 if none; into ``drop``, ``add``.

    Args:
        held: uint64 (L,).
        copies: int64 (L, E); the only copy of an expert is not dropped.
        change: float64 (L, E) change of cost.
        drop: int64 (L,), changed in place.
        add: int64 (L,), changed in place.
    """
    layers, experts = copies.shape
    for layer in range(layers):
        drop[layer], add[layer] = -1, -1
        for e in range(experts):
            value = change[layer, e]
            if not (held[layer] >> np.uint64(e)) & _ONE:
                if add[layer] < 0 or value < change[layer, add[layer]]:
                    add[layer] = e
            elif copies[layer, e] > 1 and (drop[layer] < 0 or value < change[layer, drop[layer]]):
                drop[layer] = e
