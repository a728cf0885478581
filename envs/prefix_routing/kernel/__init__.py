"""Compiled engine of the prefix routing family: B independent systems of N replicas each.

Every function is a pure function of its arguments, all chance being drawn before (at reset). The
arrays are described in ``layout``; inside, ``c`` is a `CONFIG`, ``t`` `Tables`, ``s`` `Systems`,
``v`` an `ENV`, ``e`` a `REPLICA`, ``r`` a `REQUEST`, ``k`` the number of a block and ``i`` that of
a request or of a content. Units are seconds and tokens; memory is counted in KV blocks.
"""

from __future__ import annotations

import numpy as np

from servegym._jit import borrowed, inner, jit
from servegym.envs.prefix_routing.kernel.cache import used_blocks
from servegym.envs.prefix_routing.kernel.events import (
    begin_row,
    next_to_work,
    route_request,
    take_arrival,
)
from servegym.envs.prefix_routing.kernel.iterations import advance
from servegym.envs.prefix_routing.kernel.layout import (
    COMPLETED,
    COMPLETION,
    CONFIG,
    FAILED,
    FIRST_TOKEN,
    LOSS,
    NO_STORE,
    OWN_STORE,
    PENDING,
    POOLED_STORE,
    QUEUED,
    REJECTED,
    Systems,
    Tables,
    allocate,
)

__all__ = [
    "COMPLETED",
    "COMPLETION",
    "CONFIG",
    "FAILED",
    "FIRST_TOKEN",
    "LOSS",
    "NO_STORE",
    "OWN_STORE",
    "PENDING",
    "POOLED_STORE",
    "QUEUED",
    "REJECTED",
    "Systems",
    "Tables",
    "allocate",
    "begin",
    "bring",
    "route",
    "run_replay",
    "used_blocks",
]


@inner
def _go_to_next_arrival(c, law, s, b):
    n = next_to_work(c, s, b)
    while n >= 0:
        e = s.replica[b, n]
        advance(c, law, s, e, e.safe)
        n = next_to_work(c, s, b)
    take_arrival(c, s, b)


@jit
def begin(t, s, which):
    """Start a new episode in the rows b with which[b] != 0, at the first arrival.

    See `begin_row` for what must be set.
    """
    t, s = borrowed(t), borrowed(s)
    c = t.config[0]
    for b in range(s.env.shape[0]):
        if which[b] != 0:
            begin_row(c, s, b)
            take_arrival(c, s, b)


@jit
def route(t, s, b, n):
    """Send the current request of row b to replica n, reject it if n < 0, and go on to the next.

    ``env[b].index`` is then the next request and ``env[b].now`` its arrival, or the index is -1 if
    none is left. Replicas may be behind, see `bring`. Returns whether the request was sent, see
    `route_request`.
    """
    t, s = borrowed(t), borrowed(s)
    c = t.config[0]
    sent = route_request(c, t.law, s, b, n)
    _go_to_next_arrival(c, t.law, s, b)
    return sent


@jit
def bring(t, s, b, until):
    """Let every replica of row b work until ``until``, which no unknown arrival may precede.

    A replica's state, the news and the events of its row are then those of that time. With inf
    every replica completes what it has.
    """
    t, s = borrowed(t), borrowed(s)
    c = t.config[0]
    for n in range(c.num_replicas):
        e = s.replica[b, n]
        if e.end <= until or e.next_change <= until:
            advance(c, t.law, s, e, until)


@jit
def run_replay(t, s, assignment):
    """Row 0 serves its requests, each at the replica ``assignment`` (J,) of its index.

    With an empty assignment the replicas take turns in the order of the arrivals.
    """
    t, s = borrowed(t), borrowed(s)
    c = t.config[0]
    v = s.env[0]
    while v.index >= 0:
        turn = v.routed % c.num_replicas
        route_request(c, t.law, s, 0, assignment[v.index] if assignment.shape[0] > 0 else turn)
        _go_to_next_arrival(c, t.law, s, 0)
    for n in range(c.num_replicas):
        advance(c, t.law, s, s.replica[0, n], np.inf)
