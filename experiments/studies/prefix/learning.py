"""What PPO learns on the prefix family from random weights, beside published and tuned rules.

::

    python -m servegym.experiments.studies.prefix.learning --checkpoints runs/prefix

trains ``agents/ppo_requests.py`` into that folder, five seeds a scenario, at rates drawn from its
``train``; what is there is not trained again. The last policies then play the same episodes of
the eval split as the rules, at the rates of `SCENARIOS`. So do two controls: the networks before
they learn anything (``untrained``), and one training whose payments go to other decisions than
those that earned them (``shuffled``).

What a policy decides is in two columns: ``slow_share`` is the share of the requests that each of
the cards that decode slowest gets, ``match_share`` that of the prompts' tokens that the gateway's
index has at the replica chosen.

`weighted_load` is the rule that counts load by the weight of the card; *tuned* are the best of
`POINTS` of its two constants on episodes of the validation split, at the training's rates: the same
scenario as the learner saw, and fewer than a tenth of its decisions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from servegym._command_line import run_main
from servegym.agents import load_policy
from servegym.agents.lib.evaluation import RULES as AGENTS_RULES
from servegym.baselines.prefix_routing import PrefixSystem, RulePolicy
from servegym.baselines.prefix_routing.simple import WeightedLoad
from servegym.envs._outcomes import OutcomeReader
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.play import DEFAULT_SEED
from servegym.experiments.evaluation.stats import over_trainings
from servegym.experiments.evaluation.tables import Note, note
from servegym.experiments.papers import study
from servegym.experiments.papers.plotting import Curves
from servegym.experiments.papers.study import Study, command, interval_columns

ENV_ID, SUMMARY_ID = "servegym/PrefixRouting-v1", "servegym/PrefixRoutingSummary-v3"
SEEDS = range(1, 6)
TUNING_SEED, TUNING_EPISODES = 50_000, 12
POINTS = tuple(product((0.0, 0.001, 0.002, 0.005, 0.01, 0.02), (0.0, 0.5, 0.75, 1.0, 1.25, 1.5)))
"""`WeightedLoad`'s ``load_s`` and ``power``."""
RULES = ("round_robin", "least_load", "llm_d", "lmetric", "dynamo", "aibrix", "mooncake")
OURS = ("weighted_load", "prefix_search")
Scenario = Mapping[str, Any]
SCENARIOS: dict[str, Scenario] = {
    "mixed-cards": {"rates": (30.0, 33.0, 36.0), "train": [24, 38], "steps": 1_000_000},
    "hot-tenant": {"rates": (60.0,), "train": [60, 60], "steps": 480_000},
    "mooncake": {"rates": (10.0,), "train": [8, 12], "steps": 128_000},
}
"""Rates that are measured, those of the trainings, and their decisions."""
PPO = "ppo_requests"
AGENT: dict[str, Any] = {
    "env_id": SUMMARY_ID,
    "average": 0.01,
    "num_envs": 32,
    "num_steps": 500,
    "gamma": 0.99,
    "eval_every": 100_000,
    "eval_episodes": 8,
}


class Options(study.Options):
    """The command line.

    Attributes:
        checkpoints: Folder of the training runs.
    """

    checkpoints: Path


class ShuffledOutcomes:
    """Tells the rewards of requests at decisions that did not earn them.

    Args:
        rng: Source of the wrong decisions.
        envs: The environments.
    """

    def __init__(self, rng: np.random.Generator, envs: Any) -> None:
        self._reader, self._rng = OutcomeReader(envs), rng

    def read(self) -> NDArray[Any]:
        """The requests that have ended, each at a decision drawn from all of the rollout."""
        ended = self._reader.read()
        slots = self._rng.permutation(AGENT["num_steps"] * AGENT["num_envs"])[: len(ended)]
        ended["decision"], ended["row"] = np.divmod(slots, AGENT["num_envs"])
        return ended


def trained(
    folder: Path, name: str, arguments: Mapping[str, Any], seeds: Sequence[int] = SEEDS
) -> list[Path]:
    """The runs of ``name`` in a folder, trained where they are missing.

    Args:
        folder: Where they are.
        name: What their own names begin with.
        arguments: Of `servegym.agents.ppo_requests.Args`.
        seeds: A run for each.
    """
    from servegym.agents import ppo_requests

    runs = [folder / f"{name}_{seed}" for seed in seeds]
    for seed, run in zip(seeds, runs, strict=True):
        if not (run / "last.safetensors").exists():
            args = ppo_requests.Args(**arguments, seed=seed, out_dir=str(folder), run_name=run.name)
            ppo_requests.train(args)
    return runs


def training(folder: Path, name: str, control: str = "") -> list[Path]:
    """The runs of a scenario, or those of a control: ``untrained`` or ``shuffled``."""
    from servegym.agents import ppo_requests

    scenario = SCENARIOS[name]
    settings = (f'scenario="{name}"', f"rate={json.dumps(scenario['train'])}")
    arguments = AGENT | {"set": settings, "total_timesteps": scenario["steps"]}
    if control == "untrained":
        rollout = AGENT["num_envs"] * AGENT["num_steps"]  # it sets the scale of the observations
        arguments |= {"learning_rate": 0.0, "total_timesteps": rollout}
        return trained(folder, f"{name}_{control}", arguments)
    if control == "shuffled":
        shuffled = partial(ShuffledOutcomes, np.random.default_rng(0))
        with patch.object(ppo_requests, "OutcomeReader", shuffled):
            return trained(folder, f"{name}_{control}", arguments, SEEDS[:1])
    return trained(folder, name, arguments)


def _flags(name: str) -> str:
    """A scenario's training on the command line."""
    scenario = SCENARIOS[name]
    rate = json.dumps(scenario["train"], separators=(",", ":"))
    arguments = AGENT | {"total_timesteps": scenario["steps"]}
    words = [f"--{key} {value}" for key, value in arguments.items()]
    return " ".join([*words, f"--set scenario={name} rate={rate}"])


def played(
    policy: Any, seed: int, episodes: int, **kwargs: Any
) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """Share of the requests within both objectives of each episode, and the requests of all."""
    rows = evaluate(ENV_ID, [policy], episodes, seed, env_kwargs=kwargs, num_envs=episodes)
    (requests,) = rows.logs.values()
    return np.array([float(row["attainment"]) for row in rows]), np.concatenate(requests)


def decisions(requests: NDArray[Any], system: PrefixSystem) -> tuple[float, float]:
    """``slow_share`` and ``match_share`` of the requests that were sent."""
    slowest = np.flatnonzero(system.decode_speed == system.decode_speed.min())
    slow = np.isin(requests["replica"], slowest).mean() / len(slowest)
    return float(slow), float(requests["match_tokens"].sum() / requests["prompt_tokens"].sum())


def tuned_rule(name: str) -> dict[str, float]:
    """Constants of `WeightedLoad` that are best on validation episodes at the training's rates."""
    given = {"scenario": name, "rate": SCENARIOS[name]["train"], "split": "val"}
    system = PrefixSystem.from_kwargs(**given)
    reached = []
    for load_s, power in POINTS:
        rule = RulePolicy(system, partial(WeightedLoad, load_s, power), "weighted_load")
        reached.append(played(rule, TUNING_SEED, TUNING_EPISODES, **given)[0].mean())
    return dict(zip(("load_s", "power"), POINTS[int(np.argmax(reached))], strict=True))


def _rows(options: Options, at: Mapping[str, Any], _: Sequence[Any]) -> Iterator[dict[str, Any]]:
    name, rate = at["scenario"], at["rate"]
    given = {"scenario": name, "rate": rate}
    play = partial(played, seed=DEFAULT_SEED, episodes=options.episodes, **given)
    constants = tuned_rule(name)
    system = PrefixSystem.from_kwargs(**given)
    tuned = play(RulePolicy(system, partial(WeightedLoad, **constants), "weighted_load"))
    found = {rule: [play(rule)] for rule in (*RULES, *OURS)}
    found["weighted_load tuned"] = [tuned]
    runs = {
        f"{PPO} {control}".rstrip(): training(options.checkpoints, name, control)
        for control in ("", "untrained", "shuffled")
    }
    for policy, folders in runs.items():
        policies = [load_policy(folder / "last.safetensors", system) for folder in folders]
        found[policy] = [play(one) for one in policies]
    for policy, runs_of in found.items():
        each = [scores for scores, _ in runs_of]
        told = np.mean([decisions(requests, system) for _, requests in runs_of], axis=0)
        row: dict[str, Any] = {**at, "policy": policy, "trainings": len(each)}
        row |= interval_columns("attainment", over_trainings(each))
        row |= interval_columns("minus_tuned", over_trainings(each, tuned[0]))
        row |= dict(zip(("slow_share", "match_share"), told.round(4).tolist(), strict=True))
        row["each"] = json.dumps([round(float(values.mean()), 4) for values in each])
        row["constants"] = json.dumps(constants) if policy == "weighted_load tuned" else ""
        row["cpu_s"] = json.dumps([seconds(run) for run in runs[PPO]]) if policy == PPO else ""
        yield row


def metrics(run: Path) -> list[dict[str, float]]:
    """What a training logged."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def seconds(run: Path) -> float:
    """Processor seconds of a training."""
    return round(metrics(run)[-1]["charts/cpu_s"], 1)


def _curves(options: Options, at: Mapping[str, Any], _: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """The evaluations of the trainings, and the agent's rule on the same validation episodes."""
    for policy, control in ((PPO, ""), (f"{PPO} shuffled", "shuffled")):
        for seed, run in enumerate(training(options.checkpoints, at["scenario"], control), 1):
            for line in metrics(run):
                if "eval/score" in line:
                    row = {**at, "policy": policy, "training": seed, "step": line["global_step"]}
                    row |= {"cpu_s": round(line["charts/cpu_s"], 1)}
                    yield row | {"attainment": line["eval/score"]}
    yield {**at, "policy": AGENTS_RULES["prefix_routing"], "attainment": line["eval/rule_score"]}


def _curve_notes(options: Options, rows: Sequence[Mapping[str, Any]]) -> Iterator[Note]:
    *own, rule = rows
    times = []
    for seed in SEEDS:
        run = [row for row in own if (row["policy"], row["training"]) == (PPO, seed)]
        reached = [row["cpu_s"] for row in run if row["attainment"] >= rule["attainment"]]
        times.append(f"{reached[0]:.0f}" if reached else "never")
    text = f"{rule['scenario']}: processor seconds of PPO to {rule['policy']}"
    yield note(f"{text} ({rule['attainment']:.3f}) on validation episodes: {', '.join(times)}.")


def _notes(options: Options, rows: Sequence[Mapping[str, Any]]) -> Iterator[Note]:
    for row in rows:
        if row["policy"] == PPO:
            yield note(
                f"{row['scenario']} at {row['rate']}/s: PPO {row['attainment']:.3f} "
                f"[{row['attainment_low']:.3f}, {row['attainment_high']:.3f}], "
                f"{row['minus_tuned']:+.3f} [{row['minus_tuned_low']:+.3f}, "
                f"{row['minus_tuned_high']:+.3f}] over the tuned rule."
            )


STUDIES = (
    Study(
        name="learning_curves",
        figure="learning_curves",
        columns=_curves,
        settings=lambda options: [{"scenario": "mixed-cards"}],
        notes=_curve_notes,
        picture=Curves(
            y="attainment",
            label="share within both objectives, validation episodes",
            run=("policy", "training"),
        ),
        facts=lambda options: {"flags": _flags("mixed-cards")},
        packages=("torch",),
    ),
    Study(
        name="learning",
        figure="learning",
        columns=_rows,
        settings=lambda options: [
            {"scenario": name, "rate": rate}
            for name, scenario in SCENARIOS.items()
            for rate in scenario["rates"]
        ],
        notes=_notes,
        packages=("torch",),
        key=("scenario", "rate"),
    ),
)


def add_checkpoints(parser: argparse.ArgumentParser) -> None:
    """Add the option of the training runs' folder."""
    parser.add_argument(
        "--checkpoints", type=Path, required=True, help="folder of the training runs"
    )


main = command(__spec__.name, __doc__, STUDIES, 20, add_checkpoints)

if __name__ == "__main__":
    run_main(main)
