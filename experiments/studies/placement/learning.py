"""Placement learnt from random weights: curves, and the trained agents beside rules and controls.

::

    python -m servegym.agents.ppo_placement --seed 1 --run_name ppo_placement_edge_hetero_1
    python -m servegym.experiments.studies.placement.learning --runs runs

A figure is a scenario. It reads the trainings in the folder ``--runs``, the one of a seed in
``AGENT_SCENARIO_SEED`` (`commands` prints the command of each), and writes

* ``learning_curves_SCENARIO``: latency on validation episodes by placements tried and processor
  seconds, from the random weights on, and that of rules and controls on the same episodes;
* ``learning_SCENARIO``: latency on evaluation episodes, whose prompts no training has seen and
  which chose nothing: the last weights of every training, and beside them the rules ``prism``,
  ``proxy_optimum``, ``whole_layer`` and ``latency_dp``, the search ``best_start`` and the controls

  * ``random_weights``: the network of the first training before it;
  * ``ppo_placement_shuffled``: a training whose rewards are dealt out to other placements;
  * ``own_share``: all heights equal, so that servers hold the experts that they use most;
  * ``constant``: all scores equal, a placement that the decoder alone has made.

Intervals are over trainings and episodes together, of rules over episodes. Episodes that are done
are not played again when the command is repeated.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from servegym.agents.lib.checkpoint import json_field, load_policy, read_content
from servegym.baselines.protocol import BasePolicy
from servegym.envs.expert_placement.config import build_problem
from servegym.experiments.evaluation.evaluate import DEFAULT_SEED, evaluate
from servegym.experiments.evaluation.stats import mean, over_trainings, relative_change
from servegym.experiments.evaluation.tables import Table, note
from servegym.experiments.papers.placement.common import ENV_ID, setting
from servegym.experiments.papers.plotting import legend, pyplot, tidy
from servegym.experiments.papers.run import (
    FigureOptions,
    Picture,
    Pictures,
    command_line,
    figure_parser,
    run_chosen,
    save,
)

__all__ = ["SCENARIOS", "Control", "commands", "main", "seconds_to"]

MODULE = "servegym.experiments.studies.placement.learning"
SCENARIOS = ("edge_hetero", "paper_testbed")
EPISODES = 5
VALIDATION_SEED, VALIDATION_EPISODES = 10_000, 2
"""The agents' evaluations while they train."""
RULES = ("prism", "proxy_optimum", "whole_layer", "latency_dp")
SEARCH = "best_start"
"""The best of a long search by simulation, no network; played on evaluation episodes alone."""
CONTROLS = ("own_share", "constant")
TRAININGS = {"ppo_placement": 5, "mappo_placement": 1, "ppo_placement_shuffled": 1}
AGENTS = tuple(TRAININGS)
TESTBED = "--set scenario=paper_testbed --height_unit 1 --std_first 0.4 --total_timesteps 1024"
FLAGS: dict[tuple[str, str], str] = {
    ("ppo_placement", "paper_testbed"): f"{TESTBED} --table_learning_rate 0.03 --common_credit 1",
    ("mappo_placement", "paper_testbed"): f"{TESTBED} --table_learning_rate 0.03",
}
"""What an agent's command has for a scenario besides the seed."""


class Options(FigureOptions):
    """The command line.

    Attributes:
        runs: Folder of the trainings.
    """

    runs: Path


class Control(BasePolicy):
    """The decoder alone: equal heights (``own_share``) or equal scores (``constant``)."""

    def __init__(self, name: str) -> None:
        self.name = name
        mode = "layer_height" if name == "own_share" else "expert_score"
        self.env_kwargs = {"action_mode": mode}

    def act(self, observation: Any, action_mask: Any = None) -> Any:
        """The same numbers for all, carried out at the first decision."""
        counts = np.asarray(observation["counts"])
        shape = counts.shape[:3] if self.name == "own_share" else counts.shape
        first = np.asarray(observation["progress"])[:, 0] <= 0
        return {"migrate": first.astype(np.int64), "plan": np.full(shape, 0.5, np.float32)}


def commands(scenario: str) -> list[str]:
    """The command of each training of a scenario."""
    found = []
    for agent in AGENTS:
        plain = agent.removesuffix("_shuffled")
        control = "" if agent == plain else "--shuffle_rewards True"
        for seed in range(1, TRAININGS[agent] + 1):
            command = f"python -m servegym.agents.{plain}"
            parts = [command, FLAGS.get((plain, scenario), ""), control]
            name = f"--seed {seed} --run_name {agent}_{scenario}_{seed}"
            found.append(" ".join([part for part in parts if part] + [name]))
    return found


def random_weights(file: Path) -> Any:
    """The policy of a training as it was before it."""
    import torch

    policy = load_policy(file)
    meta, _ = read_content(file)
    shape = json_field(meta, "shape")
    torch.manual_seed(policy.args.seed)
    policy.net.load_state_dict(type(policy.net)(**shape).state_dict())
    policy.name = "random_weights"
    return policy


def _files(options: Options, scenario: str) -> dict[str, list[Path]]:
    """The last weights of the trainings by agent, in the order of the seeds."""
    found: dict[str, list[Path]] = {}
    for agent in AGENTS:
        paths = sorted(options.runs.glob(f"{agent}_{scenario}_[0-9]*/last.safetensors"))
        if paths:
            found[agent] = paths
    if not found:
        raise ValueError(
            f"runs is {str(options.runs)!r}, which holds no training of {scenario}; make one by "
            f"{commands(scenario)[0]}"
        )
    return found


class Played:
    """Mean latency by episode, played once: ``learning_episodes_SCENARIO`` keeps it."""

    def __init__(self, options: Options, scenario: str) -> None:
        self.scenario = scenario
        path = options.out / f"learning_episodes_{scenario}.csv"
        self.table = Table(path, ("policy", "split", "stamp", "episode"), text=("stamp",))

    def __call__(self, policy: Any, split: str, episodes: int, stamp: str = "-") -> np.ndarray:
        """Latency of each episode (episodes,), the same episodes for every policy.

        Args:
            policy: A registered name or a policy.
            split: ``val`` (the agents' validation episodes) or ``eval``.
            episodes: How many.
            stamp: What tells trainings apart.
        """
        name = policy if isinstance(policy, str) else policy.name
        seed = VALIDATION_SEED if split == "val" else DEFAULT_SEED
        keys = [(name, split, stamp, float(k)) for k in range(episodes)]
        if missing := self.table.missing(keys):
            kwargs = {"scenario": self.scenario, "split": split}
            first = int(missing[0][3])
            runs = evaluate(ENV_ID, [policy], episodes - first, seed + first, kwargs)
            found = dict(policy=name, split=split, stamp=stamp)
            self.table.update(
                found | {"episode": float(k), "mean_latency_s": run["mean_latency_s"]}
                for k, run in enumerate(runs, first)
            )
        known = {self.table.key_of(row): row["mean_latency_s"] for row in self.table.rows}
        latency = np.array([known[key] for key in keys])
        print(f"{self.scenario} {name} {split} {stamp}: {latency.mean():.2f} s", flush=True)
        return latency


def _stamp(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:8]


def _curve(run: Path) -> list[dict[str, float]]:
    """The evaluations of a training."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if "eval/mean_latency_s" in line]


def seconds_to(curve: Sequence[Mapping[str, float]], level: float) -> float:
    """Processor seconds at the first evaluation at or below a latency; NaN if none is."""
    reached = [row["cpu_s"] for row in curve if row["val_latency_s"] <= level]
    return reached[0] if reached else math.nan


def _scenario(scenario: str, options: Options) -> None:
    files = _files(options, scenario)
    fixed: list[Any] = [*RULES, *(Control(name) for name in CONTROLS)]
    play = Played(options, scenario)

    # The curves, and the others on the same episodes.
    curves = [
        {
            "policy": agent,
            "seed": float(path.parent.name.rpartition("_")[2]),
            "step": line["global_step"],
            "cpu_s": line["charts/cpu_s"],
            "val_latency_s": line["eval/mean_latency_s"],
        }
        for agent, paths in files.items()
        for path in paths
        for line in _curve(path.parent)
    ]
    level = {}
    for policy in fixed:
        name = policy if isinstance(policy, str) else policy.name
        level[name] = play(policy, "val", VALIDATION_EPISODES).mean()
        curves.append({"policy": name, "seed": math.nan, "val_latency_s": level[name]})
    notes = []
    for agent in files:
        own = [row for row in curves if row["policy"] == agent]
        for name, value in level.items():
            each = [
                seconds_to([row for row in own if row["seed"] == seed], value)
                for seed in sorted({row["seed"] for row in own})
            ]
            shown = ", ".join("never" if math.isnan(x) else f"{x:.0f}" for x in each)
            text = f"{scenario}: processor seconds of {agent} to {name} ({value:.2f} s): {shown}."
            notes.append(note(text, policy=agent, level=name, cpu_s=each))
    save(options, f"learning_curves_{scenario}", curves, *notes)

    # Evaluation episodes.
    scores: dict[str, list[np.ndarray]] = {}
    number = options.episodes
    for agent, paths in files.items():
        scores[agent] = [play(load_policy(path), "eval", number, _stamp(path)) for path in paths]
    fresh = random_weights(next(iter(files.values()))[0])
    scores["random_weights"] = [play(fresh, "eval", number)]
    rules = fixed if options.quick else [SEARCH, *fixed]
    for policy in rules:
        name = policy if isinstance(policy, str) else policy.name
        scores[name] = [play(policy, "eval", number)]
    rows = []
    for name, each in scores.items():
        value, low, high = over_trainings(each, statistic=mean)
        row = {"policy": name, "trainings": len(each) if name in files else 0}
        row |= {"episodes": options.episodes, "mean_latency_s": value}
        rows.append(row | {"mean_latency_s_low": low, "mean_latency_s_high": high})
        print(f"{scenario} {name}: {value:.2f} s [{low:.2f}, {high:.2f}]")
    notes = []
    for agent in files:
        for name in (name for name in (SEARCH, *RULES, "own_share") if name in scores):
            value, low, high = relative_change(scores[agent], scores[name], mean)
            text = f"{scenario}: {agent} against {name}: {value:+.1f} % [{low:+.1f}, {high:+.1f}]."
            notes.append(note(text, policy=agent, against=name, change_pct=[value, low, high]))
    described = setting(build_problem(scenario=scenario))
    played = {path.parent.name for paths in files.values() for path in paths}
    made = [command for command in commands(scenario) if command.split()[-1] in played]
    settings = {"setting": described, "trainings": made}
    save(options, f"learning_{scenario}", rows, *notes, settings=settings)


def _plot(curves: Sequence[Mapping[str, Any]]) -> Any:
    """Latency by processor seconds, a line a training; dashed rules, dotted controls."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7.0, 4.4), layout="constrained")
    colours = dict(zip(AGENTS, ("tab:red", "tab:blue", "0.6"), strict=True))
    lines = [row for row in curves if row["policy"] in AGENTS]
    for agent in AGENTS:
        own = [row for row in lines if row["policy"] == agent]
        for k, seed in enumerate(sorted({row["seed"] for row in own})):
            one = [row for row in own if row["seed"] == seed]
            axis.plot(
                [row["cpu_s"] for row in one],
                [row["val_latency_s"] for row in one],
                color=colours[agent],
                lw=1.2,
                label=None if k else agent,
            )
    end = max(row["cpu_s"] for row in lines)
    top = 1.15 * max(row["val_latency_s"] for row in lines)
    low = min(row["val_latency_s"] for row in curves)
    at = -math.inf
    for row in sorted(curves, key=lambda row: row["val_latency_s"]):
        value = row["val_latency_s"]
        if row["policy"] in AGENTS or value > top:
            continue
        style = ":" if row["policy"] in CONTROLS else "--"
        axis.axhline(value, xmax=0.8, color="0.3", ls=style, lw=0.9)
        at = max(value, at + 0.04 * (top - low))  # labels apart
        axis.text(1.01 * end, at, row["policy"], fontsize=8, va="center")
    axis.set(xlabel="processor seconds", ylabel="mean latency on validation episodes, s")
    axis.set(xlim=(0, 1.25 * end), ylim=(None, top))
    legend(figure, axis)
    tidy(axis)
    return figure


FIGURES: dict[str, Any] = {name: partial(_scenario, name) for name in SCENARIOS}
PICTURES: Pictures = {
    f"learning_curves_{name}": Picture(_plot, (f"learning_curves_{name}",)) for name in SCENARIOS
}


def main(argv: Sequence[str] | None = None) -> int:
    """Make the figures that the command line names."""
    parser = figure_parser(tuple(FIGURES), __doc__, MODULE, EPISODES)
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), help="folder of trainings (runs)"
    )
    return run_chosen(FIGURES, PICTURES, command_line(parser, argv, Options()))


if __name__ == "__main__":
    sys.exit(main())
