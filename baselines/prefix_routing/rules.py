"""Rules of load balancers, papers and gateways that have no file of numbers here."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._checks import real
from servegym.baselines.prefix_routing.policy import (
    Keep,
    Numbers,
    RulePolicy,
    View,
    extremes,
    least,
)
from servegym.baselines.prefix_routing.system import PrefixSystem
from servegym.baselines.protocol import Observation


def anywhere(view: View, keep: Keep) -> tuple[Numbers, Keep]:
    """All alike."""
    return np.zeros(keep.shape), keep


def least_load(view: View, keep: Keep) -> tuple[Numbers, Keep]:
    """Fewest requests in flight."""
    return view.in_flight, keep


def mooncake(view: View, keep: Keep) -> tuple[Numbers, Keep]:
    """Mooncake's rule: least estimated time to first token.

    argmin (prefill tokens in flight + L - m) / speed. arXiv 2407.00079, Algorithm 1, without the
    transfer of a longer match from another instance, which replicas that share no memory lack, and
    without the rejection of requests above the objective.
    """
    return (view.prefill_tokens + view.new_tokens()) / view.prefill_tokens_per_s, keep


class Preble(RulePolicy):
    """Preble's E2: exploit a prompt that is mostly cached, else explore by load and prefill.

    If m > L - m for the best match, the least loaded of the replicas that have it; else
    argmin load + (L - m) / speed, in seconds. The load of a replica is the work routed to it in the
    last ``window_s``: for each request its uncached prompt / speed + its predicted output x seconds
    per output token.

    arXiv 2407.00023, Algorithm 1; project WukLab/preble,
    ``multi_node/global_scheduler_with_time.py`` @0c962c4 (3 minutes; 0.15 s a token until some are
    measured). Left out as in that file's defaults: the cost of evictions (``enable_eviction`` is
    False) and the moving of hot prefixes (its call is commented out).
    """

    def __init__(
        self, system: PrefixSystem, window_s: float = 180.0, seconds_per_token: float = 0.15
    ) -> None:
        super().__init__(system, "preble", self._cost, chance=False)
        self.window_s = real("window_s", window_s, 0.0, open_low=True)
        self.seconds_per_token = real("seconds_per_token", seconds_per_token, 0.0)

    def _size(self, num_envs: int, seed: int | None) -> None:
        super()._size(num_envs, seed)
        self._recent: list[deque[tuple[float, int, int, int]]] = [deque() for _ in range(num_envs)]
        # Tokens of prefill and of output in the window, by replica.
        self._tokens = np.zeros((2, num_envs, self.system.num_replicas))

    def episode_start(self, mask: NDArray[np.bool_]) -> None:
        """Forget what was routed."""
        self._tokens[:, mask] = 0
        for row in np.flatnonzero(mask):
            self._recent[row].clear()

    def _cost(self, view: View, keep: Keep) -> tuple[Numbers, Keep]:
        self._view = view  # `act` reads it again
        speed, new = view.prefill_tokens_per_s, view.new_tokens()
        measured = view.tpot_s.any(-1, keepdims=True)
        load = self._tokens[0] / speed
        load += self._tokens[1] * np.where(measured, view.tpot_s, self.seconds_per_token)
        best = least(-view.match_tokens, keep)
        matched = extremes(view.match_tokens, keep)[1]
        exploit = matched > view.prompt_tokens - matched
        return np.where(exploit, load, load + new / speed), np.where(exploit, best, keep)

    def act(self, observation: Observation, action_mask: Any) -> NDArray[np.int64]:
        """See `Policy.act`."""
        now = np.asarray(observation["time_s"])[:, 0]
        for row, recent in enumerate(self._recent):
            while recent and recent[0][0] < now[row] - self.window_s:
                _, replica, *tokens = recent.popleft()
                self._tokens[:, row, replica] -= tokens
        chosen = super().act(observation, action_mask)
        new, output = self._view.new_tokens(), self._view.predicted_tokens
        for row in np.flatnonzero(np.asarray(action_mask)[:, : self.system.num_replicas].any(-1)):
            replica = int(chosen[row])
            tokens = int(new[row, replica]), round(output[row, 0])
            self._recent[row].append((float(now[row]), replica, *tokens))
            self._tokens[:, row, replica] += tokens
        return chosen


def weighted_load(system: PrefixSystem, load_s: float = 0.005, power: float = 1.0) -> RulePolicy:
    """Least estimated time to first token plus requests in flight by the card's weight.

    argmin (prefill tokens in flight + L - m) / speed + load_s x (requests in flight + 1) / weight,
    the weight being how fast the replica decodes beside the fastest one, by its hardware profile,
    to the power of ``power``. A slow card's requests lose their TPOT before their TTFT shows it.
    Below the knee it keeps the TPOT of all cards; beyond it all cards lose theirs together.

    Args:
        system: The system.
        load_s: Seconds that a request in flight counts at the fastest card.
        power: Exponent of the weights; 0 counts requests alike.
    """
    load_s, power = real("load_s", load_s, 0.0), real("power", power, 0.0, 10.0)
    weight = (system.decode_speed / system.decode_speed.max()) ** power
    decide = partial(_weighted_load, load_s=load_s, weight=weight)
    return RulePolicy(system, "weighted_load", decide, chance=False)


def _weighted_load(view: View, keep: Keep, load_s: float, weight: Numbers) -> tuple[Numbers, Keep]:
    ttft_s, _ = mooncake(view, keep)
    return ttft_s + load_s * (view.in_flight + 1) / weight, keep


def lmetric(view: View, keep: Keep) -> tuple[Numbers, Keep]:
    """LMetric: least new prefill x (load + 1).

    argmin (L - m) * (requests in flight + 1), ties by load, then by new prefill, then by index.
    arXiv 2603.15202; project sgl-project/sglang, ``sgl-model-gateway/src/policies/lmetric.rs``
    @acaa759. It has no constant to tune.
    """
    new, load = view.new_tokens(), view.in_flight
    return new, least(load, least(new * (load + 1), keep))


def production_stack_prefix(view: View, keep: Keep) -> tuple[Numbers, Keep]:
    """production-stack's ``prefixaware``: the longest match, random ties, whatever the load.

    Project vllm-project/production-stack, ``src/vllm_router/routers/routing_logic.py`` @008a23b
    (``PrefixAwareRouter``). Its trie of characters never evicts: give the environment an index
    without a limit to have that too.
    """
    return -view.match_tokens, keep


def ray_prefix_aware(view: View, keep: Keep) -> tuple[Numbers, Keep]:
    """Ray's ``PrefixCacheAffinityRouter``: the best match, or the smallest tree below 10 %.

    If the best m / L < .1, the replicas with the smallest tree, else those with the best match; of
    several the least load in requests in flight, random ties.

    Project ray-project/ray,
    ``python/ray/llm/_internal/serve/request_router/prefix_aware/prefix_aware_router.py``, with its
    threshold of imbalance, infinity (@1eec25d, an early version, had 10). Its tree of characters
    does not evict by default.
    """
    match = view.match_tokens
    matched = extremes(match, keep)[1] >= 0.1 * view.prompt_tokens
    return view.in_flight, np.where(matched, least(-match, keep), least(view.index_tokens, keep))
