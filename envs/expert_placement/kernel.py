"""Jitted engine of the expert placement family: an exact event-driven simulation of Eq. 1.

One system is a ``Plant`` (servers, links, GPUs), a ``Load`` (requests and the experts that their
tokens go to) and a ``State`` (clocks, queues, placement, sums). All chance is drawn before;
``run`` advances the state to a given time.

A step of a request (its prefill, or one decode step) passes the layers one by one: first the rest
of the layer on the home server's first GPU, then one call for each expert that has tokens. A local
call queues at a GPU of the server; a remote one goes through the sender's link, its latency, the
staging of activations, the remote GPU, staging back and the remote server's link. GPUs and links
are FIFO, so that each is one number, the time at which it falls free. The layer ends with its
slowest call. Expert (l, e) has the number ``l * E + e``.

Placement changes are carried out on the same resources: each GPU loads its new experts one after
another, over PCIe or in chunks over the links; an expert on no other GPU is given up only when a
new copy serves, with one staging slot a GPU on top of its slots.

With ``serving = OFFLOAD`` servers do not help each other: every server has all experts in host
memory and its GPUs cache some. A call whose expert is not there fetches it over PCIe, one fetch
after another on each GPU, and runs on that GPU; a request may be redirected as a whole.

Units are seconds, bytes and tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from servegym.envs._jit import inline, jit

NIC, PAIRWISE = 0, 1
PER_EXPERT, PER_SERVER = 0, 1
LEAST_FINISH, NEAREST, RANDOM = 0, 1, 2
HOST, NETWORK = 0, 1
COLLABORATIVE, OFFLOAD = 0, 1
LRU, LFU, ACTIVATION = 0, 1, 2
DONE, POOL_FULL = 0, 1

# Kinds of events.
_LAYER_END, _DISPATCH, _ARRIVE, _RETURN, _CHUNK, _LOADED, _FETCHED, _TRAVEL = 0, 1, 2, 3, 4, 5, 6, 7
_KIND_BITS = 3
_INDEX_BITS = 22
MAX_INDEX = (1 << _INDEX_BITS) - 1
_WORD = 0xFFFFFFFF

CHUNK_BYTES = float(1 << 20)
# Tokens of a prompt whose expert sets tell how many distinct tokens go to a server.
SAMPLED_TOKENS = 16
# A redirected request and its answer travel as token numbers.
TOKEN_BYTES = 4.0


def _record(fields: list[tuple[str, str]]) -> np.dtype:
    # np.record scalars give attribute access with the JIT switched off, too.
    return np.dtype((np.record, np.dtype(fields, align=True)))


CONFIG = _record(
    [
        (name, "i8")
        for name in (
            "num_servers num_gpus layers experts top_k link_model messages choice candidates "
            "migration_source serving cache redirect"
        ).split()
    ]
    + [
        (name, "f8")
        for name in (
            "message_cost stage_token stage_base load expert_bytes activation_bytes"
        ).split()
    ]
)
META = _record(
    [("now", "f8"), ("migration_end", "f8"), ("network_bytes", "f8"), ("weight_bytes", "f8")]
    + [
        (name, "i8")
        for name in (
            "sequence heap handled next_request free loads drops fewest_copies messages calls "
            "events settled"
        ).split()
    ]
)
REQUEST = _record(
    [("dispatched", "f8"), ("end", "f8"), ("first", "f8"), ("finish", "f8")]
    # Layers dispatched so far, and those of them that ``counts`` has.
    + [(name, "i4") for name in "step layer pending home sent counted".split()]
    # What the hot loop reads of the load, beside the rest: prompt, its tokens and first row.
    + [(name, "i4") for name in "prompt tokens start rows shift unused".split()]
)
# A pair of servers: sending time of a token there and back, and the delays.
HOP = _record([(name, "f8") for name in "out back there home".split()])
MESSAGE = _record(
    [("sent", "f8")]
    + [(name, "i4") for name in "request server tokens calls assigned expert".split()]
)
SERVER = _record(
    [("area", "f8"), ("since", "f8"), ("latency", "f8"), ("ttft", "f8")]
    # Since the last adopted change of placement: seconds and tokens of calls.
    + [(name, "f8") for name in "local_s local_tokens remote_s remote_tokens".split()]
    # Over the episode.
    + [
        (name, "i8")
        for name in (
            "in_system serving arrived done all_local_tokens all_remote_tokens all_local_calls "
            "all_remote_calls layer_steps remote_layer_steps"
        ).split()
    ]
)


class Plant(NamedTuple):
    """What does not change: ``cfg`` (1,) and arrays by GPU (G,), server (N,) or pair (N, N)."""

    cfg: np.ndarray
    gpu_server: np.ndarray
    first_gpu: np.ndarray  # (N + 1,)
    slots: np.ndarray
    token_s: np.ndarray  # sending time of one token's activations
    byte_s: np.ndarray  # sending time of one byte
    latency: np.ndarray
    hop: np.ndarray  # the unlike pairs of servers; most clusters have few
    route: np.ndarray  # int32 (N, N), which of them a pair is
    base: np.ndarray
    token: np.ndarray
    dense_base: np.ndarray
    dense_token: np.ndarray


class Load(NamedTuple):
    """Requests (R,) in order of arrival and the tokens of P prompts."""

    home: np.ndarray
    arrival: np.ndarray
    prompt: np.ndarray
    outputs: np.ndarray
    offset: np.ndarray  # decode step s uses row (offset + s - 1) of the prompt's rows, in a ring
    tokens: np.ndarray  # (P,)
    counts: np.ndarray  # int32 (P, L, E)
    bank: np.ndarray  # uint64 (T, L) expert sets
    chosen: np.ndarray  # uint8 (T, L, k) the same as lists
    bank_start: np.ndarray  # (P + 1,)


class State(NamedTuple):
    """Everything that changes, with C the experts of all layers and M places for messages."""

    meta: np.ndarray
    heap_t: np.ndarray  # int64, the bits of times, which order as the times do and compare faster
    heap_k: np.ndarray
    request: np.ndarray
    gpu_free: np.ndarray
    promised: np.ndarray  # seconds of calls that are on the way to a GPU
    promised_calls: np.ndarray
    link_free: np.ndarray  # (N * N,), the first N used when links are NICs
    returning: np.ndarray  # seconds of messages that will go back over a link
    returning_messages: np.ndarray
    message: np.ndarray
    call: np.ndarray  # (M, calls, 2) GPU and tokens
    free: np.ndarray
    open_message: np.ndarray  # (N,) scratch: message being filled for a server, -1 if none
    open_s: np.ndarray
    open_mask: np.ndarray
    open_list: np.ndarray
    near: np.ndarray  # (E,) scratch: experts of a layer that are here, and that are not
    far: np.ndarray
    first: np.ndarray  # (E,) scratch: the holder of such an expert that is looked at first
    holder: np.ndarray
    resident: np.ndarray  # uint8 (G, C)
    target: np.ndarray  # uint8 (G, C)
    holders: np.ndarray  # int16 (C, G) GPUs that hold an expert, the first `copies`
    copies: np.ndarray  # (C,)
    used: np.ndarray  # (G,) slots in use, loads in flight included
    loading: np.ndarray  # (G,) expert being loaded, -1 if none
    next_load: np.ndarray
    source: np.ndarray
    bytes_left: np.ndarray
    peak: np.ndarray  # (G,) most slots in use so far
    server: np.ndarray
    counts: np.ndarray  # int64 (N, C) assignments since the last adopted change
    # Of caches, empty arrays with other servings:
    channel_free: np.ndarray  # (G,)
    ready: np.ndarray  # (G, C) time at which a fetch under way ends, 0 if none
    stamp: np.ndarray  # int64 (G, C) number of the last call that used an expert
    uses: np.ndarray  # int64 (G, C) calls
    volume: np.ndarray  # int64 (G, C) tokens


@inline
def _rise(heap_t, heap_k, i, t, key):
    """Put an event into the open place ``i`` at the end of the heap, or above it."""
    while i > 0:
        up = (i - 1) >> 1
        if heap_t[up] < t or (heap_t[up] == t and heap_k[up] < key):
            break
        heap_t[i] = heap_t[up]
        heap_k[i] = heap_k[up]
        i = up
    heap_t[i] = t
    heap_k[i] = key


@inline
def _sink(heap_t, heap_k, size, t, key):
    """Put an event into the open place at the root of a heap of ``size`` places, or below it."""
    i = 0
    child = 1
    while child < size:
        if child + 1 < size:
            one = heap_t[child]
            two = heap_t[child + 1]
            # Without a branch on the order of the two, which no processor could foresee.
            if one == two:
                child += np.int64(heap_k[child + 1] < heap_k[child])
            else:
                child += np.int64(two < one)
        if t < heap_t[child] or (t == heap_t[child] and key < heap_k[child]):
            break
        heap_t[i] = heap_t[child]
        heap_k[i] = heap_k[child]
        i = child
        child = 2 * i + 1
    heap_t[i] = t
    heap_k[i] = key


@inline
def _key(sequence, kind, index):
    return (((sequence << _INDEX_BITS) | index) << _KIND_BITS) | kind


@inline
def _later(st, t, kind, index):
    """Add an event at the time ``t``.

    The first one takes the place of the event that is being handled, which saves the heap a way
    down and one up.
    """
    m = st.meta[0]
    m.sequence += 1
    key = _key(m.sequence, kind, index)
    bits = np.float64(t).view(np.int64)
    if m.handled:
        m.handled = 0
        _sink(st.heap_t, st.heap_k, m.heap, bits, key)
    else:
        _rise(st.heap_t, st.heap_k, m.heap, bits, key)
        m.heap += 1


@inline
def scramble(request, expert):
    """A fixed hash of (request, layer, expert) in [0, 2**32): ties go by it, never by index."""
    v = (request * 40503 + expert * 2654435 + 12345) & _WORD
    v = ((v ^ (v >> 15)) * 73244475) & _WORD
    v = ((v ^ (v >> 13)) * 73244475) & _WORD
    return v ^ (v >> 16)


@inline
def _link(c, n, m):
    """Queue in which a message from server n to server m leaves."""
    return n * c.num_servers + m if c.link_model == PAIRWISE else n


@inline
def _pick(c, plant, st, n, expert, first, best, x, now, open_total):
    """The GPU that serves a remote call of x tokens of server n.

    ``best`` is the holder number ``first``, where the search begins.
    """
    copies = st.copies[expert]
    if c.choice == RANDOM or copies == 1:
        return best
    least = np.inf
    nearest = c.choice == NEAREST
    pairwise = c.link_model == PAIRWISE
    per_server = c.messages == PER_SERVER
    message_cost = c.message_cost
    servers = c.num_servers
    stage = x * c.stage_token + c.stage_base
    free = max(now, st.link_free[n])  # of a NIC
    if per_server and not pairwise:
        free += open_total
    # Numbers without a sign need no test for one at each of the reads below.
    at = np.uint32(first)
    for _ in range(min(copies, c.candidates)):
        g = np.uint32(st.holders[expert, at])
        at = np.uint32(at + 1)
        if at == copies:
            at = np.uint32(0)
        m = np.uint32(plant.gpu_server[g])
        hop = plant.hop[np.uint32(plant.route[n, m])]
        out = x * hop.out
        back = x * hop.back
        if nearest:
            value = out + back + hop.there + hop.home
        else:
            if not per_server or st.open_message[m] < 0:
                out += message_cost
                back += message_cost
            lane = m
            sent = free
            if pairwise:
                lane = np.uint32(m * servers + n)
                sent = max(now, st.link_free[np.uint32(n * servers + m)])
                if per_server:
                    sent += st.open_s[m]
            sent += out
            start = max(sent + hop.there + stage, st.gpu_free[g] + st.promised[g])
            done = start + plant.base[g] + plant.token[g] * x + stage
            leave = max(done, st.link_free[lane] + st.returning[lane])
            value = leave + back + hop.home
        if value < least:
            least = value
            best = np.int64(g)
    return best


@inline
def _distinct_tokens(load, prompt, layer, mask, least, most):
    """Tokens of a prompt that go to any expert of a set, from the first of its recorded rows."""
    start = load.bank_start[prompt]
    rows = min(load.bank_start[prompt + 1] - start, SAMPLED_TOKENS)
    hits = 0
    for i in range(rows):
        if load.bank[start + i, layer] & mask:
            hits += 1
    tokens = (2 * load.tokens[prompt] * hits + rows) // (2 * rows)
    return max(least, min(tokens, most, load.tokens[prompt]))


@inline
def _send(c, plant, st, slot, now):
    """Put a filled message on its link; its arrival is an event."""
    m = st.meta[0]
    msg = st.message[slot]
    n = st.request[msg.request].home
    to = msg.server
    lane = _link(c, n, to)
    hop = plant.hop[plant.route[n, to]]
    cost = msg.tokens * hop.out + c.message_cost
    sent = max(now, st.link_free[lane]) + cost
    st.link_free[lane] = sent
    back = _link(c, to, n)
    st.returning[back] += msg.tokens * hop.back + c.message_cost
    st.returning_messages[back] += 1
    msg.sent = now
    m.network_bytes += msg.tokens * c.activation_bytes
    m.messages += 1
    there = sent + hop.there + (msg.tokens * c.stage_token + c.stage_base)
    _later(st, there, _ARRIVE, slot)


@inline
def _step(c, q):
    """Row of the bank that a step reads (a prefill none), and in how many places experts are."""
    if q.step == 0:
        return 0, c.experts
    return q.start + np.int64(np.uint32(q.shift + q.step - 1) % np.uint32(q.rows)), c.top_k


@inline
def _tokens(load, q, row, i):
    """The expert in a place of a step, and how many of the step's tokens go to it."""
    if q.step == 0:
        e = np.int64(i)
        x = np.int64(load.counts[q.prompt, q.layer, i])
    else:
        e = np.int64(load.chosen[row, q.layer, i])
        x = np.int64(1)
    return e, x


@inline
def _dispatch(c, plant, load, st, r, now):
    """Send the calls of a layer; returns how many messages have to come back.

    One way out: with two, numba counts references to every array at each call.
    """
    m = st.meta[0]
    q = st.request[r]
    n = q.home
    v = st.server[n]
    layer = q.layer
    first_expert = layer * c.experts
    first_gpu = plant.first_gpu[n]
    last_gpu = plant.first_gpu[n + 1]
    prefill = q.step == 0
    row, places = _step(c, q)
    end = now
    opened = 0
    open_total = 0.0
    pending = 0
    local_s = 0.0
    local_tokens = 0
    remote_tokens = 0
    # Local and remote calls apart, as they do not wait for each other, and without a branch on what
    # no processor could foresee.
    near = 0
    far = 0
    for i in range(places):
        e, x = _tokens(load, q, row, i)
        used = np.int64(x > 0)
        here = np.int64(st.resident[first_gpu, first_expert + e])
        for g in range(first_gpu + 1, last_gpu):
            here |= np.int64(st.resident[g, first_expert + e])
        st.near[near] = e
        near += used & here
        st.far[far] = e
        far += used & (1 - here)
    for i in range(near):
        e = st.near[i]
        x = np.int64(load.counts[q.prompt, layer, e]) if prefill else 1
        expert = first_expert + e
        here = -1
        for g in range(first_gpu, last_gpu):
            if st.resident[g, expert] and (here < 0 or st.gpu_free[g] < st.gpu_free[here]):
                here = g
        done = max(now, st.gpu_free[here]) + (plant.base[here] + plant.token[here] * x)
        st.gpu_free[here] = done
        end = max(end, done)
        local_s += done - now
        local_tokens += x
    for i in range(far):  # these reads do not wait for each other either
        expert = first_expert + st.far[i]
        st.first[i] = np.int64(np.uint32(scramble(r, expert)) % np.uint32(st.copies[expert]))
        st.holder[i] = st.holders[expert, st.first[i]]
    for i in range(far):
        e = st.far[i]
        x = np.int64(load.counts[q.prompt, layer, e]) if prefill else 1
        expert = first_expert + e
        g = _pick(c, plant, st, n, expert, st.first[i], st.holder[i], x, now, open_total)
        to = plant.gpu_server[g]
        st.promised[g] += plant.base[g] + plant.token[g] * x
        st.promised_calls[g] += 1
        remote_tokens += x
        slot = st.open_message[to]
        if slot < 0:
            m.free -= 1
            slot = st.free[m.free]
            msg = st.message[slot]
            msg.request = r
            msg.server = to
            msg.tokens = 0
            msg.calls = 0
            msg.assigned = 0
            pending += 1
            if c.messages == PER_SERVER:
                st.open_message[to] = slot
                st.open_list[opened] = to
                opened += 1
                st.open_s[to] = c.message_cost
                st.open_mask[to] = 0
                open_total += c.message_cost
        msg = st.message[slot]
        st.call[slot, msg.calls, 0] = g
        st.call[slot, msg.calls, 1] = x
        msg.calls += 1
        msg.assigned += x
        msg.tokens = max(msg.tokens, x)
        if c.messages == PER_SERVER:
            out = x * plant.hop[plant.route[n, to]].out
            st.open_s[to] += out
            open_total += out
            st.open_mask[to] |= np.uint64(1) << np.uint64(e)
        else:
            _send(c, plant, st, slot, now)
    for i in range(opened):
        to = st.open_list[i]
        slot = st.open_message[to]
        st.open_message[to] = -1
        st.open_s[to] = 0.0
        msg = st.message[slot]
        if prefill and msg.calls > 1:
            msg.tokens = _distinct_tokens(
                load, q.prompt, layer, st.open_mask[to], msg.tokens, msg.assigned
            )
        _send(c, plant, st, slot, now)
    q.dispatched = now
    q.end = end
    q.pending = pending
    q.sent += 1
    v.local_s += local_s
    v.local_tokens += local_tokens
    v.all_local_tokens += local_tokens
    v.all_local_calls += near
    v.all_remote_tokens += remote_tokens
    v.all_remote_calls += far
    v.layer_steps += 1
    v.remote_layer_steps += np.int64(pending > 0)
    m.calls += near + far
    return pending


# ------------------------------------------------------------------------------ caches of experts


@inline
def _worth(c, st, g, expert):
    """What the cache keeps an expert for; the least one goes first."""
    if c.cache == LRU:
        return st.stamp[g, expert]
    if c.cache == LFU:
        return st.uses[g, expert]
    # Early layers count more: there is less time to fetch them before they are needed.
    return (st.volume[g, expert] + 1) * (c.layers - expert // c.experts)


@jit
def _least_worth(c, st, g):
    """The cached expert that goes first, -1 if none is there."""
    found = -1
    least = np.int64(0)
    for i in range(c.layers * c.experts):
        if st.resident[g, i]:
            worth = _worth(c, st, g, i)
            if found < 0 or worth < least:
                found = i
                least = worth
    return found


@jit
def _fetch(c, plant, st, g, expert, now):
    """Queue a fetch over the host channel of a GPU; returns when it ends.

    It claims its slot at once. If all slots wait for fetches, the expert serves this call only.
    """
    m = st.meta[0]
    there = max(now, st.channel_free[g]) + (c.message_cost + c.load)
    st.channel_free[g] = there
    m.loads += 1
    m.weight_bytes += c.expert_bytes
    if st.used[g] >= plant.slots[g]:
        goes = _least_worth(c, st, g)
        if goes >= 0:
            st.resident[g, goes] = 0
            st.used[g] -= 1
            m.drops += 1
    if st.used[g] < plant.slots[g]:
        st.used[g] += 1
        st.peak[g] = max(st.peak[g], st.used[g])
        st.ready[g, expert] = there
    return there


@inline
def _await(st, r, g, expert, x, there, now):
    """A call (or with r = -1 nothing) waits for the end of a fetch."""
    m = st.meta[0]
    m.free -= 1
    slot = st.free[m.free]
    msg = st.message[slot]
    msg.request = r
    msg.expert = expert
    msg.assigned = x
    msg.sent = now
    st.call[slot, 0, 0] = g
    _later(st, there, _FETCHED, slot)


@jit
def _dispatch_cached(c, plant, load, st, r, now):
    """Run or await the calls of a layer on the server itself."""
    m = st.meta[0]
    q = st.request[r]
    n = q.home
    v = st.server[n]
    layer = q.layer
    first_gpu = plant.first_gpu[n]
    gpus = plant.first_gpu[n + 1] - first_gpu
    row, places = _step(c, q)
    q.dispatched = now
    q.end = now
    q.pending = 0
    for i in range(places):
        e, x = _tokens(load, q, row, i)
        if x == 0:
            continue
        expert = layer * c.experts + e
        g = first_gpu + e % gpus
        st.counts[load.home[r], expert] += x
        m.calls += 1
        st.stamp[g, expert] = m.calls
        st.uses[g, expert] += 1
        st.volume[g, expert] += x
        if st.resident[g, expert]:
            done = max(now, st.gpu_free[g]) + (plant.base[g] + plant.token[g] * x)
            st.gpu_free[g] = done
            q.end = max(q.end, done)
            v.local_s += done - now
            v.local_tokens += x
            v.all_local_tokens += x
            v.all_local_calls += 1
            continue
        there = st.ready[g, expert]
        if there == 0.0:
            there = _fetch(c, plant, st, g, expert, now)
        _await(st, r, g, expert, x, there, now)
        q.pending += 1
        v.all_remote_tokens += x
        v.all_remote_calls += 1
    v.layer_steps += 1
    if q.pending:
        v.remote_layer_steps += 1
    else:
        _later(st, q.end, _LAYER_END, r)
    if c.cache == ACTIVATION and layer + 1 < c.layers:
        for g in range(first_gpu, first_gpu + gpus):
            if st.channel_free[g] <= now and m.free > 0:
                _prefetch(c, plant, load, st, r, g, now)


@jit
def _prefetch(c, plant, load, st, r, g, now):
    """Fetch ahead the missing expert that the next layer is most likely to need.

    By what the request's own prompt used there, once that is known, else by what the server's
    requests used; if the cache would keep it rather than what has to go.
    """
    q = st.request[r]
    n = q.home
    gpus = plant.first_gpu[n + 1] - plant.first_gpu[n]
    most = np.int64(0)
    best = -1
    for e in range(g - plant.first_gpu[n], c.experts, gpus):
        i = (q.layer + 1) * c.experts + e
        if st.resident[g, i] or st.ready[g, i] > 0.0:
            continue
        likely = (
            st.volume[g, i]
            if q.step == 0
            else np.int64(load.counts[load.prompt[r], q.layer + 1, e])
        )
        if likely > most:
            most = likely
            best = i
    if best < 0:
        return
    if st.used[g] >= plant.slots[g]:
        goes = _least_worth(c, st, g)
        if goes < 0 or _worth(c, st, g, goes) >= _worth(c, st, g, best):
            return
    there = _fetch(c, plant, st, g, best, now)
    _await(st, -1, g, best, 0, there, now)


@inline
def _fetched(c, plant, st, slot, now):
    """A fetch ends: the expert serves, and a call that waited for it runs."""
    m = st.meta[0]
    msg = st.message[slot]
    g = st.call[slot, 0, 0]
    if st.ready[g, msg.expert] == now:
        st.ready[g, msg.expert] = 0.0
        st.resident[g, msg.expert] = 1
    st.free[m.free] = slot
    m.free += 1
    if msg.request < 0:
        return
    q = st.request[msg.request]
    done = max(now, st.gpu_free[g]) + (plant.base[g] + plant.token[g] * msg.assigned)
    st.gpu_free[g] = done
    v = st.server[q.home]
    v.remote_s += done - msg.sent
    v.remote_tokens += msg.assigned
    q.end = max(q.end, done)
    q.pending -= 1
    if q.pending == 0:
        _later(st, q.end, _LAYER_END, msg.request)


@inline
def _least_busy(c, plant, st, home):
    """The server that serves fewest requests; the own one unless another serves fewer."""
    best = home
    for n in range(c.num_servers):
        if n == best:
            continue
        less = st.server[n].serving - st.server[best].serving
        nearer = best != home and plant.latency[home, n] < plant.latency[home, best]
        if less < 0 or (less == 0 and nearer):
            best = n
    return best


@inline
def _travel(c, plant, st, r, n, to, tokens, now):
    """Send a request or its answer as token numbers."""
    m = st.meta[0]
    lane = _link(c, n, to)
    sent = max(now, st.link_free[lane]) + (
        tokens * TOKEN_BYTES * plant.byte_s[n, to] + c.message_cost
    )
    st.link_free[lane] = sent
    m.network_bytes += tokens * TOKEN_BYTES
    m.messages += 1
    _later(st, sent + plant.latency[n, to], _TRAVEL, r)


@inline
def _finish(load, st, r, now):
    """The last token of a request is where it arrived."""
    st.request[r].finish = now
    v = st.server[load.home[r]]
    v.area += v.in_system * (now - v.since)
    v.since = now
    v.in_system -= 1
    v.done += 1
    v.latency += now - load.arrival[r]


# -------------------------------------------------------------------------------------- migration


@jit
def _give_up(st, g, expert):
    """Free the slot of an expert that another GPU holds, too."""
    m = st.meta[0]
    st.resident[g, expert] = 0
    left = st.copies[expert] - 1
    st.copies[expert] = left
    for i in range(left):
        if st.holders[expert, i] == g:
            st.holders[expert, i] = st.holders[expert, left]
            break
    st.used[g] -= 1
    m.drops += 1
    m.fewest_copies = min(m.fewest_copies, left)


@jit
def _take(st, g, expert):
    """An expert serves on a GPU from now on; its slot is counted by the caller."""
    st.resident[g, expert] = 1
    st.holders[expert, st.copies[expert]] = g
    st.copies[expert] += 1


@jit
def _advance_load(plant, st, g, now):
    """Start the next load of an idle GPU if it has one and a slot for it."""
    c = plant.cfg[0]
    m = st.meta[0]
    if st.loading[g] >= 0:
        return
    total = c.layers * c.experts
    i = st.next_load[g]
    while i < total and (st.target[g, i] == 0 or st.resident[g, i]):
        i += 1
    st.next_load[g] = i
    if i == total or st.used[g] >= plant.slots[g]:
        for d in range(total):
            if st.resident[g, d] and st.target[g, d] == 0 and st.copies[d] > 1:
                _give_up(st, g, d)
                if i < total and st.used[g] < plant.slots[g]:
                    break
    if i == total or st.used[g] > plant.slots[g]:
        return
    st.loading[g] = i
    st.used[g] += 1
    st.peak[g] = max(st.peak[g], st.used[g])
    n = plant.gpu_server[g]
    st.source[g] = -1
    if c.migration_source == NETWORK:
        for k in range(st.copies[i]):
            s = plant.gpu_server[st.holders[i, k]]
            best = st.source[g]
            if s == n:
                st.source[g] = -1
                break
            if (
                best < 0
                or plant.byte_s[s, n] < plant.byte_s[best, n]
                or (
                    plant.byte_s[s, n] == plant.byte_s[best, n]
                    and (plant.latency[s, n], s) < (plant.latency[best, n], best)
                )
            ):
                st.source[g] = s
    if st.source[g] < 0:
        _later(st, now + c.load, _LOADED, g)
    else:
        st.bytes_left[g] = c.expert_bytes
        _later(st, now, _CHUNK, g)
    m.loads += 1
    m.weight_bytes += c.expert_bytes


@jit
def _chunk(plant, st, g, now):
    """Send the next chunk of weights if the link is free, else try again when it may be."""
    c = plant.cfg[0]
    s = st.source[g]
    n = plant.gpu_server[g]
    lane = _link(c, s, n)
    if st.link_free[lane] > now:
        _later(st, st.link_free[lane], _CHUNK, g)
        return
    size = min(CHUNK_BYTES, st.bytes_left[g])
    sent = now + size * plant.byte_s[s, n]
    st.link_free[lane] = sent
    st.bytes_left[g] -= size
    st.meta[0].network_bytes += size
    if st.bytes_left[g] > 0.0:
        _later(st, sent, _CHUNK, g)
    else:
        _later(st, sent + plant.latency[s, n] + c.load, _LOADED, g)


@jit
def _loaded(plant, st, g, now):
    """A load ends: the expert serves, and GPUs that waited for it go on."""
    expert = st.loading[g]
    st.loading[g] = -1
    st.meta[0].migration_end = now
    _take(st, g, expert)
    _advance_load(plant, st, g, now)
    for q in range(st.resident.shape[0]):
        if q != g and st.resident[q, expert] and st.target[q, expert] == 0:
            _advance_load(plant, st, q, now)


@jit
def adopt(plant, st, at_once):
    """Begin to carry out ``st.target``; ``at_once`` places it without time or resources.

    The counts and the times of calls start anew.
    """
    c = plant.cfg[0]
    now = st.meta[0].now
    st.counts[:, :] = 0
    for n in range(c.num_servers):
        v = st.server[n]
        v.local_s = 0.0
        v.local_tokens = 0.0
        v.remote_s = 0.0
        v.remote_tokens = 0.0
    if at_once:
        for i in range(c.layers * c.experts):
            st.copies[i] = 0
        for g in range(c.num_gpus):
            st.used[g] = 0
            for i in range(c.layers * c.experts):
                st.resident[g, i] = 0
                if st.target[g, i]:
                    _take(st, g, i)
                    st.used[g] += 1
            st.peak[g] = max(st.peak[g], st.used[g])
        return
    for g in range(c.num_gpus):
        st.next_load[g] = 0
    for g in range(c.num_gpus):
        _advance_load(plant, st, g, now)


@jit
def clear(plant, st):
    """An empty system at time 0, ``st.target`` in place."""
    c = plant.cfg[0]
    m = st.meta[0]
    m.now = 0.0
    m.migration_end = 0.0
    m.network_bytes = 0.0
    m.weight_bytes = 0.0
    m.sequence = 0
    m.heap = 0
    m.handled = 0
    m.next_request = 0
    m.loads = 0
    m.drops = 0
    m.fewest_copies = c.num_gpus
    m.messages = 0
    m.calls = 0
    m.events = 0
    m.settled = 0
    m.free = st.free.shape[0]
    for i in range(st.free.shape[0]):
        st.free[i] = st.free.shape[0] - 1 - i
    for g in range(c.num_gpus):
        st.gpu_free[g] = 0.0
        st.promised[g] = 0.0
        st.promised_calls[g] = 0
        st.loading[g] = -1
        st.next_load[g] = c.layers * c.experts
        st.source[g] = -1
        st.bytes_left[g] = 0.0
        st.peak[g] = 0
    for g in range(st.ready.shape[0]):
        st.channel_free[g] = 0.0
        for i in range(st.ready.shape[1]):
            st.ready[g, i] = 0.0
            st.stamp[g, i] = 0
            st.uses[g, i] = 0
            st.volume[g, i] = 0
    for i in range(st.link_free.shape[0]):
        st.link_free[i] = 0.0
        st.returning[i] = 0.0
        st.returning_messages[i] = 0
    for r in range(st.request.shape[0]):
        q = st.request[r]
        q.dispatched = 0.0
        q.end = 0.0
        q.first = np.nan
        q.finish = np.nan
        q.step = 0
        q.layer = 0
        q.pending = 0
        q.home = -1
        q.sent = 0
        q.counted = 0
    for n in range(c.num_servers):
        st.open_message[n] = -1
        st.open_s[n] = 0.0
        v = st.server[n]
        v.area = 0.0
        v.since = 0.0
        v.latency = 0.0
        v.ttft = 0.0
        v.in_system = 0
        v.serving = 0
        v.arrived = 0
        v.done = 0
        v.all_local_tokens = 0
        v.all_remote_tokens = 0
        v.all_local_calls = 0
        v.all_remote_calls = 0
        v.layer_steps = 0
        v.remote_layer_steps = 0
    adopt(plant, st, True)


# ------------------------------------------------------------------------------------- simulation


@jit
def _settle(c, load, st):
    """Bring ``counts`` up to date.

    Request by request instead of call by call, which would touch another server's counts each time.
    """
    m = st.meta[0]
    for r in range(m.settled, m.next_request):
        q = st.request[r]
        counts = st.counts[q.home]
        prompt = load.prompt[r]
        start = load.bank_start[prompt]
        rows = load.bank_start[prompt + 1] - start
        for done in range(q.counted, q.sent):
            step = done // c.layers
            layer = done - step * c.layers
            first = layer * c.experts
            if step == 0:
                for e in range(c.experts):
                    counts[first + e] += load.counts[prompt, layer, e]
            else:
                row = start + (load.offset[r] + step - 1) % rows
                for i in range(c.top_k):
                    counts[first + load.chosen[row, layer, i]] += 1
        q.counted = q.sent
    while m.settled < m.next_request and not np.isnan(st.request[m.settled].finish):
        m.settled += 1


@jit
def run(plant, load, st, until):
    """Process every arrival and event up to the time ``until`` (inf: until nothing is left).

    Returns:
        ``DONE``, or ``POOL_FULL`` if the places for messages may not last for the next event:
        nothing is lost, and a call with more places goes on.
    """
    c = plant.cfg[0]
    m = st.meta[0]
    requests = load.arrival.shape[0]
    while True:
        if m.handled:  # nothing has followed the last event
            m.handled = 0
            m.heap -= 1
            _sink(st.heap_t, st.heap_k, m.heap, st.heap_t[m.heap], st.heap_k[m.heap])
        if m.free < c.experts:
            return POOL_FULL
        coming = np.int64(st.heap_t[0]).view(np.float64) if m.heap else np.inf
        begin = -1
        if m.next_request < requests and load.arrival[m.next_request] <= coming:
            now = load.arrival[m.next_request]
            if now > until:
                break
            begin = m.next_request
            m.next_request += 1
            n = load.home[begin]
            q = st.request[begin]
            q.home = n
            prompt = load.prompt[begin]
            q.prompt = prompt
            q.tokens = load.tokens[prompt]
            q.start = load.bank_start[prompt]
            q.rows = load.bank_start[prompt + 1] - load.bank_start[prompt]
            q.shift = load.offset[begin] % q.rows
            v = st.server[n]
            v.area += v.in_system * (now - v.since)
            v.since = now
            v.in_system += 1
            v.arrived += 1
            if c.redirect:
                q.home = _least_busy(c, plant, st, n)
            st.server[q.home].serving += 1
            if q.home != n:
                _travel(c, plant, st, begin, n, q.home, load.tokens[load.prompt[begin]], now)
                begin = -1
        else:
            now = coming
            if m.heap == 0 or now > until:
                break
            key = st.heap_k[0]
            m.handled = 1
            m.events += 1
            kind = key & ((1 << _KIND_BITS) - 1)
            index = (key >> _KIND_BITS) & MAX_INDEX
            if kind == _DISPATCH and c.serving == OFFLOAD:
                _dispatch_cached(c, plant, load, st, index, now)
            elif kind == _DISPATCH:
                if _dispatch(c, plant, load, st, index, now) == 0:
                    _later(st, st.request[index].end, _LAYER_END, index)
            elif kind == _ARRIVE:
                msg = st.message[index]
                end = now
                for i in range(msg.calls):
                    g = st.call[index, i, 0]
                    work = plant.base[g] + plant.token[g] * st.call[index, i, 1]
                    done = max(now, st.gpu_free[g]) + work
                    st.gpu_free[g] = done
                    end = max(end, done)
                    st.promised_calls[g] -= 1
                    # Exactly nothing when nothing is on the way: no rounding is left over.
                    st.promised[g] = st.promised[g] - work if st.promised_calls[g] else 0.0
                end += msg.tokens * c.stage_token + c.stage_base
                _later(st, end, _RETURN, index)
            elif kind == _RETURN:
                msg = st.message[index]
                q = st.request[msg.request]
                n = q.home
                lane = _link(c, msg.server, n)
                hop = plant.hop[plant.route[n, msg.server]]
                cost = msg.tokens * hop.back + c.message_cost
                sent = max(now, st.link_free[lane]) + cost
                st.link_free[lane] = sent
                st.returning_messages[lane] -= 1
                left = st.returning_messages[lane]
                st.returning[lane] = st.returning[lane] - cost if left else 0.0
                home = sent + hop.home
                v = st.server[n]
                v.remote_s += msg.calls * (home - msg.sent)
                v.remote_tokens += msg.assigned
                m.network_bytes += msg.tokens * c.activation_bytes
                st.free[m.free] = index
                m.free += 1
                q.end = max(q.end, home)
                q.pending -= 1
                if q.pending == 0:
                    _later(st, q.end, _LAYER_END, msg.request)
            elif kind == _LAYER_END:
                q = st.request[index]
                begin = index
                q.layer += 1
                if q.layer == c.layers:
                    q.layer = 0
                    q.step += 1
                    n = load.home[index]
                    if q.step == 1:
                        q.first = now if q.home == n else now + plant.latency[q.home, n]
                        st.server[n].ttft += q.first - load.arrival[index]
                    if q.step == load.outputs[index]:
                        begin = -1
                        st.server[q.home].serving -= 1
                        if q.home == n:
                            _finish(load, st, index, now)
                        else:
                            _travel(c, plant, st, index, q.home, n, load.outputs[index], now)
            elif kind == _FETCHED:
                _fetched(c, plant, st, index, now)
            elif kind == _TRAVEL:
                if st.request[index].step < load.outputs[index]:
                    begin = index
                else:
                    _finish(load, st, index, now)
            elif kind == _CHUNK:
                _chunk(plant, st, index, now)
            else:
                _loaded(plant, st, index, now)
        m.now = now
        if begin >= 0:
            # The rest of the layer on the first GPU of the home server.
            q = st.request[begin]
            g = plant.first_gpu[q.home]
            x = q.tokens if q.step == 0 else 1
            work = plant.dense_base[q.home] + plant.dense_token[q.home] * x
            done = max(now, st.gpu_free[g]) + work
            st.gpu_free[g] = done
            _later(st, done, _DISPATCH, begin)
    _settle(c, load, st)
    if until < np.inf:
        m.now = until
    for n in range(c.num_servers):
        v = st.server[n]
        v.area += v.in_system * (m.now - v.since)
        v.since = m.now
    return DONE


@jit
def tally(home, prompt, outputs, prompt_counts, chosen, bank_start, counts):
    """Add to ``counts`` (N, L, E) the assignments of requests that are not simulated."""
    layers = prompt_counts.shape[1]
    for r in range(home.shape[0]):
        n = home[r]
        p = prompt[r]
        for layer in range(layers):
            for e in range(prompt_counts.shape[2]):
                counts[n, layer, e] += prompt_counts[p, layer, e]
        rows = bank_start[p + 1] - bank_start[p]
        for step in range(outputs[r] - 1):
            row = bank_start[p] + step % rows
            for layer in range(layers):
                for i in range(chosen.shape[2]):
                    counts[n, layer, chosen[row, layer, i]] += 1
