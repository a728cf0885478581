"""The placement algorithms as policies: plan every epoch, move if Eq. 4 says so.

Every row of a batch is planned from its own observation only. The first plan of an episode is
carried out at once where the environment makes that free; later ones are weighed by Eq. 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from servegym.baselines.expert_placement.eplb import eplb, eplb_global
from servegym.baselines.expert_placement.optimum import proxy_optimum
from servegym.baselines.expert_placement.placement import (
    Bools,
    Floats,
    adopts,
    expected_cost,
    migration_time,
    server_view,
)
from servegym.baselines.expert_placement.prism import prism, prism_printed
from servegym.baselines.expert_placement.simple import redundance, smartmoe, uniform, whole_layer
from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.baselines.protocol import BasePolicy, Observation
from servegym.envs._checks import choose
from servegym.envs.expert_placement.simulator import CACHES


class PlacementPolicy(BasePolicy):
    """Plans a placement of every row; see the module.

    Attributes:
        name: What tables call it.
        static: Whether it plans once an episode and never moves.
    """

    env_kwargs: Mapping[str, Any] = MappingProxyType({"action_mode": "placement"})
    static = False

    def __init__(self, system: PlacementSystem) -> None:
        self.system = system

    def plan(self, row: int, counts: Floats, current: Bools, first: bool) -> Bools | None:
        """The wished placement (G, L, E) of one row, or None to keep the current one.

        Args:
            row: Of the batch.
            counts: (N, L, E) since the last change.
            current: (G, L, E).
            first: Whether it is the first decision of an episode and free.
        """
        raise NotImplementedError

    def pays(self, counts: Floats, current: Bools, plan: Bools, view: View) -> bool:
        """Eq. 4 with the proxy: whether the plan's remote calls and loads cost less."""
        system = self.system
        if view.window_s <= 0:
            return False
        home, servers = system.gpu_server, system.cluster.num_servers
        old, new = (
            expected_cost(
                counts, server_view(z, home, servers), view.extra_s, system.epoch_s, view.window_s
            )
            for z in (current, plan)
        )
        return adopts(new, self.migration_s(current, plan), old)

    def migration_s(self, current: Bools, plan: Bools) -> float:
        """Eq. 3."""
        system = self.system
        return migration_time(current, plan, system.cluster.expert_bytes, system.load_bytes_s())

    def act(self, observation: Observation, action_mask: Any = None) -> Any:
        """See `Policy.act`.

        Returns:
            ``{"migrate": int64 (B,), "plan": int8 (B, G, L, E)}``.
        """
        batch = len(observation["counts"])
        wished = np.array(observation["placement"], dtype=np.int8)
        migrate = np.zeros(batch, dtype=np.int64)
        for b in range(batch):
            first = float(observation["progress"][b, 0]) <= 0.0
            if self.static and not first:
                continue
            counts = np.asarray(observation["counts"][b], dtype=np.float64)
            current = wished[b] > 0
            free = first and self.system.free_start
            found = self.plan(b, counts, current, free)
            if found is None:
                continue
            seconds = np.asarray(observation["seconds_per_token"][b], dtype=np.float64)
            view = View(seconds[:, 1] - seconds[:, 0], float(observation["window_s"][b, 0]))
            if free or self.static or self.pays(counts, current, found, view):
                migrate[b] = 1
                wished[b] = found
        return {"migrate": migrate, "plan": wished}


class View:
    """What Eq. 4 reads: extra seconds (N,) of a remote token and the window of the counts."""

    def __init__(self, extra_s: Floats, window_s: float) -> None:
        self.extra_s = extra_s
        self.window_s = window_s


class Keep(PlacementPolicy):
    """Never changes the placement that the episode starts with."""

    name = "keep"

    def act(self, observation: Observation, action_mask: Any = None) -> Any:
        """See `PlacementPolicy.act`."""
        plan = np.array(observation["placement"], dtype=np.int8)
        return {"migrate": np.zeros(len(plan), dtype=np.int64), "plan": plan}


class MoeInfinity(Keep):
    """MoE-Infinity: every server has all experts in host memory and caches some on its GPUs.

    A miss fetches the expert over PCIe at the fixed cost of a message; no server helps another. It
    is a way of serving, not a placement: the policy asks the environment for it and plans nothing.

    Args:
        system: Not used.
        cache: ``activation_aware``, ``lru`` or ``lfu``, see `simulator.make_plant`.
    """

    name = "moe_infinity"
    redirect = False

    def __init__(self, system: PlacementSystem, *, cache: str = "activation_aware") -> None:
        super().__init__(system)
        choose("cache", cache, CACHES)
        self.env_kwargs = MappingProxyType(
            {
                "action_mode": "placement",
                "serving": "offload",
                "cache": cache,
                "redirect": self.redirect,
            }
        )


class MoeInfinityLb(MoeInfinity):
    """`MoeInfinity` with requests redirected, as a whole, to the server that serves fewest."""

    name = "moe_infinity_lb"
    redirect = True


class _Drawn(PlacementPolicy):
    """A random placement, drawn for each row on its own."""

    draw: Callable[..., Bools]

    def reset(self, num_envs: int, seed: int | None = None) -> None:
        """See `Policy.reset`."""
        super().reset(num_envs, seed)
        streams = np.random.SeedSequence(seed, spawn_key=(1,)).spawn(num_envs)
        self._rows = [np.random.default_rng(stream) for stream in streams]

    def plan(self, row: int, counts: Floats, current: Bools, first: bool) -> Bools | None:
        """See `PlacementPolicy.plan`."""
        seed = int(self._rows[row].integers(1 << 31))
        return type(self).draw(counts, self.system.slots, self.system.gpu_server, seed=seed)


class Uniform(_Drawn):
    """Every expert once, evenly over the GPUs; never moves."""

    name = "uniform"
    static = True
    draw = staticmethod(uniform)


class Redundance(_Drawn):
    """`Uniform` with the free slots filled at random; never moves."""

    name = "redundance"
    static = True
    draw = staticmethod(redundance)


class RandomPlacement(_Drawn):
    """Control: another `Redundance` every epoch, whatever the loads cost."""

    name = "random"
    draw = staticmethod(redundance)

    def pays(self, counts: Floats, current: Bools, plan: Bools, view: View) -> bool:
        """Always."""
        return True


class _Counted(PlacementPolicy):
    """A function of counts, slots and GPUs."""

    place: Callable[..., Bools]

    def plan(self, row: int, counts: Floats, current: Bools, first: bool) -> Bools | None:
        """See `PlacementPolicy.plan`."""
        return type(self).place(counts, self.system.slots, self.system.gpu_server)


class WholeLayer(_Counted):
    """Whole layers on each server; never moves."""

    name = "whole_layer"
    static = True
    place = staticmethod(whole_layer)


class SmartMoe(_Counted):
    """SmartMoE's balance under Eq. 4."""

    name = "smartmoe"
    place = staticmethod(smartmoe)


class Eplb(_Counted):
    """Hierarchical EPLB under Eq. 4."""

    name = "eplb"
    place = staticmethod(eplb)


class EplbGlobal(_Counted):
    """Global EPLB under Eq. 4."""

    name = "eplb_global"
    place = staticmethod(eplb_global)


class Prism(_Counted):
    """Prism, corrected."""

    name = "prism"
    place = staticmethod(prism)


class PrismPrinted(_Counted):
    """Prism as printed; keeps the placement where that cannot cover every expert."""

    name = "prism_printed"

    def plan(self, row: int, counts: Floats, current: Bools, first: bool) -> Bools | None:
        """See `PlacementPolicy.plan`."""
        try:
            return prism_printed(counts, self.system.slots, self.system.gpu_server)
        except ValueError:
            return None


class ProxyOptimum(_Counted):
    """The optimum of Eq. 2 for the counts seen."""

    name = "proxy_optimum"
    place = staticmethod(proxy_optimum)
