"""``servegym sweep``: a search for an agent's hyper-parameters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from servegym._checks import whole
from servegym._command_line import add_settings, parse_settings
from servegym.experiments.cli import command_parser
from servegym.experiments.sweeps.run import run_sweep
from servegym.experiments.sweeps.spec import list_sweeps, read_sweep


def main(argv: Sequence[str]) -> None:
    """Command line of ``servegym sweep``."""
    parser = command_parser("sweep")
    add = parser.add_argument
    add("file", nargs="?", help="a sweep file in wandb's format, or a shipped one by name")
    add("--trials", type=int, default=20, help="finished runs in the end (%(default)s)")
    add("--workers", type=int, default=1, help="runs at a time, one thread each (%(default)s)")
    add("--seed", type=int, default=0, help="seed of the choice of parameters (%(default)s)")
    add_settings(parser, "the agent, before the file's")
    add("--out", type=Path, metavar="FOLDER", help="folder of the sweep (sweeps/NAME)")
    add("--list", action="store_true", help="name the shipped sweeps, stop")
    options = parser.parse_args(argv)
    if options.list:
        for name in list_sweeps():
            sweep = read_sweep(name)
            print(f"{name}: {sweep.method} over {', '.join(sweep.searched)} of {sweep.program}")
        return
    if options.file is None:
        raise ValueError(f"name a sweep file or one of {list_sweeps()}")
    sweep, settings = read_sweep(options.file), parse_settings(options.set)
    whole("seed", options.seed, 0, 1 << 32)
    run_sweep(sweep, options.trials, options.workers, options.out, options.seed, settings)
