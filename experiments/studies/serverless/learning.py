"""What PPO learns on the serverless family: curves of five trainings, and a table beside the rules.

``python -m servegym.experiments.studies.serverless.learning --checkpoints runs/serverless``
makes everything; without ``--checkpoints`` what needs trainings is left out. ``--figure training``
trains ``agents/ppo_serverless.py`` into that folder, with five seeds and as controls once with
rewards that are permuted over the environments of a step, and five times not at all (a learning
rate of 0); what is there is not trained again. ``baselines`` runs the policies that it is compared
with, one row an episode of the eval split; what is there is not run again. ``learning`` runs the
last policy of every training on the same episodes and the rules on the validation episodes of the
curves. ``seed_preset`` asks what is left to learn where all requests are alike and cold.
``--model`` names another model than the default one; its tables carry its name.

`lookahead` knows all requests, gaps and overheads to come; it is a reference, not a bound.
`warm_planner` reads the constants of the environment that generates the requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from servegym._command_line import run_main
from servegym.agents import load_policy
from servegym.experiments.evaluation.evaluate import DEFAULT_SEED, evaluate
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.evaluation.stats import over_trainings
from servegym.experiments.evaluation.tables import Table, note
from servegym.experiments.papers.plotting import pyplot, tidy
from servegym.experiments.papers.run import (
    FigureOptions,
    Picture,
    Pictures,
    command_line,
    figure_parser,
    run_chosen,
    save,
)
from servegym.experiments.papers.serverless.common import MODELS

__all__ = ["Options", "Shuffled", "curves", "main", "seconds_to"]

MODULE = "servegym.experiments.studies.serverless.learning"
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
BLOCK = 5
"""Episodes that run side by side; the table grows by as many."""
RIVALS = ("mix", "fetch", "best_constant", "greedy_warm", "warm_planner")
SEEDS = range(1, 6)
KINDS = {"seed": "ppo_serverless", "random": "random weights", "shuffled": "shuffled rewards"}
"""First word of a run's folder -> its name in the table."""
VALIDATION_SEED, VALIDATION_EPISODES = 10_000, 16
"""The validation episodes of the agent's evaluations."""
LINES = {"mix": "mix", "fetch": "fetch", "greedy_warm": "greedy_warm", "warm_planner": "planner"}
"""Rules that the curves are compared with on these, and their labels in the picture."""
KEYS = (
    "mean_reward",
    "cost_over_mix",
    "ttft_violation_rate",
    "tpot_violation_rate",
    "infeasible_rate",
    "main_warm_rate",
    "mean_remote_ratio",
)
ENDS = ("", "_low", "_high")


class Options(FigureOptions):
    """The command line.

    Attributes:
        checkpoints: Folder of the training runs, None without.
        model: Name of the model.
    """

    checkpoints: Path | None
    model: str

    @property
    def suffix(self) -> str:
        """Of the names of the tables: none for the default model."""
        return "" if self.model == MODELS[0] else "_" + re.sub(r"\W", "_", self.model)


class Shuffled(gym.vector.VectorWrapper):
    """Rewards that no action has earned: those of a step, permuted over the environments."""

    def __init__(self, env: gym.vector.VectorEnv, seed: int = 0) -> None:
        super().__init__(env)
        self.generator = np.random.default_rng(seed)

    def step(self, actions: Any) -> Any:
        """See `gymnasium.vector.VectorEnv.step`."""
        observation, reward, *others = self.env.step(actions)
        return observation, self.generator.permutation(reward), *others


def training(options: Options, **changes: Any) -> None:
    """Train what is not yet in the folder of the runs.

    Args:
        options: The command line.
        **changes: Arguments of the agent other than its defaults.
    """
    if options.checkpoints is None:
        print("training: no folder of the runs (--checkpoints FOLDER), left out")
        return
    from servegym.agents import ppo_serverless

    own = {"set": (f"model={options.model}",), "out_dir": str(options.checkpoints)} | changes
    still = own | {"learning_rate": 0.0, "total_timesteps": 1}
    jobs = [(f"seed_{seed}", seed, own) for seed in SEEDS]
    jobs += [("shuffled_1", 1, own)] + [(f"random_{seed}", seed, still) for seed in SEEDS]
    plain = vars(ppo_serverless)["make_envs"]
    for name, seed, given in jobs:
        if (options.checkpoints / name / "last.safetensors").exists():
            continue

        def made(*args: Any, name: str = name, **kwargs: Any) -> gym.vector.VectorEnv:
            envs = plain(*args, **kwargs)
            return Shuffled(envs) if name.startswith("shuffled") else envs

        with patch.object(ppo_serverless, "make_envs", made):
            ppo_serverless.train(ppo_serverless.Args(**given, seed=seed, run_name=name))


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


def _rules(
    options: Options, stem: str, names: Sequence[str], seeds: range, **kwargs: Any
) -> list[dict[str, Any]]:
    """Episodes of rules, measured block by block; what is in the table is not run again."""
    table = Table(options.out / f"{stem}{options.suffix}.csv", ("policy", "seed"))
    for name in names:
        while missing := table.missing((name, seed) for seed in seeds):
            block = min(BLOCK, len(missing))
            table.update(measure(name, missing[0][1], block, model=options.model, **kwargs))
            print(f"{stem}: {name}, {block} episodes", flush=True)
    return [row for row in table.rows if row["seed"] in seeds]


def baselines(options: Options) -> list[dict[str, Any]]:
    """Episodes of the policies that PPO is compared with."""
    seeds = range(DEFAULT_SEED, DEFAULT_SEED + options.episodes)
    return _rules(options, "learning_baselines", BASELINES, seeds)


def levels(options: Options) -> dict[str, float]:
    """Mean reward a request of each of `LINES` on the validation episodes of the curves."""
    seeds = range(VALIDATION_SEED, VALIDATION_SEED + VALIDATION_EPISODES)
    rows = _rules(options, "learning_validation", tuple(LINES), seeds, split="val")
    return {
        name: float(np.mean([row["mean_reward"] for row in rows if row["policy"] == name]))
        for name in LINES
    }


def _summary(
    trainings: Sequence[Sequence[Mapping[str, Any]]],
    name: str,
    rivals: Mapping[str, NDArray[np.float64]],
) -> dict[str, Any]:
    """A row of the table: of the same episodes after each training, or of one policy."""
    each = [np.array([row["mean_reward"] for row in rows]) for rows in trainings]
    found: dict[str, Any] = {"policy": name, "trainings": len(each), "episodes": len(each[0])}
    found |= zip(("reward", "reward_low", "reward_high"), over_trainings(each), strict=True)
    for key in KEYS[1:]:
        found[key] = float(np.mean([row[key] for rows in trainings for row in rows]))
    for rival, scores in rivals.items():
        more = over_trainings(each, scores)
        found |= {f"minus_{rival}{e}": v for e, v in zip(ENDS, more, strict=True)}
    return found


def learning(options: Options) -> None:
    """Curves of the trainings, and their last policies beside the rules."""
    if options.checkpoints is None:
        print("learning: no training runs (--checkpoints FOLDER), left out")
        return
    runs = sorted(path.parent for path in options.checkpoints.glob("*/last.safetensors"))
    if not runs:
        raise ValueError(f"checkpoints: no run with last.safetensors in {options.checkpoints}")
    rules = baselines(options)
    each = {name: [row for row in rules if row["policy"] == name] for name in BASELINES}
    rivals = {n: np.array([row["mean_reward"] for row in each[n]]) for n in RIVALS}
    rows = [_summary([each[name]], name, rivals) for name in BASELINES]
    points, goals = curves(options.checkpoints), levels(options)
    lines = [{"run": k, "step": "", "cpu_s": "", "val_reward": v} for k, v in goals.items()]
    settings = {"environment": f"{ENV_ID}, {options.model}, preset dynamic, split val"}
    save(options, f"learning_curves{options.suffix}", points + lines, settings=settings)
    notes = []
    for kind, name in KINDS.items():
        own = [run for run in runs if run.name.startswith(kind)]
        learnt = [
            measure(
                load_policy(run / "last.safetensors"),
                DEFAULT_SEED,
                options.episodes,
                model=options.model,
            )
            for run in own
        ]
        if not learnt:
            continue
        rows.append(_summary(learnt, name, rivals))
        if kind != "seed":
            continue
        notes = _findings(rows)
        for run, found in zip(own, learnt, strict=True):
            seconds = {f"cpu_s_to_{k}": seconds_to(points, run.name, v) for k, v in goals.items()}
            rows.append(_summary([found], f"{name}, {run.name}", rivals) | seconds)
            last = [p for p in points if p["run"] == run.name][-1]
            reached = ", ".join(
                f"{k} after {s:.0f} s" if s == s else f"{k} never"
                for k, s in zip(goals, seconds.values(), strict=True)
            )
            text = (
                f"{run.name} has {last['val_reward']:.4f} on the validation episodes after "
                f"{last['cpu_s']:.0f} s of a core; it reached {reached}."
            )
            notes.append(note(text, run=run.name, cpu_s=last["cpu_s"], **seconds))
    keys = list(dict.fromkeys(key for row in rows for key in row))
    rows = [{key: row.get(key, "") for key in keys} for row in rows]
    _print(rows)
    settings = {
        "environment": f"{ENV_ID}, {options.model}, preset dynamic, split eval",
        "intervals": "of IQMs, over trainings and episodes, of one training over episodes",
        "training": ", ".join(path.name for path in runs),
    }
    save(
        options,
        f"learning{options.suffix}",
        rows,
        *notes,
        settings=settings,
        packages=("torch",),
    )


def _findings(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What PPO gains over each rival on the same episodes."""
    ours, notes = rows[-1], []
    for rival in RIVALS:
        more, low, high = (ours[f"minus_{rival}{end}"] for end in ENDS)
        verdict = "is above" if low > 0 else "is below" if high < 0 else "is level with"
        text = (
            f"ppo_serverless, {ours['trainings']} trainings, {verdict} {rival}: mean reward "
            f"{ours['reward']:.4f} [{ours['reward_low']:.4f}, {ours['reward_high']:.4f}], on the "
            f"same episodes {more:+.4f} [{low:+.4f}, {high:+.4f}]."
        )
        notes.append(note(text, rival=rival, minus=[more, low, high]))
    return notes


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    print_table(
        "preset dynamic, split eval, IQM",
        ["policy", "reward", "95 %", f"minus {RIVALS[-1]}", "late TTFT %", "late TPOT %", "warm %"],
        [
            [
                row["policy"],
                f"{row['reward']:.4f}",
                f"{row['reward_low']:.3f}..{row['reward_high']:.3f}",
                f"{row[f'minus_{RIVALS[-1]}']:+.4f}",
                *(
                    f"{100 * row[key]:.1f}"
                    for key in ("ttft_violation_rate", "tpot_violation_rate", "main_warm_rate")
                ),
            ]
            for row in sorted(rows, key=lambda row: -row["reward"])
        ],
    )


def _plot(points: Sequence[Mapping[str, Any]]) -> Any:
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7.0, 4.0), layout="constrained")
    runs = [p["run"] for p in points if p["cpu_s"] != ""]
    end = max(p["cpu_s"] for p in points if p["cpu_s"] != "")
    for name in dict.fromkeys(runs):
        own = [p for p in points if p["run"] == name]
        control = name.startswith("shuffled")
        axis.plot(
            [p["cpu_s"] for p in own],
            [p["val_reward"] for p in own],
            color="tab:orange" if control else "tab:blue",
            alpha=0.8,
            label="shuffled rewards" if control else "PPO, one line a seed",
        )
    rules = sorted((p for p in points if p["run"] in LINES), key=lambda p: p["val_reward"])
    for k, p in enumerate(rules):  # labels of neighbours below and above their lines
        axis.axhline(p["val_reward"], color="tab:grey", linewidth=0.8, linestyle="--")
        side = "bottom" if k % 2 else "top"
        axis.text(end, p["val_reward"], LINES[p["run"]], va=side, ha="right", fontsize=8)
    handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    axis.legend(handles.values(), handles.keys(), frameon=False)
    axis.set(xlabel="seconds of a core", ylabel="mean reward a request, validation")
    tidy(axis)
    return figure


def seed_preset(options: Options) -> None:
    """The paper's preset: how far one constant action is from the optimum."""
    names = ("mix", "best_constant", "greedy_warm", "grid_optimum")
    count = min(options.episodes, 8)
    rows = [
        _summary([measure(name, DEFAULT_SEED, count, preset="seed", episode_requests=50)], name, {})
        for name in names
    ]
    constant, best = -rows[1]["reward"], -rows[3]["reward"]
    text = (
        f"preset seed: cost and penalties of best_constant are {constant:.4f} of MIX, those of "
        f"the clairvoyant optimum of every request {best:.4f}: {100 * (constant / best - 1):.2f} % "
        "are left, so that nothing learnt there would prove anything"
    )
    save(options, "learning_seed_preset", rows, text)


FIGURES = {
    "training": training,
    "baselines": baselines,
    "learning": learning,
    "seed_preset": seed_preset,
}
PICTURES: Pictures = {
    name: Picture(_plot, (name.replace("learning", "learning_curves"),))
    for name in ("learning", "learning_gpt_oss_20b")
}


def main(argv: Sequence[str] | None = None) -> int:
    """Make the figures that the command line names.

    Args:
        argv: The command line; that of the process by default.
    """
    parser = figure_parser(tuple(FIGURES), __doc__, MODULE, 20)
    parser.add_argument("--checkpoints", type=Path, help="folder of the training runs")
    parser.add_argument("--model", choices=MODELS, default=MODELS[0], help="the model")
    return run_chosen(FIGURES, PICTURES, command_line(parser, argv, Options()))


if __name__ == "__main__":
    run_main(main)
