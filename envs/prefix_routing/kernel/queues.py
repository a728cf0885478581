"""The requests of a system: those expected, and how those at a replica come, take blocks and go.

The decoding requests stand in K lists by the count of emissions, modulo K, at which they take a
block.
"""

from __future__ import annotations

import numpy as np

from servegym._jit import inline, inner
from servegym.envs.llm_routing.kernel.scheduler import (
    ARRIVAL,
    clear_scheduler,
    leave_running,
    newer,
    request_of,
    requeue,
    rise,
    sink,
    start_decoding,
    stop_decoding,
)
from servegym.envs.prefix_routing.kernel.cache import clear_cache, name_last, release_blocks
from servegym.envs.prefix_routing.kernel.layout import COMPLETED, COMPLETION, FAILED, LOSS


@inner
def clear_replica(config, systems, replica):
    """An idle replica with empty queues and an empty cache."""
    clear_scheduler(replica)
    replica.safe = np.inf
    replica.leaving = -1
    clear_cache(config, systems, replica)
    for k in range(replica.first_bucket, replica.first_bucket + 2 * config.block_size):
        systems.lists[k] = -1


# ---------------------------------------------------------------------------------------- arrivals


@inner
def expect(systems, row, index):
    """Put a request of the row, whose arrival is known now, among the expected ones."""
    env, heap = systems.env[row], systems.expected[row]
    rise(systems, env, ARRIVAL, heap, 0, env.expected, index)
    env.expected += 1


@inner
def take_expected(systems, row):
    """Take the next request to arrive out of the expected ones of the row."""
    env, heap = systems.env[row], systems.expected[row]
    index = heap[0]
    env.expected -= 1
    sink(systems, env, ARRIVAL, heap, 0, env.expected, 0, heap[env.expected])
    return index


@inner
def expect_children(systems, row, request, time):
    """A request of the row is done: those that wait for it arrive their time after it."""
    index = request.first_child
    while index >= 0:
        child = request_of(systems, systems.env[row], index)
        child.arrived = time + child.think
        expect(systems, row, index)
        index = child.next_child


@inline
def add_news(systems, replica, slot, kind, time):
    """A gateway sees the first token of a request, its end or its loss."""
    env = systems.env[replica.row]
    entry = systems.news[replica.row, env.news]
    entry.time = time
    entry.request = slot
    entry.kind = kind
    env.news += 1


# ---------------------------------------------------------------------------------------- decoding


@inline
def _bucket(config, replica, request):
    """Where the lists hold the oldest of those who take a block in its iterations."""
    # Scheduled with K n + 1 tokens it takes a block; it has emitted - origin of its own then.
    return replica.first_bucket + (request.origin + 1 - request.prompt) % config.block_size


@inner
def begin_decoding(config, systems, replica, request, slot):
    """The oldest request whose prefill was under way has a token more and decodes from now."""
    start_decoding(config, systems, replica, request, slot)
    oldest = _bucket(config, replica, request)
    newest = oldest + config.block_size
    request.grow_before = systems.lists[newest]
    request.grow_after = -1
    if request.grow_before < 0:
        systems.lists[oldest] = slot
    else:
        request_of(systems, replica, request.grow_before).grow_after = slot
    systems.lists[newest] = slot


@inner
def end_decoding(config, systems, replica, request):
    """A decoding request decodes no more; it is still in the running list and has its blocks."""
    if request.decoding:
        oldest = _bucket(config, replica, request)
        if request.grow_before < 0:
            systems.lists[oldest] = request.grow_after
        else:
            request_of(systems, replica, request.grow_before).grow_after = request.grow_after
        if request.grow_after < 0:
            systems.lists[oldest + config.block_size] = request.grow_before
        else:
            request_of(systems, replica, request.grow_after).grow_before = request.grow_before
        stop_decoding(config, systems, replica, request)


@inner
def take_out(config, systems, replica, request, slot):
    """A request leaves the running list and gives back its blocks."""
    end_decoding(config, systems, replica, request)
    leave_running(systems, replica, slot)
    release_blocks(config, systems, replica, request)


@inner
def leave(config, systems, replica, slot, now):
    """A request has its last token: it gives back its blocks, and who waits for it may come."""
    request = request_of(systems, replica, slot)
    if request.blocks > 0:
        name_last(config, systems, replica, request)
        take_out(config, systems, replica, request, slot)
    request.finish = now
    add_news(systems, replica, slot, COMPLETION, now)
    expect_children(systems, replica.row, request, now + replica.api_out_s)


@inner
def preempt_newest(config, systems, replica):
    """Send the newest admitted request back to the head of the waiting queue.

    One that has completed and not left yet gives back its blocks alone.
    """
    slot = replica.newest
    request = request_of(systems, replica, slot)
    take_out(config, systems, replica, request, slot)
    if request.outcome == COMPLETED:
        request.preemptions += 1
        return
    # What it had computed: what is not found again on admission is computed twice.
    request.lost = request.computed
    requeue(systems, replica, request, slot)


@inner
def fail(config, systems, replica, now):
    """A replica dies: all that it runs, queues and has cached is lost."""
    for first in (replica.oldest, replica.head):
        slot = first
        while slot >= 0:
            request = request_of(systems, replica, slot)
            request.outcome = FAILED
            request.decoding = 0
            add_news(systems, replica, slot, LOSS, now)
            # A session goes on after an error, else a failure would thin out the load.
            expect_children(systems, replica.row, request, now)
            slot = newer(systems, replica, slot)
    clear_replica(config, systems, replica)
