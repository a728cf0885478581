"""The placement algorithms as policies: plan every epoch, migrate if that pays by Eq. 4.

Every row of a batch is planned from its own observation only. The first plan of an episode is
carried out at once where the environment makes that free; later ones are weighed by Eq. 4, in which
policies that search put their own estimate for C.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from servegym._checks import choose, whole
from servegym.baselines.expert_placement.feasibility import Bools, Floats, Ints, assign_gpus
from servegym.baselines.expert_placement.heuristics import whole_layer
from servegym.baselines.expert_placement.initial_placement import SWAPS, TRIES, best_start
from servegym.baselines.expert_placement.latency_search import latency_dp
from servegym.baselines.expert_placement.linear_program import proxy_optimum
from servegym.baselines.expert_placement.prism import prism, prism_printed
from servegym.baselines.expert_placement.simulation_search import (
    SimulatedLatency,
    latency_local_search,
)
from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.baselines.protocol import BasePolicy, Observation
from servegym.envs.expert_placement.simulator import CACHES, ROUTERS


class MigrationInputs(NamedTuple):
    """What Eq. 4 reads besides the placements.

    Attributes:
        extra_s: (N,) mean seconds of a remote token less those of a local one.
        window_s: Seconds over which the counts were taken.
    """

    extra_s: Floats
    window_s: float


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

    def plan(self, row: int, counts: Floats, current: Bools, first: bool) -> Bools | None:
        """The wished placement (G, L, E) of one row, or None to keep the current one.

        Args:
            row: Of the batch.
            counts: (N, L, E) since the last change.
            current: (G, L, E).
            first: Whether it is the first decision of an episode and free.
        """
        raise NotImplementedError

    def cost(self, counts: Floats, placement: Bools, inputs: MigrationInputs) -> float:
        """C of Eq. 4: seconds that remote calls will cost until the next decision; 0 if unknown.

        Slots are counted by GPU and then added, and an expert on another GPU of the same server is
        local.
        """
        if inputs.window_s <= 0:
            return 0.0
        system = self.system
        view = system.cluster.server_view(placement)
        remote = np.sum(counts, where=~view, axis=(1, 2), dtype=np.float64)
        return float(system.arguments.epoch_s / inputs.window_s * (inputs.extra_s * remote).sum())

    def migration_s(self, current: Bools, plan: Bools) -> float:
        """Eq. 3: seconds of loading, added over all GPUs; experts that go cost nothing."""
        loads = (plan & ~current).sum(axis=(1, 2)) * float(self.system.cluster.expert_bytes)
        return float((loads / self.system.load_bytes_s()).sum())

    def migration_pays(
        self, counts: Floats, current: Bools, plan: Bools, inputs: MigrationInputs
    ) -> bool:
        """Eq. 4: whether the plan's remote calls and loads cost less."""
        old, new = (self.cost(counts, z, inputs) for z in (current, plan))
        return new + self.migration_s(current, plan) < old

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
            free = first and self.system.arguments.free_start
            wish = self.plan(b, counts, current, free)
            if wish is None:
                continue
            seconds = np.asarray(observation["seconds_per_token"][b], dtype=np.float64)
            inputs = MigrationInputs(
                seconds[:, 1] - seconds[:, 0], float(observation["window_s"][b, 0])
            )
            if free or self.static or self.migration_pays(counts, current, wish, inputs):
                migrate[b] = 1
                wished[b] = wish
        return {"migrate": migrate, "plan": wished}


class KeepPlacement(PlacementPolicy):
    """Never changes the placement that the episode starts with."""

    name = "keep"

    def act(self, observation: Observation, action_mask: Any = None) -> Any:
        """See `PlacementPolicy.act`."""
        plan = np.array(observation["placement"], dtype=np.int8)
        return {"migrate": np.zeros(len(plan), dtype=np.int64), "plan": plan}


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
        self._rows = row_streams(num_envs, seed)

    def plan(self, row: int, counts: Floats, current: Bools, first: bool) -> Bools | None:
        """See `PlacementPolicy.plan`."""
        seed = int(self._rows[row].integers(1 << 31))
        return self.draw(counts, self.system.slots, self.system.gpu_server, seed=seed)

    def migration_pays(
        self, counts: Floats, current: Bools, plan: Bools, inputs: MigrationInputs
    ) -> bool:
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

    def plan(self, row: int, counts: Floats, current: Bools, first: bool) -> Bools | None:
        """See `PlacementPolicy.plan`."""
        return self.place(counts, self.system.slots, self.system.gpu_server)


def printed_or_none(counts: Floats, slots: Ints, gpu_server: Ints) -> Bools | None:
    """Prism as printed; None where that cannot cover every expert."""
    try:
        return prism_printed(counts, slots, gpu_server)
    except ValueError:
        return None


def row_streams(num_envs: int, seed: int | None) -> list[np.random.Generator]:
    """A source of chance for each row, apart from those of environments seeded alike."""
    streams = np.random.SeedSequence(seed, spawn_key=(1,)).spawn(num_envs)
    return [np.random.default_rng(stream) for stream in streams]


class LatencyDp(PlacementPolicy):
    """Layer budgets by an exact knapsack over estimated latency, which stands for C in Eq. 4."""

    name = "latency_dp"

    def plan(self, row: int, counts: Floats, current: Bools, first: bool) -> Bools | None:
        """See `PlacementPolicy.plan`."""
        self._model = self.system.layer_cost_model(counts)
        return latency_dp(self._model, counts, self.system.slots, self.system.gpu_server)

    def cost(self, counts: Floats, placement: Bools, inputs: MigrationInputs) -> float:
        """C of Eq. 4 by the estimate that the plan was made with."""
        system = self.system
        view = system.cluster.server_view(placement)
        return system.arguments.epoch_s * float(self._model.cost(view).sum())


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

    def plan(self, row: int, counts: Floats, current: Bools, first: bool) -> Bools | None:
        """See `PlacementPolicy.plan`."""
        if self._placement is None:
            system = self.system
            view = best_start(system, **self._search)
            long_run_counts = np.einsum("nk,kle->nle", system.long_run_shares, system.task_counts)
            self._placement = assign_gpus(view, long_run_counts, system.slots, system.gpu_server)
        return self._placement


class LatencyLocalSearch(PlacementPolicy):
    """The placement in use or the best of other methods, improved step by step by the simulator.

    It simulates requests of the tasks that the last epoch's counts show, see
    `simulation_search.SimulatedLatency`, and searches again when these change. A change is made if
    an epoch with it, its loads carried out, is faster in the engine than one without.

    Args:
        system: The cluster and what is known of its load.
        steps: Exchanges tried by a search.
        requests: Requests simulated for each placement, at least two a server.
        shift: Largest change of a server's task shares that starts no new search.
    """

    name = "latency_local_search"

    def __init__(
        self, system: PlacementSystem, *, steps: int = 200, requests: int = 40, shift: float = 0.25
    ) -> None:
        super().__init__(system)
        self.steps = whole("steps", steps, 0)
        self.requests = max(whole("requests", requests, 1), 2 * system.cluster.num_servers)
        self.shift = float(shift)

    def reset(self, num_envs: int, seed: int | None = None) -> None:
        """See `Policy.reset`."""
        super().reset(num_envs, seed)
        self._rows = row_streams(num_envs, seed)
        self._previous: list[Floats | None] = [None] * num_envs
        self._tasks: list[Floats | None] = [None] * num_envs

    def act(self, observation: Observation, action_mask: Any = None) -> Any:
        """See `PlacementPolicy.act`."""
        begins = np.asarray(observation["progress"])[:, 0] <= 0.0
        for b in np.flatnonzero(begins):
            self._previous[b] = self._tasks[b] = None
        action = super().act(observation, action_mask)
        for b, moved in enumerate(action["migrate"]):
            # The counts start anew with a change, not otherwise.
            counts = np.asarray(observation["counts"][b], dtype=np.float64)
            self._previous[b] = None if moved else counts
        return action

    def plan(self, row: int, counts: Floats, current: Bools, first: bool) -> Bools | None:
        """See `PlacementPolicy.plan`."""
        system, previous = self.system, self._previous[row]
        new = counts if previous is None else np.maximum(counts - previous, 0.0)
        self._latest = counts if new.sum() <= 0 else new
        shares, searched = system.task_shares(self._latest), self._tasks[row]
        if searched is not None and np.abs(shares - searched).max() <= self.shift:
            return None
        self._tasks[row] = shares
        self._seed = int(self._rows[row].integers(1 << 31))
        slots, home = system.slots, system.gpu_server
        model = system.layer_cost_model(self._latest)
        starts = [
            current,
            *(place(self._latest, slots, home) for place in (whole_layer, prism, proxy_optimum)),
            latency_dp(model, self._latest, slots, home),
        ]
        objective = SimulatedLatency.of_counts(system, self._latest, self.requests, seed=self._seed)
        search = {"steps": self.steps, "seed": self._seed}
        wish = latency_local_search(objective, self._latest, slots, home, starts, **search)
        return None if (wish == current).all() else wish

    def migration_pays(
        self, counts: Floats, current: Bools, plan: Bools, inputs: MigrationInputs
    ) -> bool:
        """Whether an epoch in the engine that begins with the change is faster than one without."""
        arrivals = float((self.system.arguments.epoch_s / self.system.interarrival_s).sum())
        epoch = SimulatedLatency.of_counts(
            self.system, self._latest, max(round(arrivals), 1), seed=self._seed + 1
        )
        return epoch.latency_s(current, then=plan) < epoch.latency_s(current)
