"""What a request asks of the experts, known or predicted, and what a plan costs under it.

A `Load` holds per expert the probability of being called in prefill, the (expected) tokens, and by
remote set the (expected) decode tokens with r remote experts. The expert time is linear from one
token on, so expectations enter exactly; only the slowest of several replicas is taken at the
expected times. Of a known request the numbers are the true ones and `predict` equals
`servegym.envs.serverless_moe.equations.evaluate_plan`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

from servegym.baselines.serverless_moe.lpt import replica_loads
from servegym.envs.serverless_moe import equations as eq

Floats = NDArray[np.float64]
OVERHEADS = 8
"""Equally likely overheads over which rounding is averaged where the overhead is not known."""


@dataclass(frozen=True, eq=False)
class Load:
    """Demand of one request.

    Attributes:
        n_in: Prompt tokens.
        n_out: Generated tokens after the first.
        active: (L, K) probability that an expert gets any prompt token.
        tokens: (L, K) prompt tokens of each expert.
        frequency: (L, K) activation frequencies, by which experts are ordered.
        trem_s: (L,) invocation overhead.
        trem_worst_s: (L,) its 95 % quantile.
        decode_sets: uint64 (n_out, L) of a known request, else None.
        trem_factors: (D,) equally likely multiples of ``trem_s``, of mean 1.
    """

    n_in: int
    n_out: int
    active: Floats
    tokens: Floats
    frequency: Floats
    trem_s: Floats
    trem_worst_s: Floats
    decode_sets: NDArray[np.uint64] | None = None
    trem_factors: Floats = field(default_factory=lambda: np.ones(1))

    @classmethod
    def predicted(
        cls,
        system: eq.SystemModel,
        frequency: ArrayLike,
        n_in: int,
        n_out: int,
        trem_s: ArrayLike,
        trem_worst_s: ArrayLike | None = None,
        trem_sigma: float = 0.0,
    ) -> Load:
        """The expected load of a request.

        Args:
            system: The system.
            frequency: (L, K) predicted frequencies; normalised here.
            n_in: Prompt tokens.
            n_out: (Predicted) generated tokens after the first.
            trem_s: Mean invocation overhead, a number or (L,).
            trem_worst_s: Its 95 % quantile; default the mean.
            trem_sigma: Sigma of its logarithm, for the rounding of billed durations.

        Raises:
            ValueError: If the frequencies have another shape, are negative or all 0 in a layer.
        """
        share = np.asarray(frequency, np.float64)
        shape = (system.moe_layers, system.num_experts)
        if share.shape != shape or not (share >= 0).all():
            raise ValueError(f"frequency must have shape {shape} and no negative value")
        total = share.sum(axis=1, keepdims=True)
        if (total <= 0).any():
            raise ValueError("frequency must have a positive sum in each layer")
        share = share / total
        # An expert takes a token at most once.
        chance = np.minimum(system.top_k * share, 1.0)
        trem = np.broadcast_to(np.asarray(trem_s, np.float64), shape[:1])
        worst = trem if trem_worst_s is None else np.asarray(trem_worst_s, np.float64)
        return cls(
            int(n_in),
            int(n_out),
            1.0 - (1.0 - chance) ** n_in,
            system.top_k * n_in * share,
            share,
            trem,
            np.broadcast_to(worst, shape[:1]),
            trem_factors=_lognormal_factors(trem_sigma),
        )

    @classmethod
    def known(cls, request: eq.Request) -> Load:
        """The true load of a request."""
        tokens = request.prefill_counts.astype(np.float64)
        return cls(
            int(request.n_in),
            request.n_out,
            (tokens > 0).astype(np.float64),
            tokens,
            tokens / np.maximum(tokens.sum(axis=1, keepdims=True), 1.0),
            request.trem_s,
            request.trem_s,
            request.decode_sets,
        )

    def histogram(self, remote: NDArray[np.bool_], top_k: int) -> Floats:
        """Decode tokens with r = 0..top_k remote experts, (L, top_k + 1).

        For a predicted load r is binomial: top_k calls that are remote with the remote share.
        """
        if self.decode_sets is not None:
            masks = eq.bit_sets(remote)
            r = np.bitwise_count(self.decode_sets & masks).astype(np.int64)
            flat = r + (top_k + 1) * np.arange(remote.shape[0])
            size = remote.shape[0] * (top_k + 1)
            return np.bincount(flat.ravel(), minlength=size).reshape(-1, top_k + 1).astype(float)
        share = np.where(remote, self.frequency, 0.0).sum(axis=1).clip(0.0, 1.0)[:, None]
        r = np.arange(top_k + 1)
        ways = np.concatenate(([1.0], np.cumprod((top_k - r[:-1]) / (r[:-1] + 1.0))))
        return self.n_out * ways * share**r * (1.0 - share) ** (top_k - r)


def _lognormal_factors(sigma: float) -> Floats:
    """Medians of equally likely parts of a lognormal law, scaled to mean 1."""
    if sigma == 0.0:
        return np.ones(1)
    factors = np.exp(sigma * ndtri((np.arange(OVERHEADS) + 0.5) / OVERHEADS))
    return factors / factors.mean()


def call_rounding_s(
    system: eq.SystemModel, load: Load, call_s: Floats, trem_s: Floats, decode_invocation: str
) -> Floats:
    """`equations.call_rounding_s`, averaged over the overheads that the load lets expect.

    Args:
        system: The system, whose durations are rounded.
        load: The load.
        call_s: (...) seconds of one call with its transfer.
        trem_s: Mean overhead, broadcast against ``call_s``.
        decode_invocation: As `evaluate_plan`.
    """
    top_k, step = system.top_k, system.granularity_s
    added = [
        eq.call_rounding_s(call_s, trem_s * factor, top_k, step, decode_invocation)
        for factor in load.trem_factors
    ]
    return np.mean(added, axis=0)


def expert_time_terms(system: eq.SystemModel, mb: ArrayLike) -> tuple[Floats, Floats]:
    """Expert time ``first + more n`` of n >= 1 tokens: both terms, seconds, in the shape of mb."""
    one = np.asarray(system.expert_cpu_s(mb, 1), np.float64)
    more = np.asarray(system.expert_cpu_s(mb, 2), np.float64) - one
    return one - more, more


def job_times(system: eq.SystemModel, load: Load, mb: Floats) -> Floats:
    """Prefill seconds of each expert with transfer were it remote.

    Args:
        system: The system.
        load: The load.
        mb: (L,) memory of each layer, or (1, V) specifications for all of them.

    Returns:
        (L, K), or (L, V, K).
    """
    first, more = expert_time_terms(system, mb)
    wire = system.transfer_s
    if first.ndim == 1:
        return first[:, None] * load.active + (more + wire)[:, None] * load.tokens
    return first[..., None] * load.active[:, None] + (more + wire)[..., None] * load.tokens[:, None]


@dataclass(frozen=True, eq=False)
class Options:
    """All choices (Y, z) of each layer for one remote set. V specifications, Z replicas.

    Attributes:
        remote: (L, K).
        used: (L,) layers with remote experts; the others have no choice.
        spec_mb: (V,).
        slowest_s: (L, V, Z) slowest replica with its overhead.
        billed_s: (L, V, Z) all replicas together (sum of ZT).
        calls_s: (L, V, R) remote seconds of a decode token with r = 0..top_k remote experts.
        histogram: (L, R) decode tokens.
        allowed: (L, V, Z) by 10e and 10g.
        extra_usd: (L, V, Z) fees of the remote functions and what rounding adds to their bill.
    """

    remote: NDArray[np.bool_]
    used: NDArray[np.bool_]
    spec_mb: Floats
    slowest_s: Floats
    billed_s: Floats
    calls_s: Floats
    histogram: Floats
    allowed: NDArray[np.bool_]
    extra_usd: Floats


def layer_options(
    system: eq.SystemModel,
    load: Load,
    remote: NDArray[np.bool_],
    decode_invocation: str = "per_call",
) -> Options:
    """Tabulate the choices of each layer."""
    specs = system.remote_specs_mb
    jobs = np.where(remote[:, None], job_times(system, load, specs[None]), 0.0)
    placed = replica_loads(
        jobs,
        (load.tokens * system.token_mb)[:, None],
        system.z_max,
        load.trem_s[:, None],
        system.granularity_s,
    )
    used = np.asarray(remote.any(axis=1))
    trem = load.trem_s[:, None, None]
    slowest = np.where(placed.invoked > 0, placed.slowest_s + trem, 0.0)
    billed = jobs.sum(axis=2)[..., None] + placed.invoked * trem
    call = system.expert_cpu_s(specs, 1) + system.transfer_s
    calls = eq.call_seconds(call, load.trem_s[:, None], system.top_k, decode_invocation)
    need = eq.remote_memory_mb(system, load.tokens, remote)
    allowed = (need[:, None] <= specs)[..., None] & (placed.payload_mb <= system.payload_mb)
    histogram = load.histogram(remote, system.top_k)
    times = histogram @ eq.call_invocations(system.top_k, decode_invocation)
    extra = system.invocation_usd * (placed.invoked + times[:, None, None])
    if system.granularity_s > 0.0:
        added = call_rounding_s(system, load, call, load.trem_s[:, None], decode_invocation)
        decode = np.einsum("lr,lvr->lv", histogram, added)
        memory = np.where(used[:, None], specs, 0.0)[..., None]
        extra = extra + system.price_cpu * memory * (placed.rounding_s + decode[..., None])
    return Options(
        remote,
        used,
        specs,
        slowest,
        billed,
        calls,
        histogram,
        allowed,
        extra,
    )


def local_prefill_s(
    system: eq.SystemModel, load: Load, remote: NDArray[np.bool_], main_mb: float
) -> Floats:
    """(L,) local experts one after another in prefill."""
    first, more = expert_time_terms(system, main_mb)
    return np.where(remote, 0.0, first * load.active + more * load.tokens).sum(axis=1)


def option_terms(
    system: eq.SystemModel, load: Load, options: Options, main_mb: float
) -> tuple[Floats, Floats, Floats]:
    """Times and cost of each option given W.

    Returns:
        Prefill seconds (L, V, Z) and decode seconds (L, V) of the expert parts, and USD
        (L, V, Z) with the main function's rate on those seconds, fees and rounding of the remote
        functions included.
    """
    local = local_prefill_s(system, load, options.remote, main_mb)
    prefill = np.maximum(local[:, None, None], options.slowest_s)
    prefill = prefill + 2.0 * system.swap_s(load.n_in)
    own = np.arange(system.top_k, -1, -1) * system.expert_cpu_s(main_mb, 1)
    step = np.maximum(own, options.calls_s) + 2.0 * system.swap_s(system.top_k)
    decode = np.einsum("lr,lvr->lv", options.histogram, step)
    calls = np.einsum("lr,lvr->lv", options.histogram, options.calls_s)
    rate = eq.main_rate_usd_s(system, load.n_in, load.n_out, main_mb)
    memory = np.where(options.used[:, None], options.spec_mb, 0.0)
    cost = rate * (prefill + decode[..., None])
    cost = cost + system.price_cpu * memory[..., None] * (options.billed_s + calls[..., None])
    return prefill, decode, cost + options.extra_usd


def non_expert_s(system: eq.SystemModel, load: Load) -> tuple[float, float]:
    """Seconds of the non-expert parts: prefill and decoding."""
    prefill = eq.prefill_non_expert_s(system, load.n_in)
    return prefill, load.n_out * system.layers * system.gpu_layer_s(1)


def predict(
    system: eq.SystemModel,
    load: Load,
    plan: eq.Plan,
    *,
    decode_invocation: str = "per_call",
    cold: eq.Cold | None = None,
    bill_cold_start: bool = False,
    load_shared: bool = False,
    ttft_limit_s: float = np.inf,
    tpot_limit_s: float = np.inf,
) -> eq.Outcome:
    """The (expected) outcome of a plan; equal to `evaluate_plan` for a known load.

    Args: as `servegym.envs.serverless_moe.equations.evaluate_plan`.
    """
    remote, used = plan.remote, plan.remote.any(axis=1)
    safe_mb = np.where(used, plan.remote_mb, 1024.0)
    jobs = np.where(remote, job_times(system, load, safe_mb), 0.0)
    seconds = eq.replica_sums(plan, jobs)
    seconds = np.where(seconds > 0, seconds + load.trem_s[:, None], 0.0)
    local = local_prefill_s(system, load, remote, plan.main_mb)
    expert = np.maximum(local, seconds.max(axis=1)).sum()
    expert += len(remote) * 2.0 * system.swap_s(load.n_in)
    fixed_prefill, fixed_decode = non_expert_s(system, load)
    prefill = fixed_prefill + float(expert)

    r = np.arange(system.top_k + 1)
    call = system.expert_cpu_s(safe_mb, 1) + system.transfer_s
    calls = eq.call_seconds(call, load.trem_s, system.top_k, decode_invocation)
    own = (system.top_k - r) * system.expert_cpu_s(plan.main_mb, 1)
    histogram = load.histogram(remote, system.top_k)
    steps = np.maximum(own, calls) + 2.0 * system.swap_s(system.top_k)
    decode = fixed_decode + float((histogram * steps).sum())

    if cold is None:
        cold = eq.Cold(True, np.where(used, plan.replicas, 0))
    main_start, starts = eq.cold_starts_s(system, plan, cold, load_shared)
    rate = eq.main_rate_usd_s(system, load.n_in, load.n_out, plan.main_mb)
    price, cold_usd, rounding_usd = system.price_cpu, 0.0, 0.0
    if bill_cold_start:
        cold_usd = main_start * rate
        cold_usd += price * float((cold.replicas * plan.remote_mb * starts).sum())
    times = eq.call_invocations(system.top_k, decode_invocation)
    invoked = 1.0 + float((seconds > 0).sum()) + float((histogram * times).sum())
    if system.granularity_s > 0.0:
        main_more = system.rounding_s(prefill + decode)
        more = system.rounding_s(seconds).sum(axis=1)
        added = call_rounding_s(system, load, call, load.trem_s, decode_invocation)
        more += (histogram * added).sum(axis=1)
        if bill_cold_start:
            main_more += system.rounding_s(main_start)
            more += cold.replicas * system.rounding_s(starts)
        rounding_usd = float(rate * main_more + price * (plan.remote_mb * more).sum())
    return eq.Outcome.of(
        n_out=load.n_out,
        prefill_s=prefill,
        decode_s=decode,
        cold_s=max(main_start, float(starts.max(initial=0.0))),
        usd=(
            (prefill + decode) * rate,
            price * float((plan.remote_mb * seconds.sum(axis=1)).sum()),
            price * float((plan.remote_mb * (histogram * calls).sum(axis=1)).sum()),
            cold_usd,
            invoked * system.invocation_usd,
            rounding_usd,
        ),
        invocations=invoked,
        broken=eq.violated(system, load.tokens, load.n_out, plan),
        ttft_limit_s=ttft_limit_s,
        tpot_limit_s=tpot_limit_s,
    )
