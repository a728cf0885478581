"""PPO that pays each decision what its own request counts.

Rewards of the routing ids come when requests end, hundreds of decisions later and mixed. Here whole
episodes are the rollouts: when one has ended, what became of every request is paid at the decision
that sent it. Network, scaling and losses are those of `ppo`, for a Box with a row for each expert
or replica; what is evaluated and saved is an average of the weights.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from torch import Tensor, nn

from servegym.agents.lib import checkpoint, environments
from servegym.agents.lib.arguments import Positive, PositiveShare, RunArgs, Share, Weight, run_agent
from servegym.agents.lib.evaluation import Validation
from servegym.agents.lib.run_log import RunLog, evaluation_due, saves_when_interrupted
from servegym.envs._outcomes import OutcomeReader
from servegym.envs.families import Family, find_family

ROUTING = {"rate": 8.0, "reward": "completed_qos"}
"""Arguments of the ids of LLM routing; ``--set`` changes them and adds others."""


@dataclass
class Args(RunArgs):
    """Command line of the agent."""

    env_id: str = "servegym/LLMRoutingSummary-v3"
    """an environment whose Box has a row for each expert or replica"""
    set: tuple[str, ...] = ()
    """environment arguments, key=value with a JSON value, as in rate=[5,5] num_experts=3"""
    total_timesteps: int = 250_000
    """environment steps (decisions) over all environments"""
    learning_rate: Share = 1e-3
    """learning rate, falling linearly to zero"""
    num_envs: int = 64
    """parallel environments"""
    num_steps: int = 64
    """decisions of an episode, which every environment plays between updates"""
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
    average: Share = 0.0
    """share of new weights in the average that is evaluated and saved, an update; 0: no average"""


def layer(inputs: int, outputs: int, std: float = 2**0.5) -> nn.Linear:
    """A linear layer with orthogonal weights and no bias at first."""
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, std)
    nn.init.zeros_(linear.bias)
    return linear


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
    """Actor and critic over scaled observations of ``shape``, (rows, columns).

    The actions from ``first`` on belong to the rows and the others (drop, hold, reject, where there
    are) to all rows together.
    """

    def __init__(self, shape: tuple[int, ...], actions: int, width: int, first: int = 1) -> None:
        super().__init__()
        self.shape, self.actions, self.width, self.first = shape, actions, width, first
        self.moments = Moments(shape[-1])
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
        return self.moments(x), torch.as_tensor(info["action_mask"])

    @torch.no_grad()
    def act(self, observation: Any, action_mask: Any) -> NDArray[np.int64]:
        """The likeliest legal action of every row.

        Raises:
            ValueError: If the columns or the actions are not those of the training.
        """
        x = torch.as_tensor(observation).float()
        actions, mask = self.actions + x.shape[1] - self.shape[0], torch.as_tensor(action_mask)
        if x.shape[-1] != self.shape[-1] or mask.shape[-1] != actions:
            raise ValueError(
                f"trained on observations {self.shape} with {self.actions} actions, got "
                f"{tuple(x.shape[1:])} and {mask.shape[-1]}"
            )
        return self(self.moments(x), mask)[0].argmax(-1).numpy()


def family_of(args: Args) -> Family:
    """The family of the id."""
    family = find_family(args.env_id)
    if family is None or not family.outcomes:
        raise ValueError(f"env_id: requests of {args.env_id!r} are not told when they end")
    if family.view_of(args.env_id) != "summary":
        raise ValueError(f"env_id: {args.env_id!r} has no row for each expert or replica")
    return family


def env_kwargs(args: Args) -> dict[str, Any]:
    """Arguments of the environment, but for the length of a training's episodes."""
    usual = ROUTING if family_of(args).name == "llm_routing" else {}
    return environments.routing_arguments(usual, args.set)


def estimate_advantages(rewards: Tensor, values: Tensor, args: Args) -> Tensor:
    """Generalised advantages (Schulman et al., 2016) of whole episodes (T, B)."""
    following = torch.cat([values[1:], torch.zeros_like(values[:1])])
    delta = rewards + args.gamma * following - values
    advantages, trace = torch.zeros_like(rewards), torch.zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        trace = delta[t] + args.gamma * args.gae_lambda * trace
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
    training_env = env_kwargs(args) | {"episode_requests": args.num_steps}
    return checkpoint.CheckpointPolicy("ppo_requests", "summary", args, net, net.act, training_env)


@saves_when_interrupted
def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors)."""
    family = family_of(args)
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    n, steps = min(args.num_envs, args.total_timesteps), args.num_steps
    updates = -(-args.total_timesteps // (steps * n))
    resets = AutoresetMode.DISABLED
    training_env = env_kwargs(args) | {"episode_requests": steps}
    envs = environments.make_envs(args.env_id, n, autoreset_mode=resets, **training_env)
    shape, actions = envs.single_observation_space.shape, envs.single_action_space
    assert isinstance(actions, Discrete)
    settings = {"shape": shape, "actions": int(actions.n), "width": args.width}
    settings["first"] = int(family.name == "llm_routing")  # action 0 drops there
    agent = Agent(**settings)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    averaged = copy.deepcopy(agent) if args.average else agent

    def average(*_: Any) -> None:
        for mean, new in zip(averaged.parameters(), agent.parameters(), strict=True):
            mean.data.lerp_(new.data, args.average)

    optimizer.register_step_post_hook(average)
    log = RunLog(args, "ppo_requests", args.env_id, training_env)
    meta = {"agent": "ppo_requests", "args": json.dumps(asdict(args))}
    meta |= {"shape": json.dumps(settings)}
    log.save = partial(checkpoint.write_checkpoint, averaged, meta)
    validation = Validation(args.env_id, args.eval_episodes, env_kwargs(args))

    x, mask = agent.observe(*envs.reset(seed=environments.episode_seeds(args.seed, n)))
    parts = {"agent": agent, "optimizer": optimizer, "envs": envs}
    parts |= {"averaged": averaged} if args.average else {}
    update, best, metrics = log.restore(parts, (0, -np.inf, {}))

    obs_buf = torch.zeros((steps, *x.shape))
    mask_buf = torch.zeros((steps, *mask.shape), dtype=torch.int8)
    action_buf = torch.zeros((steps, n), dtype=torch.long)
    logp_buf, rewards, values = (torch.zeros((steps, n)) for _ in range(3))
    while True:
        step = update * steps * n
        log.snapshot(step, parts, (update, best, metrics))
        # Evaluate: the random weights first, the last policy at the end.
        if evaluation_due(args.eval_every, step - steps * n, step) or update == updates:
            score = validation.score(averaged.act)
            log.say_score(step, validation.metric, score, validation.rule)
            best = checkpoint.save_best_and_last(log.save, args, log.run, score, best)
        log.write(step, metrics)
        if update == updates:
            break

        # Collect an episode of every environment.
        if update:
            x, mask = agent.observe(*envs.reset())
        with torch.no_grad():
            for t in range(steps):
                obs_buf[t], mask_buf[t] = x, mask
                log_pi, values[t] = agent(x, mask)
                action_buf[t] = torch.multinomial(log_pi.exp(), 1).squeeze(1)
                logp_buf[t] = log_pi.gather(1, action_buf[t][:, None]).squeeze(1)
                obs, reward, terminated, truncated, info = envs.step(action_buf[t].numpy())
                x, mask = agent.observe(obs, info)
                log.add_rewards(reward, terminated | truncated)

        # Pay each decision for its own request.
        ended = OutcomeReader(envs).read()
        rewards[ended["decision"], ended["row"]] = torch.as_tensor(ended["reward"]).float()
        advantages = estimate_advantages(rewards, values, args)

        # Learn.
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - update / updates)
        buffers = (obs_buf, mask_buf, action_buf, logp_buf, advantages, advantages + values)
        metrics = learn(agent, optimizer, buffers, args)
        averaged.moments.load_state_dict(agent.moments.state_dict())
        update += 1
        metrics["charts/SPS"] = log.advance(update * steps * n)
    envs.close()
    return log.run


if __name__ == "__main__":
    run_agent(train, Args)
