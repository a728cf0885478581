"""One expert in time: an iteration-level scheduler that goes from boundary to boundary.

A boundary is the end of an iteration: tokens are emitted and requests complete (1), memory is made
room for (2), requests are admitted (3) and the next iteration starts (4). A run of decode
iterations in which nothing else can happen is one closed-form update.

With asynchronous scheduling an iteration is planned when the one before it starts, so that the
host's work hides behind the device's: who arrives later, or needs the slot or memory of a request
that the iteration before it completes, joins one iteration later.
"""

from __future__ import annotations

import math

import numpy as np

from servegym._jit import inline, inner, jit
from servegym.envs.llm_routing.kernel.law import decode_iterations, prefill_s
from servegym.envs.llm_routing.kernel.layout import (
    CHUNKED,
    COMPLETED,
    DECODE,
    FAILED,
    MIXED,
    ORCA,
    PAGED,
    PREFILL,
    RESERVE,
)
from servegym.envs.llm_routing.kernel.queues import (
    begin_decoding,
    clear_expert,
    evict,
    leave,
    make_room,
    reuse_cached_blocks,
    settle,
    take_chunk,
    vacate,
)
from servegym.envs.llm_routing.kernel.scheduler import (
    IDLE,
    admit_head,
    blocks_of,
    find_next_finish,
    first_to_finish,
    mixed_end_s,
    newer,
    next_chunk,
    next_prefilled,
    request_of,
)

# -------------------------------------------------------------------------------------- completions


@inline
def _log_request(v, n, q, r, outcome, finish_s):
    entry = q.log[v.first_log + r.request]
    entry.expert = n
    entry.outcome = outcome
    entry.available_s = r.available
    entry.admitted_s = r.admitted
    entry.first_token_s = r.first
    entry.finish_s = finish_s
    entry.score = r.score
    entry.prompt_tokens = r.prompt
    entry.output_tokens = r.output
    entry.preemptions = r.preemptions


@inline
def _complete(c, n, v, q, e, i, now):
    """The request in slot i has its last token at ``now``: record it and free the slot.

    Returns the KV blocks that its admission took, or that it held, by the memory policy.
    """
    r = request_of(q, e, i)
    _log_request(v, n, q, r, COMPLETED, now)
    e2e = now - r.arrived
    latency = e2e / r.output
    v.completed += 1
    v.latency += latency
    v.e2e += e2e
    v.ttft += r.first - r.arrived
    if r.output > 1:
        v.multi_token += 1
        v.tpot += (now - r.first) / (r.output - 1)
    v.communication += r.prompt * c.delay_s_per_token
    v.waiting += r.admitted - r.available
    v.inference += now - r.admitted
    v.last_finish = max(v.last_finish, now)
    if latency <= v.latency_requirement:
        v.on_time += 1
        v.qos += r.score
        v.step_qos += r.score
    else:
        v.step_late += r.score
    leave(c, q, e, r, i)
    vacate(q, e, i)
    tokens = c.max_output_tokens if c.memory_policy == RESERVE else r.output
    return blocks_of(c, r.prompt + tokens)


@inline
def _end_iteration(c, n, v, q, e):
    """Step 1 of a boundary: tokens of the iteration that ends now, completions.

    Returns how many requests complete, and their KV blocks.
    """
    now = e.end
    left, freed = 0, 0
    if e.iteration == IDLE:
        return left, freed
    if e.iteration != PREFILL:
        e.emitted += 1
        e.decoding_tokens += e.decoding
        if e.iteration == DECODE and e.emitted < e.next_finish:
            return left, freed
    if e.iteration != DECODE:
        i = next_prefilled(q, e)
        while i >= 0:
            r = request_of(q, e, i)
            begin_decoding(c, q, e, r, i)
            if r.generated == 1:
                r.first = now
            i = next_prefilled(q, e)
    find_next_finish(q, e)
    while e.next_finish <= e.emitted:
        freed += _complete(c, n, v, q, e, first_to_finish(q, e), now)
        left += 1
        find_next_finish(q, e)
    return left, freed


# ---------------------------------------------------------------------------------------- admission


@inline
def _admit(c, q, e, now, planned, left, freed, tokens):
    """Step 3 of a boundary: admit from the head of the waiting queue, first come first served.

    The iteration was ``planned`` when ``left`` slots and ``freed`` blocks that are free by now were
    still taken. Returns its prefill tokens; there were ``tokens``, of the prefill under way.
    """
    chunked = c.scheduler == CHUNKED
    budget = c.token_budget - e.decoding if chunked else c.token_budget
    while e.waiting > 0 and e.running + left < c.running_capacity:
        r = request_of(q, e, e.head)
        need = r.prompt + r.generated
        # Prompts are admitted whole without chunks, and one may exceed the budget alone.
        if tokens >= budget or (not chunked and tokens > 0 and tokens + need > budget):
            break
        longest = blocks_of(c, r.prompt + c.max_output_tokens)
        if c.memory_policy == RESERVE:
            fits = e.reserved + freed + longest <= e.capacity
        else:
            fits = freed + blocks_of(c, need) <= e.free
        if r.available > planned or not fits:
            break
        admit_head(q, e, r, now)
        e.reserved += longest
        if c.prefix_caching and r.preemptions > 0:
            reuse_cached_blocks(c, e, r)
        r.chunk = need - r.computed
        if chunked:
            r.chunk = min(r.chunk, budget - tokens)
        take_chunk(c, e, r)
        evict(c, e)
        tokens += r.chunk
    return tokens


# --------------------------------------------------------------------------------------- iterations


@inline
def _run_decodes(law, e, limit, now, until, before):
    """From a boundary at ``now``, pass the decode iterations that fit and start the one after."""
    done, spent, cost = decode_iterations(law, e, limit, until - now, before)
    e.emitted += done
    e.decoding_tokens += e.running * done
    e.start = now + spent
    e.end = e.start + cost


@inline
def _start_decodes(c, law, q, e, now, until, preempted, planned, left):
    """Decode iterations up to the first in which something else may happen."""
    limit = e.next_finish - e.emitted - 1
    if c.memory_policy == PAGED:
        # b sequences take at most b blocks in block_size iterations.
        limit = min(limit, c.block_size * (e.free // e.running))
    before = np.inf
    if e.waiting > 0 and e.running < c.running_capacity:
        head = request_of(q, e, e.head)
        if head.available > now:
            before = head.available - now
        elif preempted > 0 or left > 0 or head.available > planned:
            limit = 0  # whether it joins is decided at the next boundary
    _run_decodes(law, e, limit, now, until, before)
    if c.prefix_caching:
        settle(c, q, e)
        evict(c, e)


@inline
def _start_iteration(c, law, q, e, now, until, left, freed):
    """Steps 2-4 of a boundary at ``now``; decodes run on up to ``until``.

    ``left`` requests have just completed and ``freed`` blocks have become free.
    """
    planned = now
    if c.async_scheduling and e.iteration != IDLE and e.running > 0:
        planned = e.start
    else:
        left, freed = 0, 0
    e.start = now
    tokens = 0
    preempted = 0
    if e.prefill >= 0:
        tokens = next_chunk(c, q, e)
        take_chunk(c, e, request_of(q, e, e.prefill))
    if c.memory_policy == PAGED:
        preempted = make_room(c, q, e)
    if preempted == 0:
        tokens = _admit(c, q, e, now, planned, left, freed, tokens)
    elif e.prefill < 0:
        tokens = 0

    prefills = e.running > e.decoding
    if prefills and c.scheduler == ORCA:
        e.iteration = PREFILL
        e.end = now + prefill_s(law, e.profile, float(tokens))
    elif prefills:
        e.iteration = MIXED
        e.end = mixed_end_s(law, q, e, now, tokens)
    elif e.running > 0:
        e.iteration = DECODE
        _start_decodes(c, law, q, e, now, until, preempted, planned, left)
    else:
        e.iteration = IDLE
        e.end = np.inf
        if e.waiting > 0:
            e.end = max(now, request_of(q, e, e.head).available)


# ----------------------------------------------------------------------------------------- failures


@inner
def _hash32(x):
    """A bijection of 32-bit numbers; its products stay below 2**63."""
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return x ^ (x >> 16)


@jit
def sojourn_s(c, seed, n, change):
    """How long expert n stays up (even ``change``) or down (odd): exponential, in seconds.

    ``seed`` (32 bits) is drawn at reset and hashed with n and the number of changes.
    """
    x = _hash32(_hash32(_hash32(seed) ^ (n + 1)) ^ change)
    return -math.log((x + 0.5) * 2.0**-32) * (c.uptime_s if change % 2 == 0 else c.downtime_s)


@inline
def change_availability(c, n, v, e):
    """An expert that is up goes down, or comes back; draw when that changes again."""
    e.down = 1 - e.down
    e.changes += 1
    e.next_change += sojourn_s(c, v.failure_seed, n, e.changes)


@inline
def _lose(v, n, q, r):
    _log_request(v, n, q, r, FAILED, np.nan)
    v.failed += 1
    v.step_late += r.score


@inner
def _fail(c, n, v, q, e):
    """Expert n dies: all that it runs, queues or is being sent is lost."""
    for first in (e.oldest, e.head):
        i = first
        while i >= 0:
            r = request_of(q, e, i)
            _lose(v, n, q, r)
            i = newer(q, e, i)
    clear_expert(c, q, e)


@inline
def advance(c, law, n, v, q, e, until):
    """Let one expert work until ``until``, or until it is empty if that is inf.

    Boundaries and failures at ``until`` count.
    """
    while True:
        changes = c.uptime_s > 0.0 and e.next_change <= until
        if until == np.inf and e.running + e.waiting == 0:
            changes = False
        end = e.next_change if changes else until
        while e.end <= end and e.end < np.inf:
            now = e.end
            if (
                e.iteration == DECODE
                and e.emitted + 1 < e.next_finish
                and c.memory_policy == RESERVE
                and (e.waiting == 0 or e.running == c.running_capacity)
            ):
                # Nothing can happen at this boundary: the usual case, without the calls.
                e.emitted += 1
                e.decoding_tokens += e.decoding
                _run_decodes(law, e, e.next_finish - e.emitted - 1, now, end, np.inf)
                continue
            left, freed = _end_iteration(c, n, v, q, e)
            _start_iteration(c, law, q, e, now, end, left, freed)
        if not changes:
            return
        if e.down == 0:
            _fail(c, n, v, q, e)
        change_availability(c, n, v, e)
