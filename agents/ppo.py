"""Proximal policy optimisation with action masks, for any id with one Box and Discrete actions.

``--arch shared`` (the default where the environment has experts) runs one small network over every
expert's part of the flat routing observation, so that what is learned at one expert serves all;
``--arch mlp`` is the plain network.

Neighbours: `ppo_han` reads the routing graph and corrects a heuristic; `ppo_serverless` has one
head per part of a plan. There are no snapshots: a stopped run begins anew.
``python agents/ppo.py --help`` lists the options.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from torch import Tensor, nn

from servegym.agents.lib import checkpoint
from servegym.agents.lib.arguments import RunArgs
from servegym.agents.lib.checkpoint import CheckpointPolicy
from servegym.agents.lib.environments import (
    action_masks,
    episode_seeds,
    make_envs,
)
from servegym.agents.lib.run_log import RunLog
from servegym.envs._command_line import parse_settings

ROUTING_ENV = {
    "profiles": "edge-6-heterogeneous",
    "latency_requirement_s": 0.030,
    "rate": (6.0, 11.0),  # requests/s; each training episode draws its own
    "reward": "paid_forward",
}
"""Arguments of the routing ids; ``--set`` changes them and adds others."""

CLIP_COEF = 0.2  # clipping of the probability ratio
VF_COEF = 0.5  # weight of the value loss
MAX_GRAD_NORM = 0.5


@dataclass
class Args(RunArgs):
    """Command line of the agent."""

    env_id: str = "servegym/LLMRoutingFlat-v0"
    """an environment with one Box and Discrete actions"""
    set: tuple[str, ...] = ()
    """environment arguments, key=value with a JSON value, as in rate=[5,5] num_experts=3"""
    arch: Literal["auto", "shared", "mlp"] = "auto"
    """one network over every expert's part of the observation, or one over all of it"""
    width: int = 64
    """hidden units of every layer"""
    total_timesteps: int = 3_000_000
    """environment steps (decisions) over all environments"""
    num_envs: int = 64
    """parallel environments"""
    num_steps: int = 128
    """steps of each environment between updates"""
    learning_rate: float = 1e-3
    """learning rate, falling linearly to zero with anneal_lr"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to zero"""
    gamma: float = 0.99
    """discount per decision"""
    gae_lambda: float = 0.95
    """lambda of the generalised advantage estimate"""
    num_minibatches: int = 8
    """minibatches per epoch"""
    update_epochs: int = 3
    """passes over the collected steps"""
    ent_coef: float = 0.003
    """weight of the entropy bonus"""
    eval_every: int = 300_000
    """steps between evaluations (validation split on routing ids); the best policy is saved"""
    eval_episodes: int = 16
    """episodes per evaluation"""
    eval_rate: float = 9.0
    """arrival rate of the evaluation (routing ids only)"""
    cuda: bool = False
    """run the networks on a GPU"""


def layer(inputs: int, outputs: int, std: float = 2**0.5) -> nn.Linear:
    """A linear layer with orthogonal weights and no bias at first."""
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, std)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    """Actor and critic over flat observations (B, columns); ``experts`` = 0 is the plain MLP."""

    def __init__(self, columns: int, actions: int, experts: int, width: int) -> None:
        super().__init__()
        self.experts, self.columns, self.actions, self.width = experts, columns, actions, width
        if not experts:
            self.actor, self.critic = (
                nn.Sequential(
                    layer(columns, width),
                    nn.Tanh(),
                    layer(width, width),
                    nn.Tanh(),
                    layer(width, out, std),
                )
                for out, std in ((actions, 0.01), (1, 1.0))
            )
            return
        part = (columns - 1) // experts  # a row is L, then one part per expert
        if part * experts + 1 != columns or actions != experts + 1:
            raise ValueError(
                f"arch: 'shared' needs 1 + {experts} equal parts, got {columns} columns"
            )
        self.who = nn.Parameter(torch.randn(experts, 8))
        self.trunk = nn.Sequential(
            layer(1 + part + 8, width), nn.ReLU(), layer(width, width), nn.ReLU()
        )
        self.score = nn.Sequential(layer(2 * width, width), nn.ReLU(), layer(width, 1, 0.01))
        self.drop = nn.Sequential(layer(width, width), nn.ReLU(), layer(width, 1, 0.01))
        self.critic = nn.Sequential(layer(width, width), nn.ReLU(), layer(width, 1, 1.0))

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, A) with illegal actions at a large negative, and values (B,)."""
        if self.experts:
            batch, n = len(x), self.experts
            parts = [x[:, :1, None].expand(batch, n, 1), x[:, 1:].view(batch, n, -1)]
            h = self.trunk(torch.cat([*parts, self.who.expand(batch, n, -1)], -1))
            common = h.mean(1)
            pair = torch.cat([h, common[:, None].expand_as(h)], -1)
            logits = torch.cat([self.drop(common), self.score(pair).squeeze(-1)], -1)
            value = self.critic(common)
        else:
            logits, value = self.actor(x), self.critic(x)
        return logits.masked_fill(mask == 0, -1e8).log_softmax(-1), value.squeeze(-1)


def env_kwargs(args: Args) -> dict[str, Any]:
    """Arguments of the training environment."""
    routing = args.env_id.startswith("servegym/LLMRouting")
    return (ROUTING_ENV if routing else {}) | parse_settings(args.set)


def evaluate(agent: Agent, args: Args) -> float:
    """Greedy policy on fixed episodes: average QoS on routing ids, mean return elsewhere."""
    kwargs, n = env_kwargs(args), args.eval_episodes
    routing = args.env_id.startswith("servegym/LLMRouting")
    if routing:
        kwargs |= {"rate": args.eval_rate, "split": "val", "reward": "completed_qos"}
    envs = make_envs(args.env_id, n, **kwargs)
    obs, info = envs.reset(seed=10_000)
    total, alive, steps = np.zeros(n), np.ones(n, bool), 0
    device = next(agent.parameters()).device
    while alive.any():
        mask = torch.as_tensor(action_masks(info, n, agent.actions), device=device)
        with torch.no_grad():
            log_pi, _ = agent(torch.as_tensor(obs, device=device), mask)
        obs, reward, terminated, truncated, info = envs.step(log_pi.argmax(-1).cpu().numpy())
        total, steps = total + reward * alive, steps + int(alive.sum())
        alive &= ~(terminated | truncated)
    envs.close()
    return float(total.sum() / steps if routing else total.mean())


def save_policy(agent: Agent, args: Args, path: Path) -> None:
    """Weights, arguments and shape in one safetensors file."""
    shape = {k: getattr(agent, k) for k in ("columns", "actions", "experts", "width")}
    meta = {"agent": "ppo", "args": json.dumps(asdict(args)), "shape": json.dumps(shape)}
    checkpoint.write_checkpoint(agent, meta, path)


def load(meta: Mapping[str, str], weights: Mapping[str, Tensor], system: Any) -> CheckpointPolicy:
    """The policy of a checkpoint, see `servegym.agents.lib.checkpoint`."""
    net = Agent(**checkpoint.json_field(meta, "shape"))
    net.load_state_dict(weights)
    args = checkpoint.saved_args(Args, checkpoint.json_field(meta, "args"))

    def decide(observation: Any, action_mask: Any) -> NDArray[np.int64]:
        rows = torch.as_tensor(np.asarray(observation)).float()
        mask = torch.as_tensor(np.asarray(action_mask))
        if rows.shape[-1] != net.columns or mask.shape[-1] != net.actions:
            raise ValueError(
                f"trained on {net.columns} columns and {net.actions} actions, got "
                f"{rows.shape[-1]} and {mask.shape[-1]}"
            )
        return net(rows, mask)[0].argmax(-1).numpy()

    view = "experts" if "Experts" in args.env_id else "flat"
    return CheckpointPolicy("ppo", view, args, net, decide, env_kwargs(args))


def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors)."""
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    envs, n = make_envs(args.env_id, args.num_envs, **env_kwargs(args)), args.num_envs
    box, discrete = envs.single_observation_space, envs.single_action_space
    if not isinstance(box, gym.spaces.Box) or not isinstance(discrete, gym.spaces.Discrete):
        raise ValueError(f"env_id: {args.env_id!r} has no single Box with Discrete actions")
    (columns,), actions = box.shape, int(discrete.n)
    experts = getattr(getattr(envs, "problem", None), "num_experts", 0)
    if args.arch == "shared" and not experts:
        raise ValueError(f"arch: 'shared' needs an environment with experts, got {args.env_id!r}")
    parts = bool(experts) and (columns - 1) % experts == 0 and actions == experts + 1
    shared = args.arch == "shared" or (args.arch == "auto" and parts)
    agent = Agent(columns, actions, experts if shared else 0, args.width).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    run = Path(args.out_dir) / (args.run_name or f"ppo_{args.arch}_{args.seed}")
    log = RunLog(run, args, "ppo")

    shape = (args.num_steps, n)
    b_obs = torch.zeros((*shape, columns), device=device)
    b_mask = torch.zeros((*shape, actions), dtype=torch.int8, device=device)
    b_action = torch.zeros(shape, dtype=torch.long, device=device)
    b_logp, b_reward, b_value, b_next = (torch.zeros(shape, device=device) for _ in range(4))
    b_done = torch.zeros(shape, device=device)

    obs, info = envs.reset(seed=episode_seeds(args.seed, args.num_envs))
    mask = action_masks(info, n, actions)
    returns, finished, step, best, evaluated = np.zeros(n), [], 0, -np.inf, 0
    updates = args.total_timesteps // (args.num_steps * n)
    size = args.num_steps * n
    for iteration in range(updates):
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / updates)
        with torch.no_grad():
            for t in range(args.num_steps):
                b_obs[t], b_mask[t] = torch.as_tensor(obs), torch.as_tensor(mask)
                log_pi, b_value[t] = agent(b_obs[t], b_mask[t])
                if t:
                    b_next[t - 1] = torch.where(b_done[t - 1] > 0, b_next[t - 1], b_value[t])
                b_action[t] = torch.multinomial(log_pi.exp(), 1).squeeze(1)
                b_logp[t] = log_pi.gather(1, b_action[t][:, None]).squeeze(1)
                obs, reward, terminated, truncated, info = envs.step(b_action[t].cpu().numpy())
                mask, done = action_masks(info, n, actions), terminated | truncated
                b_reward[t], b_done[t] = torch.as_tensor(reward), torch.as_tensor(done)
                b_next[t] = 0.0  # the value after the step; 0 after a termination
                for i in np.flatnonzero(truncated & ~terminated):
                    final = torch.as_tensor(info["final_obs"][i], device=device)[None]
                    ones = torch.ones((1, actions), device=device)
                    b_next[t, i] = agent(final.float(), ones)[1][0]
                returns += reward
                finished += returns[done].tolist()
                returns[done] = 0
            legal = torch.as_tensor(mask, device=device)
            _, last = agent(torch.as_tensor(obs, device=device), legal)
            b_next[-1] = torch.where(b_done[-1] > 0, b_next[-1], last)
            advantage, running = torch.zeros(shape, device=device), torch.zeros(n, device=device)
            for t in reversed(range(args.num_steps)):
                delta = b_reward[t] + args.gamma * b_next[t] - b_value[t]
                running = delta + args.gamma * args.gae_lambda * (1 - b_done[t]) * running
                advantage[t] = running
        step += size
        flat = [
            x.reshape(size, *x.shape[2:])
            for x in (b_obs, b_mask, b_action, b_logp, advantage, advantage + b_value)
        ]
        for _ in range(args.update_epochs):
            for index in torch.randperm(size, device=device).chunk(args.num_minibatches):
                x, legal, action, old, adv, value_target = (f[index] for f in flat)
                log_pi, value = agent(x, legal)
                log_ratio = log_pi.gather(1, action[:, None]).squeeze(1) - old
                ratio = log_ratio.exp()
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                clipped = ratio.clamp(1 - CLIP_COEF, 1 + CLIP_COEF)
                policy_loss = -torch.min(adv * ratio, adv * clipped).mean()
                value_loss = 0.5 * (value - value_target).square().mean()
                entropy = -(log_pi.exp() * log_pi).sum(-1).mean()
                loss = policy_loss + VF_COEF * value_loss - args.ent_coef * entropy
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
                optimizer.step()
        metrics = {
            "charts/SPS": log.advance(step),
            "losses/policy_loss": policy_loss.item(),
            "losses/value_loss": value_loss.item(),
            "losses/entropy": entropy.item(),
            "losses/approx_kl": torch.expm1(log_ratio).sub(log_ratio).mean().item(),
        }
        if finished:
            metrics["charts/episodic_return"], finished = float(np.mean(finished)), []
        if step // args.eval_every > evaluated or iteration + 1 == updates:
            evaluated = step // args.eval_every
            result = evaluate(agent, args)
            metrics["eval/score"] = result
            log.bar.console.print(f"step {step}: evaluation {result:.4f}")
            best = checkpoint.save_best_and_last(
                partial(save_policy, agent, args), args, run, result, best
            )
        log.write(step, metrics)
    log.close()
    envs.close()
    return run


if __name__ == "__main__":
    train(tyro.cli(Args, config=(tyro.conf.FlagConversionOff,)))
