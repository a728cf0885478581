"""Compiled engine of the prefix routing family: B independent systems of N replicas each.

Every function is a pure function of its arguments, all chance being drawn before (at reset). The
arrays are described in ``layout``. Units are seconds and tokens; memory is counted in KV blocks.
"""

from __future__ import annotations

import numpy as np

from servegym._jit import borrowed, inner, jit
from servegym.envs.prefix_routing.kernel.events import (
    begin_row,
    next_to_work,
    route_request,
    take_arrival,
)
from servegym.envs.prefix_routing.kernel.iterations import advance


@inner
def _go_to_next_arrival(config, law, systems, row):
    # Children of requests in flight may arrive before the arrivals that are known.
    n = next_to_work(config, systems, row)
    while n >= 0:
        replica = systems.replica[row, n]
        advance(config, law, systems, replica, replica.safe)
        n = next_to_work(config, systems, row)
    take_arrival(systems, row)


@jit
def begin(tables, systems, which):
    """Start a new episode in the rows with which[row] != 0, at the first arrival.

    See `begin_row` for what must be set.
    """
    tables, systems = borrowed(tables), borrowed(systems)
    config = tables.config[0]
    for row in range(systems.env.shape[0]):
        if which[row] != 0:
            begin_row(config, systems, row)
            take_arrival(systems, row)


@jit
def route(tables, systems, row, number):
    """Send the current request of the row to a replica, or reject it, and go on to the next.

    ``env[row].index`` is then the next request and ``env[row].now`` its arrival, or the index is -1
    if none is left. Replicas may be behind, see `bring`, and for what is returned `route_request`.
    """
    tables, systems = borrowed(tables), borrowed(systems)
    config = tables.config[0]
    sent = route_request(config, tables.law, systems, row, number)
    _go_to_next_arrival(config, tables.law, systems, row)
    return sent


@jit
def bring(tables, systems, row, until):
    """Let every replica of the row work until ``until``, which no unknown arrival may precede.

    A replica's state, the news and the events of its row are then those of that time. With inf
    every replica completes what it has.
    """
    tables, systems = borrowed(tables), borrowed(systems)
    config = tables.config[0]
    for n in range(config.num_replicas):
        replica = systems.replica[row, n]
        if replica.end <= until or replica.next_change <= until:
            advance(config, tables.law, systems, replica, until)


@jit
def run_replay(tables, systems, assignment):
    """Row 0 serves its requests, each at the replica ``assignment`` (J,) of its index.

    With an empty assignment the replicas take turns in the order of the arrivals.
    """
    tables, systems = borrowed(tables), borrowed(systems)
    config = tables.config[0]
    env = systems.env[0]
    while env.index >= 0:
        number = env.routed % config.num_replicas
        if assignment.shape[0] > 0:
            number = assignment[env.index]
        route_request(config, tables.law, systems, 0, number)
        _go_to_next_arrival(config, tables.law, systems, 0)
    for n in range(config.num_replicas):
        advance(config, tables.law, systems, systems.replica[0, n], np.inf)
