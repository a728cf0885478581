"""What a request asks of the experts, known or predicted.

A `Load` holds per expert the probability of being called in prefill, the (expected) tokens, and by
remote set the (expected) decode tokens with r remote experts. The expert time is linear from one
token on, so expectations enter the equations exactly; only the slowest of several replicas is taken
at the expected times. Of a known request the numbers are the true ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servegym.envs.serverless_moe.records import Request
from servegym.envs.serverless_moe.system import SystemModel
from servegym.envs.workloads.expert_sets import bit_sets

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
        system: SystemModel,
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
    def known(cls, request: Request) -> Load:
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
            masks = bit_sets(remote)
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
    from scipy.special import ndtri

    factors = np.exp(sigma * ndtri((np.arange(OVERHEADS) + 0.5) / OVERHEADS))
    return factors / factors.mean()
