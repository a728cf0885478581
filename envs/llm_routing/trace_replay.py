"""Replay of one expert over a list of requests: the engine without a router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from servegym._files import LATEST_S
from servegym._jit import compile_kernels
from servegym.envs import _arguments as arg
from servegym.envs._arguments import Arguments
from servegym.envs.llm_routing import kernel
from servegym.envs.llm_routing.config import (
    MEMORY_POLICIES,
    SCHEDULERS,
    RoutingArguments,
    engine_config,
    set_sizes,
)
from servegym.envs.llm_routing.kernel import layout
from servegym.envs.llm_routing.kernel.law import pack_law
from servegym.hardware_profiles import Profile, load
from servegym.hardware_profiles.host import put_api

MAX_SEQS = 4096
REPLAY = np.dtype(
    [
        ("ttft_s", "f8"),
        ("tpot_s", "f8"),
        ("e2e_s", "f8"),
        ("finish_s", "f8"),
        ("queue_s", "f8"),
        ("preemptions", "i4"),
    ]
)
TIMELINE = np.dtype([("t_s", "f8"), ("running", "f8"), ("waiting", "f8"), ("kv_use", "f8")])


def _column(
    name: str, values: Any, low: float, integral: bool = False, high: float = np.inf
) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise ValueError(
            f"{name} must be a one-dimensional array of numbers, got shape {array.shape} and "
            f"dtype {array.dtype}."
        )
    array = array.astype(np.float64)
    bad = ~np.isfinite(array) | (array < low) | (array >= high)
    if integral:
        bad |= array != np.floor(array)
    if bad.any():
        row = int(np.argmax(bad))
        kind = "a whole number" if integral else "a finite number"
        below = "" if high == np.inf else f" and below {high:g}: seconds, not milliseconds"
        raise ValueError(f"{name}[{row}]={array[row]!r} must be {kind}, at least {low:g}{below}.")
    return array


def check_requests(
    arrival_s: Any, prompt_tokens: Any, output_tokens: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The requests as float64 ``(J,)`` columns.

    Raises:
        ValueError: naming the column, the request and what is allowed.
    """
    arrivals = _column("arrival_s", arrival_s, 0.0, high=LATEST_S)
    prompts = _column("prompt_tokens", prompt_tokens, 1.0, integral=True)
    outputs = _column("output_tokens", output_tokens, 1.0, integral=True)
    count = len(arrivals)
    if count == 0:
        raise ValueError("arrival_s is empty: there is nothing to replay.")
    if len(prompts) != count or len(outputs) != count:
        raise ValueError(
            f"arrival_s, prompt_tokens and output_tokens have {count}, {len(prompts)} and "
            f"{len(outputs)} entries; they must be of one length."
        )
    backward = np.flatnonzero(np.diff(arrivals) < 0)
    if len(backward):
        row = int(backward[0]) + 1
        raise ValueError(
            f"arrival_s[{row}]={arrivals[row]!r} is before arrival_s[{row - 1}]="
            f"{arrivals[row - 1]!r}: sort the requests by arrival."
        )
    return arrivals, prompts, outputs


def _check_requests_fit(
    prompts: np.ndarray, outputs: np.ndarray, profile: Profile, blocks: int, c: np.void
) -> None:
    """Refuse requests beyond the cache of ``blocks`` KV blocks or beyond the profile's laws."""
    reserve = c["memory_policy"] == layout.RESERVE
    # The last token of an answer is never computed.
    longest = outputs.max() if reserve else outputs - 1
    needed = np.ceil((prompts + longest) / int(c["block_size"]))
    if needed.max() > blocks:
        row = int(np.argmax(needed))
        raise ValueError(
            f"request {row} needs {int(needed[row])} KV blocks of {int(c['block_size'])} tokens "
            f"(prompt_tokens={int(prompts[row])}, output_tokens={int(outputs[row])}), the cache of "
            f"{profile.name!r} has {blocks}: raise kv_tokens or drop the request."
        )
    tokens = min(int(c["token_budget"]), prompts.sum())
    if c["scheduler"] == layout.ORCA:
        tokens = max(tokens, prompts.max())
    profile.check_domain(
        batch=min(int(c["running_capacity"]), len(prompts)),
        tokens=int(tokens),
        context=int((prompts + outputs).max()),
    )


@dataclass(frozen=True, kw_only=True)
class ReplayArguments(Arguments):
    """The replica of a replay.

    With ``async_scheduling`` an iteration is planned while the one before it runs, as vLLM does by
    default since 0.14: who arrives meanwhile, or needs the slot or memory of a request that ends
    meanwhile, joins one iteration later. It needs ``"chunked_prefill"``, and by default goes with
    it where the profile's engine does so. Times are those of a client where the profile's host has
    times of the API, else the engine's.
    """

    profile: str | Profile = arg.other("rtx4090-llama-3.1-8b", "a profile, its name or its file")
    scheduler: str = arg.choice("chunked_prefill", SCHEDULERS, "Orca's prefills block decodes")
    max_num_seqs: int = arg.whole(256, 1, "most requests in one iteration", high=MAX_SEQS)
    max_num_batched_tokens: int = arg.whole(2048, 1, "most tokens in one, with Orca in one prefill")
    kv_tokens: int | None = arg.whole(None, 1, "room in the KV cache; by default the profile's")
    block_size: int = arg.whole(16, 1, "tokens in a KV block", high=4096)
    async_scheduling: bool | None = arg.switch(None, "iterations are planned one ahead; see above")
    memory_policy: str = arg.choice("paged", MEMORY_POLICIES, "or room for the longest answer")


_engine: list[Callable[..., None]] = []


def _serve(
    arrival_s: Any,
    prompt_tokens: Any,
    output_tokens: Any,
    times: np.ndarray,
    arguments: ReplayArguments,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Check the requests, run the engine: arrivals, output lengths, log, timeline at ``times``."""
    arrivals, prompts, outputs = check_requests(arrival_s, prompt_tokens, output_tokens)
    count, running_capacity = len(arrivals), arguments.max_num_seqs
    expert = arguments.profile
    expert = expert if isinstance(expert, Profile) else load(expert)
    same = ("scheduler", "memory_policy", "block_size")
    engine = {name: getattr(arguments, name) for name in same}
    ahead = arguments.async_scheduling
    if ahead is None:
        ahead = expert.plans_ahead and arguments.scheduler == "chunked_prefill"
    engine["async_scheduling"] = ahead
    engine |= {"bytes_per_token": 0.0, "router_delay_s": 0.0}
    engine["prefill_token_budget"] = arguments.max_num_batched_tokens
    cfg = engine_config(RoutingArguments.fill(engine), running_capacity)
    c = cfg[0]
    c["num_experts"], c["slots"], c["waiting_capacity"] = 1, count, count
    set_sizes(c)
    c["num_requests"], c["max_output_tokens"] = count, int(outputs.max())
    law = pack_law([expert], running_capacity)
    c["longest"] = law.where["longest"][0]
    blocks = (arguments.kv_tokens or expert.kv_capacity_tokens) // arguments.block_size
    _check_requests_fit(prompts, outputs, expert, blocks, c)
    tokens = np.ascontiguousarray(np.stack([prompts, outputs], axis=1).astype(np.int64))
    log, timeline = np.zeros(count, dtype=layout.LOG), np.zeros((len(times), 3))
    lists = np.zeros(3 * count + arguments.block_size, dtype=np.int32)
    systems = layout.Systems(
        arrivals[None],
        np.zeros((1, count), dtype=np.int32),
        np.zeros(1, dtype=layout.ENV),
        np.zeros((1, 1), dtype=layout.EXPERT),
        layout.Queues(np.zeros(count, dtype=layout.SLOT), lists, log),
    )
    systems.expert["capacity"] = blocks
    put_api(systems.expert, [expert])
    tables = layout.Tables(cfg, law, np.zeros((0, 1, 5), dtype=np.float32))
    call = (tables, systems, tokens, times, timeline)
    if not _engine:
        # Once: the arrays are of the same types in every call, and finding them takes long.
        _engine.extend(compile_kernels("replay engine", [(kernel.run_replay, call)]))
    _engine[0](*call)
    for name in ("first_token_s", "finish_s"):
        log[name] += expert.host.get("api_out_s", 0.0)
    return arrivals, outputs, log, timeline


def replay(arrival_s: Any, prompt_tokens: Any, output_tokens: Any, **arguments: Any) -> np.ndarray:
    """Serve a list of requests on one replica, first come first served from an unbounded queue.

    Args:
        arrival_s: ``(J,)`` arrival times in seconds, non-decreasing.
        prompt_tokens: ``(J,)`` prompt lengths, at least 1.
        output_tokens: ``(J,)`` answer lengths, at least 1.
        **arguments: The replica, as `ReplayArguments` has it.

    Returns:
        ``(J,)`` structured array: ``ttft_s``, ``tpot_s`` (NaN for one token), ``e2e_s`` since
        arrival, ``finish_s`` on the clock of the arrivals, ``queue_s`` from arrival to first
        admission, ``preemptions``.

    Raises:
        ValueError: a bad argument, or a request that can never fit in the KV cache.
    """
    replica = ReplayArguments.fill(arguments)
    requests = arrival_s, prompt_tokens, output_tokens
    arrivals, outputs, log, _ = _serve(*requests, np.empty(0), replica)
    return times_of(arrivals, outputs, log)


def times_of(arrivals: np.ndarray, outputs: np.ndarray, log: np.ndarray) -> np.ndarray:
    """`REPLAY` of requests, from a log of their admissions, first tokens and ends."""
    result = np.empty(len(log), dtype=REPLAY)
    result["finish_s"] = log["finish_s"]
    result["ttft_s"] = log["first_token_s"] - arrivals
    result["e2e_s"] = log["finish_s"] - arrivals
    result["queue_s"] = log["admitted_s"] - arrivals
    result["preemptions"] = log["preemptions"]
    decoded = np.where(outputs > 1, outputs - 1, np.nan)
    result["tpot_s"] = (log["finish_s"] - log["first_token_s"]) / decoded
    return result


def replay_timeline(
    arrival_s: Any, prompt_tokens: Any, output_tokens: Any, times_s: Any, **arguments: Any
) -> np.ndarray:
    """How full the replica is at given times of a replay.

    Args:
        arrival_s: ``(J,)`` arrival times in seconds, as for `replay`.
        prompt_tokens: ``(J,)`` prompt lengths.
        output_tokens: ``(J,)`` answer lengths.
        times_s: ``(K,)`` seconds on the clock of the arrivals, non-decreasing.
        **arguments: The replica, as for `replay`.

    Returns:
        ``(K,)`` structured array: ``t_s``, ``running`` and ``waiting`` requests, ``kv_use``
        (blocks in use over all blocks).

    Raises:
        ValueError: a bad argument, or a request that can never fit in the KV cache.
    """
    times = _column("times_s", times_s, 0.0, high=LATEST_S)
    if (np.diff(times) < 0).any():
        raise ValueError("times_s must not decrease: sort the times.")
    replica = ReplayArguments.fill(arguments)
    *_, timeline = _serve(arrival_s, prompt_tokens, output_tokens, times, replica)
    result = np.empty(len(times), dtype=TIMELINE)
    result["t_s"] = times
    result["running"], result["waiting"], result["kv_use"] = timeline.T
    return result
