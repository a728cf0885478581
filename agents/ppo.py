"""Proximal policy optimisation (Schulman et al., 2017): the file to start with.

It takes any id with one Box and Discrete actions. A Box with a row for each expert or replica, as
those of ``LLMRoutingSummary`` and ``PrefixRoutingSummary``, goes through one small network for all
rows, so that what is learned at one serves every other and the policy routes for any number of
them; any other Box goes through the usual two layers. Observations are scaled by their running
moments.

As in CleanRL's ``ppo.py``, but for the masks of illegal actions, for values of the last observation
where a time limit ends an episode, for an average of the weights (``--average``), and for
``--own_requests``: rewards of the routing ids come when requests end, hundreds of decisions later
and mixed; with it whole episodes are the rollouts, and each decision is paid what its own request
counted in the end. ``python agents/ppo.py --help`` lists the options.
"""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from torch import Tensor, nn

from servegym.agents.lib import checkpoint
from servegym.agents.lib.arguments import Positive, PositiveShare, RunArgs, Share, Weight, run_agent
from servegym.agents.lib.checkpoint import CheckpointPolicy
from servegym.agents.lib.environments import (
    action_masks,
    episode_seeds,
    make_envs,
    routing_arguments,
)
from servegym.agents.lib.evaluation import play_rule
from servegym.agents.lib.run_log import RunLog, evaluation_due, saves_when_interrupted
from servegym.envs.families import find_family

SETTINGS = {"llm_routing": {"rate": 8.0, "reward": "completed_qos"}}
"""Arguments of the ids of a family; ``--set`` changes them and adds others."""
MEASURES = {
    "llm_routing": {"reward": "completed_qos", "split": "val"},
    "prefix_routing": {"reward": "slo", "split": "val"},
}
METRICS = {"llm_routing": "QoS", "prefix_routing": "attainment"}
"""Of the evaluations, which count a request's reward there: its QoS, or 1 within the objectives."""
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
    own_requests: bool = False
    """pay each decision for its own request: rollouts are episodes of ``num_steps`` decisions"""
    average: Share = 0.0
    """share of new weights in the average that is evaluated and saved, an update; 0: no average"""
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
        new, total = x.mean(0) - self.mean, self.count + len(x)
        squares = self.var * self.count + x.var(0, correction=0) * len(x)
        self.var = (squares + new.square() * self.count * len(x) / total) / total
        self.mean, self.count = self.mean + new * len(x) / total, total

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
            self.actor, self.critic = (
                nn.Sequential(
                    *(layer(shape[0], width), nn.Tanh(), layer(width, width), nn.Tanh()),
                    layer(width, outputs, std),
                )
                for outputs, std in ((actions, 0.01), (1, 1.0))
            )
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


def family_name(args: Args) -> str:
    """The family of the id, "" for an id of another package."""
    family = find_family(args.env_id)
    return "" if family is None else family.name


def eval_kwargs(args: Args) -> dict[str, Any]:
    """Arguments of the environment of an evaluation."""
    family = family_name(args)
    usual = routing_arguments(SETTINGS.get(family, {}), args.set)
    return usual | MEASURES.get(family, {})


def env_kwargs(args: Args) -> dict[str, Any]:
    """Arguments of the training environment."""
    family = family_name(args)
    kwargs = routing_arguments(SETTINGS.get(family, {}), args.set)
    if args.own_requests:
        return kwargs | {"episode_requests": args.num_steps}
    return (CUT if family == "llm_routing" else {}) | kwargs


@torch.no_grad()
def evaluate(agent: Agent, args: Args) -> float:
    """Greedy policy on the same episodes each time: mean of `MEASURES`, else of the returns."""
    n = args.eval_episodes
    envs = make_envs(args.env_id, n, **eval_kwargs(args))
    obs, info = envs.reset(seed=10_000)
    total, alive, steps = np.zeros(n), np.ones(n, bool), 0
    while alive.any():
        mask = torch.as_tensor(action_masks(info, n, agent.actions))
        log_pi, _ = agent(agent.moments(torch.as_tensor(obs)), mask)
        obs, reward, terminated, truncated, info = envs.step(log_pi.argmax(-1).numpy())
        total, steps = total + reward * alive, steps + int(alive.sum())
        alive &= ~(terminated | truncated)
    envs.close()
    return float(total.sum() / steps if family_name(args) in MEASURES else total.mean())


def rule_score(args: Args) -> tuple[str, tuple[str, float] | None]:
    """What `evaluate` measures, and the rule of the environment's family with its score."""
    measure = METRICS.get(family_name(args))
    found = play_rule(args.env_id, args.eval_episodes, 10_000, **eval_kwargs(args))
    if found is None:
        return measure or "mean return", None
    score = found.returns.sum() / found.decisions if measure else found.returns.mean()
    return measure or "mean return", (found.rule, float(score))


def outcome_reader(args: Args, envs: Any) -> Any:
    """What tells which requests have ended, of the family's module ``outcomes``."""
    module = f"servegym.envs.{family_name(args)}.outcomes"
    return importlib.import_module(module).OutcomeReader(envs)


def sizes(envs: gym.vector.VectorEnv, env_id: str) -> tuple[tuple[int, ...], int]:
    """Shape of an observation and number of actions.

    Raises:
        ValueError: If the environment has no single Box of one or two axes, or no Discrete actions.
    """
    box, discrete = envs.single_observation_space, envs.single_action_space
    if not isinstance(box, gym.spaces.Box) or not isinstance(discrete, gym.spaces.Discrete):
        raise ValueError(f"env_id: {env_id!r} has no single Box with Discrete actions")
    actions = int(discrete.n)
    if len(box.shape) > 2 or (len(box.shape) == 2 and actions < box.shape[0]):
        raise ValueError(f"env_id: {env_id!r} has a Box {box.shape}; flatten it first")
    return box.shape, actions


def estimate_advantages(
    rewards: Tensor, values: Tensor, following: Tensor, after: Tensor, dones: Tensor, args: Args
) -> Tensor:
    """Generalised advantages (T, B) (Schulman et al., 2016).

    Args:
        rewards: (T, B), as all others.
        values: Of the observations.
        following: Of those one step later.
        after: The same where an episode ended, 0 but at a time limit.
        dones: Whether an episode ended.
        args: gamma and gae_lambda.
    """
    delta = rewards + args.gamma * torch.where(dones > 0, after, following) - values
    advantages, trace = torch.zeros_like(rewards), torch.zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        trace = delta[t] + args.gamma * args.gae_lambda * (1 - dones[t]) * trace
        advantages[t] = trace
    return advantages


def save_policy(agent: Agent, args: Args, path: Path) -> None:
    """Weights, arguments and shape in one safetensors file."""
    shape = {k: getattr(agent, k) for k in ("shape", "actions", "width", "first")}
    meta = {"agent": "ppo", "args": json.dumps(asdict(args)), "shape": json.dumps(shape)}
    checkpoint.write_checkpoint(agent, meta, path)


def load(meta: Mapping[str, str], weights: Mapping[str, Tensor], system: Any) -> CheckpointPolicy:
    """The policy of a checkpoint, see `servegym.agents.lib.checkpoint`."""
    net = Agent(**checkpoint.json_field(meta, "shape"))
    net.load_state_dict(weights)
    args = checkpoint.saved_args(Args, checkpoint.json_field(meta, "args"))

    def decide(observation: Any, action_mask: Any) -> NDArray[np.int64]:
        x, mask = torch.as_tensor(observation).float(), torch.as_tensor(action_mask)
        actions = net.actions + (x.shape[1] - net.shape[0] if x.ndim > 2 else 0)
        if x.shape[-1] != net.shape[-1] or mask.shape[-1] != actions:
            raise ValueError(
                f"trained on observations {net.shape} with {net.actions} actions, got "
                f"{tuple(x.shape[1:])} and {mask.shape[-1]}"
            )
        return net(net.moments(x), mask)[0].argmax(-1).numpy()

    family = find_family(args.env_id)
    view = "flat" if family is None else family.view_of(args.env_id)
    return CheckpointPolicy("ppo", view, args, net, decide, env_kwargs(args))


@saves_when_interrupted
def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors)."""
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    family = find_family(args.env_id)
    if args.own_requests and not (family and family.outcomes):
        raise ValueError(f"own_requests: requests of {args.env_id!r} are not told when they end")
    n = min(args.num_envs, args.total_timesteps)
    steps = min(args.num_steps, -(-args.total_timesteps // n))
    resets = AutoresetMode.DISABLED if args.own_requests else AutoresetMode.SAME_STEP
    envs = make_envs(args.env_id, n, autoreset_mode=resets, **env_kwargs(args))
    shape, actions = sizes(envs, args.env_id)
    agent = Agent(shape, actions, args.width, first=int(family_name(args) == "llm_routing"))
    judged = copy.deepcopy(agent) if args.average else agent  # evaluated and saved
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    log = RunLog(args, "ppo", args.env_id, env_kwargs(args))
    write = log.save = partial(save_policy, judged, args)
    metric, rule = rule_score(args)

    action_buf = torch.zeros((steps, n), dtype=torch.long)
    logp_buf, rewards, values, after, dones = (torch.zeros((steps, n)) for _ in range(5))

    def observe(obs: Any, info: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        x = torch.as_tensor(obs).float()
        agent.moments.update(x)
        return agent.moments(x), torch.as_tensor(action_masks(info, n, actions))

    def report(step: int, best: float) -> float:
        log.phase = "evaluating"
        score = evaluate(judged, args)
        log.say_score(step, metric, score, rule)
        return checkpoint.save_best_and_last(write, args, log.run, score, best)

    x, mask = observe(*envs.reset(seed=episode_seeds(args.seed, n)))
    parts = {"agent": agent, "optimizer": optimizer, "envs": envs}
    parts |= {"judged": judged} if args.average else {}
    update, best = log.restore(parts, (0, -np.inf))
    if update and family:  # the environments of other packages begin anew
        obs, mask = envs.unwrapped.observe()  # pyright: ignore
        x, mask = agent.moments(torch.as_tensor(obs).float()), torch.as_tensor(mask)
    if not update:
        best = report(0, best)
        log.write(0, {})
    updates = -(-args.total_timesteps // (steps * n))
    while True:
        log.snapshot(update * steps * n, parts, (update, best))
        if update == updates:
            break
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - update / updates)
        if args.own_requests:
            if update:
                x, mask = observe(*envs.reset())
            reader = outcome_reader(args, envs)
        obs_buf = torch.zeros((steps, *x.shape))
        mask_buf = torch.zeros((steps, *mask.shape), dtype=torch.int8)
        with torch.no_grad():
            for t in range(steps):
                obs_buf[t], mask_buf[t] = x, mask
                log_pi, values[t] = agent(x, mask)
                action_buf[t] = torch.multinomial(log_pi.exp(), 1).squeeze(1)
                logp_buf[t] = log_pi.gather(1, action_buf[t][:, None]).squeeze(1)
                obs, reward, terminated, truncated, info = envs.step(action_buf[t].numpy())
                x, mask = observe(obs, info)
                done = terminated | truncated
                rewards[t], dones[t] = torch.as_tensor(reward), torch.as_tensor(done)
                after[t] = 0.0  # the value of what a step led to, where the episode ended
                for i in np.flatnonzero(truncated & ~terminated):
                    final = agent.moments(torch.as_tensor(info["final_obs"][i]).float())
                    after[t, i] = agent(final[None], torch.ones(1, actions))[1]
                log.add_rewards(reward, done)
            if args.own_requests:
                ended = reader.read()
                rewards.zero_()
                rewards[ended["decision"], ended["row"]] = torch.as_tensor(ended["reward"]).float()
            following = torch.cat([values[1:], agent(x, mask)[1][None]])
            advantages = estimate_advantages(rewards, values, following, after, dones, args)
        buffers = (obs_buf, mask_buf, action_buf, logp_buf, advantages, advantages + values)
        flat = [part.flatten(0, 1) for part in buffers]
        for _ in range(args.update_epochs):
            for index in torch.randperm(steps * n).chunk(args.num_minibatches):
                o, legal, action, old, adv, target = (part[index] for part in flat)
                log_pi, value = agent(o, legal)
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
                if args.average:
                    for mean, new in zip(judged.parameters(), agent.parameters(), strict=True):
                        mean.data.lerp_(new.data, args.average)
        judged.moments.load_state_dict(agent.moments.state_dict())
        update += 1
        before, step = (update - 1) * steps * n, update * steps * n
        metrics = {
            "charts/SPS": log.advance(step),
            "losses/policy_loss": policy_loss.item(),
            "losses/value_loss": value_loss.item(),
            "losses/entropy": entropy.item(),
            "losses/approx_kl": torch.expm1(log_ratio).sub(log_ratio).mean().item(),
        }
        if evaluation_due(args.eval_every, before, step) or update == updates:
            best = report(step, best)
        log.write(step, metrics)
    envs.close()
    return log.run


if __name__ == "__main__":
    run_agent(train, Args)
