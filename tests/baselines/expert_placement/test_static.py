"""Placement algorithms on arrays: invariants on random instances and known answers."""

import itertools

import numpy as np
import pytest

from servegym.baselines.expert_placement.eplb import eplb, eplb_global
from servegym.baselines.expert_placement.heuristics import (
    layer_chains,
    redundance,
    smartmoe,
    uniform,
    whole_layer,
)
from servegym.baselines.expert_placement.linear_program import proxy_optimum
from servegym.baselines.expert_placement.prism import prism

ALGORITHMS = [uniform, redundance, smartmoe, eplb, eplb_global, prism, whole_layer]
ALGORITHMS += [layer_chains, proxy_optimum]


def server_view(z, home):
    return np.stack([z[np.asarray(home) == n].any(axis=0) for n in range(max(home) + 1)])


def proxy(counts, held):
    """Eq. 2: assignments whose expert is not on the server they arrived at."""
    return float(np.sum(counts, where=~np.asarray(held, bool), dtype=np.float64))


def instance(seed):
    """A random feasible instance: tight, loose, several GPUs, servers without counts."""
    rng = np.random.default_rng(seed)
    servers, layers, experts = rng.integers(1, 5), rng.integers(1, 7), rng.integers(1, 13)
    gpus = rng.integers(1, 4, servers)
    home = np.repeat(np.arange(servers), gpus)
    size = layers * experts
    while True:
        slots = rng.integers(0, max(2, int(2.2 * size / home.size) + 1), home.size)
        cap = np.bincount(home, slots, servers)
        if np.minimum(cap, size).sum() >= size:
            break
    p = rng.dirichlet(np.full(experts, 0.3), size=(servers, layers))
    counts = rng.multinomial(50 * rng.integers(1, 9, (servers, 1)), p)
    if seed % 5 == 0:
        counts[0] = 0
    if seed % 7 == 0:
        counts[:, 0] = 0
    return counts, slots, home


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.__name__)
def test_every_placement_covers_and_fits(algorithm):
    for seed in range(36):
        counts, slots, home = instance(seed)
        z = algorithm(counts, slots, home)
        assert z.shape == (slots.size, *counts.shape[1:]) and z.dtype == bool
        assert z.any(axis=0).all() and (z.sum(axis=(1, 2)) <= slots).all()
        again = algorithm(counts, slots, home)
        assert (z == again).all()


@pytest.mark.parametrize("algorithm", [prism, whole_layer, layer_chains, proxy_optimum])
def test_servers_hold_no_expert_twice_and_waste_no_slot(algorithm):
    for seed in range(36):
        counts, slots, home = instance(seed)
        z = algorithm(counts, slots, home)
        held = server_view(z, home)
        assert z.sum() == held.sum()
        cap = np.bincount(home, slots).astype(int)
        assert (held.sum((1, 2)) == np.minimum(cap, held[0].size)).all()


def whole_layers_of(slots, home, layers=26, experts=4):
    """The layers that each server holds whole, of `layer_chains`, by what is whole for sure."""
    slots = np.asarray(slots) * experts
    z = layer_chains(np.zeros((max(home) + 1, layers, experts)), slots, np.asarray(home))
    return [np.flatnonzero(held.all(axis=1)).tolist() for held in server_view(z, home)]


def test_chains_of_whole_layers():
    """Room for 8, 8 and 19 of 26 layers: the largest begins, both others can end the chain."""
    tail, head = list(range(18, 26)), list(range(19))
    assert whole_layers_of([8, 8, 8, 11], [0, 1, 2, 2]) == [tail, tail, head]
    # Twice as many servers: two chains of two servers, the two others repeat their ends.
    found = whole_layers_of([8, 8, 19, 8, 8, 19], range(6))
    assert found == [tail, tail, head, tail, tail, head]
    # A server that holds all is a chain of its own; the small ones have no stage to repeat.
    found = whole_layers_of([26, 3, 30, 3], range(4))
    assert found[0] == found[2] == list(range(26)) and len(found[1]) == len(found[3]) == 3


def test_optimum_bounds_every_placement_and_enumeration_agrees():
    for seed in range(36):
        counts, slots, home = instance(seed)
        best = proxy(counts, server_view(proxy_optimum(counts, slots, home), home))
        for algorithm in ALGORITHMS:
            assert best <= proxy(counts, server_view(algorithm(counts, slots, home), home))
    rng = np.random.default_rng(3)
    for _ in range(10):
        counts = rng.integers(0, 9, (2, 2, 2))
        slots = np.array([2, 3])
        choices = [
            [np.isin(np.arange(4), c) for c in itertools.combinations(range(4), k)] for k in slots
        ]
        every = [
            proxy(counts, held.reshape(2, 2, 2))
            for a in choices[0]
            for b in choices[1]
            if (held := np.stack([a, b])).any(0).all()
        ]
        z = proxy_optimum(counts, slots, [0, 1])
        assert proxy(counts, server_view(z, [0, 1])) == min(every)


@pytest.mark.parametrize(
    "loads, slots",
    [
        # Heaviest-first gives 3 + 2 + 2 against 3 + 2 + 0; the optimum is 6 on each.
        ([3.0, 3, 2, 2, 2, 0], 3),
        # A copy of the first goes to the free slot.
        ([8.0, 2, 2], 2),
    ],
)
def test_refinement_beats_packing(loads, slots):
    loads = np.array(loads)
    on = eplb_global(loads[None, None], [slots, slots], [0, 0])[:, 0]
    each = (on * loads / on.sum(axis=0)).sum(axis=1)
    assert each[0] == each[1]
