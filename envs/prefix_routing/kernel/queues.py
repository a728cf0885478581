"""The requests of a system: those expected, and how those at a replica come, take blocks and go.

The decoding requests stand in K lists by the count of emissions, modulo K, at which they take a
block.
"""

from __future__ import annotations

import numpy as np

from servegym._jit import inline, inner
from servegym.envs.llm_routing.kernel.scheduler import (
    clear_scheduler,
    leave_running,
    newer,
    request_of,
    requeue,
    start_decoding,
    stop_decoding,
)
from servegym.envs.prefix_routing.kernel.cache import clear_cache, release_blocks
from servegym.envs.prefix_routing.kernel.layout import COMPLETION, FAILED, LOSS


@inner
def clear_replica(c, s, e):
    """An idle replica with empty queues and an empty cache."""
    clear_scheduler(e)
    e.safe = np.inf
    clear_cache(c, s, e)
    for k in range(e.first_bucket, e.first_bucket + 2 * c.block_size):
        s.lists[k] = -1


# ---------------------------------------------------------------------------------------- arrivals


@inline
def _comes_before(s, v_first, i, k):
    """Whether request i arrives before request k; of two at once, the one with the lower index."""
    mine, theirs = s.request[v_first + i].arrived, s.request[v_first + k].arrived
    return mine < theirs or (mine == theirs and i < k)


@inner
def expect(c, s, b, i):
    """Put request i of row b, whose arrival is known now, among the expected ones."""
    v = s.env[b]
    first = b * c.num_requests
    place = v.expected
    v.expected += 1
    while place > 0:
        above = (place - 1) // 2
        k = s.expected[b, above]
        if not _comes_before(s, first, i, k):
            break
        s.expected[b, place] = k
        place = above
    s.expected[b, place] = i


@inner
def take_expected(c, s, b):
    """Take the next request to arrive out of the expected ones of row b."""
    v = s.env[b]
    first = b * c.num_requests
    found = s.expected[b, 0]
    v.expected -= 1
    last = s.expected[b, v.expected]
    place = 0
    while 2 * place + 1 < v.expected:
        below = 2 * place + 1
        k = s.expected[b, below]
        if below + 1 < v.expected and _comes_before(s, first, s.expected[b, below + 1], k):
            below += 1
            k = s.expected[b, below]
        if not _comes_before(s, first, k, last):
            break
        s.expected[b, place] = k
        place = below
    s.expected[b, place] = last
    return found


@inner
def expect_children(c, s, b, r, time):
    """Request r of row b is done: those that wait for it arrive their time after it."""
    i = r.first_child
    while i >= 0:
        child = s.request[b * c.num_requests + i]
        child.arrived = time + child.think
        expect(c, s, b, i)
        i = child.next_child


@inline
def tell_news(s, e, i, kind, time):
    """A gateway sees the first token or the end of request i."""
    v = s.env[e.row]
    entry = s.news[e.row, v.news]
    entry.t = time
    entry.request = i
    entry.kind = kind
    v.news += 1


# ---------------------------------------------------------------------------------------- decoding


@inline
def _bucket(c, e, r):
    """Where the lists hold the oldest of those who take a block in the same iterations as r."""
    # Scheduled with K n + 1 tokens it takes a block; it has emitted - origin of its own then.
    return e.first_bucket + (r.origin + 1 - r.prompt) % c.block_size


@inner
def begin_decoding(c, s, e, r, i):
    """Request r, the oldest whose prefill was under way, has a token more and decodes from now."""
    start_decoding(c, s, e, r, i)
    oldest = _bucket(c, e, r)
    newest = oldest + c.block_size
    r.grow_before = s.lists[newest]
    r.grow_after = -1
    if r.grow_before < 0:
        s.lists[oldest] = i
    else:
        request_of(s, e, r.grow_before).grow_after = i
    s.lists[newest] = i


@inner
def take_out(c, s, e, r, i):
    """A request leaves the running list and gives back its blocks."""
    if r.decoding:
        oldest = _bucket(c, e, r)
        if r.grow_before < 0:
            s.lists[oldest] = r.grow_after
        else:
            request_of(s, e, r.grow_before).grow_after = r.grow_after
        if r.grow_after < 0:
            s.lists[oldest + c.block_size] = r.grow_before
        else:
            request_of(s, e, r.grow_after).grow_before = r.grow_before
        stop_decoding(c, s, e, r)
    leave_running(s, e, i)
    release_blocks(c, s, e, r)


@inner
def leave(c, s, e, i, now):
    """Request i has its last token: it gives back its blocks, and who waits for it may come."""
    r = request_of(s, e, i)
    take_out(c, s, e, r, i)
    r.finish = now
    tell_news(s, e, i, COMPLETION, now)
    expect_children(c, s, e.row, r, now)


@inner
def preempt_newest(c, s, e):
    """Send the newest admitted request back to the head of the waiting queue."""
    i = e.newest
    r = request_of(s, e, i)
    take_out(c, s, e, r, i)
    r.lost = r.computed
    requeue(s, e, r, i)


@inner
def _lose(c, s, e, i, now):
    r = request_of(s, e, i)
    r.outcome = FAILED
    r.decoding = 0
    tell_news(s, e, i, LOSS, now)
    expect_children(c, s, e.row, r, now)


@inner
def fail(c, s, e, now):
    """A replica dies: all that it runs, queues and has cached is lost."""
    for first in (e.oldest, e.head):
        i = first
        while i >= 0:
            _lose(c, s, e, i, now)
            i = newer(s, e, i)
    clear_replica(c, s, e)
