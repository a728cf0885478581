"""Arguments of the LLM routing environments, checked and turned into the arrays of the kernel."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from servegym._checks import choose, flag, mapping, nearest, positive_range, real, whole
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
from servegym.envs.llm_routing.kernel import layout
from servegym.envs.workloads import Catalog, load_catalog, make_arrivals, predict
from servegym.envs.workloads.predictions import BUCKETS, KINDS, QUANTITIES
from servegym.envs.workloads.requests import FileArrivals, Requests, load_requests
from servegym.hardware_profiles import LawTables, Profile, list_fleets, load, load_fleet
from servegym.hardware_profiles.interpolation import along, union

DEFAULT_FLEET = "edge-6-heterogeneous"
DEFAULT_NUM_EXPERTS = 6
DEFAULT_CATALOG = "alpaca_eval_7b"

_SCHEDULERS = {"orca": kernel.ORCA, "chunked_prefill": kernel.CHUNKED}
_MEMORY_POLICIES = {"reserve": kernel.RESERVE, "paged": kernel.PAGED}
_REWARDS = {
    "qos_aware": kernel.QOS_AWARE,
    "completed_qos": kernel.COMPLETED_QOS,
    "paid_forward": kernel.PAID_FORWARD,
    "dense": kernel.DENSE,
}
_PENALTIES = {"new_violations": kernel.NEW_VIOLATIONS, "literal": kernel.LITERAL}
_ESTIMATORS = {"true": 0, "predicted": 1}
MAX_CAPACITY = 256
"""Requests that an expert may run, and that may wait at it, at most."""
MAX_FAILURES = 10_000_000
FAILURE_TIMES = ("mean_time_to_failure_s", "mean_time_to_repair_s")
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


def _slopes(axis: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Slope of the segment that begins at each point (the last point repeats its neighbour's)."""
    slopes = np.diff(values, axis=-1) / np.diff(axis)
    return np.concatenate([slopes, slopes[..., -1:]], axis=-1)


def pack_laws(
    profiles: Sequence[Profile],
    cfg: np.void,
    running_capacity: int,
    block_size: int,
    factors: Mapping[str, tuple[float, float]] | None = None,
) -> np.ndarray:
    """Pack the latency tables of the experts in one float64 vector and set the offsets in ``cfg``.

    The vector begins with ``capacity_blocks, k1, k2`` of each expert. Then come the axes, which
    all experts share (the union of their grids), and the tables with a leading axis of experts:
    dense (N, n_dense), chunk attention (N, n_chunk, n_context), whole decode iterations, the slopes
    of their segments and the decodes' attention in iterations with prefill chunks
    (N, running_capacity + 1, n_decode), head (N, running_capacity + 1), and what `Surplus` adds:
    one value an expert, and two tables (N, running_capacity + 1).

    ``factors`` multiply the times of a profile by its name: of iterations with prefill, and of
    iterations of decodes alone.
    """
    tables: list[LawTables] = [p.tables() for p in profiles]
    dense_x = union(t.dense_tokens for t in tables)
    chunk_x = union(t.chunk_tokens for t in tables)
    context_x = union(t.context_tokens for t in tables)
    decode_x = union(t.decode_context_tokens for t in tables)
    sequences = np.arange(running_capacity + 1, dtype=np.float64)
    prefill_factor, decode_factor = np.array(
        [(factors or {}).get(getattr(p, "name", ""), (1.0, 1.0)) for p in profiles]
    ).T
    heads, dense, chunk, decode, attention, head = [], [], [], [], [], []
    surplus = [profile.surplus(sequences) for profile in profiles]
    for profile, t in zip(profiles, tables, strict=True):
        capacity = profile.kv_capacity_tokens // block_size
        heads.append([capacity, profile.estimator.k1, profile.estimator.k2])
        dense.append(along(t.dense_tokens, t.dense_s, dense_x))
        by_context = along(t.context_tokens, t.chunk_attention_s, context_x)
        chunk.append(along(t.chunk_tokens, by_context.T, chunk_x).T)
        head.append(along(t.head_sequences, t.head_s, sequences))
        batch = along(t.dense_tokens, t.dense_s, sequences) + head[-1]
        alone, mixed = (
            along(t.decode_sequences, along(t.decode_context_tokens, x, decode_x).T, sequences).T
            for x in (t.decode_attention_s, profile.mixed_decode_attention_s())
        )
        decode.append(alone + batch[:, None])
        attention.append(mixed)
    decode = np.array(decode) * decode_factor[:, None, None]
    dense, head = (np.array(x) * prefill_factor[:, None] for x in (dense, head))
    chunk, attention = (np.array(x) * prefill_factor[:, None, None] for x in (chunk, attention))
    chunk_decode = np.array([more.chunk_s for more in surplus]) * prefill_factor
    longest = np.array([more.decode_s for more in surplus]) * decode_factor[:, None]
    longest_mixed = np.array([more.mixed_s for more in surplus]) * prefill_factor[:, None]
    cfg["longest"] = longest.any() or longest_mixed.any()
    cfg["n_dense"], cfg["n_chunk"], cfg["n_context"] = len(dense_x), len(chunk_x), len(context_x)
    cfg["n_decode"], cfg["n_sequences"], cfg["n_head"] = len(decode_x), len(sequences), len(head[0])
    parts = {
        "": np.array(heads),
        "x_dense": dense_x,
        "x_chunk": chunk_x,
        "x_context": context_x,
        "x_decode": decode_x,
        "y_dense": dense,
        "y_chunk": chunk,
        "y_decode": decode,
        "y_slope": _slopes(decode_x, decode),
        "y_attention": attention,
        "y_head": head,
        "y_chunk_decode": chunk_decode,
        "y_longest": longest,
        "y_longest_mixed": longest_mixed,
    }
    offset = 0
    for name, part in parts.items():
        if name:
            cfg[name] = offset
        offset += part.size
    return np.concatenate([np.ravel(part) for part in parts.values()])


@dataclass(frozen=True)
class Problem:
    """A routing problem: what the environments, the replay and the baselines share.

    Attributes:
        cfg: ``(1,)`` record of :data:`kernel.CONFIG`.
        law: packed latency tables, see :func:`pack_laws`.
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
    law: np.ndarray
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


def set_sizes(c: np.void) -> None:
    """Set the sizes of the arrays of a config record to N, R and W of its system."""
    for largest, size in (
        ("max_experts", "num_experts"),
        ("max_running", "running_capacity"),
        ("max_waiting", "waiting_capacity"),
    ):
        c[largest] = c[size]


def put_fleet(problem: Problem, setting: Mapping[str, Any], c: np.void, expert: np.ndarray) -> None:
    """Write a drawn fleet in the config record and the expert records ``(N,)`` of a system."""
    source = problem.fleets
    assert source is not None
    count = len(setting["profiles"])
    c["num_experts"] = count
    c["running_capacity"] = setting["running_capacity"]
    c["waiting_capacity"] = setting["waiting_capacity"]
    c["scheduler"] = _SCHEDULERS[setting["scheduler"]]
    c["memory_policy"] = _MEMORY_POLICIES[setting["memory_policy"]]
    caching = problem.cfg["prefix_caching"][0] and c["scheduler"] == kernel.CHUNKED
    c["prefix_caching"] = caching and c["memory_policy"] == kernel.PAGED
    ahead = problem.cfg["async_scheduling"][0]
    c["async_scheduling"] = ahead and c["scheduler"] == kernel.CHUNKED
    c["token_budget"] = setting["prefill_token_budget"]
    expert["capacity"][:count] = np.array(setting["kv_capacity_tokens"]) // int(c["block_size"])
    expert["profile"][:count] = source.laws(setting)
    expert["model"][:count] = source.columns(setting)


def engine_config(
    *,
    scheduler: str,
    memory_policy: str,
    prefix_caching: bool,
    async_scheduling: bool = False,
    running_capacity: int,
    prefill_token_budget: int,
    block_size: int,
    bandwidth_bps: float,
    bytes_per_token: float,
    router_delay_s: float,
    staleness_s: float = 0.0,
    failures: Mapping[str, Any] | None = None,
    most_running: int = MAX_CAPACITY,
) -> np.ndarray:
    """Check the arguments of the engine alone and write them in a fresh config record.

    ``most_running`` is the largest ``running_capacity`` that is allowed.
    """
    cfg = np.zeros(1, dtype=kernel.CONFIG)
    c = cfg[0]
    c["scheduler"] = _SCHEDULERS[choose("scheduler", scheduler, _SCHEDULERS)]
    c["memory_policy"] = _MEMORY_POLICIES[choose("memory_policy", memory_policy, _MEMORY_POLICIES)]
    c["running_capacity"] = whole("running_capacity", running_capacity, 1, most_running)
    c["token_budget"] = whole("prefill_token_budget", prefill_token_budget, 1)
    c["block_size"] = whole("block_size", block_size, 1, 4096)
    c["blocks_per_token"] = 1.0 / block_size
    prefix_caching = flag("prefix_caching", prefix_caching)
    if prefix_caching and scheduler != "chunked_prefill":
        raise ValueError(
            f"prefix_caching=True needs scheduler='chunked_prefill', not {scheduler!r}: "
            "an Orca prefill always covers the whole prompt."
        )
    c["async_scheduling"] = flag("async_scheduling", async_scheduling)
    if async_scheduling and scheduler != "chunked_prefill":
        raise ValueError(
            f"async_scheduling=True needs scheduler='chunked_prefill', not {scheduler!r}: an Orca "
            "iteration is planned when the one before it has ended."
        )
    # Without preemption no request ever comes back to its blocks.
    c["prefix_caching"] = prefix_caching and memory_policy == "paged"
    if scheduler == "chunked_prefill" and c["token_budget"] < c["running_capacity"]:
        raise ValueError(
            f"prefill_token_budget={prefill_token_budget} is below running_capacity="
            f"{running_capacity}: a chunked iteration needs one token for every running request."
        )
    bandwidth = real("bandwidth_bps", bandwidth_bps, 0.0, open_low=True)
    c["delay_s_per_token"] = 8.0 * real("bytes_per_token", bytes_per_token, 0.0) / bandwidth
    c["router_delay_s"] = real("router_delay_s", router_delay_s, 0.0)
    c["staleness_s"] = real("staleness_s", staleness_s, 0.0)
    if failures is not None:
        c["uptime_s"], c["downtime_s"] = failure_times(failures)
    return cfg


def failure_times(failures: Mapping[str, Any]) -> tuple[float, float]:
    """Mean seconds to failure and to repair, of the argument ``failures``.

    Raises:
        ValueError: naming the argument, what was given and what is allowed.
    """
    times = mapping("failures", failures, FAILURE_TIMES)
    for name in FAILURE_TIMES:
        if name not in times:
            raise ValueError(f"failures={failures!r} lacks {name!r}; it takes {FAILURE_TIMES}.")
    uptime, downtime = (real(f"failures[{name!r}]", times[name], 1e-3) for name in FAILURE_TIMES)
    return uptime, downtime


def _predictor_options(
    kinds: Mapping[str, str], buckets: str, seed: int, options: Mapping[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """The keywords of `predict` for the score and for the length, from the predictor of each."""
    for quantity, kind in kinds.items():
        if not (isinstance(kind, str) and kind.startswith("learned:")):
            choose(f"{quantity}_predictor", kind, KINDS)
    by_quantity = mapping("predictor_kwargs", options, QUANTITIES)
    extra = {
        name: mapping(f"predictor_kwargs[{name!r}]", by_quantity.get(name), ("table", "pool"))
        for name in QUANTITIES
    }
    choose("buckets", buckets, BUCKETS)
    seed = whole("predictor_seed", seed, 0)
    return {
        name: {"kind": kinds[name], "buckets": buckets, "seed": seed, **extra[name]}
        for name in QUANTITIES
    }


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


def _step_factors(given: Any, profiles: Sequence[Profile]) -> dict[str, tuple[float, float]]:
    """``step_factors`` checked: factors of prefill and decode iterations by profile."""
    found = mapping("step_factors", given, [profile.name for profile in profiles])
    for name, pair in found.items():
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise ValueError(
                f"step_factors[{name!r}]={pair!r} must be a pair: the factors of iterations with "
                "prefill and of iterations of decodes alone."
            )
    return {
        name: (
            real(f"step_factors[{name!r}][0]", pair[0], 0.1, 10.0),
            real(f"step_factors[{name!r}][1]", pair[1], 0.1, 10.0),
        )
        for name, pair in found.items()
    }


def check_failures(failures: Mapping[str, Any], c: np.void, episode_s: float) -> None:
    """Refuse failures so frequent that an episode of so many seconds would never end."""
    times = episode_s / float(c["uptime_s"] + c["downtime_s"])
    if times > MAX_FAILURES:
        raise ValueError(
            f"failures={failures!r} make an expert fail {times:.3g} times in an episode of "
            f"{episode_s:.3g} s; at most {MAX_FAILURES} are allowed."
        )


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


def _file_name(requests_file: Any) -> str:
    if not isinstance(requests_file, (str, os.PathLike)):
        raise ValueError(f"requests_file={requests_file!r} must be the path of a CSV file.")
    if not os.path.isfile(requests_file):
        raise ValueError(f"requests_file={requests_file!r} is not there; give a CSV file's path.")
    return os.fspath(requests_file)


def _request_table(
    catalog: Catalog,
    columns: np.ndarray,
    predictors: Mapping[str, Mapping[str, Any]],
    max_output_tokens: int,
    file: Requests | None = None,
) -> np.ndarray:
    """Catalog rows at the experts, with predictions: ``Problem.table``.

    What a file of requests says is predicted takes the place of the predictors.
    """
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
    predictors = _predictor_options(kinds, buckets, predictor_seed, predictor_kwargs)
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
    _check_requests_fit(experts, loaded, rows, c)

    return Problem(
        cfg=cfg,
        law=pack_laws(
            experts,
            c,
            int(c["running_capacity"]),
            int(c["block_size"]),
            _step_factors(step_factors, experts),
        ),
        table=_request_table(loaded, columns, predictors, int(c["max_output_tokens"]), file),
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
        predictors = _predictor_options(
            {"score": kind, "length": kind},
            options["buckets"],
            options["predictor_seed"],
            options["predictor_kwargs"] if kind == "learned" else None,
        )
        tables.append(_request_table(catalog, columns, predictors, longest))
    return replace(
        largest,
        cfg=cfg,
        law=pack_laws(
            source.profiles, c, MAX_RUNNING, block, _step_factors(factors, source.profiles)
        ),
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
    block = int(fixed.cfg["block_size"][0])
    law = pack_laws(profiles, fixed.cfg[0], fixed.running_capacity, block)
    return replace(fixed, law=law, profiles=profiles)


def _signature() -> inspect.Signature:
    """Of `build_problem`, with all arguments by name: environments check theirs against it."""
    own = inspect.signature(build_problem).parameters
    fixed = inspect.signature(_fixed_problem).parameters
    names = {**fixed, **{n: p for n, p in own.items() if p.kind is not p.VAR_KEYWORD}}
    return inspect.Signature(list(names.values()))


build_problem.__signature__ = _signature()  # pyright: ignore[reportFunctionMemberAccess]
