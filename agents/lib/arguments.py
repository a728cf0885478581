"""Command-line flags of every training run, whatever the algorithm, and how an agent is run."""

from __future__ import annotations

import math
import multiprocessing
import signal
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import tyro

from servegym._checks import real
from servegym._command_line import parse_settings, run_main
from servegym.agents.lib.run_log import STOPS

SHARE, ABOVE_ZERO = (0.0, 1.0, False), (0.0, 1e6, True)
BOUNDS: dict[str, tuple[float, float, bool]] = {
    **dict.fromkeys(("gamma", "lam", "gae_lambda", "common_credit"), SHARE),
    **dict.fromkeys(("explore", "rent", "rent_rises"), SHARE),
    "temperature": ABOVE_ZERO,
    **dict.fromkeys(("lr", "learning_rate", "table_learning_rate"), SHARE),
    "clip_coef": (0.0, 1.0, True),
    **dict.fromkeys(("max_grad_norm", "std_first", "std_last", "height_unit"), ABOVE_ZERO),
    **dict.fromkeys(("traffic_s", "horizon_s", "spread", "eval_rates"), ABOVE_ZERO),
}
"""Field -> the least and greatest number, and whether it must be above the least; those that are
not here are from zero to a thousand."""
MOST = {"seed": 2**32 - 1, "total_timesteps": 10**12, "torch_threads": 1024, "workers": 1024}
"""Field -> the greatest whole number, a billion for counts that are not here."""
_MAY_BE_ZERO = ("seed",)  # so may whole numbers that are zero by default


def at_least(name: str, value: int, least: int, most: float = math.inf) -> None:
    """Refuse a flag that is no whole number, or out of bounds.

    Raises:
        ValueError: If it is.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not least <= value <= most:
        allowed = f"{most:,} or less" if whole and value > most else f"{least} or more"
        allowed = allowed if whole else f"a whole number, {allowed}"
        raise ValueError(f"{name}: got {value!r}; it must be {allowed}")


@dataclass
class RunArgs:
    """Flags of every run."""

    seed: int = 1
    """seed of the networks, the exploration and the training episodes"""
    torch_threads: int = 1
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
        """Refuse a number that is out of bounds, as a training does before it begins.

        Raises:
            ValueError: Naming the flag.
        """
        if self.run_name and (self.run_name == ".." or Path(self.run_name).name != self.run_name):
            raise ValueError(f"run_name: got {self.run_name!r}; it must name one folder in out_dir")
        types = get_type_hints(type(self))
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if types[name] is int:
                least = int(field.default != 0 and name not in _MAY_BE_ZERO)
                at_least(name, value, least, MOST.get(name, 10**9))
            elif types[name] in (float, tuple[float, ...]):
                low, high, above = BOUNDS.get(name, (0.0, 1e3, False))
                several = isinstance(value, tuple | list)
                if several and not value:
                    raise ValueError(f"{name}: got none; give one number or more")
                for number in value if several else (value,):
                    real(name, number, low, high, open_low=above)


def grouped_settings(args: Any, size: str) -> dict[str, Any]:
    """The environment arguments ``set`` of a placement agent, whose rewards are paid by groups.

    Args:
        args: Its arguments.
        size: The flag that must be a multiple of ``group_size``.

    Raises:
        ValueError: If it is none, or ``set`` has an argument that belongs to the agent.
    """
    at_least("group_size", args.group_size, 2)
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
            for number in STOPS:
                signal.signal(number, signal.SIG_DFL)  # another one ends what is left at once
            for child in multiprocessing.active_children():
                child.kill()
            return 128 + getattr(stop, "number", signal.SIGINT)
        return 0

    run_main(run)
