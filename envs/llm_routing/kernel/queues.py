"""The requests at an expert: where they stand, and the KV blocks that they take.

Blocks are counted, not named. With prefix caching a preempted request finds again what is left of
its own: free blocks without content are taken first, then cached ones, least recently freed first;
a request's are freed from the last one on, so that what is left is a prefix.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from servegym._jit import inline, inner
from servegym.envs.llm_routing.kernel.scheduler import (
    blocks_of,
    clear_scheduler,
    find_next_finish,
    full_blocks,
    leave_running,
    newer,
    request_of,
    requeue,
    start_decoding,
    stop_decoding,
)


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


@inline
def _residues(c, e):
    """Where the lists begin to count the requests by the emission that takes a block."""
    return e.first_place + c.slots


@inline
def locate(c, b, n, e):
    """Set where requests and lists of expert n in row b begin."""
    number = b * c.max_experts + n
    e.first_request = number * c.slots
    e.first_place = number * (3 * c.slots + c.block_size)
    e.first_link = e.first_place + c.slots + c.block_size


@inline
def vacate(q, e, i):
    """Slot i takes the next request."""
    q.lists[e.first_link + 2 * i] = e.vacant
    e.vacant = i


@inner
def clear_expert(c, q, e):
    """An idle expert with empty queues."""
    clear_scheduler(e)
    e.reserved = 0
    e.settled = 0
    e.free = e.capacity
    e.free_head = 0
    e.free_tail = 0
    e.vacant = -1
    for i in range(c.slots - 1, -1, -1):
        vacate(q, e, i)
    first = _residues(c, e)
    for k in range(first, first + c.block_size):
        q.lists[k] = 0


@inline
def put(q, e, request):
    """Put a request on its way to the expert into a vacant slot; returns which."""
    i = e.vacant
    r = request_of(q, e, i)
    e.vacant = newer(q, e, i)
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
    r.segment = 0
    r.segment_blocks = 0
    r.preemptions = 0
    r.admitted = np.nan
    r.first = np.nan
    return i


# ----------------------------------------------------------------------------------------- memory


@inline
def scheduled_tokens(e, r):
    """Tokens of a running request that have their KV after the iteration in flight."""
    return r.prompt + (e.emitted - r.origin) if r.decoding else r.computed + r.chunk


@inline
def settle(c, q, e):
    """Bring ``e.free``, Eq. 4, up to the emissions so far."""
    end = e.phase + (e.emitted - e.settled)
    turns = int((end + 0.5) * c.blocks_per_token)  # in each, every decoding request takes a block
    end -= turns * c.block_size
    first = _residues(c, e)
    e.free -= turns * e.decoding + q.lists[first + end] - q.lists[first + e.phase]
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
def begin_decoding(c, q, e, r, i):
    """Request r, the oldest whose prefill was under way, has a token more and decodes."""
    settle(c, q, e)
    start_decoding(c, q, e, r, i)
    tokens = r.prompt + r.generated
    blocks = blocks_of(c, tokens)
    e.free -= blocks - blocks_of(c, tokens - 1)
    _count_residue(c, q, e, tokens, blocks, 1)


@inline
def evict(c, e):
    """After blocks were taken: the cached ones are at most as many as are free."""
    if c.prefix_caching:
        e.free_head = max(e.free_head, e.free_tail - e.free)


@inline
def take_chunk(c, e, r):
    """Blocks for the chunk of a prefill beyond those of what is computed; none if it is new."""
    e.free -= blocks_of(c, r.computed + r.chunk) - blocks_of(c, r.computed)


@inline
def reuse_cached_blocks(c, e, r):
    """Prefix caching: a preempted request that is admitted finds what is left of its blocks."""
    gone = min(max(e.free_head - r.segment, 0), r.segment_blocks)
    cached = r.segment_blocks - gone
    # What was preempted before r waits behind r, so none of its blocks lie behind r's.
    e.free_tail -= cached
    e.free -= cached
    r.computed = cached * c.block_size
    r.segment_blocks = 0


@inline
def leave(c, q, e, r, i):
    """A request leaves the running list, and its blocks are free."""
    if r.decoding:
        settle(c, q, e)
        tokens = scheduled_tokens(e, r)
        _count_residue(c, q, e, tokens, blocks_of(c, tokens), -1)
        stop_decoding(c, q, e, r)
    leave_running(q, e, i)
    e.free += blocks_of(c, r.computed + r.chunk)
    e.reserved -= blocks_of(c, r.prompt + c.max_output_tokens)
    if c.prefix_caching:
        r.segment = e.free_tail
        r.segment_blocks = full_blocks(c, r.computed)
        e.free_tail += r.segment_blocks


@inline
def can_take(c, e, prompt):
    """Whether an expert would queue a request of so many prompt tokens now."""
    if e.waiting >= c.waiting_capacity or e.down != 0:
        return False
    return blocks_of(c, prompt + c.max_output_tokens) <= e.capacity


@inner
def make_room(c, q, e):
    """Preempt, newest first, until the running requests fit; returns how many were preempted."""
    before = e.running
    settle(c, q, e)
    while e.free < 0:
        i = e.newest
        r = request_of(q, e, i)
        leave(c, q, e, r, i)
        requeue(q, e, r, i)
    if e.running < before:
        find_next_finish(q, e)
    evict(c, e)
    return before - e.running
