"""Multi-agent PPO for expert placement: every server plans its own experts, the critic sees all.

The servers of the PettingZoo environment share one actor, which reads what the server knows itself
(its counts, what it holds, its links) and gives heights and slopes as in ``ppo_placement``. The
critic reads ``state()`` and serves only in training (Yu et al., NeurIPS 2022, "The surprising
effectiveness of PPO in cooperative multi-agent games"). All servers get the sum of the rewards.
Groups of episodes with the same requests, the start and the free first placement are as in
``ppo_placement``. ``python agents/mappo_placement.py --help`` lists the options.
"""

from __future__ import annotations

import json
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

from servegym.agents.lib.arguments import RunArgs
from servegym.agents.lib.checkpoint import (
    CheckpointPolicy,
    json_field,
    save_best_and_last,
    saved_args,
    write_checkpoint,
)
from servegym.agents.lib.environments import parse_settings
from servegym.agents.lib.run_log import RunLog, interval_passed
from servegym.agents.lib.snapshots import load_snapshot, save_snapshot
from servegym.agents.placement_features import SCALARS, Features, group_advantage, is_first
from servegym.baselines.expert_placement.initial_placement import (
    InitialPlacement,
    cached_best_start,
    cluster_fingerprint,
)
from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.envs.expert_placement.core import observation_space
from servegym.envs.expert_placement.decode import decode_scores, repair_placement
from servegym.envs.expert_placement.env import make_problem
from servegym.envs.expert_placement.pettingzoo_env import ExpertPlacementParallelEnv


@dataclass
class Args(RunArgs):
    """Command line of the agent."""

    set: tuple[str, ...] = ("scenario=edge_hetero",)
    """environment arguments, key=value with a JSON value, as in scenario=drift"""
    base: str = "best"
    """where the scores start: best (found by simulation), whole_layer or none"""
    start_tries: int = 3
    """placements annealed for each of three settings, from which the best start is taken"""
    start_steps: int = 3_000_000
    """proposals of each annealing"""
    width: int = 64
    """hidden units of every layer"""
    total_timesteps: int = 160
    """decisions over all environments, those of all servers counted once"""
    groups: int = 4
    """different episodes per update"""
    members: int = 8
    """copies of each episode, with the same requests"""
    epochs: int = 1
    """decisions of a training episode; evaluations have the environment's"""
    learning_rate: float = 3e-3
    """learning rate at first; it falls linearly to zero"""
    gamma: float = 1.0
    """discount per epoch"""
    gae_lambda: float = 0.95
    """lambda of the generalised advantage estimate"""
    num_minibatches: int = 2
    """minibatches per pass"""
    update_epochs: int = 4
    """passes over the collected steps"""
    clip_coef: float = 0.2
    """clipping of the probability ratio of each server"""
    target_kl: float = 1.0
    """the passes of an update end when the policy has moved so far"""
    std: tuple[float, float] = (0.6, 0.4)
    """standard deviation of heights and slopes at first and at last, linear in between"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """gradients are clipped to this norm"""
    move_bias: float = -4.0
    """logit of a server's migration after the first, at first"""
    eval_every: int = 160
    """decisions between evaluations on the validation split; the best policy is kept"""
    eval_episodes: int = 4
    """episodes per evaluation"""
    resume: bool = False
    """go on with the run of this name where it was stopped; needs what save_model writes"""


def layer(inputs: int, outputs: int, std: float = 2**0.5) -> nn.Linear:
    """A linear layer with orthogonal weights and no bias at first."""
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, std)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    """One actor for every server, and a critic of the whole system."""

    def __init__(self, columns: int, width: int, move_bias: float = -4.0) -> None:
        super().__init__()
        self.columns, self.width = columns, width
        self.encode = nn.Sequential(
            layer(columns, width), nn.Tanh(), layer(width, width), nn.Tanh()
        )
        self.mix = nn.Sequential(layer(2 * width, width), nn.Tanh())
        self.mean = layer(width, 2, 0.01)
        self.move = layer(width, 1, 0.01)
        nn.init.constant_(self.move.bias, move_bias)
        self.critic_encode = nn.Sequential(layer(columns, width), nn.Tanh())
        self.critic = nn.Sequential(layer(width, width), nn.Tanh(), layer(width, 1, 1.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Means (..., L, 2) and logits of a move (...,) of features (..., L, columns).

        Each leading index is a server on its own.
        """
        h = self.encode(x)
        h = self.mix(torch.cat([h, h.mean(-2, keepdim=True).expand_as(h)], -1))
        return self.mean(h), self.move(h.mean(-2)).squeeze(-1)

    def value(self, x: Tensor) -> Tensor:
        """Values (B,) of features (B, N, L, columns)."""
        return self.critic(self.critic_encode(x).mean((1, 2))).squeeze(-1)

    def log_prob(
        self, mean: Tensor, std: float, move: Tensor, z: Tensor, moved: Tensor, free: Tensor
    ) -> Tensor:
        """Log-probability (B, N) of each server's action; free (B, 1) as in ``ppo_placement``."""
        plan = torch.distributions.Normal(mean, std).log_prob(z).sum((2, 3))
        choice = -nn.functional.binary_cross_entropy_with_logits(move, moved, reduction="none")
        return torch.where(free > 0, 0.0, choice) + moved * plan


def make_features(cluster: Any, args: Args, start: InitialPlacement | None) -> Features:
    """What the network reads."""
    return Features(cluster, args.base, None if start is None else start.held)


def make_env(args: Args, **overrides: Any) -> ExpertPlacementParallelEnv:
    """The multi-agent environment in the mode of scores."""
    kwargs = parse_settings(args.set) | {"action_mode": "expert_score", "shared_reward": True}
    return ExpertPlacementParallelEnv(**(kwargs | overrides))


def local_features(
    features: Features, observations: Sequence[Mapping[str, Mapping[str, Any]]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Features (B, N, L, columns) and log-shares of what the servers see; whether free (B, 1)."""

    def stack(name: str) -> NDArray[Any]:
        return np.stack([np.stack([own[name] for own in seen.values()]) for seen in observations])

    scalars = {name: stack(name)[..., 0] for name in SCALARS}
    x, log_share = features.by_server(stack("counts"), stack("held")[:, :, 0] > 0, scalars)
    free = torch.as_tensor(scalars["progress"][:, :1] <= 0.0, dtype=torch.float32)
    return x, log_share, free


def state_features(features: Features, envs: Sequence[ExpertPlacementParallelEnv]) -> Tensor:
    """Features (B, N, L, columns) of the environments' ``state()``."""
    space = observation_space(envs[0].problem)
    found = [gym.spaces.unflatten(space, env.state()) for env in envs]
    return features({name: np.stack([one[name] for one in found]) for name in space})[0]


def step_all(
    envs: Sequence[ExpertPlacementParallelEnv], migrate: NDArray[Any], plan: NDArray[Any]
) -> tuple[list[Any], Tensor, list[Any]]:
    """Step every environment: observations, shared rewards (B,), infos of the first servers."""
    seen, rewards, infos = [], [], []
    for env, moves, plans in zip(envs, migrate, plan, strict=True):
        actions = {
            agent: {"migrate": int(moves[n]), "plan": plans[n]}
            for n, agent in enumerate(env.agents)
        }
        observation, reward, _, _, info = env.step(actions)
        seen.append(observation)
        rewards.append(next(iter(reward.values())))
        infos.append(next(iter(info.values())))
    return seen, torch.tensor(rewards, dtype=torch.float32), infos


def greedy(
    agent: Agent, features: Features, cluster: Any, observation: Mapping[str, Any]
) -> dict[str, NDArray[Any]]:
    """The likeliest joint action for the single environment with ``action_mode="placement"``.

    The servers' plans are put together as the multi-agent environment does.
    """
    x, log_share = features(observation)
    with torch.no_grad():
        mean, move = agent(x)
    migrate = is_first(observation)[:, None] | (move.numpy() > 0)
    plan = features.plan(mean, log_share)
    found = np.array(observation["placement"], dtype=np.int8)
    for b in np.flatnonzero(migrate.any(axis=1)):
        counts = np.asarray(observation["counts"][b], dtype=np.float64)
        wanted = decode_scores(cluster, plan[b], counts, found[b])
        keeps = ~migrate[b][cluster.gpu_server]
        wanted[keeps] = found[b][keeps]
        found[b] = repair_placement(cluster, wanted, counts)
    return {"migrate": migrate.any(axis=1).astype(np.int64), "plan": found}


def evaluate(agent: Agent, features: Features, args: Args) -> tuple[float, float]:
    """Mean latency in seconds and migrations of the greedy servers on validation episodes."""
    envs = [make_env(args, split="val") for _ in range(args.eval_episodes)]
    seen = [env.reset(seed=10_000 + i)[0] for i, env in enumerate(envs)]
    infos: list[Any] = []
    while envs[0].agents:
        x, log_share, free = local_features(features, seen)
        with torch.no_grad():
            mean, move = agent(x)
        migrate = ((free > 0) | (move > 0)).long().numpy()
        seen, _, infos = step_all(envs, migrate, features.plan(mean, log_share))
    kpis = [info["episode_kpis"] for info in infos]
    latency, migrations = (
        float(np.mean([k[name] for k in kpis])) for name in ("mean_latency_s", "migrations")
    )
    return latency, migrations


def save_policy(
    agent: Agent, args: Args, path: Path, step: int, start: InitialPlacement | None
) -> None:
    """Weights, arguments, shape, start and the decisions trained so far in one safetensors file."""
    meta = {"args": json.dumps(asdict(args)), "shape": json.dumps({"width": agent.width})}
    if start is not None:
        meta["start"] = start.to_json()
    meta["setting"] = cluster_fingerprint(make_problem(parse_settings(args.set)))
    write_checkpoint(agent, meta | {"agent": "mappo_placement", "step": str(step)}, path)


def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors)."""
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    for name in ("groups", "members", "epochs", "eval_episodes", "start_tries", "start_steps"):
        low = {"members": 2, "start_tries": 0}.get(name, 1)
        if getattr(args, name) < low:
            raise ValueError(f"{name} is {getattr(args, name)}; allowed is {low} or more")
    if min(args.std) <= 0:
        raise ValueError(f"std is {args.std}; both must be above 0")
    n, steps = args.groups * args.members, args.epochs
    if "free_start" in parse_settings(args.set):
        raise ValueError("set: free_start must stay True, the first placement is always made")
    envs = [make_env(args, epochs=steps) for _ in range(n)]
    run = Path(args.out_dir) / (args.run_name or f"mappo_placement_{args.seed}")
    run.mkdir(parents=True, exist_ok=True)
    start = None
    if args.base == "best":
        # The search knows the prompts of the training split only.
        system = PlacementSystem.from_problem(make_problem(parse_settings(args.set)), own=True)
        tries, proposals = args.start_tries, args.start_steps
        start = cached_best_start(
            run / "start.json", system, tries=tries, steps=proposals, seed=args.seed
        )
    features = make_features(envs[0].problem.cluster, args, start)
    agent = Agent(features.columns, args.width, args.move_bias)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    size = steps * n
    updates = max(args.total_timesteps // size, 1)
    best, first, log_size = np.inf, 0, 0
    state = load_snapshot(args.resume, run / "state.pt")
    if state is not None:
        agent.load_state_dict(state["agent"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        best, first, log_size = state["best"], state["iteration"], state["log_bytes"]
    log = RunLog(run, args, "mappo_placement", first * size, log_size)

    servers, layers, _ = features.shape
    local = (steps, n, servers, layers, features.columns)
    b_x, b_state = torch.zeros(local), torch.zeros(local)
    b_z = torch.zeros(steps, n, servers, layers, 2)
    b_moved, b_logp = torch.zeros(steps, n, servers), torch.zeros(steps, n, servers)
    b_free = torch.zeros(steps, n, 1)
    b_reward, b_value = torch.zeros(steps, n), torch.zeros(steps, n)

    def check(step: int) -> dict[str, float]:
        """Evaluate and keep the policy."""
        nonlocal best
        latency, migrations = evaluate(agent, features, args)
        log.bar.console.print(f"step {step}: validation latency {latency:.3f} s")
        write = partial(save_policy, agent, args, step=step, start=start)
        best = -save_best_and_last(write, args, run, -latency, -best)
        return {"eval/mean_latency_s": latency, "eval/migrations": migrations}

    if first == 0:
        log.write(0, check(0))
    for iteration in range(first, updates):
        gone = iteration / updates
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - gone)
        std = args.std[0] + gone * (args.std[1] - args.std[0])
        # The seeds of an update follow from its number alone: a stopped run needs no environment.
        draw = np.random.default_rng([args.seed, iteration]).integers(1 << 30, size=args.groups)
        seeds = np.repeat(draw, args.members).tolist()
        seen = [env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)]
        infos: list[Any] = []
        with torch.no_grad():
            for t in range(steps):
                b_x[t], log_share, b_free[t] = local_features(features, seen)
                b_state[t] = state_features(features, envs)
                mean, move = agent(b_x[t])
                b_value[t] = agent.value(b_state[t])
                b_z[t] = mean + std * torch.randn_like(mean)
                b_moved[t] = torch.maximum(b_free[t], torch.bernoulli(move.sigmoid()))
                b_logp[t] = agent.log_prob(mean, std, move, b_z[t], b_moved[t], b_free[t])
                plan = features.plan(b_z[t], log_share)
                seen, b_reward[t], infos = step_all(envs, b_moved[t].long().numpy(), plan)
            advantage, running = torch.zeros(steps, n), torch.zeros(n)
            following = torch.zeros(n)  # nothing follows the last decision
            for t in reversed(range(steps)):
                delta = b_reward[t] + args.gamma * following - b_value[t]
                running = delta + args.gamma * args.gae_lambda * running
                advantage[t], following = running, b_value[t]
            goals = advantage + b_value
            advantage = group_advantage(advantage, args.members)
        flat = [
            x.reshape(size, *x.shape[2:])
            for x in (b_x, b_state, b_z, b_moved, b_free, b_logp, advantage, goals)
        ]
        for _ in range(args.update_epochs):
            for index in torch.randperm(size).chunk(args.num_minibatches):
                x, whole, z, moved, free, old, adv, goal = (f[index] for f in flat)
                mean, move = agent(x)
                log_ratio = agent.log_prob(mean, std, move, z, moved, free) - old
                ratio, adv = log_ratio.exp(), adv[:, None]
                kl = (ratio - 1 - log_ratio).sum(-1).mean().item()
                if kl > args.target_kl:
                    break
                clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                policy_loss = -torch.min(adv * ratio, adv * clipped).mean()
                value_loss = nn.functional.smooth_l1_loss(agent.value(whole), goal)
                loss = policy_loss + args.vf_coef * value_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
            if kl > args.target_kl:
                break
        step = (iteration + 1) * size
        kpis = [info["episode_kpis"] for info in infos]
        metrics = {
            "charts/SPS": log.advance(step),
            "charts/episodic_return": b_reward.sum(0).mean().item(),
            "charts/mean_latency_s": float(np.mean([k["mean_latency_s"] for k in kpis])),
            "charts/migrations": float(np.mean([k["migrations"] for k in kpis])),
            "losses/policy_loss": policy_loss.item(),
            "losses/value_loss": value_loss.item(),
            "charts/std": std,
            "charts/move_rate": b_moved[1:].mean().item() if steps > 1 else 0.0,
            "losses/approx_kl": kl,
        }
        if interval_passed(args.eval_every, step - size, step) or iteration + 1 == updates:
            metrics |= check(step)
        log.write(step, metrics)
        if args.save_model:
            save_snapshot(
                run / "state.pt",
                agent=agent.state_dict(),
                optimizer=optimizer.state_dict(),
                random=torch.get_rng_state(),
                best=best,
                iteration=iteration + 1,
                log_bytes=log.size,
            )
    log.close()
    return run


class PlacementPolicy(CheckpointPolicy):
    """A placement agent's policy.

    Attributes:
        start: Where its training started; None for a base by name.
        step: Decisions that it was trained on.
    """

    start: InitialPlacement | None = None
    step: int = 0


def load(meta: Mapping[str, str], weights: Mapping[str, Tensor], system: Any) -> PlacementPolicy:
    """The policy of a checkpoint, see `servegym.agents.lib.checkpoint`.

    On another cluster than that of the training it does not have the start.
    """
    args = saved_args(Args, json_field(meta, "args"))
    system = make_problem(parse_settings(args.set)) if system is None else system
    start = InitialPlacement.from_json(meta["start"]) if "start" in meta else None
    known = start if meta.get("setting") == cluster_fingerprint(system) else None
    features = make_features(system.cluster, args, known)
    net = Agent(features.columns, **json_field(meta, "shape"))
    net.load_state_dict(weights)
    policy = PlacementPolicy(
        "mappo_placement",
        "graph",
        args,
        net,
        lambda obs, _: greedy(net, features, system.cluster, obs),
    )
    policy.start, policy.step = start, int(meta.get("step") or args.total_timesteps)
    policy.env_kwargs = {"action_mode": "placement"}
    return policy


if __name__ == "__main__":
    train(tyro.cli(Args, config=(tyro.conf.FlagConversionOff,)))
