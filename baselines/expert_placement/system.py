"""What an operator knows about a cluster before an episode."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from servegym.baselines.expert_placement.feasibility import Floats, Ints
from servegym.baselines.protocol import SystemDescription
from servegym.envs.workloads.expert_sets import set_bits

if TYPE_CHECKING:
    from servegym.envs.expert_placement.arguments import PlacementArguments
    from servegym.envs.expert_placement.cluster import Cluster
    from servegym.envs.expert_placement.config import Problem
    from servegym.envs.expert_placement.simulator import Prompts


@dataclass(frozen=True, eq=False)
class PlacementSystem(SystemDescription):
    """Static description of a cluster, its load and routing recorded before.

    It holds nothing of an episode: the token rows are of prompts that no episode draws.

    Attributes:
        arguments: Those of the environment; ``epoch_s`` is the horizon of Eq. 4.
        cluster: Servers, links, times and sizes.
        interarrival_s: (N,) mean seconds between the requests of a server.
        prompts: The recorded prompts.
        task_prompts: For each task, the recorded prompts, as a rule those that no episode draws.
        long_run_shares: (N, K) shares of the tasks in each server's requests in the long run.
        simulator_options: Keywords of `Simulator` that choose copies, servers and where layers run.
        task_counts: (K, L, E) mean assignments of one request of each task.
        tasks: Names of the tasks.
    """

    family = "expert_placement"

    arguments: PlacementArguments
    cluster: Cluster
    interarrival_s: Floats
    prompts: Prompts
    task_prompts: tuple[Ints, ...]
    long_run_shares: Floats
    simulator_options: Mapping[str, Any]
    task_counts: Floats
    tasks: tuple[str, ...]

    @classmethod
    def from_problem(cls, problem: Problem) -> PlacementSystem:
        """The description of an environment's problem (``env.unwrapped.problem``)."""
        prompts, of_tasks = problem.prompts, problem.history_rows
        mean_output = float(np.mean(problem.arguments.output_range))
        counts = []
        for of_task in of_tasks:
            bank = np.concatenate(
                [prompts.bank[prompts.bank_start[p] : prompts.bank_start[p + 1]] for p in of_task]
            )
            decode = set_bits(bank, problem.cluster.experts).mean(axis=0)
            counts.append(prompts.counts[of_task].mean(axis=0) + (mean_output - 1.0) * decode)
        tasks, servers = len(of_tasks), problem.cluster.num_servers
        shares = np.full((servers, tasks), 1.0 / tasks)
        if problem.arguments.rotate_s == 0:
            shares = np.eye(tasks)[np.arange(servers) % tasks]
        return cls(
            cluster=problem.cluster,
            arguments=problem.arguments,
            interarrival_s=problem.interarrival_s,
            prompts=prompts,
            task_prompts=of_tasks,
            long_run_shares=shares,
            simulator_options=problem.simulator_options | {"serving": "collaborative"},
            task_counts=np.stack(counts),
            tasks=problem.tasks,
        )

    @property
    def setting(self) -> str:
        """Sixteen hexadecimal digits, the same for systems on which a start means the same.

        They depend on slots, links, message costs, the speed of GPUs and host channels, the load
        and the tasks.
        """
        c = self.cluster
        numbers = (
            c.slots,
            c.gpu_server,
            c.link_bytes_s,
            c.latency_s,
            self.interarrival_s,
            c.expert_base_s,
            c.expert_token_s,
            c.dense_base_s,
            c.dense_token_s,
            [c.layers, c.experts, c.message_cost_s, c.pcie_bytes_s, c.pcie_latency_s],
        )
        digest = hashlib.sha256()
        for part in numbers:
            digest.update(np.ascontiguousarray(part, dtype=np.float64).tobytes())
        names = (c.model, c.link_model, c.messages, self.arguments.migration_source, *self.tasks)
        digest.update(" ".join(map(str, names)).encode())
        return digest.hexdigest()[:16]

    def load_bytes_s(self) -> Floats:
        """(G,) speed at which a GPU loads experts, Eq. 3.

        From the host, its channel; over the network, the mean rate of the links to its server.
        """
        c = self.cluster
        speed = np.full(c.num_gpus, c.pcie_bytes_s)
        if self.arguments.migration_source == "network" and c.num_servers > 1:
            rate = np.where(np.eye(c.num_servers, dtype=bool), 0.0, c.link_bytes_s)
            speed = np.minimum(speed, (rate.sum(axis=0) / (c.num_servers - 1))[c.gpu_server])
        return speed
