"""The requests of a system: those expected, waiting, running, and decoding by what comes next.

The decoding requests stand in a heap by their last token, and in K lists by the count of emissions,
modulo K, at which they take a block.
"""

from __future__ import annotations

import numpy as np

from servegym._jit import inline, inner
from servegym.envs.prefix_routing.kernel.cache import clear_cache, release_blocks
from servegym.envs.prefix_routing.kernel.layout import COMPLETION, FAILED, IDLE, LOSS, request_of

NEVER = 1 << 60  # emissions


@inner
def clear_replica(c, s, e):
    """An idle replica with empty queues and an empty cache."""
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
    e.longest_key = -NEVER
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


# ------------------------------------------------------------------------------------------- lists


@inline
def append_waiting(s, e, i):
    """Put request i at the end of the waiting queue."""
    request_of(s, e, i).newer = -1
    if e.tail < 0:
        e.head = i
    else:
        request_of(s, e, e.tail).newer = i
    e.tail = i
    e.waiting += 1


@inline
def prepend_waiting(s, e, i):
    """Put request i at the head of the waiting queue."""
    request_of(s, e, i).newer = e.head
    if e.head < 0:
        e.tail = i
    e.head = i
    e.waiting += 1


@inline
def pop_waiting(s, e):
    """Take the head of the waiting queue out of it."""
    e.head = request_of(s, e, e.head).newer
    if e.head < 0:
        e.tail = -1
    e.waiting -= 1


@inline
def append_running(s, e, r, i):
    """Put request r, number i, at the end of the running list."""
    r.admission = e.admissions
    e.admissions += 1
    r.newer = -1
    r.older = e.newest
    if e.newest < 0:
        e.oldest = i
    else:
        request_of(s, e, e.newest).newer = i
    if e.prefill < 0:
        e.prefill = i
    e.newest = i
    e.running += 1


@inline
def remove_running(s, e, r, i):
    """Take request r, number i, out of the running list."""
    if e.prefill == i:
        e.prefill = r.newer
    if r.older < 0:
        e.oldest = r.newer
    else:
        request_of(s, e, r.older).newer = r.newer
    if r.newer < 0:
        e.newest = r.older
    else:
        request_of(s, e, r.newer).older = r.older
    e.running -= 1


# -------------------------------------------------------------------------------------------- heap


@inline
def _ends_before(s, e, i, k):
    """Whether decoding request i has its last token before k; of two at once, the older first."""
    r = request_of(s, e, i)
    other = request_of(s, e, k)
    mine = r.origin + r.output
    theirs = other.origin + other.output
    return mine < theirs or (mine == theirs and r.admission < other.admission)


@inline
def _put(s, e, place, i):
    s.lists[e.first_place + place] = i
    request_of(s, e, i).place = place


@inner
def _rise(s, e, place, i):
    """Put request i at ``place`` of the heap or as far above it as it belongs."""
    while place > 0:
        above = (place - 1) // 2
        k = s.lists[e.first_place + above]
        if not _ends_before(s, e, i, k):
            break
        _put(s, e, place, k)
        place = above
    _put(s, e, place, i)


@inner
def _sink(s, e, place, i):
    """Put request i at ``place`` of the heap or as far below it as it belongs."""
    while 2 * place + 1 < e.decoding:
        below = 2 * place + 1
        k = s.lists[e.first_place + below]
        if below + 1 < e.decoding:
            other = s.lists[e.first_place + below + 1]
            if _ends_before(s, e, other, k):
                below += 1
                k = other
        if not _ends_before(s, e, k, i):
            break
        _put(s, e, place, k)
        place = below
    _put(s, e, place, i)


@inline
def find_next_finish(s, e):
    """Set the count of emissions at which the next decoding request has its last token."""
    e.next_finish = NEVER
    if e.decoding > 0:
        r = request_of(s, e, s.lists[e.first_place])
        e.next_finish = r.origin + r.output


@inner
def _remove_decoding(s, e, place):
    """Take the request at ``place`` out of the heap; ``e.decoding`` is one less by now."""
    last = s.lists[e.first_place + e.decoding]
    if place == e.decoding:
        return
    if place > 0 and _ends_before(s, e, last, s.lists[e.first_place + (place - 1) // 2]):
        _rise(s, e, place, last)
    else:
        _sink(s, e, place, last)


# ---------------------------------------------------------------------------------------- decoding


@inline
def _bucket(c, e, r):
    """Where the lists hold the oldest of those who take a block in the same iterations as r."""
    # Scheduled with K n + 1 tokens it takes a block; it has emitted - origin of its own then.
    return e.first_bucket + (r.origin + 1 - r.prompt) % c.block_size


@inner
def start_decoding(c, s, e, r, i):
    """Request r, the oldest whose prefill was under way, has a token more and decodes from now."""
    r.generated += 1
    r.decoding = 1
    r.origin = e.emitted - r.generated
    e.decoding += 1
    e.decoding_tokens += r.prompt + r.generated
    if c.longest:
        e.longest_key = max(e.longest_key, r.prompt - r.origin)
    e.prefill = r.newer
    _rise(s, e, e.decoding - 1, i)
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
def stop_decoding(c, s, e, r):
    """A running request decodes no more: it leaves the heap and the list of who takes a block."""
    r.generated = e.emitted - r.origin
    e.decoding -= 1
    e.decoding_tokens -= r.prompt + r.generated
    _remove_decoding(s, e, r.place)
    if c.longest and r.prompt - r.origin >= e.longest_key:
        e.longest_key = -NEVER
        for place in range(e.decoding):
            other = request_of(s, e, s.lists[e.first_place + place])
            e.longest_key = max(e.longest_key, other.prompt - other.origin)
    oldest = _bucket(c, e, r)
    if r.grow_before < 0:
        s.lists[oldest] = r.grow_after
    else:
        request_of(s, e, r.grow_before).grow_after = r.grow_after
    if r.grow_after < 0:
        s.lists[oldest + c.block_size] = r.grow_before
    else:
        request_of(s, e, r.grow_after).grow_before = r.grow_before
    r.decoding = 0


@inner
def leave(c, s, e, i, now):
    """Request i has its last token: it gives back its blocks, and who waits for it may come."""
    r = request_of(s, e, i)
    stop_decoding(c, s, e, r)
    remove_running(s, e, r, i)
    release_blocks(c, s, e, r)
    r.finish = now
    tell_news(s, e, i, COMPLETION, now)
    expect_children(c, s, e.row, r, now)


@inner
def preempt_newest(c, s, e):
    """Send the newest admitted request back to the head of the waiting queue."""
    i = e.newest
    r = request_of(s, e, i)
    if r.decoding:
        stop_decoding(c, s, e, r)
        r.computed = r.prompt + r.generated - 1  # its last token is only input so far
    remove_running(s, e, r, i)
    release_blocks(c, s, e, r)
    r.lost = r.computed
    r.computed = 0
    r.preemptions += 1
    prepend_waiting(s, e, i)


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
    i = e.oldest
    while i >= 0:
        after = request_of(s, e, i).newer
        _lose(c, s, e, i, now)
        i = after
    i = e.head
    while i >= 0:
        after = request_of(s, e, i).newer
        _lose(c, s, e, i, now)
        i = after
    clear_replica(c, s, e)
