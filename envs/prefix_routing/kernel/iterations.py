"""One replica in time: the scheduler of both families over a cache of prefixes.

A boundary is the end of an iteration: tokens are emitted and requests complete (1), the running
requests get their blocks (2), requests are admitted (3), and the next iteration starts (4), see
`servegym.envs.llm_routing.kernel.scheduler`. The times of a run of decode iterations in which
nothing else can happen are one closed-form update; blocks are taken one by one.
"""

from __future__ import annotations

import numpy as np

from servegym._jit import inline, inner
from servegym.envs.llm_routing.kernel.iterations import change_availability
from servegym.envs.llm_routing.kernel.law import decode_iterations
from servegym.envs.llm_routing.kernel.scheduler import (
    IDLE,
    admit_head,
    blocks_of,
    find_next_finish,
    first_to_finish,
    mixed_end_s,
    next_chunk,
    next_prefilled,
    request_of,
)
from servegym.envs.prefix_routing.kernel.cache import admit_blocks, grow
from servegym.envs.prefix_routing.kernel.layout import COMPLETED, DECODE, FIRST_TOKEN, MIXED
from servegym.envs.prefix_routing.kernel.queues import (
    begin_decoding,
    fail,
    leave,
    preempt_newest,
    tell_news,
)

# ------------------------------------------------------------------------------------- completions


@inner
def _end_iteration(c, s, e):
    """Step 1 of a boundary: tokens of the iteration that ends now, completions."""
    now = e.end
    if e.iteration == IDLE:
        return
    e.emitted += 1
    e.phase = e.phase + 1 if e.phase + 1 < c.block_size else 0
    e.decoding_tokens += e.decoding
    if e.iteration == MIXED:
        i = next_prefilled(s, e)
        while i >= 0:
            r = request_of(s, e, i)
            begin_decoding(c, s, e, r, i)
            if r.generated == 1:
                r.first = now
                tell_news(s, e, i, FIRST_TOKEN, now)
            i = next_prefilled(s, e)
        find_next_finish(s, e)
    while e.next_finish <= e.emitted:
        i = first_to_finish(s, e)
        request_of(s, e, i).outcome = COMPLETED
        leave(c, s, e, i, now)
        find_next_finish(s, e)


# ------------------------------------------------------------------------------------------ memory


@inner
def _grow_decodes(c, s, e):
    """Blocks for the next token of every decoding request; returns how many were preempted.

    Only those who take or fill a block are looked at, oldest first.
    """
    preempted = 0
    i = s.lists[e.first_bucket + e.phase]
    while i >= 0:
        while e.free == 0 and e.newest != i:
            preempt_newest(c, s, e)
            preempted += 1
        if e.free == 0:
            preempt_newest(c, s, e)
            preempted += 1
            break
        r = request_of(s, e, i)
        grow(c, s, e, r, r.prompt + (e.emitted - r.origin))
        i = r.grow_after
    if c.block_size > 1:
        filled = e.phase + 1 if e.phase + 1 < c.block_size else 0
        i = s.lists[e.first_bucket + filled]
        while i >= 0:
            r = request_of(s, e, i)
            grow(c, s, e, r, r.prompt + (e.emitted - r.origin))
            i = r.grow_after
    return preempted


# --------------------------------------------------------------------------------------- admission


@inner
def _schedule_prefills(c, s, e, now, preempted):
    """Step 3: the chunk of the prefill under way, then the head of the waiting queue, and so on.

    Returns the prefill tokens of the iteration and how many requests were preempted at this
    boundary, ``preempted`` being those so far.
    """
    tokens = next_chunk(c, s, e)
    if tokens > 0:
        r = request_of(s, e, e.prefill)
        if blocks_of(c, r.computed + tokens) - r.blocks > e.free:
            preempt_newest(c, s, e)
            return 0, preempted + 1
        grow(c, s, e, r, r.computed + tokens)
    if preempted > 0:
        return tokens, preempted
    budget = c.token_budget - e.decoding
    while e.waiting > 0 and e.running < c.max_running and tokens < budget and e.blocked == 0:
        r = request_of(s, e, e.head)
        if not admit_blocks(c, s, e, r):
            break
        admit_head(s, e, r, now)
        if r.preemptions == 0:
            r.hit = r.computed
        else:
            r.recomputed += max(r.lost - r.computed, 0)
        r.chunk = min(r.prompt + r.generated - r.computed, budget - tokens)
        grow(c, s, e, r, r.computed + r.chunk)
        tokens += r.chunk
    return tokens, 0


# -------------------------------------------------------------------------------------- iterations


@inline
def _closed_run(c, e):
    """Decode iterations after the next one in which nothing but decoding can happen."""
    # b sequences take at most b blocks in any K iterations.
    return min(e.next_finish - e.emitted - 1, c.block_size * (e.free // e.running))


@inner
def _start_decodes(c, law, s, e, now, until):
    """Decode iterations up to the first in which something else may happen."""
    limit = _closed_run(c, e)
    if (e.waiting > 0 and e.running < c.max_running) or s.events.shape[1] > 0:
        limit = 0  # whether the head joins is decided at every boundary; events have their times
    done, spent, cost = decode_iterations(law, e, limit, until - now, np.inf)
    e.start = now + spent
    e.end = e.start + cost
    for _ in range(done):
        e.emitted += 1
        e.phase = e.phase + 1 if e.phase + 1 < c.block_size else 0
        _grow_decodes(c, s, e)
    e.decoding_tokens += e.running * done


@inner
def _start_iteration(c, law, s, e, until):
    """Steps 2-4 of a boundary; decodes run on up to ``until``."""
    now = e.end
    e.start = now
    preempted = _grow_decodes(c, s, e)
    tokens, preempted = _schedule_prefills(c, s, e, now, preempted)
    if preempted > 0:
        find_next_finish(s, e)
    if tokens > 0:
        e.iteration = MIXED
        e.end = mixed_end_s(law, s, e, now, tokens)
    elif e.running > 0:
        e.iteration = DECODE
        _start_decodes(c, law, s, e, now, until)
    else:
        e.iteration = IDLE
        e.end = np.inf


@inner
def _safe_s(c, law, e):
    """A time before which no request ends unless another one is sent to the replica."""
    if e.running + e.waiting == 0:
        return np.inf
    if e.iteration != DECODE or e.waiting > 0 or e.emitted + 1 >= e.next_finish:
        return min(e.end, e.next_change)
    # After the iteration in flight only decodes run; whoever sends a request lowers the bound.
    e.emitted += 1
    e.longest_key -= 1  # the contexts are those of the iteration in flight
    limit = _closed_run(c, e)
    _, spent, _ = decode_iterations(law, e, limit, np.inf, np.inf)
    e.emitted -= 1
    e.longest_key += 1
    # Summed in one piece the times may differ in their last digits from those of shorter runs.
    return min(e.end + spent * (1.0 - 1e-9), e.next_change)


@inner
def advance(c, law, s, e, until):
    """Let a replica work until ``until``, or until it is empty if that is inf.

    Boundaries and failures at ``until`` count, boundaries first.
    """
    while True:
        changes = e.next_change <= until and c.uptime_s > 0.0
        if until == np.inf and e.running + e.waiting == 0:
            changes = False
        end = e.next_change if changes else until
        while e.end <= end and e.end < np.inf:
            _end_iteration(c, s, e)
            _start_iteration(c, law, s, e, end)
        if not changes:
            break
        now = e.next_change
        if e.down == 0:
            fail(c, s, e, now)
            e.failed = now
        change_availability(c, e.number, s.env[e.row], e)
    e.safe = e.end
    if s.env[e.row].closed_loop != 0:
        e.safe = _safe_s(c, law, e)
