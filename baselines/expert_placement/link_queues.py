"""Estimated latency of a whole placement, with a queue at every link, and annealing by it.

`layer_costs` adds up over servers and layers. Here each missing expert is called at the nearest
server that holds it, and every link is a queue: the activations of a long prompt hold up the short
messages of all decode steps behind them. How much is a factor that the estimate cannot know;
`initial_placement.best_start` tries several by simulation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from servegym.baselines.expert_placement.feasibility import Bools
from servegym.baselines.expert_placement.kernel import link_queues as kernel
from servegym.envs.workloads.expert_sets import bit_sets, set_bits

if TYPE_CHECKING:
    from servegym.baselines.expert_placement.system import PlacementSystem

HOT, COLD = 0.1, 3e-4
"""First and last temperature of the annealing, seconds."""


class LinkQueueModel:
    """The estimate of a cluster that serves its usual tasks.

    Args:
        system: Cluster, recorded prompts and load.
        tokens: Tokens of each server to look at.
        seed: Of their draw.

    Attributes:
        counts: (N, L, E) mean assignments of a request of each server.
    """

    def __init__(self, system: PlacementSystem, *, tokens: int = 256, seed: int = 0) -> None:
        if tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {tokens!r}")
        c, prompts, shares = system.cluster, system.prompts, system.long_run_shares
        random = np.random.default_rng(seed)
        decodes = max(system.output_tokens - 1.0, 0.0)
        tables = [prompts.counts[of_task] for of_task in system.task_prompts]
        lengths = [prompts.tokens[of_task].astype(np.float64) for of_task in system.task_prompts]
        length = np.array([[x.mean(), (x**2).mean()] for x in lengths])
        rows, counts = [], []
        for own in shares:
            drawn = []
            for t in random.choice(len(own), tokens, p=own):
                prompt = random.choice(system.task_prompts[t])
                drawn.append(random.integers(*prompts.bank_start[prompt : prompt + 2]))
            rows.append(prompts.bank[drawn].T)
            of_prompt = sum(x * table.mean(axis=0) for x, table in zip(own, tables, strict=True))
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

    def cost(self, held: Bools, wait: float) -> float:
        """Estimated seconds that remote experts add to a request.

        Args:
            held: (N, L, E), covered.
            wait: Factor on the waiting time of a queue with random arrivals.
        """
        masks = bit_sets(held)
        servers, layers = masks.shape
        calls = np.zeros((servers, layers, servers), kernel.CALLS)
        for n, layer in np.ndindex(servers, layers):
            kernel.remote_calls(self.tables, n, layer, masks, calls[n, layer])
        return float(kernel.estimate(self.tables, calls, wait))

    def anneal(self, start: Bools, wait: float, steps: int, seed: int) -> Bools:
        """Improve a covered server view (N, L, E), see `kernel.link_queues.anneal`."""
        masks = bit_sets(start)
        kernel.anneal(self.tables, masks, wait, steps, HOT, COLD, seed)
        return set_bits(masks, self.experts)
