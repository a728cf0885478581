"""Proximal policy optimisation (Schulman et al., 2017): the file to start with.

It takes any id with one Box and Discrete actions. A Box with a row for each expert or replica, as
those of ``LLMRoutingSummary`` and ``PrefixRoutingSummary``, goes through one small network for all
rows, so that the policy routes for any number of them; any other goes through the usual two layers.

As in CleanRL's ``ppo.py``, but for the masks of illegal actions and for values of the last
observation where a time limit ends an episode. `ppo_requests` pays each decision what its own
request counts.
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

from servegym.agents.lib import checkpoint, environments
from servegym.agents.lib.arguments import Positive, PositiveShare, RunArgs, Share, Weight, run_agent
from servegym.agents.lib.evaluation import Validation
from servegym.agents.lib.run_log import RunLog, evaluation_due, saves_when_interrupted
from servegym.envs.families import find_family

ROUTING = {"rate": 8.0, "reward": "completed_qos"}
"""Arguments of the ids of LLM routing; ``--set`` changes them and adds others."""
CUT = {"max_episode_steps": 999}
"""Besides, of their trainings: an episode is cut off before its last request, whose reward has all
that is still served, with no sign in the observation. A cut leaves that to the critic."""


@dataclass
class Args(RunArgs):
    """Command line of the agent."""

    env_id: str = "servegym/LLMRoutingSummary-v3"
    """an environment with one Box and Discrete actions"""
    set: tuple[str, ...] = ()
    """environment arguments, key=value with a JSON value, as in rate=[5,5] num_experts=3"""
    total_timesteps: int = 250_000
    """environment steps (decisions) over all environments"""
    learning_rate: Share = 1e-3
    """learning rate, falling linearly to zero"""
    num_envs: int = 64
    """parallel environments"""
    num_steps: int = 64
    """steps of each environment between updates"""
    gamma: Share = 0.98
    """discount per decision"""
    gae_lambda: Share = 0.95
    """lambda of the generalised advantage estimate"""
    num_minibatches: int = 8
    """minibatches an epoch"""
    update_epochs: int = 3
    """passes over the collected steps"""
    clip_coef: PositiveShare = 0.2
    """clipping of the probability ratio"""
    ent_coef: Weight = 0.003
    """weight of the entropy bonus"""
    vf_coef: Weight = 0.5
    """weight of the value loss"""
    max_grad_norm: Positive = 0.5
    """largest norm of a gradient"""
    width: int = 64
    """hidden units of every layer"""
    eval_every: int = 50_000
    """steps between evaluations, on the validation split of routing ids"""
    eval_episodes: int = 20
    """episodes an evaluation"""


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


class Moments(nn.Module):
    """Running mean and variance of the last axis, by which inputs are scaled."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(1e-4))
        self.register_buffer("mean", torch.zeros(columns))
        self.register_buffer("var", torch.ones(columns))

    def update(self, x: Tensor) -> None:
        """Take in observations (..., columns) (Chan et al., 1979)."""
        x = x.reshape(-1, x.shape[-1])
        total = self.count + len(x)
        new = x.mean(0) - self.mean
        squares = self.var * self.count + x.var(0, correction=0) * len(x)
        self.var = (squares + new.square() * self.count * len(x) / total) / total
        self.mean = self.mean + new * len(x) / total
        self.count = total

    def forward(self, x: Tensor) -> Tensor:
        """Inputs of mean 0 and variance 1, at most 10 from 0."""
        return ((x - self.mean) * (self.var + 1e-8).rsqrt()).clamp(-10, 10)


class Agent(nn.Module):
    """Actor and critic over scaled observations of ``shape``, (columns,) or (rows, columns).

    With rows, the actions from ``first`` on belong to the rows and the others (drop, hold, reject,
    where there are) to all rows together.
    """

    def __init__(self, shape: tuple[int, ...], actions: int, width: int, first: int = 1) -> None:
        super().__init__()
        self.shape, self.actions, self.width, self.first = shape, actions, width, first
        self.moments = Moments(shape[-1])
        if len(shape) == 1:
            self.actor = mlp(shape[0], width, actions, 0.01)
            self.critic = mlp(shape[0], width, 1, 1.0)
        else:
            inner, outer = layer(shape[1], width), layer(width, width)
            self.rows = nn.Sequential(inner, nn.ReLU(), outer, nn.ReLU())
            self.mean = layer(width, 2 * width)
            self.row = layer(width, width)
            self.score = layer(width, 1, 0.01)
            if actions > shape[0]:
                self.common = layer(width, actions - shape[0], 0.01)
            self.critic = layer(width, 1, 1.0)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, A), illegal actions at a large negative, and values (B,)."""
        if len(self.shape) == 1:
            logits, value = self.actor(x), self.critic(x)
        else:
            h = self.rows(x)
            for_rows, common = self.mean(h.mean(1)).chunk(2, -1)
            common = common.relu()
            logits = self.score((self.row(h) + for_rows[:, None]).relu()).squeeze(-1)
            if self.actions > self.shape[0]:
                others = self.common(common)
                logits = torch.cat([others[:, : self.first], logits, others[:, self.first :]], -1)
            value = self.critic(common)
        return logits.masked_fill(mask == 0, -1e8).log_softmax(-1), value.squeeze(-1)

    def observe(self, obs: Any, info: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Take in observations; returns them scaled, and their masks."""
        x = torch.as_tensor(obs).float()
        self.moments.update(x)
        mask = environments.action_masks(info, len(x), self.actions)
        return self.moments(x), torch.as_tensor(mask)

    @torch.no_grad()
    def act(self, observation: Any, action_mask: Any = None) -> NDArray[np.int64]:
        """The likeliest legal action of every row.

        Raises:
            ValueError: If the columns or the actions are not those of the training.
        """
        x = torch.as_tensor(observation).float()
        actions = self.actions + (x.shape[1] - self.shape[0] if x.ndim > 2 else 0)
        mask = torch.ones(1, actions) if action_mask is None else torch.as_tensor(action_mask)
        if x.shape[-1] != self.shape[-1] or mask.shape[-1] != actions:
            raise ValueError(
                f"trained on observations {self.shape} with {self.actions} actions, got "
                f"{tuple(x.shape[1:])} and {mask.shape[-1]}"
            )
        return self(self.moments(x), mask)[0].argmax(-1).numpy()


def routes_prompts(args: Args) -> bool:
    """Whether the id is one of LLM routing."""
    family = find_family(args.env_id)
    return family is not None and family.name == "llm_routing"


def env_kwargs(args: Args, cut: bool = True) -> dict[str, Any]:
    """Arguments of the environment, with or without the `CUT` of a training."""
    usual = (ROUTING | (CUT if cut else {})) if routes_prompts(args) else {}
    return environments.routing_arguments(usual, args.set)


def network_settings(envs: gym.vector.VectorEnv, args: Args) -> dict[str, Any]:
    """The arguments of the `Agent` of an environment."""
    box, discrete = envs.single_observation_space, envs.single_action_space
    if not isinstance(box, gym.spaces.Box) or not isinstance(discrete, gym.spaces.Discrete):
        raise ValueError(f"env_id: {args.env_id!r} has no single Box with Discrete actions")
    shape, actions = box.shape, int(discrete.n)
    if len(shape) > 2 or (len(shape) == 2 and actions < shape[0]):
        raise ValueError(f"env_id: {args.env_id!r} has a Box {shape}; flatten it first")
    first = int(routes_prompts(args))  # action 0 drops there
    return {"shape": shape, "actions": actions, "width": args.width, "first": first}


def estimate_advantages(
    rewards: Tensor, values: Tensor, following: Tensor, dones: Tensor, args: Args
) -> Tensor:
    """Generalised advantages (Schulman et al., 2016) of steps (T, B).

    ``following`` are the values of what the steps led to, ``dones`` whether that ended an episode.
    """
    delta = rewards + args.gamma * following - values
    advantages, trace = torch.zeros_like(rewards), torch.zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        trace = delta[t] + args.gamma * args.gae_lambda * (1 - dones[t]) * trace
        advantages[t] = trace
    return advantages


def learn(
    agent: Agent, optimizer: torch.optim.Optimizer, buffers: tuple[Tensor, ...], args: Args
) -> dict[str, float]:
    """Pass over collected steps in minibatches; returns the last losses.

    The buffers, (T, B, ...) each, are scaled observations, masks, actions, their log-probabilities,
    advantages and returns.
    """
    flat = [part.flatten(0, 1) for part in buffers]
    for _ in range(args.update_epochs):
        for index in torch.randperm(len(flat[0])).chunk(args.num_minibatches):
            x, mask, action, old, adv, target = (part[index] for part in flat)
            log_pi, value = agent(x, mask)
            log_ratio = log_pi.gather(1, action[:, None]).squeeze(1) - old
            ratio = log_ratio.exp()
            adv = (adv - adv.mean()) / (adv.std(correction=0) + 1e-8)
            clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
            policy_loss = -torch.min(adv * ratio, adv * clipped).mean()
            value_loss = 0.5 * (value - target).square().mean()
            entropy = -(log_pi.exp() * log_pi).sum(-1).mean()
            loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()
    return {
        "losses/policy_loss": policy_loss.item(),
        "losses/value_loss": value_loss.item(),
        "losses/entropy": entropy.item(),
        "losses/approx_kl": torch.expm1(log_ratio).sub(log_ratio).mean().item(),
    }


def load(meta: Mapping[str, str], weights: Mapping[str, Tensor], system: Any) -> Any:
    """The policy of a checkpoint, see `servegym.agents.lib.checkpoint`."""
    net = Agent(**checkpoint.json_field(meta, "shape"))
    net.load_state_dict(weights)
    args = checkpoint.saved_args(Args, checkpoint.json_field(meta, "args"))
    family = find_family(args.env_id)
    view = "flat" if family is None else family.view_of(args.env_id)
    return checkpoint.CheckpointPolicy("ppo", view, args, net, net.act, env_kwargs(args))


@saves_when_interrupted
def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors)."""
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    n = min(args.num_envs, args.total_timesteps)
    steps = min(args.num_steps, -(-args.total_timesteps // n))
    updates = -(-args.total_timesteps // (steps * n))
    envs = environments.make_envs(args.env_id, n, **env_kwargs(args))
    settings = network_settings(envs, args)
    agent = Agent(**settings)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    log = RunLog(args, "ppo", args.env_id, env_kwargs(args))
    meta = {"agent": "ppo", "args": json.dumps(asdict(args)), "shape": json.dumps(settings)}
    log.save = partial(checkpoint.write_checkpoint, agent, meta)
    validation = Validation(args.env_id, args.eval_episodes, env_kwargs(args, cut=False))

    x, mask = agent.observe(*envs.reset(seed=environments.episode_seeds(args.seed, n)))
    parts = {"agent": agent, "optimizer": optimizer, "envs": envs}
    update, best, metrics = log.restore(parts, (0, -np.inf, {}))
    if log.saved is not None and find_family(args.env_id):  # other ids begin anew
        obs, mask = envs.unwrapped.observe()  # pyright: ignore
        x, mask = agent.moments(torch.as_tensor(obs).float()), torch.as_tensor(mask)

    obs_buf = torch.zeros((steps, *x.shape))
    mask_buf = torch.zeros((steps, *mask.shape), dtype=torch.int8)
    action_buf = torch.zeros((steps, n), dtype=torch.long)
    logp_buf, rewards, values, after, dones = (torch.zeros((steps, n)) for _ in range(5))
    while True:
        step = update * steps * n
        log.snapshot(step, parts, (update, best, metrics))
        # Evaluate: the random weights first, the last policy at the end.
        if evaluation_due(args.eval_every, step - steps * n, step) or update == updates:
            score = validation.score(agent.act)
            log.say_score(step, validation.metric, score, validation.rule)
            best = checkpoint.save_best_and_last(log.save, args, log.run, score, best)
        log.write(step, metrics)
        if update == updates:
            break

        # Collect.
        with torch.no_grad():
            for t in range(steps):
                obs_buf[t], mask_buf[t] = x, mask
                log_pi, values[t] = agent(x, mask)
                action_buf[t] = torch.multinomial(log_pi.exp(), 1).squeeze(1)
                logp_buf[t] = log_pi.gather(1, action_buf[t][:, None]).squeeze(1)
                obs, reward, terminated, truncated, info = envs.step(action_buf[t].numpy())
                x, mask = agent.observe(obs, info)
                done = terminated | truncated
                rewards[t], dones[t] = torch.as_tensor(reward), torch.as_tensor(done)
                after[t] = 0.0  # what follows the end of an episode is worth nothing ...
                for i in np.flatnonzero(truncated & ~terminated):  # ... but at a time limit
                    final = agent.moments(torch.as_tensor(info["final_obs"][i]).float())
                    after[t, i] = agent(final[None], torch.ones(1, agent.actions))[1]
                log.add_rewards(reward, done)
            following = torch.cat([values[1:], agent(x, mask)[1][None]])
            following = torch.where(dones > 0, after, following)
            advantages = estimate_advantages(rewards, values, following, dones, args)

        # Learn.
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - update / updates)
        buffers = (obs_buf, mask_buf, action_buf, logp_buf, advantages, advantages + values)
        metrics = learn(agent, optimizer, buffers, args)
        update += 1
        metrics["charts/SPS"] = log.advance(update * steps * n)
    envs.close()
    return log.run


if __name__ == "__main__":
    run_agent(train, Args)
