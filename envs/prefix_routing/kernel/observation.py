"""What a router is shown of a `Gateway`: numbers for each replica and for the request."""

from __future__ import annotations

import math

from servegym._jit import inner
from servegym.envs.prefix_routing.kernel.gateway import NO_INDEX, PRECISE, decayed

# Documented bounds of the observation; larger values are clipped.
MAX_TOKENS = float(1 << 24)  # the last up to which float32 holds every whole number
MAX_SECONDS = 3600.0
MAX_REQUESTS = 65535.0

REPLICA_FEATURES = (
    "exists",  # 1; 0 in all columns where the system has no such replica
    "up",  # 1: it takes requests
    # Scraped.
    "waiting",  # requests
    "running",  # requests
    "kv_usage",  # share of the KV blocks in use
    "metrics_age_s",
    # Own accounting of the requests in flight.
    "in_flight",  # requests
    "prefill_tokens",  # uncached prompt tokens of those without a first token
    "context_tokens",  # prompt tokens
    "decode_blocks",  # KV blocks of their prompts, shared index entries counted once
    # Prefix index.
    "match_tokens",
    "match_share",  # of the prompt
    "index_tokens",  # in use; of a precise index all cached blocks
    "index_fill",  # share of its entries in use; of the KV memory, if the index is precise
    "match_age_s",  # since the last matched entry was used
    "session_replica",  # 1: the session's last request went there
    # Moving averages, 0 before the first measurement.
    "ttft_s",
    "ttft_error_s",  # measured less expected at the routing
    "tpot_s",
    # The replica itself.
    "prefill_tokens_per_s",
    "kv_tokens",  # tokens of its KV memory
    "max_num_seqs",  # requests that it runs, at most
)
"""Columns for each replica, in raw units."""

_BOUNDS = {
    "exists": 1.0,
    "up": 1.0,
    "waiting": MAX_REQUESTS,
    "running": MAX_REQUESTS,
    "kv_usage": 1.0,
    "in_flight": MAX_REQUESTS,
    "match_share": 1.0,
    "index_fill": 1.0,
    "session_replica": 1.0,
    "max_num_seqs": MAX_REQUESTS,
    "turn": MAX_REQUESTS,
    "tenant_heat": 1.0,
}

REQUEST_FEATURES = (
    "prompt_tokens",
    "predicted_tokens",  # of the output
    "turn",  # place in its session
    "session_gap_s",  # since the session's last request came, 0 for the first
    "tenant_heat",  # share of the recent requests that its tenant sent
    "ttft_slo_s",
    "tpot_slo_s",
)
"""Columns of the request, in raw units."""


def _high(name: str) -> float:
    return _BOUNDS.get(name, MAX_SECONDS if name.endswith("_s") else MAX_TOKENS)


REPLICA_HIGH = tuple(
    MAX_TOKENS if name.endswith("_per_s") else _high(name) for name in REPLICA_FEATURES
)
REPLICA_LOW = tuple(-MAX_SECONDS if name == "ttft_error_s" else 0.0 for name in REPLICA_FEATURES)
REQUEST_HIGH = tuple(_high(name) for name in REQUEST_FEATURES)
"""Bounds of the columns; the request's are at least 0."""


@inner
def observe(gateways, row, index, now, replica_columns, request_columns):
    """Write what the router sees of the request, which was looked up; -1 after the last.

    The columns are `REPLICA_FEATURES` (N, F) and `REQUEST_FEATURES` (K,).
    """
    config, gateway = gateways.config[0], gateways.row[row]
    replica_columns[:] = 0.0
    request_columns[:] = 0.0
    prompt = 1.0
    session_replica = -1
    if index >= 0:
        request = gateways.request[row, index]
        prompt = request.prompt
        session_replica = gateways.session_replica[row, request.session]
        request_columns[0] = min(request.prompt, MAX_TOKENS)
        request_columns[1] = min(request.predicted, MAX_TOKENS)
        request_columns[2] = min(request.turn, MAX_REQUESTS)
        before = gateways.session_s[row, request.session]
        request_columns[3] = 0.0 if math.isnan(before) else min(now - before, MAX_SECONDS)
        request_columns[4] = tenant_heat(gateways, row, request.tenant, now)
        request_columns[5] = min(request.ttft_slo, MAX_SECONDS)
        request_columns[6] = min(request.tpot_slo, MAX_SECONDS)
    for n in range(gateway.replicas):
        replica = gateways.replica[row, n]
        columns = replica_columns[n]
        columns[0] = 1.0
        columns[1] = replica.up
        columns[2] = min(replica.waiting, MAX_REQUESTS)
        columns[3] = min(replica.running, MAX_REQUESTS)
        columns[4] = replica.usage
        columns[5] = min(now - gateway.scraped_s, MAX_SECONDS)
        columns[6] = min(replica.in_flight, MAX_REQUESTS)
        columns[7] = min(replica.prefill, MAX_TOKENS)
        columns[8] = min(replica.context, MAX_TOKENS)
        columns[9] = min(replica.blocks, MAX_TOKENS)
        if index >= 0:
            columns[10] = min(replica.match, MAX_TOKENS)
            columns[11] = replica.match / prompt
            columns[14] = min(replica.match_age, MAX_SECONDS)
            columns[15] = n == session_replica
        used = max(replica.entries, 0) * config.entry_tokens
        columns[12] = min(used, MAX_TOKENS)
        if config.index == PRECISE:
            columns[13] = min(used / replica.kv_tokens, 1.0)
        elif config.index != NO_INDEX:
            columns[13] = replica.entries / max(replica.capacity, 1)
        columns[16] = _seconds(replica.ttft)
        columns[17] = max(_seconds(replica.ttft_error), -MAX_SECONDS)
        columns[18] = _seconds(replica.tpot)
        columns[19] = min(replica.speed, MAX_TOKENS)
        columns[20] = min(replica.kv_tokens, MAX_TOKENS)
        columns[21] = min(replica.max_num_seqs, MAX_REQUESTS)


@inner
def _seconds(measured):
    return 0.0 if math.isnan(measured) else min(measured, MAX_SECONDS)


@inner
def tenant_heat(gateways, row, tenant, now):
    """Share of the recent requests that the tenant sent, 0 before the first request of all."""
    config, gateway = gateways.config[0], gateways.row[row]
    if gateway.heat == 0.0:
        return 0.0
    heat = decayed(config, gateways.tenant_heat[row, tenant], gateways.tenant_s[row, tenant], now)
    return min(heat / decayed(config, gateway.heat, gateway.heat_s, now), 1.0)
