"""What the studies of routing share: routers, episodes and their summaries."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from servegym._checks import choose
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.stats import over_trainings, relative_change
from servegym.experiments.papers import study
from servegym.experiments.papers.routing import claims
from servegym.experiments.papers.study import interval_columns

ENV_ID = "servegym/LLMRouting-v1"
FLEETS = ("edge-6-heterogeneous", "paper-linear")
BASELINES = (
    "random",
    "round_robin",
    "shortest_queue",
    "bert_router",
    "always_best",
    "least_latency",
    "greedy_qos",
    "priced_greedy",
)
"""Compared in every table; round_robin, shortest_queue and bert_router are the paper's."""
GRAPH_AGENTS = ("sac_han", "sac_rows", "cem")

LOADED = {"edge-6-heterogeneous": 8.0, "paper-linear": 5.0}
"""The rate at which a fleet is loaded but not lost."""

COLUMNS = {
    "latency_ms_per_token": ("mean_latency_s_per_token", 1e3),
    "p99_latency_ms_per_token": ("p99_latency_s_per_token", 1e3),
    "ttft_ms": ("mean_ttft_s", 1e3),
    "e2e_s": ("mean_e2e_s", 1.0),
    "communication_s": ("mean_communication_s", 1.0),
    "routing_s": ("mean_routing_s", 1.0),
    "waiting_s": ("mean_waiting_s", 1.0),
    "inference_s": ("mean_inference_s", 1.0),
    "late_rate": ("violation_rate", 1.0),
    "drop_rate": ("drop_rate", 1.0),
    "reject_rate": ("reject_rate", 1.0),
    "memory_use": ("memory_use", 1.0),
    "goodput_rps": ("goodput_rps", 1.0),
    "ceiling": ("ceiling", 1.0),
}
"""Column of a table -> number of `evaluate` and its scale; means over episodes."""


class TrainedRun(NamedTuple):
    """A finished training.

    Attributes:
        label: Its name in tables and pictures; runs of one label differ in their seed.
        path: Its checkpoint.
        name: What the checkpoint calls itself, or its name if it is shipped.
        shipped: Whether it comes with the package.
        env: Arguments of its training environment.
        seed: Seed of its training.
        experts: Number of experts that it was trained for.
        any_experts: Whether it can serve another number of experts.
    """

    label: str
    path: Path
    name: str
    shipped: bool
    env: Mapping[str, Any]
    seed: int
    experts: int
    any_experts: bool


class Options(study.Options):
    """The command line of a module: `study.Options` and the routers to compare.

    Attributes:
        checkpoints: Folder of the trainings, or None.
        routers: Names of the shipped routers to compare.
        fleets: Fleets to measure.
        trained: The finished trainings.
    """

    checkpoints: Path | None
    routers: Sequence[str]
    fleets: Sequence[str]
    trained: Sequence[TrainedRun]


def find_runs(folder: Path) -> list[TrainedRun]:
    """The trainings below a folder, which must exist: every folder with a checkpoint.

    Their labels say the agent and what is unusual about the training's environment: its number of
    experts, a range of requirements L, or predictions that it did without.
    """
    if not folder.is_dir():
        raise ValueError(f"checkpoints is {str(folder)!r}, which is no folder")
    from servegym.agents import load_policy

    files = [*folder.rglob("best.safetensors"), *folder.rglob("last.safetensors")]
    runs = sorted({path.parent for path in files})
    return [
        _trained(policy.name + _unusual(policy.training_env), policy, False)
        for policy in map(load_policy, runs)
        if _has_a_rate(policy)
    ]


def _has_a_rate(policy: Any) -> bool:
    """Whether a policy serves graphs and was trained on one fleet, at rates of its own."""
    return policy.agent in GRAPH_AGENTS and policy.training_env.get("fleet") != "random"


def _unusual(env: Mapping[str, Any]) -> str:
    if {"score_predictor", "length_predictor"} & env.keys():
        return claims.RETRAINED
    if isinstance(env.get("latency_requirement_s"), Sequence):
        return claims.OVER_L
    return claims.AT_N if "num_experts" in env else ""


def shipped_runs(names: Sequence[str] = ()) -> list[TrainedRun]:
    """The checkpoints that come with the package, or some; they serve every fleet that they can.

    Without those that were trained on drawn fleets, at no rate of their own.
    """
    from servegym.agents import load_policy
    from servegym.agents.lib.checkpoint import shipped

    files = shipped("llm_routing")
    chosen = [choose("routers", name, files) for name in names] or files
    policies = {name: load_policy(path) for name, path in files.items() if name in chosen}
    return [
        _trained(f"{name} (shipped)", policy, True)._replace(name=name)
        for name, policy in policies.items()
        if _has_a_rate(policy)
    ]


def _trained(label: str, policy: Any, shipped: bool) -> TrainedRun:
    return TrainedRun(
        label,
        policy.path,
        policy.name,
        shipped,
        {"profiles": "edge-6-heterogeneous", **policy.training_env},
        int(policy.args.seed),
        int(policy.training_env.get("num_experts", 6)),
        not getattr(policy.net, "fixed_experts", False),
    )


def play(
    policies: Sequence[Any], episodes: int, env_kwargs: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Rows of every policy's episodes, see `evaluate`; up to 64 of them side by side."""
    return evaluate(ENV_ID, policies, episodes, env_kwargs=env_kwargs, num_envs=min(episodes, 64))


def at_rates(
    rates: Callable[[Options, str], Sequence[float]], **env: Any
) -> Callable[[Options], list[dict[str, Any]]]:
    """Settings of every fleet at some rates, with further arguments of the environment."""

    def settings(options: Options) -> list[dict[str, Any]]:
        points = [(fleet, rate) for fleet in options.fleets for rate in rates(options, fleet)]
        return [
            {"point": f"{fleet}, {rate:g}/s", "profiles": fleet, "rate": rate}
            | {"_env": {"profiles": fleet, "rate": rate, **env}}
            for fleet, rate in points
        ]

    return settings


def measure(
    options: Options, at: Mapping[str, Any], policies: Sequence[str | TrainedRun]
) -> list[dict[str, Any]]:
    """Summaries of heuristics and trained routers in one setting, on the same episodes.

    The interval of a heuristic, or of a router trained once, is over episodes; that of a router
    trained with several seeds is over trainings and episodes together. ``interval_over`` says
    which; rows of earlier routers have intervals over ``trainings`` alone. For the rest see
    `over_rivals`. Columns ``at`` are put first in every row, but ``_env``, the arguments of the
    environment. Routers that cannot serve so many experts are left out.
    """
    from servegym.agents import load_policy
    from servegym.baselines.llm_routing.system import RoutingSystem

    kwargs = {"episode_requests": 1000, **at["_env"]}
    if options.quick:
        kwargs["episode_requests"] = 100
    system = RoutingSystem.from_kwargs(**kwargs)
    series: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for one in policies:
        if isinstance(one, str):
            series[one] = {0: play([one], options.episodes, kwargs)}
        elif one.any_experts or one.experts == system.num_experts:
            policy = load_policy(one.path, system)
            policy.name = one.label
            rows = play([policy], options.episodes, kwargs)
            series.setdefault(one.label, {})[one.seed] = rows
    episodes = {name: list(parts.values()) for name, parts in series.items()}
    named = {
        name: {**at, "policy": name, "trainings": 0 if name in policies else len(parts)}
        | summarise_parts(parts)
        for name, parts in episodes.items()
    }
    qos = {
        name: [[one["avg_qos"] for one in part] for part in parts]
        for name, parts in episodes.items()
    }
    for name, row in named.items():
        row |= over_rivals(name, named, qos)
    return list(named.values())


def over_rivals(
    name: str, named: Mapping[str, Mapping[str, Any]], qos: Mapping[str, Sequence[Sequence[float]]]
) -> dict[str, Any]:
    """Changes of a policy's QoS over its strongest rivals in a setting, percent, with intervals.

    ``rival`` and ``over_rival_pct`` are for the strongest of the paper's baselines, ``state_rival``
    and so on for the strongest that reads Baseline RL's state; ``none`` and NaN for heuristics and
    rivals and where there is no rival.
    """
    row: dict[str, Any] = {}
    for key, rival in (
        ("rival", claims.strongest(named, name)),
        ("state_rival", claims.strongest(named, name, heuristics=())),
    ):
        values = (math.nan, math.nan, math.nan)
        if rival is None or not named[name]["trainings"] or claims.base_of(name) in claims.RIVALS:
            rival = "none"
        else:
            change = relative_change(qos[name], qos[rival])
            values = tuple(round(value, 4) for value in change)
        row |= {key: rival, **dict(zip(claims.columns_over(key), values, strict=True))}
    return row


def summarise_parts(parts: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """QoS with its interval and the means of `COLUMNS`, of one or several trainings' episodes.

    The QoS of a training is the interquartile mean over its episodes, see `over_trainings`.
    """
    qos = over_trainings([[row["avg_qos"] for row in part] for part in parts])
    row: dict[str, Any] = interval_columns("qos", qos)
    row |= {"interval_over": "trainings and episodes" if len(parts) > 1 else "episodes"}
    row |= {"episodes": len(parts[0])}
    for column, (key, scale) in COLUMNS.items():
        values = np.array([one[key] for part in parts for one in part], dtype=np.float64)
        values = values[np.isfinite(values)]
        row[column] = scale * float(values.mean()) if values.size else math.nan
    return {key: round(v, 6) if isinstance(v, float) else v for key, v in row.items()}


def chosen(options: Options, fleet: str, *unusual: str) -> list[TrainedRun]:
    """The trainings on a fleet, and what is shipped and can serve that fleet.

    ``unusual`` are endings of labels, such as `OVER_L`, of the unusual trainings that count.
    """
    return [
        run
        for run in options.trained
        if run.env["profiles"] == fleet
        and (run.shipped or run.label == run.name or run.label.endswith(unusual))
        or (run.shipped and run.any_experts)
    ]


def compared(*unusual: str) -> Callable[[Options, Mapping[str, Any]], list[str | TrainedRun]]:
    """The policies of a setting: the heuristics and the routers for its fleet, see `chosen`."""

    def policies(options: Options, at: Mapping[str, Any]) -> list[str | TrainedRun]:
        return [*BASELINES, *chosen(options, at["_env"]["profiles"], *unusual)]

    return policies


def _facts(options: Options) -> dict[str, Any]:
    """The trained routers that a table compares."""
    seeds: dict[str, list[int]] = {}
    for run in options.trained:
        seeds.setdefault(run.label, []).append(run.seed)
    return {"trained_routers": seeds}


Study = functools.partial(study.Study, facts=_facts, packages=("torch",))
"""A study that compares trained routers, too."""


def _add(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--checkpoints", type=Path, help="folder of trainings; default: the shipped ones")
    words = "shipped routers to compare (all; with --checkpoints none)"
    add("--routers", nargs="+", default=(), metavar="NAME", help=words)
    words = f"fleets ({' '.join(FLEETS)})"
    add("--profiles", nargs="+", default=FLEETS, metavar="FLEET", dest="fleets", help=words)


def _prepare(options: Options) -> None:
    options.trained = ()
    if options.checkpoints is not None:
        options.trained += tuple(find_runs(options.checkpoints))
    if options.routers or options.checkpoints is None:
        options.trained += tuple(shipped_runs(options.routers))


def command(
    module: str, doc: str | None, studies: Sequence[Any], episodes: int
) -> Callable[..., int]:
    """The ``main`` of a module, see `study.command`, with the options of `Options`."""
    return study.command(module, doc, studies, episodes, _add, _prepare)
