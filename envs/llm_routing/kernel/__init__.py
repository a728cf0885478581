"""Compiled engine of the LLM routing family: B independent systems of N experts each.

Every function is a pure function of its arguments, all chance being drawn before (at reset). The
arrays are described in ``layout``; inside, ``c`` is a `CONFIG`, ``t`` `Tables`, ``s`` `Systems`,
``q`` `Queues`, ``v`` an `ENV`, ``e`` an `EXPERT` and ``r`` a `SLOT`. Units are seconds and tokens;
memory is counted in KV blocks.
"""

from __future__ import annotations

import math

import numpy as np

from servegym._jit import borrowed, inline, inner, jit
from servegym.envs.llm_routing.kernel.iterations import (
    advance,
    change_availability,
    sojourn_s,
)
from servegym.envs.llm_routing.kernel.layout import (
    CAPACITY,
    CHUNKED,
    COMPLETED,
    COMPLETED_QOS,
    CONFIG,
    DENSE,
    DISCOUNT,
    DROPPED,
    ENV,
    EXPERT,
    EXPERT_WIDTH,
    EXPERTS,
    FAILED,
    FLAT,
    GRAPH,
    K1,
    K2,
    LITERAL,
    LOAD_HORIZONS,
    LOAD_WIDTH,
    LOG,
    MAX_GAP_S,
    MAX_LATENCY_S_PER_TOKEN,
    MAX_PROMPT_TOKENS,
    MAX_WAIT_S,
    NEW_VIOLATIONS,
    ORCA,
    OUTPUT,
    PAGED,
    PAID_FORWARD,
    PENDING,
    PREDICTED_OUTPUT,
    PREDICTED_SCORE,
    PROMPT,
    QOS_AWARE,
    REJECTED,
    RESERVE,
    SCORE,
    SLOT,
    SUMMARY,
    SUMMARY_FEATURES,
    SUMMARY_MEANS,
    SUMMARY_SPREADS,
    USUAL_QOS,
    Buffers,
    Copy,
    Queues,
    Systems,
    Tables,
    config_of,
)
from servegym.envs.llm_routing.kernel.observation import (
    blank_padding,
    clear_load,
    copy_load,
    copy_rows,
    note_arrival,
    observe_row,
    outlook,
    write_in_full,
)
from servegym.envs.llm_routing.kernel.queues import (
    Request,
    can_take,
    clear_expert,
    locate,
    put,
    settle,
)
from servegym.envs.llm_routing.kernel.scheduler import (
    before,
    enqueue,
    generated_tokens,
    newer,
    order_heap,
    request_of,
)

__all__ = [
    "CAPACITY",
    "CHUNKED",
    "COMPLETED",
    "COMPLETED_QOS",
    "CONFIG",
    "DENSE",
    "DROPPED",
    "ENV",
    "EXPERT",
    "EXPERTS",
    "EXPERT_WIDTH",
    "FAILED",
    "FLAT",
    "GRAPH",
    "LITERAL",
    "LOAD_HORIZONS",
    "LOAD_WIDTH",
    "LOG",
    "MAX_GAP_S",
    "MAX_LATENCY_S_PER_TOKEN",
    "MAX_PROMPT_TOKENS",
    "MAX_WAIT_S",
    "NEW_VIOLATIONS",
    "ORCA",
    "PAGED",
    "PAID_FORWARD",
    "PENDING",
    "QOS_AWARE",
    "REJECTED",
    "RESERVE",
    "SLOT",
    "SUMMARY",
    "SUMMARY_FEATURES",
    "SUMMARY_MEANS",
    "SUMMARY_SPREADS",
    "Buffers",
    "Copy",
    "Queues",
    "Systems",
    "Tables",
    "begin",
    "observe",
    "observe_stale",
    "run_replay",
    "sojourn_s",
    "step",
]


# ---------------------------------------------------------------------------------------- episodes


@jit
def begin(t, s, which):
    """Start a new episode in the rows b with which[b] != 0; `observe` writes what is seen.

    ``arrivals[b]`` (s), ``rows[b]`` (catalog rows) and ``env[b].latency_requirement`` must be set.
    """
    t, s = borrowed(t), borrowed(s)
    for b in range(s.env.shape[0]):
        if which[b] == 0:
            continue
        c = config_of(t, b)
        v = s.env[b]
        v.first_log = b * c.num_requests
        v.now = s.arrivals[b, 0]
        for j in range(c.num_requests):
            _clear_log(s.queues.log[v.first_log + j])
        _clear_system(c, b, s, v)
        note_arrival(c, t, s, b)
        for n in range(c.num_experts):
            e = s.expert[b, n]
            while e.next_change <= v.now:
                change_availability(c, n, v, e)


@inner
def _clear_system(c, b, s, v):
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
    v.outlook = 0.0
    clear_load(v)
    for n in range(c.num_experts):
        e = s.expert[b, n]
        locate(c, b, n, e)
        clear_expert(c, s.queues, e)
        e.down = 0
        e.changes = 0
        e.next_change = np.inf
        if c.uptime_s > 0.0:
            e.next_change = sojourn_s(c, v.failure_seed, n, e.changes)


@inner
def _clear_log(entry):
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


@jit
def observe(t, s, out, which):
    """Write the whole observation of the rows b with which[b] != 0, whatever was written before."""
    t, s, out = borrowed(t), borrowed(s), borrowed(out)
    for b in range(s.env.shape[0]):
        if which[b] == 0:
            continue
        c = config_of(t, b)
        v = s.env[b]
        v.first_log = b * c.num_requests
        blank_padding(c, s, out, b)
        for n in range(c.num_experts):
            e = s.expert[b, n]
            locate(c, b, n, e)
            order_heap(s.queues, e)  # the lengths of a restored state's requests may be other ones
            write_in_full(c, s, out.masks, b, n)
        observe_row(t, s, out, b, s.rows[b, v.index] if v.index < c.num_requests else -1)


# -------------------------------------------------------------------------------------------- steps


@inline
def _request(c, requests, row, model, index, arrived):
    """The request of a catalog row, sent to an expert with this model."""
    prompt = int(requests[row, model, PROMPT])
    return Request(
        index,
        arrived,
        arrived + (c.router_delay_s + prompt * c.delay_s_per_token),
        prompt,
        int(requests[row, model, OUTPUT]),
        requests[row, model, SCORE],
        requests[row, model, PREDICTED_SCORE],
        requests[row, model, PREDICTED_OUTPUT],
    )


@inline
def _send(q, e, request):
    """Put a request on its way to an expert."""
    i = put(q, e, request)
    enqueue(q, e, request_of(q, e, i), i)


@inline
def _late_scores(c, law, v, q, e, prompt, output):
    """Second term of Eq. 16: scores of running requests that Eq. 15 says the new one makes late.

    ``prompt`` and ``output`` are the new request's tokens.
    """
    k1 = law[e.profile * EXPERT_WIDTH + K1]
    k2 = law[e.profile * EXPERT_WIDTH + K2]
    total = 0.0
    i = e.oldest
    while i >= 0:
        r = request_of(q, e, i)
        i = newer(q, e, i)
        generated = generated_tokens(e, r)
        length = max(r.predicted_output, 1.0) if c.predicted_estimator else float(r.output)
        score = float(r.predicted_score) if c.predicted_estimator else float(r.score)
        m = math.floor(max(0.0, min(length - generated, output)))
        increase = (k1 * prompt + k2 * (m * prompt + 0.5 * m * (m + 1.0))) / length
        current = (v.now - r.arrived) / max(generated, 1)
        if current + increase >= v.latency_requirement:
            if c.penalty == LITERAL or current < v.latency_requirement:
                total += score
    return total


@inline
def _route(c, t, s, b, n):
    """Send the current request of row b to expert n, or drop it if n < 0.

    Returns what the action itself adds to the two terms of the reward.
    """
    v = s.env[b]
    index = v.index
    row = s.rows[b, index]
    entry = s.queues.log[v.first_log + index]
    if n < 0:
        entry.outcome = DROPPED
        entry.prompt_tokens = int(t.requests[row, 0, PROMPT])
        v.dropped += 1
        return 0.0, 0.0
    if n >= c.num_experts:  # there is none: only the arrays are that large
        entry.outcome = REJECTED
        entry.expert = n
        entry.prompt_tokens = int(t.requests[row, 0, PROMPT])
        v.rejected += 1
        return 0.0, 0.0
    e = s.expert[b, n]
    request = _request(c, t.requests, row, e.model, index, v.now)
    if not can_take(c, e, request.prompt):
        entry.outcome = REJECTED
        entry.expert = n
        entry.prompt_tokens = request.prompt
        entry.score = request.score
        entry.output_tokens = request.output
        v.rejected += 1
        return 0.0, 0.0
    gain = 0.0
    loss = 0.0
    if c.reward == QOS_AWARE:
        output = t.requests[row, e.model, PREDICTED_OUTPUT if c.predicted_estimator else OUTPUT]
        prompt, length = float(request.prompt), float(output)
        loss -= _late_scores(c, t.law, v, s.queues, e, prompt, length)
    elif c.reward == PAID_FORWARD:
        gain += request.score
    _send(s.queues, e, request)
    return gain, loss


@jit
def step(t, s, out, copy, actions, which, start, stop):
    """Route the current request of every row b with which[b] != 0 and go on to the next.

    Only rows from ``start`` to before ``stop`` move and are copied; calls for other rows may run
    at the same time. Returns how many of them have ended, or -1 - b if the action of any row b is
    out of range: all calls see that before they change anything.
    """
    t, s, out, copy = borrowed(t), borrowed(s), borrowed(out), borrowed(copy)
    most = t.config[0].max_experts
    for b in range(s.env.shape[0]):
        if which[b] != 0 and (actions[b] < 0 or actions[b] > most):
            return -1 - b
    ended = 0
    for b in range(start, stop):
        if which[b] == 0:
            continue
        c = config_of(t, b)
        v = s.env[b]
        gain, loss = _route(c, t, s, b, actions[b] - 1)
        v.index += 1
        last = v.index == c.num_requests
        until = np.inf if last else before(s.arrivals[b, v.index])
        v.step_qos = 0.0
        v.step_late = 0.0
        for n in range(c.num_experts):
            e = s.expert[b, n]
            if e.end <= until or e.next_change <= until:
                advance(c, t.law, n, v, s.queues, e, until)
        if c.reward == PAID_FORWARD:
            loss -= v.step_late
        else:
            gain += v.step_qos
        v.now = max(v.now, v.last_finish) if last else s.arrivals[b, v.index]
        if not last:
            note_arrival(c, t, s, b)
        memory = observe_row(t, s, out, b, -1 if last else s.rows[b, v.index])
        if not last:
            v.memory += memory
        if c.reward == DENSE:
            held = outlook(c, t.law, s, b)
            loss += DISCOUNT * held - v.outlook - USUAL_QOS
            v.outlook = held
        out.reward[b, 0] = gain
        out.reward[b, 1] = loss
        out.reward[b, 2] = 1.0 if last else 0.0
        ended += last
    copy_rows(out, copy, start, stop)
    return ended


# --------------------------------------------------------------------------------- old observations


@jit
def observe_stale(t, s, lagging, out, sent, which, start, stop):
    """Overwrite the observation of the rows b with which[b] != 0 by that of staleness_s ago.

    Only of those from ``start`` to before ``stop``; calls for other rows may run at the same time.
    The ``lagging`` systems, with a log of one row that nobody reads, are the systems ``s`` as the
    router knows them: they get the actions ``sent`` (B, J) when these are old enough. At the end
    of an episode there is no request to route and the queues are empty.
    """
    t, s, lagging, out = borrowed(t), borrowed(s), borrowed(lagging), borrowed(out)
    for b in range(start, stop):
        if which[b] == 0:
            continue
        c = config_of(t, b)
        now = s.env[b]
        v = lagging.env[b]
        if now.index == 0 or now.index == c.num_requests:
            v.first_log = 0
            v.latency_requirement = now.latency_requirement
            v.failure_seed = now.failure_seed
            for n in range(c.num_experts):
                _stand_behind(s.expert[b, n], lagging.expert[b, n])
            _clear_system(c, b, lagging, v)
        for n in range(c.num_experts):
            locate(c, b, n, lagging.expert[b, n])  # a restored one comes from another row
        row = -1
        if now.index < c.num_requests:
            row = s.rows[b, now.index]
            v.now = now.now - c.staleness_s
            while v.index < now.index and s.arrivals[b, v.index] <= v.now:
                _route_lagging(c, t, s, lagging, b, sent[b, v.index] - 1)
            for n in range(c.num_experts):
                advance(c, t.law, n, v, lagging.queues, lagging.expert[b, n], v.now)
        for n in range(c.num_experts):
            # The real system has written its own queues over these.
            write_in_full(c, lagging, out.masks, b, n)
        copy_load(now, v)
        observe_row(t, lagging, out, b, row)


@inline
def _stand_behind(real, e):
    e.capacity = real.capacity
    e.profile = real.profile
    e.model = real.model


@inline
def _route_lagging(c, t, s, lagging, b, n):
    """Bring the lagging system to its next request and send that to expert n, or drop it."""
    v = lagging.env[b]
    arrived = s.arrivals[b, v.index]
    for k in range(c.num_experts):
        advance(c, t.law, k, v, lagging.queues, lagging.expert[b, k], before(arrived))
    if n >= 0:
        e = lagging.expert[b, n]
        request = _request(c, t.requests, s.rows[b, v.index], e.model, v.index, arrived)
        if can_take(c, e, request.prompt):
            _send(lagging.queues, e, request)
    v.index += 1


# ------------------------------------------------------------------------------------------- replay


@jit
def run_replay(t, s, tokens, times, timeline):
    """One expert serves every request of one list from an unbounded waiting queue.

    ``s.arrivals`` (1, J) in seconds must not decrease; ``tokens`` (J, 2) are prompt and output
    tokens. ``timeline`` (K, 3) receives the running and the waiting requests and the share of the
    KV blocks in use at the ``times`` (K,), which must not decrease.
    """
    t, s = borrowed(t), borrowed(s)
    c = t.config[0]
    count = tokens.shape[0]
    for n in range(c.num_experts):
        v = s.env[0]
        e = s.expert[0, n]
        locate(c, 0, n, e)
        clear_expert(c, s.queues, e)
        for j in range(count):
            _clear_log(s.queues.log[j])
        zero = np.float32(0.0)
        for j in range(count):
            prompt, arrived = tokens[j, 0], s.arrivals[0, j]
            available = arrived + (c.router_delay_s + prompt * c.delay_s_per_token)
            request = Request(j, arrived, available, prompt, tokens[j, 1], zero, zero, zero)
            _send(s.queues, e, request)
        here = 0
        for k in range(times.shape[0]):
            advance(c, t.law, n, v, s.queues, e, times[k])
            while here < count and s.arrivals[0, here] <= times[k]:
                here += 1
            timeline[k, 0] = e.running
            # All requests are queued from the outset; those yet to arrive do not wait.
            timeline[k, 1] = e.waiting - (count - here)
            settle(c, s.queues, e)
            timeline[k, 2] = (e.capacity - e.free) / e.capacity
        advance(c, t.law, n, v, s.queues, e, np.inf)
