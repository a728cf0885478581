"""The arguments of the LLM routing environments, checked, and the problem that they describe."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from servegym._checks import choose, mapping, real
from servegym.envs import _arguments as arg
from servegym.envs._arguments import Arguments, Options, Range, ends
from servegym.envs._failures import check_failures, failure_times
from servegym.envs.llm_routing.deployments import DEPLOYMENTS
from servegym.envs.llm_routing.fleets import (
    DRAWN,
    MAX_EXPERTS,
    MAX_RUNNING,
    MAX_WAITING,
    SETTING,
    FleetSource,
    columns_of,
    experts_of,
    is_drawn,
)
from servegym.envs.llm_routing.kernel import layout
from servegym.envs.llm_routing.kernel.law import Law, pack_law
from servegym.envs.workloads import (
    Catalog,
    list_arrivals,
    list_catalogs,
    load_catalog,
    make_arrivals,
    predict,
)
from servegym.envs.workloads.arrivals import Arrivals
from servegym.envs.workloads.predictions import BUCKETS, KINDS, QUANTITIES
from servegym.envs.workloads.requests import FileArrivals, Requests, load_requests
from servegym.hardware_profiles import Profile, list_fleets, load

DEFAULT_EPISODE_REQUESTS = 1000
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
    # None where it is not given; the record of a problem has the number.
    episode_requests: int = arg.whole(None, 1, "1000, or those of the file", high=10_000_000)
    latency_requirement_s: Range = arg.span(
        0.030, "L in s per token, or a range", high=layout.MAX_LATENCY_REQUIREMENT_S
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

    def keys(self) -> Iterable[str]:
        """The names, less those that a drawn fleet or a file of requests takes the place of."""
        left = DRAWN if self.fleet is not None else IN_FILE if self.requests_file else ()
        return [name for name in self.described() if name not in left]


@dataclass(frozen=True)
class Problem:
    """The record of the arguments, and the arrays that it describes.

    The environments, the replay and the baselines share it.

    Attributes:
        arguments: the checked arguments; a file of requests says their rate and number, and where
            fleets are drawn R and W are the largest that may come.
        cfg: ``(1,)`` record of :data:`layout.CONFIG`.
        law: iteration times of ``profiles``.
        table: float32 ``(P, N, 5)``: prompt tokens, true score, true length, predicted score,
            predicted length of every catalog row at every expert.
        rows: int32 indexes of the catalog rows that episodes draw from, or, of a file of requests,
            have in this order.
        profiles: latency profile of each expert.
        models: catalog model of each expert.
        catalog: the catalog itself.
        columns: ``(N,)`` columns of the catalog that the experts serve.
        arrivals: arrival process.
        fleets: where the fleet of an episode comes from, None if all have the same. Then N is the
            largest that may come, ``profiles`` and ``models`` are libraries, and the table has a
            column for each model under each predictor, see `FleetSource`.
    """

    arguments: RoutingArguments
    cfg: np.ndarray
    law: Law
    table: np.ndarray
    rows: np.ndarray
    profiles: tuple[Profile, ...]
    models: tuple[str, ...]
    catalog: Catalog
    columns: np.ndarray
    arrivals: Arrivals
    fleets: FleetSource | None = None

    def __post_init__(self) -> None:
        set_sizes(self.cfg[0])
        self.cfg["longest"] = self.law.where["longest"]

    @property
    def num_experts(self) -> int:
        """N."""
        return int(self.cfg["num_experts"][0])

    @property
    def max_output_tokens(self) -> int:
        """Longest answer in tokens."""
        return int(self.cfg["max_output_tokens"][0])


def problem_of(arguments: RoutingArguments) -> Problem:
    """The problem that checked arguments describe; that of drawn fleets has the largest sizes.

    Raises:
        ValueError: arguments do not go together; it names them.
    """
    arguments, file = _requests(arguments)
    if arguments.fleet is not None:
        sizes = {"running_capacity": MAX_RUNNING, "waiting_capacity": MAX_WAITING}
        engine = {"scheduler": "chunked_prefill", "memory_policy": "paged"}
        arguments = replace(arguments, **sizes, **engine)
    cfg = _config(arguments)
    if file is None:
        catalog = load_catalog(arguments.catalog, **(arguments.catalog_kwargs or {}))
        rows = catalog.rows(arguments.split)
        arrivals = make_arrivals(arguments.arrivals, **(arguments.arrivals_kwargs or {}))
    else:
        catalog, arrivals = file.catalog, FileArrivals(file.arrival_s)
        rows = catalog.rows("all")
    cfg["max_output_tokens"] = arguments.max_output_tokens or catalog.max_output_tokens
    rows = np.asarray(rows, dtype=np.int32)
    if arguments.fleet is None:
        fleet = _fixed_fleet(arguments, catalog, rows, cfg[0], file)
    else:
        fleet = _drawn_fleets(arguments, catalog, rows, cfg[0])
    return Problem(
        arguments=arguments, cfg=cfg, rows=rows, catalog=catalog, arrivals=arrivals, **fleet
    )


def build_problem(*, view: int, **arguments: Any) -> Problem:
    """`problem_of` of arguments by name, as `RoutingArguments` has them."""
    return problem_of(RoutingArguments.fill(arguments, view))


def setting_problem(setting: Mapping[str, Any], *, view: int, **arguments: Any) -> Problem:
    """The problem that ``fleet=setting`` builds, with arrays of the setting's own sizes.

    A small fleet is played several times faster without the padding; the dynamics are the same. The
    other arguments are those of `build_problem`.
    """
    apart = ("profiles", "models", "kv_capacity_tokens", "predictor")
    fixed = build_problem(
        view=view,
        profiles=setting["profiles"],
        models=setting["models"],
        score_predictor=setting["predictor"],
        length_predictor=setting["predictor"],
        **{name: setting[name] for name in SETTING if name not in apart},
        **arguments,
    )
    tokens = setting["kv_capacity_tokens"]
    profiles = tuple(
        replace(p, kv_capacity_tokens=t) for p, t in zip(fixed.profiles, tokens, strict=True)
    )
    return replace(fixed, profiles=profiles)


def _requests(arguments: RoutingArguments) -> tuple[RoutingArguments, Requests | None]:
    """The file of requests, if there is one, and the arguments with its rate and their number."""
    count = arguments.episode_requests
    if arguments.requests_file is None:
        return replace(arguments, episode_requests=count or DEFAULT_EPISODE_REQUESTS), None
    file = load_requests(arguments.requests_file)
    length = len(file.arrival_s)
    if count is not None and count > length:
        raise ValueError(
            f"episode_requests={count} is more than the {length} requests of "
            f"requests_file={arguments.requests_file!r}."
        )
    rate = length / max(float(file.arrival_s[-1]), 1e-9)
    return replace(arguments, rate=rate, episode_requests=count or length), file


def _config(arguments: RoutingArguments) -> np.ndarray:
    """Engine, episode, reward and observation as the kernel reads them, ``(1,)`` of CONFIG."""
    cfg = engine_config(arguments, arguments.running_capacity)
    c = cfg[0]
    c["waiting_capacity"] = arguments.waiting_capacity
    c["slots"] = c["running_capacity"] + c["waiting_capacity"]
    c["num_requests"] = arguments.episode_requests
    c["reward"] = REWARDS[arguments.reward]
    c["penalty"] = PENALTIES[arguments.penalty]
    c["predicted_estimator"] = ESTIMATORS[arguments.estimator]
    c["layout"] = arguments.view
    if arguments.failures is not None:
        delay_s = float(c["router_delay_s"] + c["delay_s_per_token"] * layout.MAX_PROMPT_TOKENS)
        episode_s = float(c["num_requests"] / ends(arguments.rate)[0] + delay_s)
        check_failures(arguments.failures, c, episode_s)
    return cfg


def engine_config(arguments: RoutingArguments, running_capacity: int) -> np.ndarray:
    """The engine's arguments in a fresh config record, with so many requests running at most.

    Raises:
        ValueError: arguments do not go together; it names them.
    """
    cfg = np.zeros(1, dtype=layout.CONFIG)
    c, scheduler = cfg[0], arguments.scheduler
    if arguments.async_scheduling and scheduler != "chunked_prefill":
        raise ValueError(
            f"async_scheduling=True needs scheduler='chunked_prefill', not {scheduler!r}: an Orca "
            "iteration is planned when the one before it has ended."
        )
    if scheduler == "chunked_prefill" and arguments.prefill_token_budget < running_capacity:
        raise ValueError(
            f"prefill_token_budget={arguments.prefill_token_budget} is below running_capacity="
            f"{running_capacity}: a chunked iteration needs one token for every running request."
        )
    c["scheduler"] = SCHEDULERS[scheduler]
    c["memory_policy"] = MEMORY_POLICIES[arguments.memory_policy]
    c["running_capacity"] = running_capacity
    c["token_budget"] = arguments.prefill_token_budget
    c["block_size"] = arguments.block_size
    c["blocks_per_token"] = 1.0 / arguments.block_size
    c["async_scheduling"] = arguments.async_scheduling
    c["delay_s_per_token"] = 8.0 * arguments.bytes_per_token / arguments.bandwidth_bps
    c["router_delay_s"] = arguments.router_delay_s
    if arguments.failures is not None:
        c["uptime_s"], c["downtime_s"] = failure_times(arguments.failures)
    return cfg


def set_sizes(c: np.void) -> None:
    """Set the sizes of the arrays of a config record to N, R and W of its system."""
    c["max_experts"], c["max_running"] = c["num_experts"], c["running_capacity"]
    c["max_waiting"] = c["waiting_capacity"]


def _fixed_fleet(
    arguments: RoutingArguments,
    catalog: Catalog,
    rows: np.ndarray,
    c: np.void,
    file: Requests | None,
) -> dict[str, Any]:
    """Laws and requests of the experts that all episodes have, as fields of `Problem`."""
    models = arguments.models
    experts, names = experts_of(arguments.profiles, arguments.num_experts, models)
    columns = columns_of(catalog, names, len(experts), models is not None)
    _check_requests_fit(experts, catalog, rows, c)
    c["num_experts"] = len(experts)
    return {
        "law": _law(arguments, experts),
        "table": _request_table(arguments, catalog, columns, c, file),
        "profiles": tuple(experts),
        "models": tuple(catalog.models[k] for k in columns),
        "columns": columns,
    }


def _drawn_fleets(
    arguments: RoutingArguments, catalog: Catalog, rows: np.ndarray, c: np.void
) -> dict[str, Any]:
    """The same of the cards and models that fleets are drawn from, or a setting names."""
    _predictors(arguments)  # their keywords are checked, though no predictor may need them
    _check_requests_fit([load("h100-llama-3.1-8b")], catalog, rows, c)
    c["num_experts"], longest = MAX_EXPERTS, int(c["max_output_tokens"])
    fleet = arguments.fleet or {}
    source = FleetSource(fleet, arguments.fleet_kwargs, catalog, arguments.block_size, longest)
    columns = catalog.columns(list(source.models))
    tables = []
    for kind in source.predictors:
        options = arguments.predictor_kwargs if kind == "learned" else None
        kinds = {"score_predictor": kind, "length_predictor": kind, "predictor_kwargs": options}
        tables.append(_request_table(replace(arguments, **kinds), catalog, columns, c))
    return {
        "law": _law(arguments, source.profiles),
        "table": np.ascontiguousarray(np.concatenate(tables, axis=1)),
        "profiles": source.profiles,
        "models": source.models,
        "columns": columns,
        "fleets": source,
    }


def _law(arguments: RoutingArguments, profiles: Sequence[Profile]) -> Law:
    """Iteration times of the profiles, each by its factors of `step_factors`."""
    value = arguments.step_factors
    given = mapping("step_factors", value, [profile.name for profile in profiles])
    factors = {}
    for name, pair in given.items():
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise ValueError(
                f"step_factors[{name!r}]={pair!r} must be a pair: the factors of iterations with "
                "prefill and of iterations of decodes alone."
            )
        what = f"step_factors[{name!r}]"
        factors[name] = [real(f"{what}[{k}]", x, 0.1, 10.0) for k, x in enumerate(pair)]
    return pack_law(profiles, arguments.running_capacity, factors)


def _predictors(arguments: RoutingArguments) -> dict[str, dict[str, Any]]:
    """The keywords of `predict` for the score and for the length."""
    kinds = {"score": arguments.score_predictor, "length": arguments.length_predictor}
    for quantity, kind in kinds.items():
        if not (isinstance(kind, str) and kind.startswith("learned:")):
            choose(f"{quantity}_predictor", kind, KINDS)
    by_quantity = mapping("predictor_kwargs", arguments.predictor_kwargs, QUANTITIES)
    return {
        name: {
            "kind": kinds[name],
            "buckets": arguments.buckets,
            **mapping(f"predictor_kwargs[{name!r}]", by_quantity.get(name), ("table",)),
        }
        for name in QUANTITIES
    }


def _check_requests_fit(
    profiles: Sequence[Profile], catalog: Catalog, rows: np.ndarray, c: np.void
) -> None:
    """Refuse an expert without memory for a request, or whose laws do not cover the requests."""
    longest, block = int(c["max_output_tokens"]), int(c["block_size"])
    smallest = int(np.min(catalog.prompt_tokens)) + longest
    for profile in profiles:
        if profile.kv_capacity_tokens // block * block < smallest:
            raise ValueError(
                f"profiles: {profile.name!r} has room for {profile.kv_capacity_tokens} KV tokens "
                f"besides its weights, but the shortest prompt with max_output_tokens={longest} "
                f"needs {smallest}; take a larger card, a smaller model or fewer output tokens."
            )
    prompt, running = int(np.max(catalog.prompt_tokens[rows])), int(c["running_capacity"])
    for profile in profiles:
        profile.check_domain(
            batch=running,
            tokens=max(prompt, min(int(c["token_budget"]), running * prompt)),
            context=prompt + longest,
        )


def _request_table(
    arguments: RoutingArguments,
    catalog: Catalog,
    columns: np.ndarray,
    c: np.void,
    file: Requests | None = None,
) -> np.ndarray:
    """Catalog rows at the experts, with predictions: ``Problem.table``.

    What a file of requests says is predicted takes the place of the predictors.
    """
    predictors, max_output_tokens = _predictors(arguments), int(c["max_output_tokens"])
    table = np.empty((len(catalog.prompt_tokens), len(columns), 5), dtype=np.float32)
    table[:, :, layout.PROMPT] = catalog.prompt_tokens[:, None]
    table[:, :, layout.SCORE] = catalog.scores[:, columns]
    table[:, :, layout.OUTPUT] = np.minimum(catalog.output_tokens[:, columns], max_output_tokens)
    table[:, :, layout.PREDICTED_SCORE] = predict(catalog, columns, "score", **predictors["score"])
    length = predict(catalog, columns, "length", **predictors["length"])
    if file is not None and file.predicted_scores is not None:
        table[:, :, layout.PREDICTED_SCORE] = file.predicted_scores[:, columns]
    if file is not None and file.predicted_tokens is not None:
        length = file.predicted_tokens[:, columns]
    table[:, :, layout.PREDICTED_OUTPUT] = np.minimum(length, max_output_tokens)
    return table
