"""What a request is, how it is served and what that took: the records of ``outcomes``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from servegym.envs.serverless_moe.kernel.cost import Bill
from servegym.envs.workloads.activations import Activations
from servegym.envs.workloads.expert_sets import set_bits

CONSTRAINTS = ("main_memory", "remote_memory", "payload", "replicas", "specification")
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


def recorded_request(
    activations: Activations, prompt: int, offset: int, n_in: int, n_out: int, trem_s: np.ndarray
) -> Request:
    """A request that walks round and round the recorded tokens of a prompt, from ``offset`` on."""
    start, end = activations.bank_start[prompt : prompt + 2]
    bank = activations.bank[start:end]
    places = (offset + np.arange(n_in + n_out)) % len(bank)
    times = np.bincount(places[:n_in], minlength=len(bank))
    counts = np.tensordot(times, set_bits(bank, activations.model.experts), axes=(0, 0))
    return Request(counts.astype(np.int64), bank[places[n_in:]], trem_s, n_in)


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
    """What serving a request took.

    Attributes:
        bill: times and costs; expected ones if the load is a prediction.
        n_out: generated tokens after the first.
        broken: whether each of :data:`CONSTRAINTS` is violated.
        ttft_limit_s: 10b.
        tpot_limit_s: 10c.
    """

    bill: Bill
    n_out: int
    broken: dict[str, bool]
    ttft_limit_s: float
    tpot_limit_s: float

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.bill.prefill_s + self.bill.cold_s

    @property
    def tpot_s(self) -> float:
        """Time of a token after the first."""
        return self.bill.decode_s / self.n_out if self.n_out else 0.0

    @property
    def cost_usd(self) -> float:
        """Sum of the six costs."""
        return self.bill.cost_usd

    @property
    def violations(self) -> dict[str, bool]:
        """Whether ``ttft``, ``tpot`` and each of :data:`CONSTRAINTS` is violated."""
        late = {"ttft": self.ttft_s > self.ttft_limit_s, "tpot": self.tpot_s > self.tpot_limit_s}
        return self.broken | {name: bool(is_late) for name, is_late in late.items()}

    @property
    def feasible(self) -> bool:
        """Whether 10d-10g and 10i hold (the SLOs apart)."""
        return not any(self.broken.values())
