"""Command-line flags of every training run, whatever the algorithm, and how an agent is run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NoReturn

import tyro

from servegym._command_line import run_main
from servegym.agents.lib.run_log import keep_telling

# Whole numbers that may be zero; so may those that are zero by default.
_MAY_BE_ZERO = ("seed", "eval_every")


def at_least(name: str, value: int, least: int) -> None:
    """Refuse a flag below its least value.

    Raises:
        ValueError: If it is below.
    """
    if value < least:
        raise ValueError(f"{name}: got {value}; it must be {least} or more")


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
    """folder of this run (default: a name with the agent and the seed)"""

    parsing: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for field in () if self.parsing else fields(self):
            if field.type == "int":
                least = int(field.default != 0 and field.name not in _MAY_BE_ZERO)
                at_least(field.name, getattr(self, field.name), least)


@dataclass
class ResumableRunArgs(RunArgs):
    """Flags of a run that may be stopped and resumed."""

    cuda: bool = False
    """run the networks on a GPU"""
    checkpoint_every: int = 0
    """steps between snapshots to resume from (0: none); a snapshot holds the collected steps"""
    resume: bool = False
    """continue from the snapshot in the run's folder; the log goes on as if uninterrupted"""


def run_agent(train: Callable[[Any], Any], args: type[RunArgs]) -> NoReturn:
    """Train with the flags of the command line; a mistake in them is one line and status 2."""
    ended = threading.Event()
    silent = threading.Thread(target=keep_telling, args=(ended,), daemon=True)

    def run() -> None:
        RunArgs.parsing = True  # tyro would tell a mistake in a box of six lines
        try:
            given = tyro.cli(args, config=(tyro.conf.FlagConversionOff,))
        finally:
            RunArgs.parsing = False
        given.__post_init__()
        silent.start()
        try:
            train(given)
        finally:
            ended.set()

    run_main(run)
