"""What the kernel reads and writes: records, the tables of a problem, the arrays of a batch.

Units are seconds, MB, tokens and USD.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from servegym._jit import record

DICT, FLAT = 0, 1
CHUNK = 8  # tokens between two of the cumulative counts in ``Tables.sums``
MAX_IDLE_S = 36_000.0
MAX_TREM_S = 1.0
MAX_SLO_S = 1_000.0
MAX_PRICE = 1_000.0


CONFIG = record(
    ("layers", "i8"),  # L, MoE layers
    ("experts", "i8"),  # K, experts of a MoE layer
    ("top_k", "i8"),  # experts a token goes to
    ("blocks", "i8"),  # blocks of the model, dense ones included
    ("z_max", "i8"),  # most replicas of a remote function
    ("levels", "i8"),  # values of the action's first part, b
    ("requests", "i8"),  # requests of an episode
    ("width", "i8"),  # entries of the action mask
    ("per_layer", "i8"),  # 1: y and z have an action a layer
    ("keep_action", "i8"),  # 1: the last part of an action keeps the plan that is warm
    ("per_call", "i8"),  # 1: t_rem for every remote call of a decoded token; 0: once a layer
    ("bill_cold_start", "i8"),  # 1: starting functions are billed
    ("load_shared", "i8"),  # 1: starting functions share one storage link
    ("flat_view", "i8"),  # DICT or FLAT
    ("max_in", "i8"),  # longest prompt, tokens
    ("max_out", "i8"),  # most generated tokens
    ("by_deployment", "i8"),  # 1: a deployment serves in place of the action's plan
    ("gpu_layer_base_s", "f8"),  # non-expert module of a block on the GPU, one token
    ("gpu_layer_token_s", "f8"),  # each further token
    ("swap_base_s", "f8"),  # latency of a move between GPU and CPU, one way
    ("swap_mb_s", "f8"),  # MB/s of that move
    ("token_mb", "f8"),  # D, one token vector
    ("bandwidth_mb_s", "f8"),  # B, MB/s between functions
    ("price_cpu", "f8"),  # c_c, USD per MB s
    ("price_gpu", "f8"),  # c_g, USD per MB s
    ("gpu_token_mb", "f8"),  # GPU memory of a token: its vector and its KV cache
    ("all_non_expert_mb", "f8"),  # all non-expert modules
    ("load_mb_s", "f8"),  # MB/s at which a starting function reads its weights
    ("container_start_s", "f8"),  # start of a function's container
    ("payload_mb", "f8"),  # largest body of one invocation
    ("keep_alive_s", "f8"),  # idle time that functions outlive; 0: every request is cold
    ("penalty", "f8"),  # of a violated SLO, in MIX costs of the request
    ("all_experts_mb", "f8"),  # all experts of all layers
    ("largest_expert_mb", "f8"),  # the largest expert
    ("invocation_usd", "f8"),  # fee of one invocation
    ("granularity_s", "f8"),  # billed durations are rounded up to its multiples; 0: they are not
)
"""The numbers of a problem."""

LAW = record(
    ("mb", "f8"),  # memory of the specification
    ("one_s", "f8"),  # expert call of one token
    ("more_s", "f8"),  # each further token of the call
)
"""A memory specification of a function and how fast experts run in it."""

REQUEST = record(
    ("prompt", "i4"),  # index of the prompt
    ("offset", "i4"),  # first token of the request among the prompt's recorded ones
    ("n_in", "i4"),  # prompt tokens
    ("n_out", "i4"),  # generated tokens after the first
    ("n_out_predicted", "f8"),  # their number as predicted
    ("ttft_limit", "f8"),  # s
    ("tpot_limit", "f8"),  # s
    ("gap", "f8"),  # s from the last completion to the request
)
"""A drawn request."""

ENV = record(
    ("index", "i8"),  # requests served
    ("deployed", "i8"),  # 1 once functions are deployed
    ("level", "i8"),  # b of the functions deployed last
    ("order", "i8"),  # order of their experts: 0 the prompt's, 1 the shared one
    ("main_mb", "f8"),  # memory of the main function deployed last
    ("idle_s", "f8"),  # time since the functions were last used
    ("total_cost", "f8"),  # USD
    ("total_mix", "f8"),  # USD that MIX would have cost
    ("total_fees", "f8"),  # USD of invocations
    ("total_rounding", "f8"),  # USD of rounding
    ("invocations", "i8"),
    ("total_ttft", "f8"),  # s
    ("total_tpot", "f8"),  # s
    ("total_cold", "f8"),  # s of cold starts
    ("total_ratio", "f8"),  # sum of the remote ratios
    ("total_reward", "f8"),
    ("late_ttft", "i8"),  # requests that violated their TTFT
    ("late_tpot", "i8"),  # requests that violated their TPOT
    ("infeasible", "i8"),  # requests whose plan was infeasible
    ("main_hits", "i8"),  # requests that found the main function warm
)
"""Where a system is in its episode, what is deployed, and the sums of the key figures."""

FUNCTION = record(
    ("mask", "u8"),  # remote experts of the layer
    ("mb", "f8"),  # memory
    ("replicas", "i8"),
)
"""The remote function of a layer."""

PLAN = record(
    ("mask", "u8"),  # remote experts of the layer
    ("mb", "f8"),  # Y, memory of its remote function; 0 if no expert is remote
    ("one_s", "f8"),  # expert call of one token there
    ("more_s", "f8"),  # each further token of the call
    ("replicas", "i8"),  # z, 0 if no expert is remote
)
"""The remote function of a layer as planned for the current request."""

DEPLOYMENT = record(
    ("rate_usd_s", "f8"),  # what a second of the main function costs
    ("main_mb", "f8"),  # memory of the main function
    ("remote", "f8"),  # remote ratio
    ("prefill_s", "f8"),
    ("prefill_mb_s", "f8"),  # memory x time of the remote functions
    ("decode_s", "f8"),
    ("decode_mb_s", "f8"),  # memory x time of the remote functions
    ("rounding_mb_s", "f8"),  # memory x time that rounding adds to both
    ("invocations", "i8"),  # of all functions
    ("start_main_s", "f8"),  # if cold: start of the main function
    ("start_remote_s", "f8"),  # start of the slowest remote function
    ("start_mb_s", "f8"),  # memory x time of the starting remote functions
    ("start_rounding_mb_s", "f8"),  # memory x time that rounding adds to it
)
"""What a request takes of a deployment that is no plan."""

LOG = record(
    ("cost_usd", "f8"),
    ("mix_cost_usd", "f8"),
    ("cost_main_usd", "f8"),
    ("cost_prefill_usd", "f8"),
    ("cost_decode_usd", "f8"),
    ("cost_cold_usd", "f8"),
    ("cost_fees_usd", "f8"),
    ("cost_rounding_usd", "f8"),
    ("invocations", "i8"),
    ("ttft_s", "f8"),
    ("tpot_s", "f8"),
    ("prefill_s", "f8"),
    ("decode_s", "f8"),
    ("cold_start_s", "f8"),
    ("main_mb", "f8"),
    ("remote_mb", "f8"),  # sum over layers
    ("replicas", "f8"),  # sum over layers
    ("reward", "f8"),
    ("level", "i8"),
    ("order", "i8"),
    ("main_warm", "i8"),
    ("ttft_violated", "i8"),
    ("tpot_violated", "i8"),
    ("main_memory", "i8"),  # 10f violated
    ("remote_memory", "i8"),  # 10e violated
    ("payload", "i8"),  # 10g violated
)
"""A served request."""


class Column(NamedTuple):
    """A number of an observation.

    Attributes:
        part: key of the Dict that it is in.
        name: its field.
        high: most that it is, from 0; the name of a number of `CONFIG` where that says it.
        text: what it is.
    """

    part: str
    name: str
    high: float | str
    text: str


DICT_COLUMNS = (
    Column("lengths", "n_in", "max_in", "prompt tokens"),
    Column("lengths", "n_out_predicted", "max_out", "predicted output tokens"),
    Column("slo", "ttft_limit", MAX_SLO_S, "limit of the time to first token (TTFT), s"),
    Column("slo", "tpot_limit", MAX_SLO_S, "limit of the time per output token (TPOT), s"),
    Column("t_rem", "t_rem", MAX_TREM_S, "mean overhead of the request before, s"),
    Column("idle_s", "idle_s", MAX_IDLE_S, "s since the last completion"),
    Column("warm_main", "warm", 1.0, "1 if functions are warm, else this part is 0"),
    Column("warm_main", "warm_main", 1.0, "memory of the main function over the largest"),
    Column("warm_main", "warm_ratio", 1.0, "its b over K"),
    Column("warm_main", "warm_order", 1.0, "its order"),
    Column("warm_main", "warm_same", 1.0, "1 if b and order give this prompt the same experts"),
    Column("prices", "price_cpu", MAX_PRICE, "c_c, USD per GB and hour"),
    Column("prices", "price_gpu", MAX_PRICE, "c_g, likewise"),
)
"""The parts of the Dict view that are not arrays over layers, in the order of `SCALARS`."""
SCALARS = record(*((column.name, "f4") for column in DICT_COLUMNS))
"""Their values."""

FLAT_COLUMNS = (
    ("n_in", "prompt tokens over the most"),
    ("n_out_predicted", "predicted output tokens over the most"),
    ("ttft_limit", "limit of the TTFT over 60 s"),
    ("tpot_limit", "limit of the TPOT over 0.5 s"),
    ("t_rem", "mean overhead of the request before, log scale"),
    ("idle_s", "time since the last completion, log scale"),
    *((column.name, column.text) for column in DICT_COLUMNS if column.part == "warm_main"),
    ("remote_mb", "mean over layers of the warm memory over the largest"),
    ("remote_replicas", "mean over layers of the warm replicas over the most"),
    ("price_cpu", "c_c, USD per GB and hour"),
    ("price_gpu", "c_g over 10 USD per GB and hour"),
)
"""Names and meanings of the first features of the flat view, each in 0..1. Behind them are those of
each order and b: share of the tokens' experts that is remote, mean and largest over layers."""
FLAT_SCALARS = record(*((name, "f4") for name, _ in FLAT_COLUMNS))
"""Their values."""


class Recorded(NamedTuple):
    """The recorded tokens of the prompts.

    Attributes:
        bank: uint64 ``(T, L)`` expert sets, prompt by prompt.
        ids: uint8 ``(T, L, top_k)`` the same as indexes.
        bank_start: int64 ``(P + 1,)`` first token of each prompt.
        sums: uint16 ``(C, L, K)`` tokens of each expert before every CHUNK-th token of a prompt,
            then of all its tokens.
        sums_start: int64 ``(P + 1,)`` first row of ``sums`` of each prompt.
    """

    bank: Any
    ids: Any
    bank_start: Any
    sums: Any
    sums_start: Any


class Tables(NamedTuple):
    """What all systems of a problem share.

    Attributes:
        cfg: ``(1,)`` :data:`CONFIG`.
        main_law: ``(V,)`` :data:`LAW`, specifications of the main function, rising.
        remote_law: ``(Ve,)`` :data:`LAW`, those of the remote functions.
        expert_mb: ``(L,)`` MB of one expert.
        main_choice: int64 ``(levels, n_w)`` row of ``main_law`` for values of b and w.
        y_headroom: ``(n_y,)`` MB.
        z_headroom: int64 ``(n_z,)`` replicas.
        members: int64 ``(levels,)`` remote experts of a layer.
        predicted: float32 ``(Q, L, K)``, the distinct predictions.
        falling: int16 ``(Q, L, K)`` experts by falling prediction, ties to the lower index.
        masks: uint64 ``(Q + 1, levels, L)`` remote sets; the last row is the shared order's.
        share: ``(Q, 2, levels, L)`` predicted share of the remote set, by order.
        worst_share: ``(Q, 2, levels)`` largest of that over layers.
        worst_expert: ``(Q, 2, levels)`` largest share of a single remote expert.
        prediction: int64 ``(P,)`` row of ``predicted`` of each prompt.
        recorded: :class:`Recorded`.
    """

    cfg: Any
    main_law: Any
    remote_law: Any
    expert_mb: Any
    main_choice: Any
    y_headroom: Any
    z_headroom: Any
    members: Any
    predicted: Any
    falling: Any
    masks: Any
    share: Any
    worst_share: Any
    worst_expert: Any
    prediction: Any
    recorded: Recorded


class KnownPlans(NamedTuple):
    """Plans made before, each in the slot that its key says; a later one takes an earlier's.

    Attributes:
        key: int64 ``(S,)`` prediction, order, b, prompt tokens, y and z in one number; -1: none.
        plan: ``(S, L)`` :data:`PLAN`.
        replica: int8 ``(S, L, K)`` replica of each remote expert.
    """

    key: Any
    plan: Any
    replica: Any


class Scratch(NamedTuple):
    """Room for one request, written anew by each.

    Attributes:
        plan: ``(L,)`` :data:`PLAN`.
        replica: int64 ``(L, K)`` replica of each remote expert.
        replica_s: ``(z_max,)`` busy seconds of the replicas of a layer.
        replica_tokens: ``(z_max,)`` tokens that go to them.
        job_expert: int64 ``(K,)`` remote experts of a layer by falling prediction.
        job_s: ``(K,)`` their expected prefill times.
        job_tokens: ``(K,)`` their expected tokens.
        tokens: int64 ``(L, K)`` prompt tokens of each expert.
        decoded: int64 ``(L, top_k + 1)`` generated tokens by their number of remote experts.
        fresh: int64 ``(L,)`` replicas of the remote functions that start.
    """

    plan: Any
    replica: Any
    replica_s: Any
    replica_tokens: Any
    job_expert: Any
    job_s: Any
    job_tokens: Any
    tokens: Any
    decoded: Any
    fresh: Any


class Batch(NamedTuple):
    """The arrays of B systems.

    Attributes:
        requests: ``(B, J)`` :data:`REQUEST`.
        trem: ``(B, J + 1, L)`` invocation overheads in s, those before the first request in front.
        env: ``(B,)`` :data:`ENV`.
        functions: ``(B, L)`` :data:`FUNCTION`, the remote functions deployed last.
        action: int64 ``(B, n)`` the action that deployed them, as it was carried out.
        deployment: ``(B, J)`` :data:`DEPLOYMENT`; ``(B, 0)`` where the action's plan serves.
        log: ``(B, J)`` :data:`LOG`.
        activations: float32 ``(B, L, K)`` observation.
        scalars: ``(B,)`` :data:`SCALARS`, observation.
        warm_remote: float32 ``(B, L, 2)`` observation.
        flat: float32 ``(B, F)`` observation of the flat view.
        flat_scalars: ``(B,)`` :data:`FLAT_SCALARS`, its first columns.
        flat_shares: float32 ``(B, 2, levels, 2)``, the others.
        action_mask: int8 ``(B, A)``.
        out: ``(B, 4)`` the three reward terms and whether the episode ended.
        known: :class:`KnownPlans`.
        scratch: :class:`Scratch`.
    """

    requests: Any
    trem: Any
    env: Any
    functions: Any
    action: Any
    deployment: Any
    log: Any
    activations: Any
    scalars: Any
    warm_remote: Any
    flat: Any
    flat_scalars: Any
    flat_shares: Any
    action_mask: Any
    out: Any
    known: KnownPlans
    scratch: Scratch
