"""Run a sweep file on this machine: Optuna chooses, every run is a process of the agent.

``bayes`` is Optuna's TPE, early termination its hyperband. A run's value is the best evaluation of
its log, whose checkpoint is saved. A stopped sweep runs unfinished runs again.
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
from optuna.trial import FrozenTrial, TrialState

from servegym._checks import whole
from servegym._command_line import interrupt_on_signals
from servegym._files import locked, naming
from servegym.experiments.evaluation.output import print_table, write_csv, write_text
from servegym.experiments.evaluation.tables import provenance, write_result
from servegym.experiments.runs import read_metrics
from servegym.experiments.sweeps.spec import Sweep

JOURNAL = "study.journal"
POLL_S = 0.5
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)


def run_sweep(
    sweep: Sweep,
    trials: int,
    workers: int = 1,
    out: Path | None = None,
    seed: int = 0,
    fixed: Mapping[str, Any] | None = None,
) -> Path:
    """Run or resume a sweep until it has ``trials`` finished runs, or failed ones in their place.

    ``fixed`` are arguments of the agent that take precedence over the file's.

    Returns:
        The folder, by default ``sweeps/NAME``: ``trials.csv``, ``runs/``.

    Raises:
        ValueError: If an argument is out of range, another process runs the sweep, or its folder
            holds another sweep.
        RuntimeError: If every run fails, or one logs no such metric.
    """
    whole("trials", trials, 1)
    whole("workers", workers, 1)
    folder, fixed = out or Path("sweeps") / sweep.path.stem, dict(fixed or {})
    definition = sweep.path.read_text(encoding="utf-8")
    if fixed:
        definition += f"\n# fixed: {json.dumps(dict(sorted(fixed.items())))}\n"
    held = hold(folder, "sweep.yaml", definition)
    with held, interrupt_on_signals(), naming(folder / JOURNAL):
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study, stop = _study(sweep, folder, seed), threading.Event()
        finished = len(study.get_trials(deepcopy=False, states=FINISHED))
        places = iter(range(trials - finished))

        def work() -> None:
            for _ in places:
                trial = study.ask(dict(sweep.searched))
                state, best = _run(trial, sweep, folder, fixed, stop)
                if stop.is_set():
                    return  # left as running: the next process runs it again
                study.tell(trial, best if state == TrialState.COMPLETE else None, state)
                write_csv(folder / "trials.csv", _rows(study, sweep))
                _tell(study.trials[trial.number], sweep)

        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(work) for _ in range(workers)]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                stop.set()
                raise
        _report(_rows(study, sweep), sweep, folder, {"seed": seed, "fixed": fixed})
        if not study.get_trials(deepcopy=False, states=FINISHED):
            raise RuntimeError(f"every run failed; see {folder / 'runs'}")
    return folder


def hold(folder: Path, name: str, definition: str) -> BinaryIO:
    """Make and lock the folder of a search, or go on in one that has this definition.

    Raises:
        ValueError: If it cannot be made, has anything else, or another process holds it.
    """
    out, file = f"out is {str(folder)!r}", folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{out}, which is no folder ({error.strerror}): name another") from None
    same = file.exists() and file.read_text(encoding="utf-8") == definition
    if not same and any(folder.iterdir()):
        raise ValueError(f"{out}, which holds another search or other files: name another folder")
    held = locked(folder / "lock", f"{out}, where another process is at work")
    write_text(file, definition)
    return held


def open_study(folder: Path, name: str, maximize: bool) -> tuple[optuna.Study, list[FrozenTrial]]:
    """A study whose journal is in a folder, and the runs that a killed process left, now failed.

    What it left of the journal is mended: Optuna's lock, which nobody holds, and a half-written
    line. Optuna waits for ever where the lock is a link to no file, as it is after a relative path.
    """
    journal = folder / JOURNAL
    Path(f"{journal}.lock").unlink(missing_ok=True)
    if journal.exists():
        whole, end, cut = journal.read_bytes().rpartition(b"\n")
        if cut:
            write_text(journal, whole + end)
    study = optuna.create_study(
        study_name=name,
        storage=optuna.storages.JournalStorage(JournalFileBackend(str(journal))),
        load_if_exists=True,
        direction="maximize" if maximize else "minimize",
    )
    left = study.get_trials(states=(TrialState.RUNNING,))
    for trial in left:
        study.tell(trial.number, state=TrialState.FAIL)
    return study, left


def _study(sweep: Sweep, folder: Path, seed: int) -> optuna.Study:
    """The study in a folder, with the runs first in its queue that a killed process left."""
    study, left = open_study(folder, "sweep", sweep.maximize)
    # A sampler begins anew with every process, so that its seed must not be the one of before.
    seed += len(study.trials)
    study.sampler = optuna.samplers.RandomSampler(seed=seed)
    if sweep.method == "bayes":
        study.sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True)
    study.pruner = optuna.pruners.NopPruner()
    if sweep.min_iter:
        least, eta = sweep.min_iter, sweep.eta
        study.pruner = optuna.pruners.HyperbandPruner(min_resource=least, reduction_factor=eta)
    for trial in left:
        if set(trial.params) == set(sweep.searched):
            study.enqueue_trial(trial.params)
    return study


def _run(
    trial: optuna.Trial,
    sweep: Sweep,
    folder: Path,
    fixed: Mapping[str, Any],
    stop: threading.Event,
) -> tuple[TrialState, float]:
    """A run to its end, its evaluations told to the pruner meanwhile; how it ended, its best one.

    Raises:
        RuntimeError: If it logs no such metric.
    """
    begin, run = time.monotonic(), folder / "runs" / f"trial_{trial.number:04d}"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    values: list[float] = []

    def report_evaluations() -> bool:
        """Report what is new in the log; whether the run is to end."""
        prune = stop.is_set()
        logged = [row.get(sweep.metric) for row in read_metrics(run)]
        for value in [float(value) for value in logged if value is not None][len(values) :]:
            values.append(value)
            trial.report(value, len(values))
            prune |= bool(sweep.min_iter and trial.should_prune())
        return prune

    command = agent_command(sweep, {**trial.params, **fixed}, run)
    status = run_process(command, run / "output.log", report_evaluations)
    if status is not None:
        report_evaluations()  # those of the last moment; a run that has ended is not pruned
    trial.set_user_attr("seconds", round(time.monotonic() - begin, 1))
    trial.set_user_attr("evaluations", len(values))
    if status:
        return TrialState.FAIL, math.nan
    if status == 0 and not values:
        names = sorted({name for row in read_metrics(run) for name in row})
        raise RuntimeError(
            f"metric {sweep.metric!r} is not in the log of {run.name}; in it are: "
            f"{', '.join(names) or 'nothing'}"
        )
    best = (max if sweep.maximize else min)(values, default=math.nan)
    trial.set_user_attr("best", best)
    return TrialState.PRUNED if status is None else TrialState.COMPLETE, best


def _tell(trial: FrozenTrial, sweep: Sweep) -> None:
    """Print a line of a run that has ended."""
    best, name = trial.user_attrs.get("best", math.nan), f"trial_{trial.number:04d}"
    outcome = f"{sweep.metric} {best:.5g}"
    if trial.state == TrialState.PRUNED:
        outcome = f"stopped early at {best:.5g}"
    elif trial.state == TrialState.FAIL:
        outcome = "failed, see its output.log"
    chosen = ", ".join(f"{key}={short(value)}" for key, value in trial.params.items())
    print(f"{name}: {outcome} ({trial.user_attrs['seconds']:.0f} s; {chosen})", flush=True)


def _rows(study: optuna.Study, sweep: Sweep) -> list[dict[str, Any]]:
    """A row a run, the best first."""
    rows, metric = [], sweep.metric
    for trial in study.get_trials(deepcopy=False, states=(*FINISHED, TrialState.FAIL)):
        row = {"trial": trial.number, "state": trial.state.name.lower()}
        row[metric] = trial.user_attrs.get("best", math.nan)
        row |= {key: trial.user_attrs.get(key, "") for key in ("evaluations", "seconds")}
        rows.append(row | {name: trial.params.get(name, "") for name in sweep.searched})
    sign = -1 if sweep.maximize else 1
    return sorted(rows, key=lambda row: (math.isnan(row[metric]), sign * row[metric]))


def _report(
    rows: list[dict[str, Any]], sweep: Sweep, folder: Path, settings: Mapping[str, Any]
) -> None:
    """Print the best runs and write the table with its record."""
    command = shlex.join(["servegym", "sweep", str(sweep.path), "--out", str(folder)])
    origin = provenance(command, packages=("optuna",), settings=settings)
    write_result(folder / "trials", rows, origin)
    names, shown = list(sweep.searched), []
    for row in rows[:10]:
        chosen = (short(row[name]) for name in names)
        shown.append([str(row["trial"]), row["state"], f"{row[sweep.metric]:.5g}", *chosen])
    print_table(f"Best runs of {len(rows)}", ["trial", "state", sweep.metric, *names], shown)
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
