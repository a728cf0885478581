"""Replay of requests with shared prefixes on replicas: the engine without a gateway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from servegym._checks import choose, whole
from servegym._jit import compile_kernels
from servegym.envs.prefix_routing import kernel
from servegym.envs.prefix_routing.kernel import layout
from servegym.envs.prefix_routing.requests import PrefixRequests
from servegym.envs.prefix_routing.tables import (
    LOG_SOURCES,
    EngineArguments,
    engine_tables,
    put_replicas,
    put_requests,
)
from servegym.hardware_profiles import Profile, load
from servegym.hardware_profiles.host import put_api

PREFIX_REPLAY = np.dtype(
    [
        ("replica", "i4"),
        ("arrival_s", "f8"),
        ("admitted_s", "f8"),
        ("first_token_s", "f8"),
        ("finish_s", "f8"),
        ("hit_tokens", "i4"),
        ("recomputed_tokens", "i4"),
        ("preemptions", "i4"),
    ]
)


def replay_prefix(
    profiles: str | Profile | Sequence[str | Profile],
    requests: PrefixRequests,
    assignment: Any = "round_robin",
    *,
    num_replicas: int | None = None,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
    kv_tokens: int | None = None,
    async_scheduling: bool | None = None,
) -> np.ndarray:
    """Serve requests on replicas with vLLM's scheduler and automatic prefix cache.

    Each replica admits first come first served from an unbounded queue, at most ``max_num_seqs``
    at a time and as long as the whole prompt fits into the free blocks; every iteration has a token
    of each decoding request and prefill chunks up to the token budget, and takes blocks for these
    alone (`servegym.envs.llm_routing.kernel.scheduler`). A request reuses the longest
    cached prefix of full blocks, all but the block of its last token at most. Blocks that nobody
    references stay cached until they are taken, least recently freed first. Where a block is
    missing the newest request is preempted.

    Args:
        profiles: One profile, its name or its file, of all replicas, or a list with that of each.
        requests: The requests, in blocks of ``block_size`` tokens.
        assignment: ``"round_robin"`` in the order of the arrivals, or (J,) the replica of each
            request.
        num_replicas: Replicas of one profile; 1 if None.
        max_num_seqs: Most requests in one iteration, 1 to 4,096.
        max_num_batched_tokens: Most tokens in one iteration, at least ``max_num_seqs``.
        kv_tokens: Room of each replica's KV cache in tokens; None takes the profile's.
        async_scheduling: Whether an iteration is planned while the one before it runs; None: if the
            engines of all profiles do by default.

    Returns:
        ``(J,)`` structured array `PREFIX_REPLAY`: the replica; the times of arrival, first
        admission, first token and end in seconds, as a client sees them where the profile's host
        has times of the API; ``hit_tokens`` found cached at the first
        admission; ``recomputed_tokens`` that preemptions cost; ``preemptions``.

    Raises:
        ValueError: A bad argument, malformed requests, or a request that never fits in the cache of
            its replica.
    """
    requests.check()
    size = requests.block_size
    cards, loaded = _cards(profiles, num_replicas)
    count = requests.num_requests
    if async_scheduling is None:
        async_scheduling = all(card.plans_ahead for card in cards)
    engine = EngineArguments(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=size,
        kv_tokens=kv_tokens,
        async_scheduling=async_scheduling,
    )
    tables, capacity = engine_tables(cards, engine, count)
    sent = _assignment(assignment, count, len(cards))
    _check_fit(requests, sent, capacity)
    for card in loaded:
        card.check_domain(
            batch=min(max_num_seqs, count),
            tokens=int(min(max_num_batched_tokens, requests.prompt_tokens.sum(dtype=np.int64))),
            context=int((requests.prompt_tokens + requests.output_tokens).max()),
        )
    systems = layout.allocate(tables.config[0], 1, requests.segments)
    put_replicas(systems, cards, capacity)
    put_api(systems.replica, cards)
    put_requests(systems, 0, requests)
    which = np.ones(1, dtype=np.int8)
    begin, run = compile_kernels(
        "prefix replay engine",
        [(kernel.begin, (tables, systems, which)), (kernel.run_replay, (tables, systems, sent))],
    )
    begin(tables, systems, which)
    run(tables, systems, sent)
    log = systems.request
    result = np.empty(count, dtype=PREFIX_REPLAY)
    for name in PREFIX_REPLAY.names or ():
        result[name] = log[LOG_SOURCES[name]]
    out = systems.replica["api_out_s"][0][result["replica"]]
    # A client sees a token when the API has passed it on; the engine is done with it before.
    result["first_token_s"] += out
    result["finish_s"] += out
    return result


def _cards(
    profiles: str | Profile | Sequence[str | Profile], num_replicas: int | None
) -> tuple[list[Profile], list[Profile]]:
    """The profile of each replica, and those that are read here, once each."""
    if isinstance(profiles, (list, tuple)):
        names = list(profiles)
        if num_replicas not in (None, len(names)):
            raise ValueError(f"num_replicas={num_replicas!r}, but {len(names)} profiles are given.")
    else:
        count = 1 if num_replicas is None else num_replicas
        names: list[Any] = [profiles] * whole("num_replicas", count, 1, 4096)
    loaded = {name: load(name) for name in names if isinstance(name, str)}
    return [loaded[n] if isinstance(n, str) else n for n in names], list(loaded.values())


def _assignment(value: Any, count: int, replicas: int) -> np.ndarray:
    """The replica of each request, int64 (J,); empty for round robin."""
    if isinstance(value, str):
        choose("assignment", value, ("round_robin",))
        return np.empty(0, dtype=np.int64)
    array = np.asarray(value)
    if array.shape != (count,) or array.dtype.kind not in "iu":
        raise ValueError(
            f"assignment must be 'round_robin' or {count} whole numbers, got shape {array.shape} "
            f"and dtype {array.dtype}."
        )
    wrong = np.flatnonzero((array < 0) | (array >= replicas))
    if wrong.size:
        j = int(wrong[0])
        raise ValueError(f"assignment[{j}]={array[j]} must be in [0, {replicas - 1}].")
    return array.astype(np.int64)


def _check_fit(requests: PrefixRequests, sent: np.ndarray, capacity: np.ndarray) -> None:
    """Refuse a request beyond the blocks of its replica, of the smallest if they take turns."""
    # The last token of an answer is never computed.
    tokens = requests.prompt_tokens.astype(np.int64) + requests.output_tokens - 1
    need = -(-tokens // requests.block_size)
    room = capacity[sent] if sent.size else np.full(len(need), capacity.min())
    wrong = np.flatnonzero(need > room)
    if wrong.size:
        j = int(wrong[0])
        raise ValueError(
            f"request {j} needs {need[j]} KV blocks of {requests.block_size} tokens, its replica "
            f"has {room[j]}: raise kv_tokens or drop the request."
        )
