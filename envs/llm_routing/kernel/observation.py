"""What the router sees: one function a layout, and the mask of the legal actions.

Rows of queues that were empty before and are empty now are left alone, so what an observation costs
goes by the requests in the system and not by the size of the buffer.
"""

from __future__ import annotations

import math

from servegym._jit import inline, inner
from servegym.envs.llm_routing.kernel.latency import interpolate
from servegym.envs.llm_routing.kernel.layout import (
    EXPERT_WIDTH,
    EXPERTS,
    FLAT,
    GRAPH,
    K1,
    K2,
    LOAD_WIDTH,
    MAX_GAP_S,
    MAX_LATENCY_S_PER_TOKEN,
    MAX_PROMPT_TOKENS,
    MAX_WAIT_S,
    PREDICTED_OUTPUT,
    PREDICTED_SCORE,
    PROMPT,
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

# Features of a request of Eq. 6, of the arrived one and of an expert.
REQUEST_WIDTH = 6
ARRIVED_WIDTH = 3
STATE_WIDTH = 3


@inner
def observe_row(t, s, out, b, row):
    """Write row b of the observation and of the action mask; returns the mean memory use.

    ``row`` is the catalog row of the request to route, -1 after the last.
    """
    c = config_of(t, b)
    if c.layout == EXPERTS:
        first = 0
        memory = _observe_experts(c, t, s, out, b)
    elif c.layout == SUMMARY:
        first = 0
        memory = _observe_summary(c, t, s, out, b, row)
    elif c.layout == FLAT:
        first = 0
        memory = _observe_flat(c, t, s, out, b, row)
    else:
        first = s.env.shape[0] * c.max_experts * c.slots
        memory = _observe_graph(c, t, s, out, b, row)
    _write_action_mask(c, t, s, out.masks, b, row, first + b * (c.max_experts + 1))
    return memory


@inner
def note_arrival(c, t, s, b):
    """The request to route enters the means of the load.

    A mean over the last h requests is that of all so far while they are fewer than h; then each
    value moves it by 1/h of the difference. Tokens are means over the models of the experts.
    """
    v = s.env[b]
    row = s.rows[b, v.index]
    prompt = 0.0
    length = 0.0
    for n in range(c.num_experts):
        model = s.expert[b, n].model
        prompt += t.requests[row, model, PROMPT]
        length += t.requests[row, model, PREDICTED_OUTPUT]
    prompt /= c.num_experts
    length /= c.num_experts
    share = 1.0 / (v.index + 1)
    v.prompt_8 += max(share, 1.0 / 8) * (prompt - v.prompt_8)
    v.prompt_32 += max(share, 1.0 / 32) * (prompt - v.prompt_32)
    v.prompt_128 += max(share, 1.0 / 128) * (prompt - v.prompt_128)
    v.length_8 += max(share, 1.0 / 8) * (length - v.length_8)
    v.length_32 += max(share, 1.0 / 32) * (length - v.length_32)
    v.length_128 += max(share, 1.0 / 128) * (length - v.length_128)
    if v.index > 0:
        gap = s.arrivals[b, v.index] - s.arrivals[b, v.index - 1]
        share = 1.0 / v.index
        v.gap_8 += max(share, 1.0 / 8) * (gap - v.gap_8)
        v.gap_32 += max(share, 1.0 / 32) * (gap - v.gap_32)
        v.gap_128 += max(share, 1.0 / 128) * (gap - v.gap_128)


@inline
def copy_load(v, target):
    """The means of the load of one system, for another's record."""
    target.gap_8, target.gap_32, target.gap_128 = v.gap_8, v.gap_32, v.gap_128
    target.prompt_8, target.prompt_32, target.prompt_128 = v.prompt_8, v.prompt_32, v.prompt_128
    target.length_8, target.length_32, target.length_128 = v.length_8, v.length_32, v.length_128


@inline
def clear_load(v):
    """Nothing has arrived."""
    v.gap_8, v.gap_32, v.gap_128 = 0.0, 0.0, 0.0
    v.prompt_8, v.prompt_32, v.prompt_128 = 0.0, 0.0, 0.0
    v.length_8, v.length_32, v.length_128 = 0.0, 0.0, 0.0


@inline
def _write_load(v, row, obs, o):
    """The means of the load, `LOAD_WIDTH` numbers in raw units; zeros after the last request."""
    if row < 0:
        for k in range(LOAD_WIDTH):
            obs[o + k] = 0.0
        return
    obs[o] = min(v.gap_8, MAX_GAP_S)
    obs[o + 1] = min(v.prompt_8, MAX_PROMPT_TOKENS)
    obs[o + 2] = v.length_8
    obs[o + 3] = min(v.gap_32, MAX_GAP_S)
    obs[o + 4] = min(v.prompt_32, MAX_PROMPT_TOKENS)
    obs[o + 5] = v.length_32
    obs[o + 6] = min(v.gap_128, MAX_GAP_S)
    obs[o + 7] = min(v.prompt_128, MAX_PROMPT_TOKENS)
    obs[o + 8] = v.length_128


@inline
def _write_action_mask(c, t, s, masks, b, row, m):
    masks[m] = 1
    for n in range(c.num_experts):
        if row < 0:
            masks[m + 1 + n] = 1
        else:
            e = s.expert[b, n]
            masks[m + 1 + n] = can_take(c, e, int(t.requests[row, e.model, PROMPT]))


@inline
def _observe_experts(c, t, s, out, b):
    """Layout EXPERTS: memory in use, running and waiting requests of each expert, in [0, 1]."""
    total = 0.0
    for n in range(c.num_experts):
        e = s.expert[b, n]
        settle(c, s.queues, e)
        memory = (e.capacity - e.free) * (1.0 / e.capacity)
        total += memory
        o = (b * c.max_experts + n) * STATE_WIDTH
        out.observation[o] = memory
        out.observation[o + 1] = e.running / c.running_capacity
        out.observation[o + 2] = e.waiting / (c.running_capacity + c.waiting_capacity)
    return total / c.num_experts


@inline
def _mean_decode_s(c, law, e, sequences):
    """A decode iteration of so many sequences of `SUMMARY_CONTEXT` tokens."""
    oy = c.y_decode + (e.profile * c.n_sequences + sequences) * c.n_decode
    return interpolate(law, c.x_decode, oy, c.n_decode, SUMMARY_CONTEXT)


@inline
def _slack_s(v, r, generated, length):
    """Seconds that L leaves r for each token it has left, of ``length`` in all."""
    spent = v.now - r.arrived
    return (v.latency_requirement * length - spent) / (length - generated)


@inner
def outlook(c, law, s, b):
    """Predicted scores of the requests held that can still be on time, sum over the experts.

    One can if what L leaves it for each token that it has left, as predicted, is no less than a
    decode iteration of one sequence more than run (the column ``next_decode_s`` of SUMMARY).
    """
    v = s.env[b]
    total = 0.0
    for n in range(c.num_experts):
        e = s.expert[b, n]
        pace = _mean_decode_s(c, law, e, min(e.running + 1, c.running_capacity))
        for first in (e.oldest, e.head):
            i = first
            while i >= 0:
                r = request_of(s.queues, e, i)
                i = newer(s.queues, e, i)
                generated = generated_tokens(e, r)
                length = max(float(r.predicted_output), generated + 1.0)
                if _slack_s(v, r, generated, length) >= pace:
                    total += float(r.predicted_score)
    return total


@inner
def _observe_summary(c, t, s, out, b, row):
    """Layout SUMMARY: the columns `SUMMARY_FEATURES` of each expert, standardised."""
    v = s.env[b]
    total = 0.0
    for n in range(c.num_experts):
        e = s.expert[b, n]
        settle(c, s.queues, e)
        memory = (e.capacity - e.free) * (1.0 / e.capacity)
        total += memory
        obs = out.observation
        o = (b * c.max_experts + n) * SUMMARY_WIDTH
        obs[o] = 1.0
        _write_arrived(t.requests, e.model, row, obs, o + 1)
        obs[o + 4] = v.latency_requirement
        obs[o + 5] = memory
        obs[o + 6] = e.running
        obs[o + 7] = e.waiting
        obs[o + 8] = c.running_capacity
        obs[o + 9] = c.waiting_capacity
        obs[o + 10] = e.capacity * c.block_size
        obs[o + 11] = t.law[e.profile * EXPERT_WIDTH + K1]
        obs[o + 12] = t.law[e.profile * EXPERT_WIDTH + K2]
        pace = _mean_decode_s(c, t.law, e, min(e.running + 1, c.running_capacity))
        obs[o + 13] = _mean_decode_s(c, t.law, e, 1)
        obs[o + 14] = pace
        obs[o + 15] = _mean_decode_s(c, t.law, e, c.running_capacity)
        _summarize_running(c, s.queues, e, v, pace, obs, o + 16)
        _summarize_waiting(c, s.queues, e, v, obs, o + 30)
        _write_load(v, row, obs, o + 35)
        for k in range(SUMMARY_WIDTH):
            obs[o + k] = (obs[o + k] - SUMMARY_MEANS[k]) / SUMMARY_SPREADS[k]
    return total / c.num_experts


@inline
def _summarize_running(c, q, e, v, pace, obs, o):
    emitted, context, prefill, tokens, fewest = 0, 0, 0, 0.0, 0.0
    few, some, many, behind, late, tight = 0, 0, 0, 0, 0, 0
    scores, tight_scores, least = 0.0, 0.0, MAX_LATENCY_S_PER_TOKEN
    i = e.oldest
    while i >= 0:
        r = request_of(q, e, i)
        i = newer(q, e, i)
        generated = generated_tokens(e, r)
        length = max(float(r.predicted_output), generated + 1.0)
        left = length - generated
        emitted += generated
        context += r.prompt + generated
        if not r.decoding:
            prefill += r.prompt + generated - r.computed
        fewest = left if tokens == 0.0 else min(fewest, left)
        tokens += left
        few += left <= 16.0
        some += 16.0 < left <= 64.0
        many += 64.0 < left <= 128.0
        scores += r.predicted_score
        behind += (v.now - r.arrived) / max(generated, 1) > v.latency_requirement
        slack = _slack_s(v, r, generated, length)
        if slack <= 0.0:
            late += 1
        else:
            least = min(least, slack)
            if slack < pace:
                tight += 1
                tight_scores += r.predicted_score
    obs[o] = emitted
    obs[o + 1] = context
    obs[o + 2] = prefill
    obs[o + 3] = tokens
    obs[o + 4] = few
    obs[o + 5] = some
    obs[o + 6] = many
    obs[o + 7] = fewest
    obs[o + 8] = scores
    obs[o + 9] = behind
    obs[o + 10] = late
    obs[o + 11] = tight
    obs[o + 12] = tight_scores
    obs[o + 13] = least


@inline
def _summarize_waiting(c, q, e, v, obs, o):
    prefill, tokens, scores, late, longest = 0, 0.0, 0.0, 0, 0.0
    i = e.head
    while i >= 0:
        r = request_of(q, e, i)
        i = newer(q, e, i)
        length = max(float(r.predicted_output), r.generated + 1.0)
        prefill += r.prompt + r.generated
        tokens += length - r.generated
        scores += r.predicted_score
        late += _slack_s(v, r, r.generated, length) <= 0.0
        longest = max(longest, v.now - r.arrived)
    obs[o] = prefill
    obs[o + 1] = tokens
    obs[o + 2] = scores
    obs[o + 3] = late
    obs[o + 4] = min(longest, MAX_WAIT_S)


@inline
def _observe_graph(c, t, s, out, b, row):
    """Layout GRAPH: raw units, a section a key and the masks of the queues."""
    obs = out.observation
    experts = s.env.shape[0] * c.max_experts
    cap_r, cap_w = c.max_running, c.max_waiting
    o_state = experts * ARRIVED_WIDTH
    o_running = o_state + experts * STATE_WIDTH
    o_waiting = o_running + experts * cap_r * REQUEST_WIDTH
    o_limit = o_waiting + experts * cap_w * REQUEST_WIDTH
    o_load = o_limit + s.env.shape[0]
    total = 0.0
    for n in range(c.num_experts):
        e = s.expert[b, n]
        at = b * c.max_experts + n
        _write_arrived(t.requests, e.model, row, obs, at * ARRIVED_WIDTH)
        waiting = min(e.waiting, c.waiting_capacity)
        o_run = o_running + at * cap_r * REQUEST_WIDTH
        o_wait = o_waiting + at * cap_w * REQUEST_WIDTH
        memory = _write_queues(c, s.queues, e, s.env[b].now, waiting, obs, o_run, o_wait)
        total += memory
        o = o_state + at * STATE_WIDTH
        obs[o] = memory
        obs[o + 1] = e.running
        obs[o + 2] = e.waiting
        _write_mask(out.masks, at * cap_r, e.written_running, e.running)
        _write_mask(out.masks, experts * cap_r + at * cap_w, e.written_waiting, waiting)
        e.written_running = e.running
        e.written_waiting = waiting
    obs[o_limit + b] = s.env[b].latency_requirement
    _write_load(s.env[b], row, obs, o_load + b * LOAD_WIDTH)
    return total / c.num_experts


@inline
def _observe_flat(c, t, s, out, b, row):
    """Layout FLAT: L, the load, then all that is known of each expert, in [0, 1]."""
    obs = out.observation
    cap_r, cap_w = c.running_capacity, c.waiting_capacity
    width = ARRIVED_WIDTH + STATE_WIDTH + REQUEST_WIDTH * c.slots
    first = b * (1 + LOAD_WIDTH + c.max_experts * width)
    obs[first] = s.env[b].latency_requirement
    _write_load(s.env[b], row, obs, first + 1)
    for o in range(first + 1, first + 1 + LOAD_WIDTH, 3):
        obs[o] = math.log1p(obs[o] / LATENCY_SCALE) * GAP_LOG
        obs[o + 1] = math.log1p(obs[o + 1] / PROMPT_SCALE) * PROMPT_LOG
        obs[o + 2] /= c.max_output_tokens
    first += LOAD_WIDTH
    total = 0.0
    for n in range(c.num_experts):
        e = s.expert[b, n]
        o = first + 1 + n * width
        _write_arrived(t.requests, e.model, row, obs, o)
        obs[o] = math.log1p(obs[o] / PROMPT_SCALE) * PROMPT_LOG
        obs[o + 2] /= c.max_output_tokens
        o += ARRIVED_WIDTH
        waiting = min(e.waiting, cap_w)
        o_run = o + STATE_WIDTH
        o_wait = o_run + REQUEST_WIDTH * c.max_running
        memory = _write_queues(c, s.queues, e, s.env[b].now, waiting, obs, o_run, o_wait)
        total += memory
        obs[o] = memory
        obs[o + 1] = e.running / cap_r
        obs[o + 2] = e.waiting / (cap_r + cap_w)
        for i in range(e.running):
            _scale_request(c, obs, o_run + REQUEST_WIDTH * i)
        for k in range(waiting):
            _scale_request(c, obs, o_wait + REQUEST_WIDTH * k)
        e.written_running = e.running
        e.written_waiting = waiting
    return total / c.num_experts


@inline
def _write_arrived(requests, model, row, obs, o):
    """The request to route, as this model would serve it; zeros after the last."""
    if row >= 0:
        obs[o] = min(requests[row, model, PROMPT], MAX_PROMPT_TOKENS)
        obs[o + 1] = requests[row, model, PREDICTED_SCORE]
        obs[o + 2] = requests[row, model, PREDICTED_OUTPUT]
    else:
        obs[o] = 0.0
        obs[o + 1] = 0.0
        obs[o + 2] = 0.0


@inline
def _write_queues(c, q, e, now, waiting, obs, o_run, o_wait):
    """Rows of the requests that run and of the first ``waiting``; returns the memory in use."""
    per_capacity = 1.0 / e.capacity
    used = 0
    i = e.oldest
    for k in range(e.running):
        r = request_of(q, e, i)
        i = newer(q, e, i)
        blocks = blocks_of(c, scheduled_tokens(e, r))
        used += blocks
        _write_request(e, r, now, blocks * per_capacity, obs, o_run + REQUEST_WIDTH * k)
    i = e.head
    for k in range(waiting):
        r = request_of(q, e, i)
        i = newer(q, e, i)
        _write_request(e, r, now, 0.0, obs, o_wait + REQUEST_WIDTH * k)
    for i in range(REQUEST_WIDTH * e.running, REQUEST_WIDTH * e.written_running):
        obs[o_run + i] = 0.0
    for i in range(REQUEST_WIDTH * waiting, REQUEST_WIDTH * e.written_waiting):
        obs[o_wait + i] = 0.0
    return used * per_capacity


@inline
def _write_request(e, r, now, memory, obs, o):
    """Eq. 6: prompt tokens, predicted score and length, memory, tokens and latency so far."""
    generated = generated_tokens(e, r)
    obs[o] = min(float(r.prompt), MAX_PROMPT_TOKENS)
    obs[o + 1] = r.predicted_score
    obs[o + 2] = r.predicted_output
    obs[o + 3] = memory
    obs[o + 4] = generated
    obs[o + 5] = min((now - r.arrived) / max(generated, 1), MAX_LATENCY_S_PER_TOKEN)


@inner
def _scale_request(c, obs, o):
    """The six features of Eq. 6 to [0, 1]; prompt length and latency on a log scale."""
    obs[o] = math.log1p(obs[o] / PROMPT_SCALE) * PROMPT_LOG
    obs[o + 2] /= c.max_output_tokens
    obs[o + 4] /= c.max_output_tokens
    obs[o + 5] = math.log1p(obs[o + 5] / LATENCY_SCALE) * LATENCY_LOG


@inline
def _write_mask(masks, m, before, count):
    """1 for the first ``count`` where the first ``before`` were."""
    for i in range(min(count, before), max(count, before)):
        masks[m + i] = i < count


@inner
def copy_rows(out, copy, start, stop):
    """Copy the rows from ``start`` to before ``stop`` of every section that is wanted."""
    _copy_sections(out.observation, copy.values, len(out.reward), start, stop)
    _copy_sections(out.masks, copy.flags, len(out.reward), start, stop)


@inline
def _copy_sections(source, targets, rows, start, stop):
    first = 0
    for k in range(len(targets)):
        target = targets[k]
        width = len(target) // rows
        written = target[start * width : stop * width]
        read = source[first + start * width : first + stop * width]
        for i in range(len(written)):
            written[i] = read[i]
        first += len(target)


@inner
def write_in_full(c, s, masks, b, n):
    """Have the next observation of expert n written in full, whatever was written before."""
    e = s.expert[b, n]
    e.written_running = c.max_running
    e.written_waiting = c.max_waiting
    if c.layout == GRAPH:
        at = b * c.max_experts + n
        m = at * c.max_running
        for i in range(c.max_running):
            masks[m + i] = 1
        m = s.env.shape[0] * c.max_experts * c.max_running + at * c.max_waiting
        for i in range(c.max_waiting):
            masks[m + i] = 1


@inner
def blank_padding(c, s, out, b):
    """Zeros for the experts that row b does not have, in the observation and in the masks."""
    count = c.max_experts - c.num_experts
    if count == 0:
        return
    batch = s.env.shape[0]
    first = b * c.max_experts + c.num_experts  # of the experts of all rows
    masks = 0
    if c.layout == GRAPH:
        sizes = (ARRIVED_WIDTH, STATE_WIDTH, REQUEST_WIDTH * c.max_running)
        start = 0
        for size in (*sizes, REQUEST_WIDTH * c.max_waiting):
            _blank(out.observation, start + first * size, count * size)
            start += batch * c.max_experts * size
        for size in (c.max_running, c.max_waiting):
            _blank(out.masks, masks + first * size, count * size)
            masks += batch * c.max_experts * size
    elif c.layout == SUMMARY:
        _blank(out.observation, first * SUMMARY_WIDTH, count * SUMMARY_WIDTH)
    elif c.layout == EXPERTS:
        _blank(out.observation, first * STATE_WIDTH, count * STATE_WIDTH)
    elif c.layout == FLAT:
        size = ARRIVED_WIDTH + STATE_WIDTH + REQUEST_WIDTH * c.slots
        _blank(out.observation, (1 + LOAD_WIDTH) * (b + 1) + first * size, count * size)
    masks += b * (c.max_experts + 1) + 1 + c.num_experts
    _blank(out.masks, masks, count)


@inline
def _blank(array, first, count):
    for i in range(first, first + count):
        array[i] = 0
