"""The arrays of a gateway: made for a number of systems, loaded with an episode's requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servegym._checks import choose, flag, real, whole
from servegym.envs.prefix_routing.kernel import gateway
from servegym.envs.prefix_routing.requests import PrefixRequests, expand

INDEXES = ("none", "approximate", "precise")
GATEWAY_OPTIONS = ("entry_tokens", "strict", "index_delay_s", "smoothing", "heat_s")
"""Keywords of `gateway_config` besides the index and the block."""
LRU_ENTRIES = 31_250
"""Entries of a replica's approximate index where nobody says how many: llm-d's default."""
MIN_ENTRY_TOKENS = 64
"""llm-d's least tokens of an entry of an approximate index."""
MATCH_TOKENS = 131_072
"""Tokens of a prompt that llm-d looks up, at most."""


def gateway_config(
    *,
    index: str,
    block_size: int,
    entry_tokens: int | None = None,
    strict: bool | None = None,
    index_delay_s: float = 0.0,
    smoothing: float = 0.1,
    heat_s: float = 60.0,
) -> np.void:
    """Check the arguments of a gateway.

    Args:
        index: One of `INDEXES`.
        block_size: Tokens of a KV block.
        entry_tokens: Tokens of an index entry, a multiple of the block; by default the least that
            has `MIN_ENTRY_TOKENS`, and one block for a precise index, which takes no other.
        strict: Whether a match ends at the first gap; by default for a precise index only, which
            takes no other.
        index_delay_s: Age at which cache events reach a precise index.
        smoothing: Weight of a new measurement in the moving averages, in (0, 1].
        heat_s: Time constant of the tenants' heat.
    """
    config = np.zeros(1, gateway.CONFIG)[0]
    config["index"] = INDEXES.index(choose("index", index, INDEXES))
    config["block_size"] = size = whole("block_size", block_size, 1)
    precise = config["index"] == gateway.PRECISE
    blocks = 1 if precise else -(-MIN_ENTRY_TOKENS // size)
    if entry_tokens is not None:
        blocks, rest = divmod(whole("entry_tokens", entry_tokens, size), size)
        if rest or (precise and blocks != 1):
            allowed = "equal to" if precise else "a multiple of"
            raise ValueError(f"entry_tokens={entry_tokens!r} must be {allowed} block_size={size}.")
    if precise and strict is False:
        raise ValueError("strict=False: the matches of a precise index are strict.")
    config["entry_tokens"] = blocks * size
    config["strict"] = precise if strict is None else flag("strict", strict)
    config["delay_s"] = real("index_delay_s", index_delay_s, 0.0)
    config["smoothing"] = real("smoothing", smoothing, 0.0, 1.0, open_low=True)
    config["heat_s"] = real("heat_s", heat_s, 0.0, open_low=True)
    return config


@dataclass(frozen=True, eq=False)
class Prompts:
    """The requests of an episode in numbers that begin at 0, for `load`.

    Attributes:
        requests: Where they are from.
        first_key: int64 (J + 1,), request j has the keys from ``first_key[j]`` on.
        keys: int32, the index entries of the prompts, -1 for those of one request alone.
        num_keys: K, distinct entries of several requests.
        key_of_id: int32, entry of each block id, -1 for none; empty unless the index is precise.
        session: int32 (J,), below ``num_sessions``.
        tenant: int32 (J,), below ``num_tenants``.
        num_sessions: Sessions.
        num_tenants: Tenants.
    """

    requests: PrefixRequests
    first_key: NDArray[np.int64]
    keys: NDArray[np.int32]
    num_keys: int
    key_of_id: NDArray[np.int32]
    session: NDArray[np.int32]
    tenant: NDArray[np.int32]
    num_sessions: int
    num_tenants: int


def prompts(config: np.void, requests: PrefixRequests) -> Prompts:
    """Number the index entries of the prompts, the sessions and the tenants.

    An entry is named by its last block, whose id names all before it; an entry that the prompt does
    not fill counts for nothing, nor do entries beyond `MATCH_TOKENS`.
    """
    size = int(config["block_size"])
    entry = int(config["entry_tokens"])
    entries = np.minimum(requests.prompt_tokens, MATCH_TOKENS) // entry
    # All requests at once: their entries stand one after another.
    first_key = np.concatenate([[0], np.cumsum(entries, dtype=np.int64)])
    place = np.arange(first_key[-1]) - np.repeat(first_key[:-1], entries)
    blocks = requests.num_blocks()
    last = np.repeat(np.cumsum(blocks) - blocks, entries) + (place + 1) * (entry // size) - 1
    starts, counts = requests.segments.T.astype(np.int64)
    begin = np.cumsum(counts) - counts
    in_segment = np.diff(np.searchsorted(last, begin), append=len(last))
    named = last + np.repeat(starts - begin, in_segment)
    num_ids = int((starts + counts).max(initial=0))
    if config["index"] == gateway.PRECISE:
        # The blocks of an output can be found by the session's next turn.
        mask = np.zeros(num_ids, np.bool_)
        mask[named] = True
        shared = (np.bincount(expand(requests.segments), minlength=num_ids) > 1) & mask
    else:
        shared = np.bincount(named, minlength=num_ids) > 1
    number = np.where(shared, np.cumsum(shared, dtype=np.int32) - 1, np.int32(-1))
    sessions, session = np.unique(requests.session, return_inverse=True)
    tenants, tenant = np.unique(requests.tenant, return_inverse=True)
    return Prompts(
        requests,
        first_key,
        number[named],
        int(shared.sum()),
        number if config["index"] == gateway.PRECISE else np.zeros(0, np.int32),
        session.astype(np.int32),
        tenant.astype(np.int32),
        len(sessions),
        len(tenants),
    )


GROWING = {
    "keys": "keys",
    "key_of_id": "key_of_id",
    "holders": "num_keys",
    "stamp": "num_keys",
    "references": "num_keys",
    "session_replica": "num_sessions",
    "session_s": "num_sessions",
    "tenant_heat": "num_tenants",
    "tenant_s": "num_tenants",
}
"""Arrays of `Gateway` whose last axis goes with the episode, and what of `Prompts` it holds."""


def sizes(episode: Prompts) -> dict[str, int]:
    """How long the last axes of the arrays `GROWING` must be for an episode."""
    arrays = {name: getattr(episode, source) for name, source in GROWING.items()}
    return {name: x if isinstance(x, int) else len(x) for name, x in arrays.items()}


def blank(config: np.void, num_rows: int, num_replicas: int, num_requests: int) -> gateway.Gateway:
    """Arrays of gateways; those in `GROWING` have no room yet for what goes with an episode."""
    rows, replicas = num_rows, num_replicas
    shared = np.zeros(1, gateway.CONFIG)
    shared[0] = config
    return gateway.Gateway(
        config=shared,
        row=np.zeros(rows, gateway.ROW),
        replica=np.zeros((rows, replicas), gateway.REPLICA),
        request=np.zeros((rows, num_requests), gateway.REQUEST),
        first_key=np.zeros((rows, num_requests + 1), np.int64),
        keys=np.zeros((rows, 0), np.int32),
        key_of_id=np.zeros((rows, 0), np.int32),
        holders=np.zeros((rows, 0), np.int64),
        stamp=np.zeros((rows, replicas, 0), np.int32),
        references=np.zeros((rows, replicas, 0), np.uint16),
        session_replica=np.zeros((rows, 0), np.int32),
        session_s=np.zeros((rows, 0)),
        tenant_heat=np.zeros((rows, 0)),
        tenant_s=np.zeros((rows, 0)),
    )


def load(
    g: gateway.Gateway,
    row: int,
    episode: Prompts,
    *,
    predicted: ArrayLike,
    ttft_slo_s: ArrayLike,
    tpot_slo_s: ArrayLike,
    replicas: Mapping[str, ArrayLike],
) -> None:
    """Begin an episode in a row: its requests and its replicas, and nothing known of them yet.

    Args:
        g: The gateways.
        row: Which of them.
        episode: From `prompts`.
        predicted: (J,) predicted tokens of the outputs.
        ttft_slo_s: (J,) or one for all.
        tpot_slo_s: (J,) or one for all.
        replicas: ``kv_tokens`` (N,) of the KV memories, and (N,) or one for all: ``speed`` in
            prefill tokens/s, ``max_num_seqs``, and ``capacity`` of the approximate index in
            entries. llm-d's autotune takes the number of KV blocks, though an entry may stand for
            several: the index then believes in up to four times the memory.
    """
    requests = episode.requests
    count = len(np.atleast_1d(np.asarray(replicas["kv_tokens"])))
    for array in (g.row, g.replica, g.request, g.holders, g.references, g.tenant_heat, g.tenant_s):
        array[row] = 0
    g.stamp[row], g.session_replica[row], g.session_s[row] = -1, -1, np.nan
    replica, request = g.replica[row, :count], g.request[row, : requests.num_requests]
    g.row[row]["replicas"] = count
    g.row[row]["requests"] = requests.num_requests
    g.row[row]["keys"] = episode.num_keys
    replica["up"], replica["oldest"], replica["newest"] = 1, -1, -1
    replica["forgotten_s"] = -np.inf
    replica["ttft"] = replica["ttft_error"] = replica["tpot"] = np.nan
    request["replica"], request["next"] = -1, -1
    for name, value in replicas.items():
        replica[name] = value
    request["prompt"], request["predicted"] = requests.prompt_tokens, predicted
    request["ttft_slo"], request["tpot_slo"] = ttft_slo_s, tpot_slo_s
    request["session"], request["tenant"] = episode.session, episode.tenant
    request["turn"] = requests.turn
    g.first_key[row, : requests.num_requests + 1] = episode.first_key
    g.keys[row, : len(episode.keys)] = episode.keys
    if g.key_of_id.shape[1]:
        g.key_of_id[row] = -1
        g.key_of_id[row, : len(episode.key_of_id)] = episode.key_of_id
