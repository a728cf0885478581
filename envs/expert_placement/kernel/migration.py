"""Loads of a new placement, on the GPUs and links that serve."""

from __future__ import annotations

import numpy as np

from servegym._jit import jit
from servegym.envs.expert_placement.kernel import events
from servegym.envs.expert_placement.kernel.calls import link_of
from servegym.envs.expert_placement.kernel.tables import NETWORK

CHUNK_BYTES = float(1 << 20)


@jit
def start_migration(plant, st):
    """Begin to carry out ``st.target``."""
    c = plant.cfg[0]
    for g in range(c.num_gpus):
        st.gpu[g].next_load = 0
    for g in range(c.num_gpus):
        _advance_load(plant, st, g, st.meta[0].now)


@jit
def _mark(plant, st, g, expert, serves):
    """Note whether an expert serves on a GPU."""
    st.resident[g, expert] = serves
    layer, e = divmod(expert, plant.cfg[0].experts)
    bit = np.uint64(1) << np.uint64(e)
    st.held[layer, g] = st.held[layer, g] | bit if serves else st.held[layer, g] & ~bit


@jit
def _give_up(plant, st, g, expert):
    """Free the slot of an expert that another GPU holds, too."""
    m = st.meta[0]
    _mark(plant, st, g, expert, 0)
    left = st.copies[expert] - 1
    st.copies[expert] = left
    for i in range(left):
        if st.holders[expert, i] == g:
            st.holders[expert, i] = st.holders[expert, left]
            break
    st.gpu[g].used -= 1
    m.drops += 1
    m.fewest_copies = min(m.fewest_copies, left)


@jit
def _advance_load(plant, st, g, now):
    """Start the next load of an idle GPU if it has one and a slot for it."""
    c = plant.cfg[0]
    m = st.meta[0]
    gpu = st.gpu[g]
    slots = plant.gpu[g].slots
    if gpu.loading >= 0:
        return
    total = c.layers * c.experts
    i = gpu.next_load
    while i < total and (st.target[g, i] == 0 or st.resident[g, i]):
        i += 1
    gpu.next_load = i
    # Room is made only when a load needs it; what is left over goes after the last one.
    if i == total or gpu.used >= slots:
        for d in range(total):
            # Never the last copy: calls of it would have nowhere to go.
            if st.resident[g, d] and st.target[g, d] == 0 and st.copies[d] > 1:
                _give_up(plant, st, g, d)
                if i < total and gpu.used < slots:
                    break
    if i == total or gpu.used > slots:
        return
    gpu.loading = i
    gpu.used += 1
    gpu.peak = max(gpu.peak, gpu.used)
    gpu.source = -1
    m.loads += 1
    if c.migration_source == NETWORK:
        gpu.source = _nearest_source(plant, st, g, i)
    if gpu.source < 0:
        events.add_event(st, now + c.load, events.LOADED, g)
    else:
        gpu.bytes_left = c.expert_bytes
        events.add_event(st, now, events.CHUNK, g)
    m.weight_bytes += c.expert_bytes


@jit
def _nearest_source(plant, st, g, expert):
    """The server that sends an expert to a GPU soonest, -1 if its own server holds it."""
    n = plant.gpu[g].server
    best = -1
    for k in range(st.copies[expert]):
        s = plant.gpu[st.holders[expert, k]].server
        if s == n:
            best = -1
            break
        if best < 0:
            best = s
            continue
        this, other = plant.pair[s, n], plant.pair[best, n]
        if this.byte_s < other.byte_s or (
            this.byte_s == other.byte_s and (this.latency, s) < (other.latency, best)
        ):
            best = s
    return best


@jit
def send_chunk(plant, st, g, now):
    """Send the next chunk of weights if the link is free, else try again when it may be."""
    c = plant.cfg[0]
    gpu = st.gpu[g]
    s = gpu.source
    n = plant.gpu[g].server
    link = st.link[link_of(c, s, n)]
    if link.free > now:
        events.add_event(st, link.free, events.CHUNK, g)
        return
    # In chunks, so that activations wait for one of them and not for a whole expert.
    size = min(CHUNK_BYTES, gpu.bytes_left)
    sent = now + size * plant.pair[s, n].byte_s
    link.free = sent
    gpu.bytes_left -= size
    st.meta[0].network_bytes += size
    if gpu.bytes_left > 0.0:
        events.add_event(st, sent, events.CHUNK, g)
    else:
        events.add_event(st, sent + plant.pair[s, n].latency + c.load, events.LOADED, g)


@jit
def end_load(plant, st, g, now):
    """A load ends: the expert serves, and GPUs that waited for it go on."""
    expert = st.gpu[g].loading
    st.gpu[g].loading = -1
    st.meta[0].migration_end = now
    _mark(plant, st, g, expert, 1)
    st.holders[expert, st.copies[expert]] = g
    st.copies[expert] += 1
    _advance_load(plant, st, g, now)
    # What this copy replaces may go now: GPUs that kept the last one have room.
    for other in range(st.resident.shape[0]):
        if other != g and st.resident[other, expert] and st.target[other, expert] == 0:
            _advance_load(plant, st, other, now)
