"""Arguments of the LLM routing environments, checked and turned into the arrays of the kernel."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from servegym._checks import choose, mapping, nearest, positive_range, whole
from servegym.envs.llm_routing import kernel
from servegym.envs.llm_routing.deployments import DEPLOYMENTS
from servegym.envs.llm_routing.fleets import (
    DRAWN,
    MAX_EXPERTS,
    MAX_LATENCY_REQUIREMENT_S,
    MAX_RUNNING,
    MAX_WAITING,
    SETTING,
    FleetSource,
)
from servegym.envs.llm_routing.kernel.law import Law, pack_law
from servegym.envs.llm_routing.tables import (
    MAX_CAPACITY,
    check_failures,
    check_requests_fit,
    checked_factors,
    engine_config,
    predictor_options,
    request_table,
    set_sizes,
)
from servegym.envs.workloads import Catalog, load_catalog, make_arrivals
from servegym.envs.workloads.requests import FileArrivals, load_requests
from servegym.hardware_profiles import Profile, list_fleets, load, load_fleet

DEFAULT_FLEET = "edge-6-heterogeneous"
DEFAULT_NUM_EXPERTS = 6
DEFAULT_CATALOG = "alpaca_eval_7b"

_REWARDS = {
    "qos_aware": kernel.QOS_AWARE,
    "completed_qos": kernel.COMPLETED_QOS,
    "paid_forward": kernel.PAID_FORWARD,
    "dense": kernel.DENSE,
}
_PENALTIES = {"new_violations": kernel.NEW_VIOLATIONS, "literal": kernel.LITERAL}
_ESTIMATORS = {"true": 0, "predicted": 1}
DEFAULT_EPISODE_REQUESTS = 1000
_IN_FILE = ("catalog", "catalog_kwargs", "arrivals", "arrivals_kwargs", "rate")
_SPLITS = ("train", "val", "eval", "all")


def _resolve_profiles(
    profiles: str | Sequence[str], models: Sequence[str] | None, num_experts: int | None
) -> tuple[list[Profile], list[str] | None]:
    """Profiles of the experts and, where a fleet or the caller names them, their models."""
    if isinstance(profiles, str) and profiles in list_fleets():
        fleet = load_fleet(profiles)
        experts, names = list(fleet.profiles), list(fleet.models)
        count = DEFAULT_NUM_EXPERTS if num_experts is None else num_experts
    else:
        if isinstance(profiles, str):
            listed = [profiles]
        elif isinstance(profiles, (list, tuple)) and profiles:
            listed = list(profiles)
        else:
            raise ValueError(
                f"profiles={profiles!r} must be a fleet name ({', '.join(list_fleets())}), "
                "a profile name or a non-empty list of profile names."
            )
        try:
            experts = [load(name) for name in listed]
        except ValueError as error:
            near = nearest(profiles, list_fleets()) if isinstance(profiles, str) else None
            hint = f" Did you mean the fleet {near!r}?" if near else ""
            raise ValueError(
                f"profiles={profiles!r}: {error}. Fleets: {', '.join(list_fleets())}.{hint}"
            ) from None
        names = None
        count = len(experts) if num_experts is None else num_experts
        if isinstance(profiles, str):
            experts = experts * count
    if count > len(experts):
        raise ValueError(
            f"num_experts={count} is more than the {len(experts)} experts of "
            f"profiles={profiles!r}; ask for fewer or name a larger fleet."
        )
    if models is not None:
        if not isinstance(models, (list, tuple)) or len(models) < count:
            raise ValueError(f"models={models!r} must be a list of at least {count} model names.")
        names = list(models)
    return experts[:count], None if names is None else names[:count]


def _resolve_columns(
    catalog: Catalog, names: list[str] | None, count: int, models_given: bool
) -> np.ndarray:
    """Columns of the catalog that the ``count`` experts serve.

    The models of ``names`` if the caller gave them or the catalog has them all; without names those
    of the default fleet; else the catalog's first.

    Raises:
        ValueError: the catalog lacks a given model, or has fewer models than experts.
    """
    if names is not None and (models_given or set(names) <= set(catalog.models)):
        return np.asarray(catalog.columns(names))
    if names is None and not models_given:
        fleet = [m for m in load_fleet(DEFAULT_FLEET).models if m in catalog.models]
        if len(fleet) >= count:
            return np.asarray(catalog.columns(fleet[:count]))
    if count > len(catalog.models):
        raise ValueError(
            f"num_experts={count}: catalog {catalog.name!r} has only {len(catalog.models)} models."
        )
    return np.arange(count)


@dataclass(frozen=True)
class Problem:
    """A routing problem: what the environments, the replay and the baselines share.

    Attributes:
        cfg: ``(1,)`` record of :data:`kernel.CONFIG`.
        law: iteration times of ``profiles``.
        table: float32 ``(P, N, 5)``: prompt tokens, true score, true length, predicted score,
            predicted length of every catalog row at every expert.
        rows: int32 indexes of the catalog rows that episodes draw from.
        profiles: latency profile of each expert.
        models: catalog model of each expert.
        catalog: the catalog itself.
        columns: ``(N,)`` columns of the catalog that the experts serve.
        arrivals: arrival process.
        rate: range of the mean arrival rate in requests/s, drawn per episode.
        latency_requirement_s: range of L in seconds per token, drawn per episode.
        arguments: the arguments as given.
        in_order: whether an episode is the catalog's rows in their order, as in a file of requests.
        fleets: where the fleet of an episode comes from, None if all have the same. Then N, R and W
            are the largest that may come, ``profiles`` and ``models`` libraries, and the table has
            a column for each model under each predictor, see `FleetSource`.
    """

    cfg: np.ndarray
    law: Law
    table: np.ndarray
    rows: np.ndarray
    profiles: tuple[Profile, ...]
    models: tuple[str, ...]
    catalog: Catalog
    columns: np.ndarray
    arrivals: Any
    rate: tuple[float, float]
    latency_requirement_s: tuple[float, float]
    arguments: dict[str, Any]
    in_order: bool = False
    fleets: FleetSource | None = None

    def __post_init__(self) -> None:
        set_sizes(self.cfg[0])
        self.cfg["longest"] = self.law.where["longest"]

    @property
    def num_experts(self) -> int:
        """N."""
        return int(self.cfg["num_experts"][0])

    @property
    def running_capacity(self) -> int:
        """R."""
        return int(self.cfg["running_capacity"][0])

    @property
    def waiting_capacity(self) -> int:
        """W."""
        return int(self.cfg["waiting_capacity"][0])

    @property
    def episode_requests(self) -> int:
        """Requests of an episode."""
        return int(self.cfg["num_requests"][0])

    @property
    def max_output_tokens(self) -> int:
        """Longest answer in tokens."""
        return int(self.cfg["max_output_tokens"][0])


def _set_episode(
    c: np.void,
    *,
    waiting_capacity: int,
    episode_requests: int,
    reward: str,
    penalty: str,
    estimator: str,
    view: int,
) -> None:
    """Check the arguments of the episode, its reward and its observation, and set them in ``c``."""
    c["waiting_capacity"] = whole("waiting_capacity", waiting_capacity, 1, MAX_CAPACITY)
    c["slots"] = c["running_capacity"] + c["waiting_capacity"]
    c["num_requests"] = whole("episode_requests", episode_requests, 1, 10_000_000)
    c["reward"] = _REWARDS[choose("reward", reward, _REWARDS)]
    c["penalty"] = _PENALTIES[choose("penalty", penalty, _PENALTIES)]
    c["predicted_estimator"] = _ESTIMATORS[choose("estimator", estimator, _ESTIMATORS)]
    c["layout"] = view


def _file_name(requests_file: Any) -> str:
    if not isinstance(requests_file, (str, os.PathLike)):
        raise ValueError(f"requests_file={requests_file!r} must be the path of a CSV file.")
    if not os.path.isfile(requests_file):
        raise ValueError(f"requests_file={requests_file!r} is not there; give a CSV file's path.")
    return os.fspath(requests_file)


def _fixed_problem(
    *,
    view: int,
    num_experts: int | None = None,
    arrivals: str = "poisson",
    rate: float | Sequence[float] = 5.0,
    arrivals_kwargs: Mapping[str, Any] | None = None,
    latency_requirement_s: float | Sequence[float] = 0.030,
    catalog: str = DEFAULT_CATALOG,
    catalog_kwargs: Mapping[str, Any] | None = None,
    profiles: str | Sequence[str] = DEFAULT_FLEET,
    models: Sequence[str] | None = None,
    score_predictor: str = "confusion",
    length_predictor: str = "confusion",
    predictor_kwargs: Mapping[str, Any] | None = None,
    buckets: str = "quantile",
    predictor_seed: int = 0,
    reward: str | None = None,
    penalty: str = "new_violations",
    estimator: str = "true",
    scheduler: str = "orca",
    memory_policy: str = "reserve",
    prefix_caching: bool = False,
    async_scheduling: bool = False,
    running_capacity: int = 5,
    waiting_capacity: int = 5,
    prefill_token_budget: int = 2048,
    block_size: int = 16,
    bandwidth_bps: float = 1e6,
    bytes_per_token: float = 4.0,
    router_delay_s: float = 0.005,
    staleness_s: float = 0.0,
    failures: Mapping[str, Any] | None = None,
    step_factors: Mapping[str, Sequence[float]] | None = None,
    max_output_tokens: int | None = None,
    episode_requests: int | None = None,
    split: str = "train",
    requests_file: str | None = None,
) -> Problem:
    """The problem of a fleet that all episodes have, from checked arguments."""
    if reward is None:
        reward = "qos_aware" if view == kernel.GRAPH else "dense"
    arguments = {k: v for k, v in locals().items() if k != "view"}
    file = None if requests_file is None else load_requests(_file_name(requests_file))
    if file is not None:
        rate = len(file.arrival_s) / max(float(file.arrival_s[-1]), 1e-9)
    if episode_requests is None:
        episode_requests = DEFAULT_EPISODE_REQUESTS if file is None else len(file.arrival_s)
        arguments["episode_requests"] = episode_requests
    if file is not None and whole("episode_requests", episode_requests, 1) > len(file.arrival_s):
        raise ValueError(
            f"episode_requests={episode_requests} is more than the {len(file.arrival_s)} requests "
            f"of requests_file={requests_file!r}."
        )
    cfg = engine_config(
        scheduler=scheduler,
        memory_policy=memory_policy,
        prefix_caching=prefix_caching,
        async_scheduling=async_scheduling,
        running_capacity=running_capacity,
        prefill_token_budget=prefill_token_budget,
        block_size=block_size,
        bandwidth_bps=bandwidth_bps,
        bytes_per_token=bytes_per_token,
        router_delay_s=router_delay_s,
        staleness_s=staleness_s,
        failures=failures,
    )
    c = cfg[0]
    _set_episode(
        c,
        waiting_capacity=waiting_capacity,
        episode_requests=episode_requests,
        reward=reward,
        penalty=penalty,
        estimator=estimator,
        view=view,
    )
    if num_experts is not None:
        num_experts = whole("num_experts", num_experts, 1, 1024)
    choose("split", split, _SPLITS)
    kinds = {"score": score_predictor, "length": length_predictor}
    predictors = predictor_options(kinds, buckets, predictor_seed, predictor_kwargs)
    rates = positive_range("rate", rate)
    if failures is not None:
        delay_s = float(c["router_delay_s"] + c["delay_s_per_token"] * kernel.MAX_PROMPT_TOKENS)
        check_failures(failures, c, float(c["num_requests"] / rates[0] + delay_s))
    limits = positive_range(
        "latency_requirement_s", latency_requirement_s, MAX_LATENCY_REQUIREMENT_S
    )

    experts, names = _resolve_profiles(profiles, models, num_experts)
    c["num_experts"] = len(experts)
    if file is None:
        loaded = load_catalog(catalog, **mapping("catalog_kwargs", catalog_kwargs))
    else:
        loaded, split = file.catalog, "all"
    columns = _resolve_columns(loaded, names, len(experts), models is not None)
    rows = np.asarray(loaded.rows(split), dtype=np.int32)
    c["max_output_tokens"] = loaded.max_output_tokens
    if max_output_tokens is not None:
        c["max_output_tokens"] = whole("max_output_tokens", max_output_tokens, 1)
    check_requests_fit(experts, loaded, rows, c)

    return Problem(
        cfg=cfg,
        law=pack_law(experts, int(c["running_capacity"]), checked_factors(step_factors, experts)),
        table=request_table(loaded, columns, predictors, int(c["max_output_tokens"]), file),
        rows=rows,
        profiles=tuple(experts),
        models=tuple(loaded.models[k] for k in columns),
        catalog=loaded,
        columns=columns,
        arrivals=make_arrivals(arrivals, rates[1], **mapping("arrivals_kwargs", arrivals_kwargs))
        if file is None
        else FileArrivals(file.arrival_s, rates[1]),
        rate=rates,
        latency_requirement_s=limits,
        arguments=arguments,
        in_order=file is not None,
    )


def _drawn_problem(
    view: int,
    fleet: str | Mapping[str, Any],
    fleet_kwargs: Mapping[str, Any] | None,
    given: Mapping[str, Any],
) -> Problem:
    """The problem of fleets that are drawn, or of one setting, padded to the largest sizes."""
    for name in given:
        if name in DRAWN:
            raise ValueError(
                f"{name}={given[name]!r} is part of the fleet that fleet={fleet!r} gives; hold it "
                "fixed with fleet_kwargs, or leave fleet out."
            )
    given = dict(given)
    factors = given.pop("step_factors", None)
    options = mapping("catalog_kwargs", given.get("catalog_kwargs"))
    catalog = load_catalog(given.get("catalog", DEFAULT_CATALOG), **options)
    # Sizes and all that is no part of a setting, checked on a fleet as large as any.
    largest = _fixed_problem(
        view=view,
        profiles=["h100-llama-3.1-8b"] * MAX_EXPERTS,
        models=[catalog.models[0]] * MAX_EXPERTS,
        num_experts=MAX_EXPERTS,
        running_capacity=MAX_RUNNING,
        waiting_capacity=MAX_WAITING,
        scheduler="chunked_prefill",
        memory_policy="paged",
        **given,
    )
    cfg = largest.cfg.copy()
    c, options = cfg[0], largest.arguments
    longest, block = int(c["max_output_tokens"]), int(c["block_size"])
    source = FleetSource(fleet, fleet_kwargs, catalog, block, longest)
    columns = catalog.columns(list(source.models))
    tables = []
    for kind in source.predictors:
        predictors = predictor_options(
            {"score": kind, "length": kind},
            options["buckets"],
            options["predictor_seed"],
            options["predictor_kwargs"] if kind == "learned" else None,
        )
        tables.append(request_table(catalog, columns, predictors, longest))
    return replace(
        largest,
        cfg=cfg,
        law=pack_law(source.profiles, MAX_RUNNING, checked_factors(factors, source.profiles)),
        table=np.ascontiguousarray(np.concatenate(tables, axis=1)),
        profiles=source.profiles,
        models=source.models,
        columns=columns,
        arguments={
            **{name: value for name, value in options.items() if name not in (*DRAWN, "models")},
            "step_factors": factors,
            "fleet": fleet,
            "fleet_kwargs": fleet_kwargs,
        },
        fleets=source,
    )


def build_problem(
    *,
    view: int,
    fleet: str | Mapping[str, Any] | None = None,
    fleet_kwargs: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Problem:
    """Check every argument of a routing environment and build its problem.

    The arguments are those of :class:`~servegym.envs.llm_routing.env.LLMRoutingEnv`; ``view`` is
    the kind of observation (``kernel.GRAPH``, ``FLAT``, ``EXPERTS`` or ``SUMMARY``).

    Raises:
        ValueError: naming the argument, what was given and what is allowed.
    """
    if arguments.get("requests_file") is not None:
        for name in _IN_FILE:
            if arguments.get(name) is not None:
                raise ValueError(
                    f"{name}={arguments[name]!r} is part of what "
                    f"requests_file={arguments['requests_file']!r} says; leave one of them out."
                )
    drawn = isinstance(fleet, Mapping) or (isinstance(fleet, str) and fleet == "random")
    if fleet is not None and not drawn:
        named = {**{name: {"profiles": name} for name in list_fleets()}, **DEPLOYMENTS}
        arguments = {**named[choose("fleet", fleet, ("random", *named))], **arguments}
        fleet = None
    if fleet is not None:
        if arguments.get("requests_file") is not None:
            raise ValueError(
                f"requests_file={arguments['requests_file']!r} needs a fleet that stays the same."
            )
        return _drawn_problem(view, fleet, fleet_kwargs, arguments)
    if fleet_kwargs is not None:
        raise ValueError(f"fleet_kwargs={fleet_kwargs!r} needs fleet='random'.")
    return _fixed_problem(view=view, **arguments)


def setting_problem(setting: Mapping[str, Any], *, view: int, **arguments: Any) -> Problem:
    """The problem that ``fleet=setting`` builds, with arrays of the setting's own sizes.

    A small fleet is played several times faster without the padding; the dynamics are the same.

    Args:
        setting: As ``info["fleet"]`` has it, see `servegym.envs.llm_routing.fleets.SETTING`.
        view: As for `build_problem`.
        **arguments: The others of `build_problem`.

    Raises:
        ValueError: naming the argument, what was given and what is allowed.
    """
    own = ("profiles", "models", "kv_capacity_tokens", "predictor")
    fixed = build_problem(
        view=view,
        profiles=setting["profiles"],
        models=setting["models"],
        score_predictor=setting["predictor"],
        length_predictor=setting["predictor"],
        **{name: setting[name] for name in SETTING if name not in own},
        **arguments,
    )
    tokens = setting["kv_capacity_tokens"]
    profiles = tuple(
        replace(p, kv_capacity_tokens=t) for p, t in zip(fixed.profiles, tokens, strict=True)
    )
    return replace(fixed, profiles=profiles)


def _signature() -> inspect.Signature:
    """Of `build_problem`, with all arguments by name: environments check theirs against it."""
    own = inspect.signature(build_problem).parameters
    fixed = inspect.signature(_fixed_problem).parameters
    names = {**fixed, **{n: p for n, p in own.items() if p.kind is not p.VAR_KEYWORD}}
    return inspect.Signature(list(names.values()))


build_problem.__signature__ = _signature()  # pyright: ignore[reportFunctionMemberAccess]
