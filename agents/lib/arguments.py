"""Command-line flags of every training run, whatever the algorithm."""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass
class ResumableRunArgs(RunArgs):
    """Flags of a run that may be stopped and resumed."""

    cuda: bool = False
    """run the networks on a GPU"""
    checkpoint_every: int = 0
    """steps between snapshots to resume from (0: none); a snapshot holds the collected steps"""
    resume: bool = False
    """continue from the snapshot in the run's folder; the log goes on as if uninterrupted"""
