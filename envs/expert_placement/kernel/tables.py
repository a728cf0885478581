"""Records and named tables of the engine. N servers, G GPUs, L layers, E experts, C = L E."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from servegym._jit import record

# Options of `CONFIG`.
NIC, PAIRWISE = 0, 1
PER_EXPERT, PER_SERVER = 0, 1
LEAST_FINISH, NEAREST, RANDOM, CONSOLIDATE = 0, 1, 2, 3
HOST, NETWORK = 0, 1
LRU, LFU, ACTIVATION = 0, 1, 2
HOME, FEWEST_REQUESTS, LEAST_LOAD_PER_GPU, AFFINITY = 0, 1, 2, 3
CALL, FORWARD = 0, 1
# What `run` returns.
DONE, POOL_FULL = 0, 1
# Requests, messages and GPUs that an event can name.
INDEX_BITS = 22
MAX_INDEX = (1 << INDEX_BITS) - 1


CONFIG = record(
    ("num_servers", "i8"),  # N
    ("num_gpus", "i8"),  # G
    ("layers", "i8"),  # L
    ("experts", "i8"),  # E
    ("top_k", "i8"),  # experts of a token
    ("link_model", "i8"),  # NIC: one sending queue a server; PAIRWISE: one for each pair
    ("messages", "i8"),  # PER_EXPERT or PER_SERVER
    ("choice", "i8"),  # which copy a remote call goes to: LEAST_FINISH, NEAREST, ...
    ("candidates", "i8"),  # copies that the choice looks at
    ("migration_source", "i8"),  # weights of a new placement: from HOST or over the NETWORK
    ("cache", "i8"),  # what a cache gives up first: LRU, LFU, ACTIVATION
    ("router", "i8"),  # which server takes a request: HOME, FEWEST_REQUESTS, ...
    ("execution", "i8"),  # CALL experts of other servers, or FORWARD to whole layers
    ("decode_steps", "f8"),  # mean decode steps of a request, as a controller expects them
    ("message_cost", "f8"),  # s, fixed sending time of a message
    ("stage_token", "f8"),  # s, staging of one token's activations
    ("stage_base", "f8"),  # s, staging besides
    ("load", "f8"),  # s, one expert of a placement from host memory to a GPU
    ("fetch", "f8"),  # s, one expert from host memory into a cache
    ("expert_bytes", "f8"),  # bytes of one expert
    ("activation_bytes", "f8"),  # bytes of one token on a link
)
"""Options and sizes of a system."""
PLANT_GPU = record(
    ("server", "i8"),  # its server
    ("slots", "i8"),  # experts that it can hold
    # Not "base": numpy's records have an attribute of that name.
    ("fixed", "f8"),  # s, an expert call with x tokens takes fixed + token x
    ("token", "f8"),  # s
)
"""A GPU, what does not change."""
PLANT_SERVER = record(
    ("first_gpu", "i8"),  # its GPUs are first_gpu to end_gpu - 1
    ("end_gpu", "i8"),
    ("dense_base", "f8"),  # s, the rest of a layer with x tokens takes base + token x
    ("dense_token", "f8"),  # s
)
"""A server, what does not change."""
PAIR = record(
    ("byte_s", "f8"),  # s, sending time of one byte
    ("latency", "f8"),  # s, delay of a message after it has left
)
"""An ordered pair of servers."""
HOP = record(
    ("out", "f8"),  # s, sending time of one token's activations there
    ("back", "f8"),  # s, and back
    ("there", "f8"),  # s, delay there
    ("home", "f8"),  # s, delay back
)
"""What a remote call of one server at another takes; most clusters have few unlike ones."""
REQUEST_GIVEN = record(
    ("arrival", "f8"),  # s
    ("home", "i8"),  # server at which it arrives
    ("prompt", "i8"),  # its prompt
    ("outputs", "i8"),  # tokens of the answer
    ("offset", "i8"),  # decode step s uses row (offset + s - 1) of the prompt's, in a ring
)
"""A request as it arrives."""
PROMPT = record(
    ("tokens", "i8"),  # its length
    ("start", "i8"),  # its rows of the bank are start to end - 1
    ("end", "i8"),
)
"""A prompt."""

META = record(
    ("now", "f8"),  # s since the start
    ("migration_end", "f8"),  # s, end of the last load of a new placement
    ("network_bytes", "f8"),  # bytes sent over links so far
    ("weight_bytes", "f8"),  # bytes of experts loaded so far
    ("sequence", "i8"),  # events added so far, which orders events of one time
    ("heap", "i8"),  # events to come, the one that is being handled included
    ("handled", "i8"),  # whether the root of the heap is an event that is being handled
    ("next_request", "i8"),  # the next request to arrive
    ("free", "i8"),  # free places for messages
    ("loads", "i8"),  # experts loaded so far
    ("drops", "i8"),  # experts given up so far
    ("fewest_copies", "i8"),  # least copies of any expert at any time
    ("messages", "i8"),  # messages sent so far
    ("calls", "i8"),  # expert calls so far
    ("events", "i8"),  # events handled so far
    ("settled", "i8"),  # requests before this one are in ``counts`` as a whole
)
"""The clock and totals of the episode."""
REQUEST = record(
    ("dispatched", "f8"),  # s, when the calls of the layer were made
    ("end", "f8"),  # s, end of the slowest call of the layer so far
    ("first", "f8"),  # s, first token, NaN before
    ("finish", "f8"),  # s, last token, NaN before
    ("step", "i4"),  # 0 is the prefill
    ("layer", "i4"),
    ("pending", "i4"),  # messages or fetches that the layer waits for
    ("home", "i4"),  # server that runs its layer, -1 before it arrives
    ("sent", "i4"),  # layers dispatched so far
    ("counted", "i4"),  # those of them that ``counts`` has
    # What the hot loop reads of the load, beside the rest.
    ("prompt", "i4"),
    ("tokens", "i4"),  # of the prompt
    ("start", "i4"),  # first row of the bank
    ("rows", "i4"),
    ("shift", "i4"),  # the offset, modulo the rows
    ("taken", "i4"),  # server that the router chose
)
"""A request."""
GPU = record(
    ("free", "f8"),  # s, when it has done all calls so far
    ("promised", "f8"),  # s of calls that are on the way to it
    ("promised_calls", "i8"),  # their number
    ("used", "i8"),  # slots in use, loads in flight included
    ("peak", "i8"),  # most slots in use so far
    ("loading", "i8"),  # expert being loaded, -1 if none
    ("next_load", "i8"),  # experts before this one need not be looked at for loads
    ("source", "i8"),  # server that the weights come from, -1 for host memory
    ("bytes_left", "f8"),  # bytes of the load not yet sent
    ("channel_free", "f8"),  # s, when its host channel has done all fetches (caches)
)
"""A GPU."""
LINK = record(
    ("free", "f8"),  # s, when it has sent all messages so far
    ("returning", "f8"),  # s of messages that will go back over it
    ("returning_messages", "i8"),  # their number
)
"""A sending queue: number n of a server (NIC), or n N + m of a pair (PAIRWISE)."""
MESSAGE = record(
    ("sent", "f8"),  # s
    ("request", "i4"),  # -1 for a fetch ahead
    ("server", "i4"),  # receiver
    ("tokens", "i4"),  # distinct tokens whose activations it carries
    ("calls", "i4"),
    ("assigned", "i4"),  # tokens of all its calls
    ("expert", "i4"),  # of a fetch
)
"""Activations on the way there and back, or a fetch into a cache."""
SERVER = record(
    ("area", "f8"),  # request-seconds in the system
    ("since", "f8"),  # s, up to when the area is known
    # Since the last adopted change of placement: seconds and tokens of calls.
    ("local_s", "f8"),
    ("local_tokens", "f8"),
    ("remote_s", "f8"),
    ("remote_tokens", "f8"),
    # Over the episode.
    ("in_system", "i8"),  # requests that arrived here and are not done
    ("serving", "i8"),  # requests that it has taken and that are not done
    ("arrived", "i8"),
    ("all_local_tokens", "i8"),
    ("all_remote_tokens", "i8"),
    ("all_local_calls", "i8"),
    ("all_remote_calls", "i8"),
    ("layer_steps", "i8"),
    ("remote_layer_steps", "i8"),  # those with a remote call
)
"""Sums over the requests of a server."""
OPEN_MESSAGE = record(
    ("message", "i8"),  # message being filled for this server, -1 if none
    ("seconds", "f8"),  # s that it will hold the link
    ("mask", "u8"),  # experts that it calls
    ("order", "i8"),  # the i-th server for which one was opened
    ("held", "u8"),  # experts of the layer that this i-th server holds
)
"""The messages of one dispatch, by receiver."""
SPLIT = record(
    ("local", "i8"),  # the i-th expert of the layer that is here
    ("remote", "i8"),  # the i-th that is not
    ("first", "i8"),  # number of the copy that is looked at first
    ("holder", "i8"),  # its GPU
)
"""The calls of one dispatch, E places."""
CACHED_EXPERT = record(
    ("stamp", "i8"),  # number of the last call that used it
    ("uses", "i8"),  # calls
    ("volume", "i8"),  # tokens
)
"""What a GPU's cache knows of an expert."""


class Plant(NamedTuple):
    """What does not change.

    Attributes:
        cfg: `CONFIG` (1,).
        gpu: `PLANT_GPU` (G,).
        server: `PLANT_SERVER` (N,).
        pair: `PAIR` (N, N).
        hop: `HOP` (H,), the unlike ones.
        route: int32 (N, N), which of them a pair has.
    """

    cfg: np.ndarray
    gpu: np.ndarray
    server: np.ndarray
    pair: np.ndarray
    hop: np.ndarray
    route: np.ndarray


class Load(NamedTuple):
    """R requests in order of arrival and P prompts.

    Attributes:
        request: `REQUEST_GIVEN` (R,).
        prompt: `PROMPT` (P,).
        counts: int32 (P, L, E) tokens of a prompt at each expert.
        bank: uint64 (T, L) expert sets of recorded tokens.
        chosen: uint8 (T, L, k) the same as lists.
        task: int64 (P,) task of a prompt, as a row of the profile.
        profile: (K, C) share of each expert in the assignments that a controller predicts for a
            task, no row where nothing is predicted.
    """

    request: np.ndarray
    prompt: np.ndarray
    counts: np.ndarray
    bank: np.ndarray
    chosen: np.ndarray
    task: np.ndarray
    profile: np.ndarray


class State(NamedTuple):
    """Everything that changes, with M places for messages.

    Attributes:
        meta: `META` (1,).
        event_time: int64 heap of events, the bits of times: they order as the times do and compare
            faster.
        event_key: int64 heap of their order, kind and index.
        request: `REQUEST` (R,).
        gpu: `GPU` (G,).
        link: `LINK` (N N,), the first N used when links are NICs.
        message: `MESSAGE` (M,).
        call: int32 (M, calls, 2) GPU and tokens.
        free: int32 (M,) free places, the first ``meta.free``.
        resident: uint8 (G, C) experts that serve.
        held: uint64 (L, G) the same as sets, where servers help each other.
        target: uint8 (G, C) the placement adopted last.
        holders: int16 (C, G) GPUs that hold an expert, the first ``copies``.
        copies: int64 (C,).
        server: `SERVER` (N,).
        counts: int64 (N, C) assignments since the last adopted change.
        path: int16 (R, L) servers of a request's layers where requests are forwarded, else (0, L).
    """

    meta: np.ndarray
    event_time: np.ndarray
    event_key: np.ndarray
    request: np.ndarray
    gpu: np.ndarray
    link: np.ndarray
    message: np.ndarray
    call: np.ndarray
    free: np.ndarray
    resident: np.ndarray
    held: np.ndarray
    target: np.ndarray
    holders: np.ndarray
    copies: np.ndarray
    server: np.ndarray
    counts: np.ndarray
    path: np.ndarray


class Scratch(NamedTuple):
    """What a dispatch needs while it makes the calls of a layer to other servers.

    Attributes:
        open: `OPEN_MESSAGE` (N,).
        expert: `SPLIT` (E,).
    """

    open: np.ndarray
    expert: np.ndarray


class Cache(NamedTuple):
    """What the GPUs' caches know.

    Attributes:
        ready: (G, C) s, when a fetch under way ends, 0 if none.
        expert: `CACHED_EXPERT` (G, C).
    """

    ready: np.ndarray
    expert: np.ndarray
