"""vLLM's scheduler (v1), as the engines of both routing families have it.

A step of vLLM (``schedule`` in ``vllm/v1/core/sched/scheduler.py`` and ``allocate_slots`` in
``vllm/v1/core/kv_cache_manager.py``, both at commit 003df29):

1. Whoever has arrived by now is in the waiting queue before the step is scheduled, so requests that
   arrive at one moment are admitted together (``EngineCoreProc`` empties its input queue first).
2. The running requests come first, in order of admission. Each gets KV blocks for the tokens of
   this step alone: one of a decode, a chunk of a prefill. Where a block is missing the newest
   running request is preempted, if need be the one that asks; then none is admitted in this step.
3. The head of the waiting queue is admitted while there is a slot and a token of budget, if the
   free blocks hold all its tokens (``full_sequence_must_fit``, the default); it gets those of its
   first chunk. Who does not fit holds up all behind it.
4. A preempted request gives back its blocks and waits at the head. It computes its prompt and what
   it had generated once more, but for what is still cached; the last chunk emits its next token.

So at most one prefill is under way between steps: it took what was left of the budget. Here ``q``
is anything with the arrays ``request`` (records of one engine's requests) and ``lists`` (int32),
``e`` the record of a replica and ``r`` that of request number ``i``. A replica's requests begin at
its ``first_request``; of the lists, the heap of its decoding ones at ``first_place`` and the links
of all at ``first_link``. Links stand apart from the records so that a walk along them is short.
"""

from __future__ import annotations

import math

import numpy as np

from servegym._jit import inline, inner
from servegym.envs.llm_routing.kernel.law import (
    chunk_attention_s,
    decode_attention_s,
    dense_s,
    head_s,
)

IDLE = 0  # iteration of a replica that does nothing
NEVER = 1 << 60  # emissions


@inline
def request_of(q, e, i):
    """Request i of a replica."""
    return q.request[e.first_request + i]


@inline
def blocks_of(c, tokens):
    """KV blocks of so many tokens."""
    # A product instead of a slow integer division; the half keeps it clear of rounding.
    return int((tokens + c.block_size - 0.5) * c.blocks_per_token)


@inline
def full_blocks(c, tokens):
    """KV blocks that so many tokens fill."""
    return int((tokens + 0.5) * c.blocks_per_token)


@inline
def before(time):
    """The last moment before ``time``: who arrives then is there when an iteration begins then."""
    return np.nextafter(time, -np.inf)


@inline
def generated_tokens(e, r):
    """Tokens that a request has so far."""
    return e.emitted - r.origin if r.decoding else r.generated


@inner
def clear_scheduler(e):
    """Nothing waits, runs or decodes."""
    e.start = 0.0
    e.end = np.inf
    e.iteration = IDLE
    e.emitted = 0
    e.phase = 0
    e.running = 0
    e.waiting = 0
    e.decoding = 0
    e.decoding_tokens = 0
    e.longest_key = -NEVER
    e.next_finish = NEVER
    e.segment = 0
    e.oldest = -1
    e.newest = -1
    e.prefill = -1
    e.head = -1
    e.tail = -1
    e.admissions = 0


# ------------------------------------------------------------------------------------------- lists


@inline
def newer(q, e, i):
    """The request behind i in the running list or the waiting queue, -1 for none."""
    return q.lists[e.first_link + 2 * i]


@inline
def _older(q, e, i):
    return q.lists[e.first_link + 2 * i + 1]


@inline
def _chain(q, e, i, k):
    """Put request k behind i; -1 is the end of the list."""
    if i >= 0:
        q.lists[e.first_link + 2 * i] = k
    if k >= 0:
        q.lists[e.first_link + 2 * k + 1] = i


@inline
def enqueue(q, e, r, i):
    """Put a request among the waiting, by when it is at the replica; of two at once as sent."""
    ahead, behind = e.tail, -1
    while ahead >= 0 and request_of(q, e, ahead).available > r.available:
        ahead, behind = _older(q, e, ahead), ahead
    _insert_waiting(q, e, i, ahead, behind)
    if e.iteration == IDLE:
        e.end = max(e.start, request_of(q, e, e.head).available)


@inline
def _insert_waiting(q, e, i, ahead, behind):
    _chain(q, e, ahead, i)
    _chain(q, e, i, behind)
    if ahead < 0:
        e.head = i
    if behind < 0:
        e.tail = i
    e.waiting += 1


@inline
def leave_waiting(q, e, i):
    """Take a request out of the waiting queue."""
    ahead, behind = _older(q, e, i), newer(q, e, i)
    _chain(q, e, ahead, behind)
    if ahead < 0:
        e.head = behind
    if behind < 0:
        e.tail = ahead
    e.waiting -= 1


@inline
def admit_head(q, e, r, now):
    """The head of the waiting queue, request r, is the newest of the running list."""
    i = e.head
    leave_waiting(q, e, i)
    if math.isnan(r.admitted):
        r.admitted = now
    r.admission = e.admissions
    e.admissions += 1
    _chain(q, e, e.newest, i)
    _chain(q, e, i, -1)
    if e.newest < 0:
        e.oldest = i
    if e.prefill < 0:
        e.prefill = i
    e.newest = i
    e.running += 1


@inline
def leave_running(q, e, i):
    """Take a request out of the running list."""
    ahead, behind = _older(q, e, i), newer(q, e, i)
    _chain(q, e, ahead, behind)
    if e.prefill == i:
        e.prefill = behind
    if ahead < 0:
        e.oldest = behind
    if behind < 0:
        e.newest = ahead
    e.running -= 1


# ------------------------------------------------------------------------------------------- heap


@inline
def _ends_before(q, e, i, k):
    """Whether decoding request i has its last token before k; of two at once, the older first."""
    r = request_of(q, e, i)
    other = request_of(q, e, k)
    mine = r.origin + r.output
    theirs = other.origin + other.output
    return mine < theirs or (mine == theirs and r.admission < other.admission)


@inline
def _put(q, e, place, i):
    q.lists[e.first_place + place] = i
    request_of(q, e, i).place = place


@inline
def _rise(q, e, place, i):
    """Put request i at ``place`` of the heap or as far above it as it belongs."""
    while place > 0:
        above = (place - 1) // 2
        k = q.lists[e.first_place + above]
        if not _ends_before(q, e, i, k):
            break
        _put(q, e, place, k)
        place = above
    _put(q, e, place, i)


@inline
def _sink(q, e, place, i):
    """Put request i at ``place`` of the heap or as far below it as it belongs."""
    while 2 * place + 1 < e.decoding:
        below = 2 * place + 1
        k = q.lists[e.first_place + below]
        if below + 1 < e.decoding:
            other = q.lists[e.first_place + below + 1]
            if _ends_before(q, e, other, k):
                below += 1
                k = other
        if not _ends_before(q, e, k, i):
            break
        _put(q, e, place, k)
        place = below
    _put(q, e, place, i)


@inline
def first_to_finish(q, e):
    """The decoding request that has its last token first."""
    return q.lists[e.first_place]


@inline
def find_next_finish(q, e):
    """Set the count of emissions at which the next decoding request has its last token."""
    e.next_finish = NEVER
    if e.decoding > 0:
        r = request_of(q, e, first_to_finish(q, e))
        e.next_finish = r.origin + r.output


@inner
def order_heap(q, e):
    """Order the heap anew, whatever has become of the requests in it."""
    for k in range(e.decoding // 2):
        place = e.decoding // 2 - 1 - k
        _sink(q, e, place, q.lists[e.first_place + place])
    find_next_finish(q, e)


# --------------------------------------------------------------------------------------- decoding


@inline
def next_prefilled(q, e):
    """At the end of an iteration: a request whose last chunk it had, -1 if none is left."""
    if e.prefill < 0:
        return -1
    r = request_of(q, e, e.prefill)
    r.computed += r.chunk
    return e.prefill if r.computed == r.prompt + r.generated else -1


@inline
def start_decoding(c, q, e, r, i):
    """Request r, the oldest whose prefill was under way, has a token more and decodes from now."""
    r.generated += 1
    r.decoding = 1
    r.origin = e.emitted - r.generated
    e.decoding += 1
    e.decoding_tokens += r.prompt + r.generated
    if c.longest:
        e.longest_key = max(e.longest_key, r.prompt - r.origin)
    e.prefill = newer(q, e, i)
    _rise(q, e, e.decoding - 1, i)


@inner
def _find_longest(q, e):
    e.longest_key = -NEVER
    for place in range(e.decoding):
        r = request_of(q, e, q.lists[e.first_place + place])
        e.longest_key = max(e.longest_key, r.prompt - r.origin)


@inline
def stop_decoding(c, q, e, r):
    """A running request decodes no more; its last token has only been emitted, not computed."""
    r.generated = e.emitted - r.origin
    r.computed = r.prompt + r.generated - 1
    r.chunk = 1
    r.decoding = 0
    e.decoding -= 1
    e.decoding_tokens -= r.prompt + r.generated
    last = q.lists[e.first_place + e.decoding]
    place = r.place
    if place < e.decoding:
        if place > 0 and _ends_before(q, e, last, q.lists[e.first_place + (place - 1) // 2]):
            _rise(q, e, place, last)
        else:
            _sink(q, e, place, last)
    if c.longest and r.prompt - r.origin >= e.longest_key:
        _find_longest(q, e)


# --------------------------------------------------------------------------------------- steps


@inline
def next_chunk(c, q, e):
    """Tokens of the next chunk of the prefill under way, 0 if there is none."""
    if e.prefill < 0:
        return 0
    r = request_of(q, e, e.prefill)
    r.chunk = min(r.prompt + r.generated - r.computed, c.token_budget - e.decoding)
    return r.chunk


@inline
def requeue(q, e, r, i):
    """A preempted request waits at the head of the queue."""
    r.computed = 0
    r.preemptions += 1
    _insert_waiting(q, e, i, -1, e.head)


@inline
def mixed_end_s(law, q, e, now, tokens):
    """When an iteration of ``tokens`` tokens of prefill chunks and all decodes ends."""
    time = dense_s(law, e.profile, float(tokens + e.decoding))
    chunks, longest = 0, 0
    i = e.prefill
    while i >= 0:
        r = request_of(q, e, i)
        chunks += 1
        longest = max(longest, r.chunk)
        time += chunk_attention_s(law, e.profile, float(r.chunk), float(r.computed))
        i = newer(q, e, i)
    if e.decoding > 0:
        time += decode_attention_s(law, e, longest)
    return now + time + head_s(law, e.profile, e.decoding + chunks)
