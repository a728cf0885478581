"""What predictions are worth to routers, and what a decision costs (Fig. 18, Table II).

``--checkpoints runs/learning`` plays the trainings below that folder. Without: the heuristics and
the shipped routers under the predictors of Fig. 18, and Table II.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.experiments.evaluation.play import DEFAULT_SEED, make_envs
from servegym.experiments.papers.plotting import Bars
from servegym.experiments.papers.routing import measuring
from servegym.experiments.papers.routing.claims import (
    CLAIMS,
    METHOD,
    PAPER_HEURISTICS,
    RETRAINED,
    RIVALS,
)
from servegym.experiments.papers.verdicts import found_for

PREDICTORS = {
    "PS+PL": {},
    "ZS+PL": {"score_predictor": "zero"},
    "PS+ZL": {"length_predictor": "zero"},
    "ZS+ZL": {"score_predictor": "zero", "length_predictor": "zero"},
    "mean": {"score_predictor": "mean", "length_predictor": "mean"},
    "learned": {"score_predictor": "learned", "length_predictor": "learned"},
    "exact": {"score_predictor": "exact", "length_predictor": "exact"},
}
"""Fig. 18: predictions as often right as the paper's, or none (zero, P -> Z), of score and length;
each expert's train means in their place; those of the predictor that was trained here
(`envs/workloads/build/predictor.py` of commit d987f7ef); the truth, an upper bound."""


def _settings(options: measuring.Options) -> list[dict[str, Any]]:
    return [
        {"point": f"{fleet}, {rate:g}/s", "predictors": name, "profiles": fleet}
        | {"_env": {"profiles": fleet, "rate": rate, **predictors}}
        for fleet, rate in measuring.LOADED.items()
        if fleet in options.fleets
        for name, predictors in PREDICTORS.items()
    ]


def _routers(options: measuring.Options, at: Mapping[str, Any]) -> list[str | measuring.TrainedRun]:
    """Heuristics and routers trained with these predictors.

    Learners on Baseline RL's state read no prediction: one training serves all. Shipped routers
    were trained with predictions and are played without.
    """
    routers: list[str | measuring.TrainedRun] = [*PAPER_HEURISTICS, "least_latency", "greedy_qos"]
    routers.append("priced_greedy")
    for one in measuring.chosen(options, at["profiles"], RETRAINED):
        so = {key: v for key, v in one.env.items() if key.endswith("_predictor")}
        if one.label == METHOD and at["predictors"] == "PS+PL":
            routers.append(one._replace(label=f"{METHOD}{RETRAINED}"))
        elif one.shipped or one.name in RIVALS or (so and so == PREDICTORS[at["predictors"]]):
            routers.append(one)
    return routers


def _times(call: Callable[[int], Any], count: int) -> tuple[float, float]:
    """P50 and P99 of the wall time of a call, milliseconds."""
    for index in range(min(20, count)):
        call(index)
    times = np.empty(count)
    for index in range(count):
        begin = time.perf_counter_ns()
        call(index)
        times[index] = time.perf_counter_ns() - begin
    middle, late = np.percentile(times / 1e6, [50, 99])
    return round(float(middle), 4), round(float(late), 4)


def _size(*modules: Any) -> int:
    """Parameters, without those that only a training uses."""
    training = ("qf1.", "qf2.", "log_alpha")
    named = (pair for module in modules for pair in module.named_parameters())
    return sum(p.numel() for name, p in named if not name.startswith(training))


def profile_router(decisions: int) -> list[dict[str, Any]]:
    """Rows of ``component``, ``parameters``, ``p50_ms``, ``p99_ms`` and ``paper``'s numbers.

    Times are of one decision on one core, of so many on the observations of one episode.
    """
    import torch

    from servegym.agents import load_policy
    from servegym.agents.sac_han import Agent
    from servegym.baselines.llm_routing.system import RoutingSystem
    from servegym.baselines.registry import make_policy

    torch.set_num_threads(1)
    torch.manual_seed(0)
    kwargs = {"split": "eval", "rate": 8.0, "episode_requests": decisions}
    envs = make_envs(measuring.ENV_ID, 1, kwargs)
    system = RoutingSystem.from_env(envs)
    rules = {name: make_policy(name, system) for name in ("priced_greedy", "greedy_qos")}
    observation, info = envs.reset(seed=[DEFAULT_SEED])
    inputs = []
    for _ in range(decisions):
        mask = info["action_mask"]
        inputs.append(({k: v.copy() for k, v in observation.items()}, mask.copy()))
        action = rules["priced_greedy"].act(observation, mask)
        observation, _, _, _, info = envs.step(action)
    envs.close()
    table = []

    def add(name: str, parameters: Any, decide: Callable[..., Any] | None, paper: str = "") -> None:
        times: Any = ("", "")
        if decide is not None:
            times = _times(lambda i: decide(*inputs[i]), decisions)
        row = {"component": name, "parameters": parameters}
        table.append(row | dict(zip(("p50_ms", "p99_ms"), times, strict=True)) | {"paper": paper})

    net = Agent("features", True, system)
    add("HAN", _size(net.first, net.second, net.skip), None, "19K, < 1 ms")
    add("actor", _size(net.actor), None, "10K, < 1 ms")
    add("features", "", lambda observation, mask: net.rows(observation))
    add("one decision", "", net.act, "< 1 ms")
    for run in measuring.shipped_runs():
        router = load_policy(run.path, system)
        add(f"{run.label}, one decision", _size(router.net), router.act, "< 1 ms")
    for name, rule in rules.items():
        add(name, 0, rule.act)
    return table


STUDIES = (
    measuring.Study(
        "fig18_predictors",
        "fig18",
        measuring.measure,
        _settings,
        _routers,
        found_for(
            CLAIMS,
            "fig18_predictors",
            "Predictions of the score (S) and the length (L) are as often right as the paper's "
            "(P), or there are none (Z): a policy without them takes the same score and length for "
            "every expert. 'mean' gives each expert's train means; 'learned' are those of the "
            "predictor that is trained here; 'exact' ones are the truth, an upper bound.",
        ),
        Bars(x="predictors", y="qos", line="policy", panels="point"),
    ),
    measuring.Study(
        "table2_router",
        "table2",
        lambda options, *_: profile_router(100 if options.quick else 1000),
        notes=lambda options, rows: [
            "Predictions are read from tables here; the paper's two predictors have 67M parameters "
            "and take 5 ms each on a GPU.",
            "The parts are those of sac_han's default architecture with untrained weights; the "
            "shipped routers follow as a whole.",
        ],
    ),
)

main = measuring.command(__spec__.name, __doc__, STUDIES, episodes=50)

if __name__ == "__main__":
    run_main(main)
