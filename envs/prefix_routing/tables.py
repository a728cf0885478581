"""The engine's arguments, and the requests of an episode in its arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from servegym.envs import _arguments as arg
from servegym.envs._arguments import Arguments, Options
from servegym.envs._failures import failure_times
from servegym.envs.llm_routing.kernel.law import pack_law
from servegym.envs.prefix_routing.kernel import layout
from servegym.envs.prefix_routing.requests import PrefixRequests
from servegym.hardware_profiles import Profile

MAX_SEQS = 4096
STORES = {"vllm": layout.NO_STORE, "infinite": layout.OWN_STORE, "pooled": layout.POOLED_STORE}
MAX_BLOCKS = 1 << 22
LOG_SOURCES = {
    "arrival_s": "arrived",
    "admitted_s": "admitted",
    "first_token_s": "first",
    "finish_s": "finish",
    "prompt_tokens": "prompt",
    "output_tokens": "output",
    "hit_tokens": "hit",
    "recomputed_tokens": "recomputed",
    "preemptions": "preemptions",
    "replica": "replica",
    "outcome": "outcome",
}
"""Column of a log -> field of the engine's record of a request."""


@dataclass(frozen=True, kw_only=True)
class EngineArguments(Arguments):
    """The arguments of the replicas' engine."""

    max_num_seqs: int = arg.whole(128, 1, "most requests of an iteration", high=MAX_SEQS)
    max_num_batched_tokens: int = arg.whole(2048, 1, "most tokens of an iteration")
    block_size: int = arg.whole(16, 1, "tokens of a KV block", high=1 << 20)
    kv_tokens: int | None = arg.whole(None, 1, "of a replica's KV memory; the profile's")
    async_scheduling: bool = arg.switch(False, "iterations are planned one ahead")
    prefix_cache: str = arg.choice("vllm", STORES, "what a replica finds again: see below")
    failures: Options = arg.options("`mean_time_to_failure_s`, `mean_time_to_repair_s`")


def engine_tables(
    profiles: Sequence[Profile], arguments: EngineArguments, num_requests: int
) -> tuple[layout.Tables, np.ndarray]:
    """What systems with these replicas share, and the capacity (N,) of the replicas in blocks.

    Raises:
        ValueError: arguments do not go together; it names them.
    """
    running, budget = arguments.max_num_seqs, arguments.max_num_batched_tokens
    size, kv_tokens = arguments.block_size, arguments.kv_tokens
    if budget < running:
        raise ValueError(
            f"max_num_batched_tokens={budget!r} must be at least max_num_seqs={running}: an "
            "iteration has a token of every sequence."
        )
    if len(profiles) == 0:
        raise ValueError("profiles is empty; at least one replica is needed.")
    cfg = np.zeros(1, dtype=layout.CONFIG)
    c = cfg[0]
    laws = list({id(profile): profile for profile in profiles}.values())
    law = pack_law(laws, running)
    c["longest"] = law.where["longest"][0]
    tokens = [kv_tokens or profile.kv_capacity_tokens for profile in profiles]
    capacity = np.array(tokens, dtype=np.int64) // size
    if capacity.min() < 1:
        raise ValueError(
            f"block_size={size} is more than the {min(tokens)} tokens of a replica's KV cache, "
            "kv_tokens."
        )
    if capacity.max() > MAX_BLOCKS:
        raise ValueError(
            f"kv_tokens={max(tokens)} in blocks of block_size={size} are {capacity.max()} blocks; "
            f"a replica has at most {MAX_BLOCKS}."
        )
    bits = max(int(capacity.max() - 1).bit_length(), 4)
    c["num_replicas"], c["max_running"], c["token_budget"] = len(profiles), running, budget
    c["block_size"], c["blocks_per_token"] = size, 1.0 / size
    c["blocks"], c["entries"], c["shift"] = capacity.max(), 1 << bits, 36 - bits
    c["num_requests"] = num_requests
    c["async_scheduling"] = arguments.async_scheduling
    c["store"] = STORES[arguments.prefix_cache]
    if arguments.failures is not None:
        c["uptime_s"], c["downtime_s"] = failure_times(arguments.failures)
    return layout.Tables(cfg, law), capacity


def put_replicas(
    systems: layout.Systems, profiles: Sequence[Profile], capacity: np.ndarray
) -> None:
    """Write card and memory of the replicas of all rows."""
    laws = list(dict.fromkeys(id(profile) for profile in profiles))
    systems.replica["profile"] = [laws.index(id(profile)) for profile in profiles]
    systems.replica["capacity"] = capacity


def put_requests(
    systems: layout.Systems, row: int, requests: PrefixRequests, first_segment: int = 0
) -> None:
    """Write what is given of the requests of an episode; `kernel.begin` starts it.

    There are at most J, checked, with blocks of the engine's size; their segments begin at
    ``first_segment`` of ``systems.segments``.
    """
    count = requests.num_requests
    most = systems.expected.shape[1]
    records = systems.request[row * most : row * most + count]
    records["arrived"] = requests.arrival_s
    records["think"] = requests.think_s
    records["parent"] = requests.parent
    records["prompt"] = requests.prompt_tokens
    records["output"] = requests.output_tokens
    records["first_segment"] = first_segment + requests.first_segment[:-1]
    systems.env["requests"][row] = count
