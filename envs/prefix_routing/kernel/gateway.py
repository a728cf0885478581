"""What a gateway knows: its prefix index, its own accounting, the metrics it scraped.

The engine is not read here: the gateway is told of routed requests, first tokens, completions,
scrapes and cache events. B is the number of systems, N of replicas, J of requests of an episode, K
of index entries that several of them have; an entry of one request alone has the number -1, as
nobody finds it and nothing but its turn to be evicted needs to be known of it.

**Approximate index**, as in llm-d's ``approximateprefix``: for each replica a list of at most
``capacity`` entries, the least recently used evicted first, filled with the prompt of a request
when the request is routed there. An entry stands for ``entry_tokens`` tokens with all before them.
A match counts the entries of the prompt that the replica has, up to the first entry that no replica
has; gaps that eviction left are not noticed. With ``strict`` the match ends at the first gap, as in
the radix trees of SGLang and production-stack; those hold characters instead of blocks, which is
not modelled.

**Precise index**, as built from the engines' cache events: a replica has an entry from
``delay_s`` after a block of that content was stored until ``delay_s`` after one was removed, even
if a block of equal content is left. An entry is a block, and matches are strict.

The list in order of use needs no links: ``stamp`` names the last request that touched an entry at a
replica, and the entries of the requests in order of routing, less those touched again later, are
the list.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from servegym._jit import inline, inner, record

NO_INDEX, APPROXIMATE, PRECISE = 0, 1, 2  # config.index
FIRST_TOKEN, COMPLETION = 0, 1  # kinds of news
MAX_REPLICAS = 62  # bits of an entry of `Gateway.holders`


CONFIG = record(
    [
        ("index", "i8"),  # NO_INDEX, APPROXIMATE or PRECISE
        ("strict", "i8"),  # 1: a match ends at the first gap
        ("entry_tokens", "i8"),  # tokens of an entry
        ("block_size", "i8"),  # tokens of a KV block
        ("delay_s", "f8"),  # of cache events
        ("smoothing", "f8"),  # weight of a new measurement in the moving averages
        ("heat_s", "f8"),  # time constant of the tenants' heat
    ]
)
"""The arguments that all gateways share."""

ROW = record(
    [
        ("replicas", "i8"),  # N of this row
        ("requests", "i8"),  # J of this row
        ("keys", "i8"),  # K of this row
        ("news", "i8"),  # entries taken so far
        ("scraped_s", "f8"),  # time of the last scrape
        ("heat", "f8"),  # of all tenants, at `heat_s`
        ("heat_s", "f8"),
        ("missed", "i8"),  # how often cache events were overwritten before they were taken
    ]
)
"""A gateway."""

REPLICA = record(
    [
        # Given.
        ("speed", "f8"),  # prefill tokens/s
        ("kv_tokens", "i8"),  # tokens of its KV memory
        ("max_num_seqs", "i8"),  # requests that it runs, at most
        ("capacity", "i8"),  # entries of its index, at most
        ("up", "i8"),  # 1: it takes requests
        # Scraped.
        ("waiting", "i8"),  # requests
        ("running", "i8"),  # requests
        ("usage", "f8"),  # share of the KV blocks in use
        # Own accounting of the requests in flight.
        ("in_flight", "i8"),  # requests
        ("prefill", "i8"),  # uncached prompt tokens of those without a first token
        ("context", "i8"),  # prompt tokens
        ("blocks", "i8"),  # KV blocks of their prompts, shared entries counted once
        # Moving averages, NaN before the first measurement.
        ("ttft", "f8"),  # s
        ("ttft_error", "f8"),  # s, measured less expected at the routing
        ("tpot", "f8"),  # s/token
        # Index.
        ("entries", "i8"),  # in use; of a precise index all cached blocks
        ("oldest", "i8"),  # request in its history with the least recently used entry; -1: none
        ("newest", "i8"),  # last request in its history
        ("place", "i8"),  # entry of the oldest one's prompt from where eviction goes on
        ("event", "i8"),  # events of the row looked at so far
        ("forgotten_s", "f8"),  # events before are of a cache that is lost
        # Of the request that is looked up.
        ("match", "i8"),  # tokens
        ("match_age", "f8"),  # s since the last matched entry was used, 0 without a match
    ]
)
"""A replica, as the gateway knows it."""

REQUEST = record(
    [
        ("prompt", "i8"),  # tokens
        ("predicted", "f8"),  # tokens of the output
        ("ttft_slo", "f8"),  # s
        ("tpot_slo", "f8"),  # s/token
        ("session", "i4"),
        ("tenant", "i4"),
        ("turn", "i4"),
        ("replica", "i4"),  # -1: not routed, or rejected
        ("in_flight", "i4"),  # 2: without a first token, 1: with one, 0: ended or not routed
        ("next", "i4"),  # in the history of its replica, -1: the last
        ("uncached", "i8"),  # prompt tokens that the index had not
        ("expected", "f8"),  # s to the first token, when it was routed
        ("routed", "f8"),  # s
        ("first", "f8"),  # s, first token
    ]
)
"""A request."""


class Gateway(NamedTuple):
    """The state of B gateways.

    Attributes:
        config: ``(1,)`` `CONFIG`.
        row: ``(B,)`` `ROW`.
        replica: ``(B, N)`` `REPLICA`.
        request: ``(B, J)`` `REQUEST`.
        first_key: int64 ``(B, J + 1)``, request j has the keys from ``first_key[b, j]`` on.
        keys: int32 ``(B, Q)``, entries of the prompts as numbers below K, -1 for those of one
            request alone.
        key_of_id: int32 ``(B, M)``, entry of a block id, -1 for none; M is 0 unless the index is
            precise.
        holders: int64 ``(B, K)``, bit n: replica n has the entry.
        stamp: int32 ``(B, N, K)``, last request routed there that has the entry, -1 for none.
        references: uint16 ``(B, N, K)``, requests in flight there that have the entry.
        session_replica: int32 ``(B, S)``, of the last request, -1 for none.
        session_s: float64 ``(B, S)``, when the last request came, NaN for none.
        tenant_heat: float64 ``(B, T)``, at ``tenant_s``.
        tenant_s: float64 ``(B, T)``.
    """

    config: np.ndarray
    row: np.ndarray
    replica: np.ndarray
    request: np.ndarray
    first_key: np.ndarray
    keys: np.ndarray
    key_of_id: np.ndarray
    holders: np.ndarray
    stamp: np.ndarray
    references: np.ndarray
    session_replica: np.ndarray
    session_s: np.ndarray
    tenant_heat: np.ndarray
    tenant_s: np.ndarray


# ----------------------------------------------------------------------------------- prefix index


@inner
def look_up(g, b, j, now):
    """Set ``match`` and ``match_age`` of every replica for request j.

    O(entries of the prompt) for a strict index; else O(entries x replicas) at worst, when the
    replicas that have an entry differ from entry to entry.
    """
    c = g.config[0]
    v = g.row[b]
    for n in range(v.replicas):
        p = g.replica[b, n]
        p.match = 0
        p.match_age = 0.0
    if c.index == NO_INDEX:
        return
    first, stop = g.first_key[b, j], g.first_key[b, j + 1]
    held = (1 << v.replicas) - 1
    run = first  # where the holders were last counted
    for i in range(first, stop):
        key = g.keys[b, i]
        holders = g.holders[b, key] if key >= 0 else 0
        if c.strict == 1:
            holders &= held
        if holders != held:
            _count(g, b, held, run, i, now)
            held = holders
            run = i
            if held == 0:
                return
    _count(g, b, held, run, stop, now)


@inline
def _count(g, b, held, start, stop, now):
    """The entries from ``start`` to before ``stop`` of the keys match where ``held`` has a bit."""
    if stop == start:
        return
    for n in range(g.row[b].replicas):
        if (held >> n) & 1:
            p = g.replica[b, n]
            p.match += (stop - start) * g.config[0].entry_tokens
            i = stop - 1
            # Blocks of an output are stored before a request that has them is routed.
            while i > start and g.stamp[b, n, g.keys[b, i]] < 0:
                i -= 1
            last = g.stamp[b, n, g.keys[b, i]]
            if last >= 0:
                p.match_age = now - g.request[b, last].routed


@inline
def _touch(g, b, j, n):
    """Replica n of the approximate index now has the prompt of request j, as last used."""
    p = g.replica[b, n]
    if p.oldest < 0:
        p.oldest = j
        p.place = 0
    else:
        g.request[b, p.newest].next = j
    g.request[b, j].next = -1
    p.newest = j
    bit = 1 << n
    for i in range(g.first_key[b, j], g.first_key[b, j + 1]):
        key = g.keys[b, i]
        if key >= 0:
            g.stamp[b, n, key] = j
            if g.holders[b, key] & bit != 0:
                continue
            g.holders[b, key] |= bit
        p.entries += 1
    _evict(g, b, n, p)


@inline
def _evict(g, b, n, p):
    """Remove what was used least recently at replica n until the rest fits.

    What is left of a list in order of use does not depend on when it is cut.
    """
    if p.entries <= p.capacity:
        return
    bit = 1 << n
    excess = p.entries - p.capacity
    oldest = p.oldest
    first, stop = g.first_key[b, oldest], g.first_key[b, oldest + 1]
    i = first + p.place
    while excess > 0:
        if i == stop:
            oldest = g.request[b, oldest].next
            first, stop = g.first_key[b, oldest], g.first_key[b, oldest + 1]
            i = first
            continue
        key = g.keys[b, i]
        i += 1
        if key < 0:
            excess -= 1
        elif g.stamp[b, n, key] == oldest:
            g.holders[b, key] &= ~bit
            excess -= 1
    p.entries = p.capacity
    p.oldest = oldest
    p.place = i - first


@inner
def take_events(g, b, events, count, now):
    """Apply the cache events that are at least ``delay_s`` old to the precise index.

    Args:
        g: The gateways.
        b: Row.
        events: (E,) ring of records with t, replica, id and change: 1 where a block of that content
            was stored, -1 where one was removed; in order of time for each replica.
        count: Events written so far.
        now: Seconds.
    """
    c = g.config[0]
    v = g.row[b]
    if c.index != PRECISE:
        return
    size = len(events)
    for n in range(v.replicas):
        p = g.replica[b, n]
        if count - p.event > size:
            v.missed += 1
            p.event = count - size
        bit = 1 << n
        while p.event < count:
            e = events[p.event % size]
            if e.replica == n:
                if e.t + c.delay_s > now:
                    break
                if e.t > p.forgotten_s:
                    p.entries += e.change
                    key = g.key_of_id[b, e.id] if e.id < g.key_of_id.shape[1] else -1
                    if key >= 0 and e.change > 0:
                        g.holders[b, key] |= bit
                    elif key >= 0:
                        g.holders[b, key] &= ~bit
            p.event += 1


# ------------------------------------------------------------------------------------- accounting


@inner
def sent(g, b, j, n, now):
    """Request j, looked up before, was sent to replica n; -1: it was rejected."""
    c = g.config[0]
    v = g.row[b]
    r = g.request[b, j]
    r.routed = now
    v.heat = v.heat * math.exp((v.heat_s - now) / c.heat_s) + 1.0
    v.heat_s = now
    heat = g.tenant_heat[b, r.tenant] * math.exp((g.tenant_s[b, r.tenant] - now) / c.heat_s)
    g.tenant_heat[b, r.tenant] = heat + 1.0
    g.tenant_s[b, r.tenant] = now
    g.session_s[b, r.session] = now
    if n < 0:
        return
    g.session_replica[b, r.session] = n
    p = g.replica[b, n]
    r.replica = n
    r.in_flight = 2
    r.uncached = max(r.prompt - p.match, 0)
    p.in_flight += 1
    p.prefill += r.uncached
    p.context += r.prompt
    r.expected = p.prefill / p.speed
    entry_blocks = c.entry_tokens // c.block_size
    first, stop = g.first_key[b, j], g.first_key[b, j + 1]
    p.blocks += _blocks(c, r.prompt) - (stop - first) * entry_blocks
    if c.index == APPROXIMATE:
        _touch(g, b, j, n)
    for i in range(first, stop):
        key = g.keys[b, i]
        if key < 0:
            p.blocks += entry_blocks
            continue
        g.stamp[b, n, key] = j
        if g.references[b, n, key] == 0:
            p.blocks += entry_blocks
        g.references[b, n, key] += 1


@inline
def _blocks(c, tokens):
    return (tokens + c.block_size - 1) // c.block_size


@inline
def _mean(c, before, measured):
    if math.isnan(before):
        return measured
    return before + c.smoothing * (measured - before)


@inline
def _first_token(g, b, r, t):
    p = g.replica[b, r.replica]
    p.prefill -= r.uncached
    r.in_flight = 1
    r.first = t
    p.ttft = _mean(g.config[0], p.ttft, t - r.routed)
    p.ttft_error = _mean(g.config[0], p.ttft_error, t - r.routed - r.expected)


@inner
def release(g, b, j):
    """Request j is no longer in flight: it was completed, or lost with its replica."""
    c = g.config[0]
    r = g.request[b, j]
    if r.in_flight == 0:
        return
    n = r.replica
    p = g.replica[b, n]
    if r.in_flight == 2:
        p.prefill -= r.uncached
    r.in_flight = 0
    p.in_flight -= 1
    p.context -= r.prompt
    entry_blocks = c.entry_tokens // c.block_size
    first, stop = g.first_key[b, j], g.first_key[b, j + 1]
    p.blocks -= _blocks(c, r.prompt) - (stop - first) * entry_blocks
    for i in range(first, stop):
        key = g.keys[b, i]
        if key >= 0:
            g.references[b, n, key] -= 1
        if key < 0 or g.references[b, n, key] == 0:
            p.blocks -= entry_blocks


@inner
def take_news(g, b, news, count, request):
    """Take note of first tokens, completions and losses.

    Args:
        g: The gateways.
        b: Row.
        news: Records with t, request and kind, `FIRST_TOKEN`, `COMPLETION` or `LOSS`, none later
            than now; in order of time for each replica.
        count: Entries written so far.
        request: (J,) records of the row with ``output``, the tokens of a completed request.
    """
    v = g.row[b]
    while v.news < count:
        e = news[v.news]
        v.news += 1
        r = g.request[b, e.request]
        if e.kind == FIRST_TOKEN:
            if r.in_flight == 2:
                _first_token(g, b, r, e.t)
        elif r.in_flight > 0:
            if e.kind == COMPLETION and r.in_flight == 1 and request[e.request].output > 1:
                p = g.replica[b, r.replica]
                pace = (e.t - r.first) / (request[e.request].output - 1)
                p.tpot = _mean(g.config[0], p.tpot, pace)
            release(g, b, e.request)


@inner
def scraped(g, b, n, now, waiting, running, usage):
    """The metrics of replica n were read; those of all replicas are read at the same time."""
    g.row[b].scraped_s = now
    p = g.replica[b, n]
    p.waiting = waiting
    p.running = running
    p.usage = usage


@inner
def forget(g, b, n, now):
    """Replica n is down: its cache and its index are lost, and its requests are released.

    The caller sets ``up`` when it is back.
    """
    v = g.row[b]
    p = g.replica[b, n]
    p.up = 0
    p.waiting = 0
    p.running = 0
    p.usage = 0.0
    p.forgotten_s = now
    for j in range(v.requests):
        if g.request[b, j].replica == n:
            release(g, b, j)
    bit = 1 << n
    for key in range(v.keys):
        g.holders[b, key] &= ~bit
        g.stamp[b, n, key] = -1
    p.entries = 0
    p.oldest = -1
    p.newest = -1
    p.place = 0
