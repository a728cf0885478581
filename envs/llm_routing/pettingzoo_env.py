"""LLM routing with several access points that share the experts, for PettingZoo."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from servegym._checks import choose, whole
from servegym.envs._batch import need_episode
from servegym.envs._outcomes import OutcomeReader
from servegym.envs._parallel import BatchParallelEnv
from servegym.envs.llm_routing.config import Problem
from servegym.envs.llm_routing.core import RoutingBatch
from servegym.envs.llm_routing.env import (
    LLMRoutingEnv,
    LLMRoutingExpertsEnv,
    LLMRoutingFlatEnv,
    LLMRoutingSummaryEnv,
)
from servegym.envs.llm_routing.kernel import layout

VIEWS: dict[str, type[LLMRoutingEnv]] = {
    "graph": LLMRoutingEnv,
    "flat": LLMRoutingFlatEnv,
    "experts": LLMRoutingExpertsEnv,
    "summary": LLMRoutingSummaryEnv,
}


class LLMRoutingParallelEnv(BatchParallelEnv[Problem, RoutingBatch], ParallelEnv):
    """Several access points route their own requests to the same N experts of `LLMRoutingEnv`.

    Agents are `access_point_0` to `access_point_{K-1}`, with arrivals of their own. A step is one
    request. Its access point has the turn and routes it by `Discrete(N + 1)`; the others' answers
    are ignored. All terminate after `episode_requests` decisions of each.

    An observation is a `Dict` of `observation` (by `view`; of the request 0 without the turn),
    `action_mask` (int8 (N + 1,)) and `turn` (int8 (1,)). `state()` is the flattened observation
    of whoever has the turn. Each gets the QoS of its own requests and the penalty of its own
    actions; `episode_kpis` has `own_qos`.

    Arguments are those of `LLMRoutingEnv`, `rate` and `episode_requests` for each access point;
    `num_access_points` (3); `view` (`"graph"`, `flat`, `experts`, `summary`); `shared_reward`
    (everyone gets the sum).

    >>> from servegym.envs.llm_routing import parallel_env
    >>> env = parallel_env(num_access_points=2, rate=2.5)
    >>> observations, infos = env.reset(seed=0)
    >>> env.turn
    'access_point_0'
    """

    metadata: dict[str, Any] = {
        "name": "llm_routing_v1",
        **LLMRoutingEnv.metadata,
        "is_parallelizable": True,
    }

    def __init__(
        self,
        *,
        num_access_points: int = 3,
        view: str = "graph",
        shared_reward: bool = False,
        render_mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        count = whole("num_access_points", num_access_points, 1, 4096)
        self.single = VIEWS[choose("view", view, VIEWS)]
        each = whole("episode_requests", kwargs.pop("episode_requests", 1000), 1, 10_000_000)
        if kwargs.get("requests_file") is not None:
            path = kwargs["requests_file"]
            raise ValueError(f"requests_file={path!r} is for a single access point.")
        super().__init__({**kwargs, "episode_requests": count * each}, shared_reward, render_mode)
        self.possible_agents = [f"access_point_{k}" for k in range(count)]
        actions = self.problem.num_experts + 1
        self.observation_spaces = {
            agent: spaces.Dict(
                {
                    "observation": self._inner,
                    "action_mask": spaces.Box(0, 1, (actions,), np.int8),
                    "turn": spaces.Box(0, 1, (1,), np.int8),
                }
            )
            for agent in self.possible_agents
        }
        self.action_spaces = {agent: spaces.Discrete(actions) for agent in self.possible_agents}
        self._owner = np.zeros(count * each, dtype=np.int64)

    def _draw(self, random: np.random.Generator) -> None:
        """One episode: rates, L, and each access point's arrivals and requests, merged by time."""
        problem, batch = self.problem, self.batch
        self._outcomes = OutcomeReader(self)
        count = len(self.possible_agents)
        each = problem.arguments.episode_requests // count
        process, rates = batch.draw_load(0, count, random)
        arrivals, rows = [], []
        for rate in rates:
            arrivals.append(process.sample(each, random, rate))
            rows.append(problem.rows[random.integers(0, len(problem.rows), each)])
        if problem.cfg["uptime_s"][0] > 0.0:
            batch.env["failure_seed"][0] = random.integers(0, 1 << 32)
        times = np.concatenate(arrivals)
        order = np.argsort(times, kind="stable")
        batch.arrivals[0] = times[order]
        batch.rows[0] = np.concatenate(rows)[order]
        self._owner = np.repeat(np.arange(count), each)[order]

    @property
    def turn(self) -> str | None:
        """The access point whose request is to be routed; None when no episode is under way."""
        return self.agents[self._owner[self._index]] if self.agents else None

    @property
    def _index(self) -> int:
        return int(self.batch.env["index"][0])

    def step(
        self, actions: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float], dict[str, bool], dict[str, bool], dict[str, Any]]:
        """Route the request of the access point that has the turn.

        Args:
            actions: A whole number from 0 to N for each agent; only that of `turn` counts.

        Raises:
            ResetNeeded: no episode is under way.
            ValueError: the action of the one that has the turn is missing, or out of range.
        """
        need_episode("step", bool(self.agents))
        actor = self._turn()
        name = self.agents[actor]
        if not isinstance(actions, dict):
            raise ValueError(
                f"actions={actions!r} must be a dict of a whole number for each agent."
            )
        if name not in actions:
            raise ValueError(f"actions={actions!r} lacks {name!r}, which has the turn.")
        action = np.asarray(actions[name])
        if action.shape != () or action.dtype.kind not in "iu":
            raise ValueError(f"actions[{name!r}]={actions[name]!r} must be one whole number.")
        self.batch.step(np.array([int(action)], dtype=np.int64), self._which)
        rewards = self._rewards(actor)
        ended = bool(self.batch.out[0, 2])
        observations, infos = self._observations(), self._infos()
        if ended:
            kpis, qos = self.batch.kpis(0), self._own_qos()
            for k, agent in enumerate(self.agents):
                infos[agent]["episode_kpis"] = {**kpis, "own_qos": float(qos[k])}
        terminations = dict.fromkeys(self.agents, ended)
        truncations = dict.fromkeys(self.agents, False)
        by_agent = {agent: float(rewards[k]) for k, agent in enumerate(self.agents)}
        if ended:
            self.agents = []
        return observations, by_agent, terminations, truncations, infos

    def _rewards(self, actor: int) -> np.ndarray:
        """The last reward by access point, float64 (K,)."""
        gain, loss = self.batch.out[0, :2]
        if self.shared_reward:
            return np.full(len(self.agents), gain + loss)
        rewards = np.zeros(len(self.agents))
        paid_forward = int(self.problem.cfg["reward"][0]) == layout.PAID_FORWARD
        # The other term goes to who has decided.
        rewards[actor] = gain if paid_forward else loss
        ended = self._outcomes.read()
        earned = ended["qos"]
        if paid_forward:
            served = np.isin(ended["outcome"], (layout.COMPLETED, layout.FAILED))
            lost = self.batch.log["score"][0, ended["decision"]]
            earned = np.where(served & (earned == 0.0), -lost, 0.0)
        np.add.at(rewards, self._owner[ended["decision"]], earned)
        return rewards

    def _own_qos(self) -> np.ndarray:
        log = self.batch.request_log(0)
        latency = (log["finish_s"] - log["arrival_s"]) / np.maximum(log["output_tokens"], 1)
        on_time = latency <= float(self.batch.env["latency_requirement"][0])
        qos = np.where((log["outcome"] == layout.COMPLETED) & on_time, log["score"], 0.0)
        count = len(self.possible_agents)
        return np.bincount(self._owner, qos, count) / np.bincount(self._owner, minlength=count)

    def _request_blanked(self, obs: Any) -> Any:
        """A copy of an observation whose features of the request are 0."""
        if isinstance(obs, dict):
            return {
                name: np.zeros_like(part) if name == "request" else part.copy()
                for name, part in obs.items()
            }
        obs = obs.copy()
        if int(self.problem.cfg["layout"][0]) == layout.FLAT:
            of_experts = obs[1 + layout.LOAD_WIDTH :].reshape(self.problem.num_experts, -1)
            of_experts[:, : len(layout.REQUEST_COLUMNS)] = 0.0
        elif int(self.problem.cfg["layout"][0]) == layout.SUMMARY:
            columns = [layout.OF_SUMMARY[column.name] for column in layout.REQUEST_COLUMNS]
            obs[:, columns] = (-layout.SUMMARY_MEANS / layout.SUMMARY_SPREADS)[columns]
        return obs

    def _observations(self) -> dict[str, Any]:
        turn = self._turn()
        obs, mask = self.batch.row_views(0), self.batch.action_mask[0]
        observations = {}
        for k, agent in enumerate(self.agents):
            if k != turn:
                view, legal = self._request_blanked(obs), np.zeros_like(mask)
                legal[0] = 1
            elif isinstance(obs, dict):
                view, legal = {name: part.copy() for name, part in obs.items()}, mask.copy()
            else:
                view, legal = obs.copy(), mask.copy()
            observations[agent] = {
                "action_mask": legal,
                "observation": view,
                "turn": np.array([k == turn], dtype=np.int8),
            }
        return observations

    def _turn(self) -> int:
        """Number of the access point that has the turn, -1 after the last request."""
        index = self._index
        return int(self._owner[index]) if index < len(self._owner) else -1

    def _infos(self) -> dict[str, Any]:
        turn, now = self._turn(), float(self.batch.env["now"][0])
        return {agent: {"turn": k == turn, "time_s": now} for k, agent in enumerate(self.agents)}


def parallel_env(**kwargs: Any) -> LLMRoutingParallelEnv:
    """The environment, see `LLMRoutingParallelEnv` for the arguments."""
    return LLMRoutingParallelEnv(**kwargs)
