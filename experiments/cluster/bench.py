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

from servegym.envs._command_line import run_main
from servegym.experiments.cluster.executor import check_ray, cluster, ray_executor
from servegym.experiments.evaluate import evaluate
from servegym.experiments.output import print_table
from servegym.experiments.tables import note, provenance, write_result

__all__ = ["main"]

MODULE = "servegym.experiments.cluster.bench"
OUT = Path("experiments/results/scaling")
ENV_ID = "servegym/LLMRouting-v0"
POLICIES = ("least_latency", "greedy_qos", "priced_greedy", "linucb")


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

    given: dict[str, Any] = {
        "episodes": options.episodes,
        "num_envs": 8,
        "env_kwargs": {"episode_requests": options.requests, "rate": 8.0},
    }
    warm = {**given, "episodes": 8, "env_kwargs": {"episode_requests": 20, "rate": 8.0}}
    evaluate(ENV_ID, POLICIES, **warm)
    times: dict[int, list[float]] = {0: [], **{workers: [] for workers in options.workers}}
    starts: dict[int, list[float]] = {workers: [] for workers in options.workers}
    expected, equal = "", True
    for _ in range(options.repeats):
        for workers, spent in times.items():
            if workers == 0:
                begin = time.monotonic()
                rows = evaluate(ENV_ID, POLICIES, **given)
                spent.append(time.monotonic() - begin)
                expected = expected or repr(rows)
            else:
                begin = time.monotonic()
                with cluster(f"local:{workers}"):
                    evaluate(ENV_ID, POLICIES, executor=ray_executor("auto"), **warm)
                    starts[workers].append(time.monotonic() - begin)
                    begin = time.monotonic()
                    rows = evaluate(ENV_ID, POLICIES, executor=ray_executor("auto"), **given)
                    spent.append(time.monotonic() - begin)
            equal &= repr(rows) == expected
    base = statistics.median(times[0])
    found = []
    for workers, spent in times.items():
        median = statistics.median(spent)
        found.append(
            {
                "how": f"--ray local:{workers}" if workers else "one process",
                "seconds": round(median, 2),
                "fastest_s": round(min(spent), 2),
                "slowest_s": round(max(spent), 2),
                "times_as_fast": round(base / median, 2),
                "start_s": round(statistics.median(starts[workers]), 1) if workers else 0.0,
            }
        )
    print_table(
        f"{len(POLICIES)} policies, {options.episodes} episodes of {options.requests} requests",
        list(found[0]),
        [[str(value) for value in row.values()] for row in found],
    )
    load = f"{os.getloadavg()[1]:.1f} processes on {os.cpu_count()} cores"
    made = provenance(
        shlex.join([*parser.prog.split(), *words]), packages=("ray",), settings={"load": load}
    )
    write_result(
        options.out / "scaling",
        found,
        made,
        [
            note(
                f"{', '.join(POLICIES)}: {options.episodes} episodes of {options.requests} "
                f"requests each, jobs of 8 episodes; medians of {options.repeats} turns, wall "
                f"clock; the rows are {'equal bit for bit' if equal else 'NOT EQUAL'}.",
                equal=equal,
            ),
            "start_s: start of a cluster and its workers' first jobs (imports, compiled code "
            "read).",
        ],
    )
    return 0 if equal else 1


if __name__ == "__main__":
    run_main(main)
