"""The paged KV memory of a replica: blocks, their ids, and the list of free ones.

A full block has the id of its content and of all before it. A block that nobody references is free
and keeps its id until it is taken, so the list of free blocks is the cache in the order of eviction
(vLLM's ``block_pool``). Equal blocks are not merged; the one that got the id first is found.
"""

from __future__ import annotations

import numpy as np

from servegym._jit import inline, inner
from servegym.envs.llm_routing.kernel.scheduler import blocks_of, full_blocks
from servegym.envs.prefix_routing.kernel.layout import OWN_STORE

LATER_TWIN = -2


@inline
def block_of(systems, replica, index):
    """A block of a replica."""
    # An index that may be negative counts from the end: half of the instructions of an access.
    return systems.block[np.uint64(replica.first_block + index)]


# ------------------------------------------------------------------------------------------- table


@inline
def _home(config, replica, content):
    """Where the lists hold the first block of an id's chain; ids that follow are neighbours."""
    # Knuth's multiplicative hash.
    # Sixteen ids that follow one another share a line of memory: prompts are read in order.
    group = (((int(content) >> 4) * 2654435769) & 0xFFFFFFFF) >> config.shift
    return np.uint64(replica.first_entry + (group << 4) + (int(content) & 15))


@inline
def find(config, systems, replica, content):
    """The first block with this id, -1 for none."""
    index = systems.lists[_home(config, replica, content)]
    while index >= 0 and block_of(systems, replica, index).id != content:
        index = block_of(systems, replica, index).chained
    return index


@inline
def _add_event(systems, replica, content, change):
    if systems.events.shape[1] > 0:
        env = systems.env[replica.row]
        event = systems.events[replica.row, env.events % systems.events.shape[1]]
        event.time = replica.start
        event.replica = replica.number
        event.id = content
        event.change = change
        env.events += 1


@inline
def _name(config, systems, replica, index, content, new):
    """Give a block its id, which is known to be ``new`` or not; it is the last of its twins.

    Returns whether no other block has the id.
    """
    block = block_of(systems, replica, index)
    block.id = content
    first = -1 if new else find(config, systems, replica, content)
    if first < 0:
        home = _home(config, replica, content)
        block.chained = systems.lists[home]
        block.chained_before = -1
        if block.chained >= 0:
            block_of(systems, replica, block.chained).chained_before = index
        systems.lists[home] = index
        block.twin_before = index
        block.twin_after = index
    else:
        other = block_of(systems, replica, first)
        last = other.twin_before
        block_of(systems, replica, last).twin_after = index
        block.chained_before = LATER_TWIN
        block.twin_before = last
        block.twin_after = first
        other.twin_before = index
    # The head did not fit for want of this block: it is looked at again.
    if replica.blocked_id == content:
        replica.blocked = 0
    _add_event(systems, replica, content, 1)
    return first < 0


@inline
def _forget(config, systems, replica, index):
    """Take its id from a block."""
    block = block_of(systems, replica, index)
    content, before, after = block.id, block.chained_before, block.chained
    _add_event(systems, replica, content, -1)
    block.id = -1
    if block.twin_after != index:
        twin = block_of(systems, replica, block.twin_after)
        block_of(systems, replica, block.twin_before).twin_after = block.twin_after
        twin.twin_before = block.twin_before
        if before == LATER_TWIN:
            return
        # The next of equal blocks takes its place in the chain: it is found from now on.
        twin.chained, twin.chained_before = after, before
        if after >= 0:
            block_of(systems, replica, after).chained_before = block.twin_after
        after = block.twin_after
    elif after >= 0:
        block_of(systems, replica, after).chained_before = before
    if before < 0:
        systems.lists[_home(config, replica, content)] = after
    else:
        block_of(systems, replica, before).chained = after


# ------------------------------------------------------------------------------------------ blocks


@inner
def clear_cache(config, systems, replica):
    """All blocks are free and hold nothing."""
    for k in range(replica.first_entry, replica.first_entry + config.entries):
        systems.lists[k] = -1
    ring = replica.capacity  # where the list of free blocks begins and ends
    for k in range(replica.capacity + 1):
        block = block_of(systems, replica, k)
        block.id = -1
        block.references = 0
        block.before = k - 1 if k > 0 else ring
        block.after = k + 1 if k < ring else 0
    replica.free = replica.capacity
    replica.blocked = 0
    replica.blocked_id = -1


@inline
def _unlink(systems, replica, block):
    block_of(systems, replica, block.before).after = block.after
    block_of(systems, replica, block.after).before = block.before
    replica.free -= 1


@inline
def _release(systems, replica, index):
    """One reference less to a block: cached it is the last to be taken, without id the first."""
    block = block_of(systems, replica, index)
    block.references -= 1
    if block.references > 0:
        return
    # Least recently freed goes first (vLLM); what holds nothing goes before all that may be found.
    ring = block_of(systems, replica, replica.capacity)
    if block.id >= 0:
        block.before = ring.before
        block.after = replica.capacity
        block_of(systems, replica, ring.before).after = index
        ring.before = index
    else:
        block.before = replica.capacity
        block.after = ring.after
        block_of(systems, replica, ring.after).before = index
        ring.after = index
    replica.free += 1


@inline
def _begin_segment(config, systems, request, named):
    """The next id is the first of the request's segment, if more than ``named`` blocks get ids."""
    if named < full_blocks(config, request.prompt + request.output):
        request.next_id = systems.segments[request.segment, 0]
        request.ids_left = systems.segments[request.segment, 1]


@inline
def _pass_id(config, systems, request, named):
    """Go on to the request's next id, ``named`` blocks having theirs."""
    request.next_id += 1
    request.ids_left -= 1
    if request.ids_left == 0:
        request.segment += 1
        _begin_segment(config, systems, request, named)


@inner
def grow(config, systems, replica, request, tokens, known):
    """Blocks for the first ``tokens`` tokens of a request; those full of ``known`` ones get ids.

    There must be as many free ones. Blocks get their ids when the iteration that fills them is
    scheduled: the next request of the same iteration finds them. A token that the iteration under
    way is still to sample is not known.
    """
    full, need = full_blocks(config, known), blocks_of(config, tokens)
    ring = block_of(systems, replica, replica.capacity)
    index = ring.after
    content = block_of(systems, replica, index).id
    own, blocks, named = request.own, request.blocks, request.named
    under = block_of(systems, replica, own).after if own >= 0 else -1
    replica.free -= max(need - blocks, 0)
    new = False
    while True:
        if named < min(blocks, full):
            # Blocks are freed, and so evicted, after those behind them: behind an id that no block
            # had, none has the ids that follow.
            new = _name(config, systems, replica, own, request.next_id, new)
            named += 1
            _pass_id(config, systems, request, named)
        if blocks >= need:
            break
        block = block_of(systems, replica, index)
        following = block.after
        # The next block is read here so that its way from memory is no wait.
        ahead = block_of(systems, replica, following).id
        if content >= 0:
            _forget(config, systems, replica, index)
        block.references = 1
        block.after, block.before = own, under
        under, own = own, index
        blocks += 1
        index, content = following, ahead
    request.own, request.blocks, request.named = own, blocks, named
    ring.after = index
    block_of(systems, replica, index).before = replica.capacity


@inline
def name_last(config, systems, replica, request):
    """The last token of a completed request is known: its last block may be full."""
    if request.named < full_blocks(config, request.prompt + request.output - 1):
        _name(config, systems, replica, request.own, request.next_id, False)
        request.named += 1
        _pass_id(config, systems, request, request.named)


@inline
def _most_hits(config, request):
    """Blocks that may be found cached: the last token is always computed, with its block."""
    return full_blocks(config, request.prompt + request.generated - 1)


@inner
def _fits(config, systems, replica, request):
    """Whether the memory takes all tokens of a waiting request now."""
    need = blocks_of(config, request.prompt + request.generated)
    if need <= replica.free:
        return True
    # vLLM looks up the cache at every step; here again only when a block is freed or the first
    # missing id comes, which is all that can change the answer.
    most = _most_hits(config, request)
    replica.blocked_id = -1
    hits = 0
    segment = request.first_segment
    while hits < most and replica.blocked_id < 0:
        first = systems.segments[segment, 0]
        for content in range(first, first + min(systems.segments[segment, 1], most - hits)):
            index = find(config, systems, replica, content)
            if index < 0:
                replica.blocked_id = content
                break
            hits += 1
            # A hit that nobody references takes a free block, as a miss does.
            need -= block_of(systems, replica, index).references > 0
        segment += 1
    replica.blocked = need > replica.free
    return need <= replica.free


@inner
def put_in_store(config, systems, replica, request):
    """Blocks of a request's prompt that the infinite cache holds; then it holds all of its blocks.

    It takes a request whole when that is routed, so that it bounds every cache from above.
    """
    store = systems.known[replica.row, replica.number if config.store == OWN_STORE else 0]
    most = full_blocks(config, request.prompt - 1)
    left = full_blocks(config, request.prompt + request.output)
    hits = 0
    unbroken = True
    segment = request.first_segment
    while left > 0:
        first = systems.segments[segment, 0]
        count = min(systems.segments[segment, 1], left)
        for content in range(first, first + count):
            unbroken = unbroken and store[content] != 0
            hits += unbroken and hits < most
            store[content] = 1
        left -= count
        segment += 1
    return hits


@inner
def admit_blocks(config, systems, replica, request):
    """Reference the longest cached prefix of a waiting request, if the memory takes the request.

    Returns whether it does. ``request.computed`` is then the number of cached tokens.
    """
    if not _fits(config, systems, replica, request):
        return False
    most = _most_hits(config, request)
    hits = 0
    request.segment = request.first_segment
    request.next_id = request.ids_left = 0
    _begin_segment(config, systems, request, 0)
    while hits < most:
        index = find(config, systems, replica, request.next_id)
        if index < 0:
            break
        block = block_of(systems, replica, index)
        # A free block that is found is taken out of the list of eviction: it is in use again.
        if block.references == 0:
            _unlink(systems, replica, block)
        block.references += 1
        hits += 1
        _pass_id(config, systems, request, hits)
    # Found blocks have ids already and are shared: the request's own chain begins behind them.
    request.hits = request.blocks = request.named = hits
    request.own = -1
    request.computed = max(hits, request.stored) * config.block_size
    return True


@inner
def release_blocks(config, systems, replica, request):
    """Give back the blocks of a request, the last one first.

    A block that was found cached is still the first of its id: nobody could take it since.
    """
    index = request.own
    below = block_of(systems, replica, index).after if index >= 0 else -1
    while index >= 0:
        # Two on, so that two blocks are on their way from memory.
        further = block_of(systems, replica, index).before
        _release(systems, replica, index)
        index, below = below, further
    segment = request.first_segment
    left = request.hits
    while left > 0 and systems.segments[segment, 1] < left:
        left -= systems.segments[segment, 1]
        segment += 1
    while request.hits > 0:
        first = systems.segments[segment, 0]
        for i in range(left - 1, -1, -1):
            _release(systems, replica, find(config, systems, replica, first + i))
        request.hits -= left
        segment -= 1
        if request.hits > 0:
            left = systems.segments[segment, 1]
    request.blocks = request.named = 0
    request.own = -1
    replica.blocked = 0


@inline
def used_blocks(replica):
    """Blocks that running requests reference; cached ones that nobody references are free."""
    return replica.capacity - replica.free
