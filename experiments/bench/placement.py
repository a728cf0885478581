"""Speed of the placement simulator by size of the cluster, and time of the planning algorithms.

Every server gets the same load; experts have as many copies as fit, so that the share of remote
calls is about the same at every size. Plans are made for the counts at the start of an episode of
`edge_hetero`, 3 servers with 1,664 experts.

    OMP_NUM_THREADS=1 servegym bench placement

It writes the table ``bench``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.baselines.expert_placement.eplb import eplb, eplb_global
from servegym.baselines.expert_placement.latency_search import latency_dp
from servegym.baselines.expert_placement.linear_program import proxy_optimum
from servegym.baselines.expert_placement.prism import prism
from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.envs.expert_placement.cluster import scenario_cluster
from servegym.envs.expert_placement.config import build_problem
from servegym.envs.expert_placement.core import PlacementEpisode
from servegym.envs.expert_placement.simulator import (
    Requests,
    Simulator,
    make_prompts,
    uniform_placement,
)
from servegym.envs.workloads.activations import make_toy_activations
from servegym.experiments.bench.timing import bench_options, report, row, seconds


def filled_placement(cluster, seed=0):
    """Every expert once, and random copies in all other slots."""
    rng = np.random.default_rng(seed)
    z = uniform_placement(cluster).reshape(cluster.num_gpus, -1)
    for g in range(cluster.num_gpus):
        free = np.flatnonzero(z[g] == 0)
        z[g, rng.permutation(free)[: cluster.slots[g] - int(z[g].sum())]] = 1
    return z.reshape(-1, cluster.layers, cluster.experts)


def measure(name: str, messages: str, requests: int, gap_s: float) -> float:
    """Expert calls a second of processor time.

    Args:
        name: Scenario of the cluster.
        messages: ``"per_server"`` or ``"per_expert"``.
        requests: Requests of each server.
        gap_s: Mean seconds between the arrivals at a server.
    """
    cluster = scenario_cluster(name, messages=messages)
    toy = make_toy_activations(
        prompts=40, layers=cluster.layers, experts=cluster.experts, top_k=cluster.top_k, seed=0
    )
    prompts = make_prompts(toy.tokens, toy.counts, toy.bank, toy.bank_start, cluster.top_k)
    rng = np.random.default_rng(0)
    count = requests * cluster.num_servers
    load = Requests(
        home=rng.integers(0, cluster.num_servers, count),
        arrival=np.cumsum(rng.exponential(gap_s / cluster.num_servers, count)),
        prompt=rng.integers(0, len(toy.tokens), count),
        outputs=np.full(count, 20),
        offset=rng.integers(0, 1 << 16, count),
    )
    simulator = Simulator(cluster, prompts)
    placement = filled_placement(cluster)
    best = np.inf
    for _ in range(3):  # the first one compiles
        simulator.begin(load, placement)
        best = min(best, seconds(simulator.run))
    return int(simulator.state.meta[0]["calls"]) / best


def planning_ms(episodes: int = 3, scenario: str = "edge_hetero") -> dict[str, list[float]]:
    """Milliseconds of CPU time that planning takes, for the first counts of some episodes.

    ``proxy_optimum`` is the exact linear program of Eq. 2.
    """
    problem = build_problem(scenario=scenario, action_mode="placement")
    described = PlacementSystem.from_problem(problem)
    slots, home = described.slots, described.gpu_server
    methods = {
        "prism": lambda counts: prism(counts, slots, home),
        "eplb_global": lambda counts: eplb_global(counts, slots, home),
        "proxy_optimum": lambda counts: proxy_optimum(counts, slots, home),
        "latency_dp": lambda counts: latency_dp(
            described.layer_cost_model(counts), counts, slots, home
        ),
    }
    spent: dict[str, list[float]] = {name: [] for name in methods}
    for seed in range(-1, episodes):  # the first one compiles
        system = PlacementEpisode(problem)
        system.begin(np.random.default_rng(max(seed, 0)))
        counts = system.counts().astype(np.float64)
        for name, method in methods.items():
            taken = seconds(lambda method=method, counts=counts: method(counts))
            if seed >= 0:
                spent[name].append(1e3 * taken)
    return spent


def largest_case() -> tuple[int, float, float]:
    """An episode of 256 GPUs and about 7,200 requests with EPLB's placement.

    Returns:
        Requests, CPU seconds of planning and of simulating.
    """
    problem = build_problem(scenario="scale_256", epochs=1, split="eval")
    system = PlacementEpisode(problem)
    spent = []
    for _ in range(2):  # the first one compiles
        system.begin(np.random.default_rng(0))
        start = time.process_time()
        z = eplb(system.counts(), problem.cluster.slots, problem.cluster.gpu_server)
        planned = time.process_time()
        system.advance(z.astype(np.uint8))
        spent = [planned - start, time.process_time() - planned]
    return int(system.kpis()["requests"]), spent[0], spent[1]


def call_rates(gpus: Sequence[int], requests: int, gap_s: float) -> list[dict[str, Any]]:
    """Rows: calls a second in the smallest cluster beside a sort, in larger ones beside it.

    Args:
        gpus: Sizes, a key of `SCALES` each, the smallest first.
        requests: Requests of each server, or more.
        gap_s: Mean seconds between the arrivals at a server.
    """
    numbers = np.random.default_rng(0).random(1_000_000)
    sorts = [len(numbers) / seconds(lambda: np.sort(numbers)) for _ in range(9)]
    rows = []
    for messages in ("per_server", "per_expert"):
        yardstick: tuple[str, list[float]] = "sorting random numbers, numbers", sorts
        for size in gpus:
            name = f"scale_{size}"
            each = max(requests, 600 // scenario_cluster(name).num_servers)
            rate = [measure(name, messages, each, gap_s)]
            what = f"expert calls, {messages}, {size} GPUs"
            rows.append(row(what, rate, "1/s", yardstick))
            if size == gpus[0]:
                yardstick = what, rate
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, print it and write the table ``bench``.

    Args:
        argv: The command line; ``sys.argv`` by default.

    Returns:
        0.
    """
    options = bench_options("placement", __doc__, argv)
    found = call_rates((4,), 2, 10.0) if options.quick else call_rates((4, 256), 15, 10.0)
    if not options.quick:
        count, planning, simulating = largest_case()
        what = f"256 GPUs, {count} requests"
        found.append(row(f"{what}, plan of eplb", [planning], "s"))
        found.append(row(f"{what}, simulation", [simulating], "s"))
    for name, taken in planning_ms(1 if options.quick else 3).items():
        found.append(row(f"plan of {name}, 3 servers, 1,664 experts", taken, "ms"))
    report(options, found)
    return 0


if __name__ == "__main__":
    run_main(main)
