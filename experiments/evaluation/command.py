"""``servegym evaluate``: policies on the same episodes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from servegym._checks import whole
from servegym._command_line import add_settings, parse_settings
from servegym.experiments.cli import command_parser
from servegym.experiments.evaluation.output import check_writable, write_csv, write_json


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("evaluate")
    add = parser.add_argument
    add("env_id", metavar="ENV_ID", help="id of an environment, see `servegym list`")
    text = "policy by name, or the path of a checkpoint, .py or SB3 .zip file; repeatable"
    add("--policy", action="append", required=True, metavar="NAME_OR_FILE", help=text)
    add("--episodes", type=int, default=20, help="episodes a policy (%(default)s)")
    text = "seed of the first episode; episode i has seed + i. Default: 100000, or with a .py or "
    text += ".zip file one that nobody knew before"
    add("--seed", type=int, help=text)
    add_settings(parser, "the environment (split eval unless set)")
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
    from servegym.experiments.evaluation.profile_draws import drawn_worlds, evaluate_in, print_draws

    worlds = drawn_worlds(options.env_id, settings, draws) if draws else []
    workers = Workers(ray=options.ray)
    shared: dict[str, Any] = {
        "episodes": options.episodes,
        "num_envs": options.num_envs,
        "executor": _with_progress(workers) if sys.stderr.isatty() else workers,
        "guests": Guests(options.time_limit, options.in_process),
    }
    first = {"seed": options.seed, "env_kwargs": settings}
    rows = evaluate(options.env_id, options.policy, **first, **shared)
    drawn = evaluate_in(worlds, rows, options.env_id, options.policy, **shared)
    workers.close()
    if options.out is not None:
        plain = [{"profile_draw": "none", **row} for row in rows] if drawn else rows
        write = write_json if options.out.suffix.lower() == ".json" else write_csv
        write(options.out, [*plain, *drawn])
    print_summary(rows, every=options.all)
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
