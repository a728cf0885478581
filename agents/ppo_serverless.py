"""Proximal policy optimisation for the serverless ids: one categorical head per part of the plan.

A decision is a plan for one request (remote ratio, order, memory of the main function and of the
remote ones, replicas), so the action is MultiDiscrete. What matters here:

* Keeping what is warm needs every part of the plan to be as before. A policy that explores each
  part on its own breaks it at almost every request, so it never learns what keeping is worth. Here
  the policy is a mixture: with a learnt probability it repeats the plan that is warm, else it
  draws the parts one after another, each told of those before it.
* All chance is drawn at reset, whatever the agent does. ``replicas`` rows therefore live through
  the same episodes, and what they have in common is taken out of the advantages: an
  input-dependent baseline (Mao et al., ICLR 2019) without a second network.
* Columns of the observation differ in scale by two orders of magnitude; they are standardised.
* What a plan costs is known to a planner; to learn it from rewards takes long and ends at few
  plans. The policy begins with the planner's decisions on training episodes, by maximum likelihood
  (``--teacher ""`` begins without), and the critic is trained alone for some updates. Then PPO
  goes on from the rewards, which know nothing of the planner.

A plan matters for the next requests only through what it leaves warm, so the discount is short.
``python agents/ppo_serverless.py --help`` lists the options.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from torch import Tensor, nn

from servegym.agents.lessons import imitate
from servegym.agents.lib.arguments import ResumableRunArgs
from servegym.agents.lib.checkpoint import (
    CheckpointPolicy,
    json_field,
    save_best_and_last,
    saved_args,
    write_checkpoint,
)
from servegym.agents.lib.environments import action_masks, make_envs, parse_settings
from servegym.agents.lib.run_log import RunLog, interval_passed
from servegym.agents.lib.snapshots import load_snapshot, save_snapshot


@dataclass
class Args(ResumableRunArgs):
    """Command line of the agent."""

    env_id: str = "servegym/ServerlessMoEFlat-v0"
    """an environment with one Box and MultiDiscrete actions"""
    set: tuple[str, ...] = ()
    """environment arguments, key=value with a JSON value, as in model=gpt-oss-20b"""
    width: int = 128
    """hidden units of every layer"""
    warm_column: int = 6
    """column of the observation that is above 0 while the last plan is warm (-1: there is none)"""
    teacher: str = "warm_planner"
    """baseline whose decisions the policy imitates before PPO (empty: none)"""
    imitation_epochs: int = 60
    """passes over the teacher's decisions"""
    imitation_rate: float = 2e-3
    """learning rate of the imitation at first; it falls linearly to zero"""
    critic_updates: int = 4
    """first updates of PPO that train the critic alone"""
    total_timesteps: int = 327_680
    """environment steps (requests) over all environments"""
    num_envs: int = 256
    """parallel environments"""
    replicas: int = 8
    """environments that share their episodes; they differ by the actions alone (1: none do)"""
    num_steps: int = 32
    """steps of each environment between updates"""
    learning_rate: float = 3e-4
    """learning rate at first"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to zero"""
    gamma: float = 0.95
    """discount per request"""
    gae_lambda: float = 0.9
    """lambda of the generalised advantage estimate"""
    num_minibatches: int = 8
    """minibatches per epoch"""
    update_epochs: int = 3
    """passes over the collected steps"""
    clip_coef: float = 0.2
    """clipping of the probability ratio"""
    ent_coef: float = 0.01
    """weight of the entropy bonus at first; it falls linearly to zero"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """gradients are clipped to this norm"""
    eval_every: int = 40_960
    """steps between evaluations on the validation split; the best policy is kept"""
    eval_episodes: int = 32
    """episodes per evaluation"""


def layer(inputs: int, outputs: int, std: float = 2**0.5) -> nn.Linear:
    """A linear layer with orthogonal weights and no bias at first."""
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, std)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    """Actor and critic over flat observations (B, columns) and the previous plan (B, parts).

    The policy is ``keep * [plan = previous] + (1 - keep) * p(part 1) p(part 2 | part 1) ...``.
    ``keep`` is 0 while nothing is warm or the mask forbids the previous first part, else within
    1.8 and 98.2 %: changing a plan pays off late, and is not to be given up before it is tried.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(
        self, columns: int, choices: Sequence[int], width: int, warm_column: int = -1
    ) -> None:
        super().__init__()
        self.columns, self.choices, self.width = columns, list(choices), width
        self.warm_column = warm_column
        inputs = columns + (sum(choices) if warm_column >= 0 else 0)
        self.actor = nn.Sequential(layer(inputs, width), nn.Tanh(), layer(width, width))
        self.keep = layer(width, 1, 0.01)
        self.heads = nn.ModuleList(layer(width, k, 0.01) for k in choices)
        self.told = nn.ModuleList(nn.Embedding(k, width) for k in choices[:-1])
        for weight in self.told.parameters():
            nn.init.zeros_(weight)
        self.critic = nn.Sequential(
            layer(inputs, width), nn.Tanh(), layer(width, width), nn.Tanh(), layer(width, 1, 1.0)
        )
        self.register_buffer("mean", torch.zeros(columns))
        self.register_buffer("variance", torch.ones(columns))
        self.register_buffer("count", torch.zeros(()))

    def observe(self, x: Tensor) -> None:
        """Take observations (N, columns) into the running mean and variance."""
        total, shift = self.count + len(x), x.mean(0) - self.mean
        weight = len(x) / total
        self.variance += weight * (x.var(0, unbiased=False) - self.variance)
        self.variance += weight * (1 - weight) * shift.square()
        self.mean += weight * shift
        self.count.copy_(total)

    def encode(self, x: Tensor, previous: Tensor) -> Tensor:
        """Inputs of the networks: standardised columns, and the previous plan if it is warm."""
        parts = [((x - self.mean) / (self.variance + 1e-8).sqrt()).clamp(-5, 5)]
        if self.warm_column >= 0:
            warm = (x[:, self.warm_column] > 0).float()[:, None]
            ones = [nn.functional.one_hot(previous[:, i], k) for i, k in enumerate(self.choices)]
            parts += [warm * one for one in ones]
        return torch.cat(parts, 1)

    def gate(self, hidden: Tensor, x: Tensor, previous: Tensor, mask: Tensor) -> Tensor:
        """Log-odds (B,) of repeating the previous plan."""
        if self.warm_column < 0:
            return torch.full_like(x[:, 0], -30.0)
        allowed = mask.gather(1, previous[:, :1]).squeeze(1) > 0
        possible = (x[:, self.warm_column] > 0) & allowed
        score = 4 * (self.keep(hidden.tanh()).squeeze(1) / 4).tanh()
        return score.masked_fill(~possible, -30.0)

    def act(self, x: Tensor, previous: Tensor, mask: Tensor, greedy: bool = False) -> Tensor:
        """Plans (B, parts): drawn, or if ``greedy`` the likelier branch, its likeliest parts."""
        hidden = self.actor(self.encode(x, previous))
        gate = self.gate(hidden, x, previous, mask)
        keep = gate > 0 if greedy else torch.rand_like(gate) < gate.sigmoid()
        plan = []
        for k, legal in enumerate(mask.split(self.choices, 1)):
            score = self.heads[k](hidden.tanh()).masked_fill(legal == 0, -1e8)
            if not greedy:  # Gumbel noise: a draw from the softmax
                score = score - torch.empty_like(score).exponential_().log()
            plan.append(score.argmax(1))
            if k < len(self.told):
                hidden = hidden + self.told[k](plan[k])
        return torch.where(keep[:, None], previous, torch.stack(plan, 1))

    def forward(
        self, x: Tensor, previous: Tensor, mask: Tensor, action: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities (B,) of plans (B, parts), entropies (B, 1 + parts), values (B,).

        The entropies are those of the gate and of each part given the parts before it, the latter
        weighted with the probability that the plan is drawn.
        """
        inputs = self.encode(x, previous)
        hidden = self.actor(inputs)
        gate = self.gate(hidden, x, previous, mask)
        log_keep, log_draw = nn.functional.logsigmoid(gate), nn.functional.logsigmoid(-gate)
        log_prob, entropy = log_draw, [-(gate.sigmoid() * log_keep + log_draw.exp() * log_draw)]
        for k, legal in enumerate(mask.split(self.choices, 1)):
            head = self.heads[k](hidden.tanh()).masked_fill(legal == 0, -1e8).log_softmax(1)
            log_prob = log_prob + head.gather(1, action[:, k : k + 1]).squeeze(1)
            entropy.append(-log_draw.exp() * (head.exp() * head).sum(1))
            if k < len(self.told):
                hidden = hidden + self.told[k](action[:, k])
        same = (action == previous).all(1)
        log_prob = torch.where(same, torch.logaddexp(log_prob, log_keep), log_prob)
        return log_prob, torch.stack(entropy, 1), self.critic(inputs).squeeze(1)


def evaluate(agent: Agent, args: Args) -> dict[str, float]:
    """The greedy policy on fixed validation episodes.

    Returns:
        ``score``, the mean reward per request; ``repeated_share``, of the requests with the plan
        before theirs; and per part of the plan the share of its commonest choice and the entropy of
        its choices (nats): a constant policy has share 1 and entropy 0.
    """
    n = args.eval_episodes
    envs = make_envs(args.env_id, n, **(parse_settings(args.set) | {"split": "val"}))
    obs, info = envs.reset(seed=10_000)
    total, kept, steps, alive = 0.0, 0, 0, np.ones(n, bool)
    counts = [np.zeros(k) for k in agent.choices]
    device = next(agent.parameters()).device
    previous = torch.zeros((n, len(counts)), dtype=torch.long, device=device)
    while alive.any():
        mask = torch.as_tensor(action_masks(info, n, sum(agent.choices)), device=device)
        with torch.no_grad():
            plan = agent.act(torch.as_tensor(obs, device=device), previous, mask, greedy=True)
        action, same = plan.cpu().numpy(), (plan == previous).all(1).cpu().numpy()
        for k, count in enumerate(counts):
            count += np.bincount(action[alive, k], minlength=len(count))
        obs, reward, terminated, truncated, info = envs.step(action)
        total, steps = total + float(reward[alive].sum()), steps + int(alive.sum())
        kept, previous = kept + int(same[alive].sum()), plan
        alive &= ~(terminated | truncated)
    envs.close()
    found = {"score": total / steps, "repeated_share": kept / steps}
    for k, share in enumerate(count / count.sum() for count in counts):
        found[f"commonest_share_{k}"] = float(share.max())
        found[f"choice_entropy_{k}"] = float(-(share * np.log(np.maximum(share, 1e-12))).sum())
    return found


def save_policy(agent: Agent, args: Args, path: Path) -> None:
    """Weights, arguments and shape in one safetensors file."""
    shape = {k: getattr(agent, k) for k in ("columns", "choices", "width", "warm_column")}
    meta = {"args": json.dumps(asdict(args)), "shape": json.dumps(shape)}
    write_checkpoint(agent, meta | {"agent": "ppo_serverless"}, path)


def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors)."""
    if args.replicas < 1 or args.num_envs % args.replicas:
        raise ValueError(f"replicas={args.replicas} must divide num_envs={args.num_envs}")
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    envs, n = make_envs(args.env_id, args.num_envs, **parse_settings(args.set)), args.num_envs
    box, multi = envs.single_observation_space, envs.single_action_space
    if not isinstance(box, gym.spaces.Box) or not isinstance(multi, gym.spaces.MultiDiscrete):
        raise ValueError(f"env_id: {args.env_id!r} has no single Box with MultiDiscrete actions")
    (columns,), choices = box.shape, [int(k) for k in multi.nvec]
    if args.warm_column >= columns:
        raise ValueError(f"warm_column={args.warm_column} must be below {columns} columns")
    actions, parts = sum(choices), len(choices)
    agent = Agent(columns, choices, args.width, args.warm_column).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    run = Path(args.out_dir) / (args.run_name or f"ppo_serverless_{args.seed}")
    run.mkdir(parents=True, exist_ok=True)

    saved, start = load_snapshot(args.resume, run / "snapshot.pt"), {}
    if args.teacher and saved is None:
        start["imitation/log_likelihood"] = imitate(agent, args, run.parent)
        start |= {f"eval/{key}": value for key, value in evaluate(agent, args).items()}

    # Equal seeds give equal episodes, now and after every reset.
    seeds: Any = [1_000_003 * args.seed + i // args.replicas for i in range(n)]
    obs, info = envs.reset(seed=seeds)
    if not args.teacher:
        agent.observe(torch.as_tensor(obs, device=device))
    s: dict[str, Any] = {  # everything else that a resumed run needs
        "iteration": 0,
        "best": -np.inf,
        "evaluated": 0,
        "log_size": 0,
        "obs": obs,
        "mask": action_masks(info, n, actions),
        "returns": np.zeros(n),
        "center": 0.0,
        "previous": torch.zeros((n, parts), dtype=torch.long, device=device),
    }
    if saved is not None:
        agent.load_state_dict(saved["agent"])
        optimizer.load_state_dict(saved["optimizer"])
        s, envs = saved["state"], pickle.loads(saved["envs"])
        torch.set_rng_state(saved["rng"])
    log = RunLog(run, args, "ppo_serverless", s["iteration"] * args.num_steps * n, s["log_size"])
    if start:
        log.write(0, start)
        log.bar.console.print(f"as the teacher: mean reward {start['eval/score']:.4f}")
        s["best"] = start["eval/score"]
        if args.save_model:
            save_policy(agent, args, run / "best.safetensors")

    shape, size = (args.num_steps, n), args.num_steps * n
    b_obs = torch.zeros((*shape, columns), device=device)
    b_mask = torch.zeros((*shape, actions), dtype=torch.int8, device=device)
    b_action, b_previous = torch.zeros((2, *shape, parts), dtype=torch.long, device=device)
    b_logp, b_reward, b_value, b_next, b_done = torch.zeros((5, *shape), device=device)
    updates, finished = args.total_timesteps // size, []
    while s["iteration"] < updates:
        left = 1 - s["iteration"] / updates
        optimizer.param_groups[0]["lr"] = args.learning_rate * (left if args.anneal_lr else 1.0)
        obs, mask, previous = s["obs"], s["mask"], s["previous"]
        with torch.no_grad():
            for t in range(args.num_steps):
                b_obs[t], b_mask[t] = torch.as_tensor(obs), torch.as_tensor(mask)
                b_previous[t], b_action[t] = previous, agent.act(b_obs[t], previous, b_mask[t])
                here = (b_obs[t], previous, b_mask[t], b_action[t])
                b_logp[t], _, b_value[t] = agent(*here)
                if t:
                    b_next[t - 1] = torch.where(b_done[t - 1] > 0, b_next[t - 1], b_value[t])
                obs, reward, terminated, truncated, info = envs.step(b_action[t].cpu().numpy())
                mask, done = action_masks(info, n, actions), terminated | truncated
                previous = b_action[t].clone()
                b_reward[t], b_done[t] = torch.as_tensor(reward), torch.as_tensor(done)
                b_next[t] = 0.0  # what follows the step: nothing after a termination
                for i in np.flatnonzero(truncated & ~terminated):
                    final = torch.as_tensor(info["final_obs"][i], device=device)[None].float()
                    there = agent.encode(final, previous[i : i + 1])
                    b_next[t, i] = agent.critic(there)[0, 0]
                s["returns"] += reward
                finished += s["returns"][done].tolist()
                s["returns"][done] = 0
            s["obs"], s["mask"], s["previous"] = obs, mask, previous
            after = agent.encode(torch.as_tensor(obs, device=device), previous)
            b_next[-1] = torch.where(b_done[-1] > 0, b_next[-1], agent.critic(after).squeeze(1))
            # Values are relative to the mean reward: small, and 0 at an episode's end is right.
            weight = max(0.02, 1 / (s["iteration"] + 1))
            s["center"] += weight * (b_reward.mean().item() - s["center"])
            advantage, running = torch.zeros(shape, device=device), torch.zeros(n, device=device)
            for t in reversed(range(args.num_steps)):
                delta = b_reward[t] - s["center"] + args.gamma * b_next[t] - b_value[t]
                running = delta + args.gamma * args.gae_lambda * (1 - b_done[t]) * running
                advantage[t] = running
            goals, alone = advantage + b_value, advantage.std().item()
            if args.replicas > 1:  # less the mean of the others
                group = advantage.view(args.num_steps, -1, args.replicas)
                others = (group.sum(2, keepdim=True) - group) / (args.replicas - 1)
                advantage = (group - others).view(shape)
        s["iteration"] += 1
        step = s["iteration"] * size
        flat = [
            x.reshape(size, *x.shape[2:])
            for x in (b_obs, b_previous, b_mask, b_action, b_logp, advantage, goals)
        ]
        for _ in range(args.update_epochs):
            for index in torch.randperm(size).chunk(args.num_minibatches):
                x, before, legal, action, old, adv, goal = (f[index] for f in flat)
                new, entropy, value = agent(x, before, legal, action)
                log_ratio = new - old
                ratio = log_ratio.exp()
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                policy_loss = -torch.min(adv * ratio, adv * clipped).mean()
                value_loss = 0.5 * (value - goal).square().mean()
                entropy = entropy.mean(0)
                bonus = args.ent_coef * left * entropy.sum()
                loss = args.vf_coef * value_loss
                if not args.teacher or s["iteration"] > args.critic_updates:
                    loss = loss + policy_loss - bonus
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
        agent.observe(flat[0])
        metrics = {
            "charts/SPS": log.advance(step),
            "charts/reward": b_reward.mean().item(),
            "losses/policy_loss": policy_loss.item(),
            "losses/value_loss": value_loss.item(),
            "losses/entropy": entropy.sum().item(),
            "losses/approx_kl": torch.expm1(log_ratio).sub(log_ratio).mean().item(),
            "losses/advantage_std": alone,
            "charts/entropy_keep": entropy[0].item(),
            "losses/advantage_std_less_others": advantage.std().item(),
        }
        metrics |= {f"charts/entropy_{k}": e for k, e in enumerate(entropy[1:].tolist())}
        if finished:
            metrics["charts/episodic_return"], finished = float(np.mean(finished)), []
        if step // args.eval_every > s["evaluated"] or s["iteration"] == updates:
            s["evaluated"] = step // args.eval_every
            result = evaluate(agent, args)
            metrics |= {f"eval/{key}": value for key, value in result.items()}
            log.bar.console.print(f"step {step}: mean reward {result['score']:.4f}")
            write = partial(save_policy, agent, args)
            s["best"] = save_best_and_last(write, args, run, result["score"], s["best"])
        log.write(step, metrics)
        if interval_passed(args.checkpoint_every, step - size, step):
            s["log_size"] = log.size
            save_snapshot(
                run / "snapshot.pt",
                agent=agent.state_dict(),
                state=s,
                optimizer=optimizer.state_dict(),
                envs=pickle.dumps(envs),
                rng=torch.get_rng_state(),
            )
    log.close()
    envs.close()
    return run


class PlanPolicy(CheckpointPolicy):
    """Repeats the last plan of an episode while it is warm, or makes a new one."""

    def episode_start(self, mask: NDArray[np.bool_]) -> None:
        """Forget the last plans of the rows."""
        last = getattr(self, "_last", None)
        if last is None or len(last) != len(mask):
            last = np.zeros((len(mask), len(self.net.choices)), np.int64)
        self._last = np.where(mask[:, None], 0, last)

    def act(self, observation: Any, action_mask: Any = None) -> NDArray[np.int64]:
        """Actions int64 (B, parts)."""
        net, legal = self.net, np.asarray(action_mask)
        rows = torch.as_tensor(np.asarray(observation)).float()
        if rows.shape[-1] != net.columns or legal.shape[-1] != sum(net.choices):
            raise ValueError(
                f"{self.path}: trained on {net.columns} columns and choices {net.choices}, got "
                f"{rows.shape[-1]} columns and {legal.shape[-1]} choices in all"
            )
        if len(getattr(self, "_last", ())) != len(rows):  # `reset` was not called
            self.reset(len(rows))
        with torch.inference_mode():
            plan = net.act(rows, torch.as_tensor(self._last), torch.as_tensor(legal), greedy=True)
        self._last = plan.numpy().astype(np.int64)
        return self._last.copy()


def load(meta: Mapping[str, str], weights: Mapping[str, Tensor], system: Any) -> PlanPolicy:
    """The policy of a checkpoint, see `servegym.agents.lib.checkpoint`."""
    net = Agent(**json_field(meta, "shape"))
    net.load_state_dict(weights)
    args = saved_args(Args, json_field(meta, "args"))
    return PlanPolicy("ppo_serverless", "flat", args, net)


if __name__ == "__main__":
    train(tyro.cli(Args, config=(tyro.conf.FlagConversionOff,)))
