"""The queue of events: a binary heap, ordered by time, then by the order of their making."""

from __future__ import annotations

import numpy as np

from servegym._jit import inline
from servegym.envs.expert_placement.kernel.tables import INDEX_BITS, MAX_INDEX

# Kinds of events, and what their index is the number of.
LAYER_END = 0  # request
DISPATCH = 1  # request, whose rest of the layer is done
MESSAGE_ARRIVAL = 2  # message, at the server that it calls
MESSAGE_RETURN = 3  # message, whose calls are done
CHUNK = 4  # GPU, whose next chunk of weights can be sent
LOADED = 5  # GPU, whose load ends
FETCHED = 6  # message, whose expert is in the cache
TRAVEL_END = 7  # request, its hidden states or its answer, sent to another server

_KIND_BITS = 3


@inline
def rise(event_time, event_key, i, t, key):
    """Put an event into the open place ``i`` at the end of the heap, or above it."""
    while i > 0:
        up = (i - 1) >> 1
        if event_time[up] < t or (event_time[up] == t and event_key[up] < key):
            break
        event_time[i] = event_time[up]
        event_key[i] = event_key[up]
        i = up
    event_time[i] = t
    event_key[i] = key


@inline
def sink(event_time, event_key, size, t, key):
    """Put an event into the open place at the root of a heap of ``size`` places, or below it."""
    i = 0
    child = 1
    while child < size:
        if child + 1 < size:
            one = event_time[child]
            two = event_time[child + 1]
            # Without a branch on the order of the two, which no processor could foresee.
            if one == two:
                child += np.int64(event_key[child + 1] < event_key[child])
            else:
                child += np.int64(two < one)
        if t < event_time[child] or (t == event_time[child] and key < event_key[child]):
            break
        event_time[i] = event_time[child]
        event_key[i] = event_key[child]
        i = child
        child = 2 * i + 1
    event_time[i] = t
    event_key[i] = key


@inline
def add_event(st, t, kind, index):
    """Add an event at the time ``t``.

    The first one takes the place of the event that is being handled, which saves the heap a way
    down and one up.
    """
    m = st.meta[0]
    m.sequence += 1
    # The sequence stands highest: of two at one moment the one made first comes first.
    key = (((m.sequence << INDEX_BITS) | index) << _KIND_BITS) | kind
    # Bits of numbers that are not negative order as the numbers do and compare faster.
    bits = np.float64(t).view(np.int64)
    if m.handled:
        m.handled = 0
        sink(st.event_time, st.event_key, m.heap, bits, key)
    else:
        rise(st.event_time, st.event_key, m.heap, bits, key)
        m.heap += 1


@inline
def drop_event(st):
    """Take the event that is being handled out of the heap: nothing has followed it."""
    m = st.meta[0]
    m.handled = 0
    m.heap -= 1
    sink(st.event_time, st.event_key, m.heap, st.event_time[m.heap], st.event_key[m.heap])


@inline
def next_time(st):
    """Time of the next event, inf if there is none."""
    return np.int64(st.event_time[0]).view(np.float64) if st.meta[0].heap else np.inf


@inline
def handle_next(st):
    """Begin to handle the next event; returns its kind and its index."""
    m = st.meta[0]
    m.handled = 1
    m.events += 1
    key = st.event_key[0]
    return key & ((1 << _KIND_BITS) - 1), (key >> _KIND_BITS) & MAX_INDEX
