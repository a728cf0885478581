"""Command-line flags of every training run, whatever the algorithm, and how an agent is run."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn, get_args, get_origin, get_type_hints

import tyro

from servegym._checks import LARGEST, real, whole
from servegym._command_line import parse_settings, run_main


class Bounds(NamedTuple):
    """The least and the greatest number of a field, and whether it must be above the least."""

    low: float
    high: float
    above: bool = False


Share = Annotated[float, Bounds(0.0, 1.0)]
PositiveShare = Annotated[float, Bounds(0.0, 1.0, above=True)]
Positive = Annotated[float, Bounds(0.0, 1e6, above=True)]
Weight = Annotated[float, Bounds(0.0, 1e3)]
Threads = Annotated[int, Bounds(1, 1024)]
"""Types of an agent's numbers, with bounds. A plain ``int`` is a count: from 1, or from a default
below that, to 10^12. A plain ``float`` is any finite number."""


@dataclass
class RunArgs:
    """Flags of every run."""

    seed: Annotated[int, Bounds(0, 2**32 - 1)] = 1
    """seed of the networks, the exploration and the training episodes"""
    torch_threads: Threads = 1
    """threads of torch"""
    track: bool = False
    """log to wandb as well; its team is taken from WANDB_ENTITY"""
    wandb_project_name: str = "servegym"
    """wandb project"""
    save_model: bool = True
    """write last.safetensors, and best.safetensors where an agent keeps its best policy"""
    out_dir: str = "runs"
    """folder of the runs"""
    run_name: str = ""
    """folder of this run, a new one (default: agent and seed, numbered where there is one)"""
    resume: bool = False
    """go on from the snapshot in the run's folder, or the last of that default name, with the
    same arguments; the log is that of a run without the stop"""

    def check(self) -> None:
        """Refuse a number out of bounds, by its flag, as a training does before it begins."""
        if self.run_name and (self.run_name == ".." or Path(self.run_name).name != self.run_name):
            raise ValueError(f"run_name: got {self.run_name!r}; it must name one folder in out_dir")
        hints = get_type_hints(type(self), include_extras=True)
        for field in fields(self):
            name, default, hint = field.name, field.default, hints[field.name]
            value: Any = getattr(self, name)
            several = get_origin(hint) is tuple
            hint = get_args(hint)[0] if several else hint
            kind, *declared = get_args(hint) or (hint,)
            bounds = next((one for one in declared if isinstance(one, Bounds)), None)
            if kind is int:
                low, high, _ = bounds or Bounds(min(1, default), 10**12)  # pyright: ignore
                whole(name, value, int(low), high)
            elif kind is float:
                if several and not value:
                    raise ValueError(f"{name}: got none; give one number or more")
                low, high, above = bounds or Bounds(-LARGEST, LARGEST)
                for number in value if several else (value,):
                    real(name, number, low, high, open_low=above)


def grouped_settings(args: Any, size: str) -> dict[str, Any]:
    """The arguments ``set`` of a placement agent, which is paid by groups of ``group_size``.

    ``size`` names the flag that must be a multiple of it; ``set`` may hold no argument of the
    agent.
    """
    whole("group_size", args.group_size, 2)
    if getattr(args, size) % args.group_size:
        value = getattr(args, size)
        raise ValueError(f"{size} is {value}; allowed are multiples of group_size")
    settings = parse_settings(args.set)
    fixed = [name for name in ("action_mode", "reward", "free_start") if name in settings]
    if fixed:
        raise ValueError(f"set: {fixed[0]} belongs to the agent; leave it out")
    return settings


def run_agent(train: Callable[[Any], Any], args: type[RunArgs]) -> NoReturn:
    """Train with the flags of the command line.

    A mistake in them is one line and status 2; Ctrl-C, or a SIGTERM, is one line and status 130, or
    143.
    """

    def run() -> int:
        try:
            train(tyro.cli(args, config=(tyro.conf.FlagConversionOff,)))
        except KeyboardInterrupt as stop:
            return 128 + (stop.args or (signal.SIGINT,))[0]
        return 0

    run_main(run)
