"""A run's folder: arguments, log, lock, snapshots, wandb, the progress bar, how it ends."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import math
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from servegym._files import locked, naming, write_text
from servegym.agents.lib.evaluation import RULES
from servegym.agents.lib.snapshots import load_snapshot, restore_state, save_snapshot, state_of
from servegym.envs.families import find_family

LOG, SNAPSHOT, ARGUMENTS = "metrics.jsonl", "snapshot.safetensors", "args.json"
OF_TRAINING = ("reward", "max_episode_steps", "split")  # not of an evaluation's environment
STOPS = (signal.SIGINT, signal.SIGTERM)
SNAPSHOT_EVERY_S = 60.0
SAID_EVERY_S = 5.0
EARLY = (2_000, 5_000, 10_000, 20_000, 30_000)
"""Decisions at which routers are evaluated besides: most of what they learn is learned here."""
Args = TypeVar("Args", bound=Any)


def interval_passed(every: int, before: int, now: int) -> bool:
    """Whether a multiple of ``every`` lies between two counts; never for ``every`` = 0."""
    return every > 0 and now // every > before // every


def evaluation_due(every: int, before: int, now: int) -> bool:
    """Whether a multiple of ``every``, or one of `EARLY` below it, lies between two counts."""
    early = any(before < at <= now for at in EARLY if at < every)
    return early or interval_passed(every, before, now)


class RunLog:
    """The folder of a run, locked; metrics to its log, to wandb with ``--track``, a progress bar.

    Attributes:
        run: The folder: a new one, or with ``--resume`` that of the run that goes on.
        saved: The content of the snapshot, in a run that goes on; else None.
        save: Writes the policy as it is to a file, also in a run that is interrupted; the agent
            sets it.
        step: The decisions so far.
        sps: Environment steps a second since the (re)start.
        stop: The signal that told the run to end, 0 if none did.
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
        resumed = _resumed(args, name) if args.resume else None
        self.run, self.file = _new(args, name) if resumed is None else resumed
        self.first = 0
        if resumed is not None:
            self.saved = load_snapshot(self.run / SNAPSHOT, name, args)
            self.first, size = self.saved["log"]
            if self.file.seek(0, 2) < size:
                raise ValueError(f"resume: {self.run / LOG} is shorter than at the snapshot")
            self.file.truncate(size)
            self.file.seek(size)
        write_text(self.run / ARGUMENTS, json.dumps(self._arguments(), indent=1) + "\n")
        self.begin, self.begin_cpu = time.perf_counter(), time.process_time()
        self.wandb: Any = None
        if args.track:
            import wandb

            self.wandb = wandb
            named = {"project": args.wandb_project_name, "name": self.run.name}
            wandb.init(**named, config=asdict(args), dir=str(self.run))
        self.events = _tensorboard(self.run, self.first)
        self.returns: Any = 0.0
        self.ended: list[float] = []
        self.scored: dict[str, float] = {}
        self.save: Callable[[Path], None] | None = None
        self.stop, self.written = 0, -math.inf
        print(f"{name} writes to {self.run}", flush=True)
        columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
        console = Console()  # where it is no terminal no bar moves, and `advance` prints lines
        self.bar = Progress(*columns, console=console, auto_refresh=console.is_terminal)
        self.task = self.bar.add_task(name, total=args.total_timesteps, completed=self.first)
        self.bar.start()
        self.step, self.sps, self.said = self.first, 0.0, time.perf_counter()
        RunLog.current.set(self)

    def _arguments(self) -> dict[str, Any]:
        """What `ARGUMENTS` holds: the agent's file, the title, the environment, every flag."""
        agent = Path(inspect.getfile(type(self.args))).stem  # the module's name may be __main__
        environment = {"env_id": self.env_id, "env_kwargs": self.env_kwargs}
        return {"agent": agent, "name": self.title, **environment, "args": asdict(self.args)}

    @property
    def cpu_s(self) -> float:
        """Processor seconds of the run, without those before its folder was made."""
        before = self.saved["cpu_s"] if self.saved else 0.0
        return before + time.process_time() - self.begin_cpu

    def advance(self, step: int) -> float:
        """Show the step, without a terminal every few seconds; returns `sps`."""
        now = time.perf_counter()
        self.step, self.sps = step, (step - self.first) / (now - self.begin)
        self.bar.update(self.task, completed=step, description=f"{self.title} {self.sps:.1f} SPS")
        if not self.bar.console.is_terminal and now - self.said > SAID_EVERY_S:
            self.say(f"{self.title}: step {step}, {self.sps:.1f} SPS")
        return self.sps

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.said = time.perf_counter()
        self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def say_score(
        self, step: int, metric: str, score: float, rule: tuple[str, float] | None = None
    ) -> None:
        """Print an evaluation, and what a rule has in the same episodes; the next row has both."""
        self.step = step
        beside = f" ({rule[0]} {rule[1]:.4f})" if rule is not None else ""
        self.say(f"step {step}: evaluation, {metric} {score:.4f}{beside}")
        self.scored = {"eval/score": score}
        if rule is not None:
            self.scored["eval/rule_score"] = rule[1]

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
        row = {"global_step": step, "charts/cpu_s": self.cpu_s, **self.scored, **metrics}
        self.scored = {}
        if self.ended:
            row["charts/episodic_return"], self.ended = float(np.mean(self.ended)), []
        with naming(self.run / LOG):
            self.file.write((json.dumps(row) + "\n").encode())
            self.file.flush()
        if self.wandb is not None:
            self.wandb.log(row, step=step)
        if self.events is not None:
            for key, value in row.items():
                self.events.add_scalar(key, value, step)

    def restore(self, parts: Mapping[str, Any], numbers: tuple[Any, ...]) -> tuple[Any, ...]:
        """Put the state of the run that goes on into its parts; returns its numbers.

        ``parts`` (name -> what `state_of` takes) were made with the same arguments; ``numbers`` are
        counts, scores and arrays besides, as they are in a run that begins.
        """
        if self.saved is None:
            return numbers
        for name, part in parts.items():
            restore_state(part, self.saved["parts"][name])
        torch.set_rng_state(self.saved["torch_rng"])
        self.returns, self.ended = self.saved["returns"], self.saved["ended"]
        return tuple(self.saved["numbers"])

    def snapshot(self, step: int, parts: Mapping[str, Any], numbers: tuple[Any, ...]) -> None:
        """Save what `restore` takes if it is time; KeyboardInterrupt if a signal told to stop.

        Agents call this where all their state is in parts and numbers. A snapshot is due every
        minute, at first and last and after a signal; there is none without ``--save_model``.
        """
        self.step = step
        ended = self.stop or step >= self.args.total_timesteps
        if self.args.save_model and (
            ended or self.written + SNAPSHOT_EVERY_S < time.perf_counter()
        ):
            content = {
                "parts": {name: state_of(part) for name, part in parts.items()},
                "numbers": numbers,
                "torch_rng": torch.get_rng_state(),
                "returns": self.returns,
                "ended": self.ended,
                "cpu_s": self.cpu_s,
                "log": [step, self.file.tell()],
            }
            save_snapshot(self.run / SNAPSHOT, self.title, self.args, content)
            self.written = time.perf_counter()
        if self.stop:
            raise KeyboardInterrupt(self.stop)

    def close(self, ended: str = "") -> None:
        """Close the log, the bar, wandb's run and the threads, once; says how it ended."""
        if self.file.closed:
            return
        self.bar.stop()
        with naming(self.run / LOG):
            self.file.close()
        if self.wandb is not None:
            self.wandb.finish()
        if self.events is not None:
            self.events.close()
        RunLog.current.set(None)
        if ended:
            print(f"{self.title} {ended}{self._what_there_is()}", flush=True)

    def interrupted(self) -> None:
        """Save the policy as it is, and close."""
        with _handling(signal.SIG_IGN):
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
    """A training that checks its arguments, closes its log however it ends, and saves on a signal.

    SIGINT (Ctrl-C) and SIGTERM end it at the next `RunLog.snapshot`, a second one at once.
    """

    @functools.wraps(train)
    def run(args: Args) -> Path:
        RunLog.current.set(None)
        args.check()
        try:
            with _handling(_stop):
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


@contextmanager
def _handling(handler: Any) -> Iterator[None]:
    """Another handler of `STOPS` meanwhile, where this thread may set it."""
    main = threading.current_thread() is threading.main_thread()
    before = [signal.signal(number, handler) for number in STOPS if main]
    try:
        yield
    finally:
        for number, other in zip(STOPS, before, strict=False):
            signal.signal(number, other)


def _stop(number: int, _: Any) -> None:
    """Tell the run to end where it can be saved exactly, at a second signal at once."""
    log = RunLog.current.get()
    if log is None or log.stop:
        raise KeyboardInterrupt(log.stop if log else number)
    log.stop = number


def _tensorboard(run: Path, first: int) -> Any:
    """A writer of TensorBoard's events into the folder, from step ``first`` on, if it is there."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(run), purge_step=first or None)


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
                return run, _locked(run, "xb")
            except FileExistsError:
                pass
    raise ValueError(
        f"run_name: {run} holds a run; give another name or continue it with --resume True"
    )


def _resumed(args: Any, name: str) -> tuple[Path, BinaryIO] | None:
    """The last folder with a run, and its log, locked; None, with a message, if there is none."""
    having = itertools.takewhile(lambda run: (run / LOG).exists(), _folders(args, name))
    run = next(iter([*having][-1:]), None)
    if run is None:
        first = next(_folders(args, name))
        print(f"no run to resume at {first}: it begins anew", flush=True)
        return None
    file = _locked(run, "r+b")
    if not (run / SNAPSHOT).exists():
        raise ValueError(
            f"resume: {run} has no snapshot; begin anew without --resume, under another name, and "
            "leave --save_model True"
        )
    return run, file


def _locked(run: Path, mode: Literal["xb", "r+b"]) -> BinaryIO:
    """The log of a run, which no other process writes to."""
    busy = f"run_name: another process writes to {run}; give another name or wait for its end"
    return locked(run / LOG, busy, mode)
