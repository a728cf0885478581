"""The arguments of the LLM routing environments."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from servegym._checks import choose
from servegym.envs._arguments import (
    Arguments,
    Range,
    choice,
    number,
    options,
    other,
    span,
    switch,
    whole,
)
from servegym.envs.llm_routing import kernel
from servegym.envs.llm_routing.deployments import DEPLOYMENTS
from servegym.envs.llm_routing.fleets import DRAWN, MAX_LATENCY_REQUIREMENT_S
from servegym.envs.workloads import list_arrivals, list_catalogs
from servegym.envs.workloads.predictions import BUCKETS
from servegym.hardware_profiles import list_fleets

SCHEDULERS = {"orca": kernel.ORCA, "chunked_prefill": kernel.CHUNKED}
MEMORY_POLICIES = {"reserve": kernel.RESERVE, "paged": kernel.PAGED}
REWARDS = {
    "qos_aware": kernel.QOS_AWARE,
    "completed_qos": kernel.COMPLETED_QOS,
    "paid_forward": kernel.PAID_FORWARD,
    "dense": kernel.DENSE,
}
PENALTIES = {"new_violations": kernel.NEW_VIOLATIONS, "literal": kernel.LITERAL}
ESTIMATORS = {"true": 0, "predicted": 1}
MAX_CAPACITY = 256
"""Requests that an expert may run, and that may wait at it, at most."""

IN_FILE = ("catalog", "catalog_kwargs", "arrivals", "arrivals_kwargs", "rate")
"""Arguments that a file of requests takes the place of."""


def _file(name: str, given: Any) -> str | None:
    if given is None:
        return None
    if not isinstance(given, (str, os.PathLike)):
        raise ValueError(f"{name}={given!r} must be the path of a CSV file.")
    if not os.path.isfile(given):
        raise ValueError(f"{name}={given!r} is not there; give a CSV file's path.")
    return os.fspath(given)


@dataclass(frozen=True, kw_only=True)
class RoutingArguments(Arguments):
    """The arguments of `LLMRoutingEnv` and of the ids beside it."""

    catalog: str = choice(
        "workload", "alpaca_eval_7b", list_catalogs(), "requests with each model's score and length"
    )
    catalog_kwargs: dict[str, Any] | None = options("workload", "keywords of the catalog")
    split: str = choice(
        "workload", "train", ("train", "val", "eval", "all"), "prompts of the catalog"
    )
    arrivals: str = choice("workload", "poisson", list_arrivals(), "arrival process")
    arrivals_kwargs: dict[str, Any] | None = options("workload", "keywords of the process")
    rate: Range = span(
        "workload", 5.0, "mean requests/s, or a range (low, high) drawn from for each episode"
    )
    requests_file: str | None = other(
        "workload", None, "CSV of the requests of every episode, in its order", _file
    )
    episode_requests: int | None = whole(
        "workload", None, 1, "decisions of an episode: 1000, or those of the file", high=10_000_000
    )
    latency_requirement_s: Range = span(
        "workload", 0.030, "L in s per token, or a range", high=MAX_LATENCY_REQUIREMENT_S
    )

    fleet: str | Mapping[str, Any] | None = other(
        "engine", None, 'a fleet or deployment by name, `"random"`, or a setting'
    )
    fleet_kwargs: dict[str, Any] | None = options("engine", "what a random fleet is drawn from")
    num_experts: int | None = whole(
        "engine", None, 1, "N; by default 6 of a fleet, else one for each profile", high=1024
    )
    profiles: str | Sequence[str] = other(
        "engine", "edge-6-heterogeneous", "a fleet, a profile for all, or a list"
    )
    models: Sequence[str] | None = other(
        "engine", None, "catalog model of each expert; by default the fleet's"
    )
    scheduler: str = choice("engine", "orca", SCHEDULERS, "what an iteration is made of")
    async_scheduling: bool = switch(
        "engine", False, "iterations are planned one ahead (needs `chunked_prefill`)"
    )
    memory_policy: str = choice(
        "engine", "reserve", MEMORY_POLICIES, "room for the longest answer, or preemption"
    )
    prefix_caching: bool = switch(
        "engine", False, "a preempted request finds its blocks (needs `chunked_prefill`)"
    )
    block_size: int = whole("engine", 16, 1, "tokens of a KV block", high=4096)
    running_capacity: int = whole("engine", 5, 1, "R, requests that run", high=MAX_CAPACITY)
    waiting_capacity: int = whole("engine", 5, 1, "W, requests that wait", high=MAX_CAPACITY)
    prefill_token_budget: int = whole("engine", 2048, 1, "most tokens of an iteration")
    max_output_tokens: int | None = whole(
        "engine", None, 1, "longest answer; by default the catalog's"
    )
    failures: dict[str, Any] | None = options(
        "engine", "`mean_time_to_failure_s` and `mean_time_to_repair_s` of an expert"
    )
    step_factors: dict[str, Any] | None = options(
        "engine", "profile -> true over its law's time, with prefill and of decodes alone"
    )

    bandwidth_bps: float = number("network", 1e6, 0.0, "bits/s to an expert", open_low=True)
    bytes_per_token: float = number("network", 4.0, 0.0, "of a prompt")
    router_delay_s: float = number("network", 0.005, 0.0, "time that routing a request takes")

    score_predictor: str = other(
        "observation", "confusion", "`confusion`, `learned`, `mean`, `zero` or `exact`"
    )
    length_predictor: str = other("observation", "confusion", "likewise")
    predictor_kwargs: dict[str, Any] | None = options(
        "observation", "keywords of the two predictors, by `score` and `length`"
    )
    buckets: str = choice("observation", "quantile", BUCKETS, "how predictions are bucketed")
    predictor_seed: int = whole("observation", 0, 0, "seed of the predictors' errors")
    staleness_s: float = number("observation", 0.0, 0.0, "age of what is seen of the experts")

    reward: str = choice(
        "reward",
        None,
        REWARDS,
        "see Rewards",
        by_view=lambda view: "qos_aware" if view == kernel.GRAPH else "dense",
    )
    penalty: str = choice(
        "reward", "new_violations", PENALTIES, "whether `qos_aware` charges a late request once"
    )
    estimator: str = choice(
        "reward", "true", ESTIMATORS, "lengths that the penalty of `qos_aware` goes by"
    )

    @classmethod
    def named(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """A fleet's or deployment's arguments below those given; what a file or a fleet says alone.

        Raises:
            ValueError: an argument is given twice, by itself and by a file of requests or a fleet.
        """
        fleet, file = given.get("fleet"), given.get("requests_file")
        drawn = isinstance(fleet, Mapping) or (isinstance(fleet, str) and fleet == "random")
        for name, value in given.items():
            if file is not None and name in IN_FILE and value is not None:
                raise ValueError(
                    f"{name}={value!r} is part of what requests_file={file!r} says; leave one of "
                    "them out."
                )
            if drawn and name in DRAWN:
                raise ValueError(
                    f"{name}={value!r} is part of the fleet that fleet={fleet!r} gives; hold it "
                    "fixed with fleet_kwargs, or leave fleet out."
                )
        if drawn and file is not None:
            raise ValueError(f"requests_file={file!r} needs a fleet that stays the same.")
        if not drawn and given.get("fleet_kwargs") is not None:
            raise ValueError(f"fleet_kwargs={given['fleet_kwargs']!r} needs fleet='random'.")
        if drawn or fleet is None:
            return given
        named = {**{name: {"profiles": name} for name in list_fleets()}, **DEPLOYMENTS}
        chosen = named[choose("fleet", fleet, ("random", *named))]
        return {**chosen, **given, "fleet": None}
