"""Load balancing by replicas on servers of different memory."""

import numpy as np

from servegym.baselines.expert_placement.eplb import eplb, eplb_global
from servegym.baselines.expert_placement.feasibility import server_view
from servegym.baselines.expert_placement.heuristics import smartmoe

ONE_TWO = np.array([0, 1, 2, 2])


def balancedness(loads, copies):
    """Mean over layers of mean GPU load / highest, of loads (L, E) and copies (G, L, E)."""
    load = (copies * loads / copies.sum(axis=0)).sum(axis=2)
    return (load.mean(axis=0) / load.max(axis=0)).mean()


def test_refinement_beats_packing_where_swaps_help():
    # Heaviest-first gives 3 + 2 + 2 against 3 + 2 + 0; the optimum is 6 on each.
    loads = np.array([[3.0, 3, 2, 2, 2, 0]])
    z = eplb_global(loads[None], [3, 3], [0, 0])
    assert balancedness(loads, z) == 1.0


def test_a_copy_goes_to_the_free_slot():
    loads = np.array([[8.0, 2, 2]])
    z = eplb_global(loads[None], [2, 2], [0, 0])
    assert z[:, 0, 0].all()
    assert balancedness(loads, z) == 1.0


def test_heterogeneous_eplb_balances_and_does_not_see_who_asks():
    rng = np.random.default_rng(2)
    p = rng.dirichlet(np.full(64, 0.3), size=(3, 26))
    counts = np.stack([[rng.multinomial(5000, q) for q in server] for server in p])
    slots = np.array([543, 543, 543, 693])
    loads = counts.sum(axis=0)
    for algorithm, least in ((eplb, 0.85), (eplb_global, 0.95), (smartmoe, 0.95)):
        z = algorithm(counts, slots, ONE_TWO)
        assert z.sum() == (1664 if algorithm is smartmoe else slots.sum())
        assert balancedness(loads, z) > least
        view = server_view(z, ONE_TWO)
        remote, shuffled = (np.sum(seen, where=~view) for seen in (counts, counts[::-1]))
        assert abs(remote - shuffled) < 0.05 * counts.sum()
