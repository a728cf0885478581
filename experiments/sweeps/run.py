"""Run a sweep file on this machine: Optuna chooses, every run is a process of the agent.

``bayes`` is Optuna's tree-structured Parzen estimator, and early termination its hyperband pruner.
A run's value is the best evaluation of its log, since the agent saves that checkpoint. A stopped
sweep goes on: unfinished runs are run again with the same arguments.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from servegym._checks import whole
from servegym._command_line import interrupt_on_signals
from servegym._files import locked, naming
from servegym.experiments.evaluation.output import print_table, write_csv, write_text
from servegym.experiments.evaluation.tables import provenance, write_result
from servegym.experiments.runs import read_metrics
from servegym.experiments.sweeps.spec import Sweep

JOURNAL = "study.journal"
POLL_S = 0.5
MAX_FAILURES = 3
"""Failed runs after which a sweep without any good run ends."""


def run_sweep(
    sweep: Sweep,
    trials: int,
    workers: int = 1,
    out: Path | None = None,
    seed: int = 0,
    fixed: Mapping[str, Any] | None = None,
) -> Path:
    """Run or resume a sweep until it has ``trials`` finished runs.

    Args:
        sweep: The sweep.
        trials: Finished runs in the end, earlier ones included.
        workers: Runs at a time, each a process with one thread.
        out: Folder of the sweep; ``sweeps/NAME`` by default.
        seed: Seed of the choice of parameters.
        fixed: Arguments of the agent that take precedence over the file's.

    Returns:
        The folder: ``trials.csv``, ``runs/``.

    Raises:
        ValueError: If an argument is out of range, another process runs the sweep, or its folder
            holds another sweep.
        RuntimeError: If every run fails, or the first one logs no such metric.
    """
    whole("trials", trials, 1)
    whole("workers", workers, 1)
    folder = out or Path("sweeps") / sweep.path.stem
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder), interrupt_on_signals():
        mend_journal(folder / JOURNAL)
        save_definition(folder, sweep, fixed or {})
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        runs = _Runs(sweep, folder, trials, seed, dict(fixed or {}))
        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(runs.loop) for _ in range(workers)]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                runs.stop.set()
                raise
        runs.report(seed)
        if runs.failed and not runs.finished():
            raise RuntimeError(runs.lacks or f"every run failed; see {folder / 'runs'}")
    return folder


def lock(folder: Path) -> BinaryIO:
    """Hold the folder of a sweep or a tuning; refuse one that another process holds."""
    return locked(folder / "lock", f"out is {str(folder)!r}, where another process is at work")


def save_definition(folder: Path, sweep: Sweep, fixed: Mapping[str, Any]) -> None:
    """Write ``sweep.yaml``: the file and the fixed arguments of the sweep.

    Raises:
        ValueError: If the folder holds the runs of another definition.
    """
    text = sweep.path.read_text(encoding="utf-8")
    if fixed:
        text += f"\n# fixed: {json.dumps(dict(sorted(fixed.items())))}\n"
    definition = folder / "sweep.yaml"
    if definition.exists() and definition.read_text(encoding="utf-8") != text:
        raise ValueError(
            f"out is {str(folder)!r}, which holds another sweep or another version of this one; "
            "name another folder"
        )
    write_text(definition, text)


def mend_journal(journal: Path) -> None:
    """Undo what a killed process left: Optuna's lock, which nobody holds, and a half-written line.

    Optuna waits for ever where the lock is a link to no file, as it is after a relative path.
    """
    Path(f"{journal}.lock").unlink(missing_ok=True)
    if journal.exists():
        whole, end, cut = journal.read_bytes().rpartition(b"\n")
        if cut:
            write_text(journal, whole + end)


def _study(sweep: Sweep, folder: Path, seed: int) -> optuna.Study:
    """The study in a folder, with the runs first in its queue that a stopped process left."""
    journal = folder / JOURNAL
    backend: Any = JournalFileBackend(str(journal))
    append = backend.append_logs

    def append_logs(logs: list[dict[str, Any]]) -> None:
        with naming(journal):
            append(logs)

    backend.append_logs = append_logs
    storage = optuna.storages.JournalStorage(backend)
    begun = optuna.study.get_all_study_names(storage)
    done = len(optuna.load_study(study_name="sweep", storage=storage).trials) if begun else 0
    # A sampler begins anew with every process, so that its seed must not be the one of before.
    sampler: Any = optuna.samplers.RandomSampler(seed=seed + done)
    if sweep.method == "bayes":
        sampler = optuna.samplers.TPESampler(seed=seed + done, multivariate=True)
    pruner: Any = optuna.pruners.NopPruner()
    if sweep.min_iter:
        least, eta = sweep.min_iter, sweep.eta
        pruner = optuna.pruners.HyperbandPruner(min_resource=least, reduction_factor=eta)
    settings: dict[str, Any] = {"storage": storage, "sampler": sampler, "pruner": pruner}
    settings["direction"] = "maximize" if sweep.maximize else "minimize"
    study = optuna.create_study(study_name="sweep", load_if_exists=True, **settings)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
        if set(trial.params) == set(sweep.searched):
            study.enqueue_trial(trial.params)
    return study


class _Runs:
    """The runs of a sweep, which worker threads share."""

    def __init__(
        self, sweep: Sweep, folder: Path, trials: int, seed: int, fixed: dict[str, Any]
    ) -> None:
        self.sweep, self.folder, self.study = sweep, folder, _study(sweep, folder, seed)
        self.trials, self.fixed = trials, fixed
        self.best = max if sweep.maximize else min
        self.lock, self.stop = threading.Lock(), threading.Event()
        self.running, self.failed, self.lacks = 0, 0, ""

    def finished(self) -> int:
        """How many runs count: complete ones and those stopped early."""
        states = (TrialState.COMPLETE, TrialState.PRUNED)
        return len(self.study.get_trials(deepcopy=False, states=states))

    def next_trial(self) -> optuna.Trial | None:
        """The next run with its arguments, or None when there is no more to begin."""
        with self.lock:
            if self.stop.is_set() or self.finished() + self.running >= self.trials:
                return None
            trial = self.study.ask(dict(self.sweep.searched))
            self.running += 1
            return trial

    def loop(self) -> None:
        """Run trials one after another until there are enough."""
        while (trial := self.next_trial()) is not None:
            try:
                self.run(trial)
            finally:
                with self.lock:
                    self.running -= 1

    def run(self, trial: optuna.Trial) -> None:
        """One run: the agent's process, its evaluations to the pruner, its value to the study."""
        begin = time.monotonic()
        run = self.folder / "runs" / f"trial_{trial.number:04d}"
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir(parents=True)
        values: list[float] = []

        def report_evaluations() -> bool:
            """Report what is new in the log; whether the run is to end."""
            prune = self.stop.is_set()
            logged = [row.get(self.sweep.metric) for row in read_metrics(run)]
            new = [float(value) for value in logged if value is not None][len(values) :]
            for value in new:
                values.append(value)
                with self.lock:
                    trial.report(value, len(values))
                    prune |= bool(self.sweep.min_iter and trial.should_prune())
            return prune

        command = agent_command(self.sweep, {**trial.params, **self.fixed}, run)
        status = run_process(command, run / "output.log", report_evaluations)
        if self.stop.is_set():
            return  # left as running: the next process runs it again
        if status is not None:
            report_evaluations()  # those of the last moment; a run that has ended is not pruned
        self.finish(trial, run, status, values, begin)

    def finish(
        self, trial: optuna.Trial, run: Path, status: int | None, values: list[float], begin: float
    ) -> None:
        """Record how a run ended, None is stopped early, and print a line."""
        seconds = time.monotonic() - begin
        best = self.best(values) if values else math.nan
        good = status == 0 and bool(values)
        ended = TrialState.COMPLETE if good else TrialState.FAIL
        outcome = f"{self.sweep.metric} {best:.5g}"
        if status is None:
            ended, outcome = TrialState.PRUNED, f"stopped early at {best:.5g}"
        with self.lock:
            trial.set_user_attr("seconds", round(seconds, 1))
            trial.set_user_attr("evaluations", len(values))
            if ended != TrialState.FAIL:
                trial.set_user_attr("best", best)
            self.study.tell(trial, best if good else None, ended)
            if ended == TrialState.FAIL:
                self.failed += 1
                outcome = f"failed with status {status}, see {run / 'output.log'}"
                if status == 0:
                    names = {name for row in read_metrics(run) for name in row}
                    outcome = self.lacks = (
                        f"metric {self.sweep.metric!r} is not in the log of {run.name}; in it are: "
                        f"{', '.join(sorted(names)) or 'nothing'}"
                    )
                if (self.failed >= MAX_FAILURES or self.lacks) and not self.finished():
                    self.stop.set()
            write_csv(self.folder / "trials.csv", self.rows())
            chosen = ", ".join(f"{key}={short(value)}" for key, value in trial.params.items())
            print(f"{run.name}: {outcome} ({seconds:.0f} s; {chosen})", flush=True)

    def rows(self) -> list[dict[str, Any]]:
        """A row a run, the best first."""
        rows, metric = [], self.sweep.metric
        ended = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
        for trial in self.study.get_trials(deepcopy=False, states=ended):
            row = {"trial": trial.number, "state": trial.state.name.lower()}
            row[metric] = trial.user_attrs.get("best", math.nan)
            row |= {key: trial.user_attrs.get(key, "") for key in ("evaluations", "seconds")}
            rows.append(row | {name: trial.params.get(name, "") for name in self.sweep.searched})
        sign = -1 if self.sweep.maximize else 1
        return sorted(rows, key=lambda row: (math.isnan(row[metric]), sign * row[metric]))

    def report(self, seed: int) -> None:
        """Print the best runs and write the table."""
        rows, metric, folder = self.rows(), self.sweep.metric, self.folder
        command = shlex.join(["servegym", "sweep", str(self.sweep.path), "--out", str(folder)])
        settings = {"seed": seed, "fixed": self.fixed}
        origin = provenance(command, packages=("optuna",), settings=settings)
        write_result(folder / "trials", rows, origin)
        names = list(self.sweep.searched)
        shown = []
        for row in rows[:10]:
            chosen = (short(row[name]) for name in names)
            shown.append([str(row["trial"]), row["state"], f"{row[metric]:.5g}", *chosen])
        print_table(f"Best runs of {len(rows)}", ["trial", "state", metric, *names], shown)
        print(f"{folder}: trials.csv")


def short(value: Any) -> str:
    """An argument as it is printed."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run_process(command: list[str], log: Path, stop: Callable[[], bool]) -> int | None:
    """Run a command to its end and return its status, or None where it was told to ``stop``.

    ``stop`` is called every `POLL_S` seconds; the output is appended to ``log``.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C goes to this process alone, which ends the other
        )
        try:
            while True:
                try:
                    return process.wait(POLL_S)
                except subprocess.TimeoutExpired:
                    if stop():
                        return None
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()


def agent_command(sweep: Sweep, chosen: Mapping[str, Any], run: Path) -> list[str]:
    """The agent's command line: as wandb writes it, but with no account and our folder."""
    arguments = {**sweep.constants, **chosen, "track": False}
    arguments |= {"out_dir": run.parent, "run_name": run.name}
    return [sys.executable, "-m", sweep.module, *(f"--{k}={v}" for k, v in arguments.items())]
