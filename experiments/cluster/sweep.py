"""Sweeps through Ray Tune: the files of `sweeps.run`, the runs spread over a cluster.

``servegym sweep FILE --ray auto`` takes the same file, and writes the same table, importances and
plot, as without ``--ray``. Optuna chooses here as well (Tune's ``OptunaSearch`` with the same
samplers), and early termination is Tune's asynchronous hyperband. A run is a process of the agent
on the machine where Tune places it, with one processor. A run whose worker is lost is run again
with the same arguments; Tune restores a sweep that was stopped. On several machines the folder of
the sweep must lie on a file system that all of them see.
"""

# Ray is an extra that need not be installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import ctypes
import itertools
import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from servegym.agents.lib.ray_cluster import RETRIES, check_ray, cluster
from servegym.experiments.evaluation.jobs import interrupt_on_sigterm, run_process
from servegym.experiments.sweeps import run as local
from servegym.experiments.sweeps.spec import Sweep

__all__ = ["run_sweep"]

LONGEST = 10**9
"""Evaluations at which Tune's hyperband would end any run; never reached."""


def run_sweep(
    sweep: Sweep,
    trials: int,
    workers: int | None = None,
    out: Path | None = None,
    seed: int = 0,
    fixed: Mapping[str, Any] | None = None,
    echo: local.Echo = print,
    ray: str = "auto",
) -> Path:
    """Run or resume a sweep on a cluster until it has ``trials`` finished runs.

    Args:
        sweep: The sweep.
        trials: Finished runs in the end, earlier ones included; a grid ends when it is complete.
        workers: Runs at a time; by default as many as the cluster has processors.
        out: Folder of the sweep; ``sweeps/NAME`` by default.
        seed: Seed of the choice of parameters.
        fixed: Arguments of the agent that take precedence over the file's.
        echo: Prints a line.
        ray: ``"auto"``, ``"local"`` or ``"local:N"``, see
            `servegym.agents.lib.ray_cluster.check_ray`.

    Returns:
        The folder: ``trials.csv``, ``importance.csv``, ``sweep.png``, and Tune's ``tune_*``, which
        hold the agents' logs and checkpoints.

    Raises:
        ValueError: If an argument is not valid, another process runs the sweep, or its folder
            holds another sweep or one that was begun without Ray.
        RuntimeError: If every run fails.
    """
    check_ray(ray, "ray.tune")
    import optuna

    for name, value in (("trials", trials), ("workers", workers)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; allowed is 1 or more")
    folder = (out or Path("sweeps") / sweep.path.stem).resolve()
    if (folder / "study.journal").exists():
        raise ValueError(f"out is {str(folder)!r}, whose sweep was begun without Ray")
    folder.mkdir(parents=True, exist_ok=True)
    # The state of a sweep is saved this often, in seconds, so that little is run again.
    os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "5")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # `_line_a_run` prints
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with local.lock_sweep(folder), interrupt_on_sigterm(), cluster(ray, workers):
        local.save_definition(folder, sweep, fixed or {}, "run by Ray Tune")
        experiments = _Experiments(folder, sweep, dict(fixed or {}), workers, seed)
        try:
            experiments.resume_last()
            experiments.start(trials)
        finally:
            study = experiments.study(optuna)
            if study.trials:
                settings = {"seed": seed, "fixed": dict(fixed or {}), "ray": ray}
                local.report(optuna, study, sweep, folder, echo, settings)
        if not local.finished_trials(optuna, study):
            raise RuntimeError(f"every run failed; see {folder}")
    return folder


class _Experiments:
    """The experiments of Tune that a sweep consists of: one each time that ``trials`` is raised."""

    def __init__(
        self, folder: Path, sweep: Sweep, fixed: dict[str, Any], workers: int | None, seed: int
    ) -> None:
        self.folder, self.sweep, self.seed, self.workers = folder, sweep, seed, workers
        self.arguments = {
            "sweep": sweep,
            "fixed": fixed,
            "agent_command": local.agent_command,
            "cwd": os.getcwd(),
        }

    def trainable(self) -> Any:
        from ray import tune

        return tune.with_resources(tune.with_parameters(_run, **self.arguments), {"cpu": 1})

    def resume_last(self) -> None:
        """Let the experiment that was stopped run to its end."""
        from ray import tune

        for path in self.paths()[-1:]:
            if any(trial.status in ("PENDING", "RUNNING", "PAUSED") for trial in _trials(path)):
                tune.Tuner.restore(
                    str(path), self.trainable(), resume_unfinished=True, restart_errored=True
                ).fit()

    def start(self, trials: int) -> None:
        """A new experiment with the runs that are missing."""
        from ray import tune

        before = [trial for path in self.paths() for trial in _trials(path)]
        missing = trials - sum(_state(trial) in ("complete", "pruned") for trial in before)
        points = None
        if self.sweep.method == "grid":
            names, done = list(self.sweep.searched), [trial.config for trial in before]
            values = (self.sweep.searched[name].values for name in names)
            every = [dict(zip(names, point, strict=True)) for point in itertools.product(*values)]
            points = [point for point in every if point not in done][: max(missing, 0)]
            missing = len(points)
        if missing <= 0:
            return
        first = len(before)
        tune.Tuner(
            self.trainable(),
            tune_config=tune.TuneConfig(
                metric="best",
                mode="max" if self.sweep.maximize else "min",
                num_samples=missing,
                max_concurrent_trials=self.workers,
                search_alg=self.search(before, points),
                scheduler=self.scheduler(),
                trial_dirname_creator=lambda trial: f"trial_{first + _index(trial):04d}",
            ),
            run_config=tune.RunConfig(
                name=f"tune_{len(self.paths()):02d}",
                storage_path=str(self.folder),
                failure_config=tune.FailureConfig(max_failures=RETRIES),
                callbacks=[_line_a_run(self.sweep, first)],
                stop=_stop_if_all_fail(),
                verbose=0,
            ),
        ).fit()

    def search(self, before: list[Any], points: list[dict[str, Any]] | None) -> Any:
        """Optuna with the samplers of the local runner, given the runs so far."""
        import optuna
        from ray.tune.search.optuna import OptunaSearch

        sampler: Any = optuna.samplers.RandomSampler(seed=self.seed + len(before))
        if self.sweep.method == "bayes":
            sampler = optuna.samplers.TPESampler(seed=self.seed + len(before), multivariate=True)
        space = local.distributions(optuna, self.sweep)
        known = [trial for trial in before if _state(trial) == "complete"]
        rewards = None
        if points is None and known:
            points = [trial.config for trial in known]
            rewards = [trial.last_result["best"] for trial in known]
        return OptunaSearch(
            space=space,
            sampler=sampler,
            points_to_evaluate=points,
            evaluated_rewards=rewards,
            metric="best",
            mode="max" if self.sweep.maximize else "min",
        )

    def scheduler(self) -> Any:
        from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler

        if not self.sweep.min_iter:
            return FIFOScheduler()
        return AsyncHyperBandScheduler(
            time_attr="evaluations",
            grace_period=self.sweep.min_iter,
            max_t=LONGEST,
            reduction_factor=self.sweep.eta,
        )

    def paths(self) -> list[Path]:
        return sorted(p for p in self.folder.glob("tune_*") if any(p.glob("experiment_state-*")))

    def study(self, optuna: Any) -> Any:
        """The finished runs of all experiments as a study, for the table of the local runner."""
        study = optuna.create_study(direction="maximize" if self.sweep.maximize else "minimize")
        space = local.distributions(optuna, self.sweep)
        for trial in (trial for path in self.paths() for trial in _trials(path)):
            state, result = _state(trial), trial.last_result or {}
            if state is None:
                continue
            best = result.get("best", math.nan)
            study.add_trial(
                optuna.trial.create_trial(
                    state=optuna.trial.TrialState[state.upper()],
                    params={name: trial.config[name] for name in space},
                    distributions=space,
                    value=best if state == "complete" else None,
                    user_attrs={
                        "evaluations": result.get("evaluations", 0),
                        "seconds": result.get("seconds", math.nan),
                        **({"best": best} if state != "fail" else {}),
                    },
                )
            )
        return study


def _trials(path: Path) -> list[Any]:
    """Tune's record of an experiment's runs, in the order in which they were begun."""
    from ray import tune

    with suppress(ValueError):  # stopped before its first run was recorded
        return sorted(tune.ExperimentAnalysis(str(path)).trials, key=_index)
    return []


def _index(trial: Any) -> int:
    """A run's place in its experiment: the tag that Tune shows begins with its number."""
    return int(trial.experiment_tag.partition("_")[0]) - 1


def _state(trial: Any) -> str | None:
    """What became of a run, in the words of the table; None if it has not ended."""
    result = trial.last_result or {}
    if trial.status == "ERROR":
        return "fail"
    if trial.status != "TERMINATED":
        return None
    if not result.get("ended"):
        return "pruned"
    return "complete" if result["status"] == 0 and result["evaluations"] else "fail"


def _run(
    config: dict[str, Any],
    sweep: Sweep,
    fixed: dict[str, Any],
    agent_command: Callable[..., list[str]],
    cwd: str,
) -> None:
    """A run, on its worker: the agent's process, its evaluations to Tune."""
    from ray import tune

    begin, better = time.monotonic(), max if sweep.maximize else min
    folder = Path(tune.get_context().get_trial_dir() or ".")
    # After the loss of a worker the run begins anew, in a folder of its own.
    run = next(f for k in itertools.count() if not (f := folder / f"attempt_{k}").exists())
    run.mkdir(parents=True)
    result: dict[str, Any] = {"best": math.nan, "evaluations": 0, "ended": False, "status": None}
    offset = 0

    def report() -> None:
        tune.report({**result, "seconds": round(time.monotonic() - begin, 1)})

    def report_evaluations() -> bool:
        nonlocal offset
        new, offset = local.new_evaluations(run / "metrics.jsonl", offset, sweep.metric)
        for value in new:
            result["best"] = better(value, result["best"]) if result["evaluations"] else value
            result["evaluations"] += 1
            report()  # where Tune ends the run, this does not return
        return False

    status = run_process(
        agent_command(sweep, {**config, **fixed}, run),
        run / "output.log",
        stop=report_evaluations,
        poll_s=local.POLL_S,
        cwd=cwd if os.path.isdir(cwd) else None,
        preexec_fn=_end_with_worker,
    )
    report_evaluations()
    result |= {"ended": True, "status": status}
    report()


def _end_with_worker() -> None:
    """Have Linux end the agent when the worker that started it is gone."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _line_a_run(sweep: Sweep, first: int) -> Any:
    """A callback that prints a line a finished run."""
    from ray import tune

    class LineARun(tune.Callback):
        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            result = trial.last_result or {}
            best, seconds = result.get("best", math.nan), result.get("seconds", math.nan)
            outcome = f"{sweep.metric} {best:.5g}"
            if not result.get("ended"):
                outcome = f"stopped early at {best:.5g}"
            elif result["status"] != 0 or not result["evaluations"]:
                outcome = f"failed with status {result['status']}, see {trial.path}"
            name, chosen = f"trial_{first + _index(trial):04d}", local.describe(trial.config)
            print(f"{name}: {outcome} ({seconds:.0f} s; {chosen})")

    return LineARun()


def _stop_if_all_fail() -> Any:
    """A stopper that ends a sweep whose first runs all fail."""
    from ray import tune

    class StopIfAllFail(tune.Stopper):
        good, failed = 0, 0

        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
            if result.get("ended"):
                good = result["status"] == 0 and result["evaluations"] > 0
                self.good, self.failed = self.good + good, self.failed + (not good)
            return False

        def stop_all(self) -> bool:
            return self.failed >= local.MAX_FAILURES and not self.good

    return StopIfAllFail()
