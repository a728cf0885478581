"""What happens to a system between boundaries: its beginning, arrivals, requests that are sent."""

from __future__ import annotations

import numpy as np

from servegym._jit import inner
from servegym.envs.llm_routing.kernel.iterations import start_up
from servegym.envs.llm_routing.kernel.scheduler import (
    arrive,
    before,
    blocks_of,
    enqueue,
    request_of,
)
from servegym.envs.prefix_routing.kernel.cache import put_in_store
from servegym.envs.prefix_routing.kernel.iterations import advance
from servegym.envs.prefix_routing.kernel.layout import NO_STORE, PENDING, QUEUED, REJECTED
from servegym.envs.prefix_routing.kernel.queues import (
    clear_replica,
    expect,
    expect_children,
    take_expected,
)


@inner
def locate(config, systems, row, number):
    """Set where the parts of the row and of its replica begin in the arrays."""
    replica = systems.replica[row, number]
    before = row * config.num_replicas + number
    replica.row = row
    replica.number = number
    systems.env[row].first_request = replica.first_request = row * config.num_requests
    replica.first_block = before * (config.blocks + 1)
    owned = config.entries + config.max_running + 2 * config.block_size
    of_row = row * (config.num_replicas * owned + 2 * config.num_requests)
    replica.first_entry = of_row + number * owned
    replica.first_place = replica.first_entry + config.entries
    replica.first_bucket = replica.first_place + config.max_running
    replica.first_link = of_row + config.num_replicas * owned


@inner
def clear_request(request):
    """A request about which nothing is known but what is given."""
    request.replica = request.own = -1
    request.outcome = PENDING
    request.available = request.admitted = request.first = request.finish = np.nan
    request.hit = request.stored = request.recomputed = request.preemptions = request.lost = 0
    request.generated = request.computed = request.decoding = request.chunk = 0
    request.hits = request.blocks = request.named = 0


@inner
def begin_row(config, systems, row):
    """Start a new episode in the row, before its first arrival.

    ``env[row].requests``, what is given of them, ``env[row].failure_seed`` where replicas fail, and
    profile and capacity of the replicas must be set.
    """
    env = systems.env[row]
    env.now = 0.0
    env.index = -1
    env.expected = env.closed_loop = env.routed = env.news = env.events = 0
    for n in range(config.num_replicas):
        locate(config, systems, row, n)
        replica = systems.replica[row, n]
        clear_replica(config, systems, replica)
        start_up(config, env, replica)
        replica.failed = -np.inf
    for index in range(env.requests):
        request_of(systems, env, index).first_child = -1
    for index in range(env.requests - 1, -1, -1):
        request = request_of(systems, env, index)
        clear_request(request)
        if request.parent >= 0:
            env.closed_loop = 1
            # Its arrival hangs on when its parent ends, and so on the routing.
            request.arrived = np.nan
            parent = request_of(systems, env, request.parent)
            request.next_child = parent.first_child
            parent.first_child = index
    for index in range(env.requests):
        if request_of(systems, env, index).parent < 0:
            expect(systems, row, index)


@inner
def route_request(config, law, systems, row, number):
    """Send the current request of the row to the replica ``number``, -1 rejects it.

    A request that the replica's memory can never hold, or whose replica is down, is rejected, too.
    Returns whether it is sent. Who waits for a rejected one arrives its time after the rejection.
    """
    env = systems.env[row]
    index = env.index
    request = request_of(systems, env, index)
    env.routed += 1
    request.replica = number
    if number >= 0:
        replica = systems.replica[row, number]
        # A boundary at the moment of an arrival admits it: work stops just before.
        until = before(env.now)
        if replica.end <= until or replica.next_change <= until:
            advance(config, law, systems, replica, until)
        # The last token takes no KV: nobody reads it.
        need = blocks_of(config, request.prompt + request.output - 1)
        if replica.down == 0 and need <= replica.capacity:
            request.available = arrive(replica, env.now)
            request.outcome = QUEUED
            if config.store != NO_STORE:
                request.stored = put_in_store(config, systems, replica, request)
            enqueue(systems, replica, request, index)
            # A new request may end before the bound that held without it.
            replica.safe = min(replica.safe, replica.end)
            return True
    request.outcome = REJECTED
    expect_children(systems, row, request, env.now)
    return False


@inner
def next_to_work(config, systems, row):
    """The replica that must work until its ``safe`` before the next arrival is known, -1 for none.

    A request that another one waits for may complete there before the arrivals that are known; of
    a boundary and an arrival at one moment the arrival comes first.
    """
    env = systems.env[row]
    # All arrivals are known, so that no replica has to run ahead of them.
    if env.routed + env.expected == env.requests:
        return -1
    first = 0
    for n in range(1, config.num_replicas):
        if systems.replica[row, n].safe < systems.replica[row, first].safe:
            first = n
    safe = systems.replica[row, first].safe
    if safe == np.inf:
        return -1
    if env.expected > 0 and safe >= request_of(systems, env, systems.expected[row, 0]).arrived:
        return -1
    return first


@inner
def take_arrival(systems, row):
    """Set the clock of the row to the next arrival, and ``index`` to -1 if there is none."""
    env = systems.env[row]
    env.index = -1
    if env.expected > 0:
        env.index = take_expected(systems, row)
        env.now = request_of(systems, env, env.index).arrived
