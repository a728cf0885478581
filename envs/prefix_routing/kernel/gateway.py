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
    ("index", "i8"),  # NO_INDEX, APPROXIMATE or PRECISE
    ("strict", "i8"),  # 1: a match ends at the first gap
    ("entry_tokens", "i8"),  # tokens of an entry
    ("block_size", "i8"),  # tokens of a KV block
    ("delay_s", "f8"),  # of cache events
    ("smoothing", "f8"),  # weight of a new measurement in the moving averages
    ("heat_s", "f8"),  # time constant of the tenants' heat
)
"""The arguments that all gateways share."""

ROW = record(
    ("replicas", "i8"),  # N of this row
    ("requests", "i8"),  # J of this row
    ("keys", "i8"),  # K of this row
    ("news", "i8"),  # entries taken so far
    ("scraped_s", "f8"),  # time of the last scrape
    ("heat", "f8"),  # of all tenants, at `heat_s`
    ("heat_s", "f8"),
    ("missed", "i8"),  # how often cache events were overwritten before they were taken
)
"""A gateway."""

REPLICA = record(
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
)
"""A replica, as the gateway knows it."""

REQUEST = record(
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
        holders: int64 ``(B, K)``, bit n: the replica has the entry.
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
def look_up(gateways, row, index, now):
    """Set ``match`` and ``match_age`` of every replica for the request.

    O(entries of the prompt) for a strict index; else O(entries x replicas) at worst, when the
    replicas that have an entry differ from entry to entry.
    """
    config, gateway = gateways.config[0], gateways.row[row]
    for n in range(gateway.replicas):
        replica = gateways.replica[row, n]
        replica.match = 0
        replica.match_age = 0.0
    if config.index == NO_INDEX:
        return
    first, stop = gateways.first_key[row, index], gateways.first_key[row, index + 1]
    matching = (1 << gateway.replicas) - 1
    run = first  # where the holders were last counted
    for i in range(first, stop):
        key = gateways.keys[row, i]
        holders = gateways.holders[row, key] if key >= 0 else 0
        # As in a radix tree a replica that missed one entry matches none behind it.
        if config.strict == 1:
            holders &= matching
        if holders != matching:
            _count(gateways, row, matching, run, i, now)
            matching = holders
            run = i
            if matching == 0:
                return
    _count(gateways, row, matching, run, stop, now)


@inline
def _count(gateways, row, matching, start, stop, now):
    """The keys from ``start`` to before ``stop`` match where ``matching`` has a bit."""
    if stop == start:
        return
    for n in range(gateways.row[row].replicas):
        if (matching >> n) & 1:
            replica = gateways.replica[row, n]
            replica.match += (stop - start) * gateways.config[0].entry_tokens
            i = stop - 1
            # Blocks of an output are stored before a request that has them is routed.
            while i > start and gateways.stamp[row, n, gateways.keys[row, i]] < 0:
                i -= 1
            last = gateways.stamp[row, n, gateways.keys[row, i]]
            if last >= 0:
                replica.match_age = now - gateways.request[row, last].routed


@inline
def _touch(gateways, row, index, number):
    """The replica of the approximate index now has the prompt of the request, as last used."""
    replica = gateways.replica[row, number]
    if replica.oldest < 0:
        replica.oldest = index
        replica.place = 0
    else:
        gateways.request[row, replica.newest].next = index
    gateways.request[row, index].next = -1
    replica.newest = index
    bit = 1 << number
    for i in range(gateways.first_key[row, index], gateways.first_key[row, index + 1]):
        key = gateways.keys[row, i]
        if key >= 0:
            gateways.stamp[row, number, key] = index
            if gateways.holders[row, key] & bit != 0:
                continue
            gateways.holders[row, key] |= bit
        replica.entries += 1
    _evict(gateways, row, number, replica)


@inline
def _evict(gateways, row, number, replica):
    """Remove what was used least recently at the replica until the rest fits.

    What is left of a list in order of use does not depend on when it is cut.
    """
    if replica.entries <= replica.capacity:
        return
    bit = 1 << number
    # The list in order of use needs no links: it is the entries of the requests in order of
    # routing, less those that bear the stamp of a later one.
    excess = replica.entries - replica.capacity
    oldest = replica.oldest
    first, stop = gateways.first_key[row, oldest], gateways.first_key[row, oldest + 1]
    i = first + replica.place
    while excess > 0:
        if i == stop:
            oldest = gateways.request[row, oldest].next
            first, stop = gateways.first_key[row, oldest], gateways.first_key[row, oldest + 1]
            i = first
            continue
        key = gateways.keys[row, i]
        i += 1
        if key < 0:
            excess -= 1
        elif gateways.stamp[row, number, key] == oldest:
            gateways.holders[row, key] &= ~bit
            excess -= 1
    replica.entries = replica.capacity
    replica.oldest = oldest
    replica.place = i - first


@inner
def take_events(gateways, row, events, count, now):
    """Apply the cache events that are at least ``delay_s`` old to the precise index.

    ``count`` of them were written to the ring ``events`` (E,) so far, in order of time for each
    replica: records with time, replica, id and change, 1 where a block of that content was stored,
    -1 where one was removed.
    """
    config, gateway = gateways.config[0], gateways.row[row]
    if config.index != PRECISE:
        return
    size = len(events)
    for n in range(gateway.replicas):
        replica = gateways.replica[row, n]
        if count - replica.event > size:
            gateway.missed += 1
            replica.event = count - size
        bit = 1 << n
        while replica.event < count:
            event = events[replica.event % size]
            if event.replica == n:
                # In order of time for each replica: what is too young ends the reading.
                if event.time + config.delay_s > now:
                    break
                if event.time > replica.forgotten_s:
                    replica.entries += event.change
                    shared = event.id < gateways.key_of_id.shape[1]
                    key = gateways.key_of_id[row, event.id] if shared else -1
                    if key >= 0 and event.change > 0:
                        gateways.holders[row, key] |= bit
                    elif key >= 0:
                        gateways.holders[row, key] &= ~bit
            replica.event += 1


# ------------------------------------------------------------------------------------- accounting


@inline
def decayed(config, heat, then, now):
    """What is left now of the heat that there was then."""
    return heat * math.exp((then - now) / config.heat_s)


@inner
def sent(gateways, row, index, number, now):
    """The request, looked up before, was sent to the replica; -1: it was rejected."""
    config, gateway = gateways.config[0], gateways.row[row]
    request = gateways.request[row, index]
    request.routed = now
    tenant = request.tenant
    gateway.heat = decayed(config, gateway.heat, gateway.heat_s, now) + 1.0
    gateway.heat_s = now
    heat = decayed(config, gateways.tenant_heat[row, tenant], gateways.tenant_s[row, tenant], now)
    gateways.tenant_heat[row, tenant] = heat + 1.0
    gateways.tenant_s[row, tenant] = now
    gateways.session_s[row, request.session] = now
    if number < 0:
        return
    gateways.session_replica[row, request.session] = number
    replica = gateways.replica[row, number]
    request.replica = number
    request.in_flight = 2
    request.uncached = max(request.prompt - replica.match, 0)
    replica.in_flight += 1
    replica.prefill += request.uncached
    replica.context += request.prompt
    # All prefill that is queued there, its own included: what a gateway can reckon.
    request.expected = replica.prefill / replica.speed
    entry_blocks = config.entry_tokens // config.block_size
    first, stop = gateways.first_key[row, index], gateways.first_key[row, index + 1]
    replica.blocks += _blocks(config, request.prompt) - (stop - first) * entry_blocks
    if config.index == APPROXIMATE:
        _touch(gateways, row, index, number)
    for i in range(first, stop):
        key = gateways.keys[row, i]
        if key < 0:
            replica.blocks += entry_blocks
            continue
        gateways.stamp[row, number, key] = index
        if gateways.references[row, number, key] == 0:
            replica.blocks += entry_blocks
        gateways.references[row, number, key] += 1


@inline
def _blocks(config, tokens):
    return (tokens + config.block_size - 1) // config.block_size


@inline
def _mean(config, before, measured):
    if math.isnan(before):
        return measured
    return before + config.smoothing * (measured - before)


@inner
def release(gateways, row, index):
    """The request is no longer in flight: it was completed, or lost with its replica."""
    config = gateways.config[0]
    request = gateways.request[row, index]
    if request.in_flight == 0:
        return
    number = request.replica
    replica = gateways.replica[row, number]
    if request.in_flight == 2:
        replica.prefill -= request.uncached
    request.in_flight = 0
    replica.in_flight -= 1
    replica.context -= request.prompt
    entry_blocks = config.entry_tokens // config.block_size
    first, stop = gateways.first_key[row, index], gateways.first_key[row, index + 1]
    replica.blocks -= _blocks(config, request.prompt) - (stop - first) * entry_blocks
    for i in range(first, stop):
        key = gateways.keys[row, i]
        if key >= 0:
            gateways.references[row, number, key] -= 1
        if key < 0 or gateways.references[row, number, key] == 0:
            replica.blocks -= entry_blocks


@inner
def take_news(gateways, row, news, count, requests):
    """Take note of first tokens, completions and losses.

    ``count`` of the ``news`` were written so far, none later than now, in order of time for each
    replica: records with time, request and kind, `FIRST_TOKEN`, `COMPLETION` or `LOSS`. Of the
    ``requests`` (J,) of the row the ``output`` is read, the tokens of a completed one.
    """
    config, gateway = gateways.config[0], gateways.row[row]
    while gateway.news < count:
        entry = news[gateway.news]
        gateway.news += 1
        request = gateways.request[row, entry.request]
        if entry.kind == FIRST_TOKEN:
            if request.in_flight == 2:
                replica = gateways.replica[row, request.replica]
                ttft = entry.time - request.routed
                replica.prefill -= request.uncached
                replica.ttft = _mean(config, replica.ttft, ttft)
                replica.ttft_error = _mean(config, replica.ttft_error, ttft - request.expected)
                request.in_flight = 1
                request.first = entry.time
        elif request.in_flight > 0:
            output = requests[entry.request].output
            if entry.kind == COMPLETION and request.in_flight == 1 and output > 1:
                replica = gateways.replica[row, request.replica]
                pace = (entry.time - request.first) / (output - 1)
                replica.tpot = _mean(config, replica.tpot, pace)
            release(gateways, row, entry.request)


@inner
def scraped(gateways, row, number, now, waiting, running, usage):
    """The metrics of the replica were read; those of all replicas are read at the same time."""
    gateways.row[row].scraped_s = now
    replica = gateways.replica[row, number]
    replica.waiting = waiting
    replica.running = running
    replica.usage = usage


@inner
def forget(gateways, row, number, now):
    """The replica is down: its cache and its index are lost, and its requests are released.

    The caller sets ``up`` when it is back.
    """
    gateway = gateways.row[row]
    replica = gateways.replica[row, number]
    replica.up = replica.waiting = replica.running = 0
    replica.usage = 0.0
    replica.forgotten_s = now
    for index in range(gateway.requests):
        if gateways.request[row, index].replica == number:
            release(gateways, row, index)
    bit = 1 << number
    for key in range(gateway.keys):
        gateways.holders[row, key] &= ~bit
        gateways.stamp[row, number, key] = -1
    replica.entries = replica.place = 0
    replica.oldest = replica.newest = -1
