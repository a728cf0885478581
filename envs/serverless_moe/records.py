"""What a request is, how it is served and what that took: the nouns of ``equations``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CONSTRAINTS = (
    "main_memory",
    "remote_memory",
    "payload",
    "replicas",
    "specification",
)
"""10f, 10e, 10g, 10i and 10d."""


@dataclass(frozen=True, eq=False)
class Request:
    """What one request does to the model.

    Attributes:
        prefill_counts: int ``(L, K)`` prompt tokens of each expert; each layer sums to
            ``n_in * top_k``.
        decode_sets: uint64 ``(N_out, L)`` expert set of each generated token as a bit mask.
        trem_s: float64 ``(L,)`` invocation overhead of each layer's remote function, warm.
        n_in: prompt tokens.
    """

    prefill_counts: np.ndarray
    decode_sets: np.ndarray
    trem_s: np.ndarray
    n_in: int

    @property
    def n_out(self) -> int:
        """Generated tokens after the first one."""
        return len(self.decode_sets)


@dataclass(eq=False)
class Plan:
    """How one request is served.

    Attributes:
        remote: bool ``(L, K)`` x, whether an expert is remote.
        main_mb: W, memory of the main function.
        remote_mb: float64 ``(L,)`` Y_l; 0 where a layer has no remote expert.
        replicas: int64 ``(L,)`` z_l; 0 where a layer has no remote expert.
        assignment: int64 ``(L, K)`` replica of each remote expert, -1 for local ones.
    """

    remote: np.ndarray
    main_mb: float
    remote_mb: np.ndarray
    replicas: np.ndarray
    assignment: np.ndarray


@dataclass(frozen=True, eq=False)
class Cold:
    """Which functions start cold.

    Attributes:
        main: whether the main function does.
        replicas: int64 ``(L,)`` how many replicas of each remote function do.
    """

    main: bool
    replicas: np.ndarray


@dataclass(frozen=True, eq=False)
class Outcome:
    """What serving a request took. Seconds and USD.

    Attributes:
        n_out: generated tokens after the first.
        prefill_s: PT, Eq. 1.
        decode_s: GT, Eq. 4.
        cold_s: cold start before the prefill.
        cost_main_usd: Eq. 6.
        cost_prefill_usd: Eq. 8.
        cost_decode_usd: Eq. 9.
        cost_cold_usd: billed cold starts, 0 unless ``bill_cold_start``.
        cost_fees_usd: fees of the invocations, 0 unless the system has some.
        cost_rounding_usd: what rounding adds to billed durations, 0 unless the system rounds.
        invocations: of all functions; an expected number if the load is a prediction.
        broken: whether each of :data:`CONSTRAINTS` is violated.
        ttft_limit_s: 10b.
        tpot_limit_s: 10c.
    """

    n_out: int
    prefill_s: float
    decode_s: float
    cold_s: float
    cost_main_usd: float
    cost_prefill_usd: float
    cost_decode_usd: float
    cost_cold_usd: float
    cost_fees_usd: float
    cost_rounding_usd: float
    invocations: float
    broken: dict[str, bool]
    ttft_limit_s: float
    tpot_limit_s: float

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.prefill_s + self.cold_s

    @property
    def tpot_s(self) -> float:
        """Time of a token after the first."""
        return self.decode_s / self.n_out if self.n_out else 0.0

    @property
    def cost_usd(self) -> float:
        """Sum of the six costs."""
        parts = (self.cost_main_usd, self.cost_prefill_usd, self.cost_decode_usd)
        return sum((*parts, self.cost_cold_usd, self.cost_fees_usd, self.cost_rounding_usd))

    @property
    def violations(self) -> dict[str, bool]:
        """Whether ``ttft``, ``tpot`` and each of :data:`CONSTRAINTS` is violated."""
        late = {"ttft": self.ttft_s > self.ttft_limit_s, "tpot": self.tpot_s > self.tpot_limit_s}
        return self.broken | {name: bool(is_late) for name, is_late in late.items()}

    @property
    def feasible(self) -> bool:
        """Whether 10d-10g and 10i hold (the SLOs apart)."""
        return not any(self.broken.values())
