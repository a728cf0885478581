"""Placements compared by the simulator itself, on requests like those seen, and a search by it.

The requests are recorded prompts that no episode draws, of the tasks that the servers' counts
show, at the arrival rates an operator knows: nothing of the requests to come.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from servegym.baselines.expert_placement.feasibility import Bools, Floats, Ints, reassign_gpus
from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.envs.expert_placement.cluster import check_placement, server_view
from servegym.envs.expert_placement.simulator import Requests, Simulator

# Shares of a layer that a proposal moves; whole layers are proposed half of the time besides.
_SHARES = (1.0, 0.5, 0.25, 0.125, 0.0)


class SimulatedLatency:
    """The engine on one fixed list of requests, the same for every placement.

    Args:
        system: Cluster, recorded prompts and rates.
        shares: (N, K) task shares of each server's requests, as `PlacementSystem.task_shares`.
        number: Requests of all servers.
        seed: Of the draw.

    Raises:
        ValueError: If number is below 1 or shares has the wrong shape.

    Attributes:
        requests: The requests, from an empty system.
    """

    def __init__(
        self, system: PlacementSystem, shares: Floats, number: int, *, seed: int = 0
    ) -> None:
        servers, tasks = system.cluster.num_servers, len(system.task_prompts)
        if number < 1:
            raise ValueError(f"number must be at least 1, got {number!r}")
        if np.shape(shares) != (servers, tasks):
            raise ValueError(f"shares must have shape {(servers, tasks)}, got {np.shape(shares)}")
        rng = np.random.default_rng(seed)
        rate = 1.0 / system.interarrival_s
        home = rng.choice(servers, number, p=rate / rate.sum())
        bounds = np.cumsum(shares, axis=1)
        draws = rng.random(number) * bounds[home, -1]
        task = np.minimum((draws[:, None] >= bounds[home]).sum(axis=1), tasks - 1)
        at = rng.random(number)
        prompt = np.array(
            [
                system.task_prompts[t][int(x * len(system.task_prompts[t]))]
                for t, x in zip(task, at, strict=True)
            ]
        )
        low, high = system.output_range
        self.requests = Requests(
            home=home,
            arrival=np.cumsum(rng.exponential(1.0 / rate.sum(), number)),
            prompt=prompt,
            outputs=rng.integers(low, high + 1, number),
            offset=rng.integers(0, 1 << 16, number),
        )
        self._simulator = Simulator(system.cluster, system.prompts, **system.simulator_options)

    @classmethod
    def of_counts(
        cls, system: PlacementSystem, counts: Floats, number: int, *, seed: int = 0
    ) -> SimulatedLatency:
        """Requests of the tasks that these counts (N, L, E) show; arguments of the class."""
        shares = system.task_shares(np.asarray(counts, dtype=np.float64))
        return cls(system, shares, number, seed=seed)

    def latency_s(self, placement: ArrayLike, then: ArrayLike | None = None) -> float:
        """Mean seconds from arrival to the last token under a feasible placement (G, L, E).

        Args:
            placement: In place at the start.
            then: Placement to move to at once, the loads carried out on the same resources.
        """
        simulator = self._simulator
        simulator.begin(self.requests, np.asarray(placement, dtype=np.uint8))
        if then is not None:
            simulator.adopt(np.asarray(then, dtype=np.uint8))
        simulator.run()
        return float(simulator.latencies().mean())


def exchange(
    view: Bools, counts: Floats, cap: Ints, n: int, gains: int, gives: int, number: int
) -> Bools | None:
    """One server takes experts of one layer in place of experts of another.

    It takes up to ``number`` of its most frequent missing experts of layer ``gains``; where it has
    no free slot it gives up its least frequent ones of layer ``gives``. An expert that would then
    be nowhere goes to another server, to a free slot or in place of an expert that others have too:
    of layer ``gains`` first, so that two servers swap layers, then the least frequent.

    Returns:
        The new view (N, L, E), covered and within ``cap`` (N,) as ``view``; None if there is
        nothing to exchange.
    """
    missing, local = np.flatnonzero(~view[n, gains]), np.flatnonzero(view[n, gives])
    free = int(cap[n] - view[n].sum())
    number = min(number, missing.size, local.size + free)
    if number < 1:
        return None
    new = view.copy()
    take = missing[np.argsort(-counts[n, gains, missing], kind="stable")[:number]]
    drop = local[np.argsort(counts[n, gives, local], kind="stable")[: max(number - free, 0)]]
    new[n, gives, drop] = False
    new[n, gains, take] = True
    copies = new.sum(axis=0)
    uncovered = [int(e) for e in drop if copies[gives, e] == 0]
    if not uncovered:
        return new
    room = cap - new.sum(axis=(1, 2))
    at = np.nonzero(new & (copies > 1))
    others = at[0] != n
    m, layer, expert = (x[others] for x in at)
    order = iter(np.lexsort((counts[m, layer, expert], layer != gains)).tolist())
    for e in uncovered:
        to = int(np.argmax(np.where(np.arange(room.size) == n, -1, room)))
        if room[to] > 0:
            room[to] -= 1
        else:
            i = next((i for i in order if copies[layer[i], expert[i]] > 1), None)
            if i is None:
                return None
            to = int(m[i])
            new[to, layer[i], expert[i]] = False
            copies[layer[i], expert[i]] -= 1
        new[to, gives, e] = True
    return new


def _proposal(view: Bools, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """A server, the layer it gains, the layer it gives and the number of experts."""
    servers, layers, experts = view.shape
    n = int(rng.integers(servers))
    gains, gives = rng.choice(layers, 2, replace=False)
    number = max(int(experts * rng.choice(_SHARES)), 1)
    if rng.random() < 0.5:
        most = 2 * view[n].sum(axis=1) >= experts
        if most.any() and not most.all():
            gives = rng.choice(np.flatnonzero(most))
            gains, number = rng.choice(np.flatnonzero(~most)), experts
    return n, int(gains), int(gives), number


def latency_local_search(
    objective: SimulatedLatency,
    counts: ArrayLike,
    slots: ArrayLike,
    gpu_server: ArrayLike,
    starts: Sequence[ArrayLike],
    *,
    steps: int = 200,
    seed: int = 0,
) -> Bools:
    """Improve the best of some placements by `exchange`, every step measured by the engine.

    ``steps`` random exchanges are tried one after another and accepted if the simulated latency
    falls, so that the result is never worse in it than any of ``starts``, feasible (G, L, E). By
    ``counts`` (N, L, E) the experts of a layer are ordered.

    Returns:
        z, bool (G, L, E). Experts of the best start that stay on a server stay on their GPU.

    Raises:
        ValueError: If an argument is out of range or a start is not feasible.
    """
    if not starts:
        raise ValueError("starts is empty; give at least one placement")
    if steps < 0:
        raise ValueError(f"steps must be at least 0, got {steps!r}")
    f, room = np.asarray(counts, dtype=np.float64), np.asarray(slots, dtype=np.int64)
    home = np.asarray(gpu_server, dtype=np.int64)
    cap = np.bincount(home, room, f.shape[0]).astype(np.int64)
    plans = [check_placement(z, room).astype(np.bool_) for z in starts]
    measured = [objective.latency_s(z) for z in plans]
    least = min(measured)
    best = start = plans[measured.index(least)]
    if f.shape[1] < 2:
        return best
    view = server_view(best, home)
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        new = exchange(view, f, cap, *_proposal(view, rng))
        if new is None:
            continue
        z = reassign_gpus(new, start, f, room, home)
        seconds = objective.latency_s(z)
        if seconds < least:
            view, best, least = new, z, seconds
    return best
