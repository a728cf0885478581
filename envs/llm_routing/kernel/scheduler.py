"""vLLM's scheduler (v1), as the engines of both routing families have it.

It follows ``schedule`` in ``vllm/v1/core/sched/scheduler.py`` and ``allocate_slots`` in
``vllm/v1/core/kv_cache_manager.py``, both at commit 003df29. A step serves the running requests
first, in order of admission, then admits from the head of the waiting queue.

``queues`` is anything with the arrays ``request`` (records of one engine's requests) and ``lists``
(int32). A replica's requests begin at its ``first_request``, and ``slot`` counts from there; of the
lists, the heap of its decoding ones begins at ``first_place`` and the links of all at
``first_link``.
"""

from __future__ import annotations

import math

import numpy as np

from servegym._jit import inline, inner
from servegym.envs.llm_routing.kernel.law import (
    chunk_attention_s,
    decode_attention_s,
    dense_s,
    head_s,
)

IDLE = 0  # iteration of a replica that does nothing
NEVER = 1 << 60  # emissions
LAST_TOKEN, ARRIVAL = 0, 1  # events by which a heap orders its requests


@inline
def request_of(queues, replica, slot):
    """A request of a replica, or of all that a system has."""
    return queues.request[replica.first_request + slot]


@inline
def blocks_of(config, tokens):
    """KV blocks of so many tokens."""
    # A product instead of a slow integer division; the half keeps it clear of rounding.
    return int((tokens + config.block_size - 0.5) * config.blocks_per_token)


@inline
def full_blocks(config, tokens):
    """KV blocks that so many tokens fill."""
    return int((tokens + 0.5) * config.blocks_per_token)


@inline
def before(time):
    """The last moment before ``time``: who arrives then is there when an iteration begins then."""
    # vLLM empties its input queue before it schedules a step: whoever arrives at the moment
    # of a boundary is admitted there, so engines stop just before the arrival.
    return np.nextafter(time, -np.inf)


@inline
def generated_tokens(replica, request):
    """Tokens that a request has so far."""
    return replica.emitted - request.origin if request.decoding else request.generated


@inner
def clear_scheduler(replica):
    """Nothing waits, runs or decodes."""
    replica.start = 0.0
    replica.end = np.inf
    replica.iteration = IDLE
    replica.emitted = replica.phase = replica.segment = replica.admissions = 0
    replica.running = replica.waiting = replica.decoding = replica.decoding_tokens = 0
    replica.longest_key = -NEVER
    replica.next_finish = NEVER
    replica.api_done = 0.0
    replica.oldest = replica.newest = replica.prefill = replica.head = replica.tail = -1


# ------------------------------------------------------------------------------------------- lists


@inline
def newer(queues, replica, slot):
    """The next request of the running list or the waiting queue, -1 for none."""
    # Links stand apart from the records: a walk along them reads little memory.
    return queues.lists[replica.first_link + 2 * slot]


@inline
def _older(queues, replica, slot):
    return queues.lists[replica.first_link + 2 * slot + 1]


@inline
def _chain(queues, replica, ahead, behind):
    """Let one request follow another; -1 is the end of the list."""
    if ahead >= 0:
        queues.lists[replica.first_link + 2 * ahead] = behind
    if behind >= 0:
        queues.lists[replica.first_link + 2 * behind + 1] = ahead


@inline
def enqueue(queues, replica, request, slot):
    """Put a request among the waiting, by when it is at the replica; of two at once as sent."""
    # From the tail: nearly every request is at the replica after all others.
    ahead, behind = replica.tail, -1
    while ahead >= 0 and request_of(queues, replica, ahead).available > request.available:
        ahead, behind = _older(queues, replica, ahead), ahead
    _insert_waiting(queues, replica, slot, ahead, behind)
    if replica.iteration == IDLE:
        replica.end = max(replica.start, request_of(queues, replica, replica.head).available)


@inline
def arrive(replica, now):
    """When a request that comes to the API now is in the waiting queue.

    The API's event loop takes ``api_request_s`` for each, one after another; the rest of
    ``api_in_s`` passes beside it.
    """
    if replica.api_in_s == 0.0:
        return now
    replica.api_done = max(now, replica.api_done) + replica.api_request_s
    return replica.api_done + (replica.api_in_s - replica.api_request_s)


@inline
def _insert_waiting(queues, replica, slot, ahead, behind):
    _chain(queues, replica, ahead, slot)
    _chain(queues, replica, slot, behind)
    if ahead < 0:
        replica.head = slot
    if behind < 0:
        replica.tail = slot
    replica.waiting += 1


@inline
def _unchain(queues, replica, slot):
    """Let the neighbours of a request follow one another; returns them."""
    ahead, behind = _older(queues, replica, slot), newer(queues, replica, slot)
    _chain(queues, replica, ahead, behind)
    return ahead, behind


@inline
def leave_waiting(queues, replica, slot):
    """Take a request out of the waiting queue."""
    ahead, behind = _unchain(queues, replica, slot)
    if ahead < 0:
        replica.head = behind
    if behind < 0:
        replica.tail = ahead
    replica.waiting -= 1


@inline
def admit_head(queues, replica, request, now):
    """The request at the head of the waiting queue is the newest of the running list."""
    slot = replica.head
    leave_waiting(queues, replica, slot)
    # Waiting ends at the first admission: a preempted request is not counted twice.
    if math.isnan(request.admitted):
        request.admitted = now
    request.admission = replica.admissions
    replica.admissions += 1
    _chain(queues, replica, replica.newest, slot)
    _chain(queues, replica, slot, -1)
    if replica.newest < 0:
        replica.oldest = slot
    # Prefills are the newest of the running list, so the oldest of them is all that is kept.
    if replica.prefill < 0:
        replica.prefill = slot
    replica.newest = slot
    replica.running += 1


@inline
def leave_running(queues, replica, slot):
    """Take a request out of the running list."""
    ahead, behind = _unchain(queues, replica, slot)
    if replica.prefill == slot:
        replica.prefill = behind
    if ahead < 0:
        replica.oldest = behind
    if behind < 0:
        replica.newest = ahead
    replica.running -= 1


# ------------------------------------------------------------------------------------------- heaps


@inline
def _comes_first(queues, owner, event, one, two):
    """Whether the event of one request is before another's.

    Of two at once, the last token of who was admitted first, the arrival of the lower number.
    """
    request = request_of(queues, owner, one)
    other = request_of(queues, owner, two)
    if event == ARRIVAL:
        earlier = request.arrived < other.arrived
        return earlier or (request.arrived == other.arrived and one < two)
    end = request.origin + request.output
    other_end = other.origin + other.output
    return end < other_end or (end == other_end and request.admission < other.admission)


@inline
def _put(queues, owner, heap, first, place, slot):
    heap[first + place] = slot
    request_of(queues, owner, slot).place = place


@inline
def rise(queues, owner, event, heap, first, place, slot):
    """Put a request at ``place`` of a heap or as far above it as it belongs.

    The heap of requests of the ``owner`` by their ``event`` begins at ``first`` of ``heap``.
    """
    while place > 0:
        above = (place - 1) // 2
        other = heap[first + above]
        if not _comes_first(queues, owner, event, slot, other):
            break
        _put(queues, owner, heap, first, place, other)
        place = above
    _put(queues, owner, heap, first, place, slot)


@inline
def sink(queues, owner, event, heap, first, size, place, slot):
    """Put a request at ``place`` of a heap of this size, see `rise`, or as far below it."""
    while 2 * place + 1 < size:
        below = 2 * place + 1
        child = heap[first + below]
        if below + 1 < size:
            other = heap[first + below + 1]
            if _comes_first(queues, owner, event, other, child):
                below += 1
                child = other
        if not _comes_first(queues, owner, event, child, slot):
            break
        _put(queues, owner, heap, first, place, child)
        place = below
    _put(queues, owner, heap, first, place, slot)


@inline
def _rise(queues, replica, place, slot):
    rise(queues, replica, LAST_TOKEN, queues.lists, replica.first_place, place, slot)


@inline
def _sink(queues, replica, place, slot):
    heap, first, size = queues.lists, replica.first_place, replica.decoding
    sink(queues, replica, LAST_TOKEN, heap, first, size, place, slot)


@inline
def first_to_finish(queues, replica):
    """The decoding request that has its last token first."""
    return queues.lists[replica.first_place]


@inline
def find_next_finish(queues, replica):
    """Set the count of emissions at which the next decoding request has its last token."""
    replica.next_finish = NEVER
    if replica.decoding > 0:
        request = request_of(queues, replica, first_to_finish(queues, replica))
        replica.next_finish = request.origin + request.output


@inner
def order_heap(queues, replica):
    """Order the heap anew, whatever has become of the requests in it."""
    for place in range(replica.decoding // 2 - 1, -1, -1):
        _sink(queues, replica, place, queues.lists[replica.first_place + place])
    find_next_finish(queues, replica)


# --------------------------------------------------------------------------------------- decoding


@inline
def next_prefilled(queues, replica):
    """At the end of an iteration: a request whose last chunk it had, -1 if none is left."""
    if replica.prefill < 0:
        return -1
    request = request_of(queues, replica, replica.prefill)
    request.computed += request.chunk
    return replica.prefill if request.computed == request.prompt + request.generated else -1


@inline
def start_decoding(config, queues, replica, request, slot):
    """The oldest request whose prefill was under way has a token more and decodes from now."""
    request.generated += 1
    request.decoding = 1
    # Tokens so far are emitted - origin: one count for the replica instead of one a request.
    request.origin = replica.emitted - request.generated
    replica.decoding += 1
    replica.decoding_tokens += request.prompt + request.generated
    if config.longest:
        # Prompt - origin is a context less what all decodes share, so its order never changes.
        replica.longest_key = max(replica.longest_key, request.prompt - request.origin)
    replica.prefill = newer(queues, replica, slot)
    _rise(queues, replica, replica.decoding - 1, slot)


@inner
def _find_longest(queues, replica):
    replica.longest_key = -NEVER
    for place in range(replica.decoding):
        request = request_of(queues, replica, queues.lists[replica.first_place + place])
        replica.longest_key = max(replica.longest_key, request.prompt - request.origin)


@inline
def stop_decoding(config, queues, replica, request):
    """A running request decodes no more; its last token has only been emitted, not computed."""
    request.generated = replica.emitted - request.origin
    # The KV of a token is written by the iteration after the one that samples it.
    request.computed = request.prompt + request.generated - 1
    request.chunk = 1
    request.decoding = 0
    replica.decoding -= 1
    replica.decoding_tokens -= request.prompt + request.generated
    last = queues.lists[replica.first_place + replica.decoding]
    # The last of the heap fills the gap; it may belong above it as well as below.
    place = request.place
    if place < replica.decoding:
        above = queues.lists[replica.first_place + max(place - 1, 0) // 2]
        if place > 0 and _comes_first(queues, replica, LAST_TOKEN, last, above):
            _rise(queues, replica, place, last)
        else:
            _sink(queues, replica, place, last)
    # Only the end of the longest one needs a search for the next longest.
    if config.longest and request.prompt - request.origin >= replica.longest_key:
        _find_longest(queues, replica)


# --------------------------------------------------------------------------------------- steps


@inline
def next_chunk(config, queues, replica):
    """Tokens of the next chunk of the prefill under way, 0 if there is none."""
    if replica.prefill < 0:
        return 0
    request = request_of(queues, replica, replica.prefill)
    # vLLM has at most one prefill under way between steps: whoever is cut short took all that
    # was left of the budget. Decodes were served before it, a token each.
    left = request.prompt + request.generated - request.computed
    request.chunk = min(left, config.token_budget - replica.decoding)
    return request.chunk


@inline
def closed_run(config, replica):
    """Decode iterations after the next one in which nothing but decoding can happen."""
    # So many sequences take at most as many blocks in any block_size iterations.
    most = config.block_size * (replica.free // replica.running)
    return min(replica.next_finish - replica.emitted - 1, most)


@inline
def requeue(queues, replica, request, slot):
    """A preempted request waits at the head of the queue."""
    # vLLM recomputes: the prompt and what was generated are a new prompt, whose last chunk
    # emits the next token. It comes before those never admitted.
    request.computed = 0
    request.preemptions += 1
    _insert_waiting(queues, replica, slot, -1, replica.head)


@inline
def mixed_end_s(law, queues, replica, now, tokens):
    """When an iteration of ``tokens`` tokens of prefill chunks and all decodes ends."""
    # Dense layers see all tokens as one batch; attention is by request, the head by sequence.
    time = dense_s(law, replica.profile, float(tokens + replica.decoding))
    chunks, longest = 0, 0
    slot = replica.prefill
    while slot >= 0:
        request = request_of(queues, replica, slot)
        chunks += 1
        longest = max(longest, request.chunk)
        # A later chunk reads the KV of those before it, so its time depends on what is computed.
        chunk, computed = float(request.chunk), float(request.computed)
        time += chunk_attention_s(law, replica.profile, chunk, computed)
        slot = newer(queues, replica, slot)
    if replica.decoding > 0:
        time += decode_attention_s(law, replica, longest)
    return now + time + head_s(law, replica.profile, replica.decoding + chunks)
