"""Proximal policy optimisation for the serverless ids: one categorical head per part of the plan.

What differs from ``ppo``: reusing what is warm needs every part of the plan to be as before, and a
policy that explores each part on its own breaks the plan at almost every request. The environments
are therefore made with ``keep_action=True``, whose last part of the action keeps the plan that is
warm; the other heads have no effect then, and no part in the probability and the entropy. A plan
matters for the next requests only through what it leaves warm: the discount is short.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from servegym._command_line import parse_settings
from servegym.agents.lib.arguments import Positive, PositiveShare, RunArgs, Share, Weight, run_agent
from servegym.agents.lib.checkpoint import (
    CheckpointPolicy,
    json_field,
    save_best_and_last,
    saved_args,
    write_checkpoint,
)
from servegym.agents.lib.environments import episode_seeds, make_envs
from servegym.agents.lib.evaluation import Validation
from servegym.agents.lib.run_log import RunLog, interval_passed, saves_when_interrupted
from servegym.baselines.serverless_moe.system import ServerlessSystem


@dataclass
class Args(RunArgs):
    """Command line of the agent."""

    env_id: str = "servegym/ServerlessMoEFlat-v1"
    """an environment with one Box and MultiDiscrete actions"""
    set: tuple[str, ...] = ()
    """environment arguments, key=value with a JSON value, as in model=gpt-oss-20b"""
    total_timesteps: int = 1_638_400
    """environment steps (requests) over all environments, rounded up to whole updates"""
    num_envs: int = 128
    """parallel environments"""
    num_steps: int = 32
    """steps of each environment between updates"""
    width: int = 64
    """hidden units of every layer"""
    learning_rate: Share = 1e-3
    """learning rate at first; it falls linearly to zero"""
    gamma: Share = 0.9
    """discount per request"""
    gae_lambda: Share = 0.9
    """lambda of the generalised advantage estimate"""
    num_minibatches: int = 4
    """minibatches per epoch"""
    update_epochs: int = 4
    """passes over the collected steps"""
    clip_coef: PositiveShare = 0.2
    """clipping of the probability ratio"""
    ent_coef: Weight = 0.01
    """weight of the entropy bonus at first; it falls linearly to zero"""
    vf_coef: Weight = 0.5
    """weight of the value loss"""
    max_grad_norm: Positive = 0.5
    """largest norm of a gradient"""
    eval_every: int = 81_920
    """steps between evaluations on the validation split"""
    eval_episodes: int = 16
    """episodes per evaluation"""


def layer(inputs: int, outputs: int, std: float = 2**0.5) -> nn.Linear:
    """A linear layer with orthogonal weights and no bias at first."""
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, std)
    nn.init.zeros_(linear.bias)
    return linear


def mlp(inputs: int, width: int, outputs: int, std: float) -> nn.Sequential:
    """The usual two hidden layers; ``std`` is that of the last weights."""
    first, second, last = layer(inputs, width), layer(width, width), layer(width, outputs, std)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)


class Agent(nn.Module):
    """Actor and critic over flat observations (B, columns).

    Args:
        columns: Width of the observation.
        choices: Number of values of each part of the action; the last keeps the plan that is warm.
        width: Hidden units of every layer.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, columns: int, choices: list[int], width: int) -> None:
        super().__init__()
        self.columns, self.choices = columns, choices
        self.actor = mlp(columns, width, sum(choices), 0.01)
        self.critic = mlp(columns, width, 1, 1.0)
        self.register_buffer("mean", torch.zeros(columns))
        self.register_buffer("variance", torch.ones(columns))
        self.register_buffer("count", torch.zeros(()))

    def update_statistics(self, x: Tensor) -> None:
        """Take observations (N, columns) into the running mean and variance of the columns."""
        total, shift = self.count + len(x), x.mean(0) - self.mean
        weight = len(x) / total
        self.variance += weight * (x.var(0, unbiased=False) - self.variance)
        self.variance += weight * (1 - weight) * shift.square()
        self.mean += weight * shift
        self.count.copy_(total)

    def standardise(self, x: Tensor) -> Tensor:
        """Observations with mean 0 and variance 1 a column, within 5 deviations."""
        return ((x - self.mean) / (self.variance + 1e-8).sqrt()).clamp(-5, 5)

    def log_probs(self, x: Tensor, mask: Tensor) -> list[Tensor]:
        """Log-probabilities (B, values) of each part; those of illegal values are very low."""
        logits = self.actor(self.standardise(x)).masked_fill(mask == 0, -1e8)
        return [part.log_softmax(1) for part in logits.split(self.choices, 1)]

    def value(self, x: Tensor) -> Tensor:
        """Values (B,)."""
        return self.critic(self.standardise(x)).squeeze(1)

    @torch.no_grad()
    def act(self, observation: Any, action_mask: Any) -> NDArray[np.int64]:
        """The likeliest value of every part, (B, parts).

        Raises:
            ValueError: If the columns or the parts are not those of the training.
        """
        x, mask = torch.as_tensor(observation).float(), torch.as_tensor(action_mask)
        if x.shape[-1] != self.columns or mask.shape[-1] != sum(self.choices):
            raise ValueError(
                f"trained on {self.columns} columns and choices {self.choices}, got "
                f"{x.shape[-1]} columns and {mask.shape[-1]} choices in all"
            )
        return torch.stack([part.argmax(1) for part in self.log_probs(x, mask)], 1).numpy()

    def forward(
        self, x: Tensor, mask: Tensor, action: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Actions (B, parts), drawn unless given; their log-probabilities, entropies, values (B,).

        Where the action keeps the warm plan, only the last part counts; the entropy is
        H(last) + p(last = 0) (H(part 1) + H(part 2) + ...).
        """
        parts = self.log_probs(x, mask)
        if action is None:
            action = torch.stack([p.exp().multinomial(1).squeeze(1) for p in parts], 1)
        chosen = [p.gather(1, action[:, k, None]).squeeze(1) for k, p in enumerate(parts)]
        entropy = [-(p.exp() * p).sum(1) for p in parts]
        log_prob = sum(chosen[:-1]) * (action[:, -1] == 0) + chosen[-1]
        total = sum(entropy[:-1]) * parts[-1][:, 0].exp() + entropy[-1]
        return action, log_prob, total, self.value(x)


def env_kwargs(args: Args) -> dict[str, Any]:
    """Arguments of the environment."""
    return parse_settings(args.set) | {"keep_action": True}


def advantages_of(
    rewards: Tensor, dones: Tensor, values: Tensor, next_value: Tensor, gamma: float, lam: float
) -> Tensor:
    """Generalised advantage estimate (T, B); ``next_value`` (B,) is that after the last step."""
    advantages, last_advantage = torch.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        alive = 1 - dones[t]
        delta = rewards[t] + gamma * alive * next_value - values[t]
        last_advantage = delta + gamma * lam * alive * last_advantage
        advantages[t], next_value = last_advantage, values[t]
    return advantages


@saves_when_interrupted
def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors).

    Raises:
        ValueError: If an argument is out of range.
    """
    n, num_steps, batch_size = args.num_envs, args.num_steps, args.num_envs * args.num_steps
    num_updates = -(-args.total_timesteps // batch_size)
    if args.num_minibatches > batch_size // 2:
        raise ValueError(
            f"num_minibatches={args.num_minibatches} must be from 1 to half of "
            f"num_envs * num_steps={batch_size}"
        )
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    envs = make_envs(args.env_id, n, **env_kwargs(args))
    box, multi = envs.single_observation_space, envs.single_action_space
    if not isinstance(box, gym.spaces.Box) or not isinstance(multi, gym.spaces.MultiDiscrete):
        raise ValueError(f"env_id: {args.env_id!r} has no single Box with MultiDiscrete actions")
    shape = {"columns": box.shape[0], "choices": multi.nvec.tolist(), "width": args.width}
    agent = Agent(**shape)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    meta = {
        "agent": "ppo_serverless",
        "args": json.dumps(asdict(args)),
        "shape": json.dumps(shape),
        "setting": ServerlessSystem.from_env(envs).setting,
    }
    log = RunLog(args, "ppo_serverless", args.env_id, parse_settings(args.set))
    log.save = partial(write_checkpoint, agent, meta)
    validation = Validation(args.env_id, args.eval_episodes, env_kwargs(args) | {"split": "val"})

    # Buffers (num_steps, num_envs, ...).
    obs = torch.zeros((num_steps, n, agent.columns))
    masks = torch.zeros((num_steps, n, sum(agent.choices)), dtype=torch.int8)
    actions = torch.zeros((num_steps, n, len(agent.choices)), dtype=torch.long)
    logprobs, rewards, values, dones = torch.zeros((4, num_steps, n))

    observed, info = envs.reset(seed=episode_seeds(args.seed, n))
    next_obs, mask = torch.as_tensor(observed), info["action_mask"]
    agent.update_statistics(next_obs)
    parts = {"agent": agent, "optimizer": optimizer, "envs": envs}
    update, mean_reward, best_score, metrics = log.restore(parts, (0, 0.0, -np.inf, {}))
    if log.saved is not None:
        observed, mask = envs.unwrapped.observe()  # pyright: ignore
        next_obs = torch.as_tensor(observed)
    while True:
        step = update * batch_size
        log.snapshot(step, parts, (update, mean_reward, best_score, metrics))
        # Evaluate: the random weights first, the last policy at the end.
        metrics |= {"charts/SPS": log.advance(step)}
        last = update == num_updates
        if not update or last or interval_passed(args.eval_every, step - batch_size, step):
            score = validation.score(agent.act)
            log.say_score(step, validation.metric, score, validation.rule)
            best_score = save_best_and_last(log.save, args, log.run, score, best_score)
        log.write(step, metrics)
        if last:
            break

        # Collect.
        frac = 1 - update / num_updates
        optimizer.param_groups[0]["lr"] = args.learning_rate * frac
        with torch.no_grad():
            for t in range(num_steps):
                obs[t], masks[t] = next_obs, torch.as_tensor(mask)
                actions[t], logprobs[t], _, values[t] = agent(obs[t], masks[t])
                observed, reward, terminated, truncated, info = envs.step(actions[t].numpy())
                next_obs, mask = torch.as_tensor(observed), info["action_mask"]
                done = terminated | truncated
                rewards[t], dones[t] = torch.as_tensor(reward), torch.as_tensor(done)
                for i in np.flatnonzero(truncated & ~terminated):  # the episode would go on
                    final = torch.as_tensor(info["final_obs"][i])
                    rewards[t, i] += args.gamma * agent.value(final[None])[0]
                log.add_rewards(reward, done)

            # Generalised advantage estimate of rewards less their running mean: an episode's end
            # after so many requests, which the observation does not announce, is then no gain.
            mean_reward += max(0.02, 1 / (update + 1)) * (rewards.mean().item() - mean_reward)
            paid, last_value = rewards - mean_reward, agent.value(next_obs)
            decay = args.gamma, args.gae_lambda
            advantages = advantages_of(paid, dones, values, last_value, *decay)

        # Update the policy and the value network.
        buffers = (obs, masks, actions, logprobs, advantages, advantages + values)
        batch = [x.reshape(batch_size, *x.shape[2:]) for x in buffers]
        for _ in range(args.update_epochs):
            for index in torch.randperm(batch_size).chunk(args.num_minibatches):
                b_obs, b_masks, b_actions, b_logprobs, b_advantages, b_returns = (
                    x[index] for x in batch
                )
                _, new_logprobs, entropy, value = agent(b_obs, b_masks, b_actions)
                logratio = new_logprobs - b_logprobs
                ratio = logratio.exp()
                b_advantages = (b_advantages - b_advantages.mean()) / (b_advantages.std() + 1e-8)
                clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                policy_loss = -torch.min(b_advantages * ratio, b_advantages * clipped).mean()
                value_loss = 0.5 * (value - b_returns).square().mean()
                loss = policy_loss - args.ent_coef * frac * entropy.mean()
                loss = loss + args.vf_coef * value_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
        agent.update_statistics(batch[0])
        update += 1
        outside = torch.as_tensor(ratio - 1).abs() > args.clip_coef
        metrics = {
            "charts/reward": rewards.mean().item(),
            "losses/policy_loss": policy_loss.item(),
            "losses/value_loss": value_loss.item(),
            "losses/entropy": entropy.mean().item(),
            "losses/approx_kl": torch.expm1(logratio).sub(logratio).mean().item(),
            "losses/clipfrac": outside.float().mean().item(),
        }
    envs.close()
    return log.run


def load(meta: Mapping[str, str], weights: Mapping[str, Tensor], system: Any) -> CheckpointPolicy:
    """The policy of a checkpoint, see `servegym.agents.lib.checkpoint`."""
    shape = json_field(meta, "shape")
    net = Agent(shape["columns"], shape["choices"], shape["width"])
    net.load_state_dict(weights)
    args = saved_args(Args, json_field(meta, "args"))
    policy = CheckpointPolicy("ppo_serverless", "flat", args, net, net.act)
    policy.env_kwargs = {"keep_action": True}
    return policy


if __name__ == "__main__":
    run_agent(train, Args)
