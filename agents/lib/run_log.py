"""A run's folder: its log ``metrics.jsonl``, its lock, wandb, the progress bar, how it ends."""

from __future__ import annotations

import fcntl
import functools
import itertools
import json
import shlex
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from servegym._files import naming
from servegym.agents.lib.evaluation import RULES
from servegym.agents.lib.snapshots import load_snapshot, save_snapshot
from servegym.envs.families import find_family

LOG, SNAPSHOT = "metrics.jsonl", "snapshot.safetensors"
OF_TRAINING = ("reward", "max_episode_steps", "split")  # not of an evaluation's environment
Args = TypeVar("Args", bound=Any)


def interval_passed(every: int, before: int, now: int) -> bool:
    """Whether a multiple of ``every`` lies between two counts; never for ``every`` = 0."""
    return every > 0 and now // every > before // every


class RunLog:
    """The folder of a run, locked; metrics to its log, to wandb with ``--track``, a progress bar.

    Attributes:
        run: The folder: a new one, or with ``--resume`` that of the run that goes on.
        saved: What `save_snapshot` wrote, in a run that goes on; else None.
        save: Writes the policy as it is to a file, also in a run that is interrupted; the agent
            sets it.
        sps: Environment steps a second since the start or the resumption.
        phase: What the agent does now, until the next `advance`.
        printed: Lines printed so far.
    """

    current: ClassVar[ContextVar[RunLog | None]] = ContextVar("current", default=None)

    def __init__(
        self, args: Any, name: str, env_id: str = "", env_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Take the folder, and what was saved in it if the run is resumed.

        Args:
            args: Arguments of the agent.
            name: Of the agent; with the seed the name of the folder, unless ``run_name`` has one.
            env_id: Environment in which the policy is to be evaluated.
            env_kwargs: Its arguments; those of a training alone are left out.

        Raises:
            ValueError: If ``run_name`` is that of another run, another process writes there, or
                the run cannot be resumed with these arguments.
        """
        self.args, self.title, self.env_id = args, name, env_id
        self.env_kwargs = {k: v for k, v in (env_kwargs or {}).items() if k not in OF_TRAINING}
        self.saved: dict[str, Any] | None = None
        resumed = _resumed(args, name) if getattr(args, "resume", False) else None
        self.run, self.file = _new(args, name) if resumed is None else resumed
        self.first = 0
        if resumed is not None:
            self.saved = load_snapshot(self.run / SNAPSHOT, name, args)
            self.first, size = self.saved["log"]
            if self.file.seek(0, 2) < size:
                raise ValueError(f"resume: {self.run / LOG} is shorter than at the snapshot")
            self.file.truncate(size)
            self.file.seek(size)
        self.begin, self.sps = time.perf_counter(), 0.0
        self.wandb: Any = None
        if args.track:
            import wandb

            self.wandb = wandb
            wandb.init(
                project=args.wandb_project_name,
                config=asdict(args),
                name=self.run.name,
                dir=str(self.run),
            )
        self.bar = Progress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        self.task = self.bar.add_task(name, total=args.total_timesteps, completed=self.first)
        self.phase, self.step, self.printed = "running", self.first, 0
        self.returns: Any = 0.0
        self.ended: list[float] = []
        self.save: Callable[[Path], None] | None = None
        print(f"{name} writes to {self.run}", flush=True)
        self.bar.start()
        self.closing = threading.Event()
        if not self.bar.console.is_terminal:  # where it is one, the bar moves
            threading.Thread(target=keep_telling, args=(self, self.closing), daemon=True).start()
        RunLog.current.set(self)

    def advance(self, step: int) -> float:
        """Show the step on the bar; returns `sps`."""
        self.sps = (step - self.first) / (time.perf_counter() - self.begin)
        self.phase, self.step = "running", step
        self.bar.update(self.task, completed=step, description=f"{self.title} {self.sps:.1f} SPS")
        return self.sps

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.printed += 1
        self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def say_score(
        self, step: int, metric: str, score: float, rule: tuple[str, float] | None = None
    ) -> None:
        """Print an evaluation above the bar, and what a rule has in the same episodes."""
        self.step = step
        beside = f" ({rule[0]} {rule[1]:.4f})" if rule is not None else ""
        self.say(f"step {step}: evaluation, {metric} {score:.4f}{beside}")

    def say_qos(self, step: int, evaluation: Mapping[str, float]) -> None:
        """Print an evaluation of `evaluate_router`."""
        rule = RULES["llm_routing"], evaluation["eval/rule_qos"]
        self.say_score(step, "QoS", evaluation["eval/avg_qos"], rule)

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
        with naming(self.run / LOG):
            self.file.write((json.dumps(row) + "\n").encode())
            self.file.flush()
        if self.wandb is not None:
            self.wandb.log(row, step=step)

    def save_snapshot(self, step: int, **content: Any) -> None:
        """Write the state of the run, from which it goes on exactly; see `save_snapshot`."""
        content["log"] = [step, self.file.tell()]
        save_snapshot(self.run / SNAPSHOT, self.title, self.args, content)

    def close(self, ended: str = "") -> None:
        """Close the log, the bar and wandb's run, once; says how it ended, and what there is."""
        if self.file.closed:
            return
        self.closing.set()
        self.bar.stop()
        with naming(self.run / LOG):
            self.file.close()
        if self.wandb is not None:
            self.wandb.finish()
        RunLog.current.set(None)
        if ended:
            print(f"{self.title} {ended}{self._what_there_is()}", flush=True)

    def interrupted(self) -> None:
        """Save the policy as it is, and close."""
        with _no_interrupts():
            if self.args.save_model and self.save is not None:
                self.save(self.run / "last.safetensors")
            again = ""
            if (self.run / SNAPSHOT).exists():
                name = shlex.quote(self.args.run_name or self.run.name)
                again = f" (it goes on with the same flags, --resume True --run_name {name})"
            self.close(f"interrupted after step {self.step}{again}; ")

    def _what_there_is(self) -> str:
        """The checkpoint, and the command that evaluates it."""
        files = [self.run / f"{name}.safetensors" for name in ("best", "last")]
        path = next((file for file in files if file.exists()), None)
        if path is None:
            return f"no checkpoint, its log is {self.run / LOG}"
        if find_family(self.env_id) is None:
            return f"checkpoint {path}"
        words = ["servegym", "evaluate", self.env_id]
        for key, value in self.env_kwargs.items():
            words += ["--set", f"{key}={json.dumps(value, separators=(',', ':'))}"]
        command = shlex.join([*words, "--policy", str(path)])
        return f"checkpoint {path}, evaluate it with: {command}"


def saves_when_interrupted(train: Callable[[Args], Path]) -> Callable[[Args], Path]:
    """A training that checks its arguments, closes its log however it ends, and on Ctrl-C saves."""

    @functools.wraps(train)
    def run(args: Args) -> Path:
        RunLog.current.set(None)
        args.check()
        try:
            folder = train(args)
            if (log := RunLog.current.get()) is not None:
                log.close("ended\n")
            return folder
        except KeyboardInterrupt:
            if (log := RunLog.current.get()) is not None:
                log.interrupted()
            else:
                print("interrupted before the run began: nothing was written")
            raise
        finally:
            if (log := RunLog.current.get()) is not None:
                log.close()

    return run


class _no_interrupts:  # noqa: N801 - used as a function
    """Ctrl-C is ignored meanwhile, where this thread may say so."""

    def __enter__(self) -> None:
        self.main = threading.current_thread() is threading.main_thread()
        self.before = signal.signal(signal.SIGINT, signal.SIG_IGN) if self.main else None

    def __exit__(self, *_: Any) -> None:
        if self.main:
            signal.signal(signal.SIGINT, self.before)


def _folders(args: Any, name: str) -> Any:
    """The folder of a run and those that follow it where it is taken: ppo_1, ppo_1_2, ..."""
    if args.run_name:
        return iter([Path(args.out_dir) / args.run_name])
    stem = f"{name}_{args.seed}"
    numbered = (stem if k == 1 else f"{stem}_{k}" for k in itertools.count(1))
    return (Path(args.out_dir) / each for each in numbered)


def _new(args: Any, name: str) -> tuple[Path, BinaryIO]:
    """The first folder without a run, made if it is not there, and its log, locked."""
    for run in _folders(args, name):
        run.mkdir(parents=True, exist_ok=True)
        if not any(run.glob("*.safetensors")):
            try:
                return run, _lock(open(run / LOG, "xb"), run)  # noqa: SIM115
            except FileExistsError:
                pass
    go_on = " or continue it with --resume True" if hasattr(args, "resume") else ""
    raise ValueError(f"run_name: {run} holds a run; give another name{go_on}")


def _resumed(args: Any, name: str) -> tuple[Path, BinaryIO] | None:
    """The last folder with a run, and its log, locked; None, with a message, if there is none."""
    having = itertools.takewhile(lambda run: (run / LOG).exists(), _folders(args, name))
    run = next(iter([*having][-1:]), None)
    if run is None:
        first = next(_folders(args, name))
        print(f"no run to resume at {first}: it begins anew", flush=True)
        return None
    file = _lock(open(run / LOG, "r+b"), run)  # noqa: SIM115
    if not (run / SNAPSHOT).exists():
        raise ValueError(
            f"resume: {run} has no snapshot; begin anew without --resume, under another name, and "
            "have snapshots (--checkpoint_every, where the agent has it)"
        )
    return run, file


def _lock(file: BinaryIO, run: Path) -> BinaryIO:
    """The file, locked until it is closed or the process ends, however that be."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(
            f"run_name: another process writes to {run}; give another name or wait for its end"
        ) from None
    return file


def keep_telling(log: RunLog, stop: threading.Event, every_s: float = 5.0) -> None:
    """Say what a run does, until ``stop``, once nothing was printed between two looks."""
    before = -1
    while not stop.wait(every_s):
        if log.printed == before:
            text = f"{log.title}: {log.phase}, step {log.step}, {log.sps:.1f} SPS"
            log.bar.console.print(text, markup=False, highlight=False)
        before = log.printed
