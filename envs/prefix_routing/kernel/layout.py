"""The arrays of the engine: records, the named tuple of them, and the codes in them.

Units are seconds and tokens; memory is counted in KV blocks. B is the number of systems, N of
replicas, R the most sequences that a replica runs, C the blocks of the largest replica, K the
tokens of a block, J the most requests of an episode.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from servegym._jit import record
from servegym.envs.llm_routing.kernel.law import Law

DECODE, MIXED = 1, 2  # replica.iteration, or IDLE
PENDING, QUEUED, COMPLETED, REJECTED, FAILED = 0, 1, 2, 3, 4  # request.outcome
FIRST_TOKEN, COMPLETION, LOSS = 0, 1, 2  # kinds of news
NO_STORE, OWN_STORE, POOLED_STORE = 0, 1, 2  # config.store


CONFIG = record(
    ("num_replicas", "i8"),  # N
    ("max_running", "i8"),  # R
    ("token_budget", "i8"),  # tokens of an iteration, at most; at least R
    ("block_size", "i8"),  # K
    ("blocks", "i8"),  # C
    ("store", "i8"),  # an infinite cache besides: NO_STORE, OWN_STORE or POOLED_STORE
    ("entries", "i8"),  # of a replica's table of ids, a power of two, at least C and 16
    ("shift", "i8"),  # 36 less the logarithm of that
    ("num_requests", "i8"),  # J
    ("longest", "i8"),  # as the law has it; 0: `longest_key` is not kept
    ("async_scheduling", "i8"),  # 1: an iteration is planned while the one before it runs
    ("blocks_per_token", "f8"),  # 1 / K
    ("uptime_s", "f8"),  # mean time to failure of a replica; 0: none fails
    ("downtime_s", "f8"),  # mean time to repair
)
"""The arguments that all systems share."""

ENV = record(
    ("now", "f8"),  # s, when `index` arrived
    ("index", "i8"),  # of the request to route, -1: none is left
    ("requests", "i8"),  # of the episode, at most J
    ("expected", "i8"),  # requests in the heap of arrivals
    ("closed_loop", "i8"),  # 1: some requests wait for others
    ("routed", "i8"),  # requests sent or rejected
    ("first_request", "i8"),  # where its requests begin
    ("news", "i8"),  # entries so far
    ("events", "i8"),  # entries so far
    ("failure_seed", "i8"),  # 32 bits that decide when replicas fail
)
"""A system: its clock, and how full its lists are."""

REPLICA = record(
    ("start", "f8"),  # s, begin of the iteration in flight
    ("end", "f8"),  # s, its end: the next boundary; inf: none
    ("safe", "f8"),  # s, no request that it has by now completes before
    ("running", "i8"),  # requests
    ("waiting", "i8"),  # requests
    ("iteration", "i8"),  # in flight: IDLE, DECODE or MIXED
    ("emitted", "i8"),  # decode iterations so far
    ("phase", "i8"),  # that, modulo K
    ("next_finish", "i8"),  # value of `emitted` at which the next running request is done
    ("decoding", "i8"),  # running requests whose prefill is done
    ("decoding_tokens", "i8"),  # prompt and generated tokens of those
    ("segment", "i8"),  # of the decode table in which the last run ended
    ("profile", "i8"),  # index of its card among the latency laws
    # Running list and waiting queue: requests, -1 for none.
    ("oldest", "i8"),  # admitted
    ("newest", "i8"),  # admitted
    ("prefill", "i8"),  # oldest whose prefill is under way; so are all after it
    ("head", "i8"),  # of the waiting queue
    ("tail", "i8"),
    ("admissions", "i8"),  # so far
    # Memory.
    ("capacity", "i8"),  # blocks
    ("free", "i8"),  # blocks that nobody references, cached ones included
    ("blocked", "i8"),  # 1: the memory cannot take the head of the queue as things are
    ("blocked_id", "i8"),  # first id that the head misses, -1: none
    # Failures.
    ("next_change", "f8"),  # s, when `down` changes next; inf: never
    ("down", "i8"),  # 1: it has failed and is not back
    ("changes", "i8"),  # how often that has changed
    ("failed", "f8"),  # s, when it failed last; -inf: never
    # Where its part of the arrays begins.
    ("row", "i8"),
    ("number", "i8"),  # in its row
    ("first_request", "i8"),
    ("first_block", "i8"),
    ("first_entry", "i8"),
    ("first_place", "i8"),  # of the heap
    ("first_bucket", "i8"),
    ("first_link", "i8"),
    ("longest_key", "i8"),  # most prompt tokens less `origin` of the decoding requests
    ("leaving", "i8"),  # first that has completed and waits for the next plan, -1 for none
    # Time in the API, see `arrive`; 0: none.
    ("api_in_s", "f8"),
    ("api_request_s", "f8"),
    ("api_out_s", "f8"),
    ("api_done", "f8"),  # s, when its event loop has done what it has
)
"""A replica: a scheduler with its running list, its waiting queue and its paged KV memory."""

REQUEST = record(
    # Given; -1 for no parent and no child.
    ("arrived", "f8"),  # s; of a request with a parent NaN until that is done
    ("think", "f8"),  # s between the parent's end and its arrival
    ("first_segment", "i8"),
    ("parent", "i4"),
    ("first_child", "i4"),
    ("next_child", "i4"),  # of its parent
    ("prompt", "i4"),  # tokens
    ("output", "i4"),  # tokens
    # What becomes of it.
    ("replica", "i4"),  # -1 before
    ("outcome", "i4"),
    ("preemptions", "i4"),
    ("available", "f8"),  # s, at the replica
    ("admitted", "f8"),  # s, first
    ("first", "f8"),  # s, first token
    ("finish", "f8"),  # s
    ("hit", "i4"),  # tokens found cached at its first admission
    ("recomputed", "i4"),  # tokens computed again after preemptions
    # At the replica.
    ("origin", "i8"),  # value of the replica's `emitted` at which it had no token, if decoding
    ("admission", "i8"),  # how many the replica had admitted before
    ("generated", "i4"),  # tokens, up to date unless decoding
    ("computed", "i4"),  # tokens whose KV exists, up to date unless decoding
    ("decoding", "i4"),  # 1: its prefill is done
    ("chunk", "i4"),  # tokens of its prefill in this iteration
    ("lost", "i4"),  # tokens that were computed when it was preempted
    ("place", "i4"),  # in the heap
    ("grow_after", "i4"),  # who takes a block in the same iterations
    ("grow_before", "i4"),
    # Its blocks: `hits` found cached, then `blocks - hits` of its own, in a stack.
    ("hits", "i4"),
    ("blocks", "i4"),
    ("named", "i4"),  # that have an id, the first of them
    ("own", "i4"),  # last of its own, -1 for none
    ("next_id", "i4"),  # of block `named`
    ("ids_left", "i4"),  # in its segment, that one counted
    ("segment", "i8"),
    ("stored", "i8"),  # blocks of its prompt that the infinite cache held when it was routed
)
"""A request: what is given, what became of it, and where it stands."""

BLOCK = record(
    ("id", "i4"),  # of the content, -1 for none
    ("references", "i4"),
    # Free: neighbours in the list of free blocks. In use: `after` is the block below it in
    # the stack of the request that took it, `before` the one below that, -1 for none.
    ("before", "i4"),
    ("after", "i4"),
    # The next block of another id at the same place of the table and the one before, -1 for none;
    # -2 before a block that is not the first of its id, which no table leads to.
    ("chained", "i4"),
    ("chained_before", "i4"),
    # Ring of the blocks of one id, in the order in which they got it.
    ("twin_before", "i4"),
    ("twin_after", "i4"),
)
"""A KV block of a replica."""

NEWS = record(("time", "f8"), ("request", "i4"), ("kind", "i4"))
"""What a gateway sees of a response: its first token, its end, its loss with the replica."""

EVENT = record(("time", "f8"), ("replica", "i4"), ("id", "i4"), ("change", "i8"))
"""A block that got an id (1) or lost it (-1), at the beginning of an iteration.

The blocks that a failure loses are not told of one by one.
"""


class Tables(NamedTuple):
    """What the systems of a problem share.

    Attributes:
        config: ``(1,)`` `CONFIG`.
        law: Iteration times of all cards.
    """

    config: np.ndarray
    law: Law


class Systems(NamedTuple):
    """The state of B systems.

    Replica n of row b owns C + 1 records of ``block`` (the last one is where the ring of its free
    blocks begins and ends) and C to 2 C + R + 2 K entries of ``lists``: a table from ids to the
    first block of each; the heap of the decoding requests by their last token; for each count of
    emissions modulo K the oldest and the newest decoding request that takes a block then. Behind
    those of a row come 2 J: for each request the next one and the one before in the running list or
    the waiting queue.

    Attributes:
        env: ``(B,)`` `ENV`.
        replica: ``(B, N)`` `REPLICA`.
        request: ``(B J,)`` `REQUEST`.
        segments: int32 ``(S, 2)``: first block id and number of blocks.
        block: ``(B N (C + 1),)`` `BLOCK`.
        lists: int32, flat.
        expected: int32 ``(B, J)``, heaps of the requests whose arrival is known, by time.
        news: ``(B, 2 J)`` `NEWS`, in order of time for each replica; ``env.news`` entries.
        events: ``(B, E)`` `EVENT`, a ring, ``env.events`` entries so far; nothing is written if
            E is 0.
        known: int8 ``(B, M, I)``, which block ids an infinite cache holds: of each replica, or one
            for all; empty without.
    """

    env: np.ndarray
    replica: np.ndarray
    request: np.ndarray
    segments: np.ndarray
    block: np.ndarray
    lists: np.ndarray
    expected: np.ndarray
    news: np.ndarray
    events: np.ndarray
    known: np.ndarray


def allocate(config: np.void, rows: int, segments: np.ndarray, events: int = 0) -> Systems:
    """Arrays of so many systems, nothing in them.

    ``segments`` (S, 2) are those of the requests of all rows; a row keeps ``events`` cache events.
    """
    replicas = rows * int(config["num_replicas"])
    owned = int(config["entries"] + config["max_running"] + 2 * config["block_size"])
    requests = rows * int(config["num_requests"])
    stores = {NO_STORE: 0, OWN_STORE: int(config["num_replicas"]), POOLED_STORE: 1}
    return Systems(
        env=np.zeros(rows, dtype=ENV),
        replica=np.zeros((rows, int(config["num_replicas"])), dtype=REPLICA),
        request=np.zeros(requests, dtype=REQUEST),
        segments=segments,
        block=np.zeros(replicas * (int(config["blocks"]) + 1), dtype=BLOCK),
        lists=np.zeros(replicas * owned + 2 * requests, dtype=np.int32),
        expected=np.zeros((rows, int(config["num_requests"])), dtype=np.int32),
        news=np.zeros((rows, 2 * int(config["num_requests"])), dtype=NEWS),
        events=np.zeros((rows, events), dtype=EVENT),
        known=np.zeros((rows, stores[int(config["store"])], 0), dtype=np.int8),
    )
