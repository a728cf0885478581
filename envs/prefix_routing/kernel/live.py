"""The engine as it is fed while it runs: requests come one by one, and every token is told.

A row is one server: `Systems` of one replica, whose J records of requests are slots that the caller
fills, and takes back when a request has ended. What a slot's request is given, its segments
included, must be written before `submit`. Failures of the configuration play no part.
"""

from __future__ import annotations

import numpy as np

from servegym._jit import borrowed, jit, record
from servegym.envs.llm_routing.kernel.scheduler import (
    enqueue,
    find_next_finish,
    leave_waiting,
    newer,
)
from servegym.envs.prefix_routing.kernel.events import clear_request, locate
from servegym.envs.prefix_routing.kernel.iterations import advance
from servegym.envs.prefix_routing.kernel.layout import (
    COMPLETED,
    FAILED,
    MIXED,
    PENDING,
    QUEUED,
)
from servegym.envs.prefix_routing.kernel.queues import clear_replica, take_out

TOKEN = record([("t", "f8"), ("request", "i4"), ("last", "i4")])
"""A token: seconds, the slot of its request, and 1 if it is the last one."""


@jit
def start(t, s):
    """An idle server with an empty cache in row 0, no slot of which is in use."""
    t, s = borrowed(t), borrowed(s)
    c = t.config[0]
    v = s.env[0]
    v.closed_loop = 0
    v.news = 0
    v.events = 0
    locate(c, s, 0, 0)
    e = s.replica[0, 0]
    clear_replica(c, s, e)
    e.down = 0
    e.failed = -np.inf
    e.next_change = np.inf
    for i in range(c.num_requests):
        s.request[i].outcome = PENDING


@jit
def submit(t, s, i, now):
    """Put the request of slot i at the end of the queue; the server must have worked until now."""
    t, s = borrowed(t), borrowed(s)
    e = s.replica[0, 0]
    r = s.request[i]
    clear_request(r)
    r.replica = 0
    r.arrived = now
    r.available = now
    r.parent = -1
    r.first_child = -1
    r.next_child = -1
    r.outcome = QUEUED
    enqueue(s, e, r, i)


@jit
def abort(t, s, i):
    """Take the request of slot i out of the server, as when its client hangs up.

    The iteration in flight takes its time; what the request held is free for the next one.
    """
    t, s = borrowed(t), borrowed(s)
    c = t.config[0]
    e = s.replica[0, 0]
    r = s.request[i]
    if r.outcome != QUEUED:
        return
    r.outcome = FAILED
    k = e.head
    while k >= 0 and k != i:
        k = newer(s, e, k)
    if k == i:
        leave_waiting(s, e, i)
        e.blocked = 0  # it may have been the head that did not fit
        return
    take_out(c, s, e, r, i)
    find_next_finish(s, e)


@jit
def work(t, s, until, tokens):
    """Work until ``until`` and write every token: TOKEN (K,), K at least the running requests.

    Returns how many tokens were written. Where there was no room for those of one more iteration
    the server is behind: ``replica.end`` is then still at or before ``until``, and another call
    goes on.
    """
    t, s, tokens = borrowed(t), borrowed(s), borrowed(tokens)
    c = t.config[0]
    e = s.replica[0, 0]
    written = 0
    while e.end <= until and written + e.running <= tokens.shape[0]:
        now = e.end
        first = written
        i = e.oldest
        while i >= 0:
            r = s.request[i]
            if r.decoding == 1 or (
                e.iteration == MIXED and r.computed + r.chunk >= r.prompt + r.generated
            ):
                tokens[written].t = now
                tokens[written].request = i
                written += 1
            i = newer(s, e, i)
        advance(c, t.law, s, e, now)  # one boundary: a run of decodes ends where it begins
        s.env[0].news = 0
        for k in range(first, written):
            tokens[k].last = s.request[tokens[k].request].outcome == COMPLETED
    return written
