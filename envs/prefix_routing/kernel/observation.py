"""What a router is shown of a `Gateway`: numbers for each replica and for the request."""

from __future__ import annotations

import math

from servegym._jit import inner
from servegym.envs._columns import Column, bounds, places, seen
from servegym.envs.prefix_routing.kernel.gateway import NO_INDEX, PRECISE, decayed

MAX_TOKENS = float(1 << 24)  # the last up to which float32 holds every whole number
MAX_SECONDS = 3600.0
MAX_REQUESTS = 65535.0

REPLICA = (
    Column("exists", 1.0, "1; 0 in all columns where the system has no such replica"),
    Column("up", 1.0, "1: it takes requests"),
    Column("waiting", MAX_REQUESTS, "requests, scraped"),
    Column("running", MAX_REQUESTS, "requests, scraped"),
    Column("kv_usage", 1.0, "share of the KV blocks in use, scraped"),
    Column("metrics_age_s", MAX_SECONDS, "age of what is scraped"),
    # The gateway's accounting of the requests in flight.
    Column("in_flight", MAX_REQUESTS, "requests"),
    Column("prefill_tokens", MAX_TOKENS, "uncached prompt tokens of those without a first token"),
    Column("context_tokens", MAX_TOKENS, "prompt tokens of those in flight"),
    Column("decode_blocks", MAX_TOKENS, "KV blocks of their prompts, shared entries counted once"),
    # The gateway's prefix index.
    Column("match_tokens", MAX_TOKENS, "tokens of the prompt that the index has there"),
    Column("match_share", 1.0, "their share of the prompt"),
    Column("index_tokens", MAX_TOKENS, "tokens in the index; in a precise one all that are cached"),
    Column("index_fill", 1.0, "share of its entries in use; of the KV memory, if it is precise"),
    Column("match_age_s", MAX_SECONDS, "since the last matched entry was used"),
    Column("session_replica", 1.0, "1: the session's last request went there"),
    # Moving averages, 0 before the first measurement.
    Column("ttft_s", MAX_SECONDS, "moving average"),
    Column("ttft_error_s", MAX_SECONDS, "moving average, measured less expected", -MAX_SECONDS),
    Column("tpot_s", MAX_SECONDS, "moving average"),
    # The replica itself.
    Column("prefill_tokens_per_s", MAX_TOKENS, "of a full iteration without decodes"),
    Column("kv_tokens", MAX_TOKENS, "tokens of its KV memory"),
    Column("max_num_seqs", MAX_REQUESTS, "requests that it runs, at most"),
)
"""What is shown of each replica."""

REQUEST = (
    Column("prompt_tokens", MAX_TOKENS, "tokens of the prompt"),
    Column("predicted_tokens", MAX_TOKENS, "predicted tokens of the output"),
    Column("turn", MAX_REQUESTS, "its place in its session"),
    Column("session_gap_s", MAX_SECONDS, "since the session's last request, 0 for the first"),
    Column("tenant_heat", 1.0, "share of the recent requests that its tenant sent"),
    Column("ttft_slo_s", MAX_SECONDS, "objective of TTFT"),
    Column("tpot_slo_s", MAX_SECONDS, "objective of TPOT, s a token"),
)
"""What is shown of the request."""

SEEN_REPLICA, SEEN_REQUEST = seen(REPLICA), seen(REQUEST)
OF_REPLICA, OF_REQUEST = places(REPLICA), places(REQUEST)
REPLICA_LOW, REPLICA_HIGH = bounds(REPLICA)
REQUEST_LOW, REQUEST_HIGH = bounds(REQUEST)


@inner
def observe(gateways, row, index, now, replicas, request, replica_columns, request_columns):
    """Write what the router sees of the request, which was looked up; -1 after the last.

    ``replicas`` (N,) of `SEEN_REPLICA` and ``request``, a `SEEN_REQUEST`, lie where
    ``replica_columns`` (N, F) and ``request_columns`` (K,) do.
    """
    config, gateway = gateways.config[0], gateways.row[row]
    replica_columns[:] = 0.0
    request_columns[:] = 0.0
    prompt = 1.0
    session_replica = -1
    if index >= 0:
        asked = gateways.request[row, index]
        prompt = asked.prompt
        session_replica = gateways.session_replica[row, asked.session]
        request.prompt_tokens = asked.prompt
        request.predicted_tokens = asked.predicted
        request.turn = asked.turn
        before = gateways.session_s[row, asked.session]
        request.session_gap_s = 0.0 if math.isnan(before) else now - before
        request.tenant_heat = tenant_heat(gateways, row, asked.tenant, now)
        request.ttft_slo_s = asked.ttft_slo
        request.tpot_slo_s = asked.tpot_slo
        _clip(request_columns, REQUEST_LOW, REQUEST_HIGH)
    for n in range(gateway.replicas):
        replica, shown = gateways.replica[row, n], replicas[n]
        shown.exists = 1.0
        shown.up = replica.up
        shown.waiting = replica.waiting
        shown.running = replica.running
        shown.kv_usage = replica.usage
        shown.metrics_age_s = now - gateway.scraped_s
        shown.in_flight = replica.in_flight
        shown.prefill_tokens = replica.prefill
        shown.context_tokens = replica.context
        shown.decode_blocks = replica.blocks
        if index >= 0:
            shown.match_tokens = replica.match
            shown.match_share = replica.match / prompt
            shown.match_age_s = replica.match_age
            shown.session_replica = n == session_replica
        used = max(replica.entries, 0) * config.entry_tokens
        shown.index_tokens = used
        if config.index == PRECISE:
            shown.index_fill = used / replica.kv_tokens
        elif config.index != NO_INDEX:
            shown.index_fill = replica.entries / max(replica.capacity, 1)
        shown.ttft_s = _seconds(replica.ttft)
        shown.ttft_error_s = _seconds(replica.ttft_error)
        shown.tpot_s = _seconds(replica.tpot)
        shown.prefill_tokens_per_s = replica.speed
        shown.kv_tokens = replica.kv_tokens
        shown.max_num_seqs = replica.max_num_seqs
        _clip(replica_columns[n], REPLICA_LOW, REPLICA_HIGH)


@inner
def _clip(columns, low, high):
    for k in range(len(columns)):
        columns[k] = min(max(columns[k], low[k]), high[k])


@inner
def _seconds(measured):
    return 0.0 if math.isnan(measured) else measured


@inner
def tenant_heat(gateways, row, tenant, now):
    """Share of the recent requests that the tenant sent, 0 before the first request of all."""
    config, gateway = gateways.config[0], gateways.row[row]
    if gateway.heat == 0.0:
        return 0.0
    heat = decayed(config, gateways.tenant_heat[row, tenant], gateways.tenant_s[row, tenant], now)
    return min(heat / decayed(config, gateway.heat, gateway.heat_s, now), 1.0)
