"""Speed of the placement simulator by size of the cluster, and time of the planning algorithms.

Every server gets the same load; experts have as many copies as fit, so that the share of remote
calls is about the same at every size. The growth of a call's cost from the smallest to the largest
cluster is the product of four parts: more events a call, since messages go to more servers; the
size itself, measured with as few requests under way as in the small cluster and without a choice
among copies; the choice among copies; and many requests at once (a longer queue of events, memory
further away). With ``replica_choice="consolidate"`` the calls of a layer share messages, so that
there are fewer events.

Plans are made for the counts at the start of an episode of `edge_hetero`, 3 servers with 1,664
experts.

    OMP_NUM_THREADS=1 servegym bench placement

It writes the table ``bench``, and ``bench_sizes`` with the parts of a call's cost.
"""

from __future__ import annotations

import argparse
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
from servegym.envs.expert_placement.cluster import SCALES, scenario_cluster
from servegym.envs.expert_placement.config import build_problem
from servegym.envs.expert_placement.core import PlacementEpisode
from servegym.envs.expert_placement.simulator import (
    Requests,
    Simulator,
    make_prompts,
    uniform_placement,
)
from servegym.envs.workloads.activations import make_toy_activations
from servegym.experiments.bench.timing import bench_options, report, save, seconds
from servegym.experiments.bench.timing import row as bench_row
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.evaluation.tables import note

Row = dict[str, Any]


def filled_placement(cluster, seed=0):
    """Every expert once, and random copies in all other slots."""
    rng = np.random.default_rng(seed)
    z = uniform_placement(cluster).reshape(cluster.num_gpus, -1)
    for g in range(cluster.num_gpus):
        free = np.flatnonzero(z[g] == 0)
        z[g, rng.permutation(free)[: cluster.slots[g] - int(z[g].sum())]] = 1
    return z.reshape(-1, cluster.layers, cluster.experts)


def measure(
    name: str,
    messages: str,
    requests: int,
    gap_s: float,
    seed: int = 0,
    looks: int = 8,
    choice: str = "least_finish",
):
    """Rates a second of CPU time, the share of remote calls, mean latency, requests under way.

    A remote call looks at ``looks`` copies of its expert at most and goes to one by ``choice``.
    """
    cluster = scenario_cluster(name, messages=messages)
    toy = make_toy_activations(
        prompts=40, layers=cluster.layers, experts=cluster.experts, top_k=cluster.top_k, seed=seed
    )
    prompts = make_prompts(toy.tokens, toy.counts, toy.bank, toy.bank_start, cluster.top_k)
    rng = np.random.default_rng(seed)
    count = requests * cluster.num_servers
    load = Requests(
        home=rng.integers(0, cluster.num_servers, count),
        arrival=np.cumsum(rng.exponential(gap_s / cluster.num_servers, count)),
        prompt=rng.integers(0, len(toy.tokens), count),
        outputs=np.full(count, 20),
        offset=rng.integers(0, 1 << 16, count),
    )
    simulator = Simulator(cluster, prompts, choice, replica_candidates=looks)
    placement = filled_placement(cluster)
    best = np.inf
    for _ in range(3):  # the first one compiles
        simulator.begin(load, placement)
        best = min(best, seconds(simulator.run))
    meta = simulator.state.meta[0]
    remote = int(simulator.state.server["all_remote_calls"].sum()) / int(meta["calls"])
    calls, events = int(meta["calls"]), int(meta["events"])
    return {
        "calls_per_s": calls / best,
        "events_per_s": events / best,
        "requests_per_s": count / best,
        "remote_calls": remote,
        "ns_per_call": 1e9 * best / calls,
        "ns_per_event": 1e9 * best / events,
        "events_per_call": events / calls,
        "latency_s": float(simulator.latencies().mean()),
        "under_way": float(simulator.latencies().sum()) / simulator.now,
    }


def decomposition(messages: str, small: Row, blind: Row, quiet: Row, large: Row) -> dict[str, Any]:
    """The growth of the cost of a call as a product, see the module."""
    steps = (
        (small, large, "events_per_call", "events a call"),
        (small, blind, "ns_per_event", f"the size, with {blind['under_way']:.1f} requests at once"),
        (blind, quiet, "ns_per_event", f"a choice among {quiet['looks']} copies"),
        (quiet, large, "ns_per_event", f"{large['under_way']:.0f} requests at once"),
    )
    factors = [after[key] / before[key] for before, after, key, _ in steps]
    parts = [f"{f:.2f} ({what})" for f, (*_, what) in zip(factors, steps, strict=True)]
    total = large["ns_per_call"] / small["ns_per_call"]
    return note(
        f"{messages}, {small['gpus']} to {large['gpus']} GPUs: a call costs {total:.2f} x = "
        f"{' x '.join(parts)}.",
        messages=messages,
        gpus=[small["gpus"], large["gpus"]],
        growth=total,
        factors=factors,
    )


def consolidated(apart: Sequence[Row], joined: Sequence[Row]) -> dict[str, Any]:
    """What sharing messages changes in the largest cluster, in words.

    Args:
        apart: Rows of all sizes with one's own choice for each call.
        joined: Rows of the same sizes with consolidated calls.
    """
    least = min(apart, key=lambda row: row["gpus"])
    one, other = (max(rows, key=lambda row: row["gpus"]) for rows in (apart, joined))
    growth = [row["ns_per_call"] / least["ns_per_call"] for row in (one, other)]
    return note(
        f"per_server, {one['gpus']} GPUs: consolidated calls take {other['events_per_call']:.2f} "
        f"events in place of {one['events_per_call']:.2f}, cost {growth[1]:.2f} x a call at "
        f"{least['gpus']} GPUs in place of {growth[0]:.2f} x, and the mean latency of requests is "
        f"{other['latency_s']:.2f} s in place of {one['latency_s']:.2f} s.",
        gpus=[least["gpus"], one["gpus"]],
        growth=growth,
        events_per_call=[one["events_per_call"], other["events_per_call"]],
        latency_s=[one["latency_s"], other["latency_s"]],
    )


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


def sizes(gpus: Sequence[int], requests: int, gap_s: float) -> tuple[list[Row], list[Row]]:
    """Rates by size of the cluster, and what a call costs more in the largest in words.

    Args:
        gpus: Sizes, a key of `SCALES` each.
        requests: Requests of each server, or more.
        gap_s: Mean seconds between the arrivals at a server.
    """
    rows: list[Row] = []
    notes = []
    least, most = min(gpus), max(gpus)
    # The largest again, as many requests under way as in the smallest at most.
    plain = "least_finish"
    base = [(size, 1.0, 8, plain) for size in gpus]
    if most > least:
        base += [(most, most / least, 8, plain), (most, most / least, 1, plain)]
    for messages in ("per_server", "per_expert"):
        own = []
        shared = messages == "per_server"
        points = base + [(size, 1.0, 8, "consolidate") for size in gpus if shared]
        for size, slower, looks, choice in points:
            name = f"scale_{size}"
            servers = scenario_cluster(name).num_servers
            each = max(requests, 600 // servers)
            gap = gap_s * slower
            row = {"messages": messages, "gpus": size, "gap_s": gap, "looks": looks}
            row |= {"choice": choice, "requests": each * servers}
            own.append(row | measure(name, messages, each, gap, looks=looks, choice=choice))
        rows += own
        apart, quiet, joined = own[: len(gpus)], own[len(gpus) : len(base)], own[len(base) :]
        if most > least:
            by_size = {row["gpus"]: row for row in apart}
            calm, blind = quiet
            notes.append(decomposition(messages, by_size[least], blind, calm, by_size[most]))
        if joined:
            notes.append(consolidated(apart, joined))
    return rows, notes


def summary(rows: Sequence[Row]) -> list[Row]:
    """The rows of `sizes` with their yardsticks: a sort, and the smallest cluster."""
    numbers = np.random.default_rng(0).random(1_000_000)
    sorts = [len(numbers) / seconds(lambda: np.sort(numbers)) for _ in range(9)]
    found = []
    for messages in ("per_server", "per_expert"):
        plain = [row for row in rows if row["choice"] == "least_finish"]
        own = {row["gpus"]: row for row in reversed(plain) if row["messages"] == messages}
        least, most = own[min(own)], own[max(own)]
        what = "expert calls, {messages}, {gpus} GPUs"
        rate = [least["calls_per_s"]]
        sort = "sorting random numbers, numbers", sorts
        found.append(bench_row(what.format(**least), rate, "1/s", sort))
        if most is not least:
            small = what.format(**least), rate
            rate = [most["calls_per_s"]]
            found.append(bench_row(what.format(**most), rate, "1/s", small))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, print it and write the tables ``bench`` and ``bench_sizes``.

    Args:
        argv: The command line; ``sys.argv`` by default.

    Returns:
        0.
    """

    def own(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--gpus", type=int, nargs="+", default=[4, 64, 256], choices=SCALES)
        parser.add_argument("--requests", type=int, default=15, help="of each server, or more")
        parser.add_argument("--seconds", type=float, default=10.0, help="mean between arrivals")

    options = bench_options("placement", __doc__, argv, own)
    gpus = options.gpus[:1] if options.quick else options.gpus
    rows, notes = sizes(gpus, options.requests, options.seconds)
    header = [
        "messages",
        "GPUs",
        "s between requests",
        "copies looked at",
        "choice",
        "under way",
        "M calls/s",
        "requests/s",
        "remote calls",
        "events/call",
        "ns/call",
        "ns/event",
        "latency s",
    ]
    cells = [
        [
            row["messages"],
            str(row["gpus"]),
            f"{row['gap_s']:.0f}",
            str(row["looks"]),
            row["choice"],
            f"{row['under_way']:.1f}",
            f"{row['calls_per_s'] / 1e6:.1f}",
            f"{row['requests_per_s']:.0f}",
            f"{row['remote_calls']:.2f}",
            f"{row['events_per_call']:.2f}",
            f"{row['ns_per_call']:.0f}",
            f"{row['ns_per_event']:.0f}",
            f"{row['latency_s']:.2f}",
        ]
        for row in rows
    ]
    print_table(
        "Expert placement simulator, one core", header, cells, [each["text"] for each in notes]
    )
    save(options, "bench_sizes", rows, *notes)
    found = summary(rows)
    if not options.quick:
        count, planning, simulating = largest_case()
        what = f"256 GPUs, {count} requests"
        found.append(bench_row(f"{what}, plan of eplb", [planning], "s"))
        found.append(bench_row(f"{what}, simulation", [simulating], "s"))
    for name, taken in planning_ms(1 if options.quick else 3).items():
        found.append(bench_row(f"plan of {name}, 3 servers, 1,664 experts", taken, "ms"))
    report(options, found, *notes)
    return 0


if __name__ == "__main__":
    run_main(main)
