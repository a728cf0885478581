"""The requests at an expert: their slots, the lists of these, and the KV blocks that they take."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from servegym._jit import inline, inner
from servegym.envs.llm_routing.kernel.layout import IDLE

NEVER = 1 << 60  # emissions


class Request(NamedTuple):
    """A request on its way to an expert.

    Attributes:
        index: place in the episode.
        arrived: seconds, at the router.
        available: seconds, at the expert.
        prompt: tokens.
        output: tokens.
        score: in [0, 1].
        predicted_score: in [0, 1].
        predicted_output: tokens.
    """

    index: int
    arrived: float
    available: float
    prompt: int
    output: int
    score: np.float32
    predicted_score: np.float32
    predicted_output: np.float32


# ------------------------------------------------------------------------------------------ lists


@inline
def wrap(c, i):
    """``i`` modulo the size of the ring; it is at most one turn off."""
    if i >= c.slots:
        return i - c.slots
    return i + c.slots if i < 0 else i


@inline
def ring_entry(c, e, k):
    """Where the lists hold the k-th of the waiting queue."""
    return e.first_entry + c.slots + wrap(c, e.ring_head + k)


@inline
def head_entry(c, e):
    """Where the lists hold the head of the waiting queue."""
    return e.first_entry + c.slots + e.ring_head


@inline
def head_slot(c, q, e):
    """Slot of the head of the waiting queue."""
    return e.first_slot + q.lists[head_entry(c, e)]


@inline
def waiting_slot(c, q, e, k):
    """Slot of the k-th of the waiting queue."""
    return e.first_slot + q.lists[ring_entry(c, e, k)]


@inline
def newer(c, e, i):
    """Where the lists hold the slot after i of the running list, -1 for none."""
    return e.first_entry + 2 * c.slots + i


@inline
def _older(c, e, i):
    """Where the lists hold the slot before i of the running list, -1 for none."""
    return e.first_entry + 3 * c.slots + i


@inline
def _residues(c, e):
    """Where the lists begin to count the requests by the emission that takes a block."""
    return e.first_entry + 4 * c.slots


@inline
def locate(c, b, n, e):
    """Set where slots and lists of expert n in row b begin."""
    number = b * c.max_experts + n
    e.first_slot = number * c.slots
    e.first_entry = number * (4 * c.slots + c.block_size)


@inner
def clear_expert(c, q, e):
    """An idle expert with empty queues."""
    e.start = 0.0
    e.end = np.inf
    e.iteration = IDLE
    e.emitted = 0
    e.running = 0
    e.waiting = 0
    e.ring_head = 0
    e.decoding = 0
    e.decoding_tokens = 0
    e.longest_key = -NEVER
    e.next_finish = NEVER
    e.oldest = -1
    e.newest = -1
    e.prefill = -1
    e.admissions = 0
    e.reserved = 0
    e.segment = 0
    e.used = 0
    e.settled = 0
    e.phase = 0
    e.free_head = 0
    e.free_tail = e.capacity
    e.free = 0
    for i in range(c.slots):
        q.lists[newer(c, e, i)] = i + 1
    first = _residues(c, e)
    for k in range(first, first + c.block_size):
        q.lists[k] = 0


@inline
def enqueue(c, q, e, request):
    """Put a request on its way to the expert; it waits in order of its arrival there."""
    i = e.free
    e.free = q.lists[newer(c, e, i)]
    r = q.slots[e.first_slot + i]
    r.request = request.index
    r.arrived = request.arrived
    r.available = request.available
    r.prompt = request.prompt
    r.output = request.output
    r.score = request.score
    r.predicted_score = request.predicted_score
    r.predicted_output = request.predicted_output
    r.generated = 0
    r.origin = 0
    r.computed = 0
    r.chunk = 0
    r.decoding = 0
    r.preempted = 0
    r.segment = 0
    r.segment_blocks = 0
    r.preemptions = 0
    r.admitted = np.nan
    r.first = np.nan
    k = e.waiting
    while k > 0:
        other = q.lists[ring_entry(c, e, k - 1)]
        ahead = q.slots[e.first_slot + other]
        if ahead.preempted or ahead.available <= r.available:
            break
        q.lists[ring_entry(c, e, k)] = other
        k -= 1
    q.lists[ring_entry(c, e, k)] = i
    e.waiting += 1
    if e.iteration == IDLE:
        e.end = max(e.start, q.slots[head_slot(c, q, e)].available)


@inline
def append_running(c, q, e, i):
    """Put slot i at the end of the running list."""
    q.slots[e.first_slot + i].admission = e.admissions
    e.admissions += 1
    q.lists[newer(c, e, i)] = -1
    q.lists[_older(c, e, i)] = e.newest
    if e.newest < 0:
        e.oldest = i
    else:
        q.lists[newer(c, e, e.newest)] = i
    if e.prefill < 0:
        e.prefill = i
    e.newest = i
    e.running += 1


@inline
def remove_running(c, q, e, i):
    """Take slot i out of the running list."""
    before, after = q.lists[_older(c, e, i)], q.lists[newer(c, e, i)]
    if e.prefill == i:
        e.prefill = after
    if before < 0:
        e.oldest = after
    else:
        q.lists[newer(c, e, before)] = after
    if after < 0:
        e.newest = before
    else:
        q.lists[_older(c, e, after)] = before
    e.running -= 1


@inline
def free_slot(c, q, e, i):
    """Slot i takes the next request."""
    q.lists[newer(c, e, i)] = e.free
    e.free = i


# ------------------------------------------------------------------------------------------- heap


@inline
def _ends_before(q, e, i, k):
    """Whether decoding slot i has its last token before slot k; of two at once, the older first."""
    r = q.slots[e.first_slot + i]
    other = q.slots[e.first_slot + k]
    mine = r.origin + r.output
    theirs = other.origin + other.output
    return mine < theirs or (mine == theirs and r.admission < other.admission)


@inline
def _put(q, e, place, i):
    q.lists[e.first_entry + place] = i
    q.slots[e.first_slot + i].place = place


@inline
def _rise(q, e, place, i):
    """Put slot i at ``place`` of the heap or as far above it as it belongs."""
    while place > 0:
        above = (place - 1) // 2
        k = q.lists[e.first_entry + above]
        if not _ends_before(q, e, i, k):
            break
        _put(q, e, place, k)
        place = above
    _put(q, e, place, i)


@inline
def _sink(q, e, place, i):
    """Put slot i at ``place`` of the heap or as far below it as it belongs."""
    while 2 * place + 1 < e.decoding:
        below = 2 * place + 1
        k = q.lists[e.first_entry + below]
        if below + 1 < e.decoding:
            other = q.lists[e.first_entry + below + 1]
            if _ends_before(q, e, other, k):
                below += 1
                k = other
        if not _ends_before(q, e, k, i):
            break
        _put(q, e, place, k)
        place = below
    _put(q, e, place, i)


@inline
def find_next_finish(q, e):
    """Set the count of emissions at which the next decoding request has its last token."""
    e.next_finish = NEVER
    if e.decoding > 0:
        r = q.slots[e.first_slot + q.lists[e.first_entry]]
        e.next_finish = r.origin + r.output


@inline
def pop_next(q, e):
    """Take the first request out of the heap."""
    e.decoding -= 1
    if e.decoding > 0:
        _sink(q, e, 0, q.lists[e.first_entry + e.decoding])


@inner
def _remove_decoding(q, e, place):
    """Take the request at ``place`` out of the heap."""
    e.decoding -= 1
    last = q.lists[e.first_entry + e.decoding]
    if place == e.decoding:
        return
    if place > 0 and _ends_before(q, e, last, q.lists[e.first_entry + (place - 1) // 2]):
        _rise(q, e, place, last)
    else:
        _sink(q, e, place, last)


@inner
def drop_longest(c, q, e, r):
    """Request r has left the heap: find the longest context of the others if it was r's."""
    if c.longest == 0 or r.prompt - r.origin < e.longest_key:
        return
    e.longest_key = -NEVER
    for place in range(e.decoding):
        other = q.slots[e.first_slot + q.lists[e.first_entry + place]]
        e.longest_key = max(e.longest_key, other.prompt - other.origin)


@inner
def order_heap(q, e):
    """Order the heap anew, whatever has become of the requests in it."""
    for k in range(e.decoding // 2):
        place = e.decoding // 2 - 1 - k
        _sink(q, e, place, q.lists[e.first_entry + place])
    find_next_finish(q, e)


# ----------------------------------------------------------------------------------------- memory


@inline
def blocks_of(c, tokens):
    """KV blocks of so many tokens."""
    # A product instead of a slow integer division; the half keeps it clear of rounding.
    return int((tokens + c.block_size - 0.5) * c.blocks_per_token)


@inline
def generated_tokens(e, r):
    """Tokens that a request has so far."""
    return e.emitted - r.origin if r.decoding else r.generated


@inline
def settle(c, q, e):
    """Bring ``e.used``, the left side of Eq. 4, up to the emissions so far."""
    end = e.phase + (e.emitted - e.settled)
    turns = int((end + 0.5) * c.blocks_per_token)  # in each, every decoding request takes a block
    end -= turns * c.block_size
    first = _residues(c, e)
    e.used += turns * e.decoding + q.lists[first + end] - q.lists[first + e.phase]
    e.phase = end
    e.settled = e.emitted


@inline
def _count_residue(c, q, e, tokens, blocks, change):
    """Count a decoding request of so many tokens and blocks in (1) or out (-1) of the lists."""
    first = _residues(c, e)
    full = e.phase + blocks * c.block_size - tokens
    if full >= c.block_size:
        full -= c.block_size
    for k in range(first + full + 1, first + c.block_size):
        q.lists[k] += change


@inline
def start_decoding(c, q, e, r, i):
    """Request r in slot i, the oldest whose prefill was under way, has a token more and decodes."""
    settle(c, q, e)
    r.generated += 1
    r.decoding = 1
    r.origin = e.emitted - r.generated
    tokens = r.prompt + r.generated
    blocks = blocks_of(c, tokens)
    e.used += blocks - blocks_of(c, tokens - 1)
    _count_residue(c, q, e, tokens, blocks, 1)
    e.decoding += 1
    e.decoding_tokens += tokens
    if c.longest:
        e.longest_key = max(e.longest_key, r.prompt - r.origin)
    e.prefill = q.lists[newer(c, e, i)]
    _rise(q, e, e.decoding - 1, i)


@inline
def free_blocks(c, q, e, tokens):
    """Give back the blocks of a decoding request with so many tokens by now."""
    settle(c, q, e)
    blocks = blocks_of(c, tokens)
    e.used -= blocks
    _count_residue(c, q, e, tokens, blocks, -1)
    e.decoding_tokens -= tokens


@inline
def can_take(c, e, prompt):
    """Whether an expert would queue a request of so many prompt tokens now."""
    if e.waiting >= c.waiting_capacity or e.down != 0:
        return False
    return blocks_of(c, prompt + c.max_output_tokens) <= e.capacity


@inline
def reuse_cached_blocks(c, q, e, r, blocks):
    """Prefix caching: r, which needs ``blocks``, is admitted and finds what is left of its own."""
    if r.preempted:
        gone = min(max(e.free_head - r.segment, 0), r.segment_blocks)
        cached = r.segment_blocks - gone
        # What was preempted before r waits behind r, so none of its blocks lie behind r's.
        e.free_tail -= cached
        r.computed = cached * c.block_size
        e.free_head -= cached
    e.free_head += blocks


@inner
def _preempt_newest(c, q, e):
    """Send the newest admitted request back to the head of the waiting queue."""
    i = e.newest
    r = q.slots[e.first_slot + i]
    generated = generated_tokens(e, r)
    if c.prefix_caching:
        # Its last token's block was not yet taken when it was found not to fit.
        held = r.prompt + generated - 1 if r.decoding else r.prompt + generated
        computed = held if r.decoding else r.computed
        full = computed // c.block_size
        r.segment = e.free_tail + blocks_of(c, held) - full
        r.segment_blocks = full
        e.free_tail += blocks_of(c, held)
    remove_running(c, q, e, i)
    if r.decoding:
        free_blocks(c, q, e, r.prompt + generated)
        _remove_decoding(q, e, r.place)
        drop_longest(c, q, e, r)
    else:
        e.used -= blocks_of(c, r.prompt + generated)
    e.reserved -= blocks_of(c, r.prompt + c.max_output_tokens)
    r.generated = generated
    r.decoding = 0
    r.preempted = 1
    r.computed = 0
    r.preemptions += 1
    e.ring_head = wrap(c, e.ring_head - 1)
    q.lists[head_entry(c, e)] = i
    e.waiting += 1


@inner
def make_room(c, q, e):
    """Step 2 of a boundary (paged memory): preempt until the running requests fit."""
    before = e.running
    settle(c, q, e)
    while e.used > e.capacity:
        _preempt_newest(c, q, e)
    if e.running < before:
        find_next_finish(q, e)
    if c.prefix_caching:
        # Growth of those who stay: taken from the head of the free queue.
        first = _residues(c, e)
        last = (e.phase if e.phase > 0 else c.block_size) - 1
        e.free_head += q.lists[first + e.phase] - q.lists[first + last]
        if e.phase == 0:
            e.free_head += e.decoding
    return before - e.running
