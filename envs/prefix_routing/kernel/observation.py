"""What a router is shown of a `Gateway`: numbers for each replica and for the request."""

from __future__ import annotations

import math

from servegym._jit import inner
from servegym.envs.prefix_routing.kernel.gateway import NO_INDEX, PRECISE

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
def observe(g, b, j, now, replicas, request):
    """Write what the router sees of request j, which was looked up; -1 after the last.

    Args:
        g: The gateways.
        b: Row.
        j: Request.
        now: Seconds.
        replicas: float32 (N, F), the columns `REPLICA_FEATURES`.
        request: float32 (K,), the columns `REQUEST_FEATURES`.
    """
    c = g.config[0]
    v = g.row[b]
    replicas[:] = 0.0
    request[:] = 0.0
    prompt = 1.0
    session_replica = -1
    if j >= 0:
        r = g.request[b, j]
        prompt = r.prompt
        session_replica = g.session_replica[b, r.session]
        request[0] = min(r.prompt, MAX_TOKENS)
        request[1] = min(r.predicted, MAX_TOKENS)
        request[2] = min(r.turn, MAX_REQUESTS)
        before = g.session_s[b, r.session]
        request[3] = 0.0 if math.isnan(before) else min(now - before, MAX_SECONDS)
        request[4] = tenant_heat(g, b, r.tenant, now)
        request[5] = min(r.ttft_slo, MAX_SECONDS)
        request[6] = min(r.tpot_slo, MAX_SECONDS)
    for n in range(v.replicas):
        p = g.replica[b, n]
        o = replicas[n]
        o[0] = 1.0
        o[1] = p.up
        o[2] = min(p.waiting, MAX_REQUESTS)
        o[3] = min(p.running, MAX_REQUESTS)
        o[4] = p.usage
        o[5] = min(now - v.scraped_s, MAX_SECONDS)
        o[6] = min(p.in_flight, MAX_REQUESTS)
        o[7] = min(p.prefill, MAX_TOKENS)
        o[8] = min(p.context, MAX_TOKENS)
        o[9] = min(p.blocks, MAX_TOKENS)
        if j >= 0:
            o[10] = min(p.match, MAX_TOKENS)
            o[11] = p.match / prompt
            o[14] = min(p.match_age, MAX_SECONDS)
            o[15] = n == session_replica
        used = max(p.entries, 0) * c.entry_tokens
        o[12] = min(used, MAX_TOKENS)
        if c.index == PRECISE:
            o[13] = min(used / p.kv_tokens, 1.0)
        elif c.index != NO_INDEX:
            o[13] = p.entries / max(p.capacity, 1)
        o[16] = _seconds(p.ttft)
        o[17] = max(_seconds(p.ttft_error), -MAX_SECONDS)
        o[18] = _seconds(p.tpot)
        o[19] = min(p.speed, MAX_TOKENS)
        o[20] = min(p.kv_tokens, MAX_TOKENS)
        o[21] = min(p.max_num_seqs, MAX_REQUESTS)


@inner
def _seconds(measured):
    return 0.0 if math.isnan(measured) else min(measured, MAX_SECONDS)


@inner
def tenant_heat(g, b, tenant, now):
    """Share of the recent requests that the tenant sent, 0 before the first request of all."""
    v = g.row[b]
    if v.heat == 0.0:
        return 0.0
    heat_s = g.config[0].heat_s
    heat = g.tenant_heat[b, tenant] * math.exp((g.tenant_s[b, tenant] - now) / heat_s)
    return min(heat / (v.heat * math.exp((v.heat_s - now) / heat_s)), 1.0)
