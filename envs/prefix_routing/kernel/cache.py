"""The paged KV memory of a replica: blocks, their ids, and the list of free ones.

A full block has the id of its content and of all before it. A block that nobody references is free
and keeps its id until it is taken, so the list of free blocks is the cache in the order of eviction
(vLLM's ``block_pool``). Equal blocks are not merged; the one that got the id first is found.
"""

from __future__ import annotations

from servegym._jit import inline, inner
from servegym.envs.llm_routing.kernel.scheduler import blocks_of, full_blocks
from servegym.envs.prefix_routing.kernel.layout import OWN_STORE

# ------------------------------------------------------------------------------------------- table


@inline
def _home(c, e, i):
    """Where the lists hold the first block of the chain of id i; ids that follow are neighbours."""
    group = (((int(i) >> 4) * 2654435769) & 0xFFFFFFFF) >> c.shift  # Knuth's multiplicative hash
    return e.first_entry + (group << 4) + (int(i) & 15)


@inline
def find(c, s, e, i):
    """The first block with id i, -1 for none."""
    k = s.lists[_home(c, e, i)]
    while k >= 0 and s.block[e.first_block + k].id != i:
        k = s.block[e.first_block + k].chained
    return k


@inline
def _tell(s, e, i, change):
    if s.events.shape[1] > 0:
        v = s.env[e.row]
        event = s.events[e.row, v.events % s.events.shape[1]]
        event.t = e.start
        event.replica = e.number
        event.id = i
        event.change = change
        v.events += 1


@inner
def _name(c, s, e, k, i):
    """Give id i to block k; it is the last of its twins."""
    block = s.block[e.first_block + k]
    block.id = i
    first = find(c, s, e, i)
    if first < 0:
        home = _home(c, e, i)
        block.chained = s.lists[home]
        s.lists[home] = k
        block.twin_before = k
        block.twin_after = k
    else:
        other = s.block[e.first_block + first]
        last = other.twin_before
        s.block[e.first_block + last].twin_after = k
        block.twin_before = last
        block.twin_after = first
        other.twin_before = k
    if e.blocked_id == i:
        e.blocked = 0
    _tell(s, e, i, 1)


@inner
def _forget(c, s, e, k):
    """Take its id from block k."""
    block = s.block[e.first_block + k]
    i = block.id
    _tell(s, e, i, -1)
    home = _home(c, e, i)
    first = s.lists[home]
    before = -1
    while s.block[e.first_block + first].id != i:
        before = first
        first = s.block[e.first_block + first].chained
    block.id = -1
    after = block.chained
    if block.twin_after != k:
        twin = s.block[e.first_block + block.twin_after]
        s.block[e.first_block + block.twin_before].twin_after = block.twin_after
        twin.twin_before = block.twin_before
        if first == k:
            twin.chained = after
            after = block.twin_after
    if first == k:
        if before < 0:
            s.lists[home] = after
        else:
            s.block[e.first_block + before].chained = after


# ------------------------------------------------------------------------------------------ blocks


@inner
def clear_cache(c, s, e):
    """All blocks are free and hold nothing."""
    for k in range(e.first_entry, e.first_entry + c.entries):
        s.lists[k] = -1
    ring = e.capacity  # where the list of free blocks begins and ends
    for k in range(e.capacity + 1):
        block = s.block[e.first_block + k]
        block.id = -1
        block.references = 0
        block.before = k - 1 if k > 0 else ring
        block.after = k + 1 if k < ring else 0
    e.free = e.capacity
    e.blocked = 0
    e.blocked_id = -1


@inline
def _unlink(s, e, block):
    s.block[e.first_block + block.before].after = block.after
    s.block[e.first_block + block.after].before = block.before
    e.free -= 1


@inline
def _release(s, e, k):
    """One reference less to block k: cached it is the last to be taken, without id the first."""
    block = s.block[e.first_block + k]
    block.references -= 1
    if block.references > 0:
        return
    ring = s.block[e.first_block + e.capacity]
    if block.id >= 0:
        block.before = ring.before
        block.after = e.capacity
        s.block[e.first_block + ring.before].after = k
        ring.before = k
    else:
        block.before = e.capacity
        block.after = ring.after
        s.block[e.first_block + ring.after].before = k
        ring.after = k
    e.free += 1


@inline
def _name_next(c, s, e, r):
    """The last block of a request is full: give it the request's next id."""
    _name(c, s, e, r.own, r.next_id)
    r.named += 1
    r.next_id += 1
    r.ids_left -= 1
    if r.ids_left == 0:
        r.segment += 1
        if r.named < full_blocks(c, r.prompt + r.output):
            r.next_id = s.segments[r.segment, 0]
            r.ids_left = s.segments[r.segment, 1]


@inner
def grow(c, s, e, r, tokens):
    """Blocks for the first ``tokens`` tokens of a request; those that are full get their ids.

    There must be as many free ones. Blocks get their ids when the iteration that fills them is
    scheduled: the next request of the same iteration finds them.
    """
    full = full_blocks(c, tokens)
    if r.named < r.blocks and r.named < full:
        _name_next(c, s, e, r)
    need = blocks_of(c, tokens)
    while r.blocks < need:
        k = s.block[e.first_block + e.capacity].after
        block = s.block[e.first_block + k]
        _unlink(s, e, block)
        if block.id >= 0:
            _forget(c, s, e, k)
        block.references = 1
        block.after = r.own
        r.own = k
        r.blocks += 1
        if r.blocks <= full:
            _name_next(c, s, e, r)


@inline
def _most_hits(c, r):
    # The last token is always computed, and its block with it.
    return full_blocks(c, r.prompt + r.generated - 1)


@inner
def _fits(c, s, e, r):
    """Whether the memory takes all tokens of a waiting request now."""
    need = blocks_of(c, r.prompt + r.generated)
    if need <= e.free:
        return True
    most = _most_hits(c, r)
    e.blocked_id = -1
    hits = 0
    segment = r.first_segment
    while hits < most and e.blocked_id < 0:
        first = s.segments[segment, 0]
        for i in range(first, first + min(s.segments[segment, 1], most - hits)):
            k = find(c, s, e, i)
            if k < 0:
                e.blocked_id = i
                break
            hits += 1
            # A hit that nobody references takes a free block, as a miss does.
            need -= s.block[e.first_block + k].references > 0
        segment += 1
    e.blocked = need > e.free
    return need <= e.free


@inner
def put_in_store(c, s, e, r):
    """Blocks of a request's prompt that the infinite cache holds; then it holds all of its blocks.

    It takes a request whole when that is routed, so that it bounds every cache from above.
    """
    known = s.known[e.row, e.number if c.store == OWN_STORE else 0]
    most = full_blocks(c, r.prompt - 1)
    left = full_blocks(c, r.prompt + r.output)
    found = 0
    unbroken = True
    segment = r.first_segment
    while left > 0:
        first = s.segments[segment, 0]
        count = min(s.segments[segment, 1], left)
        for i in range(first, first + count):
            unbroken = unbroken and known[i] != 0
            found += unbroken and found < most
            known[i] = 1
        left -= count
        segment += 1
    return found


@inner
def admit_blocks(c, s, e, r):
    """Reference the longest cached prefix of a waiting request, if the memory takes the request.

    Returns whether it does. ``r.computed`` is then the number of cached tokens.
    """
    if not _fits(c, s, e, r):
        return False
    most = _most_hits(c, r)
    hits = 0
    segment = r.first_segment
    i = 0
    left = 0
    if full_blocks(c, r.prompt + r.output) > 0:
        i = int(s.segments[segment, 0])
        left = int(s.segments[segment, 1])
    while hits < most:
        k = find(c, s, e, i)
        if k < 0:
            break
        block = s.block[e.first_block + k]
        if block.references == 0:
            _unlink(s, e, block)
        block.references += 1
        hits += 1
        i += 1
        left -= 1
        if left == 0:
            segment += 1
            if hits < full_blocks(c, r.prompt + r.output):
                i = int(s.segments[segment, 0])
                left = int(s.segments[segment, 1])
    r.hits = hits
    r.blocks = hits
    r.named = hits
    r.own = -1
    r.segment = segment
    r.next_id = i
    r.ids_left = left
    r.computed = max(hits, r.stored) * c.block_size
    return True


@inner
def release_blocks(c, s, e, r):
    """Give back the blocks of a request, the last one first.

    A block that was found cached is still the first of its id: nobody could take it since.
    """
    k = r.own
    while k >= 0:
        below = s.block[e.first_block + k].after
        _release(s, e, k)
        k = below
    segment = r.first_segment
    left = r.hits
    while left > 0 and s.segments[segment, 1] < left:
        left -= s.segments[segment, 1]
        segment += 1
    while r.hits > 0:
        first = s.segments[segment, 0]
        for i in range(left - 1, -1, -1):
            _release(s, e, find(c, s, e, first + i))
        r.hits -= left
        segment -= 1
        if r.hits > 0:
            left = s.segments[segment, 1]
    r.blocks = 0
    r.named = 0
    r.own = -1
    e.blocked = 0


@inline
def used_blocks(e):
    """Blocks that running requests reference; cached ones that nobody references are free."""
    return e.capacity - e.free
