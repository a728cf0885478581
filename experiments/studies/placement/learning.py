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

Intervals are over trainings and episodes together, of rules over episodes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.agents.lib.checkpoint import json_field, load_policy, read_content
from servegym.baselines.protocol import BasePolicy
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.play import DEFAULT_SEED
from servegym.experiments.evaluation.stats import mean, over_trainings, relative_change
from servegym.experiments.evaluation.tables import Note, note
from servegym.experiments.papers import study
from servegym.experiments.papers.placement.measuring import ENV_ID, setting
from servegym.experiments.papers.plotting import Curves
from servegym.experiments.papers.study import Study, command, interval_columns
from servegym.experiments.papers.verdicts import split

__all__ = ["SCENARIOS", "STUDIES", "Control", "commands", "main", "seconds_to"]

SCENARIOS = ("edge_hetero", "paper_testbed")
EPISODES = 5
VALIDATION_SEED, VALIDATION_EPISODES = 10_000, 2
"""The agents' evaluations while they train."""
RULES = ("prism", "proxy_optimum", "whole_layer", "latency_dp")
SEARCH = "best_start"
"""The best of a long search by simulation, no network; played on evaluation episodes alone."""
CONTROLS = ("own_share", "constant")
TRAININGS = {"ppo_placement": 5, "mappo_placement": 5, "ppo_placement_shuffled": 1}
AGENTS = tuple(TRAININGS)
TESTBED = "--set scenario=paper_testbed --height_unit 1 --std_first 0.4 --total_timesteps 6144"
FLAGS: dict[tuple[str, str], str] = {
    ("ppo_placement", "paper_testbed"): f"{TESTBED} --table_learning_rate 0.03 --common_credit 1",
    ("mappo_placement", "paper_testbed"): f"{TESTBED} --table_learning_rate 0.03",
}
"""What an agent's command has for a scenario besides the seed."""


class Options(study.Options):
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
    lines = []
    for agent in AGENTS:
        plain = agent.removesuffix("_shuffled")
        control = "" if agent == plain else "--shuffle_rewards True"
        for seed in range(1, TRAININGS[agent] + 1):
            command = f"python -m servegym.agents.{plain}"
            parts = [command, FLAGS.get((plain, scenario), ""), control]
            name = f"--seed {seed} --run_name {agent}_{scenario}_{seed}"
            lines.append(" ".join([part for part in parts if part] + [name]))
    return lines


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
    files: dict[str, list[Path]] = {}
    for agent in AGENTS:
        paths = sorted(options.runs.glob(f"{agent}_{scenario}_[0-9]*/last.safetensors"))
        if paths:
            files[agent] = paths
    if not files:
        raise ValueError(
            f"runs is {str(options.runs)!r}, which holds no training of {scenario}; make one by "
            f"{commands(scenario)[0]}"
        )
    return files


def _played(policy: Any, scenario: str, split: str, episodes: int) -> np.ndarray:
    """Latency of each episode (episodes,), the same episodes for every policy.

    Args:
        policy: A registered name or a policy.
        scenario: The scenario.
        split: ``val`` (the agents' validation episodes) or ``eval``.
        episodes: How many.
    """
    seed = VALIDATION_SEED if split == "val" else DEFAULT_SEED
    runs = evaluate(ENV_ID, [policy], episodes, seed, {"scenario": scenario, "split": split})
    return np.array([run["mean_latency_s"] for run in runs])


def _fixed() -> dict[str, Any]:
    """The rules and controls by name."""
    return {name: name for name in RULES} | {name: Control(name) for name in CONTROLS}


def _curve(run: Path) -> list[dict[str, float]]:
    """The evaluations of a training."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if "eval/mean_latency_s" in line]


def seconds_to(curve: Sequence[Mapping[str, float]], level: float) -> float:
    """Processor seconds at the first evaluation at or below a latency; NaN if none is."""
    reached = [row["cpu_s"] for row in curve if row["val_latency_s"] <= level]
    return reached[0] if reached else math.nan


def _curves(options: Options, at: dict[str, str], _: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The curves of the trainings, and the rules and controls on the same episodes."""
    for agent, paths in _files(options, at["scenario"]).items():
        for path in paths:
            for line in _curve(path.parent):
                yield {
                    "policy": agent,
                    "seed": float(path.parent.name.rpartition("_")[2]),
                    "step": line["global_step"],
                    "cpu_s": line["charts/cpu_s"],
                    "val_latency_s": line["eval/mean_latency_s"],
                }
    for name, policy in _fixed().items():
        level = _played(policy, at["scenario"], "val", VALIDATION_EPISODES).mean()
        yield {"policy": name, "seed": math.nan, "val_latency_s": level}


def _curve_notes(options: Options, rows: Sequence[dict[str, Any]]) -> Iterator[Note]:
    levels = {row["policy"]: row["val_latency_s"] for row in rows if "step" not in row}
    for agent, curve in split([row for row in rows if "step" in row], "policy"):
        for name, level in levels.items():
            each = [seconds_to(part, level) for _, part in split(curve, "seed")]
            shown = ", ".join("never" if math.isnan(x) else f"{x:.0f}" for x in each)
            text = f"processor seconds of {agent['policy']} to {name} ({level:.2f} s): {shown}."
            yield note(text, **agent, level=name, cpu_s=each)


def _evaluated(options: Options, at: dict[str, str], _: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Evaluation episodes of the last weights, the rules and the controls."""
    scenario, number = at["scenario"], options.episodes
    files = _files(options, scenario)
    each: dict[str, list[Any]] = {
        agent: [load_policy(path) for path in paths] for agent, paths in files.items()
    }
    each["random_weights"] = [random_weights(next(iter(files.values()))[0])]
    rules = _fixed() if options.quick else {SEARCH: SEARCH, **_fixed()}
    each |= {name: [policy] for name, policy in rules.items()}
    for name, policies in each.items():
        scores = [_played(policy, scenario, "eval", number) for policy in policies]
        row = {"policy": name, "trainings": len(scores) if name in files else 0}
        row |= {"episodes": number, "_scores": scores}
        yield row | interval_columns("mean_latency_s", over_trainings(scores, statistic=mean))


def _notes(options: Options, rows: Sequence[dict[str, Any]]) -> Iterator[Note]:
    by = {row["policy"]: row for row in rows}
    for agent in (row for row in rows if row["trainings"]):
        for name in (name for name in (SEARCH, *RULES, "own_share") if name in by):
            difference = relative_change(agent["_scores"], by[name]["_scores"], mean)
            text = "{} against {}: {:+.1f} % [{:+.1f}, {:+.1f}]."
            text = text.format(agent["policy"], name, *difference)
            yield note(text, policy=agent["policy"], against=name, change_pct=list(difference))


def _studies(scenario: str) -> tuple[Study, Study]:
    def facts(options: Options) -> dict[str, Any]:
        paths = _files(options, scenario).values()
        played = {path.parent.name for group in paths for path in group}
        runs = [words for words in commands(scenario) if words.split()[-1] in played]
        return {"setting": setting(scenario=scenario), "trainings": runs}

    shared: Any = {"settings": lambda options: ({"scenario": scenario},), "facts": facts}
    curves = f"learning_curves_{scenario}"
    picture = Curves(
        y="val_latency_s",
        label="mean latency of validation episodes, s",
        run=("policy", "seed"),
    )
    return (
        Study(curves, scenario, _curves, notes=_curve_notes, picture=picture, **shared),
        Study(f"learning_{scenario}", scenario, _evaluated, notes=_notes, **shared),
    )


STUDIES = tuple(study for scenario in SCENARIOS for study in _studies(scenario))


def _add(parser: argparse.ArgumentParser) -> None:
    words = "folder of trainings (runs)"
    parser.add_argument("--runs", type=Path, default=Path("runs"), help=words)


main = command(__spec__.name, __doc__, STUDIES, EPISODES, _add)

if __name__ == "__main__":
    run_main(main)
