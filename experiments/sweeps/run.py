"""Run a sweep file on this machine: Optuna chooses, every run is a process of the agent.

The files are those that ``wandb sweep`` takes. ``bayes`` is Optuna's tree-structured Parzen
estimator, ``random`` and ``grid`` are as in wandb, and early termination its hyperband pruner. A
run's value is the best evaluation of its log, since the agent saves that checkpoint. A sweep can
be stopped at any time and resumed: finished runs stay, unfinished ones are run again with the same
arguments.
"""

from __future__ import annotations

import itertools
import json
import math
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from servegym._files import naming
from servegym.experiments.evaluation.output import print_table, write_csv, write_text
from servegym.experiments.evaluation.tables import provenance, write_result
from servegym.experiments.papers.plotting import Lines, as_png
from servegym.experiments.sweeps.jobs import interrupt_on_sigterm, lock_sweep, run_process
from servegym.experiments.sweeps.spec import Sweep

__all__ = ["run_sweep"]

JOURNAL = "study.journal"
POLL_S = 0.5
MIN_FOR_IMPORTANCE = 4
"""Complete runs that the importances of the parameters need."""
MAX_FAILURES = 3
"""Failed runs after which a sweep without any good run ends."""

Echo = Callable[[str], object]


def run_sweep(
    sweep: Sweep,
    trials: int,
    workers: int = 1,
    out: Path | None = None,
    seed: int = 0,
    fixed: Mapping[str, Any] | None = None,
    echo: Echo = print,
) -> Path:
    """Run or resume a sweep until it has ``trials`` finished runs.

    Args:
        sweep: The sweep.
        trials: Finished runs in the end, earlier ones included; a grid ends when it is complete.
        workers: Runs at a time, each a process with one thread.
        out: Folder of the sweep; ``sweeps/NAME`` by default.
        seed: Seed of the choice of parameters.
        fixed: Arguments of the agent that take precedence over the file's.
        echo: Prints a line.

    Returns:
        The folder: ``trials.csv``, ``importance.csv``, ``sweep.png``, ``runs/``.

    Raises:
        ValueError: If an argument is out of range, another process runs the sweep, or its folder
            holds another sweep.
        RuntimeError: If every run fails.
    """
    import optuna

    for name, value in (("trials", trials), ("workers", workers)):
        if value < 1:
            raise ValueError(f"{name} is {value}; allowed is 1 or more")
    folder = out or Path("sweeps") / sweep.path.stem
    folder.mkdir(parents=True, exist_ok=True)
    with lock_sweep(folder), interrupt_on_sigterm():
        mend_journal(folder / JOURNAL)
        save_definition(folder, sweep, fixed or {})
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = _study(optuna, sweep, folder, seed)
        _requeue(optuna, study, sweep)
        work = _Workers(optuna, study, sweep, folder, trials, dict(fixed or {}), echo)
        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(work.loop) for _ in range(workers)]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                work.stop.set()
                raise
        report(optuna, study, sweep, folder, echo, {"seed": seed, "fixed": dict(fixed or {})})
        if work.failed and not finished_trials(optuna, study):
            raise RuntimeError(f"every run failed; see {folder / 'runs'}")
    return folder


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


def _study(optuna: Any, sweep: Sweep, folder: Path, seed: int) -> Any:
    journal = folder / JOURNAL
    backend = optuna.storages.journal.JournalFileBackend(str(journal))
    append = backend.append_logs

    def append_logs(logs: list[dict[str, Any]]) -> None:
        with naming(journal):
            append(logs)

    backend.append_logs = append_logs
    storage = optuna.storages.JournalStorage(backend)
    known = optuna.study.get_all_study_names(storage)
    done = len(optuna.load_study(study_name="sweep", storage=storage).trials) if known else 0
    samplers = optuna.samplers
    # A sampler begins anew with every process, so that its seed must not be the one of before.
    if sweep.method == "bayes":
        sampler = samplers.TPESampler(seed=seed + done, multivariate=True)
    else:
        sampler = samplers.RandomSampler(seed=seed + done)
    pruner = optuna.pruners.NopPruner()
    if sweep.min_iter:
        pruner = optuna.pruners.HyperbandPruner(
            min_resource=sweep.min_iter, reduction_factor=sweep.eta
        )
    study = optuna.create_study(
        storage=storage,
        study_name="sweep",
        sampler=sampler,
        pruner=pruner,
        load_if_exists=True,
        direction="maximize" if sweep.maximize else "minimize",
    )
    if sweep.method == "grid" and not study.trials:
        names = list(sweep.searched)
        for point in itertools.product(*(sweep.searched[name].values for name in names)):
            study.enqueue_trial(dict(zip(names, point, strict=True)))
    return study


def _requeue(optuna: Any, study: Any, sweep: Sweep) -> None:
    """Put runs that a stopped process left behind first in the queue."""
    states = optuna.trial.TrialState
    for trial in study.get_trials(deepcopy=False, states=(states.RUNNING,)):
        study.tell(trial.number, state=states.FAIL)
        if set(trial.params) == set(sweep.searched):
            study.enqueue_trial(trial.params)


def finished_trials(optuna: Any, study: Any) -> list[Any]:
    """The runs that count: complete ones and those stopped early."""
    states = optuna.trial.TrialState
    return study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED))


def distributions(optuna: Any, sweep: Sweep) -> dict[str, Any]:
    """Optuna's distribution of every parameter that is searched."""
    found: dict[str, Any] = {}
    for name, one in sweep.searched.items():
        if one.values:
            found[name] = optuna.distributions.CategoricalDistribution(one.values)
        elif one.whole:
            found[name] = optuna.distributions.IntDistribution(int(one.low), int(one.high))
        else:
            low, high = float(one.low), float(one.high)
            found[name] = optuna.distributions.FloatDistribution(low, high, log=one.log)
    return found


class _Workers:
    """The state that the worker threads of one sweep share."""

    def __init__(
        self,
        optuna: Any,
        study: Any,
        sweep: Sweep,
        folder: Path,
        trials: int,
        fixed: dict[str, Any],
        echo: Echo,
    ) -> None:
        self.states = optuna.trial.TrialState
        self.optuna, self.study, self.sweep, self.folder = optuna, study, sweep, folder
        self.trials, self.fixed, self.echo = trials, fixed, echo
        self.lock, self.stop = threading.Lock(), threading.Event()
        self.running, self.failed = 0, 0

    def next_trial(self) -> Any | None:
        """The next run with its arguments, or None when there is no more to begin."""
        with self.lock:
            done = len(finished_trials(self.optuna, self.study))
            if self.stop.is_set() or done + self.running >= self.trials:
                return None
            waiting = self.study.get_trials(deepcopy=False, states=(self.states.WAITING,))
            if self.sweep.method == "grid" and not waiting:
                return None
            trial = self.study.ask(distributions(self.optuna, self.sweep))
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

    def run(self, trial: Any) -> None:
        """One run: the agent's process, its evaluations to the pruner, its value to the study."""
        begin = time.monotonic()
        run = self.folder / "runs" / f"trial_{trial.number:04d}"
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir(parents=True)
        values: list[float] = []
        offset = 0

        def report_evaluations() -> bool:
            """Report what is new in the log; whether the pruner wants the run to end."""
            nonlocal offset
            new, offset = new_evaluations(run / "metrics.jsonl", offset, self.sweep.metric)
            prune = False
            for value in new:
                values.append(value)
                with self.lock:
                    trial.report(value, len(values))
                    prune |= bool(self.sweep.min_iter and trial.should_prune())
            return prune

        command = agent_command(self.sweep, {**trial.params, **self.fixed}, run)
        status = run_process(
            command,
            run / "output.log",
            stop=lambda: self.stop.is_set() or report_evaluations(),
            poll_s=POLL_S,
        )
        if self.stop.is_set():
            return  # left as running: the next process runs it again
        if status is not None:
            report_evaluations()  # those of the last moment; a run that has ended is not pruned
        self.finish(trial, status, values, time.monotonic() - begin, run)

    def finish(
        self, trial: Any, status: int | None, values: list[float], seconds: float, run: Path
    ) -> None:
        """Record how a run ended, and print a line."""
        best = (max if self.sweep.maximize else min)(values) if values else math.nan
        with self.lock:
            trial.set_user_attr("seconds", round(seconds, 1))
            trial.set_user_attr("evaluations", len(values))
            if status is None:
                trial.set_user_attr("best", best)
                self.study.tell(trial, state=self.states.PRUNED)
                outcome = f"stopped early at {best:.5g}"
            elif status == 0 and values:
                trial.set_user_attr("best", best)
                self.study.tell(trial, best)
                outcome = f"{self.sweep.metric} {best:.5g}"
            else:
                self.study.tell(trial, state=self.states.FAIL)
                self.failed += 1
                outcome = f"failed with status {status}, see {run / 'output.log'}"
                if self.failed >= MAX_FAILURES and not finished_trials(self.optuna, self.study):
                    self.stop.set()
            write_csv(self.folder / "trials.csv", _rows(self.study, self.sweep))
        self.echo(f"{run.name}: {outcome} ({seconds:.0f} s; {describe(trial.params)})")


def describe(parameters: Mapping[str, Any]) -> str:
    """The chosen arguments in a line."""
    return ", ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in parameters.items()
    )


def new_evaluations(log: Path, offset: int, metric: str) -> tuple[list[float], int]:
    """Values of the metric in the whole lines after a byte of a log, and where the lines end."""
    try:
        with open(log, "rb") as stream:
            stream.seek(offset)
            text = stream.read()
    except FileNotFoundError:
        return [], offset
    end = text.rfind(b"\n") + 1
    values = (json.loads(line).get(metric) for line in text[:end].splitlines())
    return [float(value) for value in values if value is not None], offset + end


def agent_command(sweep: Sweep, chosen: Mapping[str, Any], run: Path) -> list[str]:
    """The agent's command line: as wandb writes it, but with no account and our folder."""
    constants = {name: p.values[0] for name, p in sweep.parameters.items() if len(p.values) == 1}
    arguments = {**constants, **chosen, "track": False, "out_dir": run.parent, "run_name": run.name}
    return [sys.executable, "-m", sweep.module, *(f"--{k}={v}" for k, v in arguments.items())]


def _rows(study: Any, sweep: Sweep) -> list[dict[str, Any]]:
    """A row a run, the best first."""
    rows = []
    for trial in study.get_trials(deepcopy=False):
        if trial.state.name in ("COMPLETE", "PRUNED", "FAIL"):
            about = trial.user_attrs
            row = {
                "trial": trial.number,
                "state": trial.state.name.lower(),
                sweep.metric: about.get("best", math.nan),
            }
            row |= {key: about.get(key, "") for key in ("evaluations", "seconds")}
            rows.append(row | {name: trial.params.get(name, "") for name in sweep.searched})
    sign = -1 if sweep.maximize else 1
    rows.sort(key=lambda row: (math.isnan(row[sweep.metric]), sign * row[sweep.metric]))
    return rows


def report(
    optuna: Any,
    study: Any,
    sweep: Sweep,
    folder: Path,
    echo: Echo,
    settings: Mapping[str, Any],
) -> None:
    """Print the best runs, write the table, the importances and the plot."""
    rows = _rows(study, sweep)
    command = shlex.join(["servegym", "sweep", str(sweep.path), "--out", str(folder)])
    made = provenance(command, packages=("optuna",), settings=settings)
    write_result(folder / "trials", rows, made)
    shown = [
        [
            str(row["trial"]),
            row["state"],
            f"{row[sweep.metric]:.5g}",
            *(
                f"{row[n]:.4g}" if isinstance(row[n], float) else str(row[n])
                for n in sweep.searched
            ),
        ]
        for row in rows[:10]
    ]
    names = ["trial", "state", sweep.metric, *sweep.searched]
    print_table(f"Best runs of {len(rows)}", names, shown)
    complete = [row for row in rows if row["state"] == "complete"]
    importance: dict[str, float] = {}
    varied = [n for n in sweep.searched if len({row[n] for row in complete}) > 1]
    if len(complete) >= MIN_FOR_IMPORTANCE and varied:
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        importance = optuna.importance.get_param_importances(
            study, evaluator=evaluator, params=varied
        )
        table = [{"parameter": k, "importance": round(v, 4)} for k, v in importance.items()]
        write_csv(folder / "importance.csv", table)
    else:
        echo(f"no importances from {len(complete)} complete runs; {MIN_FOR_IMPORTANCE} are needed")
    if complete:
        done = sorted((row for row in rows if row["state"] != "fail"), key=lambda r: r["trial"])
        best = itertools.accumulate(
            (row[sweep.metric] for row in done), max if sweep.maximize else min
        )
        done = [row | {"best so far": value} for row, value in zip(done, best, strict=True)]
        picture = Lines(x="trial", y=(sweep.metric, "best so far"))
        write_text(folder / "sweep.png", as_png(picture(done)))
    echo(f"{folder}: trials.csv" + (", importance.csv" if importance else "") + ", sweep.png")
