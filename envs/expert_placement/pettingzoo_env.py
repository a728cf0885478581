"""Expert placement with every server an agent, for PettingZoo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pettingzoo
from gymnasium import spaces

from servegym.envs._batch import need_episode
from servegym.envs._parallel import BatchParallelEnv
from servegym.envs.expert_placement.config import Problem
from servegym.envs.expert_placement.core import (
    OBSERVATION,
    PlacementBatch,
    PlacementEpisode,
    action_space,
    check_action,
)
from servegym.envs.expert_placement.decode import repair_placement
from servegym.envs.expert_placement.env import ExpertPlacementEnv

NAME = "servegym/expert_placement-v0"
# Numbers that a server sees: its own, the largest of its GPUs', and those that all see.
_OF_SERVER, _OF_GPUS, _OF_ALL = (
    [name for name, (axes, _, _) in OBSERVATION.items() if axes == its] for its in ("N", "G", "1")
)


class ExpertPlacementParallelEnv(BatchParallelEnv[Problem, PlacementBatch], pettingzoo.ParallelEnv):
    """Every server of `ExpertPlacementEnv` decides which experts it holds; together they hold all.

    Agents are `server_0` to `server_{N-1}`. An action is a `Dict` of `migrate`, `Discrete(2)`,
    and `plan`, `Box(0, 1, (L,))` with `action_mode="layer_budget"` or `"layer_height"`, `Box(0,
    1, (L, E))` with `"expert_score"`. Servers that do not migrate keep what they have. What is
    then missing replaces second copies, so that a server may hold what it did not ask for.

    An observation is a `Dict`: `counts` (L, E), `held` int8 (N, L, E) which server holds what,
    itself first, `seconds_per_token` (2,), and of (1,) `memory`, `loads_left` and `gpu_backlog_s`
    over its GPUs, `link_backlog_s`, `in_system`, `arrivals`, `window_s`, `progress`. `state()` is
    the flattened observation of `ExpertPlacementEnv`. Each gets the own part of its reward, with
    `shared_reward=True` the sum.

    >>> from servegym.envs.expert_placement import parallel_env
    >>> env = parallel_env(model="toy", epochs=2)
    >>> env.possible_agents
    ['server_0', 'server_1', 'server_2']

    In PettingZoo's registry: `pettingzoo.make("parallel", "servegym/expert_placement-v0")`.
    """

    single = ExpertPlacementEnv
    metadata: dict[str, Any] = {
        "name": NAME,
        "render_modes": ["ansi", "rgb_array"],
        "is_parallelizable": True,
    }

    def __init__(
        self, *, shared_reward: bool = False, render_mode: str | None = None, **kwargs: Any
    ) -> None:
        mode = kwargs.get("action_mode")
        if isinstance(mode, str) and mode == "placement":
            raise ValueError(
                "action_mode='placement' is for the single environment; "
                "choose 'layer_budget', 'layer_height' or 'expert_score'."
            )
        super().__init__(kwargs, shared_reward, render_mode)
        self.system: PlacementEpisode = self.batch.episodes[0]
        c, whole = self.problem.cluster, self._inner
        self.possible_agents = [f"server_{n}" for n in range(c.num_servers)]

        def one(name: str, *shape: int) -> spaces.Space:
            return spaces.Box(0.0, float(whole[name].high.max()), shape, np.float32)

        plan: Any = action_space(self.problem)["plan"]
        self.observation_spaces, self.action_spaces = {}, {}
        for agent in self.possible_agents:
            self.observation_spaces[agent] = spaces.Dict(
                {
                    "counts": one("counts", c.layers, c.experts),
                    "held": spaces.Box(0, 1, (c.num_servers, c.layers, c.experts), np.int8),
                    "seconds_per_token": one("seconds_per_token", 2),
                }
                | {name: one(name, 1) for name in (*_OF_SERVER, *_OF_GPUS, *_OF_ALL)}
            )
            self.action_spaces[agent] = spaces.Dict(
                {
                    "migrate": spaces.Discrete(2),
                    "plan": spaces.Box(0.0, 1.0, plan.shape[1:], np.float32),
                }
            )

    def step(
        self, actions: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float], dict[str, bool], dict[str, bool], dict[str, Any]]:
        """Carry out the servers' plans and go on to the next epoch.

        Raises:
            ResetNeeded: no episode is under way.
            ValueError: the action of a server is missing or malformed, or there is no such server.
        """
        need_episode("step", bool(self.agents))
        if not isinstance(actions, Mapping):
            raise ValueError(
                f"actions={actions!r} must be a dict from {self.agents[0]!r} to "
                f"{self.agents[-1]!r}, an action for each."
            )
        unknown = [agent for agent in actions if agent not in self.agents]
        if unknown:
            raise ValueError(f"actions name {unknown[0]!r}; the agents are {self.agents}.")
        missing = [agent for agent in self.agents if agent not in actions]
        if missing:
            raise ValueError(f"actions lack {missing[0]!r}.")
        parts = [check_action(actions[agent], self.action_spaces[agent]) for agent in self.agents]
        migrate = np.array([part[0] for part in parts])
        placement = None
        if migrate.any():
            target = self.system.decode(np.stack([part[1] for part in parts]))
            keeps = ~migrate[self.problem.cluster.gpu_server]
            target[keeps] = self.system.simulator.target()[keeps]
            placement = repair_placement(self.problem.cluster, target, self.system.counts())
        area, adopted, ended = self.system.advance(placement)
        self.batch.begin(self._which)
        rewards = self.system.rewards(area)
        if self.shared_reward:
            rewards = np.full(len(rewards), rewards.sum())
        agents, observations = self.agents, self._observations()
        infos: dict[str, Any] = {agent: {"adopted": adopted} for agent in agents}
        if ended:
            for info in infos.values():
                info["episode_kpis"] = self.system.kpis()
            self.agents = []
        return (
            observations,
            dict(zip(agents, rewards.tolist(), strict=True)),
            dict.fromkeys(agents, bool(ended)),
            dict.fromkeys(agents, False),
            infos,
        )

    def _observations(self) -> dict[str, Any]:
        obs, cluster = self.batch.row_views(0), self.problem.cluster
        view = cluster.server_view(obs["placement"]).astype(np.int8)
        cap = np.maximum(cluster.cap, 1)
        observations = {}
        for n, agent in enumerate(self.agents):
            gpus = cluster.gpu_server == n
            used = float((obs["memory"][gpus] * cluster.slots[gpus]).sum()) / cap[n]
            order = [n, *(m for m in range(cluster.num_servers) if m != n)]
            numbers = {name: obs[name][n] for name in _OF_SERVER}
            numbers |= {name: obs[name][gpus].max() for name in _OF_GPUS}
            numbers |= {name: obs[name][0] for name in _OF_ALL}
            parts: dict[str, np.ndarray] = {
                name: np.array([value], np.float32) for name, value in numbers.items()
            }
            parts["memory"] = np.array([min(used, 2.0)], np.float32)
            parts["held"] = view[order]
            for name in ("counts", "seconds_per_token"):
                parts[name] = obs[name][n].copy()
            observations[agent] = dict(sorted(parts.items()))  # in the order of the space
        return observations


def parallel_env(**kwargs: Any) -> ExpertPlacementParallelEnv:
    """The environment, see `ExpertPlacementParallelEnv` for the arguments."""
    return ExpertPlacementParallelEnv(**kwargs)


# Older versions of PettingZoo have no registry. `import servegym` does not load PettingZoo.
if hasattr(pettingzoo, "register") and NAME not in pettingzoo.parallel_registry:
    pettingzoo.register("parallel", NAME, f"{__name__}:parallel_env")
