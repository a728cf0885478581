"""Proximal policy optimisation for expert placement, from random weights: one controller for all.

An episode is one decision (`servegym.envs.expert_placement.config.LEARNING`), a contextual bandit
without discount. The network gives every (server, layer) a height, a Gaussian around it is the
policy (``action_mode="layer_height"``). Environments of a group have the same requests: the mean of
their rewards is the baseline of the advantage, and there is no critic.

``mappo_placement`` differs: every server is an agent with its own observation and credit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
from servegym.envs.expert_placement.vector_env import ExpertPlacementVectorEnv


@dataclass
class Args(RunArgs):
    """Command line of the agent."""

    set: tuple[str, ...] = ("scenario=edge_hetero",)
    """environment arguments, key=value with a JSON value, as in scenario=paper_testbed"""
    total_timesteps: int = 6_400
    """placements tried, over all environments"""
    num_envs: int = 32
    """parallel environments"""
    group_size: int = 8
    """environments that share their requests and differ by the actions alone"""
    traffic_s: Positive = 100.0
    """seconds of traffic after a placement; evaluations are of full length"""
    learning_rate: Share = 3e-3
    """learning rate of the network at first; it falls linearly to zero"""
    table_learning_rate: Share = 0.06
    """learning rate of the table at first; it falls linearly to zero"""
    std_first: Positive = 0.6
    """standard deviation of the outputs at first"""
    std_last: Positive = 0.12
    """standard deviation of the outputs at last, linear in between"""
    height_unit: Positive = 4.0
    """height of an output of one, in units of the logarithm of a share"""
    update_epochs: int = 4
    """passes over the collected placements"""
    common_credit: Share = 0.0
    """part of a server's advantage that is for the mean latency of all, from 0 (own credit) to 1"""
    clip_coef: PositiveShare = 0.4
    """clipping of the ratio of probabilities"""
    width: int = 64
    """hidden units of both layers"""
    eval_every: int = 256
    """placements between evaluations on the validation split"""
    eval_episodes: int = 2
    """episodes per evaluation"""


ENV_ID = "servegym/ExpertPlacement-v0"
NUM_MINIBATCHES, MAX_GRAD_NORM = 2, 0.5
MASS_AT = (1 / 64, 1 / 16, 1 / 4, 1 / 2, 3 / 4)
"""Shares of a layer's experts, the most frequent first, whose cumulative mass is a feature."""
COLUMNS = len(MASS_AT) + 5


def features(observation: Mapping[str, Any]) -> Tensor:
    """What the network reads of a batch of observations: float32 (B, N, L, COLUMNS)."""
    counts = np.asarray(observation["counts"], dtype=np.float64)
    batch, servers, layers, experts = counts.shape
    total = counts.sum(axis=3, keepdims=True)
    share = np.where(total > 0, counts / np.maximum(total, 1.0), 1.0 / experts)
    mass = np.cumsum(-np.sort(-share, axis=3), axis=3)
    at = [max(round(part * experts), 1) - 1 for part in MASS_AT]
    entropy = -(share * np.log(np.maximum(share, 1e-12))).sum(axis=3) / np.log(max(experts, 2))
    load = total[..., 0] / np.maximum(total.mean(axis=(1, 2, 3))[:, None, None], 1.0)
    # How much of the servers' shares of a layer this server has in common with the others.
    others = (share.sum(axis=1, keepdims=True) - share) / max(servers - 1, 1)
    common = np.minimum(share, others).sum(axis=3)
    shape = (batch, servers, layers)
    server = np.broadcast_to(np.linspace(-1, 1, servers)[:, None], shape)
    layer = np.broadcast_to(np.linspace(-1, 1, layers), shape)
    columns = np.stack([entropy, load - 1, common, server, layer], axis=-1)
    return torch.from_numpy(np.concatenate([mass[..., at], columns], axis=-1).astype(np.float32))


def linear(inputs: int, outputs: int, std: float = 2**0.5) -> nn.Linear:
    """A linear layer with orthogonal weights and no bias at first."""
    result = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(result.weight, std)
    nn.init.zeros_(result.bias)
    return result


class Agent(nn.Module):
    """One network for every server and layer, and the table."""

    def __init__(self, width: int, table: Sequence[int]) -> None:
        super().__init__()
        self.net = nn.Sequential(
            linear(COLUMNS, width),
            nn.Tanh(),
            linear(width, width),
            nn.Tanh(),
            linear(width, 1, 0.01),
        )
        self.table: Tensor | None = nn.Parameter(torch.zeros(*table))

    def forward(self, x: Tensor) -> Tensor:
        """Mean outputs (B, N, L) of features (B, N, L, COLUMNS)."""
        output = self.net(x).squeeze(-1)
        return output if self.table is None else output + self.table


def action(output: Tensor, args: Args) -> dict[str, Any]:
    """The action that places experts by outputs (B, N, L)."""
    plan = (0.5 + args.height_unit / HEIGHT_SPAN * output).clamp(0, 1).numpy()
    return {"migrate": np.ones(len(plan), np.int64), "plan": plan}


def greedy(agent: Agent, args: Args, observation: Mapping[str, Any]) -> dict[str, Any]:
    """The mean outputs of every row, carried out at the first decision of an episode alone."""
    with torch.no_grad():
        result = action(agent(features(observation)), args)
    first = np.asarray(observation["progress"])[:, 0] <= 0
    return result | {"migrate": first.astype(np.int64)}


def evaluate(agent: Agent, args: Args, envs: ExpertPlacementVectorEnv) -> float:
    """Mean latency (seconds) of the mean outputs on an episode of each environment."""
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
    settings = grouped_settings(args, "num_envs")
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    training: dict[str, Any] = LEARNING | settings | {"epochs": 1, "epoch_s": args.traffic_s}
    envs = ExpertPlacementVectorEnv(args.num_envs, autoreset_mode="Disabled", **training)
    whole: dict[str, Any] = {"epochs": 12} | settings | {"split": "val"}
    validation = ExpertPlacementVectorEnv(
        args.eval_episodes, autoreset_mode="Disabled", **(LEARNING | whole)
    )
    servers, layers = envs.problem.cluster.num_servers, envs.problem.cluster.layers
    if servers > 16:
        raise ValueError(f"set: a cluster of {servers} servers; up to 16 have rewards of their own")
    agent = Agent(args.width, (servers, layers))
    optimizer = torch.optim.Adam(
        [
            {"params": agent.net.parameters(), "first_lr": args.learning_rate},
            {"params": [agent.table], "first_lr": args.table_learning_rate},
        ],
        eps=1e-5,
    )
    played = play_rule(ENV_ID, args.eval_episodes, 10_000, **whole)
    rule = played and (played.rule, float(played.kpis["mean_latency_s"].mean()))
    meta = {
        "agent": "ppo_placement",
        "args": json.dumps(asdict(args)),
        "shape": json.dumps({"width": args.width, "table": [servers, layers]}),
        "setting": PlacementSystem.from_problem(envs.problem).setting,
    }
    n, groups = args.num_envs, args.num_envs // args.group_size
    num_updates = -(-args.total_timesteps // n)
    log = RunLog(args, "ppo_placement", ENV_ID, settings)
    log.save = partial(write_checkpoint, agent, meta)
    parts = {"agent": agent, "optimizer": optimizer, "rng": rng}
    update, best_score = log.restore(parts, (0, -np.inf))

    while True:
        # Evaluate, first of all the random weights.
        step = update * n
        log.snapshot(step, parts, (update, best_score))
        metrics: dict[str, float] = {}
        if interval_passed(args.eval_every, step - n, step) or update in (0, num_updates):
            latency = evaluate(agent, args, validation)
            metrics["eval/mean_latency_s"] = latency
            log.say_score(step, "mean latency in seconds", latency, rule)
            best_score = save_best_and_last(log.save, args, log.run, -latency, best_score)
        metrics["charts/SPS"] = log.advance(step)
        if update == num_updates:
            log.write(step, metrics)
            break
        left = 1 - update / num_updates
        for group in optimizer.param_groups:
            group["lr"] = group["first_lr"] * left
        std = args.std_last + left * (args.std_first - args.std_last)

        # One placement and its traffic in every environment.
        seeds: Any = np.repeat(rng.integers(1 << 30, size=groups), args.group_size)
        observation, _ = envs.reset(seed=seeds.tolist())
        with torch.no_grad():
            x = features(observation)
            policy = torch.distributions.Normal(agent(x), std)
            outputs = policy.sample()
            logprobs = policy.log_prob(outputs).sum(2)  # (B, N): each server's layers
            _, reward, _, _, info = envs.step(action(outputs, args))
        terms = info["reward_terms"]
        local = np.stack([terms[f"log_latency_server_{k}"] for k in range(servers)], axis=1)
        common = -np.log(info["episode_kpis"]["mean_latency_s"])[:, None]
        advantages = torch.zeros(n, servers)
        for credit, part in ((local, 1 - args.common_credit), (common, args.common_credit)):
            grouped = torch.as_tensor(credit, dtype=torch.float32).view(groups, args.group_size, -1)
            grouped = grouped - grouped.mean(1, keepdim=True)
            advantages += part * (grouped / (grouped.std() + 1e-8)).view(n, -1)

        # Update the policy.
        policy_loss = approx_kl = 0.0
        for _ in range(args.update_epochs):
            for index in torch.randperm(n).chunk(NUM_MINIBATCHES):
                policy = torch.distributions.Normal(agent(x[index]), std)
                logratio = policy.log_prob(outputs[index]).sum(2) - logprobs[index]
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
            "charts/episodic_return": float(np.mean(reward)),
            "charts/mean_latency_s": float(np.mean(info["episode_kpis"]["mean_latency_s"])),
            "charts/std": std,
            "losses/policy_loss": policy_loss,
            "losses/approx_kl": approx_kl,
        }
        log.write(step, metrics)
    return log.run


def load(meta: Mapping[str, str], weights: Mapping[str, Tensor], system: Any) -> CheckpointPolicy:
    """The policy of a checkpoint, see `servegym.agents.lib.checkpoint`."""
    args, shape = saved_args(Args, json_field(meta, "args")), json_field(meta, "shape")
    net = Agent(**shape)
    net.load_state_dict(weights)
    if system is not None and system.setting != meta["setting"]:
        net.table = None
    policy = CheckpointPolicy(
        "ppo_placement", "graph", args, net, lambda observation, _: greedy(net, args, observation)
    )
    policy.env_kwargs = {"action_mode": "layer_height"}
    return policy


if __name__ == "__main__":
    run_agent(train, Args)
