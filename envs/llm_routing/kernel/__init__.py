"""Compiled engine of the LLM routing family: B independent systems of N experts each.

Every function is a pure function of its arguments, all chance being drawn before (at reset). The
arrays are described in ``layout``. Units are seconds and tokens; memory is counted in KV blocks.
"""

from __future__ import annotations

import math

import numpy as np

from servegym._jit import borrowed, inline, inner, jit
from servegym.envs.llm_routing.kernel.iterations import advance, change_availability, start_up
from servegym.envs.llm_routing.kernel.law import estimator_slopes
from servegym.envs.llm_routing.kernel.layout import (
    DENSE,
    DROPPED,
    LITERAL,
    OUTPUT,
    PAID_FORWARD,
    PENDING,
    PREDICTED_OUTPUT,
    PREDICTED_SCORE,
    PROMPT,
    QOS_AWARE,
    REJECTED,
    SCORE,
    USUAL_QOS,
    config_of,
)
from servegym.envs.llm_routing.kernel.observation import (
    blank_padding,
    clear_load,
    note_arrival,
    observe_row,
    outlook,
    write_in_full,
)
from servegym.envs.llm_routing.kernel.queues import can_take, clear_expert, locate, put, settle
from servegym.envs.llm_routing.kernel.scheduler import (
    before,
    generated_tokens,
    newer,
    order_heap,
    request_of,
)

# ---------------------------------------------------------------------------------------- episodes


@jit
def begin(tables, systems, which):
    """Start a new episode in the rows with which[row] != 0; `observe` writes what is seen.

    Arrivals, catalog rows and ``env[row].latency_requirement`` must be set.
    """
    tables, systems = borrowed(tables), borrowed(systems)
    for row in range(systems.env.shape[0]):
        if which[row] == 0:
            continue
        config = config_of(tables, row)
        env = systems.env[row]
        env.first_log = row * config.num_requests
        env.now = systems.arrivals[row, 0]
        for j in range(config.num_requests):
            _clear_log(systems.queues.log[env.first_log + j])
        _clear_system(config, row, systems, env)
        note_arrival(config, tables, systems, row)
        for n in range(config.num_experts):
            expert = systems.expert[row, n]
            while expert.next_change <= env.now:
                change_availability(config, env, expert)


@inner
def _clear_system(config, row, systems, env):
    """The row at time 0: all experts up and idle, nothing decided."""
    env.index = env.completed = env.failed = env.dropped = env.rejected = 0
    env.on_time = env.multi_token = 0
    env.qos = env.latency = env.ttft = env.tpot = env.e2e = env.memory = 0.0
    env.waiting = env.inference = env.communication = env.last_finish = env.outlook = 0.0
    clear_load(env)
    for n in range(config.num_experts):
        expert = systems.expert[row, n]
        locate(config, row, n, expert)
        clear_expert(config, systems.queues, expert)
        start_up(config, env, expert)


@inner
def _clear_log(entry):
    """A request about which nothing is known yet."""
    entry.available_s = entry.admitted_s = entry.first_token_s = entry.finish_s = np.nan
    entry.score = np.nan
    entry.prompt_tokens = entry.output_tokens = entry.preemptions = 0
    entry.expert = -1
    entry.outcome = PENDING


@jit
def observe(tables, systems, out, which):
    """Write the whole observation of the rows with which[row] != 0, whatever was written before."""
    tables, systems, out = borrowed(tables), borrowed(systems), borrowed(out)
    for row in range(systems.env.shape[0]):
        if which[row] == 0:
            continue
        config = config_of(tables, row)
        env = systems.env[row]
        env.first_log = row * config.num_requests
        blank_padding(config, systems, out, row)
        for n in range(config.num_experts):
            expert = systems.expert[row, n]
            locate(config, row, n, expert)
            # The lengths of a restored state's requests may be other ones.
            order_heap(systems.queues, expert)
            write_in_full(config, systems, out.masks, row, n)
        catalog_row = -1
        if env.index < config.num_requests:
            catalog_row = systems.rows[row, env.index]
        observe_row(tables, systems, out, row, catalog_row)


# -------------------------------------------------------------------------------------------- steps


@inline
def _send(config, requests, catalog_row, queues, expert, index, arrived):
    """Put a request of the catalog on its way to an expert."""
    model = expert.model
    prompt, output = requests[catalog_row, model, PROMPT], requests[catalog_row, model, OUTPUT]
    request = put(config, queues, expert, index, arrived, int(prompt), int(output))
    request.score = requests[catalog_row, model, SCORE]
    request.predicted_score = requests[catalog_row, model, PREDICTED_SCORE]
    request.predicted_output = requests[catalog_row, model, PREDICTED_OUTPUT]


@inline
def _late_scores(config, law, env, queues, expert, prompt, output):
    """Second term of Eq. 16: scores of running requests that Eq. 15 says the new one makes late.

    ``prompt`` and ``output`` are the new request's tokens.
    """
    # Eq. 15's two slopes, not the engine's law: it is what the paper pays by.
    k1, k2 = estimator_slopes(law, expert)
    total = 0.0
    slot = expert.oldest
    while slot >= 0:
        request = request_of(queues, expert, slot)
        slot = newer(queues, expert, slot)
        generated = generated_tokens(expert, request)
        length, score = float(request.output), float(request.score)
        if config.predicted_estimator:
            length = max(float(request.predicted_output), 1.0)
            score = float(request.predicted_score)
        m = math.floor(max(0.0, min(length - generated, output)))
        increase = (k1 * prompt + k2 * (m * prompt + 0.5 * m * (m + 1.0))) / length
        current = (env.now - request.arrived) / max(generated, 1)
        if current + increase >= env.latency_requirement:
            # As printed Eq. 16 counts requests again that are late already.
            if config.penalty == LITERAL or current < env.latency_requirement:
                total += score
    return total


@inline
def _route(config, tables, systems, row, number):
    """Send the current request of the row to an expert, or drop it if ``number`` is -1.

    Returns what the action itself adds to the two terms of the reward.
    """
    env = systems.env[row]
    requests, catalog_row = tables.requests, systems.rows[row, env.index]
    entry = systems.queues.log[env.first_log + env.index]
    if number < 0:
        entry.outcome = DROPPED
        entry.prompt_tokens = int(requests[catalog_row, 0, PROMPT])
        env.dropped += 1
        return 0.0, 0.0
    if number >= config.num_experts:  # there is none: only the arrays are that large
        entry.outcome = REJECTED
        entry.expert = number
        entry.prompt_tokens = int(requests[catalog_row, 0, PROMPT])
        env.rejected += 1
        return 0.0, 0.0
    expert = systems.expert[row, number]
    prompt = int(requests[catalog_row, expert.model, PROMPT])
    if not can_take(config, expert, prompt):
        entry.outcome = REJECTED
        entry.expert = number
        entry.prompt_tokens = prompt
        entry.score = requests[catalog_row, expert.model, SCORE]
        entry.output_tokens = int(requests[catalog_row, expert.model, OUTPUT])
        env.rejected += 1
        return 0.0, 0.0
    gain = 0.0
    loss = 0.0
    if config.reward == QOS_AWARE:
        column = PREDICTED_OUTPUT if config.predicted_estimator else OUTPUT
        length = float(requests[catalog_row, expert.model, column])
        loss -= _late_scores(config, tables.law, env, systems.queues, expert, float(prompt), length)
    elif config.reward == PAID_FORWARD:
        gain += requests[catalog_row, expert.model, SCORE]
    _send(config, requests, catalog_row, systems.queues, expert, env.index, env.now)
    return gain, loss


@jit
def step(tables, systems, out, actions, which, start, stop):
    """Route the current request of every row with which[row] != 0 and go on to the next.

    Only rows from ``start`` to before ``stop`` move; calls for other rows may run at the same time.
    Returns how many of them have ended, or -1 - row if the action of any row is out of range: all
    calls see that before they change anything.
    """
    tables, systems, out = borrowed((tables, systems, out))
    most = tables.config[0].max_experts
    for row in range(systems.env.shape[0]):
        if which[row] != 0 and (actions[row] < 0 or actions[row] > most):
            # Before anything moves: an error leaves all systems as they were.
            return -1 - row
    ended = 0
    for row in range(start, stop):
        if which[row] == 0:
            continue
        config = config_of(tables, row)
        env = systems.env[row]
        gain, loss = _route(config, tables, systems, row, actions[row] - 1)
        env.index += 1
        last = env.index == config.num_requests
        # After the last decision every expert works off what it has.
        until = np.inf if last else before(systems.arrivals[row, env.index])
        env.step_qos = env.step_late = 0.0
        for n in range(config.num_experts):
            expert = systems.expert[row, n]
            # Most experts have no boundary before the next arrival: skip the call.
            if expert.end <= until or expert.next_change <= until:
                advance(config, tables.law, env, systems.queues, expert, until)
        if config.reward == PAID_FORWARD:
            loss -= env.step_late
        else:
            gain += env.step_qos
        if last:
            env.now = max(env.now, env.last_finish)
            observe_row(tables, systems, out, row, -1)
        else:
            env.now = systems.arrivals[row, env.index]
            note_arrival(config, tables, systems, row)
            env.memory += observe_row(tables, systems, out, row, systems.rows[row, env.index])
        if config.reward == DENSE:
            # A difference of potentials, 0 at both ends: over an episode it adds up to nothing.
            potential = outlook(config, tables.law, systems, row)
            loss += potential - env.outlook - USUAL_QOS
            env.outlook = potential
        out.reward[row, 0] = gain
        out.reward[row, 1] = loss
        out.reward[row, 2] = 1.0 if last else 0.0
        ended += last
    return ended


# ------------------------------------------------------------------------------------------- replay


@jit
def run_replay(tables, systems, tokens, times, timeline):
    """One expert serves every request of one list from an unbounded waiting queue.

    The arrivals (1, J) in seconds must not decrease; ``tokens`` (J, 2) are prompt and output
    tokens. ``timeline`` (K, 3) receives the running and the waiting requests and the share of the
    KV blocks in use at the ``times`` (K,), which must not decrease.
    """
    tables, systems = borrowed(tables), borrowed(systems)
    config = tables.config[0]
    count = tokens.shape[0]
    for n in range(config.num_experts):
        env = systems.env[0]
        expert = systems.expert[0, n]
        locate(config, 0, n, expert)
        clear_expert(config, systems.queues, expert)
        for j in range(count):
            _clear_log(systems.queues.log[j])
        for j in range(count):
            arrived = systems.arrivals[0, j]
            put(config, systems.queues, expert, j, arrived, tokens[j, 0], tokens[j, 1])
        here = 0
        for k in range(times.shape[0]):
            advance(config, tables.law, env, systems.queues, expert, times[k])
            while here < count and systems.arrivals[0, here] <= times[k]:
                here += 1
            timeline[k, 0] = expert.running
            # All requests are queued from the outset; those yet to arrive do not wait.
            timeline[k, 1] = expert.waiting - (count - here)
            settle(config, systems.queues, expert)
            timeline[k, 2] = (expert.capacity - expert.free) / expert.capacity
        advance(config, tables.law, env, systems.queues, expert, np.inf)
