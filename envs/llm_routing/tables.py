"""The engine's arguments, a drawn fleet and the catalog's requests, as the kernel's arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from servegym._checks import choose, mapping, real
from servegym.envs.llm_routing.arguments import MEMORY_POLICIES, SCHEDULERS, RoutingArguments
from servegym.envs.llm_routing.fleets import FleetSource
from servegym.envs.llm_routing.kernel import layout
from servegym.envs.workloads import Catalog, predict
from servegym.envs.workloads.predictions import KINDS, QUANTITIES
from servegym.envs.workloads.requests import Requests
from servegym.hardware_profiles import Profile

MAX_FAILURES = 10_000_000
FAILURE_TIMES = ("mean_time_to_failure_s", "mean_time_to_repair_s")


def engine_config(arguments: RoutingArguments, running_capacity: int) -> np.ndarray:
    """The engine's arguments in a fresh config record, with so many requests running at most.

    Raises:
        ValueError: arguments do not go together; it names them.
    """
    cfg = np.zeros(1, dtype=layout.CONFIG)
    c, scheduler = cfg[0], arguments.scheduler
    for name in ("prefix_caching", "async_scheduling"):
        if getattr(arguments, name) and scheduler != "chunked_prefill":
            raise ValueError(
                f"{name}=True needs scheduler='chunked_prefill', not {scheduler!r}: an Orca "
                "iteration covers whole prompts and is planned when the one before it has ended."
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
    # Without preemption no request ever comes back to its blocks.
    c["prefix_caching"] = arguments.prefix_caching and arguments.memory_policy == "paged"
    c["delay_s_per_token"] = 8.0 * arguments.bytes_per_token / arguments.bandwidth_bps
    c["router_delay_s"] = arguments.router_delay_s
    if arguments.failures is not None:
        c["uptime_s"], c["downtime_s"] = failure_times(arguments.failures)
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


def checked_factors(value: Any, profiles: Sequence[Profile]) -> dict[str, list[float]]:
    """``step_factors`` checked: factors of prefill and decode iterations by profile."""
    factors = mapping("step_factors", value, [profile.name for profile in profiles])
    for name, pair in factors.items():
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise ValueError(
                f"step_factors[{name!r}]={pair!r} must be a pair: the factors of iterations with "
                "prefill and of iterations of decodes alone."
            )
    return {
        name: [real(f"step_factors[{name!r}][{k}]", x, 0.1, 10.0) for k, x in enumerate(pair)]
        for name, pair in factors.items()
    }


def check_failures(failures: Mapping[str, Any], c: np.void, episode_s: float) -> None:
    """Refuse failures so frequent that an episode of so many seconds would never end."""
    times = episode_s / float(c["uptime_s"] + c["downtime_s"])
    if times > MAX_FAILURES:
        raise ValueError(
            f"failures={failures!r} make an expert fail {times:.3g} times in an episode of "
            f"{episode_s:.3g} s; at most {MAX_FAILURES} are allowed."
        )


def set_sizes(c: np.void) -> None:
    """Set the sizes of the arrays of a config record to N, R and W of its system."""
    for largest, size in (
        ("max_experts", "num_experts"),
        ("max_running", "running_capacity"),
        ("max_waiting", "waiting_capacity"),
    ):
        c[largest] = c[size]


def put_fleet(
    source: FleetSource, setting: Mapping[str, Any], c: np.void, expert: np.ndarray, shared: np.void
) -> None:
    """Write a drawn fleet in the records of a system; ``shared`` is the problem's config record."""
    count = len(setting["profiles"])
    c["num_experts"] = count
    c["running_capacity"] = setting["running_capacity"]
    c["waiting_capacity"] = setting["waiting_capacity"]
    c["scheduler"] = SCHEDULERS[setting["scheduler"]]
    c["memory_policy"] = MEMORY_POLICIES[setting["memory_policy"]]
    caching = shared["prefix_caching"] and c["scheduler"] == layout.CHUNKED
    c["prefix_caching"] = caching and c["memory_policy"] == layout.PAGED
    c["async_scheduling"] = shared["async_scheduling"] and c["scheduler"] == layout.CHUNKED
    c["token_budget"] = setting["prefill_token_budget"]
    expert["capacity"][:count] = np.array(setting["kv_capacity_tokens"]) // int(c["block_size"])
    expert["profile"][:count] = source.laws(setting)
    expert["model"][:count] = source.columns(setting)


def predictor_options(arguments: RoutingArguments) -> dict[str, dict[str, Any]]:
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
            **mapping(f"predictor_kwargs[{name!r}]", by_quantity.get(name), ("table", "pool")),
        }
        for name in QUANTITIES
    }


def check_requests_fit(
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


def request_table(
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
