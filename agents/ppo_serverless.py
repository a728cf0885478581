"""Proximal policy optimisation for the serverless ids: one categorical head per part of the plan.

A decision is a plan for one request (remote ratio, order, memory of the main function and of the
remote ones, replicas), so the action is MultiDiscrete. What differs from ``ppo``:

 * Reusing what is warm needs every part of the plan to be as before. A policy that explores each
   part on its own breaks the plan at almost every request and never learns what reuse is worth.
   Here the policy is a mixture: with a learnt probability it repeats the plan that is warm, else it
   draws the parts one after another, each given those before it (autoregressive heads).
 * All chance is drawn at reset, whatever the agent does. ``group_size`` environments therefore have
   the same episodes, and the mean advantage of the others in the group is subtracted from each: an
   input-dependent baseline (Mao et al., ICLR 2019) without a second network.
 * Columns of the observation differ in scale by two orders of magnitude; they are standardised.
 * What a plan costs is known to a planner; to learn it from rewards takes long and ends at few
   plans. The policy first imitates the planner's decisions on training episodes by maximum
   likelihood (``--teacher ""`` begins without), and the critic is trained alone for some updates.
   Then PPO goes on from the rewards, which contain nothing of the planner.

A plan matters for the next requests only through what it leaves warm, so the discount is short.
``ppo_placement`` also subtracts a group's mean, but its actions are continuous scores.
``python agents/ppo_serverless.py --help`` lists the options.
"""

from __future__ import annotations

import json
import pickle
import zlib
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
from rich.progress import track
from torch import Tensor, nn

from servegym.agents.lib.arguments import ResumableRunArgs
from servegym.agents.lib.checkpoint import (
    CheckpointPolicy,
    json_field,
    save_best_and_last,
    saved_args,
    write_checkpoint,
)
from servegym.agents.lib.environments import action_masks, make_envs
from servegym.agents.lib.run_log import RunLog, interval_passed
from servegym.agents.lib.snapshots import load_snapshot, save_snapshot
from servegym.baselines.registry import make_policy
from servegym.baselines.serverless_moe.system import ServerlessSystem
from servegym.envs._command_line import parse_settings
from servegym.envs._files import write_atomic
from servegym.envs.workloads.files import read_arrays


@dataclass
class Args(ResumableRunArgs):
    """Command line of the agent."""

    env_id: str = "servegym/ServerlessMoEFlat-v0"
    """an environment with one Box and MultiDiscrete actions"""
    set: tuple[str, ...] = ()
    """environment arguments, key=value with a JSON value, as in model=gpt-oss-20b"""
    teacher: str = "warm_planner"
    """baseline whose decisions the policy imitates before PPO (empty: none)"""
    width: int = 128
    """hidden units of every layer"""
    total_timesteps: int = 327_680
    """environment steps (requests) over all environments"""
    num_envs: int = 256
    """parallel environments"""
    group_size: int = 8
    """environments that share their episodes and differ by the actions alone (1: none do)"""
    num_steps: int = 32
    """steps of each environment between updates"""
    learning_rate: float = 3e-4
    """learning rate at first; it falls linearly to zero"""
    gamma: float = 0.95
    """discount per request"""
    gae_lambda: float = 0.9
    """lambda of the generalised advantage estimate"""
    update_epochs: int = 3
    """passes over the collected steps"""
    ent_coef: float = 0.01
    """weight of the entropy bonus at first; it falls linearly to zero"""
    eval_every: int = 40_960
    """steps between evaluations on the validation split; the best policy is kept"""
    eval_episodes: int = 32
    """episodes per evaluation"""


NUM_MINIBATCHES, CLIP_COEF, VF_COEF, MAX_GRAD_NORM = 8, 0.2, 0.5, 0.5
WARM_COLUMN = 6
"""Column of the flat observation that is above 0 while the last plan is warm."""
MAX_LOGIT = 4.0
"""Bound of the gate's logit: repeating the warm plan has between 1.8 and 98.2 %."""
ILLEGAL, NEVER = -1e8, -30.0
"""Score of an illegal value of a part; logit of repeating where nothing can be repeated."""

# Imitation of the teacher.
IMITATION_EPISODES, IMITATION_EPOCHS, IMITATION_BATCH = 64, 60, 512
IMITATION_RATE = 2e-3
"""Learning rate at first; it falls linearly to zero."""
CRITIC_UPDATES = 4
"""First updates of PPO after an imitation that train the critic alone."""
IMITATION_SEED = 777_001_000
"""Seed of the first of the teacher's episodes, which neither training nor evaluation draws."""
DEVIATION = 0.15
"""Share of the requests that another plan serves, so that the teacher corrects deviations too."""


def layer(inputs: int, outputs: int, std: float = 2**0.5) -> nn.Linear:
    """A linear layer with orthogonal weights and no bias at first."""
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, std)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    """Actor and critic over flat observations (B, columns) and the previous plan (B, parts).

    The policy is ``repeat * [plan = previous] + (1 - repeat) * p(part 1) p(part 2 | part 1) ...``.
    ``repeat`` is 0 while nothing is warm or the mask forbids the previous first part, else within
    1.8 and 98.2 %: changing a plan pays off late, and is not to be given up before it is tried.

    Args:
        columns: Width of the observation.
        choices: Number of values of each part of the plan.
        width: Hidden units of every layer.
        warm_column: Column that is above 0 while the previous plan is warm.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(
        self, columns: int, choices: Sequence[int], width: int, warm_column: int = WARM_COLUMN
    ) -> None:
        super().__init__()
        self.columns, self.choices, self.width = columns, list(choices), width
        self.warm_column = warm_column
        inputs = columns + sum(choices)
        self.actor = nn.Sequential(layer(inputs, width), nn.Tanh(), layer(width, width))
        self.repeat = layer(width, 1, 0.01)
        self.heads = nn.ModuleList(layer(width, k, 0.01) for k in choices)
        self.embeddings = nn.ModuleList(nn.Embedding(k, width) for k in choices[:-1])
        for weight in self.embeddings.parameters():
            nn.init.zeros_(weight)
        self.critic = nn.Sequential(
            layer(inputs, width), nn.Tanh(), layer(width, width), nn.Tanh(), layer(width, 1, 1.0)
        )
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

    def encode(self, x: Tensor, previous: Tensor) -> Tensor:
        """Inputs of the networks: standardised columns, and the previous plan where it is warm."""
        warm = (x[:, self.warm_column] > 0).float()[:, None]
        plan = [nn.functional.one_hot(previous[:, i], k) for i, k in enumerate(self.choices)]
        columns = ((x - self.mean) / (self.variance + 1e-8).sqrt()).clamp(-5, 5)
        return torch.cat([columns, *(warm * part for part in plan)], 1)

    def repeat_logit(self, hidden: Tensor, x: Tensor, previous: Tensor, mask: Tensor) -> Tensor:
        """Logit (B,) of repeating the previous plan."""
        legal = mask.gather(1, previous[:, :1]).squeeze(1) > 0
        possible = (x[:, self.warm_column] > 0) & legal
        logit = MAX_LOGIT * (self.repeat(hidden.tanh()).squeeze(1) / MAX_LOGIT).tanh()
        return logit.masked_fill(~possible, NEVER)

    def act(self, x: Tensor, previous: Tensor, mask: Tensor, greedy: bool = False) -> Tensor:
        """Plans (B, parts): drawn, or if ``greedy`` the likelier branch, its likeliest parts."""
        hidden = self.actor(self.encode(x, previous))
        logit = self.repeat_logit(hidden, x, previous, mask)
        repeated = logit > 0 if greedy else torch.rand_like(logit) < logit.sigmoid()
        plan = []
        for k, legal in enumerate(mask.split(self.choices, 1)):
            score = self.heads[k](hidden.tanh()).masked_fill(legal == 0, ILLEGAL)
            if not greedy:  # Gumbel noise: a draw from the softmax
                score = score - torch.empty_like(score).exponential_().log()
            plan.append(score.argmax(1))
            if k < len(self.embeddings):
                hidden = hidden + self.embeddings[k](plan[k])
        return torch.where(repeated[:, None], previous, torch.stack(plan, 1))

    def forward(
        self, x: Tensor, previous: Tensor, mask: Tensor, plan: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities (B,) of plans (B, parts), entropies (B, 1 + parts), values (B,).

        The entropies are those of the gate and of each part given the parts before it, the latter
        weighted with the probability that the plan is drawn.
        """
        inputs = self.encode(x, previous)
        hidden = self.actor(inputs)
        logit = self.repeat_logit(hidden, x, previous, mask)
        log_repeat, log_draw = nn.functional.logsigmoid(logit), nn.functional.logsigmoid(-logit)
        entropy = [-(logit.sigmoid() * log_repeat + log_draw.exp() * log_draw)]
        log_prob = log_draw
        for k, legal in enumerate(mask.split(self.choices, 1)):
            head = self.heads[k](hidden.tanh()).masked_fill(legal == 0, ILLEGAL).log_softmax(1)
            log_prob = log_prob + head.gather(1, plan[:, k : k + 1]).squeeze(1)
            entropy.append(-log_draw.exp() * (head.exp() * head).sum(1))
            if k < len(self.embeddings):
                hidden = hidden + self.embeddings[k](plan[:, k])
        same = (plan == previous).all(1)
        log_prob = torch.where(same, torch.logaddexp(log_prob, log_repeat), log_prob)
        return log_prob, torch.stack(entropy, 1), self.critic(inputs).squeeze(1)


def demonstrations(args: Args, folder: Path) -> dict[str, NDArray[Any]]:
    """Decisions of ``args.teacher`` on train episodes of a serverless id.

    At some of the requests the plan that serves is not the teacher's: that of another episode's
    request, now and then any plan. The demonstration is always the teacher's own.

    Args:
        args: Arguments of the agent: ``teacher``, ``env_id`` (flat view) and ``set`` count.
        folder: Folder of the file with the demonstrations of such arguments: read if it is there,
            else collected and written.

    Returns:
        ``obs`` float32 (N, columns), ``previous`` int64 (N, parts) plans of the requests before,
        ``mask`` int8 (N, actions), ``plan`` int64 (N, parts) of the teacher.

    Raises:
        ValueError: If the teacher is unknown.
    """
    kwargs: dict[str, Any] = {"split": "train"} | parse_settings(args.set)
    key = json.dumps([args.teacher, args.env_id, kwargs], sort_keys=True)
    file = folder / f"demonstrations_{zlib.crc32(key.encode()):08x}.npz"
    if file.exists():
        return read_arrays(file, "delete it: the demonstrations are collected again")
    system = ServerlessSystem.from_kwargs(**kwargs)
    teacher = make_policy(args.teacher, system, family="serverless_moe")
    # The same episodes in the view that the teacher reads and in the agent's.
    n, mode = IMITATION_EPISODES, gym.vector.AutoresetMode.DISABLED
    envs: list[Any] = [
        gym.make_vec(name, n, "vector_entry_point", autoreset_mode=mode, **kwargs)
        for name in (args.env_id.replace("Flat", ""), args.env_id)
    ]
    dict_envs, flat_envs = envs
    seeds: Any = [IMITATION_SEED + i for i in range(n)]
    (dict_obs, info), (obs, _) = dict_envs.reset(seed=seeds), flat_envs.reset(seed=seeds)
    teacher.reset(n, seed=0)
    rng, choices = np.random.default_rng(1), dict_envs.single_action_space.nvec
    previous = np.zeros((n, len(choices)), np.int64)
    rows: dict[str, list[NDArray[Any]]] = {k: [] for k in ("obs", "previous", "mask", "plan")}
    requests = range(dict_envs.unwrapped.problem.episode_requests)
    for _ in track(requests, f"demonstrations of {args.teacher}"):
        plan = teacher.act(dict_obs, info["action_mask"])
        for name, value in zip(rows, (obs, previous, info["action_mask"], plan), strict=True):
            rows[name].append(value.copy())
        previous = plan.copy()
        deviates = rng.random(n) < DEVIATION
        previous[deviates] = plan[rng.integers(0, n, deviates.sum())]
        deviates = rng.random(n) < DEVIATION / 4
        previous[deviates] = (rng.random((deviates.sum(), len(choices))) * choices).astype(np.int64)
        dict_obs, _, _, _, info = dict_envs.step(previous)
        obs = flat_envs.step(previous)[0]
    dict_envs.close()
    flat_envs.close()
    found = {name: np.concatenate(value) for name, value in rows.items()}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(file, lambda stream: np.savez_compressed(stream, allow_pickle=False, **found))
    return found


def imitate(agent: Agent, args: Args, folder: Path) -> float:
    """Train a policy to decide as its teacher, by maximum likelihood.

    Args:
        agent: The agent.
        args: As for `demonstrations`.
        folder: As for `demonstrations`.

    Returns:
        Mean log-likelihood of the teacher's plans over the last pass.
    """
    device, arrays = agent.mean.device, demonstrations(args, folder)
    data = [torch.as_tensor(arrays[k], device=device) for k in ("obs", "previous", "mask", "plan")]
    agent.update_statistics(data[0])
    optimizer = torch.optim.Adam(agent.parameters(), lr=IMITATION_RATE)
    likelihood: list[float] = []
    for epoch in range(IMITATION_EPOCHS):
        optimizer.param_groups[0]["lr"] = IMITATION_RATE * (1 - epoch / IMITATION_EPOCHS)
        likelihood = []
        for index in torch.randperm(len(data[0])).split(IMITATION_BATCH):
            log_prob = agent(*(part[index] for part in data))[0].mean()
            optimizer.zero_grad()
            (-log_prob).backward()
            optimizer.step()
            likelihood.append(log_prob.item())
    return float(np.mean(likelihood))


def evaluate(agent: Agent, args: Args) -> dict[str, float]:
    """The greedy policy on fixed validation episodes.

    Returns:
        ``eval/score``, the mean reward per request; ``eval/repeated_share`` of the requests with
        the plan before theirs; and for part k of the plan ``eval/commonest_share_k`` of its
        commonest choice and ``eval/choice_entropy_k`` (nats): a constant policy has 1 and 0.
    """
    n, device = args.eval_episodes, agent.mean.device
    envs = make_envs(args.env_id, n, **(parse_settings(args.set) | {"split": "val"}))
    obs, info = envs.reset(seed=10_000)
    reward_sum, repeated, steps, alive = 0.0, 0, 0, np.ones(n, bool)
    counts = [np.zeros(k) for k in agent.choices]
    previous = torch.zeros((n, len(counts)), dtype=torch.long, device=device)
    while alive.any():
        mask = torch.as_tensor(action_masks(info, n, sum(agent.choices)), device=device)
        with torch.no_grad():
            plan = agent.act(torch.as_tensor(obs, device=device), previous, mask, greedy=True)
        action, same = plan.cpu().numpy(), (plan == previous).all(1).cpu().numpy()
        for k, count in enumerate(counts):
            count += np.bincount(action[alive, k], minlength=len(count))
        obs, reward, terminated, truncated, info = envs.step(action)
        reward_sum, steps = reward_sum + float(reward[alive].sum()), steps + int(alive.sum())
        repeated, previous = repeated + int(same[alive].sum()), plan
        alive &= ~(terminated | truncated)
    envs.close()
    result = {"eval/score": reward_sum / steps, "eval/repeated_share": repeated / steps}
    for k, share in enumerate(count / count.sum() for count in counts):
        entropy = -(share * np.log(np.maximum(share, 1e-12))).sum()
        result[f"eval/commonest_share_{k}"] = float(share.max())
        result[f"eval/choice_entropy_{k}"] = float(entropy)
    return result


def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors).

    Raises:
        ValueError: If an argument is out of range.
    """
    if args.group_size < 1 or args.num_envs % args.group_size:
        raise ValueError(f"group_size={args.group_size} must divide num_envs={args.num_envs}")
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    n, num_steps = args.num_envs, args.num_steps
    envs = make_envs(args.env_id, n, **parse_settings(args.set))
    box, multi = envs.single_observation_space, envs.single_action_space
    if not isinstance(box, gym.spaces.Box) or not isinstance(multi, gym.spaces.MultiDiscrete):
        raise ValueError(f"env_id: {args.env_id!r} has no single Box with MultiDiscrete actions")
    (columns,), choices = box.shape, [int(k) for k in multi.nvec]
    actions, parts = sum(choices), len(choices)
    agent = Agent(columns, choices, args.width).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    run = Path(args.out_dir) / (args.run_name or f"ppo_serverless_{args.seed}")
    run.mkdir(parents=True, exist_ok=True)
    meta = {
        "agent": "ppo_serverless",
        "args": json.dumps(asdict(args)),
        "shape": json.dumps({"columns": columns, "choices": choices, "width": args.width}),
    }
    save_policy = partial(write_checkpoint, agent, meta)

    # Imitation of the teacher.
    snapshot, imitation = load_snapshot(args.resume, run / "snapshot.pt"), {}
    if args.teacher and snapshot is None:
        imitation["imitation/log_likelihood"] = imitate(agent, args, run.parent)
        imitation |= evaluate(agent, args)

    # Equal seeds give equal episodes, now and after every reset.
    seeds: Any = [1_000_003 * args.seed + i // args.group_size for i in range(n)]
    next_obs, info = envs.reset(seed=seeds)
    if not args.teacher:
        agent.update_statistics(torch.as_tensor(next_obs, device=device))
    next_mask, episode_returns = action_masks(info, n, actions), np.zeros(n)
    previous = torch.zeros((n, parts), dtype=torch.long, device=device)
    update, best_score, mean_reward, log_size = 0, -np.inf, 0.0, 0
    if snapshot is not None:
        agent.load_state_dict(snapshot["agent"])
        optimizer.load_state_dict(snapshot["optimizer"])
        torch.set_rng_state(snapshot["rng"])
        envs, next_obs, next_mask, previous, episode_returns = pickle.loads(snapshot["envs"])
        update, best_score = snapshot["update"], snapshot["best_score"]
        mean_reward, log_size = snapshot["mean_reward"], snapshot["log_size"]
    batch_size = num_steps * n
    log = RunLog(run, args, "ppo_serverless", update * batch_size, log_size)
    if imitation:
        log.write(0, imitation)
        best_score = imitation["eval/score"]
        log.bar.console.print(f"after imitation: mean reward {best_score:.4f}")
        if args.save_model:
            save_policy(run / "best.safetensors")

    # Buffers (num_steps, num_envs, ...).
    shape = (num_steps, n)
    obs = torch.zeros((*shape, columns), device=device)
    masks = torch.zeros((*shape, actions), dtype=torch.int8, device=device)
    plans, previous_plans = torch.zeros((2, *shape, parts), dtype=torch.long, device=device)
    logprobs, rewards, values, next_values, dones = torch.zeros((5, *shape), device=device)
    num_updates, finished_returns = args.total_timesteps // batch_size, []
    while update < num_updates:
        frac = 1 - update / num_updates
        optimizer.param_groups[0]["lr"] = args.learning_rate * frac
        with torch.no_grad():
            for t in range(num_steps):
                obs[t], masks[t] = torch.as_tensor(next_obs), torch.as_tensor(next_mask)
                previous_plans[t] = previous
                plans[t] = agent.act(obs[t], previous, masks[t])
                logprobs[t], _, values[t] = agent(obs[t], previous, masks[t], plans[t])
                if t:
                    alive = dones[t - 1] == 0
                    next_values[t - 1] = torch.where(alive, values[t], next_values[t - 1])
                next_obs, reward, terminated, truncated, info = envs.step(plans[t].cpu().numpy())
                next_mask, done = action_masks(info, n, actions), terminated | truncated
                previous = plans[t].clone()
                rewards[t], dones[t] = torch.as_tensor(reward), torch.as_tensor(done)
                # After the last step of an episode: 0 if it has terminated, else the value of the
                # final observation.
                next_values[t] = 0.0
                for i in np.flatnonzero(truncated & ~terminated):
                    final = torch.as_tensor(info["final_obs"][i], device=device)[None].float()
                    next_values[t, i] = agent.critic(agent.encode(final, previous[i : i + 1]))[0, 0]
                episode_returns += reward
                finished_returns += episode_returns[done].tolist()
                episode_returns[done] = 0
            inputs = agent.encode(torch.as_tensor(next_obs, device=device), previous)
            next_value = agent.critic(inputs).squeeze(1)
            next_values[-1] = torch.where(dones[-1] == 0, next_value, next_values[-1])

            # Generalised advantage estimate of rewards less their running mean: values are small,
            # and 0 at an episode's end is right.
            mean_reward += max(0.02, 1 / (update + 1)) * (rewards.mean().item() - mean_reward)
            advantages, last_advantage = torch.zeros(shape, device=device), 0.0
            for t in reversed(range(num_steps)):
                delta = rewards[t] - mean_reward + args.gamma * next_values[t] - values[t]
                decay = args.gamma * args.gae_lambda * (1 - dones[t])
                last_advantage = delta + decay * last_advantage
                advantages[t] = last_advantage
            returns, advantage_std = advantages + values, advantages.std().item()
            if args.group_size > 1:  # less the mean of the others in the group
                group = advantages.view(num_steps, -1, args.group_size)
                others = (group.sum(2, keepdim=True) - group) / (args.group_size - 1)
                advantages = (group - others).view(shape)

        # Update the policy and the value network.
        buffers = (obs, previous_plans, masks, plans, logprobs, advantages, returns)
        batch = [x.reshape(batch_size, *x.shape[2:]) for x in buffers]
        for _ in range(args.update_epochs):
            for index in torch.randperm(batch_size).chunk(NUM_MINIBATCHES):
                b_obs, b_previous, b_masks, b_plans, b_logprobs, b_advantages, b_returns = (
                    x[index] for x in batch
                )
                new_logprobs, entropy, value = agent(b_obs, b_previous, b_masks, b_plans)
                logratio = new_logprobs - b_logprobs
                ratio = logratio.exp()
                b_advantages = (b_advantages - b_advantages.mean()) / (b_advantages.std() + 1e-8)
                clipped = ratio.clamp(1 - CLIP_COEF, 1 + CLIP_COEF)
                policy_loss = -torch.min(b_advantages * ratio, b_advantages * clipped).mean()
                value_loss = 0.5 * (value - b_returns).square().mean()
                entropy = entropy.mean(0)
                loss = VF_COEF * value_loss
                if not args.teacher or update >= CRITIC_UPDATES:
                    loss = loss + policy_loss - args.ent_coef * frac * entropy.sum()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
                optimizer.step()
        agent.update_statistics(batch[0])

        update += 1
        step = update * batch_size
        metrics = {
            "charts/SPS": log.advance(step),
            "charts/reward": rewards.mean().item(),
            "losses/policy_loss": policy_loss.item(),
            "losses/value_loss": value_loss.item(),
            "losses/entropy": entropy.sum().item(),
            "losses/approx_kl": torch.expm1(logratio).sub(logratio).mean().item(),
            "losses/advantage_std": advantage_std,
            "charts/entropy_keep": entropy[0].item(),
            "losses/advantage_std_less_others": advantages.std().item(),
        }
        metrics |= {f"charts/entropy_{k}": e for k, e in enumerate(entropy[1:].tolist())}
        if finished_returns:
            metrics["charts/episodic_return"] = float(np.mean(finished_returns))
            finished_returns = []
        if interval_passed(args.eval_every, step - batch_size, step) or update == num_updates:
            result = evaluate(agent, args)
            metrics |= result
            score = result["eval/score"]
            log.bar.console.print(f"step {step}: mean reward {score:.4f}")
            best_score = save_best_and_last(save_policy, args, run, score, best_score)
        log.write(step, metrics)
        if interval_passed(args.checkpoint_every, step - batch_size, step):
            collected = (envs, next_obs, next_mask, previous, episode_returns)
            save_snapshot(
                run / "snapshot.pt",
                agent=agent.state_dict(),
                optimizer=optimizer.state_dict(),
                rng=torch.get_rng_state(),
                envs=pickle.dumps(collected),
                update=update,
                best_score=best_score,
                mean_reward=mean_reward,
                log_size=log.size,
            )
    log.close()
    envs.close()
    return run


class PlanPolicy(CheckpointPolicy):
    """Repeats the last plan of an episode while it is warm, or makes a new one."""

    last_plan: NDArray[np.int64] | None = None
    """Plans (B, parts) of the requests before."""

    def episode_start(self, mask: NDArray[np.bool_]) -> None:
        """Forget the last plans of the rows."""
        if self.last_plan is None or len(self.last_plan) != len(mask):
            self.last_plan = np.zeros((len(mask), len(self.net.choices)), np.int64)
        self.last_plan = np.where(mask[:, None], 0, self.last_plan)

    def act(self, observation: Any, action_mask: Any = None) -> NDArray[np.int64]:
        """Actions int64 (B, parts).

        Raises:
            ValueError: If observations or masks are of another width than the network's.
        """
        net, legal = self.net, np.asarray(action_mask)
        rows = torch.as_tensor(np.asarray(observation)).float()
        if rows.shape[-1] != net.columns or legal.shape[-1] != sum(net.choices):
            raise ValueError(
                f"{self.path}: trained on {net.columns} columns and choices {net.choices}, got "
                f"{rows.shape[-1]} columns and {legal.shape[-1]} choices in all"
            )
        if self.last_plan is None or len(self.last_plan) != len(rows):  # `reset` was not called
            self.reset(len(rows))
        with torch.inference_mode():
            plan = net.act(rows, torch.as_tensor(self.last_plan), torch.as_tensor(legal), True)
        self.last_plan = plan.numpy().astype(np.int64)
        return plan.numpy().astype(np.int64)


OLD_NAMES = {"keep.": "repeat.", "told.": "embeddings."}
"""Names of weights in the checkpoints of earlier versions."""


def load(meta: Mapping[str, str], weights: Mapping[str, Tensor], system: Any) -> PlanPolicy:
    """The policy of a checkpoint, see `servegym.agents.lib.checkpoint`."""
    for old, new in OLD_NAMES.items():
        weights = {name.replace(old, new): value for name, value in weights.items()}
    net = Agent(**json_field(meta, "shape"))
    net.load_state_dict(weights)
    given = json_field(meta, "args")
    if "replicas" in given:  # the earlier name
        given["group_size"] = given["replicas"]
    return PlanPolicy("ppo_serverless", "flat", saved_args(Args, given), net)


if __name__ == "__main__":
    train(tyro.cli(Args, config=(tyro.conf.FlagConversionOff,)))
