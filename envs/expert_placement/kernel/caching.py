"""Servers that cache experts on their GPUs and fetch the others from host memory."""

from __future__ import annotations

import numpy as np

from servegym._jit import inline, jit
from servegym.envs.expert_placement.kernel import events
from servegym.envs.expert_placement.kernel.calls import expert_at, places_of_step
from servegym.envs.expert_placement.kernel.tables import ACTIVATION, LFU, LRU


@inline
def _worth(c, cache, g, expert):
    """What the cache keeps an expert for; the least one goes first."""
    about = cache.expert[g, expert]
    if c.cache == LRU:
        worth = about.stamp
    elif c.cache == LFU:
        worth = about.uses
    else:
        # Early layers count more: there is less time to fetch them before they are needed.
        worth = (about.volume + 1) * (c.layers - expert // c.experts)
    return worth


@jit
def _least_worth(c, cache, resident, g):
    """The cached expert that goes first, -1 if none is there."""
    found = -1
    least = np.int64(0)
    for i in range(c.layers * c.experts):
        if resident[g, i]:
            worth = _worth(c, cache, g, i)
            if found < 0 or worth < least:
                found = i
                least = worth
    return found


@jit
def _fetch(c, plant, st, cache, g, expert, now):
    """Queue a fetch over the host channel of a GPU; returns when it ends.

    It claims its slot at once. If all slots wait for fetches, the expert serves this call only.
    """
    m = st.meta[0]
    gpu = st.gpu[g]
    m.loads += 1
    # One host channel a GPU: fetches follow one another.
    there = max(now, gpu.channel_free) + c.fetch
    gpu.channel_free = there
    m.weight_bytes += c.expert_bytes
    slots = plant.gpu[g].slots
    if gpu.used >= slots:
        goes = _least_worth(c, cache, st.resident, g)
        if goes >= 0:
            st.resident[g, goes] = 0
            gpu.used -= 1
            m.drops += 1
    if gpu.used < slots:
        gpu.used += 1
        gpu.peak = max(gpu.peak, gpu.used)
        cache.ready[g, expert] = there
    return there


@inline
def _await_fetch(st, r, g, expert, x, there, now):
    """A call (or with r = -1 nothing) waits for the end of a fetch."""
    m = st.meta[0]
    m.free -= 1
    slot = np.int64(st.free[m.free])
    msg = st.message[slot]
    msg.request = r
    msg.expert = expert
    msg.assigned = x
    msg.sent = now
    st.call[slot, 0, 0] = g
    events.add_event(st, there, events.FETCHED, slot)


@jit
def dispatch_cached(c, plant, load, st, cache, r, now):
    """Run or await the calls of a layer on the server itself."""
    m = st.meta[0]
    q = st.request[r]
    v = st.server[q.home]
    layer = q.layer
    first_gpu = plant.server[q.home].first_gpu
    end_gpu = plant.server[q.home].end_gpu
    row, places = places_of_step(c, q)
    q.dispatched = now
    q.end = now
    q.pending = 0
    for i in range(places):
        e, x = expert_at(load, q, row, i)
        if x == 0:
            continue
        expert = layer * c.experts + e
        # An expert has one GPU of its server, so that no two cache it.
        g = first_gpu + e % (end_gpu - first_gpu)
        st.counts[load.request[r].home, expert] += x
        m.calls += 1
        about = cache.expert[g, expert]
        about.stamp = m.calls
        about.uses += 1
        about.volume += x
        if st.resident[g, expert]:
            done = max(now, st.gpu[g].free) + (plant.gpu[g].fixed + plant.gpu[g].token * x)
            st.gpu[g].free = done
            q.end = max(q.end, done)
            v.local_s += done - now
            v.local_tokens += x
            v.all_local_tokens += x
            v.all_local_calls += 1
            continue
        there = cache.ready[g, expert]
        # Under way for another call, or fetched ahead: waited for and not fetched twice.
        if there == 0.0:
            there = _fetch(c, plant, st, cache, g, expert, now)
        _await_fetch(st, r, g, expert, x, there, now)
        q.pending += 1
        v.all_remote_tokens += x
        v.all_remote_calls += 1
    v.layer_steps += 1
    if q.pending:
        v.remote_layer_steps += 1
    else:
        events.add_event(st, q.end, events.LAYER_END, r)
    # Only with an idle channel: a fetch ahead must not delay one that is waited for.
    if c.cache == ACTIVATION and layer + 1 < c.layers:
        for g in range(first_gpu, end_gpu):
            if st.gpu[g].channel_free <= now and m.free > 0:
                _prefetch(c, plant, load, st, cache, r, g, now)


@jit
def _prefetch(c, plant, load, st, cache, r, g, now):
    """Fetch ahead the missing expert that the next layer is most likely to need.

    By what the request's own prompt used there, once that is known, else by what the server's
    requests used; if the cache would keep it rather than what has to go.
    """
    q = st.request[r]
    first_gpu = plant.server[q.home].first_gpu
    gpus = plant.server[q.home].end_gpu - first_gpu
    layer = q.layer + 1
    most = np.int64(0)
    best = -1
    for e in range(g - first_gpu, c.experts, gpus):
        i = layer * c.experts + e
        if st.resident[g, i] or cache.ready[g, i] > 0.0:
            continue
        if q.step == 0:
            likely = cache.expert[g, i].volume
        else:
            likely = np.int64(load.counts[q.prompt, layer, e])
        if likely > most:
            most = likely
            best = i
    if best < 0:
        return
    if st.gpu[g].used >= plant.gpu[g].slots:
        goes = _least_worth(c, cache, st.resident, g)
        if goes < 0 or _worth(c, cache, g, goes) >= _worth(c, cache, g, best):
            return
    there = _fetch(c, plant, st, cache, g, best, now)
    _await_fetch(st, np.int64(-1), g, best, np.int64(0), there, now)


@jit
def end_fetch(plant, st, cache, slot, now):
    """A fetch ends: the expert serves, and a call that waited for it runs."""
    m = st.meta[0]
    msg = st.message[slot]
    g = np.int64(st.call[slot, 0, 0])
    if cache.ready[g, msg.expert] == now:
        cache.ready[g, msg.expert] = 0.0
        st.resident[g, msg.expert] = 1
    st.free[m.free] = slot
    m.free += 1
    if msg.request >= 0:
        q = st.request[msg.request]
        done = max(now, st.gpu[g].free) + (plant.gpu[g].fixed + plant.gpu[g].token * msg.assigned)
        st.gpu[g].free = done
        v = st.server[q.home]
        v.remote_s += done - msg.sent
        v.remote_tokens += msg.assigned
        q.end = max(q.end, done)
        q.pending -= 1
        if q.pending == 0:
            events.add_event(st, q.end, events.LAYER_END, np.int64(msg.request))
