"""The arguments of the LLM routing environments."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from servegym._checks import choose
from servegym.envs import _arguments as arg
from servegym.envs._arguments import Arguments, Options, Range
from servegym.envs.llm_routing.deployments import DEPLOYMENTS
from servegym.envs.llm_routing.fleets import DRAWN, MAX_LATENCY_REQUIREMENT_S, is_drawn
from servegym.envs.llm_routing.kernel import layout
from servegym.envs.workloads import list_arrivals, list_catalogs
from servegym.envs.workloads.predictions import BUCKETS
from servegym.hardware_profiles import list_fleets

SCHEDULERS = {"orca": layout.ORCA, "chunked_prefill": layout.CHUNKED}
MEMORY_POLICIES = {"reserve": layout.RESERVE, "paged": layout.PAGED}
REWARDS = {
    "qos_aware": layout.QOS_AWARE,
    "completed_qos": layout.COMPLETED_QOS,
    "paid_forward": layout.PAID_FORWARD,
    "dense": layout.DENSE,
}
PENALTIES = {"new_violations": layout.NEW_VIOLATIONS, "literal": layout.LITERAL}
ESTIMATORS = {"true": 0, "predicted": 1}
MAX_CAPACITY = 1024
"""Requests that an expert may run, and that may wait at it, at most."""

IN_FILE = ("catalog", "catalog_kwargs", "arrivals", "arrivals_kwargs", "rate")
"""Arguments that a file of requests takes the place of."""


def _file(name: str, path: Any) -> str:
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"{name}={path!r} must be the path of a CSV file.")
    if not os.path.isfile(path):
        raise ValueError(f"{name}={path!r} is not there; give a CSV file's path.")
    return os.fspath(path)


@dataclass(frozen=True, kw_only=True)
class RoutingArguments(Arguments):
    """The arguments of `LLMRoutingEnv` and of the ids beside it."""

    headings = dict(
        catalog="workload",
        fleet="engine",
        bandwidth_bps="network",
        score_predictor="observation",
        reward="reward",
    )
    catalog: str = arg.choice("alpaca_eval_7b", list_catalogs(), "requests and answers")
    catalog_kwargs: Options = arg.options("keywords of the catalog")
    split: str = arg.choice("train", ("train", "val", "eval", "all"), "prompts of the catalog")
    arrivals: str = arg.choice("poisson", list_arrivals(), "arrival process")
    arrivals_kwargs: Options = arg.options("keywords of the process")
    rate: Range = arg.span(5.0, "mean requests/s, or a range drawn from for each episode")
    requests_file: str | None = arg.other(None, "file of an episode's requests", _file)
    episode_requests: int | None = arg.whole(None, 1, "1000, or those of the file", high=10_000_000)
    latency_requirement_s: Range = arg.span(
        0.030, "L in s per token, or a range", high=MAX_LATENCY_REQUIREMENT_S
    )
    fleet: str | Mapping[str, Any] | None = arg.other(
        None, 'a fleet or deployment by name, `"random"`, or a setting'
    )
    fleet_kwargs: Options = arg.options("what a random fleet is drawn from")
    num_experts: int | None = arg.whole(None, 1, "N; 6 of a fleet, else one a profile", high=1024)
    profiles: str | Sequence[str] = arg.other(
        "edge-6-heterogeneous", "a fleet, a profile for all, or a list"
    )
    models: Sequence[str] | None = arg.other(None, "catalog model of each expert")
    scheduler: str = arg.choice("orca", SCHEDULERS, "what an iteration is made of")
    async_scheduling: bool = arg.switch(False, "iterations are planned one ahead")
    memory_policy: str = arg.choice("reserve", MEMORY_POLICIES, "or preemption")
    prefix_caching: bool = arg.switch(False, "preempted requests find their blocks")
    block_size: int = arg.whole(16, 1, "tokens of a KV block", high=4096)
    running_capacity: int = arg.whole(5, 1, "R, requests that run", high=MAX_CAPACITY)
    waiting_capacity: int = arg.whole(5, 1, "W, requests that wait", high=MAX_CAPACITY)
    prefill_token_budget: int = arg.whole(2048, 1, "most tokens of an iteration")
    max_output_tokens: int | None = arg.whole(None, 1, "longest answer; by default the catalog's")
    failures: Options = arg.options("`mean_time_to_failure_s`, `mean_time_to_repair_s`")
    step_factors: Options = arg.options("true over the profile's time, by profile")
    bandwidth_bps: float = arg.number(1e6, 0.0, "bits/s to an expert", open_low=True)
    bytes_per_token: float = arg.number(4.0, 0.0, "of a prompt")
    router_delay_s: float = arg.number(0.005, 0.0, "time that routing a request takes")
    score_predictor: str = arg.other("confusion", "or `learned`, `mean`, `zero`, `exact`")
    length_predictor: str = arg.other("confusion", "likewise")
    predictor_kwargs: Options = arg.options("of the `score` and of the `length`")
    buckets: str = arg.choice("quantile", BUCKETS, "how predictions are bucketed")
    reward: str = arg.choice("qos_aware", REWARDS, "see Rewards", box="dense")
    penalty: str = arg.choice("new_violations", PENALTIES, "see Rewards")
    estimator: str = arg.choice("true", ESTIMATORS, "of Eq. 15: lengths are known, or predicted")

    @classmethod
    def named(cls, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """A fleet's or deployment's arguments below those given; what a file or a fleet says alone.

        Raises:
            ValueError: an argument is given twice, by itself and by a file of requests or a fleet.
        """
        fleet, file = arguments.get("fleet"), arguments.get("requests_file")
        drawn = is_drawn(fleet)
        for name, value in arguments.items():
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
        if not drawn and arguments.get("fleet_kwargs") is not None:
            raise ValueError(f"fleet_kwargs={arguments['fleet_kwargs']!r} needs fleet='random'.")
        if drawn or fleet is None:
            return arguments
        named = {**{name: {"profiles": name} for name in list_fleets()}, **DEPLOYMENTS}
        chosen = named[choose("fleet", fleet, ("random", *named))]
        return {**chosen, **arguments, "fleet": None}
