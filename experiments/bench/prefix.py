"""Speed and memory of the prefix routing engine, with the yardsticks of the same run.

::

    servegym bench prefix

It writes the table ``bench``: what a request costs on eight replicas in turn, on Mooncake's
conversations (12,000 requests of 12,000 prompt and 340 output tokens on average) at the recorded
rate and at three times that, in blocks of 512 and of 16 tokens; and the memory of 64 systems of
eight replicas. The yardstick of the times is a least-recently-used cache of the same block ids in
Python's ``OrderedDict``, one a replica, which neither counts references nor keeps time. With
``--dynosim PYTHON``, an interpreter that has ``ai-dynamo-runtime``, NVIDIA's simulator serves the
same requests with as many replicas, blocks, sequences and tokens an iteration, and is the second
yardstick. All timings are of one thread.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
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

_MEMORY = """
import numpy as np, os, sys
from servegym.experiments.bench import prefix
def rss():
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
rows, size, count = map(int, sys.argv[1:])
requests = prefix.draw(count, size, prefix.RECORDED_RATE)
prefix.prepare(requests, 1)  # code and tables
before = rss()
kept = prefix.prepare(requests, rows)
print(before, rss())
"""

_DYNOSIM = """
import json, sys, time
from dynamo._core import run_mocker_trace_replay
trace, replicas, repeats, engine = sys.argv[1], *map(int, sys.argv[2:4]), json.loads(sys.argv[4])
for _ in range(repeats):
    start = time.process_time()
    found = run_mocker_trace_replay(
        [trace], extra_engine_args={"engine": engine}, num_workers=replicas,
        router_mode="round_robin", trace_block_size=512, capture_planner_details=False)
    spent = time.process_time() - start
    print(json.dumps([spent, found.summary["first_admission_prefix_cache_reused_ratio"]]))
"""


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


def dynosim(
    python: str, requests: PrefixRequests, block_size: int, repeats: int
) -> tuple[list[float], float]:
    """Seconds that NVIDIA's simulator takes, and its share of prompt tokens found cached.

    Args:
        python: An interpreter that has it.
        requests: The requests in blocks of 512 tokens, as Mooncake's traces have them.
        block_size: Tokens of a block of the engine.
        repeats: Timings.
    """
    lines = []
    fresh = int(requests.segments.sum(axis=1, dtype=np.int64).max())
    for j in range(requests.num_requests):
        prompt = int(requests.prompt_tokens[j])
        ids = requests.block_ids(j)[: prompt // 512].tolist()
        if prompt % 512:
            ids.append(fresh + j)
        line = {
            "timestamp": round(1e3 * float(requests.arrival_s[j])),
            "input_length": prompt,
            "output_length": int(requests.output_tokens[j]),
            "hash_ids": ids,
        }
        lines.append(json.dumps(line))
    engine = {
        "block_size": block_size,
        "num_gpu_blocks": KV_TOKENS // block_size,
        "max_num_seqs": OPTIONS["max_num_seqs"],
        "max_num_batched_tokens": OPTIONS["max_num_batched_tokens"],
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.jsonl")
        trace.write_text("\n".join(lines) + "\n")
        words = [str(trace), str(REPLICAS), str(repeats), json.dumps(engine)]
        out = subprocess.run(
            [python, "-c", _DYNOSIM, *words], check=True, capture_output=True, text=True
        ).stdout
    times, hits = zip(*(json.loads(line) for line in out.splitlines()), strict=True)
    return list(times), hits[0]


def bench_requests(count: int, repeats: int, python: str | None) -> list[dict[str, Any]]:
    """Microseconds a request, by the size of the blocks and the load.

    ``python`` is the interpreter of `dynosim`, None to go without.
    """
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
            if python is not None:
                spent, hit = dynosim(python, draw(count, 512, rate), size, min(repeats, 3))
                other = "DynoSim", [1e6 * x / count for x in spent]
                rows.append(
                    row(
                        f"a request, replay_prefix beside DynoSim, {where}",
                        micro["replay_prefix"],
                        "us",
                        other,
                        **about,
                        dynosim_hit=round(hit, 3),
                    )
                )
    return rows


def bench_memory(rows: int, count: int) -> list[dict[str, Any]]:
    """Resident memory of systems, in a fresh interpreter."""
    found = []
    for size in (512, 64, 16):
        words = [str(x) for x in (rows, size, count)]
        out = subprocess.run(
            [sys.executable, "-c", _MEMORY, *words], check=True, capture_output=True, text=True
        ).stdout
        before, after = (int(word) / 1e6 for word in out.split())
        what = f"memory, {rows} systems of {REPLICAS} replicas, blocks of {size}"
        found.append(row(what, [after - before], "MB", kv_tokens=KV_TOKENS, requests=count))
    return found


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dynosim", metavar="PYTHON", help="interpreter with ai-dynamo-runtime")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, print it and write the table ``bench``.

    Args:
        argv: The command line; ``sys.argv`` by default.

    Returns:
        0.
    """
    options = bench_options("prefix", __doc__, argv, _add_options)
    # Contexts of up to 127,000 tokens: the laws' last slopes go on, which is all the same here.
    warnings.filterwarnings("ignore", message=".*outside its domain.*")
    count = 600 if options.quick else 12_000
    repeats = min(options.repeats, 2) if options.quick else options.repeats
    rows = bench_requests(count, repeats, options.dynosim)
    rows += bench_memory(4 if options.quick else 64, 2_000)
    report(options, rows)
    return 0


if __name__ == "__main__":
    from servegym._command_line import run_main

    run_main(main)
