"""Train the routers that the tables and figures compare: a queue that can be stopped at any time.

``python -m servegym.experiments.figures.routing.training --list`` shows the runs in their order,
the most useful first. Each is one process of an agent with one thread; it writes its folder below
``--runs`` and goes on from its last snapshot whenever the queue is started again, after being
killed too. A finished run leaves ``result.json`` there and one row in ``--table``. A training
repeats exactly on the same kind of processor; on another one sums round differently, and after some
ten thousand steps it is another training: what the seeds have in common is what counts.

What is trained, and how, is listed in `training_runs`.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from servegym.envs._command_line import run_main
from servegym.experiments.figures.routing.training_runs import POINTS, RUNS, TrainingRun, select
from servegym.experiments.jobs import folder_lock, run_process
from servegym.experiments.output import print_table, write_json, write_text
from servegym.experiments.tables import Table, machine, versions

__all__ = ["POINTS", "RUNS", "TrainingRun", "main", "select", "train_all"]

SNAPSHOT_STEPS = 50_000
POLL_S = 1.0
TABLE = Path("experiments/results/routing/training.csv")
RESULT, SECONDS, LOG = "result.json", "seconds.txt", "training.log"


SOURCES = ("agents", "baselines.llm_routing", "envs.llm_routing", "envs.workloads")


def source_digest(packages: Sequence[str] = SOURCES) -> str:
    """Twelve hex digits of the installed sources that a training depends on."""
    digest = hashlib.sha256()
    for package in packages:
        folder = Path(next(iter(import_module(f"servegym.{package}").__path__)))
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def state_of(run: TrainingRun, runs: Path) -> str:
    """``finished``, ``running`` (some process holds it), ``begun`` or ``waiting``."""
    folder = runs / run.name
    if (folder / RESULT).exists():
        return "finished"
    if not folder.exists():
        return "waiting"
    with folder_lock(folder) as lock:
        if lock is None:
            return "running"
    return "begun" if (folder / "metrics.jsonl").exists() else "waiting"


def _metrics(folder: Path) -> list[dict[str, Any]]:
    """The run's log; a line that was cut off is left out."""
    rows = []
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def summary(run: TrainingRun, folder: Path) -> dict[str, Any]:
    """The row of a finished run: what was trained, its validation QoS, time and versions."""
    evaluations = [row for row in _metrics(folder) if "eval/avg_qos" in row]
    best = max(evaluations, key=lambda row: row["eval/avg_qos"])
    seconds = float((folder / SECONDS).read_text()) if (folder / SECONDS).exists() else math.nan
    settings = dict(run.settings)
    return {
        "run": run.name,
        "group": run.group,
        "variant": run.variant,
        "point": run.point,
        "seed": run.seed,
        "steps": run.steps,
        "profiles": settings["profiles"],
        "rate_low": settings["rate_low"],
        "rate_high": settings["rate_high"],
        "agent": run.agent,
        "state": run.network,
        "reward": settings["reward"],
        "prior": not run.from_nothing,
        "val_qos": round(best["eval/avg_qos"], 5),
        "val_qos_step": best["global_step"],
        "val_qos_last": round(evaluations[-1]["eval/avg_qos"], 5),
        "seconds": round(seconds, 1),
        "finished": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": f"{machine()['system']}, 1 thread",
        "sources": source_digest(),
        **versions(("torch", "numpy", "numba", "gymnasium")),
        "settings": json.dumps(settings, sort_keys=True),
    }


_TABLE = threading.Lock()
_STOP = threading.Event()  # set by a signal: end the trainings and leave them to be resumed


def write_table(table: Path, runs: Path) -> int:
    """Rewrite the table with the rows of all finished runs; rows of other folders stay.

    Returns:
        The number of its rows.
    """
    with _TABLE:
        found = Table(table, ("run",))
        results = sorted(runs.glob(f"*/{RESULT}"))
        fresh = [json.loads(result.read_text(encoding="utf-8")) for result in results]
        place = {run.name: index for index, run in enumerate(RUNS)}
        found.update(fresh, lambda row: (place.get(row["run"], len(place)), row["run"]))
        return len(found.rows)


def train_one(
    run: TrainingRun,
    runs: Path,
    deadline: float = math.inf,
    snapshot_steps: int = SNAPSHOT_STEPS,
    niceness: int = 19,
) -> str:
    """Train a run to its end or until the deadline.

    Args:
        run: The run.
        runs: Folder of all runs.
        deadline: When to stop, on the clock of `time.monotonic`.
        snapshot_steps: Steps between the snapshots that it can go on from.
        niceness: Added to the training process's niceness.

    Returns:
        ``finished``, ``running`` (another process trains it), ``stopped`` or ``failed``.
    """
    folder = runs / run.name
    folder.mkdir(parents=True, exist_ok=True)
    with folder_lock(folder) as lock:
        if lock is None:
            return "running"
        if (folder / RESULT).exists():
            return "finished"
        clock = folder / SECONDS
        before = float(clock.read_text()) if clock.exists() else 0.0
        begin = time.monotonic()

        def stop() -> bool:
            write_text(clock, f"{before + time.monotonic() - begin:.1f}\n")
            return _STOP.is_set() or time.monotonic() >= deadline

        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
        status = run_process(
            ["nice", "-n", str(niceness), *run.command(runs, snapshot_steps)],
            folder / LOG,
            stop,
            POLL_S,
            env={**os.environ, **threads},
            pass_fds=(lock,),
        )
        write_text(clock, f"{before + time.monotonic() - begin:.1f}\n")
        if status is None:
            return "stopped"
        if status != 0 or not (folder / "best.safetensors").exists():
            return "failed"
        write_json(folder / RESULT, summary(run, folder))
        (folder / "snapshot.pt").unlink(missing_ok=True)
        return "finished"


def train_all(
    selected: Sequence[TrainingRun],
    runs: Path,
    table: Path,
    workers: int = 1,
    max_hours: float = math.inf,
    snapshot_steps: int = SNAPSHOT_STEPS,
    niceness: int = 19,
) -> dict[str, str]:
    """Train the runs in their order, several at a time.

    Args:
        selected: The runs.
        runs: Folder of all runs.
        table: CSV of the finished ones.
        workers: Trainings at a time.
        max_hours: Stop after so many hours; what is unfinished goes on next time.
        snapshot_steps: Steps between snapshots.
        niceness: Added to the trainings' niceness.

    Returns:
        What became of each run, by its name; see `train_one`.

    Raises:
        ValueError: If a number is out of range.
    """
    for argument, value in (("workers", workers), ("max_hours", max_hours)):
        if not value > 0:
            raise ValueError(f"{argument} is {value}; allowed is a number above 0")
    deadline = time.monotonic() + 3600 * max_hours
    runs.mkdir(parents=True, exist_ok=True)
    write_table(table, runs)

    def work(run: TrainingRun) -> str:
        if time.monotonic() >= deadline or _STOP.is_set():
            return state_of(run, runs)
        if (runs / run.name / RESULT).exists():
            return "finished"
        _say(f"{run.name}: {run.steps:,} steps")
        found = train_one(run, runs, deadline, snapshot_steps, niceness)
        if found == "finished":
            write_table(table, runs)
        elif found == "failed":
            found = f"failed, see {runs / run.name / LOG}"
        _say(f"{run.name}: {found}")
        return found

    with ThreadPoolExecutor(workers) as pool:
        return dict(zip([r.name for r in selected], pool.map(work, selected), strict=True))


def _say(text: str) -> None:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
    print(f"{now} {text}", flush=True)


def print_runs(selected: Sequence[TrainingRun], runs: Path) -> None:
    """Print the runs in their order with their states and results."""
    body = []
    for number, run in enumerate(selected, 1):
        state, qos = state_of(run, runs), ""
        if state == "finished":
            qos = f"{json.loads((runs / run.name / RESULT).read_text())['val_qos']:.4f}"
        settings = run.settings
        start = "nothing" if run.from_nothing else "priced_greedy"
        extra = " ".join(settings.get("set", ()))
        body.append(
            [
                f"{number:2d} {run.name}",
                f"{run.steps:,}",
                settings["profiles"],
                run.network,
                settings["reward"],
                start,
                extra,
                state,
                qos,
            ]
        )
    print_table(
        f"{len(body)} trainings in {runs}",
        ["run", "steps", "fleet", "state", "reward", "starts at", "environment", "", "val QoS"],
        body,
        ["the paper's learners start at nothing, the others at a heuristic and learn what to add."],
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is not yet trained; see ``--help``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the runs and train nothing")
    parser.add_argument(
        "--only",
        nargs="+",
        default=(),
        metavar="WORD",
        help="only runs with one of these in their name",
    )
    parser.add_argument("--workers", type=int, default=1, help="trainings at a time (1)")
    parser.add_argument("--max-hours", type=float, default=math.inf, help="stop after these hours")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/routing"), help="folder of the runs (runs/routing)"
    )
    parser.add_argument("--table", type=Path, help=f"CSV of finished runs ({TABLE})")
    parser.add_argument("--steps", type=int, help="train each for so many steps (a smoke run)")
    args = parser.parse_args(argv)
    selected = select(args.only)
    if args.list:
        print_runs(selected, args.runs)
        return 0
    if args.steps is not None:
        if args.steps < 1:
            raise ValueError(f"steps is {args.steps}; allowed is 1 or more")
        # Under names of their own: they must not pass for the runs of the list.
        selected = [
            replace(r, group="smoke", variant=f"{r.group}_{r.variant}", steps=args.steps)
            for r in selected
        ]
    table = args.table or (TABLE if args.steps is None else args.runs / "training.csv")
    _STOP.clear()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: _STOP.set())
    found = train_all(selected, args.runs, table, args.workers, args.max_hours)
    return 1 if any(state.startswith("failed") for state in found.values()) else 0


if __name__ == "__main__":
    run_main(main)
