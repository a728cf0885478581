"""The gain by Ray on one machine: an evaluation in one process and on workers, timed in turn.

``python -m servegym.experiments.cluster.bench`` runs the same evaluation in this process and on
local clusters, several times in turn, checks that all rows are equal, and writes the table
``scaling``. Times are of the wall clock, since workers save wall time; the start of a cluster, with
its workers' imports, is counted apart.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from servegym._command_line import run_main
from servegym.agents.lib.ray_cluster import check_ray, cluster
from servegym.experiments.cluster.executor import ray_executor
from servegym.experiments.evaluate import evaluate
from servegym.experiments.output import print_table
from servegym.experiments.tables import note, provenance, write_result

__all__ = ["main"]

MODULE = "servegym.experiments.cluster.bench"
OUT = Path("experiments/results/scaling")
ENV_ID = "servegym/LLMRouting-v1"
POLICIES = ("least_latency", "greedy_qos", "priced_greedy", "linucb")


def scaling(
    episodes: int, requests: int, workers: Sequence[int], repeats: int
) -> tuple[list[dict[str, Any]], bool]:
    """Time the evaluation in this process and on local clusters, in turn.

    Args:
        episodes: Episodes a policy.
        requests: Requests of an episode.
        workers: Workers of the clusters.
        repeats: Turns; medians count.

    Returns:
        A row a way to run (seconds of the wall clock), and whether all evaluations were equal.
    """
    full: dict[str, Any] = {
        "episodes": episodes,
        "num_envs": 8,
        "env_kwargs": {"episode_requests": requests, "rate": 8.0},
    }
    short = {**full, "episodes": 8, "env_kwargs": {"episode_requests": 20, "rate": 8.0}}
    evaluate(ENV_ID, POLICIES, **short)  # compiles
    times: dict[int, list[float]] = {0: [], **{count: [] for count in workers}}
    starts: dict[int, list[float]] = {count: [] for count in workers}
    expected, equal = "", True
    for _ in range(repeats):
        for count, seconds in times.items():
            begin = time.monotonic()
            if count == 0:
                rows = evaluate(ENV_ID, POLICIES, **full)
                seconds.append(time.monotonic() - begin)
                expected = expected or repr(rows)
            else:
                with cluster(f"local:{count}"):
                    evaluate(ENV_ID, POLICIES, executor=ray_executor("auto"), **short)
                    starts[count].append(time.monotonic() - begin)
                    begin = time.monotonic()
                    rows = evaluate(ENV_ID, POLICIES, executor=ray_executor("auto"), **full)
                    seconds.append(time.monotonic() - begin)
            equal &= repr(rows) == expected
    base = statistics.median(times[0])
    return [
        {
            "how": f"--ray local:{count}" if count else "one process",
            "seconds": round(statistics.median(seconds), 2),
            "fastest_s": round(min(seconds), 2),
            "slowest_s": round(max(seconds), 2),
            "times_as_fast": round(base / statistics.median(seconds), 2),
            "start_s": round(statistics.median(starts[count]), 1) if count else 0.0,
        }
        for count, seconds in times.items()
    ], equal


def main(argv: Sequence[str] | None = None) -> int:
    """Time, check, print and save; see ``--help``.

    Returns:
        0, or 1 if rows differ.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--episodes", type=int, default=96, help="episodes a policy (96)")
    parser.add_argument("--requests", type=int, default=1000, help="requests of an episode (1000)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="of clusters (1 2)")
    parser.add_argument("--repeats", type=int, default=3, help="turns; medians count (3)")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder of the results ({OUT})")
    words = sys.argv[1:] if argv is None else list(argv)
    options = parser.parse_args(words)
    for name in ("episodes", "requests", "repeats"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} is {getattr(options, name)}; allowed is 1 or more")
    for workers in options.workers:
        check_ray(f"local:{workers}")
    options.out.mkdir(parents=True, exist_ok=True)

    rows, equal = scaling(options.episodes, options.requests, options.workers, options.repeats)
    print_table(
        f"{len(POLICIES)} policies, {options.episodes} episodes of {options.requests} requests",
        list(rows[0]),
        [[str(value) for value in row.values()] for row in rows],
    )
    load = f"{os.getloadavg()[1]:.1f} processes on {os.cpu_count()} cores"
    command = shlex.join([*parser.prog.split(), *words])
    made = provenance(command, packages=("ray",), settings={"load": load})
    notes = [
        note(
            f"{', '.join(POLICIES)}: {options.episodes} episodes of {options.requests} "
            f"requests each, jobs of 8 episodes; medians of {options.repeats} turns, wall "
            f"clock; the rows are {'equal bit for bit' if equal else 'NOT EQUAL'}.",
            equal=equal,
        ),
        note("start_s: start of a cluster and its first jobs (imports, compiled code read)."),
    ]
    write_result(options.out / "scaling", rows, made, notes)
    return 0 if equal else 1


if __name__ == "__main__":
    run_main(main)
