"""Late binding: the router's queue of held requests, and which request is offered next.

The queue is linked through the log. A round offers the held requests in order of arrival: each is
taken from the head and, if it is held again, put at the tail: a whole round keeps the order.
"""

from __future__ import annotations

import numpy as np

from servegym._jit import inline, inner
from servegym.envs.llm_routing.kernel.iterations import advance


@inline
def may_hold(c, s, b):
    """Whether the request to decide on may be held: there is room and time."""
    v = s.env[b]
    return v.held < c.hold_capacity and v.now < s.arrivals[b, v.current] + c.hold_limit_s


@inner
def hold(q, v):
    """Put the request to decide on at the tail of the queue."""
    if v.held == 0:
        v.held_first = v.current
    else:
        q.log[v.first_log + v.held_last].next_held = v.current
    v.held_last = v.current
    v.held += 1


@inline
def _offer_oldest(q, v):
    """Take the head of the queue as the request to decide on."""
    v.current = v.held_first
    v.held_first = q.log[v.first_log + v.held_first].next_held
    v.held -= 1


@inner
def _work(c, law, s, b, until):
    """Let the experts of row b work until ``until``; boundaries at that time count."""
    v = s.env[b]
    for n in range(c.num_experts):
        e = s.expert[b, n]
        if e.end <= until:
            advance(c, law, n, v, s.queues, e, until)


@inner
def _work_to_completion(c, law, s, b, until):
    """Let the experts work until the first completion on any of them, ``until`` at the latest.

    Returns that time. All experts have passed their boundaries up to it and none after it.
    """
    v = s.env[b]
    before = v.completed
    while v.completed == before:
        first = np.inf
        for n in range(c.num_experts):
            first = min(first, s.expert[b, n].end)
        if first > until:
            return until
        _work(c, law, s, b, first)
    return first


@inner
def offer_next(c, law, s, b):
    """Go on to the next decision of row b, or drain; returns whether the episode has ended."""
    v = s.env[b]
    if v.to_offer > 0:
        v.to_offer -= 1
        _offer_oldest(s.queues, v)
        return False
    last = v.index == c.num_requests
    arrival = np.inf if last else s.arrivals[b, v.index]
    if v.held == 0:
        _work(c, law, s, b, arrival)
        v.now = max(v.now, v.last_finish) if last else arrival
        v.current = v.index
        return last
    deadline = s.arrivals[b, v.held_first] + c.hold_limit_s
    before = v.completed
    v.now = _work_to_completion(c, law, s, b, min(arrival, deadline))
    if v.completed > before:
        v.to_offer = v.held - 1
        _offer_oldest(s.queues, v)
    elif deadline <= arrival:
        _offer_oldest(s.queues, v)
    else:
        v.current = v.index
    return False


@inner
def show_held(c, s, held, b):
    """Write what the router knows of the held requests: ``held`` (B, 3).

    Seconds since the arrival of the request to decide on, the other requests that are held, and
    whether it may be held (1 after the last request).
    """
    v = s.env[b]
    if v.current == c.num_requests:
        held[b, 0] = 0.0
        held[b, 1] = 0.0
        held[b, 2] = 1.0
        return
    held[b, 0] = min(v.now - s.arrivals[b, v.current], c.hold_limit_s)
    held[b, 1] = v.held
    held[b, 2] = may_hold(c, s, b)
