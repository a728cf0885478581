"""RLlib's checkpoints in the evaluator: the flat view of a server, the policy, the comparison.

`servegym.experiments.cluster.rllib` trains.
"""

# Ray is an extra that need not be installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from pettingzoo.utils.wrappers import BaseParallelWrapper

from servegym.baselines.protocol import BasePolicy
from servegym.envs.families import Family, family_named, family_of
from servegym.experiments.evaluation.evaluate import DEFAULT_SEED, evaluate
from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.evaluation.reporting import report_of
from servegym.experiments.evaluation.stats import iqm, stratified_bootstrap
from servegym.experiments.evaluation.tables import note, read_record
from servegym.experiments.papers.plotting import as_png, error_bars, pyplot, tidy

__all__ = [
    "PARALLEL_IDS",
    "SHARED",
    "FlatAgents",
    "RLlibPolicy",
    "compare",
    "draw",
    "finding",
    "trained_family",
    "make_parallel",
    "play",
    "untrained",
]

PARALLEL_IDS = ("servegym/expert_placement-v0",)
"""PettingZoo ids, in which every server is an agent."""

SHARED = "shared"
"""The policy of all agents of a PettingZoo environment."""

BASELINES = {
    "llm_routing": ("random", "shortest_queue", "greedy_qos"),
    "serverless_moe": ("random", "mix", "greedy_warm"),
    "expert_placement": ("random", "keep", "uniform", "whole_layer"),
}
"""Policies that the trained one is compared with, by family."""


def untrained(checkpoint: Path) -> Path:
    """Folder of the checkpoint that was saved before the first batch."""
    return checkpoint.with_name(f"{checkpoint.name}_untrained")


def trained_family(env_id: str) -> Family:
    """The family of a Gymnasium or PettingZoo id."""
    return family_named("expert_placement") if env_id in PARALLEL_IDS else family_of(env_id)


class FlatAgents(BaseParallelWrapper):
    """Every server's ``Dict`` observation as one vector in [0, 1].

    Counts become each layer's shares, and what has no tight end (times, queues) x / (1 + x).
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        first = env.observation_space(env.possible_agents[0])
        self.inner: dict[str, Any] = dict(first.spaces)
        size = sum(int(np.prod(space.shape)) for space in self.inner.values())
        self.flat = spaces.Box(0.0, 1.0, (size,), np.float32)

    def observation_space(self, agent: Any) -> spaces.Space:
        """The vector's space, the same for all."""
        return self.flat

    def vector(self, observation: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        """The vector (n,) of an observation."""
        parts = []
        for key, space in self.inner.items():
            value = np.asarray(observation[key], np.float64)
            if key == "counts":
                value = value / np.maximum(value.sum(-1, keepdims=True), 1.0)
            elif np.max(space.high) > 1.0:
                value = value / (1.0 + value)
            parts.append(value.ravel())
        return np.concatenate(parts).astype(np.float32)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Everyone's first vector."""
        observations, infos = self.env.reset(seed=seed, options=options)
        return {agent: self.vector(seen) for agent, seen in observations.items()}, infos

    def step(self, actions: dict[str, Any]) -> Any:
        """Everyone's next vector and the rest as it is."""
        observations, *rest = self.env.step(actions)
        return ({agent: self.vector(seen) for agent, seen in observations.items()}, *rest)


def make_parallel(env_config: Mapping[str, Any]) -> FlatAgents:
    """The placement environment with a vector for every server."""
    from servegym.envs.expert_placement import parallel_env

    return FlatAgents(parallel_env(**env_config))


class RLlibPolicy(BasePolicy):
    """The policy of an RLlib checkpoint, for the evaluator.

    Args:
        checkpoint: Folder that `train` wrote.
        action_space: Space of one action.
        module: Name of the policy in the checkpoint.

    Raises:
        ValueError: If there is no such policy in the folder.
    """

    name, env_view = "rllib_ppo", "flat"

    def __init__(
        self, checkpoint: Path, action_space: spaces.Space, module: str = "default_policy"
    ) -> None:
        from ray.rllib.core.rl_module.rl_module import RLModule

        folder = checkpoint.resolve() / "learner_group" / "learner" / "rl_module" / module
        if not folder.is_dir():
            raise ValueError(f"checkpoint is {str(checkpoint)!r}; there is no policy in {folder}")
        self.module: Any = RLModule.from_checkpoint(str(folder))
        self.action_space = action_space

    def act(self, observation: Any, action_mask: Any = None) -> Any:
        """The likeliest action (B, ...) of every row (B, n); of a `Discrete` space, a legal one."""
        import torch
        from ray.rllib.core.columns import Columns
        from ray.rllib.utils.spaces.space_utils import unsquash_action

        with torch.no_grad():
            seen = torch.as_tensor(np.asarray(observation, np.float32))
            logits = self.module.forward_inference({Columns.OBS: seen})[Columns.ACTION_DIST_INPUTS]
            if isinstance(self.action_space, spaces.Discrete) and action_mask is not None:
                legal = torch.as_tensor(np.asarray(action_mask) != 0)
                logits = logits.masked_fill(~legal, -torch.inf)
            law = self.module.get_inference_action_dist_cls().from_logits(logits)
            found = law.to_deterministic().sample()
        if isinstance(found, Mapping):  # boxes are learned as [-1, 1]
            assert isinstance(self.action_space, spaces.Dict)
            return {
                key: unsquash_action(part.numpy(), self.action_space[key])
                for key, part in found.items()
            }
        return found.numpy().astype(np.int64)


def play(policy: RLlibPolicy, env_config: Mapping[str, Any], episodes: int) -> list[dict[str, Any]]:
    """Rows like the evaluator's of servers that share a policy.

    Args:
        policy: The policy of each of them.
        env_config: Arguments of the environment; the split is "eval" unless given.
        episodes: Episode i has the evaluator's seed, and so the same requests as there.
    """
    env = make_parallel({"split": "eval", **env_config})
    rows = []
    copies = len(env.possible_agents) if env_config.get("shared_reward") else 1
    for episode in range(episodes):
        observations, infos = env.reset(seed=DEFAULT_SEED + episode)
        total = 0.0
        while env.agents:
            agents = list(env.agents)
            found = policy.act(np.stack([observations[agent] for agent in agents]))
            actions = {
                agent: {key: part[n] for key, part in found.items()}
                for n, agent in enumerate(agents)
            }
            observations, rewards, _, _, infos = env.step(actions)
            total += sum(rewards.values()) / copies
        kpis = next(iter(infos.values()))["episode_kpis"]
        row = {"policy": policy.name, "seed": DEFAULT_SEED + episode, "episode": episode}
        rows.append({**row, **{key: float(kpis[key]) for key in kpis}, "return": total})
    env.close()
    return rows


def compare(
    env_id: str, env_config: Mapping[str, Any], checkpoint: Path, episodes: int
) -> list[dict[str, Any]]:
    """A row a policy: the checkpoint's and the yardsticks' numbers on the same episodes.

    Returns:
        ``policy``, the family's headline (interquartile mean) with ``_low`` and ``_high``, its
        mean, the mean return and the number of episodes.
    """
    family, multi_agent = trained_family(env_id), env_id in PARALLEL_IDS
    headline = report_of(family).headline
    env_kwargs = {key: value for key, value in env_config.items() if key != "shared_reward"}
    if multi_agent:
        space = make_parallel(env_config).action_space("server_0")
    else:
        space = gymnasium.make(env_id, **env_config).action_space
    rows: list[dict[str, Any]] = []
    for name, folder in (("rllib_ppo", checkpoint), ("untrained", untrained(checkpoint))):
        policy = RLlibPolicy(folder, space, SHARED if multi_agent else "default_policy")
        policy.name = name
        if multi_agent:
            rows += play(policy, env_config, episodes)
        else:
            rows += evaluate(env_id, [policy], episodes, env_kwargs=env_kwargs)
    rows += evaluate(family.env_id, list(BASELINES[family.name]), episodes, env_kwargs=env_kwargs)
    found = []
    for name in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == name]
        value = stratified_bootstrap([row[headline] for row in own], iqm)
        found.append(
            {
                "policy": name,
                headline: value.value,
                f"{headline}_low": value.low,
                f"{headline}_high": value.high,
                f"{headline}_mean": float(np.mean([row[headline] for row in own])),
                "return_mean": float(np.mean([row["return"] for row in own])),
                "episodes": len(own),
            }
        )
    return found


def finding(
    found: Sequence[Mapping[str, Any]], headline: str, higher_is_better: bool
) -> dict[str, Any]:
    """A note: whether the trained policy is better than random and the untrained one."""
    own, better_than = found[0], {}
    for other in (row for row in found if row["policy"] in ("random", "untrained")):
        if higher_is_better:
            better = own[f"{headline}_low"] > other[f"{headline}_high"]
        else:
            better = own[f"{headline}_high"] < other[f"{headline}_low"]
        better_than[other["policy"]] = better
    parts = [
        f"{'' if yes else 'not clearly '}better than {name}" for name, yes in better_than.items()
    ]
    by_value = sorted(found, key=lambda row: row[headline], reverse=higher_is_better)
    order = ", ".join(f"{row['policy']} {row[headline]:.3f}" for row in by_value)
    return note(
        f"The trained policy is {' and '.join(parts)} (95 % intervals); best first: {order}.",
        better_than=better_than,
    )


def draw(table: Path) -> bytes:
    """The picture of a training as PNG: the learning curve, and the comparison of the policies.

    Args:
        table: The CSV of the comparison, with its JSON and ``_curve.csv`` in the same folder.
    """
    found = read_rows(table)
    curve = read_rows(table.with_name(f"{table.stem}_curve.csv"))
    random_return = read_record(table)["settings"]["random_return"]
    headline = next(key for key in found[0] if f"{key}_low" in found[0])
    figure, axes = pyplot().subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    axes[0].plot([r["steps"] / 1e3 for r in curve], [r["episode_return_mean"] for r in curve])
    axes[0].axhline(random_return, color="0.5", linestyle="--", linewidth=1.2)
    axes[0].annotate(
        "random",
        (1, random_return),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="bottom",
        color="0.4",
        fontsize=9,
    )
    axes[0].set(xlabel="thousand steps of training", ylabel="mean return of an episode")
    values, bars = error_bars(found, headline)
    places = np.arange(len(found))[::-1]
    colours = ["#4c72b0", "#b8c7e0"] + ["0.75"] * (len(found) - 2)
    axes[1].barh(places, values, xerr=bars, color=colours)
    axes[1].set_yticks(places, [row["policy"] for row in found])
    axes[1].set(xlabel=f"{headline}, evaluation episodes")
    for axis in axes:
        tidy(axis)
    return as_png(figure)
