"""Calls of experts where servers help each other: local ones, and messages there and back."""

from __future__ import annotations

import numpy as np

from servegym._jit import inline
from servegym.envs.expert_placement.kernel import events
from servegym.envs.expert_placement.kernel.tables import (
    CONSOLIDATE,
    NEAREST,
    PAIRWISE,
    PER_SERVER,
    RANDOM,
)

# Tokens of a prompt whose expert sets tell how many distinct tokens go to a server.
SAMPLED_TOKENS = 16
_WORD = 0xFFFFFFFF


@inline
def scramble(request, expert):
    """A fixed hash of (request, layer, expert) in [0, 2**32): ties go by it, never by index."""
    v = (request * 40503 + expert * 2654435 + 12345) & _WORD
    v = ((v ^ (v >> 15)) * 73244475) & _WORD
    v = ((v ^ (v >> 13)) * 73244475) & _WORD
    return v ^ (v >> 16)


@inline
def link_of(c, n, m):
    """Queue in which a message from server n to server m leaves."""
    # A NIC sends all that leaves a server one after another; a pair has a link of its own.
    return n * c.num_servers + m if c.link_model == PAIRWISE else n


@inline
def places_of_step(c, q):
    """Row of the bank that a step reads (a prefill none), and in how many places experts are."""
    if q.step == 0:
        return 0, c.experts
    return q.start + np.int64(np.uint32(q.shift + q.step - 1) % np.uint32(q.rows)), c.top_k


@inline
def expert_at(load, q, row, i):
    """The expert in a place of a step, and how many of the step's tokens go to it."""
    if q.step == 0:
        e = np.int64(i)
        x = np.int64(load.counts[q.prompt, q.layer, i])
    else:
        e = np.int64(load.chosen[row, q.layer, i])
        x = np.int64(1)
    return e, x


@inline
def holds(st, g, layer, e):
    """1 if a GPU holds an expert of a layer, else 0."""
    return np.int64((st.held[layer, g] >> np.uint64(e)) & np.uint64(1))


@inline
def held_by(plant, st, n, layer):
    """The experts of a layer that the GPUs of a server hold."""
    resident = np.uint64(0)
    for g in range(plant.server[n].first_gpu, plant.server[n].end_gpu):
        resident |= st.held[layer, g]
    return resident


# Functions on the hot path have one way out and use their tables on all ways through them: else
# numba counts references to every array at each call, which takes as long as all the rest.


@inline
def dispatch(c, plant, load, st, scratch, r, now):
    """Make the calls of a layer; returns the messages that have to come back."""
    q = st.request[r]
    local, remote = _split_calls(c, plant, load, st, scratch, q)
    end, local_s, local_tokens = _call_here(plant, load, st, scratch, q, local, now)
    pending, opened, remote_tokens = _call_others(c, plant, load, st, scratch, r, remote, now)
    _send_opened(c, plant, load, st, scratch, q, opened, now)
    q.dispatched = now
    q.end = end
    q.pending = pending
    q.sent += 1
    v = st.server[q.home]
    v.local_s += local_s
    v.local_tokens += local_tokens
    v.all_local_tokens += local_tokens
    v.all_local_calls += local
    v.all_remote_tokens += remote_tokens
    v.all_remote_calls += remote
    v.layer_steps += 1
    v.remote_layer_steps += np.int64(pending > 0)
    st.meta[0].calls += local + remote
    return pending


@inline
def _split_calls(c, plant, load, st, scratch, q):
    """List the experts of a layer that are here and those that are not; returns their numbers.

    Apart, as local and remote calls do not wait for each other, and without a branch on what no
    processor could foresee.
    """
    resident = held_by(plant, st, q.home, q.layer)
    row, places = places_of_step(c, q)
    local = 0
    remote = 0
    for i in range(places):
        e, x = expert_at(load, q, row, i)
        used = np.int64(x > 0)
        here = np.int64((resident >> np.uint64(e)) & np.uint64(1))
        scratch.expert[local].local = e
        local += used & here
        scratch.expert[remote].remote = e
        remote += used & (1 - here)
    return local, remote


@inline
def _call_here(plant, load, st, scratch, q, local, now):
    """Queue the local calls; returns when they end, their seconds and their tokens."""
    layer = q.layer
    first_gpu = plant.server[q.home].first_gpu
    end_gpu = plant.server[q.home].end_gpu
    prefill = q.step == 0
    end = now
    seconds = 0.0
    tokens = 0
    for i in range(local):
        e = scratch.expert[i].local
        x = np.int64(load.counts[q.prompt, layer, e]) if prefill else 1
        here = -1
        for g in range(first_gpu, end_gpu):
            # Of its own GPUs the one that falls free first; of two the lower number.
            if holds(st, g, layer, e) and (here < 0 or st.gpu[g].free < st.gpu[here].free):
                here = g
        work = plant.gpu[here].fixed + plant.gpu[here].token * x
        done = max(now, st.gpu[here].free) + work
        st.gpu[here].free = done
        end = max(end, done)
        seconds += done - now
        tokens += x
    return end, seconds, tokens


@inline
def _call_others(c, plant, load, st, scratch, r, remote, now):
    """Put the remote calls into messages; sends those of one expert each.

    Returns:
        Messages, those of them that are still open, and tokens.
    """
    m = st.meta[0]
    q = st.request[r]
    layer = q.layer
    first_expert = layer * c.experts
    prefill = q.step == 0
    opened = 0
    open_total = 0.0
    pending = 0
    tokens = 0
    consolidate = c.choice == CONSOLIDATE
    if not consolidate:  # of whose calls most need none
        for i in range(remote):  # these reads do not wait for each other either
            _first_holder(st, scratch, r, first_expert, i)
    for i in range(remote):
        e = scratch.expert[i].remote
        x = np.int64(load.counts[q.prompt, layer, e]) if prefill else 1
        g = np.int64(-1)
        if consolidate:
            g = _opened_holder(plant, st, scratch, opened, layer, e)
        if g < 0:
            if consolidate:
                _first_holder(st, scratch, r, first_expert, i)
            g = _choose_holder(
                c, plant, st, scratch, np.int64(q.home), first_expert + e, i, x, now, open_total
            )
        to = plant.gpu[g].server
        # Calls on their way count, else all requests of a moment would choose the same GPU.
        st.gpu[g].promised += plant.gpu[g].fixed + plant.gpu[g].token * x
        st.gpu[g].promised_calls += 1
        tokens += x
        slot = scratch.open[to].message
        if slot < 0:
            m.free -= 1
            slot = np.int64(st.free[m.free])
            msg = st.message[slot]
            msg.request = r
            msg.server = to
            msg.tokens = 0
            msg.calls = 0
            msg.assigned = 0
            pending += 1
            if c.messages == PER_SERVER:
                scratch.open[to].message = slot
                scratch.open[opened].order = to
                if consolidate:
                    scratch.open[opened].held = held_by(plant, st, to, layer)
                opened += 1
                scratch.open[to].seconds = c.message_cost
                scratch.open[to].mask = 0
                open_total += c.message_cost
        msg = st.message[slot]
        st.call[slot, msg.calls, 0] = g
        st.call[slot, msg.calls, 1] = x
        msg.calls += 1
        msg.assigned += x
        msg.tokens = max(msg.tokens, x)
        if c.messages == PER_SERVER:
            out = x * plant.hop[plant.route[q.home, to]].out
            scratch.open[to].seconds += out
            open_total += out
            scratch.open[to].mask |= np.uint64(1) << np.uint64(e)
        else:
            _send(c, plant, st, slot, now)
    return pending, opened, tokens


@inline
def _first_holder(st, scratch, r, first_expert, i):
    """Note the copy that the i-th remote call of a request looks at first, and its GPU."""
    expert = first_expert + scratch.expert[i].remote
    first = np.int64(np.uint32(scramble(r, expert)) % np.uint32(st.copies[expert]))
    scratch.expert[i].first = first
    scratch.expert[i].holder = st.holders[expert, first]


@inline
def _opened_holder(plant, st, scratch, opened, layer, e):
    """The GPU that falls free first of those to whose server a message is open, -1 if none."""
    best = np.int64(-1)
    least = np.inf
    for i in range(opened):
        if (scratch.open[i].held >> np.uint64(e)) & np.uint64(1):
            to = scratch.open[i].order
            for g in range(plant.server[to].first_gpu, plant.server[to].end_gpu):
                free = st.gpu[g].free + st.gpu[g].promised
                if free < least and holds(st, g, layer, e):
                    least = free
                    best = np.int64(g)
    return best


@inline
def _choose_holder(c, plant, st, scratch, n, expert, i, x, now, open_total):
    """The GPU that serves a remote call of x tokens of server n, the i-th of the scratch.

    ``open_total`` are the seconds that the messages being filled will hold the server's NIC.
    """
    copies = st.copies[expert]
    best = scratch.expert[i].holder
    if c.choice == RANDOM or copies == 1:
        return best
    least = np.inf
    nearest = c.choice == NEAREST
    pairwise = c.link_model == PAIRWISE
    per_server = c.messages == PER_SERVER
    message_cost = c.message_cost
    servers = c.num_servers
    stage = x * c.stage_token + c.stage_base
    free = max(now, st.link[n].free)  # of a NIC
    if per_server and not pairwise:
        free += open_total
    # Numbers without a sign need no test for one at each of the reads below.
    at = np.uint32(scratch.expert[i].first)
    for _ in range(min(copies, c.candidates)):
        g = np.uint32(st.holders[expert, at])
        at = np.uint32(at + 1)
        if at == copies:
            at = np.uint32(0)
        m = np.uint32(plant.gpu[g].server)
        hop = plant.hop[np.uint32(plant.route[n, m])]
        out = x * hop.out
        back = x * hop.back
        if nearest:
            value = out + back + hop.there + hop.home
        else:
            if not per_server or scratch.open[m].message < 0:
                out += message_cost
                back += message_cost
            lane = m
            sent = free
            if pairwise:
                lane = np.uint32(m * servers + n)
                sent = max(now, st.link[np.uint32(n * servers + m)].free)
                if per_server:
                    sent += scratch.open[m].seconds
            sent += out
            # The whole way: out of the NIC, there, staged, the queue of the GPU, and back.
            start = max(sent + hop.there + stage, st.gpu[g].free + st.gpu[g].promised)
            done = start + plant.gpu[g].fixed + plant.gpu[g].token * x + stage
            leave = max(done, st.link[lane].free + st.link[lane].returning)
            value = leave + back + hop.home
        # Of equals the first one looked at, which the hash chose: no index is favoured.
        if value < least:
            least = value
            best = np.int64(g)
    return best


@inline
def _send_opened(c, plant, load, st, scratch, q, opened, now):
    """Send the messages that a dispatch has filled, one a server."""
    for i in range(opened):
        to = scratch.open[i].order
        slot = scratch.open[to].message
        scratch.open[to].message = -1
        scratch.open[to].seconds = 0.0
        msg = st.message[slot]
        if q.step == 0 and msg.calls > 1:
            msg.tokens = _distinct_tokens(load, q, scratch.open[to].mask, msg.tokens, msg.assigned)
        _send(c, plant, st, slot, now)


@inline
def _distinct_tokens(load, q, mask, least, most):
    """Tokens of a prompt that go to any expert of a set, from the first of its recorded rows."""
    rows = min(q.rows, SAMPLED_TOKENS)
    hits = 0
    for i in range(rows):
        if load.bank[q.start + i, q.layer] & mask:
            hits += 1
    # Rounded to the nearest in whole numbers, so that no platform rounds otherwise.
    tokens = (2 * q.tokens * hits + rows) // (2 * rows)
    return max(least, min(tokens, most, q.tokens))


@inline
def _send(c, plant, st, slot, now):
    """Put a filled message on its link; its arrival is an event."""
    m = st.meta[0]
    msg = st.message[slot]
    n = np.int64(st.request[msg.request].home)
    to = np.int64(msg.server)
    lane = link_of(c, n, to)
    hop = plant.hop[plant.route[n, to]]
    cost = msg.tokens * hop.out + c.message_cost
    sent = max(now, st.link[lane].free) + cost
    st.link[lane].free = sent
    back = link_of(c, to, n)
    # The answer will need the way back: whoever chooses now has to expect it.
    st.link[back].returning += msg.tokens * hop.back + c.message_cost
    st.link[back].returning_messages += 1
    msg.sent = now
    m.network_bytes += msg.tokens * c.activation_bytes
    m.messages += 1
    there = sent + hop.there + (msg.tokens * c.stage_token + c.stage_base)
    events.add_event(st, there, events.MESSAGE_ARRIVAL, slot)


@inline
def receive_message(c, plant, st, slot, now):
    """Run the calls of a message; its return is an event."""
    msg = st.message[slot]
    end = now
    for i in range(msg.calls):
        g = st.call[slot, i, 0]
        gpu = st.gpu[g]
        work = plant.gpu[g].fixed + plant.gpu[g].token * st.call[slot, i, 1]
        done = max(now, gpu.free) + work
        gpu.free = done
        end = max(end, done)
        gpu.promised_calls -= 1
        # Exactly nothing when nothing is on the way: no rounding is left over.
        gpu.promised = gpu.promised - work if gpu.promised_calls else 0.0
    end += msg.tokens * c.stage_token + c.stage_base
    events.add_event(st, end, events.MESSAGE_RETURN, slot)


@inline
def return_message(c, plant, st, slot, now):
    """Send the results of a message back; returns the messages that its layer still waits for."""
    m = st.meta[0]
    msg = st.message[slot]
    q = st.request[msg.request]
    n = np.int64(q.home)
    link = st.link[link_of(c, np.int64(msg.server), n)]
    hop = plant.hop[plant.route[n, msg.server]]
    cost = msg.tokens * hop.back + c.message_cost
    sent = max(now, link.free) + cost
    link.free = sent
    link.returning_messages -= 1
    link.returning = link.returning - cost if link.returning_messages else 0.0
    home = sent + hop.home
    v = st.server[n]
    v.remote_s += msg.calls * (home - msg.sent)
    v.remote_tokens += msg.assigned
    m.network_bytes += msg.tokens * c.activation_bytes
    st.free[m.free] = slot
    m.free += 1
    q.end = max(q.end, home)
    q.pending -= 1
    return np.int64(q.pending)
