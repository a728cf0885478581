"""What a learned router of prefix routing reads, and a linear index over it.

Features are scaled by what a replica can do and the request may take: prefills count in shares of
the objective of the time to first token, contexts in shares of the KV memory, so that the same
weights mean the same on two cards and on sixteen. Dynamo's cost and LMetric's are close to special
cases of the index.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.protocol import Observation
from servegym.envs.prefix_routing.kernel.observation import OF_REPLICA, OF_REQUEST

Floats = NDArray[np.floating[Any]]

FEATURES = (
    "prefill",  # s of the uncached part of the prompt / TTFT objective
    "matched",  # s that the match saves / TTFT objective
    "backlog",  # s of the prefills in flight / TTFT objective
    "late",  # what prefill and backlog are over the objective
    "context",  # tokens in flight / KV memory
    "blocks",  # the same, shared ones counted once
    "full",  # what blocks and the prompt are over the memory
    "in_flight",  # requests / 32
    "queue",  # requests in flight beyond those that run at once / 32
    "waiting",  # requests / 8, scraped
    "kv_usage",  # scraped
    "session",  # the session's last request went there
    "share",  # matched share of the prompt
    "old_match",  # that share x log(1 + s since the match was used)
    "full_match",  # that share x blocks
    "hot_match",  # that share x the tenant's share of the recent requests
    "index_fill",
    "ttft",  # moving average / objective
    "ttft_error",  # of the expectation / objective
    "tpot",  # moving average / objective
    "lmetric",  # prefill x in_flight
    "log_prefill",
    "log_in_flight",
)
"""What the index reads of a replica; the times are clipped at `MOST` objectives."""
F = len(FEATURES)
MOST = 8.0


def features(obs: Observation, block_size: int) -> tuple[Floats, Floats]:
    """What the index reads: of the replicas (B, N, 23), and the load (B,) of all together.

    Args:
        obs: Dict observation of the environment, with a leading axis of B.
        block_size: Tokens of a KV block.
    """
    replicas, request = obs["replicas"], obs["request"]

    def of(name: str) -> Floats:
        return replicas[:, :, OF_REPLICA[name]]

    def asked(name: str) -> Floats:
        return request[:, OF_REQUEST[name], None]

    prompt = asked("prompt_tokens")
    ttft = np.maximum(asked("ttft_slo_s"), 1e-3)
    tpot = np.maximum(asked("tpot_slo_s"), 1e-4)
    speed = np.maximum(of("prefill_tokens_per_s"), 1.0) * ttft  # tokens an objective
    memory = np.maximum(of("kv_tokens"), 1.0)
    match, share, in_flight = of("match_tokens"), of("match_share"), of("in_flight")
    prefill = np.minimum((prompt - match) / speed, MOST)
    backlog = np.minimum(of("prefill_tokens") / speed, MOST)
    blocks = np.minimum(of("decode_blocks") * block_size / memory, MOST)
    columns = (
        prefill,
        np.minimum(match / speed, MOST),
        backlog,
        np.maximum(prefill + backlog - 1.0, 0.0),
        np.minimum(of("context_tokens") / memory, MOST),
        blocks,
        np.clip(blocks + prompt / memory - 1.0, 0.0, MOST),
        in_flight / 32,
        np.maximum(in_flight - of("max_num_seqs"), 0.0) / 32,
        np.minimum(of("waiting") / 8, MOST),
        of("kv_usage"),
        of("session_replica"),
        share,
        share * np.log1p(of("match_age_s")),
        share * blocks,
        share * asked("tenant_heat"),
        of("index_fill"),
        np.minimum(of("ttft_s") / ttft, MOST),
        np.clip(of("ttft_error_s") / ttft, -MOST, MOST),
        np.minimum(of("tpot_s") / tpot, MOST),
        prefill * in_flight / 32,
        np.log(prefill + 0.01),
        np.log1p(in_flight),
    )
    x = np.stack(columns, -1, dtype=np.float32)
    up = of("up")
    load = ((backlog + blocks) * up).sum(1) / np.maximum(up.sum(1), 1.0)
    return x, np.minimum(load, 2.0)


def first_weights() -> NDArray[np.float64]:
    """The index (46,) that a search begins with: Dynamo's cost with one set of tuned constants.

    Its cost in blocks, 5.4 (prefill tokens in flight + L - 2.6 m) / 16 + decode blocks + .2 x
    requests in flight, over 5.4 / 16 and the tokens that an H100 prefills in 1.1 s.
    """
    weights = np.zeros(2 * F)
    tokens = 48_500 * 1.1
    weights[FEATURES.index("prefill")] = -1.0
    weights[FEATURES.index("matched")] = 1.6
    weights[FEATURES.index("backlog")] = -1.0
    weights[FEATURES.index("blocks")] = -455_000 / 5.4 / tokens
    weights[FEATURES.index("in_flight")] = -32 * 0.2 * 16 / 5.4 / tokens
    return weights


def index_values(weights: Floats, obs: Observation, block_size: int) -> Floats:
    """Values (B, N) of the replicas for the next request by an index (B, 46) a row.

    A weight of each feature, then one of each feature times the load of all replicas.
    """
    x, load = features(obs, block_size)
    index = weights[:, :F] + weights[:, F:] * load[:, None]
    return np.einsum("bnf,bf->bn", x, index)
