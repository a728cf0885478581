"""One placement for all times: annealed by estimated latency, chosen and refined by simulation.

The candidates, simple placements and annealed ones, serve the same recorded requests in the
simulator; layers of the fastest are then exchanged two by two, as long as that gains. Prompts and
task shares are those that an operator has recorded: nothing of the episode to come is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from servegym.baselines.expert_placement.feasibility import Bools, Floats, assign_gpus
from servegym.baselines.expert_placement.heuristics import whole_layer
from servegym.baselines.expert_placement.kernel import link_queues as kernel
from servegym.baselines.expert_placement.linear_program import proxy_optimum
from servegym.baselines.expert_placement.prism import prism
from servegym.envs.expert_placement.simulator import Requests, Simulator
from servegym.envs.workloads.expert_sets import bit_sets, set_bits

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
TOKENS = 256
"""Recorded tokens of each server that the estimate looks at."""
HOT, COLD = 0.1, 3e-4
"""First and last temperature of the annealing, seconds."""


class LinkQueueModel:
    """An estimate of the latency of a cluster that serves its usual tasks.

    Each missing expert is called at the nearest server that holds it, and every link is a queue:
    the activations of a long prompt hold up the short messages of all decode steps behind them. How
    much is a factor that the estimate cannot know; `best_start` tries several by simulation.

    Attributes:
        counts: (N, L, E) mean assignments of a request of each server.
        tables: What the kernel reads, of `TOKENS` drawn tokens of each server.
    """

    def __init__(self, system: PlacementSystem, seed: int = 0) -> None:
        c, prompts, shares = system.cluster, system.prompts, system.long_run_shares
        random = np.random.default_rng(seed)
        decodes = float(np.mean(system.arguments.output_range)) - 1.0
        tables = [prompts.counts[of_task] for of_task in system.task_prompts]
        lengths = [prompts.tokens[of_task].astype(np.float64) for of_task in system.task_prompts]
        length = np.array([[x.mean(), (x**2).mean()] for x in lengths])
        rows, counts = [], []
        for share in shares:
            drawn = []
            for t in random.choice(len(share), TOKENS, p=share):
                prompt = random.choice(system.task_prompts[t])
                drawn.append(random.integers(*prompts.bank_start[prompt : prompt + 2]))
            rows.append(prompts.bank[drawn].T)
            of_prompt = sum(x * table.mean(axis=0) for x, table in zip(share, tables, strict=True))
            counts.append(of_prompt + decodes * set_bits(rows[-1], c.experts).mean(axis=1))
        some = np.array([(table > 0).mean(axis=0) for table in tables])
        work = 2.0 * c.pcie_latency_s + float(c.expert_base_s.mean())
        token, delay = c.activation_bytes / c.link_bytes_s, c.latency_s + c.latency_s.T + work
        trip = delay + token + token.T
        np.fill_diagonal(trip, -1.0)
        self.counts, self.experts = np.array(counts), c.experts
        load = np.zeros(len(shares), kernel.LOAD)
        load["rate"] = 1.0 / system.interarrival_s
        load["tokens"], load["tokens_squared"] = (shares @ length).T
        load["decode_steps"] = decodes
        self.tables = kernel.Tables(
            rows=np.ascontiguousarray(np.array(rows)),
            hit=np.ascontiguousarray(np.einsum("nk,kle->nle", shares, some)),
            near=np.argsort(trip, axis=1, kind="stable"),
            load=load,
            token=token,
            delay=delay,
            cost=float(c.message_cost_s),
            per_expert=c.messages == "per_expert",
        )

    def anneal(self, start: Bools, wait: float, steps: int, seed: int) -> Bools:
        """Improve a covered server view (N, L, E), see `kernel.link_queues.anneal`."""
        masks = bit_sets(start)
        kernel.anneal(self.tables, masks, wait, steps, HOT, COLD, seed)
        return set_bits(masks, self.experts)


class SimulatedLatency:
    """The engine on one fixed list of recorded requests, the same for every placement.

    Args:
        system: Cluster, recorded prompts, load and the long run's shares of the tasks.
        counts: (N, L, E) by which the experts of a server go to its GPUs.
        number: Requests of all servers; ten for each of them at least.
        seed: Of the draw.
    """

    def __init__(self, system: PlacementSystem, counts: Floats, number: int, seed: int) -> None:
        servers, tasks = system.long_run_shares.shape
        number = max(number, 10 * servers)
        rng = np.random.default_rng(seed)
        rate = 1.0 / system.interarrival_s
        home = rng.choice(servers, number, p=rate / rate.sum())
        bounds = np.cumsum(system.long_run_shares, axis=1)
        draws = rng.random(number) * bounds[home, -1]
        task = np.minimum((draws[:, None] >= bounds[home]).sum(axis=1), tasks - 1)
        at = rng.random(number)
        of_task = [system.task_prompts[t] for t in task]
        low, high = system.arguments.output_range
        self.requests = Requests(
            home=home,
            arrival=np.cumsum(rng.exponential(1.0 / rate.sum(), number)),
            prompt=np.array([p[int(x * len(p))] for p, x in zip(of_task, at, strict=True)]),
            outputs=rng.integers(low, high + 1, number),
            offset=rng.integers(0, 1 << 16, number),
        )
        self.cluster, self.counts = system.cluster, counts
        self.simulator = Simulator(system.cluster, system.prompts, **system.simulator_options)

    def seconds(self, view: Bools) -> float:
        """Mean seconds from arrival to the last token with experts (N, L, E) on the servers."""
        z = assign_gpus(view, self.counts, self.cluster.slots, self.cluster.gpu_server)
        self.simulator.begin(self.requests, z)
        self.simulator.run()
        return float(self.simulator.latencies().mean())


def best_start(
    system: PlacementSystem,
    *,
    tries: int = TRIES,
    steps: int | None = None,
    swaps: int = SWAPS,
    seed: int = 0,
) -> Bools:
    """The fastest of the heuristics and of the annealed placements on recorded requests.

    ``tries`` placements are annealed for each of `WAITS`, by ``steps`` proposals (by default
    `STEPS_EACH` for every expert of every server, `MOST_STEPS` at most), and ``swaps`` exchanges of
    two layers tried at last. Returns bool (N, L, E), the experts of each server.
    """
    c = system.cluster
    if steps is None:
        steps = min(MOST_STEPS, STEPS_EACH * c.num_servers * c.layers * c.experts)
    model = LinkQueueModel(system, seed)
    draw = np.random.default_rng([seed, 1]).integers(1 << 31, size=2)
    seconds = SimulatedLatency(system, model.counts, REQUESTS, int(draw[0])).seconds
    views = [c.server_view(f(model.counts, c.slots, c.gpu_server)) for f in HEURISTICS]
    best = min(views, key=seconds)
    if c.num_servers <= MOST_SERVERS:
        starts = [best]
        starts += [
            model.anneal(best, wait, steps, seed + k) for wait in WAITS for k in range(tries)
        ]
        best = min(starts, key=seconds)
    short = SimulatedLatency(system, model.counts, SHORT, int(draw[1]))
    return climb(short, best, swaps, seed)


def climb(objective: SimulatedLatency, view: Bools, swaps: int, seed: int) -> Bools:
    """Exchange layers of a placement two by two where that is faster in the simulator.

    Two layers change places at all servers: who holds how many experts of them, the most used
    first. ``swaps`` exchanges of ``view`` (N, L, E), covered, are tried on the same requests.
    """
    layers = view.shape[1]
    if swaps < 1 or layers < 2:
        return view
    random = np.random.default_rng([seed, 2])
    order = np.argsort(-objective.counts.sum(axis=0), axis=1, kind="stable")
    least = objective.seconds(view)
    for _ in range(swaps):
        a, b = random.choice(layers, 2, replace=False)
        new = view.copy()
        new[:, a, order[a]] = view[:, b, order[b]]
        new[:, b, order[b]] = view[:, a, order[a]]
        seconds = objective.seconds(new)
        if seconds < least:
            view, least = new, seconds
    return view
