"""The policies that search: by estimated latency, or by the simulator itself.

They plan and move as those of `policies` do; their estimates stand for C in Eq. 4.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from servegym.baselines.expert_placement.latency_model import LatencyModel
from servegym.baselines.expert_placement.optimum import proxy_optimum
from servegym.baselines.expert_placement.placement import (
    Bools,
    Floats,
    adopts,
    assign_gpus,
    server_view,
)
from servegym.baselines.expert_placement.policies import PlacementPolicy, View
from servegym.baselines.expert_placement.prism import prism
from servegym.baselines.expert_placement.rehearsal import latency_local_search
from servegym.baselines.expert_placement.search import annealing, latency_dp, local_search
from servegym.baselines.expert_placement.simple import whole_layer
from servegym.baselines.expert_placement.start import SWAPS, TRIES, Start, best_start
from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.baselines.protocol import Observation
from servegym.envs._checks import whole


class _Estimated(PlacementPolicy):
    """Plans by estimated latency, which also stands for C in Eq. 4."""

    def __init__(self, system: PlacementSystem, *, rows: int = 512) -> None:
        super().__init__(system)
        if rows < 1:
            raise ValueError(f"rows must be at least 1, got {rows!r}")
        self.rows = int(rows)

    def search(self, model: LatencyModel, counts: Floats, current: Bools, first: bool) -> Bools:
        """The placement (G, L, E) wished by the model."""
        raise NotImplementedError

    def plan(self, row: int, counts: Floats, current: Bools, first: bool) -> Bools | None:
        """See `PlacementPolicy.plan`."""
        self._model = self.system.latency_model(counts, rows=self.rows)
        return self.search(self._model, counts, current, first)

    def pays(self, counts: Floats, current: Bools, plan: Bools, view: View) -> bool:
        """Eq. 4 with the estimate of the plan just made."""
        system = self.system
        home, servers = system.gpu_server, system.cluster.num_servers
        old, new = (
            system.epoch_s * float(self._model.cost(server_view(z, home, servers)).sum())
            for z in (current, plan)
        )
        return adopts(new, self.migration_s(current, plan), old)


class LatencyDp(_Estimated):
    """Layer budgets by an exact knapsack over estimated latency."""

    name = "latency_dp"

    def search(self, model: LatencyModel, counts: Floats, current: Bools, first: bool) -> Bools:
        """See `_Estimated.search`."""
        return latency_dp(model, counts, self.system.slots, self.system.gpu_server)


class Annealing(_Estimated):
    """`LatencyDp` refined by annealing single experts."""

    name = "annealing"

    def __init__(self, system: PlacementSystem, *, rows: int = 512, steps: int = 600_000) -> None:
        super().__init__(system, rows=rows)
        self.steps = int(steps)

    def search(self, model: LatencyModel, counts: Floats, current: Bools, first: bool) -> Bools:
        """See `_Estimated.search`."""
        slots, home = self.system.slots, self.system.gpu_server
        return annealing(model, counts, slots, home, steps=self.steps)


class LocalSearch(_Estimated):
    """The placement in use, improved by loads of at most a share of the slots an epoch.

    A free first placement is not bounded and starts from `LatencyDp`.
    """

    name = "local_search"

    def __init__(
        self, system: PlacementSystem, *, rows: int = 512, max_moved_share: float = 0.1
    ) -> None:
        super().__init__(system, rows=rows)
        self.max_moved_share = float(max_moved_share)

    def search(self, model: LatencyModel, counts: Floats, current: Bools, first: bool) -> Bools:
        """See `_Estimated.search`."""
        slots, home = self.system.slots, self.system.gpu_server
        if first:
            current = latency_dp(model, counts, slots, home)
        share = 1.0 if first else self.max_moved_share
        return local_search(model, counts, slots, home, current, max_moved_share=share)


class BestStart(PlacementPolicy):
    """One placement for all episodes: the best of a long search before the first of them.

    It is where ``ppo_placement`` starts, without a network, see `start.best_start`. It knows the
    load of the long run, changing tasks included, and no counts; it never moves.

    Args:
        system: The cluster, its recorded prompts and its load.
        tries: Annealed placements for each of three settings.
        steps: Proposals of each annealing; by default as `start.best_start`.
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
        given: dict[str, Any] = dict(tries=tries, steps=steps, swaps=swaps, seed=seed)
        for name, value in given.items():
            if value is not None:
                whole(name, value, 0)
        self._search = given
        self._found: tuple[Start, Bools] | None = None

    @property
    def start(self) -> Start:
        """What the search found; searched for at the first call."""
        return self._once()[0]

    def _once(self) -> tuple[Start, Bools]:
        if self._found is None:
            system = self.system
            start = best_start(system, **self._search)
            usual = np.einsum("nk,kle->nle", system.usual_shares, system.task_counts)
            plan = assign_gpus(start.held, usual, system.slots, system.gpu_server)
            self._found = start, plan
        return self._found

    def plan(self, row: int, counts: Floats, current: Bools, first: bool) -> Bools | None:
        """See `PlacementPolicy.plan`."""
        return self._once()[1]


class LatencyLocalSearch(PlacementPolicy):
    """The placement in use or the best of other methods, improved step by step by the simulator.

    It rehearses the tasks that the last epoch's counts tell of, see `rehearsal.Rehearsal`, and
    searches again when these change. A change is made if an epoch with it, its loads carried out,
    is faster in the engine than one without.

    Args:
        system: The cluster and what is known of its load.
        steps: Exchanges tried by a search.
        budget_calls: Expert calls that end a search; no bound by default.
        requests: Requests of a rehearsal, at least two a server.
        shift: Largest change of a server's task shares that starts no new search.

    Attributes:
        calls: Expert calls simulated since the policy was made.
    """

    name = "latency_local_search"

    def __init__(
        self,
        system: PlacementSystem,
        *,
        steps: int = 200,
        budget_calls: int | None = None,
        requests: int = 40,
        shift: float = 0.25,
    ) -> None:
        super().__init__(system)
        limits = (("steps", steps, 0), ("budget_calls", budget_calls, 0), ("requests", requests, 1))
        for name, value, low in limits:
            if value is not None:
                whole(name, value, low)
        self.steps, self.budget_calls = int(steps), budget_calls
        self.requests = max(int(requests), 2 * system.cluster.num_servers)
        self.shift = float(shift)
        self.calls = 0

    def reset(self, num_envs: int, seed: int | None = None) -> None:
        """See `Policy.reset`."""
        super().reset(num_envs, seed)
        streams = np.random.SeedSequence(seed, spawn_key=(1,)).spawn(num_envs)
        self._rows = [np.random.default_rng(stream) for stream in streams]
        self._seen: list[Floats | None] = [None] * num_envs
        self._tasks: list[Floats | None] = [None] * num_envs

    def act(self, observation: Observation, action_mask: Any = None) -> Any:
        """See `PlacementPolicy.act`."""
        begins = np.asarray(observation["progress"])[:, 0] <= 0.0
        for b in np.flatnonzero(begins):
            self._seen[b] = self._tasks[b] = None
        action = super().act(observation, action_mask)
        for b, moved in enumerate(action["migrate"]):
            # The counts start anew with a change, not otherwise.
            counts = np.asarray(observation["counts"][b], dtype=np.float64)
            self._seen[b] = None if moved else counts
        return action

    def plan(self, row: int, counts: Floats, current: Bools, first: bool) -> Bools | None:
        """See `PlacementPolicy.plan`."""
        system, seen = self.system, self._seen[row]
        new = counts if seen is None else np.maximum(counts - seen, 0.0)
        self._latest = counts if new.sum() <= 0 else new
        shares, searched = system.task_shares(self._latest), self._tasks[row]
        if searched is not None and np.abs(shares - searched).max() <= self.shift:
            return None
        self._tasks[row] = shares
        self._seed = int(self._rows[row].integers(1 << 31))
        slots, home = system.slots, system.gpu_server
        model = system.latency_model(self._latest)
        starts = [
            current,
            *(place(self._latest, slots, home) for place in (whole_layer, prism, proxy_optimum)),
            latency_dp(model, self._latest, slots, home),
        ]
        rehearsal = system.rehearsal(self._latest, self.requests, seed=self._seed)
        found = latency_local_search(
            rehearsal,
            self._latest,
            slots,
            home,
            starts,
            steps=self.steps,
            budget_calls=self.budget_calls,
            seed=self._seed,
        )
        self.calls += rehearsal.calls
        return None if (found == current).all() else found

    def pays(self, counts: Floats, current: Bools, plan: Bools, view: View) -> bool:
        """Whether an epoch in the engine that begins with the change is faster than one without."""
        arrivals = float((self.system.epoch_s / self.system.interarrival_s).sum())
        epoch = self.system.rehearsal(self._latest, max(round(arrivals), 1), seed=self._seed + 1)
        better = epoch.latency_s(current, then=plan) < epoch.latency_s(current)
        self.calls += epoch.calls
        return better
