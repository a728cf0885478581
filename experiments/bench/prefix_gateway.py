"""Time of a gateway's decision: look-up of a prompt, observation, accounting, and the rules.

Requests of the recorded workloads are sent to 8 replicas in turn, which spreads what they share
over all of them; 256 are in flight. A look-up is timed on the index that they leave, beside the
same in ordered dicts, which find the same matches.

    OMP_NUM_THREADS=1 python -m servegym.experiments.bench.prefix_gateway

It writes the table ``gateway``.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit

from servegym._command_line import run_main
from servegym._jit import borrowed
from servegym.baselines.prefix_routing import RULES, View
from servegym.envs.prefix_routing.gateway import allocate, gateway_config, load, prompts
from servegym.envs.prefix_routing.kernel.gateway import Gateway, begin, look_up, release, sent
from servegym.envs.prefix_routing.kernel.observation import (
    REPLICA_FEATURES,
    REQUEST_FEATURES,
    observe,
)
from servegym.envs.prefix_routing.requests import PrefixRequests
from servegym.envs.prefix_routing.workloads import make_prefix_workload
from servegym.experiments.bench.timing import bench_options, interleave, save, seconds, short
from servegym.experiments.bench.timing import row as bench_row
from servegym.experiments.output import print_table
from servegym.experiments.tables import note

REPLICAS, IN_FLIGHT = 8, 256
TIMES = 10  # that a look-up is repeated
CASES = (("mooncake", 512), ("mooncake", 16), ("agents", 64))
"""Workload and block size; entries of an index have at least 64 tokens."""


@njit(error_model="numpy")
def _play(gateway, requests, replicas, request):
    """Send the requests in turn."""
    g = borrowed(gateway)
    begin(g, 0)
    for j in range(requests):
        look_up(g, 0, j, float(j))
        observe(g, 0, j, float(j), replicas, request)
        sent(g, 0, j, j % replicas.shape[0], float(j))
        if j >= IN_FLIGHT:
            release(g, 0, j - IN_FLIGHT)


@njit(error_model="numpy")
def _look_up(gateway, requests, times):
    """Look all requests up in the index as it stands; returns the tokens that matched."""
    g = borrowed(gateway)
    matched = 0
    for _ in range(times):
        for j in range(requests):
            look_up(g, 0, j, float(requests))
            for n in range(g.replica.shape[1]):
                matched += g.replica[0, n].match
    return matched


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


def _plain(g: Gateway, requests: int) -> tuple[list[OrderedDict[int, None]], list[list[int]]]:
    """The same index as `_play` leaves, in ordered dicts, and the entries of the prompts."""
    first, keys = g.first_key[0].tolist(), g.keys[0].tolist()
    capacity = int(g.replica[0, 0]["capacity"])
    held: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(REPLICAS)]
    # Entries of one request alone have no number in the kernel, and here a negative one.
    named = [key if key >= 0 else -1 - i for i, key in enumerate(keys)]
    prompts = [named[first[j] : first[j + 1]] for j in range(requests)]
    for j, own in enumerate(prompts):
        lru = held[j % REPLICAS]
        for key in own:
            lru[key] = None
            lru.move_to_end(key)
            if len(lru) > capacity:
                lru.popitem(last=False)
    return held, prompts


def _plain_look_up(held: Sequence[OrderedDict[int, None]], prompts: Sequence[list[int]]) -> int:
    """Look all prompts up as `_look_up` does; returns the entries that matched."""
    matched = 0
    for own in prompts:
        for key in own:
            holders = [each for each in held if key in each] if key >= 0 else []
            if not holders:
                break
            matched += len(holders)
    return matched


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

        held, asked_for = _plain(g, requests)
        timers = {
            "decision": lambda g=g, out=out: seconds(lambda: _play(g, requests, *out)),
            "look-up": lambda g=g: seconds(lambda: _look_up(g, requests, TIMES)) / TIMES,
            "plain": lambda a=held, b=asked_for: seconds(lambda: _plain_look_up(a, b)),
        }
        taken = {
            name: [1e6 * x / requests for x in values]
            for name, values in interleave(timers, repeats).items()
        }
        entry = int(g.config[0]["entry_tokens"])
        if _look_up(g, requests, 1) != entry * _plain_look_up(held, asked_for):
            raise ValueError(f"{name}: the kernel and the ordered dicts match differently")
        entries = len(g.keys[0]) / requests
        setting = {
            "workload": name,
            "block": block_size,
            "entries_a_prompt": round(entries, 1),
            "keys": g.holders.shape[1],
            "megabytes": round(_memory(g), 2),
        }
        label = f"{name}, blocks of {block_size}"
        rows.append(bench_row(f"{label}: decision", taken["decision"], "us", **setting))
        yardstick = ("ordered dicts", taken["plain"])
        rows.append(bench_row(f"{label}: look-up", taken["look-up"], "us", yardstick, **setting))
    views = _views(decisions)
    for name, (make, _) in RULES.items():
        times = []
        for _ in range(repeats):
            rule = make()
            begun = time.process_time()
            for view in views:
                rule.choose(view)
            times.append(1e6 * (time.process_time() - begun) / decisions)
        rows.append(bench_row(f"rule {name}", times, "us", replicas=REPLICAS))
    numbers = ("value", "low", "high", "yardstick_value", "ratio")
    return [
        {key: float(f"{x:.4g}") if key in numbers and x != "" else x for key, x in row.items()}
        for row in rows
    ]


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
