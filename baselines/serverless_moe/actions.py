"""The expected reward of every global action of a serverless environment at once.

An action is (b, order, W headroom, Y headroom, z headroom). The table follows the environment's
own rules: remote sets by predicted or shared order, least memory and least replicas plus headroom;
`servegym.baselines.serverless_moe.action_values` says what is approximate.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.serverless_moe import kernel
from servegym.baselines.serverless_moe.action_values import Choices, Values, busiest, value
from servegym.baselines.serverless_moe.loads import Load
from servegym.baselines.serverless_moe.selection import least_used_first
from servegym.baselines.serverless_moe.system import ServerlessSystem
from servegym.envs.serverless_moe import equations as eq

Floats = NDArray[np.float64]
CACHED_PREDICTIONS = 512


@dataclass(frozen=True, eq=False)
class Sets:
    """What depends on the prediction alone. S = levels x 2 orders, the order changing fastest.

    Attributes:
        remote: bool (S, L, K).
        replica: int8 (S, L, Z, K) replica of each expert if there are 1..Z.
        share: (S, L) predicted share of the remote experts.
        top: (S, L, Z) predicted share of the most loaded replica.
    """

    remote: NDArray[np.bool_]
    replica: NDArray[np.int8]
    share: Floats
    top: Floats


class ActionTable:
    """Evaluates all global actions of a system for one request at a time."""

    def __init__(self, system: ServerlessSystem) -> None:
        self.system = system
        model = system.model
        self._cache: OrderedDict[bytes, Sets] = OrderedDict()
        self.members = np.repeat(np.asarray(system.levels), 2)
        most = system.max_output_tokens
        local = (model.num_experts - self.members) * float(model.expert_mb.sum())
        specs = model.main_specs_mb
        least = eq.smallest_specs(specs, local + model.token_mb * most)
        self.main_mb = eq.smallest_specs(specs, least[:, None] + system.w_headroom_mb)  # (S, W)
        self.local_mb = np.asarray(local + model.all_non_expert_mb, np.float64)

    def sets(self, frequency: NDArray) -> Sets:
        """Remote sets and replicas of a predicted activation matrix (L, K), cached."""
        key = np.ascontiguousarray(frequency, dtype=np.float32).tobytes()
        found = self._cache.get(key)
        if found is not None:
            self._cache.move_to_end(key)
            return found
        model = self.system.model
        share = np.asarray(frequency, np.float64)
        orders = np.stack([least_used_first(share), least_used_first(self.system.shared)])
        rank = np.argsort(orders, axis=2)  # place of each expert among the least used
        remote = rank[None] < np.asarray(self.system.levels)[:, None, None, None]
        remote = remote.reshape(-1, *share.shape)
        tokens = model.top_k * self.system.mean_prompt_tokens * share
        middle = float(np.median(model.remote_specs_mb))
        jobs = np.where(remote, eq.replica_jobs_s(model, middle, tokens), 0.0)
        replica = kernel.lpt_rows(jobs.reshape(-1, share.shape[1]), model.z_max)
        replica = replica.reshape(*remote.shape[:2], model.z_max, -1)
        inside = np.where(remote, share, 0.0)
        found = Sets(remote, replica, inside.sum(axis=2), busiest(replica, inside))
        self._cache[key] = found
        if len(self._cache) > CACHED_PREDICTIONS:
            self._cache.popitem(last=False)
        return found

    def forget(self) -> None:
        """Drop what is cached of predictions, so that the next decision takes its full time."""
        self._cache.clear()

    def memory_mb(self, sets: Sets, n_in: float) -> Floats:
        """Y of each layer and headroom, (S, L, Y); of no meaning where nothing is remote."""
        model, specs = self.system.model, self.system.model.remote_specs_mb
        need = model.expert_mb * self.members[:, None] + model.token_mb * model.top_k * n_in * (
            sets.share
        )
        least = eq.smallest_specs(specs, need)
        return eq.smallest_specs(specs, least[..., None] + self.system.y_headroom_mb)

    def replicas(self, sets: Sets, n_in: float) -> NDArray[np.int64]:
        """Replicas of each layer and headroom, (S, L, Z)."""
        model = self.system.model
        body = sets.top * (model.top_k * n_in * model.token_mb)
        fits = body <= model.payload_mb
        least = np.where(fits.any(axis=2), fits.argmax(axis=2) + 1, model.z_max)
        return np.minimum(least[..., None] + self.system.z_headroom, model.z_max)

    def choices(self, frequency: NDArray, n_in: float) -> Choices:
        """All actions for a prompt of ``n_in`` tokens."""
        sets = self.sets(frequency)
        return Choices(
            self.members,
            np.arange(self.members.size) % 2,
            sets.remote,
            sets.replica,
            sets.top,
            self.main_mb,
            self.local_mb,
            self.memory_mb(sets, n_in),
            self.replicas(sets, n_in),
        )

    def values(self, load: Load, frequency: NDArray, **limits: Any) -> Values:
        """Expected reward of every global action, arrays (levels, 2, W, Y, Z).

        Args:
            load: What is expected, or the true load (then the values are clairvoyant).
            frequency: (L, K) predicted frequencies that the environment plans with.
            **limits: As `servegym.baselines.serverless_moe.action_values.value`.
        """
        found = value(self.system, self.choices(frequency, load.n_in), load, **limits)
        shape = (len(self.system.levels), 2, *found.reward.shape[1:])
        arrays = (found.reward, found.cost_usd, found.ttft_s, found.tpot_s)
        return Values(*(x.reshape(shape) for x in arrays), mix_usd=found.mix_usd)

    def reward(
        self, load: Load, frequency: NDArray, action: NDArray[np.int64], **limits: Any
    ) -> float:
        """Expected reward of one action, global or with an action a layer; else as `values`."""
        level, order, w = (int(x) for x in action[:3])
        y, z = np.split(np.asarray(action[3:]), 2)
        layers = self.system.model.moe_layers
        y, z = np.broadcast_to(y, layers), np.broadcast_to(z, layers)
        one = self.choices(frequency, load.n_in).one(2 * level + order, w, y, z)
        return float(value(self.system, one, load, **limits).reward[1, 0, 0, 0])
