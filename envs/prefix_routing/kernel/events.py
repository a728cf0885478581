"""What happens to a system between boundaries: its beginning, arrivals, requests that are sent."""

from __future__ import annotations

import numpy as np

from servegym._jit import inner
from servegym.envs.llm_routing.kernel.iterations import sojourn_s
from servegym.envs.llm_routing.kernel.scheduler import before, blocks_of, enqueue
from servegym.envs.prefix_routing.kernel.cache import put_in_store
from servegym.envs.prefix_routing.kernel.iterations import advance
from servegym.envs.prefix_routing.kernel.layout import (
    NO_STORE,
    PENDING,
    QUEUED,
    REJECTED,
)
from servegym.envs.prefix_routing.kernel.queues import (
    clear_replica,
    expect,
    expect_children,
    take_expected,
)


@inner
def locate(c, s, b, n):
    """Set where the parts of replica n in row b begin in the arrays."""
    e = s.replica[b, n]
    number = b * c.num_replicas + n
    e.row = b
    e.number = n
    e.first_request = b * c.num_requests
    e.first_block = number * (c.blocks + 1)
    owned = c.entries + c.max_running + 2 * c.block_size
    of_row = b * (c.num_replicas * owned + 2 * c.num_requests)
    e.first_entry = of_row + n * owned
    e.first_place = e.first_entry + c.entries
    e.first_bucket = e.first_place + c.max_running
    e.first_link = of_row + c.num_replicas * owned


@inner
def clear_request(r):
    """A request about which nothing is known but what is given."""
    r.replica = -1
    r.outcome = PENDING
    r.preemptions = 0
    r.available = np.nan
    r.admitted = np.nan
    r.first = np.nan
    r.finish = np.nan
    r.hit = 0
    r.stored = 0
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


@inner
def begin_row(c, s, b):
    """Start a new episode in row b, before its first arrival.

    ``env[b].requests``, what is given of them, ``env[b].failure_seed`` where replicas fail, and
    profile and capacity of the replicas must be set.
    """
    v = s.env[b]
    v.now = 0.0
    v.index = -1
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
        clear_request(r)
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
        locate(c, s, b, n)
        e = s.replica[b, n]
        clear_replica(c, s, e)
        e.down = 0
        e.changes = 0
        e.failed = -np.inf
        e.next_change = np.inf
        if c.uptime_s > 0.0:
            e.next_change = sojourn_s(c, v.failure_seed, n, 0)


@inner
def route_request(c, law, s, b, n):
    """Send the current request of row b to replica n; n < 0 rejects it.

    A request that the replica's memory can never hold, or whose replica is down, is rejected, too.
    Returns whether it is sent.
    Who waits for a rejected request arrives its time after the rejection.
    """
    v = s.env[b]
    i = v.index
    r = s.request[b * c.num_requests + i]
    v.routed += 1
    r.replica = n
    if n >= 0:
        e = s.replica[b, n]
        until = before(v.now)
        if e.end <= until or e.next_change <= until:
            advance(c, law, s, e, until)
        if e.down == 0 and blocks_of(c, r.prompt + r.output - 1) <= e.capacity:
            r.available = v.now
            r.outcome = QUEUED
            if c.store != NO_STORE:
                r.stored = put_in_store(c, s, e, r)
            enqueue(s, e, r, i)
            e.safe = min(e.safe, e.end)
            return True
    r.outcome = REJECTED
    expect_children(c, s, b, r, v.now)
    return False


@inner
def next_to_work(c, s, b):
    """The replica that must work until its ``safe`` before the next arrival is known, -1 for none.

    A request that another one waits for may complete there before the arrivals that are known; of
    a boundary and an arrival at one moment the arrival comes first.
    """
    v = s.env[b]
    if v.routed + v.expected == v.requests:
        return -1
    first = 0
    for n in range(1, c.num_replicas):
        if s.replica[b, n].safe < s.replica[b, first].safe:
            first = n
    safe = s.replica[b, first].safe
    if safe == np.inf:
        return -1
    if v.expected > 0 and safe >= s.request[b * c.num_requests + s.expected[b, 0]].arrived:
        return -1
    return first


@inner
def take_arrival(c, s, b):
    """Set the clock of row b to the next arrival, and ``index`` to -1 if there is none."""
    v = s.env[b]
    v.index = -1
    if v.expected > 0:
        v.index = take_expected(c, s, b)
        v.now = s.request[b * c.num_requests + v.index].arrived
