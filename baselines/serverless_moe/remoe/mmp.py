"""Algorithm 2 (MMP): the remote ratio b and the main function's memory from worst cases."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servegym.baselines.serverless_moe.remoe.bounds import corollary1, theorem1
from servegym.envs.serverless_moe.kernel import cost
from servegym.envs.serverless_moe.loads import Load
from servegym.envs.serverless_moe.plans import smallest_specs
from servegym.envs.serverless_moe.system import SystemModel

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class WorstCases:
    """The worst case of every ratio ``m / K``, m = K, K - 1, ..., 0 (the order of Algorithm 2).

    Attributes:
        members: (C,) m, remote experts of each layer.
        ratio: (C,) b.
        main_mb: (C,) specification of the main function.
        ttft_s: (C,) worst TTFT, cold start included.
        tpot_s: (C,) worst TPOT.
        excess: (C,) largest relative excess over the two limits; feasible where it is <= 0.
    """

    members: NDArray[np.int64]
    ratio: Floats
    main_mb: Floats
    ttft_s: Floats
    tpot_s: Floats
    excess: Floats

    @property
    def feasible(self) -> NDArray[np.bool_]:
        """(C,) both limits are met in the worst case."""
        return self.excess <= 0.0

    def only(self, members: ArrayLike) -> WorstCases:
        """The cases of these numbers of remote experts alone."""
        selected = np.isin(self.members, members)
        return WorstCases(*(getattr(self, field.name)[selected] for field in fields(self)))

    def chosen(self) -> int:
        """What Algorithm 2 returns, as an index: the largest feasible b; else the least excess.

        With loose limits that is b = 1, which need not be the cheapest.
        """
        good = np.flatnonzero(self.feasible)
        return int(good[0]) if good.size else int(np.argmin(self.excess))


def worst_cases(
    system: SystemModel,
    load: Load,
    ttft_limit_s: float = np.inf,
    tpot_limit_s: float = np.inf,
    *,
    max_tokens: int | None = None,
) -> WorstCases:
    """Worst-case times of every b (lines 4-9 of Algorithm 2).

    Remote calls follow the corrected Corollary 1 in prefill and, over all steps, in decoding; the
    other calls are local. Remote functions have their largest memory and z_max replicas, the
    slowest of which is bounded by Theorem 4 with the corrected Theorem 1 for the largest job; the
    overhead is its 95 % quantile. The limits are those of 10b and 10c; ``max_tokens`` is Nmax of
    line 1, tokens that the main function must hold, by default n_out.
    """
    experts, top_k = system.num_experts, system.top_k
    m = np.arange(experts, -1, -1)
    tokens = load.n_out if max_tokens is None else int(max_tokens)
    need = system.token_mb * tokens + (experts - m) * float(system.expert_mb.sum())
    # Line 8: no less than the largest remote memory, so that local experts are not the slower.
    need = np.maximum(need, float(system.remote_specs_mb[-1]))
    main_mb = smallest_specs(system.main_specs_mb, need - 1e-9)

    big, wire = system.expert_law(system.remote_specs_mb[-1]), cost.transfer_s(system)
    near = system.expert_law(main_mb)
    trem = load.trem_worst_s

    calls = corollary1(load.n_in, m, experts, top_k)
    total = cost.experts_s(*big, wire, np.minimum(m, calls), calls)
    single = np.minimum(theorem1(load.n_in, experts, top_k), load.n_in)
    largest = np.where(calls > 0, cost.experts_s(*big, wire, 1.0, np.minimum(single, calls)), 0.0)
    z = np.clip(m, 1, system.z_max)
    slowest = (z - 1.0) / z * largest + total / z
    local_calls = load.n_in * top_k - calls
    local = cost.experts_s(*near, 0.0, np.minimum(experts - m, local_calls), local_calls)
    remote = np.where(m > 0, slowest, 0.0)[:, None] + np.where(m > 0, 1.0, 0.0)[:, None] * trem
    prefill = cost.layer_s(system, local[:, None], remote, load.n_in).sum(axis=1)
    prefill = prefill + system.layers * cost.block_s(system, load.n_in)

    steps = max(load.n_out, 1)
    r = corollary1(load.n_out, m, experts, top_k) / steps
    # Of a fraction of a call: not what a token takes, but what tokens take in the mean.
    invoked = r if system.per_call else np.minimum(r, 1.0)
    remote = (r * (big[0] + wire))[:, None] + invoked[:, None] * trem
    decode = cost.layer_s(system, ((top_k - r) * near[0])[:, None], remote, top_k).sum(axis=1)
    tpot = decode + load.n_out * system.layers * cost.block_s(system, 1) / steps

    main_load = system.all_non_expert_mb + (experts - m) * float(system.expert_mb.sum())
    remote_load = m * float(system.expert_mb.max())
    if system.load_shared:
        main_load = remote_load = main_load + m * float(system.expert_mb.sum())
    main = cost.start_s(system, main_load)
    other = cost.start_s(system, remote_load)
    ttft = prefill + np.maximum(main, np.where(m > 0, other, 0.0))
    excess = np.maximum(ttft / ttft_limit_s, tpot / tpot_limit_s) - 1.0
    return WorstCases(m, m / experts, main_mb, ttft, tpot, excess)
