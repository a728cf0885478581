"""Policies where fleets are drawn: one policy for the system of each row, made when it is seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.llm_routing.system import FleetSystem, RoutingSystem
from servegym.baselines.protocol import BasePolicy, Observation, Policy


def per_fleet(factory: Callable[..., Policy], system: RoutingSystem, **kwargs: Any) -> Policy:
    """The policy of a system, or where its fleets are drawn a `PerFleet` of such policies."""
    if isinstance(system, FleetSystem):
        return PerFleet(factory, system, kwargs)
    return factory(system, **kwargs)


class PerFleet(BasePolicy):
    """Gives each row a policy of the row's own system, without the padding.

    A row's policy is made anew when its fleet changes. Where all episodes have the same fleet, one
    policy decides for all rows.

    Args:
        factory: Makes a policy of a `RoutingSystem`.
        system: The systems.
        kwargs: Parameters of the policy.

    Raises:
        ValueError: As ``factory`` does for a bad parameter.
    """

    def __init__(
        self, factory: Callable[..., Policy], system: FleetSystem, kwargs: Mapping[str, Any]
    ) -> None:
        super().__init__(system)
        self._factory, self._kwargs = factory, dict(kwargs)
        # Of any fleet, so that parameters are checked before one is seen.
        features = np.zeros((2, 11), dtype=np.float32)
        features[:, 0], features[:, 3:6] = 1.0, (10_000.0, 5.0, 5.0)
        sample = factory(system.of(features), **self._kwargs)
        self.name, self.clairvoyant = sample.name, sample.clairvoyant
        self.env_view, self.env_kwargs = sample.env_view, sample.env_kwargs

    def reset(self, num_envs: int, seed: int | None = None) -> None:
        """See `Policy.reset`."""
        self._size(num_envs, seed)
        every = np.arange(self.num_envs)
        self._groups = [every] if self.system.fixed else list(every[:, None])
        self._keys: list[bytes | None] = [None] * len(self._groups)
        self._inner: list[Policy | None] = [None] * len(self._groups)
        self._seeds = self.rng.integers(1 << 31, size=len(self._groups)).tolist()

    def episode_start(self, mask: NDArray[np.bool_]) -> None:
        """See `Policy.episode_start`."""
        for rows, inner in zip(self._groups, self._inner, strict=True):
            if inner is not None and mask[rows].any():
                inner.episode_start(mask[rows])

    def act(self, observation: Observation, action_mask: Any) -> NDArray[np.int64]:
        """See `Policy.act`."""
        if len(action_mask) != self.num_envs:
            self.reset(len(action_mask))
        actions = np.zeros(self.num_envs, dtype=np.int64)
        for k, rows in enumerate(self._groups):
            fleet = np.asarray(observation["fleet"][rows[0]])
            if not fleet[0, 0]:  # a row in which no episode was begun
                continue
            system, key = self.system.of(fleet), fleet.tobytes()
            inner = self._inner[k]
            if inner is None or key != self._keys[k]:
                inner = self._factory(system, **self._kwargs)
                inner.reset(len(rows), self._seeds[k])
                self._inner[k], self._keys[k] = inner, key
            mask = np.asarray(action_mask)[rows, : system.num_experts + 1]
            actions[rows] = inner.act(_without_padding(observation, rows, system), mask)
        return actions


def _without_padding(
    observation: Observation, rows: NDArray[np.intp], system: RoutingSystem
) -> dict[str, NDArray[Any]]:
    """Some rows of a Dict observation, with as many experts and places as the system has."""
    count = system.num_experts
    sizes = {"running": system.running_capacity, "waiting": system.waiting_capacity}
    sizes |= {f"{name}_mask": size for name, size in sizes.items()}
    whole = ("latency_requirement", "load")
    obs = {name: np.asarray(observation[name])[rows] for name in whole if name in observation}
    for name in ("request", "experts", *sizes):
        part = np.asarray(observation[name])[rows, :count]
        obs[name] = part[:, :, : sizes[name]] if name in sizes else part
    return obs
