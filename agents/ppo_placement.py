"""Proximal policy optimisation for expert placement: one scoring network for all experts.

The agent first looks for a placement to start from, by an estimate of latency and its own
simulation (``--base best``, the baseline ``best_start``). A network then changes it: for every
server and layer it gives two numbers, a height and a slope. The score of an expert is what the
start says, plus the height, plus the slope times the logarithm of its share of the server's tokens,
and each server takes its best-scored experts (``action_mode="expert_score"``). The network sees
servers and layers only through their features, so that servers may be exchanged and their number
may change.
With all outputs zero the agent is its start. ``--base whole_layer`` and ``none`` leave out the
search: the former starts from the layers that the baseline of this name gives to a server.

A migration costs far more than what a plan can gain in an epoch, so a head decides whether to move;
the first placement of an episode, which is free, is always carried out. All members of a group of
episodes have the same requests (common random numbers), so that the group's mean takes the noise
of arrivals out of the advantage. ``python agents/ppo_placement.py --help`` lists the options.
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
from servegym.agents.placement_features import Features, group_advantage, is_first
from servegym.baselines.expert_placement.initial_placement import (
    InitialPlacement,
    cached_best_start,
    cluster_fingerprint,
)
from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.envs.expert_placement.env import make_problem


@dataclass
class Args(RunArgs):
    """Command line of the agent."""

    env_id: str = "servegym/ExpertPlacement-v0"
    """the environment"""
    set: tuple[str, ...] = ("scenario=edge_hetero",)
    """environment arguments, key=value with a JSON value, as in scenario=drift"""
    base: str = "best"
    """where the scores start: best (found by simulation), whole_layer or none"""
    exchange: bool = True
    """with the base best, heights exchange whole layers; else they and the slopes move experts"""
    start_tries: int = 3
    """placements annealed for each of three settings, from which the best start is taken"""
    start_steps: int = 3_000_000
    """proposals of each annealing"""
    width: int = 64
    """hidden units of every layer"""
    total_timesteps: int = 160
    """decisions over all environments"""
    groups: int = 4
    """different episodes per update"""
    members: int = 8
    """copies of each episode, with the same requests"""
    epochs: int = 1
    """decisions of a training episode; evaluations have the environment's"""
    learning_rate: float = 3e-3
    """learning rate at first; it falls linearly to zero"""
    table_rate: float = 0.03
    """the same of what is learnt of single servers and layers, with the base best"""
    gamma: float = 1.0
    """discount per epoch"""
    gae_lambda: float = 0.95
    """lambda of the generalised advantage estimate"""
    num_minibatches: int = 2
    """minibatches per pass"""
    update_epochs: int = 4
    """passes over the collected steps"""
    clip_coef: float = 0.2
    """clipping of the probability ratio"""
    target_kl: float = 1.0
    """the passes of an update end when the policy has moved so far"""
    std: tuple[float, float] = (0.6, 0.4)
    """standard deviation of heights and slopes at first and at last, linear in between"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """gradients are clipped to this norm"""
    move_bias: float = -4.0
    """logit of a migration after the first, at first"""
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
    """Heights and slopes of servers and layers, the chance to move, and the value.

    Every server and layer is encoded alone, then again beside the means over its server, over its
    layer and over all; servers change places with their outputs, but for what a ``table`` (N, L,
    outputs) adds on the cluster of the training.
    """

    def __init__(
        self,
        columns: int,
        width: int,
        outputs: int = 2,
        move_bias: float = -4.0,
        table: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.columns = columns
        self.shape = {"width": width, "outputs": outputs, "table": table}
        # What training found of single servers and layers of its own cluster.
        self.table = nn.Parameter(torch.zeros(table)) if table else None
        self.encode = nn.Sequential(
            layer(columns, width), nn.Tanh(), layer(width, width), nn.Tanh()
        )
        self.mix = nn.Sequential(layer(4 * width, width), nn.Tanh())
        self.mean = layer(width, outputs, 0.01)
        self.move = layer(width, 1, 0.01)
        nn.init.constant_(self.move.bias, move_bias)
        self.critic_encode = nn.Sequential(layer(columns, width), nn.Tanh())
        self.critic = nn.Sequential(layer(width, width), nn.Tanh(), layer(width, 1, 1.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Means (B, N, L, outputs), logits of a move and values (B,) of features (B, N, L, F)."""
        h = self.encode(x)
        server, level = h.mean(2, keepdim=True), h.mean(1, keepdim=True)
        whole = server.mean(1, keepdim=True)
        h = self.mix(torch.cat([h, *(part.expand_as(h) for part in (server, level, whole))], -1))
        move = self.move(h.mean((1, 2))).squeeze(-1)
        value = self.critic(self.critic_encode(x).mean((1, 2))).squeeze(-1)
        mean = self.mean(h) if self.table is None else self.mean(h) + self.table
        return mean, move, value

    def log_prob(
        self, mean: Tensor, std: float, move: Tensor, z: Tensor, moved: Tensor, free: Tensor
    ) -> Tensor:
        """Log-probability (B,): of the choice to move unless it is free, and of the plan if moved.

        A plan that is not carried out has no effect, so it has no part in the gradient.
        """
        plan = torch.distributions.Normal(mean, std).log_prob(z).sum((1, 2, 3))
        choice = -nn.functional.binary_cross_entropy_with_logits(move, moved, reduction="none")
        return torch.where(free > 0, 0.0, choice) + moved * plan


def make_features(cluster: Any, args: Args, start: InitialPlacement | None) -> Features:
    """What the network reads and what its outputs do to the start."""
    held = None if start is None else start.held
    return Features(cluster, args.base, held, exchange=args.exchange and args.base == "best")


def make_envs(args: Args, num_envs: int, **overrides: Any) -> Any:
    """The native vector environment in the mode of scores; whole episodes are run."""
    kwargs: dict[str, Any] = parse_settings(args.set) | {"action_mode": "expert_score"} | overrides
    return gym.make_vec(
        args.env_id,
        num_envs=num_envs,
        vectorization_mode="vector_entry_point",
        autoreset_mode=gym.vector.AutoresetMode.DISABLED,
        **kwargs,
    )


def greedy(
    agent: Agent, features: Features, observation: Mapping[str, Any]
) -> dict[str, NDArray[Any]]:
    """The likeliest action of every row."""
    x, log_share = features(observation)
    with torch.no_grad():
        mean, move, _ = agent(x)
    migrate = is_first(observation) | (move.numpy() > 0)
    return {"migrate": migrate.astype(np.int64), "plan": features.plan(mean, log_share)}


def evaluate(agent: Agent, features: Features, args: Args) -> tuple[float, float]:
    """Mean latency in seconds and migrations of the greedy policy on validation episodes."""
    envs = make_envs(args, args.eval_episodes, split="val")
    obs, _ = envs.reset(seed=10_000)
    ended = np.zeros(1, bool)
    info: dict[str, Any] = {}
    while not ended.any():
        obs, _, ended, _, info = envs.step(greedy(agent, features, obs))
    envs.close()
    kpis = info["episode_kpis"]
    return float(np.mean(kpis["mean_latency_s"])), float(np.mean(kpis["migrations"]))


def save_policy(
    agent: Agent, args: Args, path: Path, step: int, start: InitialPlacement | None
) -> None:
    """Weights, arguments, shape, start and the decisions trained so far in one safetensors file."""
    meta = {
        "args": json.dumps(asdict(args)),
        "shape": json.dumps(agent.shape),
    }
    if start is not None:
        meta["start"] = start.to_json()
    meta["setting"] = cluster_fingerprint(make_problem(parse_settings(args.set)))
    write_checkpoint(agent, meta | {"agent": "ppo_placement", "step": str(step)}, path)


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
    envs = make_envs(args, n, epochs=steps)
    run = Path(args.out_dir) / (args.run_name or f"ppo_placement_{args.seed}")
    run.mkdir(parents=True, exist_ok=True)
    start = None
    if args.base == "best":
        # The search knows the prompts of the training split only.
        system = PlacementSystem.from_problem(make_problem(parse_settings(args.set)), own=True)
        tries, proposals = args.start_tries, args.start_steps
        start = cached_best_start(
            run / "start.json", system, tries=tries, steps=proposals, seed=args.seed
        )
    features = make_features(envs.unwrapped.problem.cluster, args, start)
    table = (*features.shape[:2], features.outputs) if start else ()
    agent = Agent(features.columns, args.width, features.outputs, args.move_bias, table)
    shared = [p for name, p in agent.named_parameters() if name != "table"]
    parts = [(shared, args.learning_rate), ([agent.table] if start else [], args.table_rate)]
    groups = [{"params": part, "lr": rate, "first": rate} for part, rate in parts]
    optimizer = torch.optim.Adam(groups, eps=1e-5)
    size = steps * n
    updates = max(args.total_timesteps // size, 1)
    best, first, log_size = np.inf, 0, 0
    state = load_snapshot(args.resume, run / "state.pt")
    if state is not None:
        agent.load_state_dict(state["agent"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        best, first, log_size = state["best"], state["iteration"], state["log_bytes"]
    log = RunLog(run, args, "ppo_placement", first * size, log_size)

    servers, layers, _ = features.shape
    b_x = torch.zeros(steps, n, servers, layers, features.columns)
    b_z = torch.zeros(steps, n, servers, layers, features.outputs)
    b_moved, b_free, b_logp, b_reward, b_value = (torch.zeros(steps, n) for _ in range(5))

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
        for group in optimizer.param_groups:
            group["lr"] = group["first"] * (1 - gone)
        std = args.std[0] + gone * (args.std[1] - args.std[0])
        # The seeds of an update follow from its number alone: a stopped run needs no environment.
        draw = np.random.default_rng([args.seed, iteration]).integers(1 << 30, size=args.groups)
        obs, info = envs.reset(seed=np.repeat(draw, args.members).tolist())
        with torch.no_grad():
            for t in range(steps):
                b_x[t], log_share = features(obs)
                mean, move, b_value[t] = agent(b_x[t])
                b_z[t] = mean + std * torch.randn_like(mean)
                b_free[t] = torch.as_tensor(is_first(obs), dtype=torch.float32)
                b_moved[t] = torch.maximum(b_free[t], torch.bernoulli(move.sigmoid()))
                b_logp[t] = agent.log_prob(mean, std, move, b_z[t], b_moved[t], b_free[t])
                action = {
                    "migrate": b_moved[t].long().numpy(),
                    "plan": features.plan(b_z[t], log_share),
                }
                obs, reward, _, _, info = envs.step(action)
                b_reward[t] = torch.as_tensor(reward)
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
            for x in (b_x, b_z, b_moved, b_free, b_logp, advantage, goals)
        ]
        for _ in range(args.update_epochs):
            for index in torch.randperm(size).chunk(args.num_minibatches):
                x, z, moved, free, old, adv, goal = (f[index] for f in flat)
                mean, move, value = agent(x)
                log_ratio = agent.log_prob(mean, std, move, z, moved, free) - old
                ratio = log_ratio.exp()
                kl = (ratio - 1 - log_ratio).mean().item()
                if kl > args.target_kl:
                    break
                clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                policy_loss = -torch.min(adv * ratio, adv * clipped).mean()
                value_loss = nn.functional.smooth_l1_loss(value, goal)
                loss = policy_loss + args.vf_coef * value_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
            if kl > args.target_kl:
                break
        step = (iteration + 1) * size
        kpis = info["episode_kpis"]
        metrics = {
            "charts/SPS": log.advance(step),
            "charts/episodic_return": b_reward.sum(0).mean().item(),
            "charts/mean_latency_s": float(np.mean(kpis["mean_latency_s"])),
            "charts/migrations": float(np.mean(kpis["migrations"])),
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
    envs.close()
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

    On another cluster than that of the training it has neither the start nor the table.
    """
    args = saved_args(Args, json_field(meta, "args"))
    system = make_problem(parse_settings(args.set)) if system is None else system
    start = InitialPlacement.from_json(meta["start"]) if "start" in meta else None
    known = start if meta.get("setting") == cluster_fingerprint(system) else None
    features = make_features(system.cluster, args, known)
    net = Agent(features.columns, **json_field(meta, "shape"))
    net.load_state_dict(weights)
    if known is None:
        net.table = None
    policy = PlacementPolicy(
        "ppo_placement", "graph", args, net, lambda obs, _: greedy(net, features, obs)
    )
    policy.start, policy.step = start, int(meta.get("step") or args.total_timesteps)
    policy.env_kwargs = {"action_mode": "expert_score"}
    return policy


if __name__ == "__main__":
    train(tyro.cli(Args, config=(tyro.conf.FlagConversionOff,)))
