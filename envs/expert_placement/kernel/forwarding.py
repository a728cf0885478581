"""Requests whose hidden states go on to servers that hold the next layers whole."""

from __future__ import annotations

import numpy as np

from servegym._jit import jit
from servegym.envs.expert_placement.kernel.calls import held_by, link_of, scramble
from servegym.envs.expert_placement.kernel.routing import TOKEN_BYTES, travel


@jit
def choose_path(c, plant, load, st, r, now):
    """Choose the server of each layer of a request that its router has just sent to a server.

    The path takes the least estimated seconds over the prefill and the mean number of decode steps,
    queues as they are now, among the servers whose GPUs hold a layer whole; of a layer that is
    nowhere whole any server may run the rest and call its experts. The calls of experts, and the
    way of a new token back to the first layer, are not estimated. Ties go by a fixed hash.
    """
    q = st.request[r]
    servers = c.num_servers
    first = scramble(r, 0) % servers
    rest = _layer_seconds(c, plant, st, q, now)
    hop = np.full((servers, servers), np.nan)  # found when needed, once
    came = np.zeros((c.layers, servers), np.int16)
    value = np.full(servers, np.inf)
    before = _servers_of_layer(c, plant, st, 0, first)
    for n in before:
        came[0, n] = n
        value[n] = _way_s(c, plant, st, q.taken, n, TOKEN_BYTES * q.tokens, now) + rest[n]
    for layer in range(1, c.layers):
        these = _servers_of_layer(c, plant, st, layer, first)
        new = np.full(servers, np.inf)
        for n in these:
            came[layer, n] = n
            new[n] = value[n]
            for m in before:
                if np.isnan(hop[m, n]):
                    hop[m, n] = _hop_seconds(c, plant, st, q, m, n, now)
                if value[m] + hop[m, n] < new[n]:
                    new[n] = value[m] + hop[m, n]
                    came[layer, n] = m
            new[n] += rest[n]
        value = new
        # Shortest path layer by layer: a server's value is that of the best way to it.
        before = these
    best = -1
    least = np.inf
    for n in before:
        total = value[n] + _way_s(
            c, plant, st, n, load.request[r].home, TOKEN_BYTES * (1.0 + c.decode_steps), now
        )
        if total < least:
            least = total
            best = n
    for layer in range(c.layers - 1, -1, -1):
        st.path[r, layer] = best
        best = np.int64(came[layer, best])


@jit
def _servers_of_layer(c, plant, st, layer, first):
    """The servers that hold a layer whole, all of them if none does, in a ring from ``first``."""
    servers = np.empty(c.num_servers, np.int64)
    # Not (1 << experts) - 1: with 64 experts that shift is undefined.
    every = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - c.experts)
    for missing in (False, True):
        number = 0
        for i in range(c.num_servers):
            n = (first + i) % c.num_servers
            if missing or held_by(plant, st, n, layer) == every:
                servers[number] = n
                number += 1
        if number > 0:
            break
    return servers[:number]


@jit
def _way_s(c, plant, st, n, m, size, now):
    """Seconds that ``size`` bytes take from one server to another."""
    if n == m:
        return 0.0
    wait = max(0.0, st.link[link_of(c, n, m)].free - now)
    pair = plant.pair[n, m]
    return wait + size * pair.byte_s + c.message_cost + pair.latency


@jit
def _hop_seconds(c, plant, st, q, n, m, now):
    """Seconds of hidden states between two servers, over all steps of a request."""
    total = 0.0
    if n != m:
        for times, tokens in ((1.0, float(q.tokens)), (c.decode_steps, 1.0)):
            way = _way_s(c, plant, st, n, m, tokens * c.activation_bytes, now)
            total += times * (way + tokens * c.stage_token + c.stage_base)
    return total


@jit
def _layer_seconds(c, plant, st, q, now):
    """(N,) seconds of one layer without its experts, over all steps of a request."""
    seconds = np.empty(c.num_servers)
    for n in range(c.num_servers):
        server = plant.server[n]
        wait = max(0.0, st.gpu[server.first_gpu].free - now)
        prefill = wait + server.dense_base + server.dense_token * q.tokens
        more = c.decode_steps * (wait + server.dense_base + server.dense_token)
        seconds[n] = prefill + more
    return seconds


@jit
def move_on(c, plant, st, r, now):
    """Send a request to the server of its next layer; returns it if it is there, else -1."""
    q = st.request[r]
    n = np.int64(q.home)
    to = np.int64(st.path[r, q.layer])
    if to == n:
        return r
    q.home = to
    tokens = float(q.tokens) if q.step == 0 else 1.0
    if q.layer == 0:
        travel(c, plant, st, r, n, to, TOKEN_BYTES * tokens, 0.0, now)
    else:
        staging = tokens * c.stage_token + c.stage_base
        travel(c, plant, st, r, n, to, tokens * c.activation_bytes, staging, now)
    return -1
