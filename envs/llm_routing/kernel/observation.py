"""What the router sees: one function a layout, and the mask of the legal actions.

Rows of queues that were empty before and are empty now are left alone, so what an observation costs
goes by the requests in the system and not by the size of the buffer.
"""

from __future__ import annotations

import math

import numpy as np

from servegym._jit import inline, inner
from servegym.envs.llm_routing.kernel.law import decode_s, estimator_slopes
from servegym.envs.llm_routing.kernel.layout import (
    EXPERTS,
    FLAT,
    GRAPH,
    LOAD_COLUMNS,
    LOAD_HORIZONS,
    LOAD_WIDTH,
    MAX_GAP_S,
    MAX_LATENCY_S_PER_TOKEN,
    MAX_PROMPT_TOKENS,
    MAX_WAIT_S,
    OF_SUMMARY,
    PREDICTED_OUTPUT,
    PREDICTED_SCORE,
    PROMPT,
    QUEUED_COLUMNS,
    REQUEST_COLUMNS,
    STATE_COLUMNS,
    SUMMARY,
    SUMMARY_CONTEXT,
    SUMMARY_MEANS,
    SUMMARY_SPREADS,
    SUMMARY_WIDTH,
    config_of,
)
from servegym.envs.llm_routing.kernel.queues import can_take, scheduled_tokens, settle
from servegym.envs.llm_routing.kernel.scheduler import (
    blocks_of,
    generated_tokens,
    newer,
    request_of,
)

PROMPT_SCALE = 16.0
LATENCY_SCALE = 0.01
PROMPT_LOG = 1.0 / math.log1p(MAX_PROMPT_TOKENS / PROMPT_SCALE)
LATENCY_LOG = 1.0 / math.log1p(MAX_LATENCY_S_PER_TOKEN / LATENCY_SCALE)
GAP_LOG = 1.0 / math.log1p(MAX_GAP_S / LATENCY_SCALE)
LOAD_WEIGHTS = 1.0 / np.array(LOAD_HORIZONS)

REQUEST_WIDTH = len(QUEUED_COLUMNS)
ARRIVED_WIDTH = len(REQUEST_COLUMNS)
STATE_WIDTH = len(STATE_COLUMNS)
LOAD_MEANS = len(LOAD_COLUMNS)
# Where the columns that all layouts share stand in a row of SUMMARY.
ARRIVED_AT = OF_SUMMARY["prompt_tokens"]
LOAD_AT = OF_SUMMARY["gap_s_8"]


@inner
def observe_row(tables, systems, out, row, catalog_row):
    """Write a row of the observation and of the action mask; returns the mean memory use.

    ``catalog_row`` is that of the request to route, -1 after the last.
    """
    config = config_of(tables, row)
    first = row * (config.max_experts + 1)  # of the action mask
    if config.layout == EXPERTS:
        memory = _observe_experts(config, tables, systems, out, row)
    elif config.layout == SUMMARY:
        memory = _observe_summary(config, tables, systems, out, row, catalog_row)
    elif config.layout == FLAT:
        memory = _observe_flat(config, tables, systems, out, row, catalog_row)
    else:
        first += systems.env.shape[0] * config.max_experts * config.slots
        memory = _observe_graph(config, tables, systems, out, row, catalog_row)
    out.masks[first] = 1
    for n in range(config.num_experts):
        expert = systems.expert[row, n]
        prompt = 0
        if catalog_row >= 0:
            prompt = int(tables.requests[catalog_row, expert.model, PROMPT])
        out.masks[first + 1 + n] = catalog_row < 0 or can_take(config, expert, prompt)
    return memory


@inner
def note_arrival(config, tables, systems, row):
    """The request to route enters the means of the load.

    A mean over the last h requests is that of all so far while they are fewer than h; then each
    value moves it by 1/h of the difference. Tokens are means over the models of the experts.
    """
    env = systems.env[row]
    catalog_row = systems.rows[row, env.index]
    prompt = 0.0
    length = 0.0
    for n in range(config.num_experts):
        model = systems.expert[row, n].model
        prompt += tables.requests[catalog_row, model, PROMPT]
        length += tables.requests[catalog_row, model, PREDICTED_OUTPUT]
    prompt /= config.num_experts
    length /= config.num_experts
    # A plain mean until there are h requests: an exponential one would begin at zero.
    share = 1.0 / (env.index + 1)
    for k in range(len(LOAD_WEIGHTS)):
        weight = max(share, LOAD_WEIGHTS[k])
        env.prompt[k] += weight * (prompt - env.prompt[k])
        env.length[k] += weight * (length - env.length[k])
    if env.index > 0:
        gap = systems.arrivals[row, env.index] - systems.arrivals[row, env.index - 1]
        share = 1.0 / env.index
        for k in range(len(LOAD_WEIGHTS)):
            env.gap[k] += max(share, LOAD_WEIGHTS[k]) * (gap - env.gap[k])


@inline
def clear_load(env):
    """Nothing has arrived."""
    for k in range(len(LOAD_WEIGHTS)):
        env.gap[k] = env.prompt[k] = env.length[k] = 0.0


@inline
def _write_load(env, catalog_row, obs, start):
    """The means of the load, `LOAD_WIDTH` numbers in raw units; zeros after the last request."""
    if catalog_row < 0:
        _fill(obs, start, LOAD_WIDTH, 0)
        return
    for k in range(len(LOAD_WEIGHTS)):
        first = start + LOAD_MEANS * k
        obs[first] = min(env.gap[k], MAX_GAP_S)
        obs[first + 1] = min(env.prompt[k], MAX_PROMPT_TOKENS)
        obs[first + 2] = env.length[k]


@inline
def _memory_in_use(config, queues, expert):
    """Share of its KV blocks."""
    settle(config, queues, expert)
    return (expert.capacity - expert.free) * (1.0 / expert.capacity)


@inline
def _observe_experts(config, tables, systems, out, row):
    """Layout EXPERTS: memory in use, running and waiting requests of each expert, in [0, 1]."""
    total = 0.0
    most = config.running_capacity + config.waiting_capacity
    for n in range(config.num_experts):
        expert = systems.expert[row, n]
        memory = _memory_in_use(config, systems.queues, expert)
        total += memory
        start = (row * config.max_experts + n) * STATE_WIDTH
        out.observation[start] = memory
        out.observation[start + 1] = expert.running / config.running_capacity
        out.observation[start + 2] = expert.waiting / most
    return total / config.num_experts


@inline
def _slack_s(env, request, generated, length):
    """Seconds that L leaves a request for each token it has left, of ``length`` in all."""
    spent = env.now - request.arrived
    return (env.latency_requirement * length - spent) / (length - generated)


@inline
def _next_decode_s(config, law, expert):
    """A decode iteration of one sequence more than run, as far as there is room."""
    sequences = min(expert.running + 1, config.running_capacity)
    return decode_s(law, expert, sequences, SUMMARY_CONTEXT)


@inner
def outlook(config, law, systems, row):
    """Predicted scores of the requests it has that can still be on time, sum over the experts.

    One can if what L leaves it for each token that it has left, as predicted, is no less than a
    decode iteration of one sequence more than run (the column ``next_decode_s`` of SUMMARY).
    """
    env = systems.env[row]
    total = 0.0
    for n in range(config.num_experts):
        expert = systems.expert[row, n]
        pace = _next_decode_s(config, law, expert)
        for first in (expert.oldest, expert.head):
            slot = first
            while slot >= 0:
                request = request_of(systems.queues, expert, slot)
                slot = newer(systems.queues, expert, slot)
                generated = generated_tokens(expert, request)
                length = max(float(request.predicted_output), generated + 1.0)
                if _slack_s(env, request, generated, length) >= pace:
                    total += float(request.predicted_score)
    return total


@inner
def _observe_summary(config, tables, systems, out, row, catalog_row):
    """Layout SUMMARY: the columns `SUMMARY_COLUMNS` of each expert, standardised."""
    env = systems.env[row]
    total = 0.0
    for n in range(config.num_experts):
        expert = systems.expert[row, n]
        memory = _memory_in_use(config, systems.queues, expert)
        total += memory
        obs, shown = out.observation, out.summary[row, n]
        start = (row * config.max_experts + n) * SUMMARY_WIDTH
        shown.exists = 1.0
        _write_arrived(tables.requests, expert.model, catalog_row, obs, start + ARRIVED_AT)
        shown.latency_requirement_s = env.latency_requirement
        shown.memory = memory
        shown.running = expert.running
        shown.waiting = expert.waiting
        shown.running_capacity = config.running_capacity
        shown.waiting_capacity = config.waiting_capacity
        shown.kv_capacity_tokens = expert.capacity * config.block_size
        k1, k2 = estimator_slopes(tables.law, expert)
        shown.prefill_s_per_token = k1
        shown.decode_s_per_context_token = k2
        pace = _next_decode_s(config, tables.law, expert)
        most = config.running_capacity
        shown.lone_decode_s = decode_s(tables.law, expert, 1, SUMMARY_CONTEXT)
        shown.next_decode_s = pace
        shown.full_decode_s = decode_s(tables.law, expert, most, SUMMARY_CONTEXT)
        _summarize_running(systems.queues, expert, env, pace, shown)
        _summarize_waiting(systems.queues, expert, env, shown)
        _write_load(env, catalog_row, obs, start + LOAD_AT)
        for k in range(SUMMARY_WIDTH):
            obs[start + k] = (obs[start + k] - SUMMARY_MEANS[k]) / SUMMARY_SPREADS[k]
    return total / config.num_experts


@inline
def _summarize_running(queues, expert, env, pace, shown):
    emitted, context, prefill, tokens, fewest = 0, 0, 0, 0.0, 0.0
    few, some, many, behind, late, tight = 0, 0, 0, 0, 0, 0
    scores, tight_scores, least = 0.0, 0.0, MAX_LATENCY_S_PER_TOKEN
    slot = expert.oldest
    while slot >= 0:
        request = request_of(queues, expert, slot)
        slot = newer(queues, expert, slot)
        generated = generated_tokens(expert, request)
        length = max(float(request.predicted_output), generated + 1.0)
        left = length - generated
        emitted += generated
        context += request.prompt + generated
        if not request.decoding:
            prefill += request.prompt + generated - request.computed
        fewest = left if tokens == 0.0 else min(fewest, left)
        tokens += left
        few += left <= 16.0
        some += 16.0 < left <= 64.0
        many += 64.0 < left <= 128.0
        scores += request.predicted_score
        behind += (env.now - request.arrived) / max(generated, 1) > env.latency_requirement
        slack = _slack_s(env, request, generated, length)
        if slack <= 0.0:
            late += 1
        else:
            least = min(least, slack)
            if slack < pace:
                tight += 1
                tight_scores += request.predicted_score
    shown.emitted_tokens = emitted
    shown.context_tokens = context
    shown.prefill_tokens = prefill
    shown.tokens_left = tokens
    shown.left_16 = few
    shown.left_64 = some
    shown.left_128 = many
    shown.next_finish_tokens = fewest
    shown.scores = scores
    shown.behind = behind
    shown.late = late
    shown.tight = tight
    shown.tight_scores = tight_scores
    shown.least_slack_s = least


@inline
def _summarize_waiting(queues, expert, env, shown):
    prefill, tokens, scores, late, longest = 0, 0.0, 0.0, 0, 0.0
    slot = expert.head
    while slot >= 0:
        request = request_of(queues, expert, slot)
        slot = newer(queues, expert, slot)
        length = max(float(request.predicted_output), request.generated + 1.0)
        prefill += request.prompt + request.generated
        tokens += length - request.generated
        scores += request.predicted_score
        late += _slack_s(env, request, request.generated, length) <= 0.0
        longest = max(longest, env.now - request.arrived)
    shown.waiting_prefill_tokens = prefill
    shown.waiting_tokens_left = tokens
    shown.waiting_scores = scores
    shown.waiting_late = late
    shown.longest_wait_s = min(longest, MAX_WAIT_S)


@inline
def _observe_graph(config, tables, systems, out, row, catalog_row):
    """Layout GRAPH: raw units, a section a key and the masks of the queues."""
    obs, env = out.observation, systems.env[row]
    experts = systems.env.shape[0] * config.max_experts
    max_running, max_waiting = config.max_running, config.max_waiting
    state_start = experts * ARRIVED_WIDTH
    running_start = state_start + experts * STATE_WIDTH
    waiting_start = running_start + experts * max_running * REQUEST_WIDTH
    limit_start = waiting_start + experts * max_waiting * REQUEST_WIDTH
    load_start = limit_start + systems.env.shape[0]
    total = 0.0
    for n in range(config.num_experts):
        expert = systems.expert[row, n]
        index = row * config.max_experts + n
        _write_arrived(tables.requests, expert.model, catalog_row, obs, index * ARRIVED_WIDTH)
        waiting = min(expert.waiting, config.waiting_capacity)
        run_start = running_start + index * max_running * REQUEST_WIDTH
        wait_start = waiting_start + index * max_waiting * REQUEST_WIDTH
        memory = _write_queues(
            config, systems.queues, expert, env.now, waiting, obs, run_start, wait_start
        )
        total += memory
        start = state_start + index * STATE_WIDTH
        obs[start] = memory
        obs[start + 1] = expert.running
        obs[start + 2] = expert.waiting
        _write_mask(out.masks, index * max_running, expert.written_running, expert.running)
        _write_mask(
            out.masks, experts * max_running + index * max_waiting, expert.written_waiting, waiting
        )
        expert.written_running = expert.running
        expert.written_waiting = waiting
    obs[limit_start + row] = env.latency_requirement
    _write_load(env, catalog_row, obs, load_start + row * LOAD_WIDTH)
    return total / config.num_experts


@inline
def _observe_flat(config, tables, systems, out, row, catalog_row):
    """Layout FLAT: L, the load, then all that is known of each expert, in [0, 1]."""
    obs, env = out.observation, systems.env[row]
    width = ARRIVED_WIDTH + STATE_WIDTH + REQUEST_WIDTH * config.slots
    first = row * (1 + LOAD_WIDTH + config.max_experts * width)
    obs[first] = env.latency_requirement
    _write_load(env, catalog_row, obs, first + 1)
    for start in range(first + 1, first + 1 + LOAD_WIDTH, LOAD_MEANS):
        obs[start] = math.log1p(obs[start] / LATENCY_SCALE) * GAP_LOG
        obs[start + 1] = math.log1p(obs[start + 1] / PROMPT_SCALE) * PROMPT_LOG
        obs[start + 2] /= config.max_output_tokens
    first += LOAD_WIDTH
    total = 0.0
    most = config.running_capacity + config.waiting_capacity
    for n in range(config.num_experts):
        expert = systems.expert[row, n]
        start = first + 1 + n * width
        _write_arrived(tables.requests, expert.model, catalog_row, obs, start)
        obs[start] = math.log1p(obs[start] / PROMPT_SCALE) * PROMPT_LOG
        obs[start + 2] /= config.max_output_tokens
        start += ARRIVED_WIDTH
        waiting = min(expert.waiting, config.waiting_capacity)
        run_start = start + STATE_WIDTH
        wait_start = run_start + REQUEST_WIDTH * config.max_running
        memory = _write_queues(
            config, systems.queues, expert, env.now, waiting, obs, run_start, wait_start
        )
        total += memory
        obs[start] = memory
        obs[start + 1] = expert.running / config.running_capacity
        obs[start + 2] = expert.waiting / most
        for k in range(expert.running):
            _scale_request(config, obs, run_start + REQUEST_WIDTH * k)
        for k in range(waiting):
            _scale_request(config, obs, wait_start + REQUEST_WIDTH * k)
        expert.written_running = expert.running
        expert.written_waiting = waiting
    return total / config.num_experts


@inline
def _write_arrived(requests, model, catalog_row, obs, start):
    """The request to route, as this model would serve it; zeros after the last."""
    if catalog_row >= 0:
        obs[start] = min(requests[catalog_row, model, PROMPT], MAX_PROMPT_TOKENS)
        obs[start + 1] = requests[catalog_row, model, PREDICTED_SCORE]
        obs[start + 2] = requests[catalog_row, model, PREDICTED_OUTPUT]
    else:
        _fill(obs, start, ARRIVED_WIDTH, 0)


@inline
def _write_queues(config, queues, expert, now, waiting, obs, run_start, wait_start):
    """Rows of the requests that run and of the first ``waiting``; returns the memory in use."""
    per_capacity = 1.0 / expert.capacity
    used = 0
    slot = expert.oldest
    for k in range(expert.running):
        request = request_of(queues, expert, slot)
        slot = newer(queues, expert, slot)
        blocks = blocks_of(config, scheduled_tokens(expert, request))
        used += blocks
        _write_request(
            expert, request, now, blocks * per_capacity, obs, run_start + REQUEST_WIDTH * k
        )
    slot = expert.head
    for k in range(waiting):
        request = request_of(queues, expert, slot)
        slot = newer(queues, expert, slot)
        _write_request(expert, request, now, 0.0, obs, wait_start + REQUEST_WIDTH * k)
    # Rows beyond are zero since they were last blanked: only what has left is written.
    for start, written, count in (
        (run_start, expert.written_running, expert.running),
        (wait_start, expert.written_waiting, waiting),
    ):
        _fill(obs, start + REQUEST_WIDTH * count, REQUEST_WIDTH * (written - count), 0)
    return used * per_capacity


@inline
def _write_request(expert, request, now, memory, obs, start):
    """Eq. 6: prompt tokens, predicted score and length, memory, tokens and latency so far."""
    generated = generated_tokens(expert, request)
    obs[start] = min(float(request.prompt), MAX_PROMPT_TOKENS)
    obs[start + 1] = request.predicted_score
    obs[start + 2] = request.predicted_output
    obs[start + 3] = memory
    obs[start + 4] = generated
    obs[start + 5] = min((now - request.arrived) / max(generated, 1), MAX_LATENCY_S_PER_TOKEN)


@inner
def _scale_request(config, obs, start):
    """The six features of Eq. 6 to [0, 1]; prompt length and latency on a log scale."""
    obs[start] = math.log1p(obs[start] / PROMPT_SCALE) * PROMPT_LOG
    obs[start + 2] /= config.max_output_tokens
    obs[start + 4] /= config.max_output_tokens
    obs[start + 5] = math.log1p(obs[start + 5] / LATENCY_SCALE) * LATENCY_LOG


@inline
def _write_mask(masks, first, before, count):
    """1 for the first ``count`` where the first ``before`` were."""
    for i in range(min(count, before), max(count, before)):
        masks[first + i] = i < count


@inner
def write_in_full(config, systems, masks, row, number):
    """Have the next observation of an expert written in full, whatever was written before."""
    expert = systems.expert[row, number]
    expert.written_running = config.max_running
    expert.written_waiting = config.max_waiting
    if config.layout == GRAPH:
        index = row * config.max_experts + number
        waiting_start = systems.env.shape[0] * config.max_experts * config.max_running
        _fill(masks, index * config.max_running, config.max_running, 1)
        _fill(masks, waiting_start + index * config.max_waiting, config.max_waiting, 1)


@inner
def blank_padding(config, systems, out, row):
    """Zeros for the experts that a row does not have, in the observation and in the masks."""
    count = config.max_experts - config.num_experts
    if count == 0:
        return
    batch = systems.env.shape[0]
    first = row * config.max_experts + config.num_experts  # of the experts of all rows
    masks = 0
    if config.layout == GRAPH:
        sizes = (ARRIVED_WIDTH, STATE_WIDTH, REQUEST_WIDTH * config.max_running)
        start = 0
        for size in (*sizes, REQUEST_WIDTH * config.max_waiting):
            _fill(out.observation, start + first * size, count * size, 0)
            start += batch * config.max_experts * size
        for size in (config.max_running, config.max_waiting):
            _fill(out.masks, masks + first * size, count * size, 0)
            masks += batch * config.max_experts * size
    elif config.layout == SUMMARY:
        _fill(out.observation, first * SUMMARY_WIDTH, count * SUMMARY_WIDTH, 0)
    elif config.layout == EXPERTS:
        _fill(out.observation, first * STATE_WIDTH, count * STATE_WIDTH, 0)
    elif config.layout == FLAT:
        size = ARRIVED_WIDTH + STATE_WIDTH + REQUEST_WIDTH * config.slots
        _fill(out.observation, (1 + LOAD_WIDTH) * (row + 1) + first * size, count * size, 0)
    masks += row * (config.max_experts + 1) + 1 + config.num_experts
    _fill(out.masks, masks, count, 0)


@inline
def _fill(array, first, count, value):
    for k in range(first, first + count):
        array[k] = value
