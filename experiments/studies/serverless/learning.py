"""What PPO learns on the serverless family: curves of five trainings, and a table beside the rules.

``python -m servegym.experiments.studies.serverless.learning --checkpoints runs/serverless`` trains
``agents/ppo_serverless.py`` into that folder, with five seeds and as controls once with rewards
that are permuted over the environments of a step, and five times not at all (a learning rate of
0); what is there is not trained again. The last policy of every training then plays the same
episodes of the eval split as the policies that it is compared with, and the rules play the
validation episodes of the curves. ``--model`` names another model than the default one; its tables
carry its name.

`lookahead` knows all requests, gaps and overheads to come; it is a reference, not a bound.
`warm_planner` reads the constants of the environment that generates the requests.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from servegym._command_line import run_main
from servegym.agents import load_policy
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.play import DEFAULT_SEED
from servegym.experiments.evaluation.stats import over_trainings
from servegym.experiments.evaluation.tables import Note, note
from servegym.experiments.papers import study
from servegym.experiments.papers.plotting import Curves
from servegym.experiments.papers.serverless.billing import MODELS
from servegym.experiments.papers.study import Study, command, interval_columns

__all__ = ["STUDIES", "Options", "Shuffled", "curves", "main", "seconds_to"]

ENV_ID = "servegym/ServerlessMoE-v0"
BASELINES = (
    "mix",
    "fetch",
    "keep_alive",
    "best_constant",
    "greedy_warm",
    "remoe_sticky",
    "warm_planner",
    "lookahead",
)
RIVALS = ("mix", "fetch", "best_constant", "greedy_warm", "warm_planner")
SEEDS = range(1, 6)
KINDS = {"seed": "ppo_serverless", "random": "random weights", "shuffled": "shuffled rewards"}
"""First word of a run's folder -> its name in the table."""
VALIDATION_SEED, VALIDATION_EPISODES = 10_000, 16
"""The validation episodes of the agent's evaluations."""
LINES = ("mix", "fetch", "greedy_warm", "warm_planner")
"""Rules that the curves are compared with on these."""
KEYS = (
    "mean_reward",
    "cost_over_mix",
    "ttft_violation_rate",
    "tpot_violation_rate",
    "infeasible_rate",
    "main_warm_rate",
    "mean_remote_ratio",
)


class Options(study.Options):
    """The command line.

    Attributes:
        checkpoints: Folder of the training runs, None without.
        model: Name of the model.
    """

    checkpoints: Path | None
    model: str


def _stem(model: str) -> str:
    """Name of a model's table: ``learning`` for the default one."""
    return "learning" if model == MODELS[0] else "learning_" + re.sub(r"\W", "_", model)


class Shuffled(gym.vector.VectorWrapper):
    """Rewards that no action has earned: those of a step, permuted over the environments."""

    def __init__(self, env: gym.vector.VectorEnv, seed: int = 0) -> None:
        super().__init__(env)
        self.generator = np.random.default_rng(seed)

    def step(self, actions: Any) -> Any:
        """See `gymnasium.vector.VectorEnv.step`."""
        observation, reward, *others = self.env.step(actions)
        return observation, self.generator.permutation(reward), *others


def training(folder: Path, model: str, **changes: Any) -> None:
    """Train what is not yet in a folder.

    Args:
        folder: Of the runs.
        model: Name of the model.
        **changes: Arguments of the agent other than its defaults.
    """
    from servegym.agents import ppo_serverless

    settings = {"set": (f"model={model}",), "out_dir": str(folder)} | changes
    still = settings | {"learning_rate": 0.0, "total_timesteps": 1}
    jobs = [(f"seed_{seed}", seed, settings) for seed in SEEDS]
    jobs += [("shuffled_1", 1, settings)] + [(f"random_{seed}", seed, still) for seed in SEEDS]
    plain = vars(ppo_serverless)["make_envs"]
    for name, seed, arguments in jobs:
        if (folder / name / "last.safetensors").exists():
            continue
        shutil.rmtree(folder / name, ignore_errors=True)

        def make_envs(*args: Any, name: str = name, **kwargs: Any) -> gym.vector.VectorEnv:
            envs = plain(*args, **kwargs)
            return Shuffled(envs) if name.startswith("shuffled") else envs

        with patch.object(ppo_serverless, "make_envs", make_envs):
            ppo_serverless.train(ppo_serverless.Args(**arguments, seed=seed, run_name=name))


def curves(folder: Path) -> list[dict[str, Any]]:
    """Validation rewards of all runs in a folder, from that of the random weights at step 0 on.

    Returns:
        Rows of ``run``, ``step``, ``cpu_s`` (processor seconds of the training so far, evaluations
        included), ``val_reward`` (mean reward a request of the likeliest actions).
    """
    rows: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*/metrics.jsonl")):
        if path.parent.name.startswith("random"):
            continue
        for entry in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            if "eval/score" in entry:
                rows.append(
                    {
                        "run": path.parent.name,
                        "step": entry["global_step"],
                        "cpu_s": round(entry["charts/cpu_s"], 2),
                        "val_reward": round(entry["eval/score"], 5),
                    }
                )
    return rows


def seconds_to(points: Sequence[Mapping[str, Any]], run: str, level: float) -> float:
    """Processor seconds until a run's validation reward first reaches a level; NaN if never."""
    reached = [p["cpu_s"] for p in points if p["run"] == run and p["val_reward"] >= level]
    return reached[0] if reached else float("nan")


def measure(policy: Any, seed: int, episodes: int, **kwargs: Any) -> list[dict[str, Any]]:
    """One row of numbers for each of the episodes from a seed on, of the eval split by default."""
    rows = evaluate(ENV_ID, [policy], episodes, seed, env_kwargs=kwargs, num_envs=episodes)
    return [
        {"policy": row["policy"], "seed": row["seed"]} | {key: float(row[key]) for key in KEYS}
        for row in rows
    ]


def levels(model: str) -> dict[str, float]:
    """Mean reward a request of each of `LINES` on the validation episodes of the curves."""
    kwargs: dict[str, Any] = {"model": model, "split": "val"}
    played = {name: measure(name, VALIDATION_SEED, VALIDATION_EPISODES, **kwargs) for name in LINES}
    return {name: float(np.mean([r["mean_reward"] for r in rows])) for name, rows in played.items()}


def _summary(
    trainings: Sequence[Sequence[Mapping[str, Any]]],
    name: str,
    rivals: Mapping[str, NDArray[np.float64]],
) -> dict[str, Any]:
    """A row of the table: of the same episodes after each training, or of one policy."""
    each = [np.array([row["mean_reward"] for row in rows]) for rows in trainings]
    result: dict[str, Any] = {"policy": name, "trainings": len(each), "episodes": len(each[0])}
    result |= interval_columns("reward", over_trainings(each))
    for key in KEYS[1:]:
        result[key] = float(np.mean([row[key] for rows in trainings for row in rows]))
    for rival, scores in rivals.items():
        result |= interval_columns(f"minus_{rival}", over_trainings(each, scores))
    return result


def _learning(options: Options, at: dict[str, str], _: Sequence[str]) -> list[dict[str, Any]]:
    """The last policies beside the rules; ``_curves`` are those of the trainings."""
    folder, model, episodes = options.checkpoints, at["model"], options.episodes
    if folder is None or model != options.model:
        print(f"{_stem(model)}: no folder of the runs (--checkpoints FOLDER), left out")
        return []
    training(folder, model)
    rules = {name: measure(name, DEFAULT_SEED, episodes, model=model) for name in BASELINES}
    rivals = {name: np.array([row["mean_reward"] for row in rules[name]]) for name in RIVALS}
    rows = [_summary([played], name, rivals) for name, played in rules.items()]
    points, goals = curves(folder), levels(model)
    rows[0]["_curves"] = points + [
        {"run": name, "step": "", "cpu_s": "", "val_reward": value} for name, value in goals.items()
    ]
    for kind, name in KINDS.items():
        paths = sorted(folder.glob(f"{kind}*/last.safetensors"))
        learnt = [measure(load_policy(path), DEFAULT_SEED, episodes, model=model) for path in paths]
        rows.append(_summary(learnt, name, rivals))
        for path, played in zip(paths, learnt, strict=True):
            if kind == "seed":
                run = path.parent.name
                times = {f"cpu_s_to_{k}": seconds_to(points, run, v) for k, v in goals.items()}
                last = [point for point in points if point["run"] == run][-1]
                extra = {"_run": run, "_last": last, "_times": times}
                rows.append(_summary([played], f"{name}, {run}", rivals) | times | extra)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return [{key: row.get(key, "") for key in keys} for row in rows]


def _findings(options: Options, rows: Sequence[Mapping[str, Any]]) -> Iterator[Note]:
    """What PPO gains over each rival on the same episodes, and when its curves pass the rules."""
    ours = next(row for row in rows if row["policy"] == KINDS["seed"])
    for rival in RIVALS:
        more, low, high = (ours[f"minus_{rival}{end}"] for end in ("", "_low", "_high"))
        verdict = "is above" if low > 0 else "is below" if high < 0 else "is level with"
        text = (
            f"ppo_serverless, {ours['trainings']} trainings, {verdict} {rival}: mean reward "
            f"{ours['reward']:.4f} [{ours['reward_low']:.4f}, {ours['reward_high']:.4f}], on the "
            f"same episodes {more:+.4f} [{low:+.4f}, {high:+.4f}]."
        )
        yield note(text, rival=rival, minus=[more, low, high])
    for row in (row for row in rows if row["_run"]):
        run, last, times = row["_run"], row["_last"], row["_times"]
        reached = ", ".join(
            f"{key.removeprefix('cpu_s_to_')} " + (f"after {s:.0f} s" if s == s else "never")
            for key, s in times.items()
        )
        text = (
            f"{run} has {last['val_reward']:.4f} on the validation episodes after "
            f"{last['cpu_s']:.0f} s of a core; it reached {reached}."
        )
        yield note(text, run=run, cpu_s=last["cpu_s"], **times)


def _study(model: str) -> Study:
    name = _stem(model)
    curves = name.replace("learning", "learning_curves")
    return Study(
        name,
        name,
        _learning,
        lambda options: ({"model": model},),
        notes=_findings,
        picture=Curves(
            y="val_reward",
            label="mean reward of a validation request",
            run="run",
            names=KINDS,
        ),
        drawn=(curves,),
        beside={curves: lambda rows: rows[0]["_curves"]},
        facts=lambda options: {
            "environment": f"{ENV_ID}, {model}, preset dynamic, split eval",
            "intervals": "of IQMs, over trainings and episodes, of one training over episodes",
        },
        packages=("torch",),
    )


STUDIES = tuple(map(_study, MODELS))


def _add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoints", type=Path, help="folder of the training runs")
    parser.add_argument("--model", choices=MODELS, default=MODELS[0], help="the model")


main = command(__spec__.name, __doc__, STUDIES, 20, _add)

if __name__ == "__main__":
    run_main(main)
