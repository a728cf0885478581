"""Steps of the environment: a decision, the way to the next one, and what of it is seen and paid.

The gateway is told of nothing that a gateway cannot know: metrics as they were at the last scrape,
first tokens and ends of its responses, cache events where its index is built from them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from servegym._jit import borrowed, inline, inner, jit, record
from servegym.envs.llm_routing.kernel.scheduler import before, blocks_of, request_of
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
from servegym.envs.prefix_routing.kernel.layout import COMPLETED, COMPLETION, FIRST_TOKEN
from servegym.envs.prefix_routing.kernel.observation import REPLICA_HIGH, REQUEST_HIGH
from servegym.envs.prefix_routing.kernel.observation import observe as see

SLO, TTFT, SCORE, DENSE = 0, 1, 2, 3  # settings.reward
DICT, FLAT, SUMMARY = 0, 1, 2  # settings.layout
SCORE_WEIGHT, LOST = 0.3, -2.0
"""Of the reward SCORE: see `score`; what a request counts that a replica loses or cannot take."""
USUAL_MET, WORK_WEIGHT = 0.8, 5.0
"""Of the reward DENSE: taken off for each decision; see `_held`, 1/s."""
MAX_SHARE = 32.0
"""Bound of the last column of a replica in the FLAT view, see `_expected`."""


SETTINGS = record(
    ("decisions", "i8"),  # of an episode
    ("warmup", "i8"),  # requests before the first decision
    ("admission", "i8"),  # 1: a request may be rejected
    ("layout", "i8"),  # DICT, FLAT or SUMMARY
    ("reward", "i8"),  # SLO, TTFT, SCORE or DENSE
    ("scrape_s", "f8"),  # time between scrapes; 0: metrics are live
    ("ttft_s", "f8"),  # TTFT objective: ttft_s + ttft_s_per_token x prompt
    ("ttft_s_per_token", "f8"),
    ("tpot_s", "f8"),  # TPOT objective
)
"""What all systems share besides engine and gateway."""

EPISODE = record(
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
    ("step_held", "f8"),  # change of what the requests in flight hold of DENSE, see `_held`
    ("began", "f8"),  # s, first decision
    ("last_finish", "f8"),  # s
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
        seen_replicas: ``(B, N)`` `SEEN_REPLICA`, the same memory by the names of the columns.
        seen_request: ``(B,)`` `SEEN_REQUEST`, likewise.
        ids: int32 ``(B, 2)``, session and tenant.
        time_s: float32 ``(B, 1)``.
        scaled: float32 ``(B, K + N (F + 1))`` or, by replica, ``(B, N (F + K))``; ``(B, 0)`` where
            nobody reads it.
        mask: int8 ``(B, A)``.
        reward: float64 ``(B, 2)``: the reward and whether the episode has ended.
    """

    replicas: np.ndarray
    request: np.ndarray
    seen_replicas: np.ndarray
    seen_request: np.ndarray
    ids: np.ndarray
    time_s: np.ndarray
    scaled: np.ndarray
    mask: np.ndarray
    reward: np.ndarray


# ------------------------------------------------------------------------------------------- time


@inner
def _work(tables, systems, gateways, episodes, row, number, now, until):
    """Let a replica work until ``until``, now or just before it; it is scraped until now."""
    config, settings = tables.config[0], episodes.settings[0]
    replica = systems.replica[row, number]
    tick = now
    if settings.scrape_s > 0.0:
        tick = math.floor(now / settings.scrape_s) * settings.scrape_s
        if tick > now:
            tick -= settings.scrape_s
    if tick > episodes.scraped[row, number]:
        if replica.end <= tick or replica.next_change <= tick:
            advance(config, tables.law, systems, replica, min(tick, until))
        episodes.scraped[row, number] = tick
        usage = used_blocks(replica) / replica.capacity
        gateway.scraped(gateways, row, number, tick, replica.waiting, replica.running, usage)
    if replica.end <= until or replica.next_change <= until:
        advance(config, tables.law, systems, replica, until)


@inner
def _go_to_next_arrival(tables, systems, gateways, episodes, row):
    """Bring the row, its replicas and its gateway to the next arrival, if there is one."""
    config, env = tables.config[0], systems.env[row]
    n = next_to_work(config, systems, row)
    while n >= 0:
        safe = systems.replica[row, n].safe
        _work(tables, systems, gateways, episodes, row, n, safe, safe)
        n = next_to_work(config, systems, row)
    take_arrival(systems, row)
    if env.index < 0:
        return
    for n in range(config.num_replicas):
        _work(tables, systems, gateways, episodes, row, n, env.now, before(env.now))
    _hear(config, systems, gateways, episodes, row)
    for n in range(config.num_replicas):
        replica = systems.replica[row, n]
        if replica.failed > gateways.replica[row, n].forgotten_s:
            gateway.forget(gateways, row, n, replica.failed)
        gateways.replica[row, n].up = 1 - replica.down
    gateway.take_events(gateways, row, systems.events[row], env.events, env.now)
    gateway.look_up(gateways, row, env.index, env.now)


@inner
def _hear(config, systems, gateways, episodes, row):
    """First tokens and ends since the last time: for the gateway, and for the episode's sums."""
    settings, episode = episodes.settings[0], episodes.row[row]
    env, news = systems.env[row], systems.news[row]
    while episode.news < env.news:
        entry = news[episode.news]
        episode.news += 1
        if episodes.counted[row, entry.request] == 0:
            continue
        request = request_of(systems, env, entry.request)
        view = gateways.request[row, entry.request]
        first = entry.kind == FIRST_TOKEN
        episode.step_held -= _held(settings, gateways, row, view, request, first)
        if first:
            episode.step_ttft += request.first - request.arrived
            episode.step_held += _held(settings, gateways, row, view, request, False)
        elif entry.kind == COMPLETION:
            _count(settings, episode, request, view.uncached)
        else:
            episode.step_score += LOST
    requests = systems.request[env.first_request : env.first_request + config.num_requests]
    gateway.take_news(gateways, row, news, env.news, requests)


@inline
def _doublings(settings, prompt, ttft):
    """Binary logarithm of one and the share of its objective that a TTFT takes."""
    objective = settings.ttft_s + settings.ttft_s_per_token * prompt
    return math.log2(1.0 + ttft / objective) if objective > 0.0 else MAX_SHARE


@inline
def _held(settings, gateways, row, view, request, unanswered):
    """What a request in flight holds of DENSE; it gives that back when it ends.

    From its first token on 1 if that was in time. Before (or if ``unanswered``) 1 / (1 + x), x the
    share of its objective that the TTFT takes as the gateway expected it, less `WORK_WEIGHT` times
    the seconds of work on the tokens of its prompt that the index does not have there.
    """
    if unanswered or math.isnan(request.first):
        work_s = view.uncached / gateways.replica[row, request.replica].speed
        early = 2.0 ** -_doublings(settings, request.prompt, view.expected)
        return early - WORK_WEIGHT * work_s
    return 1.0 if _met(settings, request)[0] else 0.0


@inline
def score(settings, request):
    """What a completed request is worth: 1 within both objectives, less for what it took of them.

    ``SCORE_WEIGHT`` times the binary logarithm of one and the larger share of its objective that
    TTFT or TPOT took: the logarithm tells apart what is late and what is later.
    """
    objective = settings.ttft_s + settings.ttft_s_per_token * request.prompt
    ttft = (request.first - request.arrived) / objective
    tpot = (request.finish - request.first) / (settings.tpot_s * max(request.output - 1, 1))
    worse = max(ttft, tpot)
    return (1.0 if worse <= 1.0 else 0.0) - SCORE_WEIGHT * math.log2(1.0 + worse)


@inline
def _met(settings, request):
    """Whether a completed request is within its objectives of TTFT and of TPOT."""
    ttft = request.first - request.arrived
    in_time = ttft <= settings.ttft_s + settings.ttft_s_per_token * request.prompt
    return in_time, request.finish - request.first <= settings.tpot_s * (request.output - 1)


@jit
def rewards_of(settings, requests, rewards):
    """What the reward of `SETTINGS` (1,) counts in all for requests (K,) that have ended.

    Written into ``rewards`` (K,); of DENSE the score.
    """
    reward = settings[0].reward
    for k in range(len(requests)):
        request = requests[k]
        rewards[k] = 0.0
        if request.outcome == COMPLETED:
            in_time, smooth = _met(settings[0], request)
            if reward == TTFT:
                rewards[k] = request.arrived - request.first
            elif reward == SLO:
                rewards[k] = 1.0 if in_time and smooth else 0.0
            else:
                rewards[k] = score(settings[0], request)
        elif request.replica >= 0 and (reward == SCORE or reward == DENSE):
            rewards[k] = LOST


@inline
def _count(settings, episode, request, uncached):
    """Add a completed request to the episode's sums; ``uncached`` as the index had it."""
    in_time, smooth = _met(settings, request)
    episode.completed += 1
    episode.step_score += score(settings, request)
    episode.met_ttft += in_time
    episode.met_tpot += smooth
    if in_time and smooth:
        episode.met += 1
        episode.step_met += 1.0
    claimed = request.prompt - uncached
    episode.prompt_tokens += request.prompt
    episode.hit_tokens += request.hit
    episode.claimed_tokens += claimed
    episode.false_tokens += max(claimed - request.hit, 0)
    episode.recomputed_tokens += request.recomputed
    episode.preemptions += request.preemptions
    episode.last_finish = max(episode.last_finish, request.finish)


# -------------------------------------------------------------------------------------- decisions


@inner
def _send(tables, systems, gateways, row, number):
    """Send the current request to a replica, or reject it if there is none; returns if sent."""
    env = systems.env[row]
    index, now = env.index, env.now
    went = route_request(tables.config[0], tables.law, systems, row, number)
    gateway.sent(gateways, row, index, number if went else -1, now)
    return went


@inline
def _reference(config, gateways, row, prompt):
    """The replica that has least to compute times requests in flight, as LMetric's rule."""
    best, least = 0, np.inf
    for n in range(config.num_replicas):
        view = gateways.replica[row, n]
        # The last term breaks ties where all is cached: fewest in flight.
        cost = (prompt - view.match) * (view.in_flight + 1.0) + 1e-9 * view.in_flight
        if view.up == 1 and cost < least:
            best, least = n, cost
    return best


@inner
def _observe(config, systems, gateways, episodes, out, row):
    """Write what is seen of the row, of no request at the end of an episode, and the mask."""
    env, settings = systems.env[row], episodes.settings[0]
    replicas, request = out.seen_replicas[row], out.seen_request[row]
    columns = out.replicas[row], out.request[row]
    see(gateways, row, env.index, env.now, replicas, request, columns[0], columns[1])
    out.time_s[row, 0] = env.now
    if env.index < 0:
        out.ids[row] = 0
        out.mask[row] = 1
    else:
        out.ids[row, 0] = episodes.ids[row, env.index, 0]
        out.ids[row, 1] = episodes.ids[row, env.index, 1]
        # An answer may be longer than predicted: the mask knows the prompt alone.
        need = blocks_of(config, request_of(systems, env, env.index).prompt)
        up = 0
        for n in range(config.num_replicas):
            up += gateways.replica[row, n].up
        for n in range(config.num_replicas):
            fits = need <= systems.replica[row, n].capacity
            # Where all are down there must be something to do: the request is rejected.
            out.mask[row, n] = (gateways.replica[row, n].up == 1 or up == 0) and fits
        if settings.admission:
            out.mask[row, config.num_replicas] = 1
    if settings.layout != DICT:
        _write_scaled(config, systems, gateways, settings, out, row)


@inline
def _write_scaled(config, systems, gateways, settings, out, row):
    """Write what is seen of the row in one array."""
    width, features = out.request.shape[1], out.replicas.shape[2]
    first = 0 if settings.layout == SUMMARY else width
    of_replica = features + (width if settings.layout == SUMMARY else 1)
    for k in range(width):
        value = _scaled(out.request[row, k], REQUEST_HIGH[k])
        if settings.layout == FLAT:
            out.scaled[row, k] = value
        else:
            for n in range(config.num_replicas):
                out.scaled[row, n * of_replica + features + k] = value
    for n in range(config.num_replicas):
        start = first + n * of_replica
        for k in range(features):
            out.scaled[row, start + k] = _scaled(out.replicas[row, n, k], REPLICA_HIGH[k])
        if settings.layout == FLAT:
            expected = _expected(settings, systems.env[row], systems, gateways, row, n)
            out.scaled[row, start + features] = expected


@inline
def _expected(settings, env, systems, gateways, row, number):
    """Share of its objective that the request's TTFT takes at a replica, as the gateway expects it.

    In the form of `_doublings`, at most `MAX_SHARE`; 0 after the last request.
    """
    if env.index < 0:
        return 0.0
    view = gateways.replica[row, number]
    prompt = request_of(systems, env, env.index).prompt
    expected = (view.prefill + max(prompt - view.match, 0)) / view.speed
    return min(_doublings(settings, prompt, expected), MAX_SHARE)


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
def begin(tables, systems, gateways, episodes, out, which):
    """Start the loaded episodes of the rows with which[row] != 0, and route their warm-up.

    The warm-up's requests go where there is least to compute times requests in flight; they are
    neither paid nor counted.
    """
    arrays = (tables, systems, gateways, episodes, out)
    tables, systems, gateways, episodes, out = borrowed(arrays)
    config = tables.config[0]
    for row in range(systems.env.shape[0]):
        if which[row] == 0:
            continue
        env = systems.env[row]
        begin_row(config, systems, row)
        episodes.counted[row] = 0
        episodes.scraped[row] = -1.0
        _go_to_next_arrival(tables, systems, gateways, episodes, row)
        for _ in range(episodes.settings[0].warmup):
            prompt = request_of(systems, env, env.index).prompt
            _send(tables, systems, gateways, row, _reference(config, gateways, row, prompt))
            _go_to_next_arrival(tables, systems, gateways, episodes, row)
        episodes.row[row].began = env.now
        _observe(config, systems, gateways, episodes, out, row)


@jit
def observe(tables, systems, gateways, episodes, out, which):
    """Write what is seen of the rows with which[row] != 0."""
    arrays = (tables, systems, gateways, episodes, out)
    tables, systems, gateways, episodes, out = borrowed(arrays)
    config = tables.config[0]
    for row in range(systems.env.shape[0]):
        if which[row] != 0:
            for n in range(config.num_replicas):
                locate(config, systems, row, n)  # a restored state may come from another row
            _observe(config, systems, gateways, episodes, out, row)


@jit
def step(tables, systems, gateways, episodes, out, actions, which):
    """Decide on the current request of every row with which[row] != 0 and go on to the next.

    Returns how many episodes have ended, or -1 - row if the action of any row is out of range,
    before anything has changed.
    """
    arrays = (tables, systems, gateways, episodes, out)
    tables, systems, gateways, episodes, out = borrowed(arrays)
    config, settings = tables.config[0], episodes.settings[0]
    choices = config.num_replicas + settings.admission
    for row in range(systems.env.shape[0]):
        if which[row] != 0 and (actions[row] < 0 or actions[row] >= choices):
            # Before anything moves: an error leaves all systems as they were.
            return -1 - row
    ended = 0
    for row in range(systems.env.shape[0]):
        if which[row] == 0:
            continue
        env, episode = systems.env[row], episodes.row[row]
        episode.step_met = episode.step_ttft = episode.step_score = episode.step_held = 0.0
        episodes.order[row, episode.index] = env.index
        episodes.counted[row, env.index] = 1
        episode.index += 1
        number = actions[row] if actions[row] < config.num_replicas else -1
        view = gateways.request[row, env.index]
        request = request_of(systems, env, env.index)
        if _send(tables, systems, gateways, row, number):
            episode.step_held += _held(settings, gateways, row, view, request, True)
        else:
            episode.rejected += 1
            episode.step_score += LOST if number >= 0 else 0.0
        _go_to_next_arrival(tables, systems, gateways, episodes, row)
        last = episode.index == settings.decisions
        if last:
            env.index = -1
            # The last answers count, too: the replicas work off what they have.
            for n in range(config.num_replicas):
                advance(config, tables.law, systems, systems.replica[row, n], np.inf)
            _hear(config, systems, gateways, episodes, row)
            ended += 1
        _observe(config, systems, gateways, episodes, out, row)
        reward = episode.step_score
        if settings.reward == SLO:
            reward = episode.step_met
        elif settings.reward == TTFT:
            reward = -episode.step_ttft
        elif settings.reward == DENSE:
            reward = episode.step_met + episode.step_held - USUAL_MET
        out.reward[row, 0] = reward
        out.reward[row, 1] = 1.0 if last else 0.0
    return ended
