"""Time of a gateway's decision: look-up of a prompt, observation, accounting, and the rules.

Requests of the recorded workloads are sent to 8 replicas in turn, which spreads what they share
over all of them; 256 are in flight. The time of a look-up is what the decisions take with it less
what they take without. The yardstick looks up the same prompts in ordered dicts, one replica after
another.

    OMP_NUM_THREADS=1 python -m servegym.experiments.bench.prefix_gateway

It writes the table ``gateway``.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import njit

from servegym.baselines.prefix_routing import RULES, View
from servegym.envs._command_line import run_main
from servegym.envs._jit import borrowed
from servegym.envs.prefix_routing.gateway import allocate, gateway_config, load, prompts
from servegym.envs.prefix_routing.kernel.gateway import Gateway, begin, look_up, release, sent
from servegym.envs.prefix_routing.kernel.observation import (
    REPLICA_FEATURES,
    REQUEST_FEATURES,
    observe,
)
from servegym.envs.prefix_routing.requests import PrefixRequests
from servegym.envs.prefix_routing.workloads import make_prefix_workload
from servegym.experiments.bench.timing import bench_options, save, seconds, short
from servegym.experiments.bench.timing import row as bench_row
from servegym.experiments.output import print_table
from servegym.experiments.tables import note

REPLICAS, IN_FLIGHT = 8, 256
CASES = (("mooncake", 512), ("mooncake", 16), ("agents", 64))
"""Workload and block size; entries of an index have at least 64 tokens."""


@njit(error_model="numpy")
def _play(gateway, requests, replicas, request, look_ups):
    """Send the requests in turn, looking each up ``look_ups`` times."""
    g = borrowed(gateway)
    begin(g, 0)
    for j in range(requests):
        for _ in range(look_ups):
            look_up(g, 0, j, float(j))
        observe(g, 0, j, float(j), replicas, request)
        sent(g, 0, j, j % replicas.shape[0], float(j))
        if j >= IN_FLIGHT:
            release(g, 0, j - IN_FLIGHT)


def _gateway(requests: PrefixRequests, index: str) -> Gateway:
    config = gateway_config(index=index, block_size=requests.block_size)
    episode = prompts(config, requests)
    g = allocate(config, REPLICAS, [episode])
    load(
        g,
        0,
        episode,
        predicted=100.0,
        ttft_slo_s=1.0,
        tpot_slo_s=0.04,
        speed=20_000.0,
        kv_tokens=[450_000] * REPLICAS,
        max_num_seqs=128,
    )
    return g


def _plain(g: Gateway, requests: int, look_ups: int) -> Callable[[], None]:
    """The same index in ordered dicts, each replica looked up alone until its first gap."""
    first, keys = g.first_key[0].tolist(), g.keys[0].tolist()
    capacity = int(g.replica[0, 0]["capacity"])

    def work() -> None:
        held: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(REPLICAS)]
        for j in range(requests):
            own = keys[first[j] : first[j + 1]]
            for _ in range(look_ups):
                for each in held:
                    for key in own:
                        if key not in each:
                            break
            lru = held[j % REPLICAS]
            for key in own:
                lru[key] = None
                lru.move_to_end(key)
                if len(lru) > capacity:
                    lru.popitem(last=False)

    return work


def _memory(g: Gateway) -> float:
    """MB that a gateway of one row takes."""
    return sum(array.nbytes for array in g) / 1e6


def _views(count: int) -> list[View]:
    rng = np.random.default_rng(0)
    found = []
    for j in range(count):
        numbers: dict[str, Any] = {
            name: rng.integers(0, 100, REPLICAS)
            for name in ("in_flight", "context_tokens", "decode_blocks", "waiting", "running")
        }
        found.append(
            View(
                prompt_tokens=4096,
                predicted_output=100.0,
                block_size=16,
                match_tokens=64 * rng.integers(0, 65, REPLICAS),
                prefill_tokens=rng.integers(0, 50_000, REPLICAS),
                kv=rng.random(REPLICAS),
                capacity_tokens=np.full(REPLICAS, 450_000),
                speed=np.full(REPLICAS, 20_000.0),
                last_replica=0,
                session=j % 50,
                tenant=0,
                up=np.ones(REPLICAS, np.bool_),
                now_s=0.02 * j,
                rng=rng,
                index_block=64,
                **numbers,
            )
        )
    return found


def measure(requests: int, decisions: int, repeats: int) -> list[dict[str, Any]]:
    """Rows of the table.

    Args:
        requests: Of the workloads.
        decisions: Of each rule.
        repeats: Timings of each number.
    """
    rows = []
    for name, block_size in CASES:
        workload = make_prefix_workload(name)
        rng = np.random.default_rng(0)
        asked = workload.draw(rng, requests, 10.0, block_size, "trace")
        g = _gateway(asked, "approximate")
        out = (
            np.zeros((REPLICAS, len(REPLICA_FEATURES)), np.float32),
            np.zeros(len(REQUEST_FEATURES), np.float32),
        )

        def timed(work: Callable[[int], object]) -> tuple[list[float], list[float]]:
            work(1)
            without = [seconds(lambda: work(0)) for _ in range(repeats)]
            once = [seconds(lambda: work(1)) for _ in range(repeats)]
            each = [b - a for a, b in zip(without, once, strict=True)]
            return [1e6 * x / requests for x in once], [1e6 * x / requests for x in each]

        whole, looked = timed(lambda times, g=g, out=out: _play(g, requests, *out, times))
        _, plain = timed(lambda times, g=g: _plain(g, requests, times)())
        entries = len(g.keys[0]) / requests
        setting = {
            "workload": name,
            "block": block_size,
            "entries_a_prompt": round(entries, 1),
            "keys": g.holders.shape[1],
            "megabytes": round(_memory(g), 2),
        }
        label = f"{name}, blocks of {block_size}"
        rows.append(bench_row(f"{label}: decision", whole, "us", **setting))
        yardstick = ("ordered dicts", plain)
        rows.append(bench_row(f"{label}: look-up", looked, "us", yardstick, **setting))
    views = _views(decisions)
    for name, (make, _) in RULES.items():
        taken = []
        for _ in range(repeats):
            rule = make()
            begun = time.process_time()
            for view in views:
                rule.choose(view)
            taken.append(1e6 * (time.process_time() - begun) / decisions)
        rows.append(bench_row(f"rule {name}", taken, "us", replicas=REPLICAS))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write the table."""
    options = bench_options("prefix", __doc__, argv)
    requests, decisions = (50, 20) if options.quick else (2000, 1000)
    rows = measure(requests, decisions, 1 if options.quick else options.repeats)
    print_table(
        "Medians of one thread's processor time",
        ["what", "us", "yardstick", "ratio", "about"],
        [
            [row["what"], short(row["value"]), short(row["yardstick_value"]), short(row["ratio"])]
            + [row["about"]]
            for row in rows
        ],
    )
    options.command = shlex.join(
        ["python", "-m", "servegym.experiments.bench.prefix_gateway", *(argv or sys.argv[1:])]
    )
    text = "llm_d_predicted is timed before its first fit, when it needs no predictions"
    save(options, "gateway", rows, note(text))
    return 0


if __name__ == "__main__":
    run_main(main)
