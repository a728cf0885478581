"""The loop over arrivals and events."""

from __future__ import annotations

import numpy as np

from servegym._jit import borrowed, inline, jit
from servegym.envs.expert_placement.kernel import events
from servegym.envs.expert_placement.kernel.caching import dispatch_cached, end_fetch
from servegym.envs.expert_placement.kernel.calls import dispatch, receive_message, return_message
from servegym.envs.expert_placement.kernel.forwarding import choose_path, move_on
from servegym.envs.expert_placement.kernel.migration import end_load, send_chunk
from servegym.envs.expert_placement.kernel.routing import route, send_answer
from servegym.envs.expert_placement.kernel.tables import DONE, FORWARD, HOME, POOL_FULL


@jit
def run(plant, load, st, scratch, cache, until):
    """Process every arrival and event up to the time ``until`` (inf: until nothing is left).

    If servers help each other, ``cache`` is None; if their GPUs are caches, ``scratch`` is.

    Returns:
        ``DONE``, or ``POOL_FULL`` if the places for messages may not last for the next event:
        nothing is lost, and a call with more places goes on.
    """
    plant, load, st = borrowed(plant), borrowed(load), borrowed(st)
    c = plant.cfg[0]
    m = st.meta[0]
    requests = load.request.shape[0]
    while True:
        if m.handled:
            events.drop_event(st)
        # An event makes at most a message an expert: checked before it, so none is half done.
        if m.free < c.experts:
            return POOL_FULL
        now = events.next_time(st)
        # Of an arrival and an event at one moment the arrival comes first.
        arrives = m.next_request < requests and load.request[m.next_request].arrival <= now
        if arrives:
            now = load.request[m.next_request].arrival
        elif m.heap == 0:
            break
        if now > until:
            break
        begin = -1  # a request that begins a layer
        if arrives:
            begin = _arrive(c, plant, load, st, m.next_request, now)
            m.next_request += 1
        else:
            kind, index = events.handle_next(st)
            if kind == events.LAYER_END:
                if not _end_layer(c, plant, load, st, index, now):
                    begin = index
                elif st.request[index].home == load.request[index].home:
                    _finish(load, st, index, now)
                else:
                    send_answer(c, plant, load, st, index, now)
            elif kind == events.TRAVEL_END:
                if st.request[index].step < load.request[index].outputs:
                    begin = index
                else:
                    _finish(load, st, index, now)
            elif scratch is not None:
                if kind == events.DISPATCH:
                    if dispatch(c, plant, load, st, scratch, index, now) == 0:
                        events.add_event(st, st.request[index].end, events.LAYER_END, index)
                elif kind == events.MESSAGE_ARRIVAL:
                    receive_message(c, plant, st, index, now)
                elif kind == events.MESSAGE_RETURN:
                    if return_message(c, plant, st, index, now) == 0:
                        r = np.int64(st.message[index].request)
                        events.add_event(st, st.request[r].end, events.LAYER_END, r)
                elif kind == events.CHUNK:
                    send_chunk(plant, st, index, now)
                else:
                    end_load(plant, st, index, now)
            elif cache is not None:
                if kind == events.DISPATCH:
                    dispatch_cached(c, plant, load, st, cache, index, now)
                else:
                    end_fetch(plant, st, cache, index, now)
        m.now = now
        if begin >= 0 and c.execution == FORWARD:
            begin = move_on(c, plant, st, begin, now)
        if begin >= 0:
            _begin_layer(plant, st, begin, now)
    if cache is None:
        _settle_counts(c, load, st)
    if until < np.inf:
        m.now = until
    for n in range(c.num_servers):
        _count_area(st.server[n], m.now)
    return DONE


@inline
def _arrive(c, plant, load, st, r, now):
    """A request arrives; returns it if it begins here, -1 if it is sent to another server."""
    request = load.request[r]
    prompt = load.prompt[request.prompt]
    n = request.home
    q = st.request[r]
    q.home = n
    q.taken = n
    q.prompt = request.prompt
    q.tokens = prompt.tokens
    q.start = prompt.start
    q.rows = prompt.end - prompt.start
    q.shift = request.offset % q.rows
    v = st.server[n]
    _count_area(v, now)
    v.in_system += 1
    v.arrived += 1
    begin = r
    if c.router != HOME:
        begin = route(c, plant, load, st, r, now)
    if c.execution == FORWARD:
        choose_path(c, plant, load, st, r, now)
    st.server[q.taken].serving += 1
    return begin


@inline
def _begin_layer(plant, st, r, now):
    """Queue the rest of a layer on the first GPU of the home server."""
    q = st.request[r]
    home = plant.server[q.home]
    gpu = st.gpu[home.first_gpu]
    x = q.tokens if q.step == 0 else 1
    # The dense part runs on one GPU and waits for the expert calls that it has.
    done = max(now, gpu.free) + (home.dense_base + home.dense_token * x)
    gpu.free = done
    events.add_event(st, done, events.DISPATCH, r)


@inline
def _end_layer(c, plant, load, st, r, now):
    """All calls of a layer are back; returns whether it was the last one of the last token."""
    # Records are taken out of the tables before the first branch: see the note in `calls`.
    q = st.request[r]
    request = load.request[r]
    serves = st.server[q.taken]
    way = plant.pair[q.home, request.home]
    q.layer += 1
    last = False
    if q.layer == c.layers:
        q.layer = 0
        q.step += 1
        if q.step == 1:
            q.first = now + way.latency  # none where it arrived
        last = q.step == request.outputs
        serves.serving -= np.int64(last)
    return last


@inline
def _finish(load, st, r, now):
    """The last token of a request is where it arrived."""
    st.request[r].finish = now
    v = st.server[load.request[r].home]
    _count_area(v, now)
    v.in_system -= 1


@inline
def _count_area(v, now):
    """Add the request-seconds of a server up to now."""
    v.area += v.in_system * (now - v.since)
    v.since = now


@jit
def _settle_counts(c, load, st):
    """Bring ``counts`` up to date.

    Request by request instead of call by call, which would touch another server's counts each time.
    """
    m = st.meta[0]
    for r in range(m.settled, m.next_request):
        q = st.request[r]
        counts = st.counts[q.taken]
        for done in range(q.counted, q.sent):
            step = done // c.layers
            layer = done - step * c.layers
            first = layer * c.experts
            if step == 0:
                for e in range(c.experts):
                    counts[first + e] += load.counts[q.prompt, layer, e]
            else:
                row = q.start + (q.shift + step - 1) % q.rows
                for i in range(c.top_k):
                    counts[first + load.chosen[row, layer, i]] += 1
        q.counted = q.sent
    while m.settled < m.next_request and not np.isnan(st.request[m.settled].finish):
        m.settled += 1


@jit
def count_assignments(home, prompt, outputs, load, counts):
    """Add to ``counts`` (N, L, E) the assignments of requests (R,) that are not simulated."""
    for r in range(home.shape[0]):
        n = home[r]
        p = prompt[r]
        for layer in range(counts.shape[1]):
            for e in range(counts.shape[2]):
                counts[n, layer, e] += load.counts[p, layer, e]
        start = load.prompt[p].start
        rows = load.prompt[p].end - start
        for step in range(outputs[r] - 1):
            row = start + step % rows
            for layer in range(counts.shape[1]):
                for i in range(load.chosen.shape[2]):
                    counts[n, layer, load.chosen[row, layer, i]] += 1
