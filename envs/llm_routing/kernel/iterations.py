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
from servegym.envs.llm_routing.kernel.latency import (
    chunk_attention_s,
    decode_attention_s,
    decode_iterations,
    dense_s,
    head_s,
    prefill_s,
)
from servegym.envs.llm_routing.kernel.layout import (
    CHUNKED,
    COMPLETED,
    DECODE,
    FAILED,
    IDLE,
    MIXED,
    ORCA,
    PAGED,
    PREFILL,
    RESERVE,
)
from servegym.envs.llm_routing.kernel.queues import (
    append_running,
    blocks_of,
    clear_expert,
    drop_longest,
    find_next_finish,
    free_blocks,
    free_slot,
    head_entry,
    head_slot,
    make_room,
    newer,
    pop_next,
    remove_running,
    reuse_cached_blocks,
    settle,
    start_decoding,
    waiting_slot,
    wrap,
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
    r = q.slots[e.first_slot + i]
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
    reserved = blocks_of(c, r.prompt + c.max_output_tokens)
    held = reserved if c.memory_policy == RESERVE else blocks_of(c, r.prompt + r.output)
    e.reserved -= reserved
    free_blocks(c, q, e, r.prompt + r.output)
    pop_next(q, e)
    drop_longest(c, q, e, r)
    remove_running(c, q, e, i)
    free_slot(c, q, e, i)
    if c.prefix_caching:
        e.free_tail += blocks_of(c, r.prompt + r.output - 1)
    return held


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
        while e.prefill >= 0:
            i = e.prefill
            r = q.slots[e.first_slot + i]
            if e.iteration == MIXED:
                r.computed += r.chunk
                if r.computed < r.prompt + r.generated:
                    break  # the chunks after an unfinished prefill are empty
            start_decoding(c, q, e, r, i)
            if r.generated == 1:
                r.first = now
    find_next_finish(q, e)
    while e.next_finish <= e.emitted:
        freed += _complete(c, n, v, q, e, q.lists[e.first_entry], now)
        left += 1
        find_next_finish(q, e)
    return left, freed


# ---------------------------------------------------------------------------------------- admission


@inline
def _continue_chunks(c, q, e):
    """Next chunks of the prefills under way; returns their tokens."""
    tokens = 0
    budget = c.token_budget - e.decoding
    i = e.prefill
    while i >= 0:
        r = q.slots[e.first_slot + i]
        r.chunk = min(r.prompt + r.generated - r.computed, budget)
        budget -= r.chunk
        tokens += r.chunk
        i = q.lists[newer(c, e, i)]
    return tokens


@inline
def _admit(c, q, e, now, planned, left, freed):
    """Step 3 of a boundary: admit from the head of the waiting queue, first come first served.

    The iteration was ``planned`` when ``left`` slots and ``freed`` blocks that are free by now were
    still taken. Returns the prefill tokens of the iteration.
    """
    chunked = c.scheduler == CHUNKED
    tokens = 0
    budget = c.token_budget
    if chunked:
        tokens = _continue_chunks(c, q, e)
        budget -= e.decoding + tokens
    while e.waiting > 0 and e.running + left < c.running_capacity and (budget > 0 or not chunked):
        i = q.lists[head_entry(c, e)]
        r = q.slots[e.first_slot + i]
        if r.available > planned:
            break
        need = r.prompt + r.generated
        if not chunked and tokens > 0 and tokens + need > c.token_budget:
            break
        blocks = blocks_of(c, need)
        longest = blocks_of(c, r.prompt + c.max_output_tokens)
        if c.memory_policy == RESERVE:
            if e.reserved + freed + longest > e.capacity:
                break
        elif e.used + freed + blocks > e.capacity:
            break
        e.ring_head = wrap(c, e.ring_head + 1)
        e.waiting -= 1
        r.computed = 0
        if c.prefix_caching:
            reuse_cached_blocks(c, q, e, r, blocks)
        r.preempted = 0
        append_running(c, q, e, i)
        e.used += blocks
        e.reserved += longest
        if math.isnan(r.admitted):
            r.admitted = now
        if chunked:
            r.chunk = min(need - r.computed, budget)
            budget -= r.chunk
            tokens += r.chunk
        else:
            tokens += need
    return tokens


# --------------------------------------------------------------------------------------- iterations


@inline
def _start_mixed(c, law, q, e, now, tokens):
    """An iteration of ``tokens`` tokens of prefill chunks and all decodes."""
    time = dense_s(c, law, e.profile, float(tokens + e.decoding))
    chunks, longest = 0, 0
    i = e.prefill
    while i >= 0:
        r = q.slots[e.first_slot + i]
        if r.chunk > 0:
            chunks += 1
            longest = max(longest, r.chunk)
            time += chunk_attention_s(c, law, e.profile, float(r.chunk), float(r.computed))
        i = q.lists[newer(c, e, i)]
    if e.decoding > 0:
        time += decode_attention_s(c, law, e, longest)
    head = head_s(c, law, e.profile, e.decoding + chunks)
    e.end = now + time + head


@inline
def _run_decodes(c, law, e, limit, now, until, before):
    """From a boundary at ``now``, pass the decode iterations that fit and start the one after."""
    done, spent, cost = decode_iterations(c, law, e, limit, until - now, before)
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
        free = e.capacity - e.used
        limit = min(limit, c.block_size * (free // e.running))
    before = np.inf
    if e.waiting > 0 and e.running < c.running_capacity:
        head = q.slots[head_slot(c, q, e)]
        if head.available > now:
            before = head.available - now
        elif preempted > 0 or left > 0 or head.available > planned:
            limit = 0  # whether it joins is decided at the next boundary
    _run_decodes(c, law, e, limit, now, until, before)
    if c.prefix_caching:
        used = e.used
        settle(c, q, e)
        e.free_head += e.used - used


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
    preempted = 0
    if c.memory_policy == PAGED:
        preempted = make_room(c, q, e)
    if preempted == 0:
        tokens = _admit(c, q, e, now, planned, left, freed)
    elif c.scheduler == CHUNKED:
        tokens = _continue_chunks(c, q, e)
    else:
        tokens = 0

    prefills = e.running > e.decoding
    if prefills and c.scheduler == ORCA:
        e.iteration = PREFILL
        e.end = now + prefill_s(c, law, e.profile, float(tokens))
    elif prefills:
        e.iteration = MIXED
        _start_mixed(c, law, q, e, now, tokens)
    elif e.running > 0:
        e.iteration = DECODE
        _start_decodes(c, law, q, e, now, until, preempted, planned, left)
    else:
        e.iteration = IDLE
        e.end = np.inf
        if e.waiting > 0:
            e.end = max(now, q.slots[head_slot(c, q, e)].available)


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
    i = e.oldest
    while i >= 0:
        r = q.slots[e.first_slot + i]
        _lose(v, n, q, r)
        i = q.lists[newer(c, e, i)]
    for k in range(e.waiting):
        _lose(v, n, q, q.slots[waiting_slot(c, q, e, k)])
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
                _run_decodes(c, law, e, e.next_finish - e.emitted - 1, now, end, np.inf)
                continue
            left, freed = _end_iteration(c, n, v, q, e)
            _start_iteration(c, law, q, e, now, end, left, freed)
        if not changes:
            return
        if e.down == 0:
            _fail(c, n, v, q, e)
        change_availability(c, n, v, e)
