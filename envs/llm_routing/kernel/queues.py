"""The requests at an expert: their slots, the lists of these, and the KV blocks that they take."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from servegym.envs._jit import inline, inner
from servegym.envs.llm_routing.kernel.layout import CAPACITY, EXPERT_WIDTH, IDLE


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
def running_slot(q, e, i):
    """Slot of the i-th of the running list."""
    return e.first_slot + q.lists[e.first_entry + i]


@inline
def locate(c, b, n, e):
    """Set where slots and lists of expert n in row b begin."""
    e.first_slot = (b * c.num_experts + n) * c.slots
    e.first_entry = 3 * e.first_slot


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
    e.admitted = 0
    e.reserved = 0
    e.segment = 0
    e.used = 0
    e.free_head = 0
    e.free_tail = int(law[n * EXPERT_WIDTH + CAPACITY])
    e.free = c.slots
    for i in range(c.slots):
        q.lists[e.first_entry + 2 * c.slots + i] = c.slots - 1 - i


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


@inner
def find_next_finish(q, e):
    """Set the count of emissions at which the next decoding request has its last token."""
    e.next_finish = 1 << 60
    for i in range(e.running):
        r = q.slots[running_slot(q, e, i)]
        if r.decoding:
            e.next_finish = min(e.next_finish, r.origin + r.output)


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
def used_blocks(c, q, e):
    """KV blocks in use: the left side of Eq. 4."""
    total = 0
    for i in range(e.running):
        r = q.slots[running_slot(q, e, i)]
        total += blocks_of(c, r.prompt + generated_tokens(e, r))
    return total


@inline
def can_take(c, law, n, e, prompt):
    """Whether expert n would queue a request of so many prompt tokens now."""
    if e.waiting >= c.waiting_capacity or e.down != 0:
        return False
    capacity = int(law[n * EXPERT_WIDTH + CAPACITY])
    return blocks_of(c, prompt + c.max_output_tokens) <= capacity


@inner
def _forget_segment(c, q, e, r, blocks):
    """Take ``blocks`` of r's cached blocks out of the free queue; those behind them move up."""
    e.free_tail -= blocks
    for k in range(e.waiting):
        other = q.slots[waiting_slot(c, q, e, k)]
        if not other.preempted:
            break
        if other.segment > r.segment:
            other.segment -= blocks


@inline
def reuse_cached_blocks(c, q, e, r, blocks):
    """Prefix caching: r, which needs ``blocks``, is admitted and finds what is left of its own."""
    if r.preempted:
        gone = min(max(e.free_head - r.segment, 0), r.segment_blocks)
        cached = r.segment_blocks - gone
        _forget_segment(c, q, e, r, cached)
        r.computed = cached * c.block_size
        e.free_head -= cached
    e.free_head += blocks


@inner
def _preempt_newest(c, q, e):
    """Send the newest admitted request back to the head of the waiting queue."""
    e.running -= 1
    i = q.lists[e.first_entry + e.running]
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
    if r.decoding:
        e.decoding -= 1
        e.decoding_tokens -= r.prompt + generated
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
    used = used_blocks(c, q, e)
    while used > capacity:
        r = q.slots[running_slot(q, e, e.running - 1)]
        used -= blocks_of(c, r.prompt + generated_tokens(e, r))
        _preempt_newest(c, q, e)
    if e.running < before:
        find_next_finish(q, e)
    if c.prefix_caching:
        # Growth of those who stay: taken from the head of the free queue.
        for i in range(e.running):
            r = q.slots[running_slot(q, e, i)]
            if r.decoding:
                tokens = r.prompt + generated_tokens(e, r)
                e.free_head += blocks_of(c, tokens) - blocks_of(c, tokens - 1)
    e.used = used
    return before - e.running
