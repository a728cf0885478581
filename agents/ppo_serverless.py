"""Proximal policy optimisation for the serverless ids: one categorical head per part of the plan.

A decision is a plan for one request (remote ratio, order, memory of the main function and of the
remote ones, replicas), so the action is MultiDiscrete and its log-probability the sum over the
heads. A plan matters for the next requests only through what it leaves warm; the discount is
therefore short. ``python agents/ppo_serverless.py --help`` lists the options.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from servegym.agents.common import make_envs, write_checkpoint


@dataclass
class Args:
    """Command line of the agent."""

    seed: int = 1
    """seed of the networks, the exploration and the training episodes"""
    env_id: str = "servegym/ServerlessMoEFlat-v0"
    """an environment with one Box and MultiDiscrete actions"""
    set: tuple[str, ...] = ()
    """environment arguments, key=value with a JSON value, as in model=gpt-oss-20b"""
    width: int = 128
    """hidden units of every layer"""
    total_timesteps: int = 2_000_000
    """environment steps (requests) over all environments"""
    num_envs: int = 64
    """parallel environments"""
    num_steps: int = 64
    """steps of each environment between updates"""
    learning_rate: float = 1e-3
    """learning rate at first"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to zero"""
    gamma: float = 0.9
    """discount per request"""
    gae_lambda: float = 0.9
    """lambda of the generalised advantage estimate"""
    num_minibatches: int = 8
    """minibatches per epoch"""
    update_epochs: int = 4
    """passes over the collected steps"""
    clip_coef: float = 0.2
    """clipping of the probability ratio"""
    ent_coef: float = 0.01
    """weight of the entropy bonus at first; it falls linearly to zero"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """gradients are clipped to this norm"""
    eval_every: int = 200_000
    """steps between evaluations on the validation split; the best policy is kept"""
    eval_episodes: int = 32
    """episodes per evaluation"""
    torch_threads: int = 1
    """threads of torch"""
    cuda: bool = False
    """run the networks on a GPU"""
    track: bool = False
    """log to wandb as well"""
    wandb_project_name: str = "servegym"
    """wandb project"""
    wandb_entity: str | None = None
    """wandb team"""
    save_model: bool = True
    """write best.safetensors and last.safetensors"""
    out_dir: str = "runs"
    """folder of the runs"""
    run_name: str = ""
    """folder of this run (default: ppo_serverless_seed)"""


def layer(inputs: int, outputs: int, std: float = 2**0.5) -> nn.Linear:
    """A linear layer with orthogonal weights and no bias at first."""
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, std)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    """Actor and critic over flat observations (B, columns) with one head per part of the action."""

    def __init__(self, columns: int, choices: Sequence[int], width: int) -> None:
        super().__init__()
        self.columns, self.choices, self.width = columns, list(choices), width
        self.actor, self.critic = (
            nn.Sequential(layer(columns, width), nn.Tanh(), layer(width, width), nn.Tanh(),
                          layer(width, out, std)) for out, std in ((sum(choices), 0.01), (1, 1.0))
        )  # fmt: skip

    def forward(self, x: Tensor, mask: Tensor) -> tuple[list[Tensor], Tensor]:
        """Log-probabilities of every head, each (B, choices), and values (B,)."""
        logits = self.actor(x).masked_fill(mask == 0, -1e8)
        parts = [part.log_softmax(-1) for part in logits.split(self.choices, -1)]
        return parts, self.critic(x).squeeze(-1)


def log_prob(heads: Sequence[Tensor], action: Tensor) -> Tensor:
    """Log-probability (B,) of actions (B, parts)."""
    chosen = [head.gather(1, action[:, k : k + 1]) for k, head in enumerate(heads)]
    return torch.cat(chosen, 1).sum(1)


def entropies(heads: Sequence[Tensor]) -> Tensor:
    """Entropy (B, parts) of every head."""
    return torch.stack([-(head.exp() * head).sum(-1) for head in heads], 1)


def masks(info: dict[str, Any], num_envs: int, actions: int) -> NDArray[np.int8]:
    """The action masks of a step; all ones where the environment gives none."""
    return info.get("action_mask", np.ones((num_envs, actions), np.int8))


def evaluate(agent: Agent, args: Args) -> tuple[float, list[float]]:
    """Mean reward per request of the greedy policy on fixed validation episodes.

    Returns:
        The mean and, for each part of the action, the share of its commonest choice: near 1 the
        policy has collapsed onto a constant.
    """
    n = args.eval_episodes
    envs = make_envs(args, n, split="val")
    obs, info = envs.reset(seed=10_000)
    total, steps, alive = 0.0, 0, np.ones(n, bool)
    counts = [np.zeros(k) for k in agent.choices]
    device = next(agent.parameters()).device
    while alive.any():
        mask = torch.as_tensor(masks(info, n, sum(agent.choices)), device=device)
        with torch.no_grad():
            heads, _ = agent(torch.as_tensor(obs, device=device), mask)
        action = torch.stack([head.argmax(-1) for head in heads], 1).cpu().numpy()
        for k, count in enumerate(counts):
            count += np.bincount(action[alive, k], minlength=len(count))
        obs, reward, terminated, truncated, info = envs.step(action)
        total, steps = total + float(reward[alive].sum()), steps + int(alive.sum())
        alive &= ~(terminated | truncated)
    envs.close()
    return total / steps, [float(count.max() / count.sum()) for count in counts]


def save_policy(agent: Agent, args: Args, path: Path) -> None:
    """Weights, arguments and shape in one safetensors file."""
    shape = {"columns": agent.columns, "choices": agent.choices, "width": agent.width}
    meta = {"args": json.dumps(asdict(args)), "shape": json.dumps(shape)}
    write_checkpoint(agent, meta | {"agent": "ppo_serverless"}, path)


def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors)."""
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    envs, n = make_envs(args, args.num_envs), args.num_envs
    box, multi = envs.single_observation_space, envs.single_action_space
    if not isinstance(box, gym.spaces.Box) or not isinstance(multi, gym.spaces.MultiDiscrete):
        raise ValueError(f"env_id: {args.env_id!r} has no single Box with MultiDiscrete actions")
    (columns,), choices = box.shape, [int(k) for k in multi.nvec]
    actions, parts = sum(choices), len(choices)
    agent = Agent(columns, choices, args.width).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    run = Path(args.out_dir) / (args.run_name or f"ppo_serverless_{args.seed}")
    run.mkdir(parents=True, exist_ok=True)
    log = open(run / "metrics.jsonl", "w")  # noqa: SIM115
    if args.track:
        import wandb

        wandb.init(project=args.wandb_project_name, entity=args.wandb_entity, config=asdict(args),
                   name=run.name, dir=str(run))  # fmt: skip

    shape = (args.num_steps, n)
    b_obs = torch.zeros((*shape, columns), device=device)
    b_mask = torch.zeros((*shape, actions), dtype=torch.int8, device=device)
    b_action = torch.zeros((*shape, parts), dtype=torch.long, device=device)
    b_logp, b_reward, b_value, b_next = (torch.zeros(shape, device=device) for _ in range(4))
    b_done = torch.zeros(shape, device=device)

    obs, info = envs.reset(seed=args.seed)
    mask = masks(info, n, actions)
    returns, finished, step, best, evaluated = np.zeros(n), [], 0, -np.inf, 0
    size = args.num_steps * n
    updates = args.total_timesteps // size
    begin = time.perf_counter()
    bar = Progress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    task = bar.add_task("ppo_serverless", total=updates)
    bar.start()
    for iteration in range(updates):
        left = 1 - iteration / updates
        optimizer.param_groups[0]["lr"] = args.learning_rate * (left if args.anneal_lr else 1.0)
        with torch.no_grad():
            for t in range(args.num_steps):
                b_obs[t], b_mask[t] = torch.as_tensor(obs), torch.as_tensor(mask)
                heads, b_value[t] = agent(b_obs[t], b_mask[t])
                if t:
                    b_next[t - 1] = torch.where(b_done[t - 1] > 0, b_next[t - 1], b_value[t])
                drawn = [torch.multinomial(head.exp(), 1) for head in heads]
                b_action[t] = torch.cat(drawn, 1)
                b_logp[t] = log_prob(heads, b_action[t])
                obs, reward, terminated, truncated, info = envs.step(b_action[t].cpu().numpy())
                mask, done = masks(info, n, actions), terminated | truncated
                b_reward[t], b_done[t] = torch.as_tensor(reward), torch.as_tensor(done)
                b_next[t] = 0.0  # what follows the step: nothing after a termination
                for i in np.flatnonzero(truncated & ~terminated):
                    final = torch.as_tensor(info["final_obs"][i], device=device)[None]
                    ones = torch.ones((1, actions), device=device)
                    b_next[t, i] = agent(final.float(), ones)[1][0]
                returns += reward
                finished += returns[done].tolist()
                returns[done] = 0
            here = (torch.as_tensor(obs, device=device), torch.as_tensor(mask, device=device))
            b_next[-1] = torch.where(b_done[-1] > 0, b_next[-1], agent(*here)[1])
            advantage, running = torch.zeros(shape, device=device), torch.zeros(n, device=device)
            for t in reversed(range(args.num_steps)):
                delta = b_reward[t] + args.gamma * b_next[t] - b_value[t]
                running = delta + args.gamma * args.gae_lambda * (1 - b_done[t]) * running
                advantage[t] = running
        step += size
        flat = [x.reshape(size, *x.shape[2:]) for x in
                (b_obs, b_mask, b_action, b_logp, advantage, advantage + b_value)]  # fmt: skip
        for _ in range(args.update_epochs):
            for index in torch.randperm(size, device=device).chunk(args.num_minibatches):
                x, legal, action, old, adv, goal = (f[index] for f in flat)
                heads, value = agent(x, legal)
                log_ratio = log_prob(heads, action) - old
                ratio = log_ratio.exp()
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                policy_loss = -torch.min(adv * ratio, adv * clipped).mean()
                value_loss = 0.5 * (value - goal).square().mean()
                entropy = entropies(heads).mean(0)
                bonus = args.ent_coef * left * entropy.sum()
                loss = policy_loss + args.vf_coef * value_loss - bonus
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
        sps = step / (time.perf_counter() - begin)
        metrics = {
            "global_step": step, "charts/SPS": sps, "losses/policy_loss": policy_loss.item(),
            "losses/value_loss": value_loss.item(), "losses/entropy": entropy.sum().item(),
            "losses/approx_kl": torch.expm1(log_ratio).sub(log_ratio).mean().item(),
        }  # fmt: skip
        metrics |= {f"charts/entropy_{k}": e for k, e in enumerate(entropy.tolist())}
        if finished:
            metrics["charts/episodic_return"], finished = float(np.mean(finished)), []
        if step // args.eval_every > evaluated or iteration + 1 == updates:
            evaluated = step // args.eval_every
            result, shares = evaluate(agent, args)
            metrics |= {"eval/score": result}
            metrics |= {f"eval/commonest_share_{k}": share for k, share in enumerate(shares)}
            bar.console.print(f"step {step}: mean reward {result:.4f}")
            if args.save_model:
                save_policy(agent, args, run / "last.safetensors")
                if result > best:
                    save_policy(agent, args, run / "best.safetensors")
            best = max(best, result)
        log.write(json.dumps(metrics) + "\n")
        log.flush()
        if args.track:
            wandb.log(metrics, step=step)
        bar.update(task, advance=1, description=f"ppo_serverless {sps:.0f} SPS")
    bar.stop()
    log.close()
    envs.close()
    if args.track:
        wandb.finish()
    return run


if __name__ == "__main__":
    train(tyro.cli(Args, config=(tyro.conf.FlagConversionOff,)))
