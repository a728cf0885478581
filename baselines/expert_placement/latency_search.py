"""A placement by estimated latency: exact layer budgets, each server's most frequent experts.

It minimises `LayerCostModel`, so it sees that a step waits when any expert is remote.
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
from servegym.baselines.expert_placement.kernel import layer_costs as kernel
from servegym.baselines.expert_placement.layer_costs import LayerCostModel

TURNS = 8
"""Parts of the servers that `latency_dp` plans anew one after another: of up to so many, each."""


def latency_dp(
    model: LayerCostModel,
    counts: ArrayLike,
    slots: ArrayLike,
    gpu_server: ArrayLike,
    *,
    rounds: int = 3,
) -> Bools:
    """Layer budgets by an exact knapsack over estimated latency, then coverage at least loss.

    Whom a server asks and how long its messages wait depend on all placements. So then one server
    after another (of more than `TURNS` an eighth at a time) is planned anew against the placement
    of the others, under the load that all of them cause, until none gains: a fixed point. There are
    ``rounds`` turns at most; 0 plans for idle links, as does a model without links.

    Coverage by layers (one that nobody would hold whole gets an owner, by another knapsack) and by
    single experts (a missing one replaces a duplicate) are both tried; the better one is taken.

    The estimate is not convex in a layer's budget (the last experts of a layer gain most), so a
    greedy choice would be wrong.

    Invariants: every server's slots used up, one copy of an expert a server; a server's budgets are
    optimal for the estimate before coverage is seen to; its most frequent experts of a layer come
    first. Other arguments, the result and errors are those of `feasibility`.
    """
    if rounds < 0:
        raise ValueError(f"rounds must not be negative, got {rounds!r}")
    f, room, home, cap = check_instance(counts, slots, gpu_server)
    view = _budgets(model, f, cap)
    if model.links is not None:
        view = _settle_servers(model, view, f, cap, rounds)
    return assign_gpus(view, f, room, home)


def _settle_servers(model: LayerCostModel, view: Bools, f: Floats, cap: Ints, rounds: int) -> Bools:
    """Plan one server after another against the placement of the others, while that pays."""
    servers, layers, experts = f.shape
    order = np.argsort(-f, axis=2, kind="stable")
    rank = np.argsort(order, axis=2)
    now = model.loaded(view, f)
    cheapest = float(now.cost(view).sum())
    for _ in range(rounds):
        before = cheapest
        for part in np.array_split(np.arange(servers), min(servers, TURNS)):
            costs = np.stack([now.prefix_costs(m, order[m]) for m in range(servers)])
            full = view.all(axis=2)
            bound = costs.copy()
            bound[full & (full.sum(axis=0) == 1), :experts] = np.inf
            for table in (costs, bound):
                trial = view.copy()
                for n in part:
                    number = kernel.knapsack(table[n], int(min(cap[n], layers * experts)))
                    trial[n] = rank[n] < number[:, None]
                _cover(trial, f, costs)
                loaded = model.loaded(trial, f)
                cost = float(loaded.cost(trial).sum())
                if cost < cheapest:
                    view, now, cheapest = trial, loaded, cost
        if cheapest == before:
            break
    return view


def _budgets(model: LayerCostModel, f: Floats, cap: Ints) -> Bools:
    if model.tables.hit.shape != f.shape:
        raise ValueError(f"model is for counts of {model.tables.hit.shape}, got {f.shape}")
    servers, layers, experts = f.shape
    order = np.argsort(-f, axis=2, kind="stable")
    costs = np.stack([model.prefix_costs(n, order[n]) for n in range(servers)])
    room = np.minimum(cap, layers * experts)
    number = np.stack([kernel.knapsack(costs[n], int(room[n])) for n in range(servers)])
    owned = number.copy()
    _own_layers(owned, costs, room)
    best, cheapest = np.zeros(f.shape, dtype=np.bool_), np.inf
    for budgets in (owned, number):
        view = np.argsort(order, axis=2) < budgets[:, :, None]
        _cover(view, f, costs)
        cost = float(model.cost(view).sum())
        if cost < cheapest:
            best, cheapest = view, cost
    return best


def _own_layers(number: Ints, costs: Floats, room: Ints) -> None:
    """Give layers that no server holds whole an owner, while one has room; changes ``number``.

    The owner is the server whose budgets then cost least more, with the layers kept whole that
    only it holds so. Single experts moved in afterwards would leave such layers in pieces, which
    cost almost as much as layers that are not there at all.
    """
    servers, layers = number.shape
    whole = costs.shape[2] - 1
    every = np.arange(layers)
    for layer in range(layers):
        full = number == whole
        if full[:, layer].any():
            continue
        best, owner, chosen = np.inf, -1, number[0]
        for n in range(servers):
            forced = full[n] & (full.sum(axis=0) == 1)
            forced[layer] = True
            if forced.sum() * whole > room[n]:
                continue
            bound = costs[n].copy()
            bound[forced, :whole] = np.inf
            sizes = kernel.knapsack(bound, int(room[n]))
            more = costs[n, every, sizes].sum() - costs[n, every, number[n]].sum()
            if more < best:
                best, owner, chosen = more, n, sizes
        if owner >= 0:
            number[owner] = chosen


def _cover(view: Bools, f: Floats, costs: Floats) -> None:
    """Place missing experts for duplicates, the least loss first; changes ``view``.

    The loss of a layer that gives up its least frequent duplicate is taken as that of holding one
    expert less.
    """
    copies = view.sum(axis=0)
    number = view.sum(axis=2)
    missing = np.argwhere(copies == 0)
    for layer, e in missing[np.argsort(-f.sum(axis=0)[tuple(missing.T)], kind="stable")]:
        c = np.maximum(number, 1)
        loss = (
            np.take_along_axis(costs, (c - 1)[:, :, None], axis=2)[:, :, 0]
            - (np.take_along_axis(costs, c[:, :, None], axis=2)[:, :, 0])
        )
        loss = np.where((view & (copies > 1)).any(axis=2), loss, np.inf)
        # Of equal losses the server that uses the missing expert most.
        n, x_layer = np.unravel_index(
            np.lexsort((np.repeat(-f[:, layer, e], f.shape[1]), loss.ravel()))[0], loss.shape
        )
        spare = view[n, x_layer] & (copies[x_layer] > 1)
        x = int(np.argmin(np.where(spare, f[n, x_layer], np.inf)))
        view[n, x_layer, x], view[n, layer, e] = False, True
        copies[x_layer, x] -= 1
        copies[layer, e] += 1
        number[n, x_layer] -= 1
        number[n, layer] += 1
