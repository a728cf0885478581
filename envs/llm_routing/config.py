"""Checked arguments of the LLM routing environments, turned into the arrays of the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from servegym._checks import nearest
from servegym.envs._arguments import ends
from servegym.envs.llm_routing.arguments import (
    ESTIMATORS,
    IN_FILE,
    PENALTIES,
    REWARDS,
    RoutingArguments,
)
from servegym.envs.llm_routing.fleets import (
    DRAWN,
    MAX_EXPERTS,
    MAX_RUNNING,
    MAX_WAITING,
    SETTING,
    FleetSource,
)
from servegym.envs.llm_routing.kernel import layout
from servegym.envs.llm_routing.kernel.law import Law, pack_law
from servegym.envs.llm_routing.tables import (
    check_failures,
    check_requests_fit,
    checked_factors,
    engine_config,
    predictor_options,
    request_table,
    set_sizes,
)
from servegym.envs.workloads import Catalog, load_catalog, make_arrivals
from servegym.envs.workloads.requests import FileArrivals, Requests, load_requests
from servegym.hardware_profiles import Profile, list_fleets, load, load_fleet

DEFAULT_FLEET = "edge-6-heterogeneous"
DEFAULT_NUM_EXPERTS = 6
DEFAULT_EPISODE_REQUESTS = 1000


def _resolve_profiles(arguments: RoutingArguments) -> tuple[list[Profile], list[str] | None]:
    """Profiles of the experts and, where a fleet or the caller names them, their models."""
    profiles, models, names = arguments.profiles, arguments.models, None
    single = isinstance(profiles, str)
    if single and profiles in list_fleets():
        fleet = load_fleet(profiles)
        experts, names = list(fleet.profiles), list(fleet.models)
        default = DEFAULT_NUM_EXPERTS
    elif single or (isinstance(profiles, (list, tuple)) and profiles):
        try:
            experts = [load(name) for name in ([profiles] if single else profiles)]
        except ValueError as error:
            near = nearest(profiles, list_fleets()) if single else None
            hint = f" Did you mean the fleet {near!r}?" if near else ""
            raise ValueError(
                f"profiles={profiles!r}: {error}. Fleets: {', '.join(list_fleets())}.{hint}"
            ) from None
        default = len(experts)
    else:
        raise ValueError(
            f"profiles={profiles!r} must be a fleet name ({', '.join(list_fleets())}), "
            "a profile name or a non-empty list of profile names."
        )
    count = arguments.num_experts or default
    if single and names is None:
        experts *= count
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
        cfg: ``(1,)`` record of :data:`layout.CONFIG`.
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
        arguments: the arguments by name, without those that a file or drawn fleets take the place
            of.
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


def _fixed_fleet(
    arguments: RoutingArguments,
    catalog: Catalog,
    rows: np.ndarray,
    c: np.void,
    file: Requests | None,
) -> dict[str, Any]:
    """Laws and requests of the experts that all episodes have, as fields of `Problem`."""
    experts, names = _resolve_profiles(arguments)
    columns = _resolve_columns(catalog, names, len(experts), arguments.models is not None)
    check_requests_fit(experts, catalog, rows, c)
    c["num_experts"] = len(experts)
    factors = checked_factors(arguments.step_factors, experts)
    longest, predictors = int(c["max_output_tokens"]), predictor_options(arguments)
    return {
        "law": pack_law(experts, arguments.running_capacity, factors),
        "table": request_table(catalog, columns, predictors, longest, file),
        "profiles": tuple(experts),
        "models": tuple(catalog.models[k] for k in columns),
        "columns": columns,
    }


def _drawn_fleets(
    arguments: RoutingArguments, catalog: Catalog, rows: np.ndarray, c: np.void
) -> dict[str, Any]:
    """The same of the cards and models that fleets are drawn from, or a setting names."""
    predictor_options(arguments)  # their keywords are checked, though no predictor may need them
    check_requests_fit([load("h100-llama-3.1-8b")], catalog, rows, c)
    c["num_experts"], longest = MAX_EXPERTS, int(c["max_output_tokens"])
    fleet = arguments.fleet or {}
    source = FleetSource(fleet, arguments.fleet_kwargs, catalog, arguments.block_size, longest)
    columns = catalog.columns(list(source.models))
    tables = []
    for kind in source.predictors:
        options = arguments.predictor_kwargs if kind == "learned" else None
        kinds = {"score_predictor": kind, "length_predictor": kind, "predictor_kwargs": options}
        predictors = predictor_options(replace(arguments, **kinds))
        tables.append(request_table(catalog, columns, predictors, longest))
    factors = checked_factors(arguments.step_factors, source.profiles)
    return {
        "law": pack_law(source.profiles, MAX_RUNNING, factors),
        "table": np.ascontiguousarray(np.concatenate(tables, axis=1)),
        "profiles": source.profiles,
        "models": source.models,
        "columns": columns,
        "fleets": source,
    }


def problem_of(arguments: RoutingArguments) -> Problem:
    """The problem that checked arguments describe; that of drawn fleets has the largest sizes.

    Raises:
        ValueError: arguments do not go together; it names them.
    """
    arguments, file = _requests(arguments)
    without = ("fleet", "fleet_kwargs", *(() if file is None else IN_FILE))
    if arguments.fleet is not None:
        sizes = {"running_capacity": MAX_RUNNING, "waiting_capacity": MAX_WAITING}
        engine = {"scheduler": "chunked_prefill", "memory_policy": "paged"}
        arguments, without = replace(arguments, **sizes, **engine), DRAWN
    cfg = _config(arguments)
    c, split = cfg[0], arguments.split
    if file is None:
        catalog = load_catalog(arguments.catalog, **(arguments.catalog_kwargs or {}))
    else:
        catalog, split = file.catalog, "all"
    c["max_output_tokens"] = arguments.max_output_tokens or catalog.max_output_tokens
    rows = np.asarray(catalog.rows(split), dtype=np.int32)
    if arguments.fleet is None:
        fleet = _fixed_fleet(arguments, catalog, rows, c, file)
    else:
        fleet = _drawn_fleets(arguments, catalog, rows, c)
    rate = ends(arguments.rate)
    if file is None:
        options = arguments.arrivals_kwargs or {}
        arrivals = make_arrivals(arguments.arrivals, rate[1], **options)
    else:
        arrivals = FileArrivals(file.arrival_s, rate[1])
    return Problem(
        cfg=cfg,
        rows=rows,
        catalog=catalog,
        arrivals=arrivals,
        rate=rate,
        latency_requirement_s=ends(arguments.latency_requirement_s),
        arguments=arguments.values(without=without),
        in_order=file is not None,
        **fleet,
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
