"""One placement for all times: annealed by estimated latency, chosen and refined by simulation.

The candidates are simple placements and some annealed by the estimate of `link_queues`, with
several factors on what links wait. Each serves the same recorded requests in the simulator, and the
fastest is taken. Then layers of it are exchanged two by two, as long as that gains. Nothing of the
episode to come is used: prompts and task shares are those that an operator has recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from servegym.baselines.expert_placement.feasibility import Bools, assign_gpus, server_view
from servegym.baselines.expert_placement.heuristics import whole_layer
from servegym.baselines.expert_placement.linear_program import proxy_optimum
from servegym.baselines.expert_placement.link_queues import LinkQueueModel
from servegym.baselines.expert_placement.prism import prism
from servegym.baselines.expert_placement.simulation_search import SimulatedLatency

if TYPE_CHECKING:
    from servegym.baselines.expert_placement.system import PlacementSystem

HEURISTICS = whole_layer, prism, proxy_optimum
WAITS = (0.1, 0.3, 1.0)
"""Factors on the waiting time of a queue with random arrivals that are tried."""
TRIES, SWAPS = 3, 160
"""Annealed placements of each factor, exchanges of two layers at last."""
MOST_STEPS, STEPS_EACH = 3_000_000, 600
"""Proposals of an annealing at most, and for every expert of every server."""
REQUESTS, SHORT = 2000, 300
"""Requests that every candidate serves, and those of every exchange; more for many servers."""
MOST_SERVERS = 8
"""Larger clusters start from a heuristic: their estimate takes too long."""


def best_start(
    system: PlacementSystem,
    *,
    tries: int = TRIES,
    steps: int | None = None,
    swaps: int = SWAPS,
    seed: int = 0,
) -> Bools:
    """The fastest of the heuristics and of the annealed placements on recorded requests.

    Args:
        system: The cluster, its recorded prompts and its load.
        tries: Annealed placements of each of `WAITS`.
        steps: Proposals of one annealing; by default `STEPS_EACH` for every expert of every
            server, `MOST_STEPS` at most.
        swaps: Exchanges of two layers to try at last.
        seed: Of everything drawn.

    Returns:
        bool (N, L, E), the experts of each server.
    """
    c = system.cluster
    if steps is None:
        steps = min(MOST_STEPS, STEPS_EACH * c.num_servers * c.layers * c.experts)
    model = LinkQueueModel(system, seed=seed)
    draw = np.random.default_rng([seed, 1]).integers(1 << 31, size=2)
    objective = _objective(system, REQUESTS, int(draw[0]))

    def seconds(held: Bools) -> float:
        return _simulate(objective, system, model.counts, held)

    views = [server_view(f(model.counts, c.slots, c.gpu_server), c.gpu_server) for f in HEURISTICS]
    best = min(views, key=seconds)
    if c.num_servers <= MOST_SERVERS:
        starts = [best]
        starts += [
            model.anneal(best, wait, steps, seed + k) for wait in WAITS for k in range(tries)
        ]
        best = min(starts, key=seconds)
    short = _objective(system, SHORT, int(draw[1]))
    return climb(short, system, best, model.counts, swaps, seed)[0]


def _objective(system: PlacementSystem, requests: int, seed: int) -> SimulatedLatency:
    number = max(requests, 10 * system.cluster.num_servers)
    return SimulatedLatency(system, system.long_run_shares, number, seed=seed)


def _simulate(
    objective: SimulatedLatency, system: PlacementSystem, counts: Any, held: Bools
) -> float:
    return objective.latency_s(assign_gpus(held, counts, system.slots, system.gpu_server))


def climb(
    objective: SimulatedLatency,
    system: PlacementSystem,
    held: Bools,
    counts: Any,
    swaps: int,
    seed: int,
) -> tuple[Bools, int]:
    """Exchange layers of a placement two by two where that is faster in the simulator.

    Two layers change places at all servers: who holds how many experts of them, the most used
    first.

    Args:
        objective: The requests, the same for all proposals.
        system: The cluster.
        held: Bool (N, L, E), covered.
        counts: (N, L, E) assignments, by which experts are ordered.
        swaps: Exchanges to try.
        seed: Of the exchanges.

    Returns:
        The placement (N, L, E) and the number of exchanges accepted.
    """
    layers = held.shape[1]
    if swaps < 1 or layers < 2:
        return held, 0
    random = np.random.default_rng([seed, 2])
    order = np.argsort(-counts.sum(axis=0), axis=1, kind="stable")
    least, gained = _simulate(objective, system, counts, held), 0
    for _ in range(swaps):
        a, b = random.choice(layers, 2, replace=False)
        new = held.copy()
        new[:, a, order[a]] = held[:, b, order[b]]
        new[:, b, order[b]] = held[:, a, order[a]]
        seconds = _simulate(objective, system, counts, new)
        if seconds < least:
            held, least, gained = new, seconds, gained + 1
    return held, gained
