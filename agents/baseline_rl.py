"""The paper's Baseline RL: discrete soft actor-critic over the experts' rows alone.

Baseline RL (arXiv:2508.00234, section VI) sees of every expert its memory, running and waiting
requests (Eq. 7), neither the arrived request nor its predictions nor the queues, and is paid the
QoS of a request when it is completed. One small network reads every expert's row and who it is, so
that a policy is made for one number of experts.

Neighbours: `direct_search` searches a linear policy over the same state, with no learning;
`ppo_han --encoder expert` learns by PPO; `sac_han` has the same losses over the whole graph.
``python agents/baseline_rl.py --help`` lists the options.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from numpy.typing import NDArray
from torch import Tensor, nn

from servegym.agents.lib import checkpoint, environments
from servegym.agents.lib.arguments import ResumableRunArgs
from servegym.agents.lib.checkpoint import CheckpointPolicy
from servegym.agents.lib.evaluation import evaluate_router
from servegym.agents.lib.run_log import RunLog, interval_passed
from servegym.agents.lib.snapshots import load_snapshot, save_snapshot
from servegym.envs._command_line import parse_settings

Observation = Mapping[str, NDArray[Any]]

ENV = {
    "profiles": "edge-6-heterogeneous",
    "latency_requirement_s": 0.030,
    "rate": (4.0, 11.0),  # requests/s; each training episode draws its own
    "reward": "completed_qos",
}
"""Arguments of the training environment; ``--set`` changes them and adds others."""

WIDTH = 32  # of every hidden layer; a row has three numbers
WARMUP_STEPS = 8_000  # before the first update; at most a fifth of the training
WARMUP_RANDOM = 0.2  # share of environments with uniform legal actions in the warm-up
BATCH_SIZE = 256  # transitions per update
TAU = 0.02  # polyak step of the target network, per update
AVERAGE = 0.01  # polyak step of the averaged network, which is evaluated and saved, per round
LOG_EVERY = 2_000  # steps between rows of the log
EVAL_EPISODES, EVAL_REQUESTS = 8, 500  # of an evaluation: episodes per rate, requests per episode


@dataclass
class Args(ResumableRunArgs):
    """Command line of the agent."""

    env_id: str = "servegym/LLMRouting-v0"
    """a routing environment with the Dict observation"""
    set: tuple[str, ...] = ()
    """environment arguments, key=value with a JSON value, as in rate=[5,5] num_experts=3"""
    total_timesteps: int = 300_000
    """environment steps (decisions) over all environments"""
    num_envs: int = 128
    """parallel environments"""
    buffer_size: int = 200_000
    """transitions in the replay buffer"""
    updates_per_step: int = 4
    """gradient updates after each step of all environments"""
    gamma: float = 0.99
    """discount per decision"""
    n_step: int = 8
    """rewards summed before bootstrapping"""
    lr: float = 1e-3
    """learning rate of the encoder and the critics at first; it falls linearly to a tenth"""
    actor_lr: float = 3e-4
    """learning rate of the actor at first; it falls likewise"""
    alpha: float = 0.02
    """temperature at first, the weight of the policy's entropy for the actor; it falls likewise"""
    eval_every: int = 30_000
    """steps between evaluations on the validation split; the best policy is saved"""
    eval_rates: tuple[float, ...] = (5.0, 8.0, 10.0)
    """arrival rates of the evaluation"""


class Encoder(nn.Module):
    """One network over every expert: rows (B, 3 N) -> system (B, 32), experts (B, N, 32).

    An expert's input is its row, the mean row and a learned vector that tells it apart.
    """

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.who = nn.Parameter(torch.randn(experts, 8))
        self.each = nn.Sequential(
            nn.Linear(14, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()
        )
        self.all = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Embed a batch of rows."""
        own = rows.view(len(rows), -1, 3)
        mean, who = own.mean(1, keepdim=True).expand_as(own), self.who.expand(len(own), -1, -1)
        experts = self.each(torch.cat([own, mean, who], -1))
        return self.all(experts.mean(1)), experts


class Head(nn.Module):
    """One value per action (B, N+1): drop from MLP[h], expert n from MLP[h | h_n]."""

    def __init__(self) -> None:
        super().__init__()
        self.system = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
        self.by_system, self.by_expert = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, h: tuple[Tensor, Tensor]) -> Tensor:
        """Embeddings -> (B, N+1); a value common to all actions is added (dueling)."""
        system, experts = h
        drop, common = self.system(system).split(1, -1)
        hidden = (self.by_system(system)[:, None] + self.by_expert(experts)).relu()
        return torch.cat([drop, self.out(hidden).squeeze(-1)], -1) + common


class Agent(nn.Module):
    """Encoder shared by actor and twin critics; the critics' loss alone trains the encoder."""

    fixed_experts = True

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.encoder = Encoder(experts)
        self.actor, self.q1, self.q2 = (Head() for _ in range(3))

    def rows(self, obs: Observation) -> NDArray[np.float16]:
        """Scaled rows (B, 3 N) of a batch of observations.

        Raises:
            ValueError: If the number of experts is not the agent's.
        """
        experts = obs["experts"]
        if experts.shape[1] != self.experts:
            raise ValueError(f"made for {self.experts} experts, got {experts.shape[1]}")
        return (experts * (2, 1 / 3, 1 / 3)).reshape(len(experts), -1).astype(np.float16)

    def log_policy(self, h: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Log-probabilities (B, N+1); illegal actions get a large finite negative logit."""
        return self.actor(h).masked_fill(mask == 0, -1e8).log_softmax(-1)

    @torch.no_grad()
    def act(self, obs: Observation, mask: NDArray[Any]) -> NDArray[np.int64]:
        """The likeliest legal action of every observation."""
        device = next(self.parameters()).device
        h = self.encoder(torch.as_tensor(self.rows(obs), device=device).float())
        legal = torch.as_tensor(np.asarray(mask), device=device)
        return self.log_policy(h, legal).argmax(-1).cpu().numpy()


@torch.no_grad()
def polyak_update(target: nn.Module, net: nn.Module, tau: float) -> None:
    """Move the target's weights towards the network's by a share of tau."""
    for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
        slow.lerp_(fast, tau)


class ReplayBuffer:
    """Time-major ring of transitions; rows of scaled features in float16, both action masks.

    The n-step sums are kept up as the rewards come in, so that a long sum costs a sample nothing.
    """

    def __init__(
        self, size: int, num_envs: int, columns: int, actions: int, n_step: int, gamma: float
    ) -> None:
        self.length, self.envs, self.count = max(size // num_envs, 2), num_envs, 0
        self.n_step, self.gamma = n_step, gamma
        row, legal = (columns, np.float16), (actions, np.int8)
        kinds = {"obs": row, "next_obs": row, "mask": legal, "next_mask": legal}
        shape = (self.length, num_envs)
        self.data = {k: np.zeros((*shape, width), kind) for k, (width, kind) in kinds.items()}
        flat = {"action": np.int64, "reward": np.float32, "terminated": bool, "open": bool}
        flat |= dict.fromkeys(("return", "weight", "discount"), np.float32) | {"last": np.int64}
        self.data |= {k: np.zeros(shape, kind) for k, kind in flat.items()}

    def add(self, done: NDArray[np.bool_], **step: NDArray[Any]) -> None:
        """Append one step of all environments; ``done`` (E,) where an episode ended or was cut."""
        d, at = self.data, self.count % self.length
        fresh = {"return": 0.0, "weight": 0.0, "discount": 1.0, "open": True}
        for key, value in (step | fresh).items():
            d[key][at] = value
        rows = (self.count - np.arange(min(self.n_step, self.count + 1))) % self.length
        counts = d["open"][rows]
        weight = d["discount"][rows] * counts
        d["return"][rows] += weight * d["reward"][at]
        d["weight"][rows] += weight
        d["discount"][rows] *= np.where(counts, np.float32(self.gamma), 1)
        d["last"][rows] = np.where(counts, at, d["last"][rows])
        d["open"][rows] = counts & np.logical_not(done)
        self.count += 1

    def sample(self, size: int, center: float, rng: np.random.Generator) -> dict[str, NDArray[Any]]:
        """Uniform batch; `return` is the n-step sum of (reward - center), `discount` gamma^n.

        A sum that meets the end of an episode stops there; next_obs, next_mask and terminated are
        those of its last step, so a truncated one bootstraps and a terminated one does not.
        """
        d, stored = self.data, min(self.count, self.length)
        start = self.count - stored + rng.integers(0, stored - self.n_step + 1, size)
        at: Any = (start % self.length, rng.integers(0, self.envs, size))
        last: Any = (d["last"][at], at[1])
        batch = {k: d[k][at] for k in ("obs", "mask", "action", "discount")}
        batch |= {k: d[k][last] for k in ("next_obs", "next_mask", "terminated")}
        return batch | {"return": d["return"][at] - np.float32(center) * d["weight"][at]}


def critic_target(batch: Mapping[str, Tensor], log_pi: Tensor, q1: Tensor, q2: Tensor) -> Tensor:
    """Return + discount * sum_a pi(a|s') min(Q1, Q2)(s', a), zero once terminated; (B,).

    The entropy bonus stays out of the target, as in revised discrete SAC (Zhou et al. 2022).
    """
    value = (log_pi.exp() * torch.minimum(q1, q2)).sum(-1)
    return batch["return"] + batch["discount"] * (1 - batch["terminated"].float()) * value


def update(
    agent: Agent, target: Agent, optimizer: torch.optim.Optimizer, batch: Any, alpha: float
) -> dict[str, Tensor]:
    """One gradient step on critics, encoder and actor, and a polyak step of the target."""
    with torch.no_grad():
        h = target.encoder(batch["next_obs"])
        log_pi = target.log_policy(h, batch["next_mask"])
        td_target = critic_target(batch, log_pi, target.q1(h), target.q2(h))
    h = agent.encoder(batch["obs"])
    q1, q2 = agent.q1(h), agent.q2(h)
    chosen = batch["action"][:, None]
    q1_loss, q2_loss = (F.mse_loss(q.gather(1, chosen).squeeze(1), td_target) for q in (q1, q2))

    log_pi = agent.log_policy((h[0].detach(), h[1].detach()), batch["mask"])
    q = torch.minimum(q1, q2).detach()
    actor_loss = (log_pi.exp() * (alpha * log_pi - q)).sum(-1).mean()

    optimizer.zero_grad()
    (q1_loss + q2_loss + actor_loss).backward()
    nn.utils.clip_grad_norm_(agent.parameters(), 10.0)
    optimizer.step()
    polyak_update(target, agent, TAU)
    losses = {"losses/qf1_loss": q1_loss, "losses/qf2_loss": q2_loss}
    losses |= {"losses/actor_loss": actor_loss, "losses/qf1_values": q1.mean()}
    losses["charts/policy_entropy"] = -(log_pi.exp() * log_pi).sum(-1).mean()
    return {key: value.detach() for key, value in losses.items()}


def save_policy(agent: Agent, args: Args, path: Path) -> None:
    """Weights and arguments in one safetensors file."""
    meta = {"agent": "baseline_rl", "args": json.dumps(asdict(args))}
    checkpoint.write_checkpoint(agent, meta, path)


def load(meta: Mapping[str, str], weights: Mapping[str, Tensor], system: Any) -> CheckpointPolicy:
    """The policy of a checkpoint, see `servegym.agents.lib.checkpoint`."""
    args = checkpoint.saved_args(Args, checkpoint.json_field(meta, "args"))
    agent = Agent(len(weights["encoder.who"]))
    if system is not None and system.num_experts != agent.experts:
        raise ValueError(f"made for {agent.experts} experts, got {system.num_experts}")
    checkpoint.load_weights(agent, weights)
    env_kwargs = ENV | parse_settings(args.set)
    env_kwargs.pop("max_episode_steps", None)  # truncates the training alone
    policy = CheckpointPolicy("baseline_rl", "graph", args, agent, agent.act, env_kwargs)
    policy.agent = "baseline_rl"  # in older files, sac_han
    return policy


def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors)."""
    env_kwargs = ENV | parse_settings(args.set)
    if not 1 <= args.n_step <= args.buffer_size // args.num_envs:
        longest = f"{args.buffer_size // args.num_envs}, the steps of an environment in the buffer"
        raise ValueError(f"n_step: must be from 1 to {longest}; got {args.n_step}")
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    envs, n = environments.make_envs(args.env_id, args.num_envs, **env_kwargs), args.num_envs
    if not isinstance(envs.single_observation_space, gym.spaces.Dict):
        raise ValueError(f"env_id: {args.env_id!r} has no Dict observation")
    obs, info = envs.reset(seed=environments.episode_seeds(args.seed, n))
    experts = obs["running_mask"].shape[1]
    slots = obs["running_mask"].shape[2] + obs["waiting_mask"].shape[2]
    run = Path(args.out_dir) / (args.run_name or f"baseline_rl_{args.seed}")

    agent, actions = Agent(experts).to(device), experts + 1
    target, averaged = (deepcopy(agent).requires_grad_(False) for _ in range(2))
    critics = [p for part in (agent.encoder, agent.q1, agent.q2) for p in part.parameters()]
    groups = [{"params": critics}, {"params": list(agent.actor.parameters())}]
    optimizer = torch.optim.Adam(groups, fused=True)
    buffer = ReplayBuffer(args.buffer_size, n, 3 * experts, actions, args.n_step, args.gamma)
    learning_starts = min(WARMUP_STEPS, args.total_timesteps // 5)

    mask, step, best, mean_reward, log_size = info["action_mask"], 0, -np.inf, 0.0, 0
    returns, shares, episodic_returns, episodic_qos = np.zeros(n), np.zeros(actions), [], []
    learned = {"agent": agent, "target": target, "averaged": averaged, "optimizer": optimizer}
    saved = load_snapshot(args.resume, run / "snapshot.pt")
    if saved is not None:
        for key, part in learned.items():
            part.load_state_dict(saved[key])
        rng.bit_generator.state, envs = saved["rng"], pickle.loads(saved["envs"])
        step, best, mean_reward, log_size, obs, mask, *rest = saved["state"]
        returns, episodic_returns, episodic_qos, shares, buffer.count, buffer.data = rest
    log = RunLog(run, args, "baseline_rl", step, log_size)
    losses: dict[str, Tensor] = {}

    while step < args.total_timesteps:
        # Act: send to the least loaded expert or by chance in the warm-up, then by the policy.
        rows, warm_up = agent.rows(obs), step < learning_starts
        score = rng.random(mask.shape)
        if warm_up:
            # The least loaded expert below a cap that differs between environments.
            held = obs["experts"][..., 1:].sum(-1)
            cap = 1 + np.arange(n)[:, None] % slots
            greedy = rng.random((n, 1)) >= WARMUP_RANDOM
            score -= greedy * np.concatenate([cap - 0.5, held], -1)
        else:
            with torch.no_grad():
                h = agent.encoder(torch.as_tensor(rows, device=device).float())
                log_pi = agent.log_policy(h, torch.as_tensor(mask, device=device)).cpu().numpy()
            score = log_pi + rng.gumbel(size=log_pi.shape)
        action = np.where(mask, score, -1e30).argmax(-1)

        # Step the environments and store the transition with its final observations.
        next_obs, reward, terminated, truncated, info = envs.step(action)
        done = terminated | truncated
        final_obs, final_mask = environments.next_observations(next_obs, info, done)
        buffer.add(
            obs=rows,
            mask=mask,
            action=action,
            reward=reward,
            terminated=terminated,
            done=done,
            next_obs=agent.rows(final_obs),
            next_mask=final_mask,
        )
        obs, mask = next_obs, info["action_mask"]
        before, step = step, step + n
        mean_reward += (reward.mean() - mean_reward) * max(0.002, 1 / buffer.count)
        shares += np.bincount(action, minlength=actions)
        returns += reward
        episodic_returns += returns[done].tolist()
        returns[done] = 0
        if terminated.any():
            episodic_qos += info["final_info"]["episode_kpis"]["avg_qos"][terminated].tolist()

        # Learn.
        if step >= learning_starts and buffer.count >= args.n_step:
            left = 1 - 0.9 * step / args.total_timesteps
            for group, lr in zip(optimizer.param_groups, (args.lr, args.actor_lr), strict=True):
                group["lr"] = lr * left
            for _ in range(args.updates_per_step):
                sample = buffer.sample(BATCH_SIZE, mean_reward, rng)
                batch = {k: torch.as_tensor(v, device=device) for k, v in sample.items()}
                batch |= {k: batch[k].float() for k in ("obs", "next_obs")}
                losses = update(agent, target, optimizer, batch, args.alpha * left)
            polyak_update(averaged, agent, AVERAGE)

        # Log, evaluate and save.
        last = step >= args.total_timesteps
        if interval_passed(LOG_EVERY, before, step) or last:
            metrics = {"charts/SPS": log.advance(step), "charts/reward": mean_reward}
            metrics |= {k: float(v) for k, v in losses.items()}
            metrics |= {f"charts/share_{k}": v for k, v in enumerate(shares / shares.sum())}
            means = {"charts/episodic_return": episodic_returns, "charts/avg_qos": episodic_qos}
            metrics |= {k: float(np.mean(v)) for k, v in means.items() if v}
            episodic_returns, episodic_qos, shares = [], [], np.zeros(actions)
            log.write(step, metrics)
        if losses and (interval_passed(args.eval_every, before, step) or last):
            result = evaluate_router(
                averaged.act, args.env_id, env_kwargs, args.eval_rates, EVAL_EPISODES, EVAL_REQUESTS
            )
            log.write(step, result)
            log.print_qos(step, result)
            write = partial(save_policy, averaged, args)
            best = checkpoint.save_best_and_last(write, args, run, result["eval/avg_qos"], best)
        if interval_passed(args.checkpoint_every, before, step):
            rest = (returns, episodic_returns, episodic_qos, shares, buffer.count, buffer.data)
            save_snapshot(
                run / "snapshot.pt",
                **{key: part.state_dict() for key, part in learned.items()},
                state=(step, best, mean_reward, log.size, obs, mask, *rest),
                rng=rng.bit_generator.state,
                envs=pickle.dumps(envs),
            )
    log.close()
    envs.close()
    return run


if __name__ == "__main__":
    train(tyro.cli(Args, config=(tyro.conf.FlagConversionOff,)))
