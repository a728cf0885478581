"""The placement algorithms as policies: plan every epoch, migrate if that pays by Eq. 4.

Every row of a batch is planned from its own observation only. The first plan of an episode is
carried out at once where the environment makes that free; later ones are weighed by Eq. 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from servegym._checks import choose, whole
from servegym.baselines.expert_placement.feasibility import Bools, Floats, assign_gpus
from servegym.baselines.expert_placement.initial_placement import SWAPS, TRIES, best_start
from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.baselines.protocol import BasePolicy, Observation
from servegym.envs.expert_placement.simulator import CACHES, ROUTERS


class PlacementPolicy(BasePolicy):
    """Plans a placement of every row; see the module.

    Attributes:
        name: What tables call it.
        static: Whether it plans once an episode and never moves.
    """

    env_view = "graph"
    env_kwargs: Mapping[str, Any] = MappingProxyType({"action_mode": "placement"})
    static = False

    def __init__(self, system: PlacementSystem) -> None:
        self.system = system

    def plan(self, row: int, counts: Floats) -> Bools | None:
        """The wished placement (G, L, E) of a row of the batch, or None to keep the current one.

        ``counts`` (N, L, E) are since the last change.
        """
        raise NotImplementedError

    def migration_pays(
        self, counts: Floats, current: Bools, plan: Bools, extra_s: Floats, window_s: float
    ) -> bool:
        """Eq. 4: whether the plan's remote calls and loads cost less until the next decision.

        Slots are counted by GPU and then added, and an expert on another GPU of the same server is
        local. ``counts`` (N, L, E) were taken over ``window_s``, ``extra_s`` (N,) is what a remote
        token takes more than a local one.
        """
        if window_s <= 0:
            return False
        system, cluster = self.system, self.system.cluster

        def remote_s(placement: Bools) -> float:
            view = cluster.server_view(placement)
            remote = np.sum(counts, where=~view, axis=(1, 2), dtype=np.float64)
            return float(system.arguments.epoch_s / window_s * (extra_s * remote).sum())

        # Eq. 3: seconds of loading, added over all GPUs; experts that go cost nothing.
        loads = (plan & ~current).sum(axis=(1, 2)) * float(cluster.expert_bytes)
        migration_s = float((loads / system.load_bytes_s()).sum())
        return remote_s(plan) + migration_s < remote_s(current)

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
            wish = self.plan(b, counts)
            if wish is None:
                continue
            at_once = self.static or (first and self.system.arguments.free_start)
            seconds = np.asarray(observation["seconds_per_token"][b], dtype=np.float64)
            window_s = float(observation["window_s"][b, 0])
            extra_s = seconds[:, 1] - seconds[:, 0]
            if at_once or self.migration_pays(counts, wished[b] > 0, wish, extra_s, window_s):
                migrate[b] = 1
                wished[b] = wish
        return {"migrate": migrate, "plan": wished}


class KeepPlacement(PlacementPolicy):
    """Never changes the placement that the episode starts with."""

    name = "keep"

    def plan(self, row: int, counts: Floats) -> Bools | None:
        """See `PlacementPolicy.plan`."""
        return None


class MoeInfinity(KeepPlacement):
    """MoE-Infinity: every server has all experts in host memory and caches some on its GPUs.

    A miss fetches the expert over PCIe, by default at the fixed cost of a message; no server helps
    another. It is a way of serving, not a placement: the policy asks the environment for it and
    plans nothing.

    Args:
        system: Not used.
        cache: ``activation_aware``, ``lru`` or ``lfu``, see `SimulatorArguments`.
        router: Which server takes a request, see there; default: the environment's.
    """

    name = "moe_infinity"

    def __init__(
        self, system: Any, *, cache: str = "activation_aware", router: str | None = None
    ) -> None:
        super().__init__(system)
        cache = choose("cache", cache, CACHES)
        arguments = {"action_mode": "placement", "serving": "offload", "cache": cache}
        if router is not None:
            arguments["router"] = choose("router", router, ROUTERS)
        self.env_kwargs: Mapping[str, Any] = MappingProxyType(arguments)


class RandomPlacement(PlacementPolicy):
    """A random placement, drawn for each row on its own.

    Args:
        system: The cluster.
        draw: Makes it of counts, slots, GPUs and a seed.
        static: Whether it stays for an episode; else another one comes every epoch, whatever the
            loads cost.
    """

    def __init__(
        self, system: PlacementSystem, draw: Callable[..., Bools], static: bool = True
    ) -> None:
        super().__init__(system)
        self.draw, self.static = draw, static

    def reset(self, num_envs: int, seed: int | None = None) -> None:
        """See `Policy.reset`."""
        super().reset(num_envs, seed)
        # A source of chance for each row, apart from those of environments seeded alike.
        streams = np.random.SeedSequence(seed, spawn_key=(1,)).spawn(num_envs)
        self._rows = [np.random.default_rng(stream) for stream in streams]

    def plan(self, row: int, counts: Floats) -> Bools | None:
        """See `PlacementPolicy.plan`."""
        seed, cluster = int(self._rows[row].integers(1 << 31)), self.system.cluster
        return self.draw(counts, cluster.slots, cluster.gpu_server, seed=seed)

    def migration_pays(self, *args: Any) -> bool:
        """Always."""
        return True


class CountsPlacement(PlacementPolicy):
    """A placement algorithm: a function of counts, slots and GPUs, under Eq. 4 unless static.

    Args:
        system: The cluster.
        place: The algorithm, see `feasibility`; None keeps the placement in use.
        static: Whether it plans once an episode and never moves.
        execution: Where layers run, if not where the environment says.
    """

    def __init__(
        self,
        system: PlacementSystem,
        place: Callable[..., Bools | None],
        static: bool = False,
        execution: str | None = None,
    ) -> None:
        super().__init__(system)
        self.place, self.static = place, static
        if execution is not None:
            self.env_kwargs = MappingProxyType({**self.env_kwargs, "execution": execution})

    def plan(self, row: int, counts: Floats) -> Bools | None:
        """See `PlacementPolicy.plan`."""
        return self.place(counts, self.system.cluster.slots, self.system.cluster.gpu_server)


class BestStart(PlacementPolicy):
    """One placement for all episodes: the best of a long search before the first of them.

    See `initial_placement.best_start`. It knows the load of the long run, changing tasks included,
    and no counts; it never moves.

    Args:
        system: The cluster, its recorded prompts and its load.
        tries: Annealed placements for each of three settings.
        steps: Proposals of each annealing; by default as `initial_placement.best_start`.
        swaps: Exchanges of two layers tried at last, by simulation.
        seed: Of the search.
    """

    name = "best_start"
    static = True

    def __init__(
        self,
        system: PlacementSystem,
        *,
        tries: int = TRIES,
        steps: int | None = None,
        swaps: int = SWAPS,
        seed: int = 0,
    ) -> None:
        super().__init__(system)
        self._search: dict[str, Any] = dict(tries=tries, steps=steps, swaps=swaps, seed=seed)
        for name, value in self._search.items():
            if value is not None:
                whole(name, value, 0)
        self._placement: Bools | None = None

    def plan(self, row: int, counts: Floats) -> Bools | None:
        """See `PlacementPolicy.plan`."""
        if self._placement is None:
            system, cluster = self.system, self.system.cluster
            view = best_start(system, **self._search)
            long_run_counts = np.einsum("nk,kle->nle", system.long_run_shares, system.task_counts)
            self._placement = assign_gpus(view, long_run_counts, cluster.slots, cluster.gpu_server)
        return self._placement
