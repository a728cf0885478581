"""The requests at an expert: where they stand, and the KV blocks that they take.

Blocks are counted, not named: nothing is cached, and a preempted request begins anew. The engine
with a prefix cache is that of `servegym.envs.prefix_routing`.
"""

from __future__ import annotations

import numpy as np

from servegym._jit import inline, inner
from servegym.envs.llm_routing.kernel.scheduler import (
    arrive,
    blocks_of,
    clear_scheduler,
    enqueue,
    find_next_finish,
    full_blocks,
    leave_running,
    newer,
    request_of,
    requeue,
    start_decoding,
    stop_decoding,
)

HAS_LEFT = -1  # chunk of a request that has given back its blocks and has its last token


@inline
def _residues(config, expert):
    """Where the lists begin to count the requests by the emission that takes a block."""
    return expert.first_place + config.slots


@inline
def locate(config, row, number, expert):
    """Set the number of an expert, and where its requests and lists begin."""
    before = row * config.max_experts + number
    expert.number = number
    expert.first_request = before * config.slots
    expert.first_place = before * (3 * config.slots + config.block_size)
    expert.first_link = expert.first_place + config.slots + config.block_size


@inline
def vacate(queues, expert, slot):
    """The next request takes this slot."""
    queues.lists[expert.first_link + 2 * slot] = expert.vacant
    expert.vacant = slot


@inner
def clear_expert(config, queues, expert):
    """An idle expert with empty queues."""
    clear_scheduler(expert)
    expert.reserved = expert.settled = 0
    expert.free = expert.capacity
    expert.vacant = expert.leaving = -1
    for slot in range(config.slots - 1, -1, -1):
        vacate(queues, expert, slot)
    first = _residues(config, expert)
    for k in range(first, first + config.block_size):
        queues.lists[k] = 0


@inline
def put(config, queues, expert, index, arrived, prompt, output):
    """Put a request on its way to the expert; returns its record, without scores."""
    slot = expert.vacant
    request = request_of(queues, expert, slot)
    expert.vacant = newer(queues, expert, slot)
    request.request = index
    request.arrived = arrived
    request.available = arrive(expert, arrived)
    request.available += config.router_delay_s + prompt * config.delay_s_per_token
    request.prompt = prompt
    request.output = output
    request.score = request.predicted_score = request.predicted_output = 0.0
    request.generated = request.origin = request.computed = request.chunk = request.decoding = 0
    request.preemptions = 0
    request.admitted = request.first = np.nan
    enqueue(queues, expert, request, slot)
    return request


# ----------------------------------------------------------------------------------------- memory


@inline
def scheduled_tokens(expert, request):
    """Tokens of a running request that have their KV after the iteration in flight."""
    if request.decoding:
        return request.prompt + (expert.emitted - request.origin)
    return request.computed + request.chunk


@inline
def settle(config, queues, expert):
    """Bring ``expert.free``, Eq. 4, up to the emissions so far."""
    end = expert.phase + (expert.emitted - expert.settled)
    # Blocks taken are counted when somebody asks: a decode run costs no work a request.
    turns = full_blocks(config, end)  # in each, every decoding request takes a block
    end -= turns * config.block_size
    first = _residues(config, expert)
    rest = queues.lists[first + end] - queues.lists[first + expert.phase]
    expert.free -= turns * expert.decoding + rest
    expert.phase = end
    expert.settled = expert.emitted


@inline
def _count_residue(config, queues, expert, tokens, blocks, change):
    """Count a decoding request of so many tokens and blocks in (1) or out (-1) of the lists."""
    first = _residues(config, expert)
    full = expert.phase + blocks * config.block_size - tokens
    if full >= config.block_size:
        full -= config.block_size
    # Cumulative over the residues, so that settle takes the difference of two of them.
    for k in range(first + full + 1, first + config.block_size):
        queues.lists[k] += change


@inline
def begin_decoding(config, queues, expert, request, slot):
    """The oldest request whose prefill was under way has a token more and decodes."""
    settle(config, queues, expert)
    start_decoding(config, queues, expert, request, slot)
    tokens = request.prompt + request.generated
    blocks = blocks_of(config, tokens)
    expert.free -= blocks - blocks_of(config, tokens - 1)
    _count_residue(config, queues, expert, tokens, blocks, 1)


@inline
def take_chunk(config, expert, request):
    """Blocks for the chunk of a prefill beyond those of what is computed; none if it is new."""
    blocks = blocks_of(config, request.computed + request.chunk)
    expert.free -= blocks - blocks_of(config, request.computed)


@inline
def _end_decoding(config, queues, expert, request):
    """A decoding request decodes no more; it keeps its blocks."""
    settle(config, queues, expert)
    tokens = scheduled_tokens(expert, request)
    _count_residue(config, queues, expert, tokens, blocks_of(config, tokens), -1)
    stop_decoding(config, queues, expert, request)


@inline
def complete_decoding(config, queues, expert, request):
    """A request has its last token, which takes no block, and stays in the running list."""
    _end_decoding(config, queues, expert, request)
    blocks = blocks_of(config, request.computed + 1)
    request.chunk = 0
    # settle has counted a block for the last token as for any other.
    expert.free += blocks - blocks_of(config, request.computed)


@inline
def leave(config, queues, expert, request, slot):
    """A request leaves the running list, and its blocks are free."""
    if request.decoding:
        _end_decoding(config, queues, expert, request)
    leave_running(queues, expert, slot)
    expert.free += blocks_of(config, request.computed + request.chunk)
    expert.reserved -= blocks_of(config, request.prompt + config.max_output_tokens)


@inline
def can_take(config, expert, prompt):
    """Whether an expert would queue a request of so many prompt tokens now."""
    # A request that can never fit would hold up the queue for ever.
    if expert.waiting >= config.waiting_capacity or expert.down != 0:
        return False
    return blocks_of(config, prompt + config.max_output_tokens) <= expert.capacity


@inner
def make_room(config, queues, expert):
    """Preempt, newest first, until the running requests fit; returns how many were preempted."""
    before = expert.running
    settle(config, queues, expert)
    while expert.free < 0:
        slot = expert.newest
        request = request_of(queues, expert, slot)
        completed = request.decoding == 0 and request.generated == request.output
        leave(config, queues, expert, request, slot)
        if completed:
            # It has completed while this iteration was planned, and gives back its blocks alone.
            request.preemptions += 1
            request.chunk = HAS_LEFT
        else:
            requeue(queues, expert, request, slot)
    if expert.running < before:
        find_next_finish(queues, expert)
    return before - expert.running
