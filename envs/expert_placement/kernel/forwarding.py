"""Requests whose hidden states go on to servers that hold the next layers whole."""

from __future__ import annotations

import numpy as np

from servegym.envs._jit import jit
from servegym.envs.expert_placement.kernel.calls import link_of, scramble
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
    hop = _hop_seconds(c, plant, st, q, now)
    first = scramble(r, 0) % servers
    came = np.zeros((c.layers, servers), np.int16)
    value = np.full(servers, np.inf)
    for layer in range(c.layers):
        whole = _whole_layer(c, plant, st, layer)
        new = np.full(servers, np.inf)
        for n in range(servers):
            if not whole[n]:
                continue
            came[layer, n] = n
            if layer == 0:
                new[n] = _way_s(c, plant, st, q.taken, n, TOKEN_BYTES * q.tokens, now)
            else:
                new[n] = value[n]
                for i in range(servers):
                    m = (first + i) % servers
                    if value[m] + hop[m, n] < new[n]:
                        new[n] = value[m] + hop[m, n]
                        came[layer, n] = m
            new[n] += _layer_seconds(c, plant, st, q, n, now)
        value = new
    best = -1
    least = np.inf
    for i in range(servers):
        n = (first + i) % servers
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
def _whole_layer(c, plant, st, layer):
    """Bool (N,): the servers that hold a layer whole, all of them if none does."""
    whole = np.ones(c.num_servers, np.bool_)
    found = False
    for n in range(c.num_servers):
        for expert in range(layer * c.experts, (layer + 1) * c.experts):
            here = False
            for g in range(plant.server[n].first_gpu, plant.server[n].end_gpu):
                if st.resident[g, expert]:
                    here = True
                    break
            if not here:
                whole[n] = False
                break
        found = found or whole[n]
    if not found:
        whole[:] = True
    return whole


@jit
def _way_s(c, plant, st, n, m, size, now):
    """Seconds that ``size`` bytes take from one server to another."""
    if n == m:
        return 0.0
    wait = max(0.0, st.link[link_of(c, n, m)].free - now)
    pair = plant.pair[n, m]
    return wait + size * pair.byte_s + c.message_cost + pair.latency


@jit
def _hop_seconds(c, plant, st, q, now):
    """(N, N) seconds of hidden states between two servers, over all steps of a request."""
    hop = np.zeros((c.num_servers, c.num_servers))
    for n in range(c.num_servers):
        for m in range(c.num_servers):
            if n != m:
                for times, tokens in ((1.0, float(q.tokens)), (c.decode_steps, 1.0)):
                    way = _way_s(c, plant, st, n, m, tokens * c.activation_bytes, now)
                    hop[n, m] += times * (way + tokens * c.stage_token + c.stage_base)
    return hop


@jit
def _layer_seconds(c, plant, st, q, n, now):
    """Seconds of one layer without its experts on a server, over all steps of a request."""
    server = plant.server[n]
    wait = max(0.0, st.gpu[server.first_gpu].free - now)
    prefill = wait + server.dense_base + server.dense_token * q.tokens
    return prefill + c.decode_steps * (wait + server.dense_base + server.dense_token)


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
