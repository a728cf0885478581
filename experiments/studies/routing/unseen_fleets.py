"""Learners and rules on forty fleets, and on the named ones away from home, that nobody trained on.

``python -m servegym.experiments.studies.routing.unseen_fleets`` makes the trainings of `LEARNERS`,
five seeds each, unless ``--runs`` holds them, and plays their last policies beside the rules: on
forty drawn fleets of 3 to 16 experts with 1 to 64 slots, bursts and requirements, and in the
settings of `SETTINGS`. The fleets are drawn from numbers of their own, and no number, width or
choice of a learner or a rule was made on them; `SETTINGS` were looked at while the inputs of the
learners were chosen. Every policy plays the same episodes.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from servegym._command_line import run_main
from servegym.baselines.llm_routing.latency import ExpectedQos
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.protocol import Policy
from servegym.baselines.registry import make_policy
from servegym.envs.llm_routing.config import Problem, build_problem, setting_problem
from servegym.envs.llm_routing.core import RoutingBatch
from servegym.envs.llm_routing.kernel import layout
from servegym.experiments.evaluation.stats import mean, over_trainings, student_interval
from servegym.experiments.evaluation.tables import Note, note
from servegym.experiments.papers import study
from servegym.experiments.papers.study import Study, command
from servegym.experiments.papers.verdicts import Rows, split
from servegym.experiments.studies.routing.learning_curves import SEEDS, train

__all__ = ["LEARNERS", "SETTINGS", "STUDIES", "main"]

FLEETS, FIRST_FLEET, FIRST_EPISODE = 40, 620_000, 5_000
RANGES = {"num_experts": [3, 16], "running_capacity": [1, 64], "waiting_capacity": [1, 64]}
"""Of the forty fleets; what else is drawn is drawn as by default."""
TRAINED_ON = RANGES | {"memory": [0.5, 64], "latency": [1.1, 10], "load": [0.3, 1.6]}
DRAWN = f"--set fleet=random 'fleet_kwargs={json.dumps(TRAINED_ON)}'"


class Learner(NamedTuple):
    """Trainings: the module of an agent and its flags, or a shipped policy."""

    agent: str
    flags: str | None


LEARNERS = {
    "sac_rows": Learner("sac_rows", ""),
    "sac_rows, drawn fleets": Learner("sac_rows", f"{DRAWN} --total_timesteps 300000"),
    "sac_han": Learner("sac_han", None),
    "fleet_search": Learner("fleet_search", None),
    "rpi": Learner("rpi", None),
}
TUNED = "expected_qos, tuned on drawn fleets"
RULES: dict[str, dict[str, float]] = {
    "least_outstanding": {},
    "greedy_qos": {},
    "priced_greedy": {},
    "route_balance": {},
    "expected_qos": {},
    TUNED: {"price_half": 0.06688, "price_full": 0.1634},
}
"""Rules with their parameters. The last are what ``servegym tune expected_qos --set fleet=random
'fleet_kwargs=...' episode_requests=1500 --rates .5 .8 1.1 1.4 --budget 500`` found, with
`TRAINED_ON` but its loads."""
HOME_RATES = (5.0, 8.0, 10.0)
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"home, {rate:g}/s": {"rate": rate} for rate in HOME_RATES},
    **{
        f"{count} experts, {rate:g}/s": {"num_experts": count, "rate": rate}
        for count, rate in ((3, 5.0), (9, 12.0), (9, 15.0), (12, 16.0), (12, 20.0))
    },
    "paper-linear, 10/s": {"profiles": "paper-linear", "rate": 10.0},
    "3 equal experts, 5/s": {"profiles": "edge-6-homogeneous", "num_experts": 3, "rate": 5.0},
    "bursts, 5/s": {"arrivals": "burstgpt", "rate": 5.0},
    "bursts, 8/s": {"arrivals": "burstgpt", "rate": 8.0},
    "L = 25 ms, 8/s": {"latency_requirement_s": 0.025, "rate": 8.0},
}
"""Arguments of the environment."""
REQUESTS = 500  # of an episode


class Options(study.Options):
    """The command line.

    Attributes:
        runs: Folder of the trainings.
        seeds: Those to train now, without a table; none: all, and measure them.
        learner: Those to train now.
    """

    runs: Path
    seeds: Sequence[int]
    learner: Sequence[str]


def fleet(number: int) -> Problem:
    """The problem of one of the forty drawn fleets."""
    drawn = build_problem(view=layout.GRAPH, fleet="random", fleet_kwargs=RANGES).fleets
    assert drawn is not None
    setting = drawn.draw(np.random.default_rng(FIRST_FLEET + number))
    return setting_problem(setting, view=layout.GRAPH, **_every())


def _every() -> dict[str, Any]:
    return {"split": "eval", "reward": "completed_qos", "episode_requests": REQUESTS}


def qos(problem: Problem, policy: Policy, episodes: int) -> NDArray[np.float64]:
    """Average QoS (episodes,) of a policy in the first episodes of a problem."""
    batch, every = RoutingBatch(problem, episodes), np.ones(episodes, np.int8)
    for row in range(episodes):
        batch.draw(row, np.random.default_rng(FIRST_EPISODE + row))
    batch.begin(every)
    policy.reset(episodes, seed=0)
    total, ended = np.zeros(episodes), 0
    while not ended:
        ended = batch.step(policy.act(batch.observation, batch.action_mask), every)
        total += batch.out[:, :2].sum(1)
    return total / REQUESTS


@cache
def trained(name: str, runs: Path, seeds: tuple[int, ...]) -> tuple[str | Path, ...]:
    """The last policies of a learner's trainings, which are made unless they are there."""
    learner = LEARNERS[name]
    if learner.flags is None:
        return (learner.agent,)
    folder, flags = runs / name.replace(", ", "-").replace(" ", "_"), shlex.split(learner.flags)
    return tuple(
        train(learner.agent, flags, seed, folder, False) / "last.safetensors" for seed in seeds
    )


def _measured(options: Options, at: dict[str, Any], _: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of every policy and training: the mean QoS of the episodes."""
    seeds = SEEDS[:1] if options.quick else tuple(options.seeds or SEEDS)
    problem = at["_problem"]()
    system = RoutingSystem.from_problem(problem)
    facts = {
        "experts": problem.num_experts,
        "slots": problem.arguments.running_capacity,
        "rate": round(problem.arguments.rate, 3),
        "served": round(_served(system, problem), 3),
    }
    rows = []
    for name in (*RULES, *LEARNERS):
        if name in RULES:
            policies = [make_policy(name.partition(",")[0], system, **RULES[name])]
        else:
            policies = [load(path, system) for path in trained(name, options.runs, seeds)]
        for k, policy in enumerate(policies):
            found = float(qos(problem, policy, options.episodes).mean())
            rows.append({"setting": at["setting"], **facts, "policy": name})
            rows[-1] |= {"training": k + 1 if name in LEARNERS else None, "qos": round(found, 5)}
    return rows


def load(path: str | Path, system: RoutingSystem) -> Policy:
    """The policy of a training, or a shipped one by its name, for a system."""
    from servegym.agents import load_policy
    from servegym.agents.lib.checkpoint import shipped

    return load_policy(shipped("llm_routing")[path] if isinstance(path, str) else path, system)


def _served(system: RoutingSystem, problem: Problem) -> float:
    """Requests/s that the fleet serves within L, see `ExpectedQos.fleet`."""
    batch = RoutingBatch(problem, 1)
    batch.draw(0, np.random.default_rng(0))
    batch.begin(np.ones(1, np.int8))
    return float(ExpectedQos(system).fleet(batch.observation).total[0, 0])


def _settings(options: Options) -> Iterator[dict[str, Any]]:
    for number in range(2 if options.quick else FLEETS):
        yield {"setting": f"fleet {number + 1}", "_problem": lambda number=number: fleet(number)}
    named = list(SETTINGS.items())
    for name, given in named[:1] if options.quick else named:
        problem = partial(build_problem, view=layout.GRAPH, **_every(), **given)
        yield {"setting": name, "_problem": problem}


def findings(options: Any, rows: Rows) -> Iterator[Note]:
    """Every learner's and rule's gain over every rule: over fleets, and in each setting."""
    tables: dict[str, dict[str, list[float]]] = {}
    for at, part in split(rows, "setting"):
        for of, own in split(part, "policy"):
            values = [float(row["qos"]) for row in own]
            tables.setdefault(of["policy"], {})[at["setting"]] = values
    fleets = [name for name in next(iter(tables.values())) if name.startswith("fleet ")]
    level = {name: np.array([of[each] for each in fleets]) for name, of in tables.items()}
    for name, values in level.items():
        own = over_trainings(list(values.T), statistic=mean)
        yield note(
            f"{name}: QoS {own.value:.4f} [{own.low:.4f}, {own.high:.4f}] over {len(fleets)} "
            f"fleets, {values.shape[1]} training(s).",
            policy=name,
            qos=own.value,
        )
    for name, values in level.items():
        for over in RULES:
            if name == over:
                continue
            gains = values - level[over]
            found = over_trainings(list(gains.T), statistic=mean)
            each = gains.mean(1)
            yield note(
                f"{name} over {over}: {found.value:+.4f} [{found.low:+.4f}, {found.high:+.4f}] "
                f"over fleets and trainings, above in {(each > 0).sum()} of {len(each)}, "
                f"least {each.min():+.4f}.",
                policy=name,
                over=over,
                gain=found.value,
                low=found.low,
                high=found.high,
            )
    for setting in tables["expected_qos"]:
        if setting not in fleets:
            found = {name: student_interval(of[setting]) for name, of in tables.items()}
            rule = max(RULES, key=lambda name: found[name].value)
            texts = [f"{name} {found[name].value:.3f}" for name in tables]
            yield note(f"{setting}: {', '.join(texts)}; best rule {rule}.", setting=setting)


STUDIES = (
    Study(
        "unseen_fleets",
        "unseen_fleets",
        _measured,
        _settings,
        notes=findings,
        facts=lambda options: {"learners": {name: x._asdict() for name, x in LEARNERS.items()}},
        packages=("torch",),
        key=("setting",),
    ),
)


def _add(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    words = "folder of trainings (runs/unseen_fleets)"
    add("--runs", type=Path, default=Path("runs/unseen_fleets"), help=words)
    words = "train these alone, for --learner"
    add("--seeds", type=int, nargs="+", choices=SEEDS, default=(), help=words)
    add("--learner", nargs="+", choices=LEARNERS, default=(), help="train these alone")


def _prepare(options: Options) -> None:
    """Make the trainings that are asked for alone, and end."""
    for name in options.learner:
        trained(name, options.runs, tuple(options.seeds or SEEDS))
    if options.learner:
        raise SystemExit(0)


main = command(__spec__.name, __doc__, STUDIES, 12, _add, _prepare)

if __name__ == "__main__":
    run_main(main)
