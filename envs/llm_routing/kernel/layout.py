"""The arrays of the engine: records, named tuples of arrays, and the codes in them.

Units are seconds and tokens; memory is counted in KV blocks. B is the number of systems, N of
experts, R and W the running and the waiting capacity of an expert, J the requests of an episode and
P the rows of the catalog.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from servegym._jit import inline, record
from servegym.envs._columns import Column, places, seen
from servegym.envs.llm_routing.kernel.law import Law

ORCA, CHUNKED = 0, 1  # config.scheduler
RESERVE, PAGED = 0, 1  # config.memory_policy
COMPLETED_QOS, QOS_AWARE, PAID_FORWARD, DENSE = 0, 1, 2, 3  # config.reward
USUAL_QOS = 0.6  # that the reward DENSE takes off for each decision
NEW_VIOLATIONS, LITERAL = 0, 1  # config.penalty
GRAPH, FLAT, EXPERTS, SUMMARY = 0, 1, 2, 3  # config.layout
PENDING, COMPLETED, DROPPED, REJECTED, FAILED = 0, 1, 2, 3, 4  # log.outcome
PREFILL, DECODE, MIXED = 1, 2, 3  # expert.iteration, or IDLE

# Columns of the request table.
PROMPT, SCORE, OUTPUT, PREDICTED_SCORE, PREDICTED_OUTPUT = 0, 1, 2, 3, 4

# Documented bounds of the observation; larger values are clipped.
MAX_PROMPT_TOKENS = 8192.0
MAX_LATENCY_S_PER_TOKEN = 10.0
MAX_WAIT_S = 3600.0
MAX_GAP_S = 60.0
MAX_LATENCY_REQUIREMENT_S = 1.0

LOAD_HORIZONS = (8, 32, 128)  # requests

# Columns of the observations. Sizes are R and W, `held` (R + W), `longest` (answer), `tokens` (of
# the longest prompt and answer) and `kv` (tokens of the largest KV memory).
REQUEST_COLUMNS = (
    Column("prompt_tokens", MAX_PROMPT_TOKENS, "tokens of the prompt"),
    Column("predicted_score", 1.0, "predicted score of the answer"),
    Column("predicted_tokens", "longest", "predicted tokens of the answer"),
)
"""The request to route, as an expert would serve it."""

STATE_COLUMNS = (
    Column("memory", 1.0, "share of the KV memory in use"),
    Column("running", "R", "requests that run"),
    Column("waiting", "held", "requests that wait"),
)
"""An expert."""

QUEUED_COLUMNS = (
    *REQUEST_COLUMNS,
    Column("memory", 1.0, "share of the KV memory that it takes"),
    Column("emitted_tokens", "longest", "tokens so far"),
    Column("latency_s_per_token", MAX_LATENCY_S_PER_TOKEN, "s per token so far"),
)
"""A request at an expert, Eq. 6."""

LOAD_COLUMNS = (
    Column("gap_s", MAX_GAP_S, "s between arrivals"),
    Column("mean_prompt", MAX_PROMPT_TOKENS, "tokens of the prompt"),
    Column("mean_predicted", "longest", "predicted tokens, mean of the experts"),
)
"""Means over the last requests, for each of `LOAD_HORIZONS`, see `note_arrival`."""
LOAD_WIDTH = len(LOAD_COLUMNS) * len(LOAD_HORIZONS)

# Name, mean, spread, largest value, meaning. Means and spreads (standard deviations) are, to two
# digits, those over six experts of the default fleet that a random router serves at 4 to 11
# requests/s; wider for columns that vary more from fleet to fleet.
_SECONDS = MAX_LATENCY_S_PER_TOKEN
_SUMMARY = (
    ("exists", 0.0, 1.0, 1.0, "1; 0 in all columns where the fleet has no such expert"),
    # The request to route, as the expert would serve it.
    ("prompt_tokens", 35.0, 43.0, MAX_PROMPT_TOKENS, "tokens of the request's prompt"),
    ("predicted_score", 0.67, 0.11, 1.0, "predicted score of its answer"),
    ("predicted_tokens", 190.0, 100.0, "longest", "predicted tokens of its answer"),
    ("latency_requirement_s", 0.03, 0.01, MAX_LATENCY_REQUIREMENT_S, "L, s per token"),
    # The expert.
    ("memory", 0.027, 0.039, 1.0, "share of the KV memory in use"),
    ("running", 3.6, 1.7, "R", "requests that run"),
    ("waiting", 1.4, 1.8, "held", "requests that wait"),
    ("running_capacity", 5.0, 5.0, "R", "R"),
    ("waiting_capacity", 5.0, 5.0, "W", "W"),
    ("kv_capacity_tokens", 1.5e5, 1.8e5, "kv", "tokens of its KV memory"),
    ("prefill_s_per_token", 8.8e-05, 4.2e-05, _SECONDS, "k1 of Eq. 13"),
    ("decode_s_per_context_token", 1.9e-07, 5.7e-08, _SECONDS, "k2 of Eq. 14"),
    ("lone_decode_s", 0.02, 0.0054, _SECONDS, "decode iteration of one sequence of 256 tokens"),
    ("next_decode_s", 0.021, 0.0057, _SECONDS, "of one sequence more than run, R at most"),
    ("full_decode_s", 0.021, 0.0057, _SECONDS, "of R sequences"),
    # Its running requests.
    ("emitted_tokens", 430.0, 280.0, "R longest", "running: tokens emitted, sum"),
    ("context_tokens", 560.0, 340.0, "R tokens", "prompts and tokens emitted, sum"),
    ("prefill_tokens", 0.93, 10.0, "R tokens", "tokens that prefills under way leave, sum"),
    ("tokens_left", 420.0, 260.0, "R longest", "predicted tokens left, at least one each, sum"),
    ("left_16", 0.56, 0.74, "R", "requests with at most 16 tokens left"),
    ("left_64", 0.74, 0.85, "R", "with 17 to 64"),
    ("left_128", 0.82, 0.88, "R", "with 65 to 128"),
    ("next_finish_tokens", 40.0, 56.0, "longest", "fewest tokens left, 0 if none runs"),
    ("scores", 2.5, 1.2, "R", "predicted scores, sum"),
    ("behind", 1.7, 2.0, "R", "requests whose latency per token so far is above L"),
    ("late", 0.62, 1.2, "R", "that have spent what L allows for their predicted length"),
    ("tight", 0.6, 1.1, "R", "others that can afford less than `next_decode_s` a token left"),
    ("tight_scores", 0.41, 0.75, "R", "predicted scores of those, sum"),
    ("least_slack_s", 0.76, 2.6, _SECONDS, "least s a token left that one not late can afford"),
    # Its waiting requests.
    ("waiting_prefill_tokens", 50.0, 85.0, "held tokens", "waiting: tokens to prefill, sum"),
    ("waiting_tokens_left", 270.0, 390.0, "held longest", "predicted tokens left, sum"),
    ("waiting_scores", 0.92, 1.2, "held", "predicted scores, sum"),
    ("waiting_late", 0.21, 0.54, "held", "requests that are late as above"),
    ("longest_wait_s", 1.1, 1.7, MAX_WAIT_S, "longest wait since an arrival at the router, s"),
    # The load, the same for every expert.
    *(
        (f"{name}_{horizon}", mean, spread, high, f"{text}, mean of {horizon} requests")
        for horizon in LOAD_HORIZONS
        for (name, high, text, *_), mean, spread in zip(
            LOAD_COLUMNS, (0.13, 35.0, 190.0), (0.05, 35.0, 100.0), strict=True
        )
    ),
)
SUMMARY_COLUMNS = tuple(
    Column(name, high, text, 0.0, mean, spread) for name, mean, spread, high, text in _SUMMARY
)
"""An expert in the layout SUMMARY."""

SEEN, OF_SUMMARY = seen(SUMMARY_COLUMNS), places(SUMMARY_COLUMNS)
SUMMARY_MEANS = np.array([column.mean for column in SUMMARY_COLUMNS])
SUMMARY_SPREADS = np.array([column.spread for column in SUMMARY_COLUMNS])
SUMMARY_WIDTH = len(SUMMARY_COLUMNS)
SUMMARY_CONTEXT = 256.0  # tokens


CONFIG = record(
    ("num_experts", "i8"),  # N
    ("running_capacity", "i8"),  # R, requests
    ("waiting_capacity", "i8"),  # W, requests
    ("slots", "i8"),  # requests that an expert can hold
    # Sizes of the arrays: N, R and W, or the largest of any fleet that may be drawn.
    ("max_experts", "i8"),
    ("max_running", "i8"),
    ("max_waiting", "i8"),
    ("scheduler", "i8"),  # ORCA or CHUNKED
    ("memory_policy", "i8"),  # RESERVE or PAGED
    ("async_scheduling", "i8"),  # 1: an iteration is planned while the one before it runs
    ("token_budget", "i8"),  # tokens of an iteration, at most
    ("block_size", "i8"),  # tokens of a KV block
    ("max_output_tokens", "i8"),  # longest answer
    ("num_requests", "i8"),  # J
    ("reward", "i8"),  # COMPLETED_QOS, QOS_AWARE, PAID_FORWARD or DENSE
    ("penalty", "i8"),  # NEW_VIOLATIONS or LITERAL
    ("predicted_estimator", "i8"),  # 1: Eq. 15 takes predicted scores and lengths
    ("layout", "i8"),  # of the observation: GRAPH, FLAT, EXPERTS or SUMMARY
    ("longest", "i8"),  # as the law has it; 0: `longest_key` is not kept
    ("delay_s_per_token", "f8"),  # transfer time of a prompt token
    ("router_delay_s", "f8"),  # constant delay of every request
    ("blocks_per_token", "f8"),  # 1 / block_size
    ("uptime_s", "f8"),  # mean time to failure of an expert; 0: none fails
    ("downtime_s", "f8"),  # mean time to repair
)
"""The arguments of a system: of every system of a problem, unless its fleet is drawn."""

ENV = record(
    ("index", "i8"),  # of the request to route, 0 to J
    ("first_log", "i8"),  # where the system's entries begin in the log
    ("now", "f8"),  # s
    ("latency_requirement", "f8"),  # L, s/token
    # Requests of the episode so far.
    ("completed", "i8"),
    ("dropped", "i8"),
    ("rejected", "i8"),
    ("on_time", "i8"),  # completed within L
    ("multi_token", "i8"),  # completed with more than one token
    ("failed", "i8"),
    ("failure_seed", "i8"),  # 32 bits that decide when experts fail
    # Sums over the completed requests.
    ("qos", "f8"),  # scores of those on time
    ("latency", "f8"),  # s/token
    ("ttft", "f8"),  # s
    ("tpot", "f8"),  # s
    ("e2e", "f8"),  # s
    ("waiting", "f8"),  # s
    ("inference", "f8"),  # s
    ("communication", "f8"),  # s
    ("memory", "f8"),  # share of the KV memory in use, mean of the experts, sum over decisions
    ("last_finish", "f8"),  # s
    ("step_qos", "f8"),  # scores of the requests completed on time in this step
    ("step_late", "f8"),  # scores of those late or lost in this step
    ("outlook", "f8"),  # scores of those held that can be on time, see `outlook`
    # The load that the router has seen, for each of `LOAD_HORIZONS`: seconds between arrivals,
    # prompt tokens and predicted output tokens of a request.
    *((name, f"{len(LOAD_HORIZONS)}f8") for name in ("gap", "prompt", "length")),
)
"""Clock and sums of a system."""

EXPERT = record(
    # The first 64 bytes are what every step reads.
    ("start", "f8"),  # s, begin of the iteration in flight
    ("end", "f8"),  # s, its end: the next boundary; inf: none
    ("next_change", "f8"),  # s, when `down` changes next; inf: never
    ("running", "i8"),  # requests
    ("waiting", "i8"),  # requests
    ("emitted", "i8"),  # decode iterations so far
    ("settled", "i8"),  # value of `emitted` for which `free` holds, see `settle`
    ("free", "i8"),  # blocks that the running requests leave
    ("first_request", "i8"),  # where its requests begin
    ("first_place", "i8"),  # where its lists begin
    ("iteration", "i8"),  # in flight: IDLE, PREFILL, DECODE or MIXED
    ("next_finish", "i8"),  # value of `emitted` at which the next running request is done
    ("decoding", "i8"),  # running requests whose prefill is done
    ("decoding_tokens", "i8"),  # prompt and generated tokens of those
    ("phase", "i8"),  # `settled` modulo the block size
    ("segment", "i8"),  # of the decode table in which the last run ended
    # What stands behind it.
    ("capacity", "i8"),  # KV blocks
    ("profile", "i8"),  # index of its card among the latency laws
    ("model", "i8"),  # index of its column in the request table
    # Running list, waiting queue and vacant slots: -1 for none.
    ("oldest", "i8"),  # admitted
    ("newest", "i8"),  # admitted
    ("prefill", "i8"),  # oldest whose prefill is under way; so are all after it
    ("head", "i8"),  # of the waiting queue
    ("tail", "i8"),
    ("vacant", "i8"),  # the first slot without a request
    ("admissions", "i8"),  # so far
    ("reserved", "i8"),  # blocks for the longest answers of the running requests
    # Rows of the observation that are not zero.
    ("written_running", "i8"),
    ("written_waiting", "i8"),
    ("down", "i8"),  # 1: it has failed and is not back
    ("changes", "i8"),  # how often that has changed
    ("first_link", "i8"),  # where the links of its requests begin in the lists
    ("longest_key", "i8"),  # most prompt tokens less `origin` of the decoding requests
    ("number", "i8"),  # in its row
    ("leaving", "i8"),  # first that has completed and waits for the next plan, -1 for none
    # Time in the API, see `arrive`; 0: none.
    ("api_in_s", "f8"),
    ("api_request_s", "f8"),
    ("api_out_s", "f8"),
    ("api_done", "f8"),  # s, when its event loop has done what it has
)
"""An expert: an iteration-level scheduler with its running list and its waiting queue."""

SLOT = record(
    # The first 48 bytes are what a sum over the running requests reads.
    ("arrived", "f8"),  # s, at the router
    ("origin", "i8"),  # value of the expert's `emitted` at which it had no token, if decoding
    ("prompt", "i4"),  # tokens
    ("output", "i4"),  # tokens
    ("generated", "i4"),  # tokens, up to date unless decoding: see `generated_tokens`
    ("decoding", "i4"),  # 1: its prefill is done
    ("score", "f4"),
    ("predicted_score", "f4"),
    ("predicted_output", "f4"),  # tokens
    ("request", "i4"),  # index in the episode
    ("admission", "i4"),  # how many the expert had admitted before
    ("place", "i4"),  # in the heap, if decoding
    ("available", "f8"),  # s, at the expert
    ("admitted", "f8"),  # s, NaN before
    ("first", "f8"),  # s, first token; NaN before
    ("chunk", "i4"),  # tokens of its prefill in this iteration
    ("computed", "i4"),  # tokens whose prefill is done
    ("preemptions", "i4"),
)
"""A request at an expert."""

LOG = record(
    ("available_s", "f8"),
    ("admitted_s", "f8"),
    ("first_token_s", "f8"),
    ("finish_s", "f8"),
    ("score", "f4"),
    ("prompt_tokens", "i4"),
    ("output_tokens", "i4"),
    ("expert", "i2"),
    ("outcome", "i2"),
    ("preemptions", "i4"),
)
"""What became of a request."""


class Tables(NamedTuple):
    """What the systems of a problem share.

    Attributes:
        config: ``(1,)`` `CONFIG` of all systems, or ``(B,)``, one each.
        law: Iteration times of all cards.
        requests: float32 ``(P, M, 5)``, the columns `PROMPT` to `PREDICTED_OUTPUT` of every catalog
            row at every model.
    """

    config: np.ndarray
    law: Law
    requests: np.ndarray


@inline
def config_of(tables, row):
    """The arguments of row b."""
    return tables.config[row if tables.config.shape[0] > 1 else 0]


class Queues(NamedTuple):
    """The requests at the experts and in the log, flat.

    Expert n of row b owns S records of ``request`` from its ``first_request`` on, and 3 S + K
    entries of ``lists`` from its ``first_place`` on, K being the tokens of a block: the heap of
    those that decode by their last token; for each k how many of them take a new block in one of
    the emissions 1 to k, modulo K; for each slot the next one and the one before in the running
    list or the waiting queue, or the next vacant one. Views of parts would be reference-counted on
    the hot path.

    Attributes:
        request: ``(B N S,)`` `SLOT`.
        lists: int32 ``(B N (3 S + K),)``.
        log: ``(B J,)`` `LOG`.
    """

    request: np.ndarray
    lists: np.ndarray
    log: np.ndarray


class Systems(NamedTuple):
    """The state of B systems.

    Attributes:
        arrivals: float64 ``(B, J)``, seconds.
        rows: int32 ``(B, J)``, catalog rows of the requests.
        env: ``(B,)`` `ENV`.
        expert: ``(B, N)`` `EXPERT`.
        queues: the requests in the systems.
    """

    arrivals: np.ndarray
    rows: np.ndarray
    env: np.ndarray
    expert: np.ndarray
    queues: Queues


class Buffers(NamedTuple):
    """What a step writes for the agents.

    Attributes:
        observation: float32, sections with a leading axis of B. `GRAPH`: request (N, 3), experts
            (N, 3), running (N, R, 6), waiting (N, W, 6), latency requirement (1,) and load (3, 3);
            `FLAT`: (10 + N (6 + 6 R + 6 W),); `EXPERTS`: (3 N,); `SUMMARY`: (N, 44).
        summary: ``(B, N)`` `SEEN`, the memory of `SUMMARY` by the names of its columns; ``(B, 0)``
            with another layout.
        masks: int8, sections with a leading axis of B: with `GRAPH` running (N, R) and waiting
            (N, W), then the action mask (N + 1,).
        reward: float64 ``(B, 3)``: the two terms of the reward and whether the episode has ended.
    """

    observation: np.ndarray
    summary: np.ndarray
    masks: np.ndarray
    reward: np.ndarray
