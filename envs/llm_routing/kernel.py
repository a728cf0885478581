"""Jitted engine of the LLM routing family.

A batch of B independent systems (rows), each of N experts, lives in a few record arrays; every
function here is a pure function of its arguments, all chance being drawn before (at reset). One
expert is an iteration-level scheduler: time advances from boundary to boundary, and a run of decode
iterations in which nothing else can happen is one closed-form update (``_silent_iterations``).

Units are seconds and tokens; memory is counted in KV blocks. The latency tables of all experts are
packed in one float64 array ``law`` whose offsets ``cfg`` holds (see ``config.pack_laws``).

Expert n of row b owns S records of ``slots`` from ``e.lane`` on and 3 S entries of ``queue`` from
``e.line`` on: the running list in order of admission, the ring of the waiting deque and the stack
of free slots, all numbers of its own slots. Both are flat: views of parts would be
reference-counted on the hot path.
"""

from __future__ import annotations

import math

import numpy as np

from servegym.envs._jit import inline, jit

ORCA, CHUNKED = 0, 1
RESERVE, PAGED = 0, 1
COMPLETED_QOS, QOS_AWARE, PAID_FORWARD = 0, 1, 2
NEW_VIOLATIONS, LITERAL = 0, 1
GRAPH, FLAT, EXPERTS = 0, 1, 2
PENDING, COMPLETED, DROPPED, REJECTED, FAILED = 0, 1, 2, 3, 4
IDLE, PREFILL, DECODE, MIXED = 0, 1, 2, 3

# Documented bounds of the observation; larger values are clipped.
MAX_PROMPT_TOKENS = 8192.0
MAX_LATENCY_S_PER_TOKEN = 10.0
PROMPT_SCALE = 16.0
LATENCY_SCALE = 0.01
_PROMPT_LOG = 1.0 / math.log1p(MAX_PROMPT_TOKENS / PROMPT_SCALE)
_LATENCY_LOG = 1.0 / math.log1p(MAX_LATENCY_S_PER_TOKEN / LATENCY_SCALE)


def _record(fields: list[tuple[str, str]]) -> np.dtype:
    # np.record scalars give attribute access with the JIT switched off, too.
    return np.dtype((np.record, np.dtype(fields, align=True)))


CONFIG = _record(
    [
        (name, "i8")
        for name in (
            "num_experts running_capacity waiting_capacity slots scheduler memory_policy "
            "prefix_caching token_budget block_size max_output_tokens num_requests reward penalty "
            "predicted_estimator layout "
            "n_dense n_chunk n_context n_decode n_sequences n_head "
            "x_dense y_dense x_chunk x_context y_chunk x_decode y_decode y_slope y_attention "
            "y_head"
        ).split()
    ]
    + [("delay_s_per_token", "f8"), ("router_delay_s", "f8"), ("per_block", "f8")]
    # Failures of experts: mean times in seconds, 0 if there are none. Age of what the router sees.
    + [("uptime_s", "f8"), ("downtime_s", "f8"), ("staleness_s", "f8")]
)
EXPERT_WIDTH = 3  # capacity_blocks, k1, k2 at the head of ``law`` for each expert

ENV = _record(
    [("index", "i8"), ("first_log", "i8"), ("now", "f8"), ("latency_requirement", "f8")]
    + [(name, "i8") for name in ("completed", "dropped", "rejected", "on_time", "multi_token")]
    + [("failed", "i8"), ("failure_seed", "i8")]
    + [
        (name, "f8")
        for name in (
            "qos latency ttft tpot e2e waiting inference communication memory last_finish "
            "step_qos step_late"
        ).split()
    ]
)
EXPERT = _record(
    [("start", "f8"), ("end", "f8")]
    + [
        (name, "i8")
        for name in (
            # kind of the iteration in flight; emissions so far; lengths of the lists
            "lane line kind emitted next_finish running waiting ring_head free "
            # of the running: those decoding, their prompt + generated tokens, those admitted last
            "decoding decoding_tokens admitted reserved segment "
            # prefix caching: blocks in use at the last boundary, ends of the free-block queue
            "used free_head free_tail "
            "shown_running shown_waiting "
            # failures: whether it is down, and how often that has changed
            "down changes"
        ).split()
    ]
    + [("next_change", "f8")]
)
SLOT = _record(
    # The first 64 bytes are what every step reads.
    [("arrived", "f8"), ("available", "f8"), ("origin", "i8")]
    + [(name, "i4") for name in "request p d g decoding preempted chunk".split()]
    + [(name, "f4") for name in "s s_hat d_hat".split()]
    + [("admitted", "f8"), ("first", "f8"), ("segment", "i8")]
    + [(name, "i4") for name in "computed segment_blocks preemptions".split()]
)
LOG = _record(
    [(name, "f8") for name in ("available_s", "admitted_s", "first_token_s", "finish_s")]
    + [("score", "f4"), ("prompt_tokens", "i4"), ("output_tokens", "i4")]
    + [("expert", "i2"), ("outcome", "i2"), ("preemptions", "i4")]
)


# --------------------------------------------------------------------------------- latency tables


@inline
def _segment(law, ox, n, x):
    """Index i of the segment [x_i, x_{i+1}] to use for x: outermost segments extend outward."""
    lo = 0
    hi = n - 1
    while hi - lo > 1:
        mid = (lo + hi) // 2
        if law[ox + mid] <= x:
            lo = mid
        else:
            hi = mid
    return lo


@inline
def _interpolate(law, ox, oy, n, x):
    if n == 1:
        return law[oy]
    i = _segment(law, ox, n, x)
    x0 = law[ox + i]
    y0 = law[oy + i]
    return y0 + (law[oy + i + 1] - y0) * ((x - x0) / (law[ox + i + 1] - x0))


@jit
def _dense_s(c, law, n, tokens):
    return _interpolate(law, c.x_dense, c.y_dense + n * c.n_dense, c.n_dense, tokens)


@jit
def _chunk_s(c, law, n, chunk, context):
    """Attention of a prefill chunk over its own tokens and ``context`` computed before it."""
    oy = c.y_chunk + n * c.n_chunk * c.n_context
    if c.n_chunk == 1:
        return _interpolate(law, c.x_context, oy, c.n_context, context)
    i = _segment(law, c.x_chunk, c.n_chunk, chunk)
    low = _interpolate(law, c.x_context, oy + i * c.n_context, c.n_context, context)
    high = _interpolate(law, c.x_context, oy + (i + 1) * c.n_context, c.n_context, context)
    x0 = law[c.x_chunk + i]
    return low + (high - low) * ((chunk - x0) / (law[c.x_chunk + i + 1] - x0))


@jit
def _head_s(c, law, n, sequences):
    return law[c.y_head + n * c.n_head + min(sequences, c.n_head - 1)]


@jit
def prefill_s(c, law, n, tokens):
    """Time of an Orca prefill iteration over ``tokens`` prompt tokens."""
    return _dense_s(c, law, n, tokens) + _chunk_s(c, law, n, tokens, 0.0) + _head_s(c, law, n, 1)


@inline
def _silent_iterations(c, law, n, e, limit, until, before):
    """How many decode iterations fit: at most ``limit``, ending at <= until and < before.

    The mean context of b decoding sequences grows by exactly one token an iteration, so between
    two points of the table the cost is an arithmetic series and the count a root of a quadratic.
    Returns the count, the time they take, and the time of the iteration after them.
    """
    done = 0
    spent = 0.0
    x = e.decoding_tokens / e.running
    row = (n * c.n_sequences + e.running) * c.n_decode
    last = c.n_decode - 2
    i = e.segment  # where the last run ended: contexts grow slowly
    if x < law[c.x_decode + i] or x >= law[c.x_decode + i + 1]:
        i = _segment(law, c.x_decode, c.n_decode, x)
        e.segment = i
    while True:
        slope = law[c.y_slope + row + i]
        cost = law[c.y_decode + row + i] + slope * (x - law[c.x_decode + i])
        count = limit - done
        if count <= 0 or spent + cost > until or spent + cost >= before:
            return done, spent, cost
        if i < last:
            count = min(count, max(1, math.ceil(law[c.x_decode + i + 1] - x)))
        total = count * (cost + 0.5 * slope * (count - 1))
        if spent + total > until or spent + total >= before:
            room = min(until, before) - spent
            most = room / cost
            if slope < 0.0 or most * slope > 0.1 * cost:
                half = cost - 0.5 * slope
                root = math.sqrt(max(half * half + 2.0 * slope * room, 0.0))
                most = 2.0 * room / (half + root)
            count = min(count, int(most) + 1)
            total = count * (cost + 0.5 * slope * (count - 1))
            while spent + total > until or spent + total >= before:
                count -= 1
                total = count * (cost + 0.5 * slope * (count - 1))
            return done + count, spent + total, cost + slope * count
        done += count
        spent += total
        x += count
        while i < last and x >= law[c.x_decode + i + 1]:
            i += 1


# ---------------------------------------------------------------------------------------- memory


@inline
def _blocks(c, tokens):
    # A product instead of a slow integer division; the half keeps it clear of rounding.
    return int((tokens + c.block_size - 0.5) * c.per_block)


@inline
def _wrap(c, i):
    """``i`` modulo the size of the ring; it is at most one turn off."""
    if i >= c.slots:
        return i - c.slots
    return i + c.slots if i < 0 else i


@inline
def _ring(c, e, k):
    """Place in ``queue`` of the k-th of the waiting deque."""
    return e.line + c.slots + _wrap(c, e.ring_head + k)


@inline
def _generated(e, r):
    return e.emitted - r.origin if r.decoding else r.g


@inline
def used_blocks(c, e, slots, queue):
    """KV blocks in use: the left side of Eq. 4."""
    total = 0
    for i in range(e.running):
        r = slots[e.lane + queue[e.line + i]]
        total += _blocks(c, r.p + _generated(e, r))
    return total


@jit
def _forget_segment(c, e, slots, queue, r, blocks):
    """Take ``blocks`` of r's cached blocks out of the free queue; those behind them move up."""
    e.free_tail -= blocks
    for k in range(e.waiting):
        other = slots[e.lane + queue[_ring(c, e, k)]]
        if not other.preempted:
            break
        if other.segment > r.segment:
            other.segment -= blocks


@jit
def _preempt_newest(c, e, slots, queue):
    """Send the newest admitted request back to the head of the waiting deque."""
    e.running -= 1
    i = queue[e.line + e.running]
    r = slots[e.lane + i]
    g = _generated(e, r)
    if c.prefix_caching:
        # Its last token's block was not yet taken when it was found not to fit.
        computed = r.p + g - 1 if r.decoding else r.computed
        held = _blocks(c, r.p + g - 1) if r.decoding else _blocks(c, r.p + g)
        full = computed // c.block_size
        r.segment = e.free_tail + held - full
        r.segment_blocks = full
        e.free_tail += held
    if r.decoding:
        e.decoding -= 1
        e.decoding_tokens -= r.p + g
    e.reserved -= _blocks(c, r.p + c.max_output_tokens)
    r.g = g
    r.decoding = 0
    r.preempted = 1
    r.computed = 0
    r.preemptions += 1
    e.ring_head = _wrap(c, e.ring_head - 1)
    queue[_ring(c, e, 0)] = i
    e.waiting += 1


@jit
def _make_room(c, law, n, e, slots, queue):
    """Step 2 of a boundary (paged memory): preempt until the running requests fit."""
    capacity = int(law[n * EXPERT_WIDTH])
    before = e.running
    used = used_blocks(c, e, slots, queue)
    while used > capacity:
        r = slots[e.lane + queue[e.line + e.running - 1]]
        used -= _blocks(c, r.p + _generated(e, r))
        _preempt_newest(c, e, slots, queue)
    if e.running < before:
        _find_next_finish(e, slots, queue)
    if c.prefix_caching:
        # Growth of those who stay: taken from the head of the free queue.
        for i in range(e.running):
            r = slots[e.lane + queue[e.line + i]]
            if r.decoding:
                tokens = r.p + _generated(e, r)
                e.free_head += _blocks(c, tokens) - _blocks(c, tokens - 1)
    e.used = used
    return before - e.running


# ------------------------------------------------------------------------------------ iterations


@inline
def _finish(c, n, v, e, slots, queue, log, i, now):
    """Request in slot i has its last token at ``now``: record it and free the slot."""
    r = slots[e.lane + i]
    entry = log[v.first_log + r.request]
    entry.expert = n
    entry.outcome = COMPLETED
    entry.available_s = r.available
    entry.admitted_s = r.admitted
    entry.first_token_s = r.first
    entry.finish_s = now
    entry.score = r.s
    entry.prompt_tokens = r.p
    entry.output_tokens = r.d
    entry.preemptions = r.preemptions
    e2e = now - r.arrived
    latency = e2e / r.d
    v.completed += 1
    v.latency += latency
    v.e2e += e2e
    v.ttft += r.first - r.arrived
    if r.d > 1:
        v.multi_token += 1
        v.tpot += (now - r.first) / (r.d - 1)
    v.communication += r.p * c.delay_s_per_token
    v.waiting += r.admitted - r.available
    v.inference += now - r.admitted
    v.last_finish = max(v.last_finish, now)
    if latency <= v.latency_requirement:
        v.on_time += 1
        v.qos += r.s
        v.step_qos += r.s
    else:
        v.step_late += r.s
    e.reserved -= _blocks(c, r.p + c.max_output_tokens)
    if r.decoding:
        e.decoding -= 1
        e.decoding_tokens -= r.p + r.d
    if c.prefix_caching:
        e.free_tail += _blocks(c, r.p + r.d - 1)
    queue[e.line + 2 * c.slots + e.free] = i
    e.free += 1


@inline
def _start_decoding(e, r, now):
    """R emits a token at the end of its prefill; the token counter of the expert takes over."""
    r.g += 1
    r.decoding = 1
    r.origin = e.emitted - r.g
    e.decoding += 1
    e.decoding_tokens += r.p + r.g
    if r.g == 1:
        r.first = now


@inline
def _end_iteration(c, n, v, e, slots, queue, log):
    """Step 1 of a boundary: tokens of the iteration that ends now, completions."""
    now = e.end
    if e.kind == IDLE:
        return
    if e.kind != PREFILL:
        e.emitted += 1
        e.decoding_tokens += e.decoding
        if e.kind == DECODE and e.emitted < e.next_finish:
            return
    if e.kind != DECODE:
        for i in range(e.running - e.admitted, e.running):
            r = slots[e.lane + queue[e.line + i]]
            if e.kind == MIXED:
                r.computed += r.chunk
                if r.computed < r.p + r.g:
                    continue
            _start_decoding(e, r, now)
    kept = 0
    for i in range(e.running):
        k = queue[e.line + i]
        r = slots[e.lane + k]
        if r.decoding and e.emitted - r.origin >= r.d:
            _finish(c, n, v, e, slots, queue, log, k, now)
        else:
            queue[e.line + kept] = k
            kept += 1
    e.running = kept
    _find_next_finish(e, slots, queue)


@inline
def _find_next_finish(e, slots, queue):
    """Set the count of emissions at which the next decoding request has its last token."""
    e.next_finish = 1 << 60
    for i in range(e.running):
        r = slots[e.lane + queue[e.line + i]]
        if r.decoding:
            e.next_finish = min(e.next_finish, r.origin + r.d)


@inline
def _continue_chunks(c, e, slots, queue):
    """Next chunks of prefills under way: the last of the running list; returns their tokens."""
    tokens = 0
    budget = c.token_budget - e.decoding
    e.admitted = e.running - e.decoding
    for i in range(e.decoding, e.running):
        r = slots[e.lane + queue[e.line + i]]
        r.chunk = min(r.p + r.g - r.computed, budget)
        budget -= r.chunk
        tokens += r.chunk
    return tokens


@inline
def _admit(c, law, n, e, slots, queue, now):
    """Step 3 of a boundary: admit from the head of the waiting deque, first come first served.

    Returns the prefill tokens of the iteration. ``e.admitted`` counts the running requests whose
    prefill is under way: the last of the list, since an earlier one always gets its tokens first.
    """
    capacity = int(law[n * EXPERT_WIDTH])
    chunked = c.scheduler == CHUNKED
    tokens = 0
    budget = c.token_budget
    e.admitted = 0
    if chunked:
        tokens = _continue_chunks(c, e, slots, queue)
        budget -= e.decoding + tokens
    while e.waiting > 0 and e.running < c.running_capacity and (budget > 0 or not chunked):
        i = queue[_ring(c, e, 0)]
        r = slots[e.lane + i]
        if r.available > now:
            break
        need = r.p + r.g
        if not chunked and tokens > 0 and tokens + need > c.token_budget:
            break
        blocks = _blocks(c, need)
        if c.memory_policy == RESERVE:
            if e.reserved + _blocks(c, r.p + c.max_output_tokens) > capacity:
                break
        elif e.used + blocks > capacity:
            break
        e.ring_head = _wrap(c, e.ring_head + 1)
        e.waiting -= 1
        r.computed = 0
        if c.prefix_caching:
            if r.preempted:
                gone = min(max(e.free_head - r.segment, 0), r.segment_blocks)
                cached = r.segment_blocks - gone
                _forget_segment(c, e, slots, queue, r, cached)
                r.computed = cached * c.block_size
                e.free_head -= cached
            e.free_head += blocks
        r.preempted = 0
        queue[e.line + e.running] = i
        e.running += 1
        e.admitted += 1
        e.used += blocks
        e.reserved += _blocks(c, r.p + c.max_output_tokens)
        if math.isnan(r.admitted):
            r.admitted = now
        if chunked:
            r.chunk = min(need - r.computed, budget)
            budget -= r.chunk
            tokens += r.chunk
        else:
            tokens += need
    return tokens


@inline
def _decode_run(c, law, n, e, limit, now, until, before):
    """From a boundary at ``now``, pass the silent iterations and start the one after them."""
    done, spent, cost = _silent_iterations(c, law, n, e, limit, until - now, before)
    e.emitted += done
    e.decoding_tokens += e.running * done
    e.start = now + spent
    e.end = e.start + cost
    return done


@inline
def _start_iteration(c, law, n, e, slots, queue, now, until):
    """Steps 2-4 of a boundary at ``now``; decode runs are carried on silently up to ``until``."""
    e.start = now
    preempted = 0
    if c.memory_policy == PAGED:
        preempted = _make_room(c, law, n, e, slots, queue)
    e.admitted = 0
    if preempted == 0:
        tokens = _admit(c, law, n, e, slots, queue, now)
    elif c.scheduler == CHUNKED:
        tokens = _continue_chunks(c, e, slots, queue)
    else:
        tokens = 0

    if e.admitted > 0 and c.scheduler == ORCA:
        e.kind = PREFILL
        e.end = now + prefill_s(c, law, n, float(tokens))
    elif e.admitted > 0:
        e.kind = MIXED
        time = _dense_s(c, law, n, float(tokens + e.decoding))
        chunks = 0
        for i in range(e.running - e.admitted, e.running):
            r = slots[e.lane + queue[e.line + i]]
            if r.chunk > 0:
                chunks += 1
                time += _chunk_s(c, law, n, float(r.chunk), float(r.computed))
        if e.decoding > 0:
            oy = c.y_attention + (n * c.n_sequences + e.decoding) * c.n_decode
            x = e.decoding_tokens / e.decoding
            time += _interpolate(law, c.x_decode, oy, c.n_decode, x)
        e.end = now + time + _head_s(c, law, n, e.decoding + chunks)
    elif e.running > 0:
        e.kind = DECODE
        limit = e.next_finish - e.emitted - 1
        if c.memory_policy == PAGED:
            # b sequences take at most b blocks in block_size iterations.
            free = int(law[n * EXPERT_WIDTH]) - e.used
            limit = min(limit, c.block_size * (free // e.running))
        before = np.inf
        if e.waiting > 0 and e.running < c.running_capacity:
            head = slots[e.lane + queue[_ring(c, e, 0)]]
            if head.available > now:
                before = head.available - now
            elif preempted > 0:
                limit = 0  # whether it fits is decided at the next boundary
        done = _decode_run(c, law, n, e, limit, now, until, before)
        if c.prefix_caching:
            for i in range(e.running):
                r = slots[e.lane + queue[e.line + i]]
                tokens = r.p + _generated(e, r)
                e.free_head += _blocks(c, tokens) - _blocks(c, tokens - done)
    else:
        e.kind = IDLE
        e.end = np.inf
        if e.waiting > 0:
            e.end = max(now, slots[e.lane + queue[_ring(c, e, 0)]].available)


@inline
def _advance(c, law, n, v, e, slots, queue, log, until):
    """Process every boundary of one expert at or before ``until``."""
    while e.end <= until and e.end < np.inf:
        now = e.end
        if (
            e.kind == DECODE
            and e.emitted + 1 < e.next_finish
            and c.memory_policy == RESERVE
            and (e.waiting == 0 or e.running == c.running_capacity)
        ):
            # Nothing can happen at this boundary: the usual case, without the calls.
            e.emitted += 1
            e.decoding_tokens += e.decoding
            _decode_run(c, law, n, e, e.next_finish - e.emitted - 1, now, until, np.inf)
            continue
        _end_iteration(c, n, v, e, slots, queue, log)
        _start_iteration(c, law, n, e, slots, queue, now, until)


@inline
def _enqueue(c, e, slots, queue, request, now, p, d, s, s_hat, d_hat, delay):
    """Put a request on its way to the expert; it waits in order of its arrival there."""
    e.free -= 1
    i = queue[e.line + 2 * c.slots + e.free]
    r = slots[e.lane + i]
    r.request = request
    r.arrived = now
    r.available = now + delay
    r.p = p
    r.d = d
    r.s = s
    r.s_hat = s_hat
    r.d_hat = d_hat
    r.g = 0
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
        other = queue[_ring(c, e, k - 1)]
        ahead = slots[e.lane + other]
        if ahead.preempted or ahead.available <= r.available:
            break
        queue[_ring(c, e, k)] = other
        k -= 1
    queue[_ring(c, e, k)] = i
    e.waiting += 1
    if e.kind == IDLE:
        e.end = max(e.start, slots[e.lane + queue[_ring(c, e, 0)]].available)


# ------------------------------------------------------------------------------ failing experts


@jit
def _scatter(x):
    """A bijection of 32-bit numbers; its products stay below 2**63."""
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return x ^ (x >> 16)


@jit
def stay_s(c, seed, n, change):
    """How long expert n stays up (even ``change``) or down (odd): exponential, in seconds.

    ``seed`` (32 bits) is drawn at reset; a hash scatters it with n and the number of changes.
    """
    x = _scatter(_scatter(_scatter(seed) ^ (n + 1)) ^ change)
    return -math.log((x + 0.5) * 2.0**-32) * (c.uptime_s if change % 2 == 0 else c.downtime_s)


@jit
def _fail(c, law, n, v, e, slots, queue, log):
    """Expert n dies: all that it runs, queues or is being sent is lost."""
    for i in range(e.running + e.waiting):
        k = queue[e.line + i] if i < e.running else queue[_ring(c, e, i - e.running)]
        r = slots[e.lane + k]
        entry = log[v.first_log + r.request]
        entry.expert = n
        entry.outcome = FAILED
        entry.available_s = r.available
        entry.admitted_s = r.admitted
        entry.first_token_s = r.first
        entry.score = r.s
        entry.prompt_tokens = r.p
        entry.output_tokens = r.d
        entry.preemptions = r.preemptions
        v.failed += 1
        v.step_late += r.s
    clear_expert(c, law, n, e, queue)
    _find_next_finish(e, slots, queue)


@jit
def _advance_any(c, law, n, v, e, slots, queue, log, until):
    """``_advance`` of an expert that may fail and come back, until it is empty if that is inf."""
    while True:
        changes = c.uptime_s > 0.0 and e.next_change <= until
        if until == np.inf and e.running + e.waiting == 0:
            changes = False
        _advance(c, law, n, v, e, slots, queue, log, e.next_change if changes else until)
        if not changes:
            return
        if e.down == 0:
            _fail(c, law, n, v, e, slots, queue, log)
        e.down = 1 - e.down
        e.changes += 1
        e.next_change += stay_s(c, v.failure_seed, n, e.changes)


# ------------------------------------------------------------------------------ reward of Eq. 15/16


@inline
def _violation_penalty(c, law, n, v, e, slots, queue, p_j, d_j, now):
    """Second term of Eq. 16: scores of running requests that Eq. 15 says the new one makes late."""
    k1 = law[n * EXPERT_WIDTH + 1]
    k2 = law[n * EXPERT_WIDTH + 2]
    limit = v.latency_requirement
    total = 0.0
    for i in range(e.running):
        r = slots[e.lane + queue[e.line + i]]
        g = _generated(e, r)
        d_i = max(r.d_hat, 1.0) if c.predicted_estimator else float(r.d)
        s_i = float(r.s_hat) if c.predicted_estimator else float(r.s)
        m = math.floor(max(0.0, min(d_i - g, d_j)))
        increase = (k1 * p_j + k2 * (m * p_j + 0.5 * m * (m + 1.0))) / d_i
        current = (now - r.arrived) / max(g, 1)
        if current + increase >= limit and (c.penalty == LITERAL or current < limit):
            total += s_i
    return total


# ------------------------------------------------------------------------------------ observation


@inline
def _can_take(c, law, n, e, p):
    """Whether expert n would queue a request of p prompt tokens now."""
    if e.waiting >= c.waiting_capacity or e.down != 0:
        return False
    return _blocks(c, p + c.max_output_tokens) <= int(law[n * EXPERT_WIDTH])


@inline
def _request_row(c, e, r, now, running, per_capacity, out, o):
    """Eq. 6 of one request in raw units; returns its KV blocks.

    The six are prompt tokens, predicted score, predicted length, memory, tokens so far, latency.
    """
    g = _generated(e, r)
    blocks = _blocks(c, r.p + g) if running else 0
    out[o] = min(float(r.p), MAX_PROMPT_TOKENS)
    out[o + 1] = r.s_hat
    out[o + 2] = r.d_hat
    out[o + 3] = blocks * per_capacity
    out[o + 4] = g
    out[o + 5] = min((now - r.arrived) / max(g, 1), MAX_LATENCY_S_PER_TOKEN)
    return blocks


@jit
def _scale_row(c, out, o):
    """The six features of Eq. 6 to [0, 1]; prompt length and latency on a log scale."""
    out[o] = math.log1p(out[o] / PROMPT_SCALE) * _PROMPT_LOG
    out[o + 2] /= c.max_output_tokens
    out[o + 4] /= c.max_output_tokens
    out[o + 5] = math.log1p(out[o + 5] / LATENCY_SCALE) * _LATENCY_LOG


@jit
def _observe(c, law, table, v, expert, slots, queue, row, num_rows, b, obs, masks):
    """Write row b of the observation and of the action mask; returns the mean memory use.

    ``obs`` is one float32 vector of sections (graph view: request, experts, running, waiting,
    latency requirement, each with a leading axis of B rows) and ``masks`` one int8 vector (running,
    waiting, action). ``row`` is the catalog row of the request to route, -1 after the last.
    Rows of queues that were empty before and are empty now are left alone.
    """
    n_exp = c.num_experts
    cap_r = c.running_capacity
    cap_w = c.waiting_capacity
    now = v.now
    memory_sum = 0.0
    o_experts = num_rows * n_exp * 3
    o_running = o_experts + num_rows * n_exp * 3
    o_waiting = o_running + num_rows * n_exp * cap_r * 6
    o_limit = o_waiting + num_rows * n_exp * cap_w * 6
    m_waiting = num_rows * n_exp * cap_r
    m_action = m_waiting + num_rows * n_exp * cap_w
    width = 6 + 6 * (cap_r + cap_w)
    if c.layout == FLAT:
        o = b * (1 + n_exp * width)
        obs[o] = v.latency_requirement
        m_action = 0
    elif c.layout == EXPERTS:
        m_action = 0
    else:
        obs[o_limit + b] = v.latency_requirement
    m_action += b * (n_exp + 1)
    masks[m_action] = 1
    for n in range(n_exp):
        e = expert[b, n]
        per_capacity = 1.0 / law[n * EXPERT_WIDTH]
        p = table[row, n, 0] if row >= 0 else 0.0
        masks[m_action + 1 + n] = row < 0 or _can_take(c, law, n, e, int(p))
        if c.layout == EXPERTS:
            o = (b * n_exp + n) * 3
            memory = used_blocks(c, e, slots, queue) * per_capacity
            memory_sum += memory
            obs[o] = memory
            obs[o + 1] = e.running / cap_r
            obs[o + 2] = e.waiting / (cap_r + cap_w)
            continue
        if c.layout == FLAT:
            first = b * (1 + n_exp * width) + 1 + n * width
            o_req, o_exp, o_run = first, first + 3, first + 6
            o_wait = o_run + 6 * cap_r
        else:
            o_req = (b * n_exp + n) * 3
            o_exp = o_experts + (b * n_exp + n) * 3
            o_run = o_running + (b * n_exp + n) * cap_r * 6
            o_wait = o_waiting + (b * n_exp + n) * cap_w * 6
        if row >= 0:
            obs[o_req] = min(p, MAX_PROMPT_TOKENS)
            obs[o_req + 1] = table[row, n, 3]
            obs[o_req + 2] = table[row, n, 4]
        else:
            obs[o_req] = 0.0
            obs[o_req + 1] = 0.0
            obs[o_req + 2] = 0.0
        obs[o_exp + 1] = e.running
        obs[o_exp + 2] = e.waiting
        shown_w = min(e.waiting, cap_w)
        used = 0
        for i in range(e.running):
            r = slots[e.lane + queue[e.line + i]]
            used += _request_row(c, e, r, now, True, per_capacity, obs, o_run + 6 * i)
        memory_sum += used * per_capacity
        obs[o_exp] = used * per_capacity
        for k in range(shown_w):
            r = slots[e.lane + queue[_ring(c, e, k)]]
            _request_row(c, e, r, now, False, per_capacity, obs, o_wait + 6 * k)
        for i in range(6 * e.running, 6 * e.shown_running):
            obs[o_run + i] = 0.0
        for i in range(6 * shown_w, 6 * e.shown_waiting):
            obs[o_wait + i] = 0.0
        if c.layout == FLAT:
            obs[o_req] = math.log1p(obs[o_req] / PROMPT_SCALE) * _PROMPT_LOG
            obs[o_req + 2] /= c.max_output_tokens
            obs[o_exp + 1] /= cap_r
            obs[o_exp + 2] /= cap_r + cap_w
            for i in range(e.running):
                _scale_row(c, obs, o_run + 6 * i)
            for k in range(shown_w):
                _scale_row(c, obs, o_wait + 6 * k)
        else:
            m = (b * n_exp + n) * cap_r
            for i in range(min(e.running, e.shown_running), max(e.running, e.shown_running)):
                masks[m + i] = i < e.running
            m = m_waiting + (b * n_exp + n) * cap_w
            for k in range(min(shown_w, e.shown_waiting), max(shown_w, e.shown_waiting)):
                masks[m + k] = k < shown_w
        e.shown_running = e.running
        e.shown_waiting = shown_w
    return memory_sum / n_exp


# ------------------------------------------------------------------------------------ entry points


@jit
def begin(cfg, law, table, arrivals, rows, env, expert, slots, queue, log, obs, masks, which):
    """Start a new episode in the rows b with which[b] != 0 and write their first observation.

    ``arrivals[b]`` (s), ``rows[b]`` (catalog rows) and ``env[b].latency_requirement`` must be set.
    """
    c = cfg[0]
    for b in range(env.shape[0]):
        if which[b] == 0:
            continue
        v = env[b]
        v.first_log = b * c.num_requests
        v.now = arrivals[b, 0]
        for j in range(c.num_requests):
            clear_log(log[v.first_log + j])
        _clear_system(c, law, b, v, expert, queue)
        if c.uptime_s > 0.0:
            for n in range(c.num_experts):
                _advance_any(c, law, n, v, expert[b, n], slots, queue, log, v.now)
    redraw(cfg, law, table, rows, env, expert, slots, queue, obs, masks, which)


@jit
def _clear_system(c, law, b, v, expert, queue):
    """Row b at time 0: all experts up and idle, nothing decided."""
    v.index = 0
    v.completed = 0
    v.failed = 0
    v.dropped = 0
    v.rejected = 0
    v.on_time = 0
    v.multi_token = 0
    v.qos = 0.0
    v.latency = 0.0
    v.ttft = 0.0
    v.tpot = 0.0
    v.e2e = 0.0
    v.waiting = 0.0
    v.inference = 0.0
    v.communication = 0.0
    v.memory = 0.0
    v.last_finish = 0.0
    for n in range(c.num_experts):
        e = expert[b, n]
        place(c, b, n, e)
        clear_expert(c, law, n, e, queue)
        e.down = 0
        e.changes = 0
        e.next_change = stay_s(c, v.failure_seed, n, 0) if c.uptime_s > 0.0 else np.inf


@inline
def place(c, b, n, e):
    """Where the slots and the lists of expert n in row b begin."""
    e.lane = (b * c.num_experts + n) * c.slots
    e.line = 3 * e.lane


@jit
def clear_expert(c, law, n, e, queue):
    """An idle expert with empty queues."""
    e.start = 0.0
    e.end = np.inf
    e.kind = IDLE
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
    e.free_tail = int(law[n * EXPERT_WIDTH])
    e.free = c.slots
    for i in range(c.slots):
        queue[e.line + 2 * c.slots + i] = c.slots - 1 - i


@jit
def clear_log(entry):
    """A request about which nothing is known yet."""
    entry.available_s = np.nan
    entry.admitted_s = np.nan
    entry.first_token_s = np.nan
    entry.finish_s = np.nan
    entry.score = np.nan
    entry.prompt_tokens = 0
    entry.output_tokens = 0
    entry.expert = -1
    entry.outcome = PENDING
    entry.preemptions = 0


@inline
def _show_all(c, e, num_rows, b, n, masks):
    """Have the next observation of expert n written in full, whatever was shown before."""
    e.shown_running = c.running_capacity
    e.shown_waiting = c.waiting_capacity
    if c.layout == GRAPH:
        m = (b * c.num_experts + n) * c.running_capacity
        masks[m : m + c.running_capacity] = 1
        m = (b * c.num_experts + n) * c.waiting_capacity
        m += num_rows * c.num_experts * c.running_capacity
        masks[m : m + c.waiting_capacity] = 1


@jit
def redraw(cfg, law, table, rows, env, expert, slots, queue, obs, masks, which):
    """Write the whole observation of the rows b with which[b] != 0, whatever was shown before."""
    c = cfg[0]
    num_rows = env.shape[0]
    for b in range(num_rows):
        if which[b] == 0:
            continue
        for n in range(c.num_experts):
            e = expert[b, n]
            place(c, b, n, e)
            _find_next_finish(e, slots, queue)
            _show_all(c, e, num_rows, b, n, masks)
        v = env[b]
        v.first_log = b * c.num_requests
        row = rows[b, v.index] if v.index < c.num_requests else -1
        _observe(c, law, table, v, expert, slots, queue, row, num_rows, b, obs, masks)


@jit
def step(
    cfg, law, table, arrivals, rows, env, expert, slots, queue, log, obs, masks, actions, which, out
):
    """Route the current request of every row b with which[b] != 0 and go on to the next.

    ``out`` (B, 3) receives the two terms of the reward and whether the episode has ended. Returns
    how many episodes have ended, or -1 - b if the action of row b is out of range (nothing has
    changed then).
    """
    c = cfg[0]
    num_rows = env.shape[0]
    for b in range(num_rows):
        if which[b] != 0 and (actions[b] < 0 or actions[b] > c.num_experts):
            return -1 - b
    ended = 0
    for b in range(num_rows):
        if which[b] == 0:
            continue
        v = env[b]
        request = v.index
        now = v.now
        row = rows[b, request]
        n = actions[b] - 1
        gain = 0.0
        loss = 0.0
        if n < 0:
            entry = log[v.first_log + request]
            entry.outcome = DROPPED
            entry.prompt_tokens = int(table[row, 0, 0])
            v.dropped += 1
        else:
            e = expert[b, n]
            p = int(table[row, n, 0])
            s = table[row, n, 1]
            d = int(table[row, n, 2])
            if not _can_take(c, law, n, e, p):
                entry = log[v.first_log + request]
                entry.outcome = REJECTED
                entry.expert = n
                entry.prompt_tokens = p
                entry.score = s
                entry.output_tokens = d
                v.rejected += 1
            else:
                if c.reward == QOS_AWARE:
                    d_j = table[row, n, 4] if c.predicted_estimator else table[row, n, 2]
                    loss -= _violation_penalty(
                        c, law, n, v, e, slots, queue, float(p), float(d_j), now
                    )
                elif c.reward == PAID_FORWARD:
                    gain += s
                delay = c.router_delay_s + p * c.delay_s_per_token
                _enqueue(
                    c,
                    e,
                    slots,
                    queue,
                    request,
                    now,
                    p,
                    d,
                    s,
                    table[row, n, 3],
                    table[row, n, 4],
                    delay,
                )
        v.index = request + 1
        last = v.index == c.num_requests
        until = np.inf if last else arrivals[b, v.index]
        v.step_qos = 0.0
        v.step_late = 0.0
        if c.uptime_s > 0.0:
            for k in range(c.num_experts):
                _advance_any(c, law, k, v, expert[b, k], slots, queue, log, until)
        for k in range(c.num_experts):
            e = expert[b, k]
            if e.end <= until and e.end < np.inf:
                _advance(c, law, k, v, e, slots, queue, log, until)
        if c.reward == PAID_FORWARD:
            loss -= v.step_late
        else:
            gain += v.step_qos
        if last:
            row = -1
            v.now = max(v.now, v.last_finish)
        else:
            row = rows[b, v.index]
            v.now = until
        memory = _observe(c, law, table, v, expert, slots, queue, row, num_rows, b, obs, masks)
        if not last:
            v.memory += memory
        out[b, 0] = gain
        out[b, 1] = loss
        out[b, 2] = 1.0 if last else 0.0
        ended += last
    return ended


@jit
def observe_stale(
    cfg, law, table, arrivals, rows, real, stale, expert, slots, queue, log, obs, masks, sent, which
):
    """Overwrite the observation of the rows b with which[b] != 0 by that of staleness_s ago.

    The ``stale`` systems, with ``expert``, ``slots``, ``queue`` and the (J,) ``log`` that nobody
    reads, lag behind the ``real`` ones: they get the actions ``sent`` (B, J) when these are old
    enough. At the end of an episode there is no request to route and the queues are empty.
    """
    c = cfg[0]
    num_rows = real.shape[0]
    for b in range(num_rows):
        if which[b] == 0:
            continue
        now = real[b]
        v = stale[b]
        if now.index == 0 or now.index == c.num_requests:
            v.first_log = 0
            v.latency_requirement = now.latency_requirement
            v.failure_seed = now.failure_seed
            _clear_system(c, law, b, v, expert, queue)
        for n in range(c.num_experts):
            place(c, b, n, expert[b, n])  # a restored one comes from another row
        row = -1
        if now.index < c.num_requests:
            row = rows[b, now.index]
            v.now = now.now - c.staleness_s
            while v.index < now.index and arrivals[b, v.index] <= v.now:
                j = v.index
                for n in range(c.num_experts):
                    _advance_any(c, law, n, v, expert[b, n], slots, queue, log, arrivals[b, j])
                n = sent[b, j] - 1
                if n >= 0:
                    p = int(table[rows[b, j], n, 0])
                    if _can_take(c, law, n, expert[b, n], p):
                        _enqueue(
                            c,
                            expert[b, n],
                            slots,
                            queue,
                            j,
                            arrivals[b, j],
                            p,
                            int(table[rows[b, j], n, 2]),
                            table[rows[b, j], n, 1],
                            table[rows[b, j], n, 3],
                            table[rows[b, j], n, 4],
                            c.router_delay_s + p * c.delay_s_per_token,
                        )
                v.index = j + 1
            for n in range(c.num_experts):
                _advance_any(c, law, n, v, expert[b, n], slots, queue, log, v.now)
        for n in range(c.num_experts):
            # The real system has written its own queues over these.
            _show_all(c, expert[b, n], num_rows, b, n, masks)
        _observe(c, law, table, v, expert, slots, queue, row, num_rows, b, obs, masks)


@jit
def run_replay(cfg, law, arrivals, table, env, expert, slots, queue, log, watch, course):
    """One expert serves every request of one list from an unbounded waiting queue.

    ``arrivals`` (J,) in seconds, non-decreasing; ``table`` (J, 2) prompt and output tokens.
    ``course`` (K, 3) receives the running and the waiting requests and the share of the KV blocks
    in use at the times ``watch`` (K,), non-decreasing.
    """
    c = cfg[0]
    v = env[0]
    e = expert[0, 0]
    place(c, 0, 0, e)
    clear_expert(c, law, 0, e, queue)
    for j in range(arrivals.shape[0]):
        clear_log(log[j])
    for j in range(arrivals.shape[0]):
        p = table[j, 0]
        _enqueue(
            c,
            e,
            slots,
            queue,
            j,
            arrivals[j],
            p,
            table[j, 1],
            0.0,
            0.0,
            0.0,
            c.router_delay_s + p * c.delay_s_per_token,
        )
    coming = 0
    for k in range(watch.shape[0]):
        _advance(c, law, 0, v, e, slots, queue, log, watch[k])
        while coming < arrivals.shape[0] and arrivals[coming] <= watch[k]:
            coming += 1
        course[k, 0] = e.running
        # All requests are queued from the outset; those yet to arrive do not wait.
        course[k, 1] = e.waiting - (arrivals.shape[0] - coming)
        course[k, 2] = used_blocks(c, e, slots, queue) / law[0]
    _advance(c, law, 0, v, e, slots, queue, log, np.inf)
