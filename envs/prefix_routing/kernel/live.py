"""The engine as it is fed while it runs: requests come one by one, and every token is told.

A row is one server: `Systems` of one replica, whose J records of requests are slots that the caller
fills, and takes back when a request has ended. What a slot's request is given, its segments
included, must be written before `submit`. Failures of the configuration play no part.
"""

from __future__ import annotations

import numpy as np

from servegym._jit import borrowed, jit, record
from servegym.envs.llm_routing.kernel.scheduler import (
    arrive,
    enqueue,
    find_next_finish,
    leave_waiting,
    newer,
)
from servegym.envs.prefix_routing.kernel.events import clear_request, locate
from servegym.envs.prefix_routing.kernel.iterations import advance
from servegym.envs.prefix_routing.kernel.layout import COMPLETED, FAILED, MIXED, PENDING, QUEUED
from servegym.envs.prefix_routing.kernel.queues import clear_replica, take_out

TOKEN = record(("time", "f8"), ("request", "i4"), ("last", "i4"))
"""A token: seconds, the slot of its request, and 1 if it is the last one."""


@jit
def start(tables, systems):
    """An idle server with an empty cache in row 0, no slot of which is in use."""
    tables, systems = borrowed(tables), borrowed(systems)
    config = tables.config[0]
    env = systems.env[0]
    env.closed_loop = env.news = env.events = 0
    locate(config, systems, 0, 0)
    replica = systems.replica[0, 0]
    clear_replica(config, systems, replica)
    replica.down = 0
    replica.failed = -np.inf
    replica.next_change = np.inf
    for i in range(config.num_requests):
        systems.request[i].outcome = PENDING


@jit
def submit(tables, systems, slot, now):
    """Put the request of a slot at the end of the queue; the server must have worked until now."""
    tables, systems = borrowed(tables), borrowed(systems)
    replica = systems.replica[0, 0]
    request = systems.request[slot]
    clear_request(request)
    request.replica = 0
    request.arrived = now
    request.available = arrive(replica, now)
    request.parent = request.first_child = request.next_child = -1
    request.outcome = QUEUED
    enqueue(systems, replica, request, slot)


@jit
def abort(tables, systems, slot):
    """Take the request of a slot out of the server, as when its client hangs up.

    The iteration in flight takes its time; what the request held is free for the next one.
    """
    tables, systems = borrowed(tables), borrowed(systems)
    config = tables.config[0]
    replica = systems.replica[0, 0]
    request = systems.request[slot]
    if request.outcome != QUEUED:
        return
    request.outcome = FAILED
    waiting = replica.head
    while waiting >= 0 and waiting != slot:
        waiting = newer(systems, replica, waiting)
    if waiting == slot:
        leave_waiting(systems, replica, slot)
        replica.blocked = 0  # it may have been the head that did not fit
        return
    take_out(config, systems, replica, request, slot)
    find_next_finish(systems, replica)


@jit
def work(tables, systems, until, tokens):
    """Work until ``until`` and write every token: TOKEN (K,), K at least the running requests.

    Returns how many tokens were written. Where there was no room for those of one more iteration
    the server is behind: ``replica.end`` is then still at or before ``until``, and another call
    goes on.
    """
    tables, systems, tokens = borrowed(tables), borrowed(systems), borrowed(tokens)
    config = tables.config[0]
    replica = systems.replica[0, 0]
    written = 0
    while replica.end <= until and written + replica.running <= tokens.shape[0]:
        now = replica.end
        first = written
        slot = replica.oldest
        while slot >= 0:
            request = systems.request[slot]
            computed = request.computed + request.chunk
            last_chunk = computed >= request.prompt + request.generated
            if request.decoding == 1 or (replica.iteration == MIXED and last_chunk):
                tokens[written].time = now
                tokens[written].request = slot
                written += 1
            slot = newer(systems, replica, slot)
        # One boundary: a run of decodes ends where it begins.
        advance(config, tables.law, systems, replica, now)
        systems.env[0].news = 0
        for k in range(first, written):
            tokens[k].last = systems.request[tokens[k].request].outcome == COMPLETED
    return written
