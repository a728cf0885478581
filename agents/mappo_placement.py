"""Multi-agent PPO for expert placement, from random weights: every server is an agent.

A decision is an episode (`servegym.envs.expert_placement.config.LEARNING`). A server reads its own
observation, gives each of its layers a height, and is paid minus the logarithm of its own latency,
though the others' placements decide that too. The baseline is the mean of what it was paid with the
same requests: MAPPO's central critic (Yu et al., NeurIPS 2022) reads the state, which does not have
what decides most, the requests to come.

``ppo_placement`` differs: one controller sees all servers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from servegym.agents.lib.arguments import (
    Positive,
    PositiveShare,
    RunArgs,
    Share,
    grouped_settings,
    run_agent,
)
from servegym.agents.lib.checkpoint import (
    CheckpointPolicy,
    json_field,
    save_best_and_last,
    saved_args,
    write_checkpoint,
)
from servegym.agents.lib.evaluation import play_rule
from servegym.agents.lib.run_log import RunLog, interval_passed, saves_when_interrupted
from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.envs.expert_placement.config import LEARNING
from servegym.envs.expert_placement.decode import HEIGHT_SPAN
from servegym.envs.expert_placement.pettingzoo_env import parallel_env
from servegym.envs.expert_placement.vector_env import ExpertPlacementVectorEnv


@dataclass
class Args(RunArgs):
    """Command line of the agent."""

    set: tuple[str, ...] = ("scenario=edge_hetero",)
    """environment arguments, key=value with a JSON value, as in scenario=paper_testbed"""
    total_timesteps: int = 6_400
    """placements tried, those of all servers counted once"""
    batch_size: int = 32
    """placements between updates"""
    group_size: int = 8
    """placements with the same requests, whose mean reward is a server's baseline"""
    traffic_s: Positive = 100.0
    """seconds of traffic after a placement; evaluations are of full length"""
    learning_rate: Share = 3e-3
    """learning rate of the networks at first; it falls linearly to zero"""
    table_learning_rate: Share = 0.06
    """learning rate of the tables at first; it falls linearly to zero"""
    std_first: Positive = 0.6
    """standard deviation of the outputs at first"""
    std_last: Positive = 0.12
    """standard deviation of the outputs at last, linear in between"""
    height_unit: Positive = 4.0
    """height of an output of one, in units of the logarithm of a share"""
    update_epochs: int = 4
    """passes over the collected placements"""
    clip_coef: PositiveShare = 0.4
    """clipping of the ratio of probabilities"""
    width: int = 64
    """hidden units of every layer"""
    eval_every: int = 256
    """placements between evaluations on the validation split"""
    eval_episodes: int = 2
    """episodes per evaluation"""


ENV_ID = "servegym/ExpertPlacement-v0"
NUM_MINIBATCHES, MAX_GRAD_NORM = 2, 0.5
MASS_AT = (1 / 64, 1 / 16, 1 / 4, 1 / 2, 3 / 4)
"""Shares of a layer's experts, the most frequent first, whose cumulative mass is a feature."""
COLUMNS = len(MASS_AT) + 2


def features(counts: Any) -> Tensor:
    """What the actor reads of servers' own counts (..., L, E): float32 (..., L, COLUMNS)."""
    counts = np.asarray(counts, dtype=np.float64)
    experts = counts.shape[-1]
    total = counts.sum(axis=-1, keepdims=True)
    share = np.where(total > 0, counts / np.maximum(total, 1.0), 1.0 / experts)
    mass = np.cumsum(-np.sort(-share, axis=-1), axis=-1)
    at = [max(round(part * experts), 1) - 1 for part in MASS_AT]
    entropy = -(share * np.log(np.maximum(share, 1e-12))).sum(axis=-1) / np.log(max(experts, 2))
    layer = np.broadcast_to(np.linspace(-1, 1, entropy.shape[-1]), entropy.shape)
    result = np.concatenate([mass[..., at], np.stack([entropy, layer], axis=-1)], axis=-1)
    return torch.from_numpy(result.astype(np.float32))


def linear(inputs: int, outputs: int, std: float = 2**0.5) -> nn.Linear:
    """A linear layer with orthogonal weights and no bias at first."""
    result = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(result.weight, std)
    nn.init.zeros_(result.bias)
    return result


class Agent(nn.Module):
    """One network for all servers and a table for each."""

    def __init__(self, width: int, servers: int, layers: int) -> None:
        super().__init__()
        self.actor = nn.Sequential(
            linear(COLUMNS, width),
            nn.Tanh(),
            linear(width, width),
            nn.Tanh(),
            linear(width, 1, 0.01),
        )
        self.table: Tensor | None = nn.Parameter(torch.zeros(servers, layers))

    def forward(self, x: Tensor) -> Tensor:
        """Mean outputs (B, N, L) of features (B, N, L, COLUMNS): each server's of its own."""
        output = self.actor(x).squeeze(-1)
        return output if self.table is None else output + self.table


def plan(output: Tensor, args: Args) -> np.ndarray:
    """Plans (..., N, L) in [0, 1] of outputs (..., N, L)."""
    return (0.5 + args.height_unit / HEIGHT_SPAN * output).clamp(0, 1).numpy()


def greedy(agent: Agent, args: Args, observation: Mapping[str, Any]) -> dict[str, Any]:
    """The mean outputs as actions of the single environment, at an episode's first decision."""
    with torch.no_grad():
        result = plan(agent(features(observation["counts"])), args)
    first = np.asarray(observation["progress"])[:, 0] <= 0
    return {"migrate": first.astype(np.int64), "plan": result}


def evaluate(agent: Agent, args: Args, envs: ExpertPlacementVectorEnv) -> float:
    """Mean latency (seconds) of the mean outputs on an episode of each single environment."""
    observation, _ = envs.reset(seed=10_000)
    ended, info = np.zeros(1, bool), {}
    while not ended.any():
        observation, _, ended, _, info = envs.step(greedy(agent, args, observation))
    return float(np.mean(info["episode_kpis"]["mean_latency_s"]))


@saves_when_interrupted
def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors).

    Raises:
        ValueError: If an argument is out of range.
    """
    settings = grouped_settings(args, "batch_size")
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    env = parallel_env(**(settings | LEARNING | {"epoch_s": args.traffic_s}))
    whole: dict[str, Any] = {"epochs": 12} | settings | {"split": "val"}
    validation = ExpertPlacementVectorEnv(
        args.eval_episodes, autoreset_mode="Disabled", **(LEARNING | whole)
    )
    servers, layers = env.problem.cluster.num_servers, env.problem.cluster.layers
    agent = Agent(args.width, servers, layers)
    optimizer = torch.optim.Adam(
        [
            {"params": agent.actor.parameters(), "first_lr": args.learning_rate},
            {"params": [agent.table], "first_lr": args.table_learning_rate},
        ],
        eps=1e-5,
    )
    played = play_rule(ENV_ID, args.eval_episodes, 10_000, **whole)
    rule = played and (played.rule, float(played.kpis["mean_latency_s"].mean()))
    meta = {
        "agent": "mappo_placement",
        "args": json.dumps(asdict(args)),
        "shape": json.dumps({"width": args.width, "servers": servers, "layers": layers}),
        "setting": PlacementSystem.from_problem(env.problem).setting,
    }
    n = args.batch_size
    num_updates = -(-args.total_timesteps // n)

    # Buffers.
    obs = torch.zeros(n, servers, layers, COLUMNS)
    outputs = torch.zeros(n, servers, layers)
    logprobs, rewards = torch.zeros(2, n, servers)
    latency = np.zeros(n)
    log = RunLog(args, "mappo_placement", ENV_ID, settings)
    log.save = partial(write_checkpoint, agent, meta)
    parts = {"agent": agent, "optimizer": optimizer, "rng": rng}
    update, best_score = log.restore(parts, (0, -np.inf))

    while True:
        # Evaluate, first of all the random weights.
        step = update * n
        log.snapshot(step, parts, (update, best_score))
        metrics: dict[str, float] = {}
        if interval_passed(args.eval_every, step - n, step) or update in (0, num_updates):
            result = evaluate(agent, args, validation)
            metrics["eval/mean_latency_s"] = result
            log.say_score(step, "mean latency in seconds", result, rule)
            best_score = save_best_and_last(log.save, args, log.run, -result, best_score)
        metrics["charts/SPS"] = log.advance(step)
        if update == num_updates:
            log.write(step, metrics)
            break
        left = 1 - update / num_updates
        for group in optimizer.param_groups:
            group["lr"] = group["first_lr"] * left
        std = args.std_last + left * (args.std_first - args.std_last)

        # Episodes of one decision.
        seeds = np.repeat(rng.integers(1 << 30, size=n // args.group_size), args.group_size)
        for k, seed in enumerate(seeds.tolist()):
            observations, _ = env.reset(seed=seed)
            obs[k] = features(np.stack([seen["counts"] for seen in observations.values()]))
            with torch.no_grad():
                policy = torch.distributions.Normal(agent(obs[k : k + 1])[0], std)
                outputs[k] = policy.sample()
                logprobs[k] = policy.log_prob(outputs[k]).sum(-1)
            plans = zip(observations, plan(outputs[k], args), strict=True)
            actions = {server: {"migrate": 1, "plan": heights} for server, heights in plans}
            _, reward, _, _, infos = env.step(actions)
            rewards[k] = torch.tensor(list(reward.values()))
            latency[k] = next(iter(infos.values()))["episode_kpis"]["mean_latency_s"]
        grouped = rewards.view(-1, args.group_size, servers)
        advantages = grouped - grouped.mean(1, keepdim=True)
        advantages = (advantages / (advantages.std() + 1e-8)).view(n, servers)

        # Update the servers' policy.
        policy_loss = approx_kl = 0.0
        for _ in range(args.update_epochs):
            for index in torch.randperm(n).chunk(NUM_MINIBATCHES):
                policy = torch.distributions.Normal(agent(obs[index]), std)
                logratio = policy.log_prob(outputs[index]).sum(-1) - logprobs[index]
                ratio = logratio.exp()
                clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                loss = -torch.min(advantages[index] * ratio, advantages[index] * clipped).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
                optimizer.step()
                policy_loss = loss.item()
                approx_kl = (ratio - 1 - logratio).mean().item()
        update += 1
        metrics |= {
            "charts/episodic_return": rewards.sum(1).mean().item(),
            "charts/mean_latency_s": float(latency.mean()),
            "charts/std": std,
            "losses/policy_loss": policy_loss,
            "losses/approx_kl": approx_kl,
        }
        log.write(step, metrics)
    return log.run


def load(meta: Mapping[str, str], weights: Mapping[str, Tensor], system: Any) -> CheckpointPolicy:
    """The servers of a checkpoint as one policy, see `servegym.agents.lib.checkpoint`."""
    args, shape = saved_args(Args, json_field(meta, "args")), json_field(meta, "shape")
    net = Agent(**shape)
    net.load_state_dict(weights)
    if system is not None and system.setting != meta["setting"]:
        net.table = None
    policy = CheckpointPolicy(
        "mappo_placement", "graph", args, net, lambda observation, _: greedy(net, args, observation)
    )
    policy.env_kwargs = {"action_mode": "layer_height"}
    return policy


if __name__ == "__main__":
    run_agent(train, Args)
