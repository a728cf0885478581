"""One replica in time: the scheduler of both families over a cache of prefixes.

A boundary is the end of an iteration: tokens are emitted and requests complete (1), the running
requests get their blocks (2), requests are admitted (3), and the next iteration starts (4), see
`servegym.envs.llm_routing.kernel.scheduler`. The times of a run of decode iterations in which
nothing else can happen are one closed-form update; blocks are taken one by one.

With asynchronous scheduling iteration k + 2 is planned when k has ended and k + 1 starts. Nothing
but arrivals happens until k + 1 ends, so the plan is made then, before the completions (1).
"""

from __future__ import annotations

import numpy as np

from servegym._jit import inline, inner
from servegym.envs.llm_routing.kernel.iterations import change_availability, changes_by
from servegym.envs.llm_routing.kernel.law import decode_iterations
from servegym.envs.llm_routing.kernel.scheduler import (
    IDLE,
    admit_head,
    blocks_of,
    closed_run,
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
    add_news,
    begin_decoding,
    end_decoding,
    fail,
    leave,
    preempt_newest,
)

# ------------------------------------------------------------------------------------- completions


@inline
def _next_phase(config, replica):
    return replica.phase + 1 if replica.phase + 1 < config.block_size else 0


@inner
def _end_iteration(config, systems, replica):
    """Step 1 of a boundary: tokens of the iteration that ends now, completions."""
    now = replica.end
    if replica.iteration == IDLE:
        return
    replica.emitted += 1
    replica.phase = _next_phase(config, replica)
    replica.decoding_tokens += replica.decoding
    if replica.iteration == MIXED:
        slot = next_prefilled(systems, replica)
        while slot >= 0:
            request = request_of(systems, replica, slot)
            begin_decoding(config, systems, replica, request, slot)
            if request.generated == 1:
                request.first = now
                add_news(systems, replica, slot, FIRST_TOKEN, now)
            slot = next_prefilled(systems, replica)
        find_next_finish(systems, replica)
    last = -1
    while replica.next_finish <= replica.emitted:
        slot = first_to_finish(systems, replica)
        request = request_of(systems, replica, slot)
        request.outcome = COMPLETED
        # The next plan is made before it leaves: it still holds its slot and its blocks.
        if config.async_scheduling:
            end_decoding(config, systems, replica, request)
            request.grow_after = -1
            if last < 0:
                replica.leaving = slot
            else:
                request_of(systems, replica, last).grow_after = slot
            last = slot
        else:
            leave(config, systems, replica, slot, now)
        find_next_finish(systems, replica)


@inner
def _let_leave(config, systems, replica, now):
    """Those whose last token came while the next iteration was planned leave."""
    while replica.leaving >= 0:
        slot = replica.leaving
        replica.leaving = request_of(systems, replica, slot).grow_after
        leave(config, systems, replica, slot, now)


# ------------------------------------------------------------------------------------------ memory


@inline
def _grow_decode(config, systems, replica, slot):
    """Blocks for the next token of a decoding request; returns the next one that grows with it."""
    request = request_of(systems, replica, slot)
    tokens = request.prompt + (replica.emitted - request.origin)
    # With asynchronous scheduling the token that is being sampled is not known yet.
    grow(config, systems, replica, request, tokens, tokens - config.async_scheduling)
    return request.grow_after


@inner
def _grow_decodes(config, systems, replica):
    """Blocks for the next token of every decoding request; returns how many were preempted.

    Only those who take or fill a block are looked at, oldest first.
    """
    preempted = 0
    slot = systems.lists[replica.first_bucket + replica.phase]
    while slot >= 0:
        # vLLM preempts the newest running request where a block is missing, if need be the one
        # that asks: then nobody newer is left to look at.
        while replica.free == 0 and replica.newest != slot:
            preempt_newest(config, systems, replica)
            preempted += 1
        if replica.free == 0:
            preempt_newest(config, systems, replica)
            preempted += 1
            break
        slot = _grow_decode(config, systems, replica, slot)
    # A block that is full of known tokens gets its id with the next one that is taken.
    if config.block_size > 1 and not config.async_scheduling:
        slot = systems.lists[replica.first_bucket + _next_phase(config, replica)]
        while slot >= 0:
            slot = _grow_decode(config, systems, replica, slot)
    return preempted


# --------------------------------------------------------------------------------------- admission


@inner
def _schedule_prefills(config, systems, replica, now, planned, preempted):
    """Step 3: the chunk of the prefill under way, then the head of the waiting queue, and so on.

    Only those are admitted that were there when the iteration was ``planned``. Returns the prefill
    tokens of the iteration and how many requests were preempted at this boundary, ``preempted``
    being those so far.
    """
    tokens = next_chunk(config, systems, replica)
    if tokens > 0:
        request = request_of(systems, replica, replica.prefill)
        if blocks_of(config, request.computed + tokens) - request.blocks > replica.free:
            preempt_newest(config, systems, replica)
            return 0, preempted + 1
        computed = request.computed + tokens
        grow(config, systems, replica, request, computed, computed)
    # vLLM admits nobody in a step that preempted.
    if preempted > 0:
        return tokens, preempted
    # First come, first served: who does not fit holds up all behind it.
    budget = config.token_budget - replica.decoding
    while replica.waiting > 0 and replica.running < config.max_running and tokens < budget:
        request = request_of(systems, replica, replica.head)
        if request.available > planned or replica.blocked != 0:
            break
        if not admit_blocks(config, systems, replica, request):
            break
        admit_head(systems, replica, request, now)
        if request.preemptions == 0:
            # Hits are those of the first admission: later it may find its own blocks.
            request.hit = request.computed
        else:
            request.recomputed += max(request.lost - request.computed, 0)
        request.chunk = min(request.prompt + request.generated - request.computed, budget - tokens)
        computed = request.computed + request.chunk
        # Blocks have their ids at once: the next one of this step finds them (vLLM's block pool).
        grow(config, systems, replica, request, computed, computed)
        tokens += request.chunk
    return tokens, 0


# -------------------------------------------------------------------------------------- iterations


@inner
def _start_decodes(config, law, systems, replica, now, until):
    """Decode iterations up to the first in which something else may happen."""
    limit = closed_run(config, replica)
    joins = replica.waiting > 0 and replica.running < config.max_running
    if joins or systems.events.shape[1] > 0:
        limit = 0  # whether the head joins is decided at every boundary; events have their times
    # The times in one closed form, the blocks one by one: eviction goes by their order.
    done, spent, cost = decode_iterations(law, replica, limit, until - now, np.inf)
    replica.start = now + spent
    replica.end = replica.start + cost
    for _ in range(done):
        replica.emitted += 1
        replica.phase = _next_phase(config, replica)
        _grow_decodes(config, systems, replica)
    replica.decoding_tokens += replica.running * done


@inner
def _plan(config, systems, replica, now, planned):
    """Steps 2 and 3 of a boundary; returns the prefill tokens of the iteration."""
    preempted = _grow_decodes(config, systems, replica)
    tokens, preempted = _schedule_prefills(config, systems, replica, now, planned, preempted)
    if preempted > 0:
        find_next_finish(systems, replica)
    return tokens


@inner
def _start_iteration(config, law, systems, replica, until):
    """Steps 2-4 of a boundary; decodes run on up to ``until``."""
    now = replica.end
    planned = now
    if config.async_scheduling and replica.iteration != IDLE:
        planned = replica.start
    replica.start = now
    tokens = _plan(config, systems, replica, now, planned)
    if config.async_scheduling:
        _let_leave(config, systems, replica, now)
        if tokens == 0 and replica.running == 0:
            # Nothing was planned: the next plan is made now, and starts at once.
            tokens = _plan(config, systems, replica, now, now)
    if tokens > 0:
        replica.iteration = MIXED
        replica.end = mixed_end_s(law, systems, replica, now, tokens)
    elif replica.running > 0:
        replica.iteration = DECODE
        _start_decodes(config, law, systems, replica, now, until)
    else:
        replica.iteration = IDLE
        replica.end = np.inf
        if replica.waiting > 0:  # it is still in the API
            replica.end = request_of(systems, replica, replica.head).available


@inner
def _safe_s(config, law, replica):
    """A time before which no request ends unless another one is sent to the replica."""
    if replica.running + replica.waiting == 0:
        return np.inf
    # Whoever waits may be admitted, and end, at the next boundary.
    ends = replica.emitted + 1 >= replica.next_finish
    if replica.iteration != DECODE or replica.waiting > 0 or ends:
        return min(replica.end, replica.next_change)
    # After the iteration in flight only decodes run; whoever sends a request lowers the bound.
    replica.emitted += 1
    replica.longest_key -= 1  # the contexts are those of the iteration in flight
    limit = closed_run(config, replica)
    _, spent, _ = decode_iterations(law, replica, limit, np.inf, np.inf)
    replica.emitted -= 1
    replica.longest_key += 1
    # Summed in one piece the times may differ in their last digits from those of shorter runs.
    return min(replica.end + spent * (1.0 - 1e-9), replica.next_change)


@inner
def advance(config, law, systems, replica, until):
    """Let a replica work until ``until``, or until it is empty if that is inf.

    Boundaries and failures at ``until`` count, boundaries first.
    """
    while True:
        changes = changes_by(config, replica, until)
        end = replica.next_change if changes else until
        while replica.end <= end and replica.end < np.inf:
            _end_iteration(config, systems, replica)
            _start_iteration(config, law, systems, replica, end)
        if not changes:
            break
        now = replica.next_change
        if replica.down == 0:
            fail(config, systems, replica, now)
            replica.failed = now
        change_availability(config, systems.env[replica.row], replica)
    replica.safe = replica.end
    if systems.env[replica.row].closed_loop != 0:
        replica.safe = _safe_s(config, law, replica)
