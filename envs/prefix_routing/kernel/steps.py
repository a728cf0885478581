"""Steps of the environment: a decision, the way to the next one, and what of it is seen and paid.

Inside, ``p`` is a `SETTINGS`, ``x`` `Episodes`, ``o`` an `EPISODE` and ``g`` a `Gateway`; the other
names are the engine's. The gateway is told of nothing that a gateway cannot know: metrics as they
were at the last scrape, first tokens and ends of its responses, cache events where its index is
built from them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from servegym._jit import borrowed, inline, inner, jit
from servegym.envs.llm_routing.kernel.scheduler import before, blocks_of
from servegym.envs.prefix_routing.kernel import gateway
from servegym.envs.prefix_routing.kernel.cache import used_blocks
from servegym.envs.prefix_routing.kernel.events import (
    begin_row,
    locate,
    next_to_work,
    route_request,
    take_arrival,
)
from servegym.envs.prefix_routing.kernel.iterations import advance
from servegym.envs.prefix_routing.kernel.layout import COMPLETION, FIRST_TOKEN, record
from servegym.envs.prefix_routing.kernel.observation import observe as see

SLO, TTFT, SCORE, DENSE = 0, 1, 2, 3  # settings.reward
DICT, FLAT, SUMMARY = 0, 1, 2  # settings.layout
SCORE_WEIGHT, LOST = 0.3, -2.0
"""Of the rewards SCORE and DENSE: see `score`; what a request counts that a replica loses or cannot
take."""
WORK_WEIGHT = 2.0
"""Of the reward DENSE, for a second of a replica's work on the uncached tokens of a prompt."""
MAX_SHARE = 32.0
"""Bound of the last column of a replica in the FLAT view, see `_expected`."""


SETTINGS = record(
    [
        ("decisions", "i8"),  # of an episode
        ("warmup", "i8"),  # requests before the first decision
        ("admission", "i8"),  # 1: a request may be rejected
        ("layout", "i8"),  # DICT, FLAT or SUMMARY
        ("reward", "i8"),  # SLO, TTFT, SCORE or DENSE
        ("scrape_s", "f8"),  # time between scrapes; 0: metrics are live
        ("ttft_s", "f8"),  # TTFT objective: ttft_s + ttft_s_per_token x prompt
        ("ttft_s_per_token", "f8"),
        ("tpot_s", "f8"),  # TPOT objective
    ]
)
"""What all systems share besides engine and gateway."""

EPISODE = record(
    [
        ("index", "i8"),  # decisions so far
        ("news", "i8"),  # entries looked at
        # Of the requests that were decided on:
        ("completed", "i8"),
        ("rejected", "i8"),
        ("met", "i8"),  # completed within both objectives
        ("met_ttft", "i8"),
        ("met_tpot", "i8"),
        ("preemptions", "i8"),
        ("prompt_tokens", "i8"),  # of those completed
        ("hit_tokens", "i8"),
        ("claimed_tokens", "i8"),  # that the index named at their routing
        ("false_tokens", "i8"),  # claimed and not hit
        ("recomputed_tokens", "i8"),
        ("step_met", "f8"),  # in this step
        ("step_ttft", "f8"),  # s, sum over the first tokens in this step
        ("step_score", "f8"),  # in this step, see `score`
        ("step_early", "f8"),  # what of scores DENSE pays in this step before a request ends
        (
            "step_work_s",
            "f8",
        ),  # uncached tokens of the request of this step over its replica's speed
        ("began", "f8"),  # s, first decision
        ("last_finish", "f8"),  # s
    ]
)
"""Sums of an episode."""


class Episodes(NamedTuple):
    """What the steps keep of B systems.

    Attributes:
        settings: ``(1,)`` `SETTINGS`.
        row: ``(B,)`` `EPISODE`.
        order: int32 ``(B, J)``, the requests in the order of the decisions.
        counted: int8 ``(B, J)``, 1 for a request that was decided on.
        scraped: float64 ``(B, N)``, seconds, of the last scrape of each replica.
        ids: int32 ``(B, J, 2)``, session and tenant of each request.
    """

    settings: np.ndarray
    row: np.ndarray
    order: np.ndarray
    counted: np.ndarray
    scraped: np.ndarray
    ids: np.ndarray


class Buffers(NamedTuple):
    """What a step writes for the agents.

    Attributes:
        replicas: float32 ``(B, N, F)``, in raw units.
        request: float32 ``(B, K)``, in raw units.
        ids: int32 ``(B, 2)``, session and tenant.
        time_s: float32 ``(B, 1)``.
        scaled: float32 ``(B, K + N (F + 1))`` or, by replica, ``(B, N (F + K))``; ``(B, 0)`` where
            nobody reads it.
        high: float32 ``(K + N F,)``, the bounds of the raw features.
        mask: int8 ``(B, A)``.
        reward: float64 ``(B, 2)``: the reward and whether the episode has ended.
    """

    replicas: np.ndarray
    request: np.ndarray
    ids: np.ndarray
    time_s: np.ndarray
    scaled: np.ndarray
    high: np.ndarray
    mask: np.ndarray
    reward: np.ndarray


# ------------------------------------------------------------------------------------------- time


@inner
def _work(c, law, p, s, g, x, b, n, now, until):
    """Let replica n of row b work until ``until``, now or just before it; scrape it till now."""
    e = s.replica[b, n]
    tick = now
    if p.scrape_s > 0.0:
        tick = math.floor(now / p.scrape_s) * p.scrape_s
        if tick > now:
            tick -= p.scrape_s
    if tick > x.scraped[b, n]:
        if e.end <= tick or e.next_change <= tick:
            advance(c, law, s, e, min(tick, until))
        x.scraped[b, n] = tick
        usage = used_blocks(e) / e.capacity
        gateway.scraped(g, b, n, tick, e.waiting, e.running, usage)
    if e.end <= until or e.next_change <= until:
        advance(c, law, s, e, until)


@inner
def _go_to_next_arrival(c, law, p, s, g, x, b):
    """Bring row b, its replicas and its gateway to the next arrival, if there is one."""
    while True:
        n = next_to_work(c, s, b)
        if n < 0:
            break
        safe = s.replica[b, n].safe
        _work(c, law, p, s, g, x, b, n, safe, safe)
    v = s.env[b]
    take_arrival(c, s, b)
    if v.index < 0:
        return
    for n in range(c.num_replicas):
        _work(c, law, p, s, g, x, b, n, v.now, before(v.now))
    _hear(c, p, s, g, x, b)
    for n in range(c.num_replicas):
        e = s.replica[b, n]
        if e.failed > g.replica[b, n].forgotten_s:
            gateway.forget(g, b, n, e.failed)
        g.replica[b, n].up = 1 - e.down
    gateway.take_events(g, b, s.events[b], v.events, v.now)
    gateway.look_up(g, b, v.index, v.now)


@inner
def _hear(c, p, s, g, x, b):
    """First tokens and ends since the last time: for the gateway, and for the episode's sums."""
    v = s.env[b]
    o = x.row[b]
    first = b * c.num_requests
    while o.news < v.news:
        entry = s.news[b, o.news]
        o.news += 1
        if x.counted[b, entry.request] == 0:
            continue
        r = s.request[first + entry.request]
        expected = g.request[b, entry.request].expected
        ttft = r.first - r.arrived
        if entry.kind == FIRST_TOKEN:
            o.step_ttft += ttft
            o.step_early += _in_advance(p, r.prompt, ttft) - _in_advance(p, r.prompt, expected)
        elif entry.kind == COMPLETION:
            _count(p, o, r, g.request[b, entry.request].uncached)
            o.step_early -= _in_advance(p, r.prompt, ttft)
        else:
            o.step_score += LOST
            o.step_early -= _in_advance(p, r.prompt, expected if math.isnan(ttft) else ttft)
    gateway.take_news(g, b, s.news[b], v.news, s.request[first : first + c.num_requests])


@inline
def _doublings(p, prompt, ttft):
    """Binary logarithm of one and the share of its objective that a TTFT takes."""
    objective = p.ttft_s + p.ttft_s_per_token * prompt
    return math.log2(1.0 + ttft / objective) if objective > 0.0 else MAX_SHARE


@inline
def _in_advance(p, prompt, ttft):
    """What DENSE pays of the score before a request ends, as if TPOT took nothing.

    At the decision for the TTFT that the gateway expects, from the first token on for the true one.
    """
    doublings = _doublings(p, prompt, ttft)
    return (1.0 if doublings <= 1.0 else 0.0) - SCORE_WEIGHT * doublings


@inline
def score(p, r):
    """What a completed request is worth: 1 within both objectives, less for what it took of them.

    ``SCORE_WEIGHT`` times the binary logarithm of one and the larger share of its objective that
    TTFT or TPOT took: the logarithm tells apart what is late and what is later.
    """
    ttft = (r.first - r.arrived) / (p.ttft_s + p.ttft_s_per_token * r.prompt)
    tpot = (r.finish - r.first) / (p.tpot_s * max(r.output - 1, 1))
    worse = max(ttft, tpot)
    return (1.0 if worse <= 1.0 else 0.0) - SCORE_WEIGHT * math.log2(1.0 + worse)


@inline
def _count(p, o, r, uncached):
    """Add a completed request to the episode's sums; ``uncached`` as the index had it."""
    o.completed += 1
    ttft = r.first - r.arrived
    in_time = ttft <= p.ttft_s + p.ttft_s_per_token * r.prompt
    smooth = r.finish - r.first <= p.tpot_s * (r.output - 1)
    o.step_score += score(p, r)
    o.met_ttft += in_time
    o.met_tpot += smooth
    if in_time and smooth:
        o.met += 1
        o.step_met += 1.0
    claimed = r.prompt - uncached
    o.prompt_tokens += r.prompt
    o.hit_tokens += r.hit
    o.claimed_tokens += claimed
    o.false_tokens += max(claimed - r.hit, 0)
    o.recomputed_tokens += r.recomputed
    o.preemptions += r.preemptions
    o.last_finish = max(o.last_finish, r.finish)


# -------------------------------------------------------------------------------------- decisions


@inner
def _send(c, law, s, g, b, n):
    """Send the current request of row b to replica n, or reject it if n < 0; returns if sent."""
    v = s.env[b]
    index, now = v.index, v.now
    went = route_request(c, law, s, b, n)
    gateway.sent(g, b, index, n if went else -1, now)
    return went


@inline
def _reference(c, g, b, prompt):
    """The replica that has least to compute times requests in flight, as LMetric's rule."""
    best, least = 0, np.inf
    for n in range(c.num_replicas):
        q = g.replica[b, n]
        cost = (prompt - q.match) * (q.in_flight + 1.0) + 1e-9 * q.in_flight
        if q.up == 1 and cost < least:
            best, least = n, cost
    return best


@inner
def _observe(c, p, s, g, x, out, b):
    """Write what is seen of row b, of no request at the end of an episode, and the mask."""
    v = s.env[b]
    see(g, b, v.index, v.now, out.replicas[b], out.request[b])
    out.time_s[b, 0] = v.now
    if v.index < 0:
        out.ids[b] = 0
        out.mask[b] = 1
    else:
        out.ids[b, 0] = x.ids[b, v.index, 0]
        out.ids[b, 1] = x.ids[b, v.index, 1]
        r = s.request[b * c.num_requests + v.index]
        up = 0
        for n in range(c.num_replicas):
            up += g.replica[b, n].up
        for n in range(c.num_replicas):
            # An answer may be longer than told: the mask knows the prompt alone.
            fits = blocks_of(c, r.prompt) <= s.replica[b, n].capacity
            # Where all are down there must be something to do: the request is rejected.
            out.mask[b, n] = (g.replica[b, n].up == 1 or up == 0) and fits
        if p.admission:
            out.mask[b, c.num_replicas] = 1
    if p.layout != DICT:
        width, features = out.request.shape[1], out.replicas.shape[2]
        first = 0 if p.layout == SUMMARY else width
        of_row = features + (width if p.layout == SUMMARY else 1)
        for k in range(width):
            value = _scaled(out.request[b, k], out.high[k])
            if p.layout == FLAT:
                out.scaled[b, k] = value
            else:
                for n in range(c.num_replicas):
                    out.scaled[b, n * of_row + features + k] = value
        for n in range(c.num_replicas):
            at = first + n * of_row
            for k in range(features):
                out.scaled[b, at + k] = _scaled(out.replicas[b, n, k], out.high[width + k])
            if p.layout == FLAT:
                out.scaled[b, at + features] = _expected(c, p, s, g, b, n)


@inline
def _expected(c, p, s, g, b, n):
    """What the TTFT of the request takes of its objective at replica n, as the gateway expects it.

    In the form of `_doublings`, at most `MAX_SHARE`; 0 after the last request.
    """
    index = s.env[b].index
    if index < 0:
        return 0.0
    q = g.replica[b, n]
    prompt = s.request[b * c.num_requests + index].prompt
    expected = (q.prefill + max(prompt - q.match, 0)) / q.speed
    return min(_doublings(p, prompt, expected), MAX_SHARE)


@inline
def _scaled(value, high):
    """A feature in [0, 1], or [-1, 1] with a sign: shares as they are, others by their logarithm.

    A second and a token are the unit of the logarithm.
    """
    if high <= 1.0:
        return value / high
    return math.copysign(math.log1p(abs(value)) / math.log1p(high), value)


# ------------------------------------------------------------------------------------ entry points


@jit
def begin(t, s, g, x, out, which):
    """Start the loaded episodes of the rows b with which[b] != 0, and route their warm-up.

    The warm-up's requests go where there is least to compute times requests in flight; they are
    neither paid nor counted.
    """
    t, s, g, x, out = borrowed(t), borrowed(s), borrowed(g), borrowed(x), borrowed(out)
    c = t.config[0]
    p = x.settings[0]
    for b in range(s.env.shape[0]):
        if which[b] == 0:
            continue
        begin_row(c, s, b)
        x.counted[b] = 0
        x.scraped[b] = -1.0
        _go_to_next_arrival(c, t.law, p, s, g, x, b)
        for _ in range(p.warmup):
            prompt = s.request[b * c.num_requests + s.env[b].index].prompt
            _send(c, t.law, s, g, b, _reference(c, g, b, prompt))
            _go_to_next_arrival(c, t.law, p, s, g, x, b)
        x.row[b].began = s.env[b].now
        _observe(c, p, s, g, x, out, b)


@jit
def observe(t, s, g, x, out, which):
    """Write what is seen of the rows b with which[b] != 0."""
    t, s, g, x, out = borrowed(t), borrowed(s), borrowed(g), borrowed(x), borrowed(out)
    for b in range(s.env.shape[0]):
        if which[b] != 0:
            for n in range(t.config[0].num_replicas):
                locate(t.config[0], s, b, n)  # a restored state may come from another row
            _observe(t.config[0], x.settings[0], s, g, x, out, b)


@jit
def step(t, s, g, x, out, actions, which):
    """Decide on the current request of every row b with which[b] != 0 and go on to the next.

    Returns how many episodes have ended, or -1 - b if the action of any row b is out of range,
    before anything has changed.
    """
    t, s, g, x, out = borrowed(t), borrowed(s), borrowed(g), borrowed(x), borrowed(out)
    c = t.config[0]
    p = x.settings[0]
    for b in range(s.env.shape[0]):
        if which[b] != 0 and (actions[b] < 0 or actions[b] >= c.num_replicas + p.admission):
            return -1 - b
    ended = 0
    for b in range(s.env.shape[0]):
        if which[b] == 0:
            continue
        v = s.env[b]
        o = x.row[b]
        o.step_met = 0.0
        o.step_ttft = 0.0
        o.step_score = 0.0
        o.step_early = 0.0
        o.step_work_s = 0.0
        x.order[b, o.index] = v.index
        x.counted[b, v.index] = 1
        o.index += 1
        n = actions[b] if actions[b] < c.num_replicas else -1
        q = g.request[b, v.index]
        prompt = s.request[b * c.num_requests + v.index].prompt
        if _send(c, t.law, s, g, b, n):
            o.step_early += _in_advance(p, prompt, q.expected)
            o.step_work_s = q.uncached / g.replica[b, n].speed
        else:
            o.rejected += 1
            o.step_score += LOST if n >= 0 else 0.0
        _go_to_next_arrival(c, t.law, p, s, g, x, b)
        last = o.index == p.decisions
        if last:
            v.index = -1
            for n in range(c.num_replicas):
                advance(c, t.law, s, s.replica[b, n], np.inf)
            _hear(c, p, s, g, x, b)
            ended += 1
        _observe(c, p, s, g, x, out, b)
        if p.reward == SLO:
            out.reward[b, 0] = o.step_met
        elif p.reward == TTFT:
            out.reward[b, 0] = -o.step_ttft
        elif p.reward == SCORE:
            out.reward[b, 0] = o.step_score
        else:
            out.reward[b, 0] = o.step_score + o.step_early - WORK_WEIGHT * o.step_work_s
        out.reward[b, 1] = 1.0 if last else 0.0
    return ended
