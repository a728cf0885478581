"""``servegym evaluate``: policies on the same episodes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from servegym._checks import whole
from servegym._command_line import parse_settings
from servegym.experiments.evaluation.output import check_writable, write_rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="servegym evaluate",
        description="Compare policies on the same episodes (split eval unless --set split=...).",
    )
    add = parser.add_argument
    add("env_id", metavar="ENV_ID", help="id of an environment, see `servegym list`")
    text = "policy by name, or the path of a checkpoint, .py or SB3 .zip file; repeatable"
    add("--policy", action="append", required=True, metavar="NAME_OR_FILE", help=text)
    add("--episodes", type=int, default=20, help="episodes a policy (%(default)s)")
    text = "seed of the first episode; episode i has seed + i. Default: 100000, or with a .py or "
    text += ".zip file one that nobody knew before"
    add("--seed", type=int, help=text)
    text = "argument of the environment, key=value; repeatable"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=text)
    add("--num-envs", type=int, help="episodes run side by side (default: up to 16)")
    text = "repeat in so many draws of the profiles' errors (%(default)s)"
    add("--profile-draws", type=int, default=0, help=text)
    add("--out", type=Path, metavar="FILE", help="write the rows to FILE.json or FILE.csv")
    add("--all", action="store_true", help="print every metric")
    text = "use a Ray cluster: auto (one that runs), local or local:N (this machine, N workers)"
    add("--ray", metavar="WHERE", help=text)
    add("--in-process", action="store_true", help="trust policy files: no process of their own")
    text = "seconds that such a file may take for an answer (%(default)g)"
    add("--time-limit", type=float, default=60.0, help=text)
    return parser


def main(argv: Sequence[str]) -> None:
    """Command line of ``servegym evaluate``."""
    options = _parser().parse_args(argv)
    settings = parse_settings(options.set)
    draws = whole("profile_draws", options.profile_draws, 0)
    if options.out is not None:
        check_writable(options.out, (".json", ".csv"))

    # What is heavy comes after what is quickly refused.
    from servegym.agents.lib.parallel import Workers
    from servegym.experiments.evaluation.evaluate import evaluate, print_summary
    from servegym.experiments.evaluation.guest import Guests
    from servegym.experiments.evaluation.profile_draws import evaluate_draws, print_draws

    workers = Workers(ray=options.ray)
    shared: dict[str, Any] = {
        "episodes": options.episodes,
        "num_envs": options.num_envs,
        "env_kwargs": settings,
        "executor": _with_progress(workers) if sys.stderr.isatty() else workers,
        "guests": Guests(options.time_limit, options.in_process),
    }
    rows = evaluate(options.env_id, options.policy, seed=options.seed, **shared)
    drawn: list[dict[str, Any]] = []
    if draws:
        # The same episodes in every draw, also where their seed was made up; not for guests.
        first = min(row["seed"] for row in rows)
        apart = any(row["source"] == "guest" for row in rows)
        names = options.policy
        drawn = evaluate_draws(options.env_id, names, draws, seed=first, apart=apart, **shared)
    workers.close()
    if options.out is not None:
        plain = [{"profile_draw": "none", **row} for row in rows] if drawn else rows
        write_rows(options.out, [*plain, *drawn])
    print_summary(rows, rows.logs, every=options.all)
    if drawn:
        print_draws(rows, drawn)


def _with_progress(executor: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """An executor that names every job that has ended in a line of the terminal."""

    def run(function: Any, jobs: Any, names: Any) -> Iterator[Any]:
        for done, (index, result) in enumerate(executor(function, jobs, names), 1):
            end = "\n" if done == len(jobs) else ""
            line = f"\r\033[K{done}/{len(jobs)}: {names[index]}"
            print(line, end=end, file=sys.stderr, flush=True)
            yield index, result

    return run
