"""Speed of the prefix routing engine, with the yardsticks of the same run.

::

    servegym bench prefix

It writes the table ``bench``: what a request costs on eight replicas in turn, on Mooncake's
conversations (12,000 requests of 12,000 prompt and 340 output tokens on average) at the recorded
rate and at three times that, in blocks of 512 and of 16 tokens. The yardstick is a
least-recently-used cache of the same block ids in Python's ``OrderedDict``, one a replica, which
neither counts references nor keeps time. All timings are of one thread.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from servegym.envs.prefix_routing import kernel
from servegym.envs.prefix_routing.replay import replay_prefix
from servegym.envs.prefix_routing.requests import PrefixRequests
from servegym.envs.prefix_routing.tables import engine_tables, put_replicas, put_requests
from servegym.envs.prefix_routing.workloads import make_prefix_workload
from servegym.experiments.bench.timing import bench_options, interleave, report, row, seconds
from servegym.hardware_profiles import load

__all__ = ["main"]

PROFILE = "h100-llama-3.1-8b"
REPLICAS = 8
KV_TOKENS = 450_000
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 128,
    "max_num_batched_tokens": 8192,
    "kv_tokens": KV_TOKENS,
}
RECORDED_RATE = 3.4  # requests/s
NO_ASSIGNMENT = np.empty(0, dtype=np.int64)


def draw(count: int, block_size: int, rate: float) -> PrefixRequests:
    """Requests of Mooncake's conversations, dispatched by their times."""
    workload = make_prefix_workload("mooncake")
    return workload.draw(np.random.default_rng(0), count, rate, block_size, dispatch="trace")


def prepare(requests: PrefixRequests, rows: int) -> tuple[kernel.Tables, kernel.Systems]:
    """Systems that are about to serve these requests, all rows the same ones."""
    profiles = [load(PROFILE)] * REPLICAS
    tables, capacity = engine_tables(
        profiles, block_size=requests.block_size, num_requests=requests.num_requests, **OPTIONS
    )
    systems = kernel.allocate(tables.config[0], rows, requests.segments)
    put_replicas(systems, profiles, capacity)
    for b in range(rows):
        put_requests(systems, b, requests)
    kernel.begin(tables, systems, np.ones(rows, dtype=np.int8))
    return tables, systems


def lru_hits(ids: Sequence[Sequence[int]], capacity: int) -> int:
    """Blocks found in caches of ``capacity`` blocks, one a replica, of requests in turn."""
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(REPLICAS)]
    found = 0
    for j, blocks in enumerate(ids):
        cache = caches[j % REPLICAS]
        for i in blocks:
            if i in cache:
                cache.move_to_end(i)
                found += 1
            else:
                cache[i] = None
                if len(cache) > capacity:
                    cache.popitem(last=False)
    return found


def bench_requests(count: int, repeats: int) -> list[dict[str, Any]]:
    """Microseconds a request, by the size of the blocks and the load."""
    rows = []
    for size in (512, 16):
        for load_factor in (1, 3):
            rate = load_factor * RECORDED_RATE
            requests = draw(count, size, rate)
            ids = [requests.block_ids(j).tolist() for j in range(count)]
            served = prepare(requests, 1)
            kernel.run_replay(*served, NO_ASSIGNMENT)
            log = served[1].request

            def engine(requests=requests) -> float:
                tables, systems = prepare(requests, 1)
                return seconds(lambda: kernel.run_replay(tables, systems, NO_ASSIGNMENT))

            def whole(requests=requests) -> float:
                return seconds(
                    lambda: replay_prefix(PROFILE, requests, num_replicas=REPLICAS, **OPTIONS)
                )

            times = interleave(
                {
                    "engine": engine,
                    "replay_prefix": whole,
                    "lru": lambda ids=ids, size=size: seconds(
                        lambda: lru_hits(ids, KV_TOKENS // size)
                    ),
                },
                repeats,
            )
            micro = {name: [1e6 * x / count for x in found] for name, found in times.items()}
            yardstick = "LRU of the block ids in OrderedDict", micro.pop("lru")
            about: dict[str, Any] = {
                "requests": count,
                "rate_per_s": rate,
                "blocks_a_request": round(float(requests.num_blocks().mean()), 1),
                "hit": round(float(log["hit"].sum() / log["prompt"].sum()), 3),
                "preemptions": int(log["preemptions"].sum()),
                "iterations_a_request": round(served[1].replica["emitted"].sum() / count, 1),
                "repeats": repeats,
            }
            where = f"blocks of {size}, {rate:g}/s"
            rows += [
                row(f"a request, {name}, {where}", x, "us", yardstick, **about)
                for name, x in micro.items()
            ]
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, print it and write the table ``bench``.

    Args:
        argv: The command line; ``sys.argv`` by default.

    Returns:
        0.
    """
    options = bench_options("prefix", __doc__, argv)
    # Contexts of up to 127,000 tokens: the laws' last slopes go on, which is all the same here.
    warnings.filterwarnings("ignore", message=".*outside its domain.*")
    count = 600 if options.quick else 12_000
    repeats = min(options.repeats, 2) if options.quick else options.repeats
    report(options, bench_requests(count, repeats))
    return 0


if __name__ == "__main__":
    from servegym._command_line import run_main

    run_main(main)
