"""The log of a run: ``metrics.jsonl``, wandb and the progress bar."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


def interval_passed(every: int, before: int, now: int) -> bool:
    """Whether a multiple of ``every`` lies between two counts; never for ``every`` = 0."""
    return every > 0 and now // every > before // every


class RunLog:
    """Metrics to ``metrics.jsonl`` always, to wandb with ``--track``, and a progress bar.

    Attributes:
        sps: Environment steps a second since the start or the resumption.
        phase: What the agent does now, until the next `advance`.
        said: Lines printed so far.
        latest: The run of this process, None before it has its environments.
    """

    latest: ClassVar[RunLog | None] = None

    def __init__(self, run: Path, args: Any, title: str, step: int = 0, size: int = 0) -> None:
        """Open the log of a run.

        Args:
            run: Folder of the run; made if it is not there.
            args: Arguments of the agent.
            title: Title of the progress bar.
            step: Steps already taken by a resumed run.
            size: Bytes of a resumed run's log at its snapshot; later bytes are cut off.
        """
        run.mkdir(parents=True, exist_ok=True)
        self.file = open(run / "metrics.jsonl", "ab" if step else "wb")  # noqa: SIM115
        self.file.truncate(size)
        self.title, self.first, self.begin, self.sps = title, step, time.perf_counter(), 0.0
        self.wandb: Any = None
        if args.track:
            import wandb

            self.wandb = wandb
            wandb.init(
                project=args.wandb_project_name, config=asdict(args), name=run.name, dir=str(run)
            )
        self.bar = Progress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        self.task = self.bar.add_task(title, total=args.total_timesteps, completed=step)
        self.phase, self.step, self.said = "running", step, 0
        self.returns: Any = 0.0
        self.ended: list[float] = []
        self.bar.start()
        RunLog.latest = self

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self.file.tell()

    def advance(self, step: int) -> float:
        """Show the step on the bar; returns `sps`."""
        self.sps = (step - self.first) / (time.perf_counter() - self.begin)
        self.phase, self.step = "running", step
        self.bar.update(self.task, completed=step, description=f"{self.title} {self.sps:.1f} SPS")
        return self.sps

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.said += 1
        self.bar.console.print(text)

    def add_rewards(self, reward: NDArray[Any], done: NDArray[np.bool_]) -> None:
        """Sum the rewards (B,) of a step; the next row has the mean return of ended episodes."""
        self.returns = self.returns + reward
        self.ended += self.returns[done].tolist()
        self.returns[done] = 0.0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log numbers by name."""
        row = {"global_step": step, **metrics}
        if self.ended:
            row["charts/episodic_return"], self.ended = float(np.mean(self.ended)), []
        self.file.write((json.dumps(row) + "\n").encode())
        self.file.flush()
        if self.wandb is not None:
            self.wandb.log(row, step=step)

    def print_qos(self, step: int, evaluation: Mapping[str, float]) -> None:
        """Print the average QoS of an evaluation above the bar."""
        qos = ", ".join(f"{key[5:]} {v:.4f}" for key, v in evaluation.items() if "qos" in key)
        self.say(f"step {step}: {qos}")

    def close(self) -> None:
        """Close the log, the bar and wandb's run."""
        self.bar.stop()
        self.file.close()
        if self.wandb is not None:
            self.wandb.finish()


def keep_telling(
    stop: threading.Event, every_s: float = 5.0, echo: Callable[[str], None] | None = None
) -> None:
    """Say what a run does, until ``stop``, once nothing was printed between two looks."""
    before: tuple[RunLog | None, int] = None, -1
    while not stop.wait(every_s):
        log = RunLog.latest
        now = log, log.said if log is not None else 0
        if now == before:
            text = "preparing the environments and the networks"
            if log is not None:
                text = f"{log.title}: {log.phase}, step {log.step}, {log.sps:.1f} SPS"
            if echo is not None:
                echo(text)
            elif log is None:
                print(text, flush=True)
            elif not log.bar.console.is_terminal:  # where it is one, the bar moves
                log.bar.console.print(text)
        before = now
