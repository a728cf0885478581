"""Compiled engine of the prefix routing family: B independent systems of N replicas each.

Every function is a pure function of its arguments, all chance being drawn before (at reset). The
arrays are described in ``layout``; inside, ``c`` is a `CONFIG`, ``t`` `Tables`, ``s`` `Systems`,
``v`` an `ENV`, ``e`` a `REPLICA`, ``r`` a `REQUEST`, ``k`` the number of a block and ``i`` that of
a request or of a content. Units are seconds and tokens; memory is counted in KV blocks.
"""

from __future__ import annotations

import numpy as np

from servegym.envs._jit import borrowed, inner, jit
from servegym.envs.llm_routing.kernel.queues import blocks_of
from servegym.envs.prefix_routing.kernel.cache import clear_cache, find, used_blocks
from servegym.envs.prefix_routing.kernel.iterations import advance
from servegym.envs.prefix_routing.kernel.layout import (
    BLOCK,
    COMPLETED,
    COMPLETION,
    CONFIG,
    DECODE,
    ENV,
    EVENT,
    FIRST_TOKEN,
    IDLE,
    MIXED,
    NEWS,
    PENDING,
    QUEUED,
    REJECTED,
    REPLICA,
    REQUEST,
    Systems,
    Tables,
    allocate,
    lists_of,
)
from servegym.envs.prefix_routing.kernel.queues import (
    NEVER,
    append_waiting,
    expect,
    expect_children,
    locate,
    take_expected,
)

__all__ = [
    "BLOCK",
    "COMPLETED",
    "COMPLETION",
    "CONFIG",
    "DECODE",
    "ENV",
    "EVENT",
    "FIRST_TOKEN",
    "IDLE",
    "MIXED",
    "NEWS",
    "PENDING",
    "QUEUED",
    "REJECTED",
    "REPLICA",
    "REQUEST",
    "Systems",
    "Tables",
    "allocate",
    "begin",
    "bring",
    "cached",
    "finish",
    "go_to_next_arrival",
    "lists_of",
    "route",
    "run_replay",
    "used_blocks",
]


# ---------------------------------------------------------------------------------------- episodes


@inner
def _clear_replica(c, s, b, n):
    """An idle replica with empty queues and an empty cache."""
    locate(c, s, b, n)
    e = s.replica[b, n]
    e.start = 0.0
    e.end = np.inf
    e.safe = np.inf
    e.running = 0
    e.waiting = 0
    e.iteration = IDLE
    e.emitted = 0
    e.phase = 0
    e.next_finish = NEVER
    e.decoding = 0
    e.decoding_tokens = 0
    e.segment = 0
    e.oldest = -1
    e.newest = -1
    e.prefill = -1
    e.head = -1
    e.tail = -1
    e.admissions = 0
    clear_cache(c, s, e)
    for k in range(e.first_bucket, e.first_bucket + 2 * c.block_size):
        s.lists[k] = -1


@inner
def _clear_request(r):
    """A request about which nothing is known but what is given."""
    r.replica = -1
    r.outcome = PENDING
    r.preemptions = 0
    r.available = np.nan
    r.admitted = np.nan
    r.first = np.nan
    r.finish = np.nan
    r.hit = 0
    r.recomputed = 0
    r.generated = 0
    r.computed = 0
    r.decoding = 0
    r.chunk = 0
    r.lost = 0
    r.hits = 0
    r.blocks = 0
    r.named = 0
    r.own = -1


@jit
def begin(t, s, which):
    """Start a new episode in the rows b with which[b] != 0, at the first arrival.

    ``env[b].requests``, what is given of them, and profile and capacity of the replicas must be
    set.
    """
    t, s = borrowed(t), borrowed(s)
    c = t.config[0]
    for b in range(s.env.shape[0]):
        if which[b] == 0:
            continue
        v = s.env[b]
        v.expected = 0
        v.closed_loop = 0
        v.routed = 0
        v.news = 0
        v.events = 0
        first = b * c.num_requests
        for i in range(v.requests):
            s.request[first + i].first_child = -1
        for i in range(v.requests - 1, -1, -1):
            r = s.request[first + i]
            _clear_request(r)
            if r.parent >= 0:
                v.closed_loop = 1
                r.arrived = np.nan
                parent = s.request[first + r.parent]
                r.next_child = parent.first_child
                parent.first_child = i
        for i in range(v.requests):
            if s.request[first + i].parent < 0:
                expect(c, s, b, i)
        for n in range(c.num_replicas):
            _clear_replica(c, s, b, n)
        v.index = take_expected(c, s, b)
        v.now = s.request[first + v.index].arrived


# ------------------------------------------------------------------------------------------- steps


@inner
def _route(c, law, s, b, n):
    """Send the current request of row b to replica n; n < 0 rejects it.

    A request that the replica's memory can never hold is rejected, too. Returns whether it is sent.
    """
    v = s.env[b]
    i = v.index
    r = s.request[b * c.num_requests + i]
    v.routed += 1
    r.replica = n
    if n >= 0:
        e = s.replica[b, n]
        if blocks_of(c, r.prompt + r.output - 1) <= e.capacity:
            if e.end <= v.now:
                advance(c, law, s, e, v.now)
            r.available = v.now
            r.outcome = QUEUED
            append_waiting(s, e, i)
            if e.iteration == IDLE:
                e.end = min(e.end, v.now)
            e.safe = min(e.safe, e.end)
            return True
    r.outcome = REJECTED
    expect_children(c, s, b, r, v.now)
    return False


@inner
def _go_to_next_arrival(c, law, s, b):
    """Set the clock of row b to the next arrival, -1 in ``index`` if there is none any more.

    Replicas work ahead only as far as a request may complete that another one waits for.
    """
    v = s.env[b]
    while v.routed + v.expected < v.requests:
        first = 0
        for n in range(1, c.num_replicas):
            if s.replica[b, n].safe < s.replica[b, first].safe:
                first = n
        e = s.replica[b, first]
        if e.safe == np.inf:
            break
        if v.expected > 0 and e.safe > s.request[b * c.num_requests + s.expected[b, 0]].arrived:
            break
        advance(c, law, s, e, e.safe)
    if v.expected == 0:
        v.index = -1
        return
    v.index = take_expected(c, s, b)
    v.now = s.request[b * c.num_requests + v.index].arrived


@jit
def route(t, s, b, n):
    """Send the current request of row b to replica n; n < 0 rejects it.

    A request that the replica's memory can never hold is rejected, too. Returns whether it is sent.
    Who waits for a rejected request arrives its time after the rejection.
    """
    t, s = borrowed(t), borrowed(s)
    return _route(t.config[0], t.law, s, b, n)


@jit
def go_to_next_arrival(t, s, b):
    """Go on to the next request of row b, after `route`.

    ``env[b].index`` is then the request and ``env[b].now`` its arrival, or the index is -1 if none
    is left: then `finish` ends the episode. Replicas may be behind, see `bring`.
    """
    t, s = borrowed(t), borrowed(s)
    _go_to_next_arrival(t.config[0], t.law, s, b)


@jit
def bring(t, s, b, until):
    """Let every replica of row b work until ``until``, which no unknown arrival may precede.

    A replica's state, the news and the events of its row are then those of that time.
    """
    t, s = borrowed(t), borrowed(s)
    c = t.config[0]
    for n in range(c.num_replicas):
        e = s.replica[b, n]
        if e.end <= until:
            advance(c, t.law, s, e, until)


@jit
def finish(t, s, b):
    """Let every replica of row b complete what it has."""
    t, s = borrowed(t), borrowed(s)
    c = t.config[0]
    for n in range(c.num_replicas):
        advance(c, t.law, s, s.replica[b, n], np.inf)


@jit
def cached(t, s, b, n, i):
    """Whether replica n of row b holds a block with id i."""
    t, s = borrowed(t), borrowed(s)
    return find(t.config[0], s, s.replica[b, n], i) >= 0


# ------------------------------------------------------------------------------------------ replay


@jit
def run_replay(t, s, assignment):
    """Row 0 serves its requests, each at the replica ``assignment`` (J,) of its index.

    With an empty assignment the replicas take turns in the order of the arrivals.
    """
    t, s = borrowed(t), borrowed(s)
    c = t.config[0]
    v = s.env[0]
    while v.index >= 0:
        turn = v.routed % c.num_replicas
        _route(c, t.law, s, 0, assignment[v.index] if assignment.shape[0] > 0 else turn)
        _go_to_next_arrival(c, t.law, s, 0)
    for n in range(c.num_replicas):
        advance(c, t.law, s, s.replica[0, n], np.inf)
