"""Evaluation on the validation split: of routers, and of the rule that is told beside a learner."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from servegym.agents.lib.environments import make_envs
from servegym.baselines.registry import describe_system, make_policy
from servegym.envs.families import Family, find_family
from servegym.envs.llm_routing.fleets import is_drawn

Observation = Mapping[str, NDArray[Any]]
RULES = {
    "llm_routing": "priced_greedy",
    "serverless_moe": "keep_alive",
    "expert_placement": "prism",
    "prefix_routing": "mooncake",
}
"""Family -> the rule that is told beside its learners: a strong one that is quick to play."""


class Played(NamedTuple):
    """What a rule reached."""

    rule: str
    returns: NDArray[np.float64]  # of the episodes
    decisions: int
    kpis: dict[str, NDArray[np.float64]]  # of the episodes


def play_rule(env_id: str, episodes: int, seed: int, **env_kwargs: Any) -> Played | None:
    """Play the rule of a family in the first episodes of so many environments, side by side.

    ``env_kwargs`` are those of a learner, without its own interface; the rule reads the view that
    it needs. None for an environment of another package, and where the rule does not play.
    """
    family = find_family(env_id)
    try:
        return None if family is None else _play(family, episodes, seed, env_kwargs)
    except ValueError:  # an option of the environment that the rule has no answer to
        return None


def _play(family: Family, episodes: int, seed: int, env_kwargs: Mapping[str, Any]) -> Played:
    name, envs = RULES[family.name], make_envs(family.env_id, episodes, **env_kwargs)
    problem = envs.unwrapped.problem  # pyright: ignore
    rule: Any = make_policy(name, describe_system(problem, family=family.name), family=family.name)
    if rule.env_kwargs:
        envs.close()
        envs = make_envs(family.env_id, episodes, **env_kwargs, **rule.env_kwargs)
    rule.reset(episodes, seed=seed)
    return _play_episodes(name, rule.act, envs, seed, rule.episode_start)


def _play_episodes(
    name: str,
    act: Callable[[Any, Any], Any],
    envs: gym.vector.VectorEnv,
    seed: int,
    episode_start: Callable[[NDArray[np.bool_]], None] = lambda done: None,
) -> Played:
    """The first episode of every environment, side by side; closes them."""
    observation, info = envs.reset(seed=seed)
    returns, alive, decisions = np.zeros(envs.num_envs), np.ones(envs.num_envs, bool), 0
    kpis: dict[str, NDArray[np.float64]] = {}
    while alive.any():
        action = act(observation, info.get("action_mask"))
        observation, reward, terminated, truncated, info = envs.step(action)
        returns, decisions = returns + reward * alive, decisions + int(alive.sum())
        done = terminated | truncated
        for key, values in info.get("final_info", {}).get("episode_kpis", {}).items():
            kpis[key] = np.where(done & alive, values, kpis.get(key, 0.0))
        alive &= ~done
        episode_start(done)
    envs.close()
    return Played(name, returns, decisions, kpis)


MEASURES = {"llm_routing": ("QoS", "completed_qos"), "prefix_routing": ("attainment", "slo")}
"""Family -> what is told of a request, and the reward that pays just that."""


class Validation:
    """The same episodes each time: of `MEASURES`' reward on the validation split, or plain ones.

    Args:
        env_id: The environment.
        episodes: How many.
        env_kwargs: Arguments of the environment.

    Attributes:
        metric: What a score is: the mean over requests of a family's measure, or the mean return.
        rule: A rule of the family and its score in these episodes; None where none plays.
    """

    def __init__(self, env_id: str, episodes: int, env_kwargs: Mapping[str, Any]) -> None:
        family = find_family(env_id)
        self.metric, reward = MEASURES.get(family.name if family else "", ("mean return", ""))
        self.env_id, self.episodes, self.by_request = env_id, episodes, bool(reward)
        self.env_kwargs = {**env_kwargs} | ({"reward": reward, "split": "val"} if reward else {})
        played = play_rule(env_id, episodes, 10_000, **self.env_kwargs)
        self.rule = played and (played.rule, self._score(played))

    def score(self, act: Callable[[Any, Any], Any]) -> float:
        """What is reached by actions (B,) for a batch of observations and their masks, if any."""
        envs = make_envs(self.env_id, self.episodes, **self.env_kwargs)
        return self._score(_play_episodes("", act, envs, 10_000))

    def _score(self, played: Played) -> float:
        returns = played.returns
        return float(returns.sum() / played.decisions if self.by_request else returns.mean())


def _points(
    arguments: Mapping[str, Any], rates: Sequence[float], episodes: int
) -> list[tuple[dict[str, float], int]]:
    """Rates and so many episodes of each; drawn fleets have rates of their own."""
    if is_drawn(arguments.get("fleet")):
        return [({}, episodes * len(rates))]
    return [({"rate": rate}, episodes) for rate in rates]


@cache
def rule_qos(env_id: str, env_kwargs: str, rates: tuple[float, ...], episodes: int) -> float:
    """Average QoS of the rule in the episodes of `evaluate_router`; ``env_kwargs`` are JSON.

    It plays the options of every routing environment.
    """
    arguments = json.loads(env_kwargs)
    played = [
        play_rule(env_id, count, 10_000 + i, **(arguments | point))
        for i, (point, count) in enumerate(_points(arguments, rates, episodes))
    ]
    return float(np.mean([each.returns.sum() / each.decisions for each in played if each]))


def evaluate_router(
    act: Callable[[Observation, NDArray[Any]], NDArray[np.int64]],
    env_id: str,
    env_kwargs: Mapping[str, Any],
    rates: Sequence[float],
    episodes: int,
    requests: int,
) -> dict[str, float]:
    """Average QoS of a router on the same validation episodes each time, and its actions' shares.

    ``act`` gives actions (B,) for a batch of observations and their masks (B, N + 1).
    ``env_kwargs`` are those of the training: split, rate and reward are replaced, and episodes are
    not cut. The rule plays the same episodes, once in a process: so many a rate, of so many
    requests. Where fleets are drawn, so are their rates, and each of as many episodes has its own.

    Returns:
        ``eval/avg_qos`` over all rates, ``eval/avg_qos_rate_R`` of every given rate,
        ``eval/share_A`` of every action and ``eval/rule_qos``, the first number of the rule.
    """
    arguments = dict(env_kwargs) | {"split": "val", "reward": "completed_qos"}
    arguments |= {"episode_requests": requests, "max_episode_steps": None}
    points = _points(arguments, rates, episodes)
    envs = [make_envs(env_id, count, **(arguments | point)) for point, count in points]
    outs = [env.reset(seed=10_000 + i) for i, env in enumerate(envs)]
    shares = np.zeros(outs[0][1]["action_mask"].shape[1])
    qos = np.zeros(len(envs))
    for _ in range(requests):
        obs = {key: np.concatenate([out[0][key] for out in outs]) for key in outs[0][0]}
        action = act(obs, np.concatenate([out[-1]["action_mask"] for out in outs]))
        shares += np.bincount(action, minlength=len(shares))
        parts = np.split(action, len(envs))
        outs = [env.step(part) for env, part in zip(envs, parts, strict=True)]
        qos += [out[1].sum() for out in outs]
    shares, qos = shares / shares.sum(), qos / (points[0][1] * requests)
    each = zip(points, qos, strict=True)
    result = {f"eval/avg_qos_rate_{p['rate']:g}": float(q) for (p, _), q in each if p}
    result |= {f"eval/share_{k}": float(s) for k, s in enumerate(shares)}
    rule = rule_qos(env_id, json.dumps(arguments), tuple(rates), episodes)
    return result | {"eval/avg_qos": float(qos.mean()), "eval/rule_qos": rule}
