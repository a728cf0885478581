"""The requests at an expert: their slots, the lists of these, and the KV blocks that they take."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from servegym.envs._jit import inline, inner
from servegym.envs.llm_routing.kernel.layout import CAPACITY, EXPERT_WIDTH, IDLE

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
def locate(c, b, n, e):
    """Set where slots and lists of expert n in row b begin."""
    number = b * c.num_experts + n
    e.first_slot = number * c.slots
    e.first_entry = number * (3 * c.slots + c.block_size)


@inner
def clear_expert(c, law, n, q, e):
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
    e.free_tail = int(law[n * EXPERT_WIDTH + CAPACITY])
    e.free = c.slots
    for i in range(c.slots):
        q.lists[e.first_entry + 2 * c.slots + i] = c.slots - 1 - i
    for k in range(c.block_size):
        q.lists[e.first_entry + 3 * c.slots + k] = 0


@inline
def enqueue(c, q, e, request):
    """Put a request on its way to the expert; it waits in order of its arrival there."""
    e.free -= 1
    i = q.lists[e.first_entry + 2 * c.slots + e.free]
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
def append_running(q, e, i):
    """Put slot i at the end of the running list."""
    r = q.slots[e.first_slot + i]
    r.older = e.newest
    r.newer = -1
    r.admission = e.admissions
    e.admissions += 1
    if e.newest < 0:
        e.oldest = i
    else:
        q.slots[e.first_slot + e.newest].newer = i
    if e.prefill < 0:
        e.prefill = i
    e.newest = i
    e.running += 1


@inline
def remove_running(q, e, i):
    """Take slot i out of the running list."""
    r = q.slots[e.first_slot + i]
    if e.prefill == i:
        e.prefill = r.newer
    if r.older < 0:
        e.oldest = r.newer
    else:
        q.slots[e.first_slot + r.older].newer = r.newer
    if r.newer < 0:
        e.newest = r.older
    else:
        q.slots[e.first_slot + r.newer].older = r.older
    e.running -= 1


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


@inner
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


@inner
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


@inner
def settle(c, q, e):
    """Bring ``e.used``, the left side of Eq. 4, up to the emissions so far."""
    steps = e.emitted - e.settled
    if steps == 0:
        return
    e.settled = e.emitted
    if steps >= c.block_size:
        turns = int((steps + 0.5) * c.blocks_per_token)  # every request takes a block in each
        e.used += turns * e.decoding
        steps -= turns * c.block_size
    first = e.first_entry + 3 * c.slots
    end = e.phase + steps
    for k in range(e.phase, min(end, c.block_size)):
        e.used += q.lists[first + k]
    if end >= c.block_size:
        end -= c.block_size
        for k in range(end):
            e.used += q.lists[first + k]
    e.phase = end


@inline
def _residue(c, e, blocks, tokens):
    """Which of the last counts in the lists has a decoding request of so many blocks and tokens."""
    k = e.phase + blocks * c.block_size - tokens
    return e.first_entry + 3 * c.slots + (k - c.block_size if k >= c.block_size else k)


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
    q.lists[_residue(c, e, blocks, tokens)] += 1
    e.decoding += 1
    e.decoding_tokens += tokens
    e.prefill = r.newer
    _rise(q, e, e.decoding - 1, i)


@inline
def stop_decoding(c, q, e, r, tokens):
    """Request r, with so many tokens by now, gives back its blocks; returns their count."""
    settle(c, q, e)
    blocks = blocks_of(c, tokens)
    e.used -= blocks
    q.lists[_residue(c, e, blocks, tokens)] -= 1
    e.decoding -= 1
    e.decoding_tokens -= tokens
    last = q.lists[e.first_entry + e.decoding]
    place = r.place
    if place < e.decoding:
        above = q.lists[e.first_entry + (place - 1) // 2] if place > 0 else last
        if place > 0 and _ends_before(q, e, last, above):
            _rise(q, e, place, last)
        else:
            _sink(q, e, place, last)


@inline
def can_take(c, law, n, e, prompt):
    """Whether expert n would queue a request of so many prompt tokens now."""
    if e.waiting >= c.waiting_capacity or e.down != 0:
        return False
    capacity = int(law[n * EXPERT_WIDTH + CAPACITY])
    return blocks_of(c, prompt + c.max_output_tokens) <= capacity


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
    remove_running(q, e, i)
    if r.decoding:
        stop_decoding(c, q, e, r, r.prompt + generated)
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
def make_room(c, law, n, q, e):
    """Step 2 of a boundary (paged memory): preempt until the running requests fit."""
    capacity = int(law[n * EXPERT_WIDTH + CAPACITY])
    before = e.running
    settle(c, q, e)
    while e.used > capacity:
        _preempt_newest(c, q, e)
    if e.running < before:
        find_next_finish(q, e)
    if c.prefix_caching:
        # Growth of those who stay: taken from the head of the free queue.
        last = (e.phase if e.phase > 0 else c.block_size) - 1
        e.free_head += q.lists[e.first_entry + 3 * c.slots + last]
    return before - e.running
