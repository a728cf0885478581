"""One expert in time: an iteration-level scheduler that goes from boundary to boundary.

A boundary is the end of an iteration: tokens are emitted and requests complete (1), memory is made
room for (2), requests are admitted (3) and the next iteration starts (4). A run of decode
iterations in which nothing else can happen is one closed-form update.

With asynchronous scheduling an iteration is planned when the one before it starts, so that the
host's work hides behind the device's: vLLM's loop with two batches in flight
(``step_with_batch_queue`` in ``vllm/v1/engine/core.py`` at commit 00080ee and
``vllm/v1/core/sched/async_scheduler.py`` at 014b235). Nothing but arrivals happens between the plan
and the end of the iteration under way, so both are one boundary here.
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
    HAS_LEFT,
    begin_decoding,
    clear_expert,
    complete_decoding,
    leave,
    make_room,
    take_chunk,
    vacate,
)
from servegym.envs.llm_routing.kernel.scheduler import (
    IDLE,
    admit_head,
    blocks_of,
    closed_run,
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
def _log_request(env, queues, expert, request, outcome, finish_s):
    entry = queues.log[env.first_log + request.request]
    entry.expert = expert.number
    entry.outcome = outcome
    entry.available_s = request.available
    entry.admitted_s = request.admitted
    entry.first_token_s = request.first
    entry.finish_s = finish_s
    entry.score = request.score
    entry.prompt_tokens = request.prompt
    entry.output_tokens = request.output
    entry.preemptions = request.preemptions


@inline
def _complete(config, env, queues, expert, slot, now):
    """A request has its last token at ``now``: record it and free its slot."""
    request = request_of(queues, expert, slot)
    _log_request(env, queues, expert, request, COMPLETED, now)
    e2e = now - request.arrived
    latency = e2e / request.output
    env.completed += 1
    env.latency += latency
    env.e2e += e2e
    env.ttft += request.first - request.arrived
    if request.output > 1:
        env.multi_token += 1
        env.tpot += (now - request.first) / (request.output - 1)
    env.communication += request.prompt * config.delay_s_per_token
    env.waiting += request.admitted - request.available
    env.inference += now - request.admitted
    env.last_finish = max(env.last_finish, now)
    # Exactly at L is on time.
    if latency <= env.latency_requirement:
        env.on_time += 1
        env.qos += request.score
        env.step_qos += request.score
    else:
        env.step_late += request.score
    # make_room may have taken the blocks of one that waited for this plan.
    if request.chunk != HAS_LEFT:
        leave(config, queues, expert, request, slot)
    vacate(queues, expert, slot)


@inline
def _end_iteration(config, env, queues, expert):
    """Step 1 of a boundary: tokens of the iteration that ends now, completions.

    Returns how many requests have completed and wait for the next plan to leave.
    """
    now = expert.end
    left = 0
    if expert.iteration == IDLE:
        return left
    # Orca stops the decodes while it prefills; a mixed iteration has a token for each.
    if expert.iteration != PREFILL:
        expert.emitted += 1
        expert.decoding_tokens += expert.decoding
        # The usual end of an iteration: nobody is done and no prefill was under way.
        if expert.iteration == DECODE and expert.emitted < expert.next_finish:
            return left
    if expert.iteration != DECODE:
        slot = next_prefilled(queues, expert)
        while slot >= 0:
            request = request_of(queues, expert, slot)
            begin_decoding(config, queues, expert, request, slot)
            # After a preemption the first token is not the first any more.
            if request.generated == 1:
                request.first = now
            slot = next_prefilled(queues, expert)
    find_next_finish(queues, expert)
    last = -1
    while expert.next_finish <= expert.emitted:
        slot = first_to_finish(queues, expert)
        if config.async_scheduling:
            request = request_of(queues, expert, slot)
            complete_decoding(config, queues, expert, request)
            # Out of the heap, its place is free to link those that wait to leave.
            request.place = -1
            if last < 0:
                expert.leaving = slot
            else:
                request_of(queues, expert, last).place = slot
            last = slot
            left += 1
        else:
            _complete(config, env, queues, expert, slot, now)
        find_next_finish(queues, expert)
    return left


@inline
def _let_leave(config, env, queues, expert, now):
    """Those whose last token came while the next iteration was planned leave."""
    while expert.leaving >= 0:
        slot = expert.leaving
        expert.leaving = request_of(queues, expert, slot).place
        _complete(config, env, queues, expert, slot, now)


# ---------------------------------------------------------------------------------------- admission


@inline
def _admit(config, queues, expert, now, planned, tokens):
    """Step 3 of a boundary: admit from the head of the waiting queue, first come first served.

    Only those who were there when the iteration was ``planned``. Returns its prefill tokens; there
    were ``tokens``, of the prefill under way.
    """
    chunked = config.scheduler == CHUNKED
    budget = config.token_budget - expert.decoding if chunked else config.token_budget
    while expert.waiting > 0 and expert.running < config.running_capacity:
        request = request_of(queues, expert, expert.head)
        need = request.prompt + request.generated
        # Prompts are admitted whole without chunks, and one may exceed the budget alone.
        if tokens >= budget or (not chunked and tokens > 0 and tokens + need > budget):
            break
        # Orca reserves what a request may need at most: lengths are not known at admission.
        longest = blocks_of(config, request.prompt + config.max_output_tokens)
        if config.memory_policy == RESERVE:
            fits = expert.reserved + longest <= expert.capacity
        else:
            # vLLM's full_sequence_must_fit, the default: all tokens known so far must fit, though
            # it takes the blocks of its first chunk alone.
            fits = blocks_of(config, need) <= expert.free
        # In vLLM as in Orca who does not fit holds up all behind it.
        if request.available > planned or not fits:
            break
        admit_head(queues, expert, request, now)
        expert.reserved += longest
        request.chunk = need - request.computed
        if chunked:
            request.chunk = min(request.chunk, budget - tokens)
        take_chunk(config, expert, request)
        tokens += request.chunk
    return tokens


# --------------------------------------------------------------------------------------- iterations


@inline
def _run_decodes(law, expert, limit, now, until, before):
    """From a boundary at ``now``, pass the decode iterations that fit and start the one after."""
    done, spent, cost = decode_iterations(law, expert, limit, until - now, before)
    expert.emitted += done
    expert.decoding_tokens += expert.running * done
    expert.start = now + spent
    expert.end = expert.start + cost


@inline
def _start_decodes(config, law, queues, expert, now, until, preempted, planned, left):
    """Decode iterations up to the first in which something else may happen."""
    # The iteration that ends with a last token is a boundary of its own.
    limit = expert.next_finish - expert.emitted - 1
    if config.memory_policy == PAGED:
        limit = closed_run(config, expert)
    before = np.inf
    if expert.waiting > 0 and expert.running < config.running_capacity:
        head = request_of(queues, expert, expert.head)
        # Who arrives later is admitted at the first boundary after that.
        if head.available > now:
            before = head.available - now
        elif preempted > 0 or left > 0 or head.available > planned:
            limit = 0  # whether it joins is decided at the next boundary
    _run_decodes(law, expert, limit, now, until, before)


@inline
def _plan(config, queues, expert, now, planned):
    """Steps 2 and 3 of a boundary: prefill tokens of the iteration, how many were preempted."""
    tokens = 0
    preempted = 0
    if expert.prefill >= 0:
        tokens = next_chunk(config, queues, expert)
        take_chunk(config, expert, request_of(queues, expert, expert.prefill))
    # Running requests come first: blocks for this step are taken before anyone is admitted.
    if config.memory_policy == PAGED:
        preempted = make_room(config, queues, expert)
    # vLLM admits nobody in a step that preempted.
    if preempted == 0:
        tokens = _admit(config, queues, expert, now, planned, tokens)
    # The prefill under way was preempted itself.
    elif expert.prefill < 0:
        tokens = 0
    return tokens, preempted


@inline
def _start_iteration(config, law, env, queues, expert, now, until):
    """Steps 2-4 of a boundary at ``now``, after step 1; decodes run on up to ``until``."""
    # The plan knew those who were there when the iteration that ends now had started.
    planned = now
    if config.async_scheduling and expert.iteration != IDLE:
        planned = expert.start
    left = _end_iteration(config, env, queues, expert)
    expert.start = now
    tokens, preempted = _plan(config, queues, expert, now, planned)
    if config.async_scheduling:
        _let_leave(config, env, queues, expert, now)
        # A plan with nobody to serve starts nothing: the next is made now, and starts at once.
        if expert.running == 0:
            tokens, preempted = _plan(config, queues, expert, now, now)
    prefills = expert.running > expert.decoding
    if prefills and config.scheduler == ORCA:
        expert.iteration = PREFILL
        expert.end = now + prefill_s(law, expert.profile, float(tokens))
    elif prefills:
        expert.iteration = MIXED
        expert.end = mixed_end_s(law, queues, expert, now, tokens)
    elif expert.running > 0:
        expert.iteration = DECODE
        _start_decodes(config, law, queues, expert, now, until, preempted, planned, left)
    else:
        expert.iteration = IDLE
        expert.end = np.inf
        if expert.waiting > 0:
            # It is still on its way: the next boundary is when it comes.
            expert.end = max(now, request_of(queues, expert, expert.head).available)


# ----------------------------------------------------------------------------------------- failures


@inner
def _hash32(bits):
    """A bijection of 32-bit numbers; its products stay below 2**63."""
    bits = ((bits ^ (bits >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return bits ^ (bits >> 16)


@jit
def sojourn_s(config, seed, number, change):
    """How long a replica stays up (even ``change``) or down (odd): exponential, in seconds.

    ``seed`` (32 bits) is drawn at reset and hashed with its number and the number of changes.
    """
    # A hash instead of a generator: a system can be copied, and no draw goes by the actions.
    bits = _hash32(_hash32(_hash32(seed) ^ (number + 1)) ^ change)
    mean_s = config.uptime_s if change % 2 == 0 else config.downtime_s
    return -math.log((bits + 0.5) * 2.0**-32) * mean_s


@inline
def start_up(config, env, replica):
    """At time 0 a replica is up; draw when that changes."""
    replica.down = replica.changes = 0
    replica.next_change = np.inf
    if config.uptime_s > 0.0:
        replica.next_change = sojourn_s(config, env.failure_seed, replica.number, 0)


@inline
def changes_by(config, replica, until):
    """Whether a replica fails or comes back by then; not if it is empty and that is inf."""
    # Failures go on for ever: without this the last of an episode would never be.
    ends = until == np.inf and replica.running + replica.waiting == 0
    return config.uptime_s > 0.0 and replica.next_change <= until and not ends


@inline
def change_availability(config, env, replica):
    """A replica that is up goes down, or comes back; draw when that changes again."""
    replica.down = 1 - replica.down
    replica.changes += 1
    replica.next_change += sojourn_s(config, env.failure_seed, replica.number, replica.changes)


@inner
def _fail(config, env, queues, expert):
    """The expert dies: all that it runs, queues or is being sent is lost."""
    for first in (expert.oldest, expert.head):
        slot = first
        while slot >= 0:
            request = request_of(queues, expert, slot)
            _log_request(env, queues, expert, request, FAILED, np.nan)
            env.failed += 1
            # PAID_FORWARD has paid the score: a lost answer gives it back as a late one does.
            env.step_late += request.score
            slot = newer(queues, expert, slot)
    clear_expert(config, queues, expert)


@inline
def advance(config, law, env, queues, expert, until):
    """Let one expert work until ``until``, or until it is empty if that is inf.

    Boundaries and failures at ``until`` count.
    """
    while True:
        changes = changes_by(config, expert, until)
        end = expert.next_change if changes else until
        while expert.end <= end and expert.end < np.inf:
            now = expert.end
            if (
                expert.iteration == DECODE
                and expert.emitted + 1 < expert.next_finish
                and config.memory_policy == RESERVE
                and (expert.waiting == 0 or expert.running == config.running_capacity)
            ):
                # Nothing can happen at this boundary: the usual case, without the calls.
                expert.emitted += 1
                expert.decoding_tokens += expert.decoding
                _run_decodes(law, expert, expert.next_finish - expert.emitted - 1, now, end, np.inf)
                continue
            _start_iteration(config, law, env, queues, expert, now, end)
        if not changes:
            return
        if expert.down == 0:
            _fail(config, env, queues, expert)
        change_availability(config, env, expert)
