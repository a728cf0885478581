"""Estimated latency by server and layer from recorded tokens, and the knapsack over it.

Sets of experts are masks of 64 bits: ``masks`` uint64 (N, L) has a bit for each expert a server
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
def remote_messages(row, local, limit):
    """Messages of a token with the experts ``row`` where ``local`` are local, at most ``limit``."""
    left = row & ~local
    number = 0
    while left != np.uint64(0) and number < limit:
        left &= left - _ONE
        number += 1
    return number


@jit
def remote_calls(tables, n, layer, local):
    """What the tokens of a server need in a layer that is not there, if a mask of experts is.

    Returns:
        Share of tokens with a remote expert, mean remote messages of a token, expected remote
        experts of a prompt.
    """
    rows, hit = tables.rows[n, layer], tables.hit[n, layer]
    limit = tables.cost[n, layer].max_messages
    some, total = 0, 0
    for t in range(rows.size):
        number = remote_messages(rows[t], local, limit)
        total += number
        if number:
            some += 1
    hits = 0.0
    for e in range(hit.size):
        if not (local >> np.uint64(e)) & _ONE:
            hits += hit[e]
    return some / rows.size, total / rows.size, hits


@jit
def layer_cost(tables, n, layer, local):
    """Estimated seconds that the remote calls of a layer add to a server's requests.

    They are times the server's weight; ``local`` is the mask of the experts that are local.
    """
    cost = tables.cost[n, layer]
    share, volume, hits = remote_calls(tables, n, layer, local)
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
    """Cost (L, E + 1) of each layer of a server if it holds its c first experts, c = 0..E.

    ``order`` is int64 (L, E), those to hold first first.
    """
    layers, experts = order.shape
    costs = np.zeros((layers, experts + 1))
    for layer in range(layers):
        local = np.uint64(0)
        for c in range(experts + 1):
            if c:
                local |= _ONE << np.uint64(order[layer, c - 1])
            costs[layer, c] = layer_cost(tables, n, layer, local)
    return costs


@jit
def knapsack(costs, cap):
    """Choose c_l with sum c_l = cap and the least sum of costs[l, c_l], exactly: int64 (L,).

    Costs are (L, C + 1) and 0 <= cap <= L C; of equal solutions it is the one with the smallest
    last entries.
    """
    layers, most = costs.shape[0], costs.shape[1] - 1
    best = np.full(cap + 1, np.inf)
    best[0] = 0.0
    choice = np.zeros((layers, cap + 1), np.int64)
    for layer in range(layers):
        value = np.full(cap + 1, np.inf)
        for total in range(cap + 1):
            for c in range(min(most, total) + 1):
                cost = best[total - c] + costs[layer, c]
                if cost < value[total]:
                    value[total] = cost
                    choice[layer, total] = c
        best = value
    out = np.zeros(layers, np.int64)
    left = cap
    for layer in range(layers - 1, -1, -1):
        out[layer] = choice[layer, left]
        left -= out[layer]
    return out
