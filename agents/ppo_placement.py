"""Proximal policy optimisation for expert placement: one controller for all servers.

The agent starts from a placement that is found without a network (``--base best``: the search of
the baseline ``best_start``) and learns to change it. For every server and layer the network gives a
height, and the layers of the start change places so that the sum of the heights of what servers
then hold is greatest. Without a search (``--base whole_layer`` or ``none``) the network gives a
height and a slope: the score of an expert is what the base says, plus the height, plus the slope
times the logarithm of the expert's share of the server's tokens, and each server takes its
best-scored experts (``action_mode="expert_score"``). With all outputs zero the agent is its base.
Servers are told apart by their features alone, so that the network is equivariant to their order
and takes any number of them; only a table of corrections belongs to the cluster of the training.

 * A migration costs far more than what a plan gains in an epoch, so that a Bernoulli head decides
   whether to migrate; the first placement of an episode is free and is always carried out.
 * All environments of a group have the same requests (common random numbers), so that subtracting
   the group's mean takes the noise of arrivals out of the advantage, as in GRPO.

``mappo_placement`` differs: every server acts on what it knows itself, the critic alone sees the
whole system, and heights and slopes are the only outputs. ``ppo_serverless`` differs: its actions
are discrete. ``python agents/ppo_placement.py --help`` lists the options.
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
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from servegym.agents.lib.arguments import RunArgs
from servegym.agents.lib.checkpoint import (
    CheckpointPolicy,
    json_field,
    save_best_and_last,
    saved_args,
    write_checkpoint,
)
from servegym.agents.lib.run_log import RunLog, interval_passed
from servegym.agents.lib.snapshots import load_snapshot, save_snapshot
from servegym.baselines.expert_placement.heuristics import whole_layer
from servegym.baselines.expert_placement.initial_placement import (
    InitialPlacement,
    cached_best_start,
    cluster_fingerprint,
)
from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.envs._command_line import parse_settings
from servegym.envs.expert_placement.env import make_problem


@dataclass
class Args(RunArgs):
    """Command line of the agent."""

    env_id: str = "servegym/ExpertPlacement-v0"
    """the environment"""
    set: tuple[str, ...] = ("scenario=edge_hetero",)
    """environment arguments, key=value with a JSON value, as in scenario=drift"""
    base: str = "best"
    """placement that the network changes: best (annealed, then simulated), best_heuristic (the same
    search without annealing), whole_layer or none"""
    width: int = 64
    """hidden units of every layer"""
    total_timesteps: int = 160
    """decisions over all environments"""
    num_envs: int = 32
    """parallel environments"""
    group_size: int = 8
    """environments that share their episodes and differ by the actions alone"""
    epochs: int = 1
    """decisions of a training episode; evaluations have the environment's"""
    learning_rate: float = 3e-3
    """learning rate at first; it falls linearly to zero"""
    update_epochs: int = 4
    """passes over the collected steps"""
    eval_every: int = 160
    """decisions between evaluations on the validation split; the best policy is kept"""
    eval_episodes: int = 4
    """episodes per evaluation"""
    resume: bool = False
    """go on with the run of this name where it was stopped"""


BASES = ("best", "best_heuristic", "whole_layer", "none")
START_TRIES, START_STEPS = 3, 3_000_000
"""Annealed placements of each of three settings in the search for a start; proposals of each."""

# PPO. The discount is one as an episode is a few epochs, and costs now and later weigh alike.
GAMMA, GAE_LAMBDA = 1.0, 0.95
NUM_MINIBATCHES, CLIP_COEF, VF_COEF, MAX_GRAD_NORM = 2, 0.2, 0.5, 0.5
TARGET_KL = 1.0
"""The passes of an update end when the policy has moved so far."""
STD_FIRST, STD_LAST = 0.6, 0.4
"""Standard deviation of the outputs at first and at last, linear in between."""
MIGRATE_BIAS = -4.0
"""Logit of a migration after the first placement, at first."""
TABLE_LEARNING_RATE = 0.03
"""Learning rate, at first, of the corrections to single servers and layers."""

# What the network reads.
MASS_AT = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8, 31 / 32)
"""Shares of a layer's experts, the most frequent first, whose cumulative mass is a feature."""
FREQUENCIES = 8
"""Pairs of sine and cosine that encode the position of a layer."""
SCALARS = ("in_system", "arrivals", "link_backlog_s", "window_s", "progress")

# What the network's outputs do.
BASE_WEIGHT, MIN_BASE_WEIGHT = 0.6, 0.4
"""Score of a base expert in a layer held whole, and the least share of that score elsewhere: whole
layers are hard to break and single experts easily exchanged."""
HEIGHT_SCALE, SLOPE_AT_ZERO, SLOPE_GROWTH = 0.15, 0.05, 0.5
STAY_BONUS = 1.4
"""Height that a layer has to offer to leave its place."""
FREQUENCY_WEIGHT = 0.1
"""Of log frequencies in the score of the experts that fill what the base leaves free."""


class Features:
    """Observations as features by server and layer, and network outputs as plans.

    Args:
        cluster: Servers, links and sizes: N servers, L layers, E experts a layer.
        base: One of `BASES`.
        start: Bool (N, L, E), experts of each server in the placement that the search found.
            Without one, as on a cluster never seen, ``best`` is ``whole_layer``.
        exchange: Whether the network exchanges the layers of the base (one output) or scores
            experts by height and slope (two outputs).

    Raises:
        ValueError: If the base is unknown.
    """

    columns = len(MASS_AT) + 1 + 4 + 1 + 2 * FREQUENCIES + 8

    def __init__(self, cluster: Any, base: str, start: Any = None, *, exchange: bool = False):
        if base not in BASES:
            raise ValueError(f"base is {base!r}; allowed are {', '.join(BASES)}")
        servers, layers, experts = cluster.num_servers, cluster.layers, cluster.experts
        self.shape, self.outputs = (servers, layers, experts), 1 if exchange else 2
        self.gpu_server, self.top_k = cluster.gpu_server, cluster.top_k
        held = np.zeros(self.shape)
        if base.startswith("best") and start is not None:
            held[np.asarray(start) > 0] = 1.0
        elif base != "none":
            layers_dealt = whole_layer(np.ones(self.shape), cluster.slots, cluster.gpu_server)
            held[cluster.server_view(layers_dealt).all(axis=2)] = 1.0
        self.base = held.mean(axis=2)  # (N, L) share of a layer's experts that the base holds
        weight = np.maximum(self.base, MIN_BASE_WEIGHT)[:, :, None]
        self.held = torch.as_tensor(held * weight, dtype=torch.float32)

        # Features that an episode does not change. First the round trips to other servers.
        byte_s = 1.0 / cluster.link_bytes_s
        trip = cluster.latency_s + cluster.latency_s.T + 2 * cluster.message_cost_s
        trip = trip + cluster.activation_bytes * (byte_s + byte_s.T)
        away = ~np.eye(servers, dtype=bool)
        scale = trip[away].mean() if servers > 1 else 1.0
        trip = np.where(away, trip / scale, 0.0)
        # The nearest other server that holds a layer in the base, and how many do.
        there = np.where(self.base[None] * away[:, :, None] > 0.5, trip[:, :, None], np.inf)
        nearest = np.minimum(there.min(axis=1), trip.max(axis=1, keepdims=True))
        others = (self.base.sum(axis=0) - self.base) / max(servers - 1, 1)
        position = np.arange(layers) / layers
        waves = [position]
        for k in range(1, FREQUENCIES + 1):
            waves += [np.sin(2 * np.pi * k * position), np.cos(2 * np.pi * k * position)]
        capacity = cluster.cap / (layers * experts)
        bandwidth = np.log(cluster.nic_bps / cluster.nic_bps.mean())
        of_server = np.stack([capacity, trip.mean(axis=1), bandwidth], axis=-1)
        self.static = np.concatenate(
            [
                np.stack([self.base, nearest, others], axis=-1),
                np.broadcast_to(np.stack(waves, axis=-1), (servers, layers, len(waves))),
                np.broadcast_to(of_server[:, None], (servers, layers, 3)),
            ],
            axis=-1,
        )

    def __call__(self, observation: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Features (B, N, L, columns) and log-shares (B, N, L, E) of a batch of observations.

        Raises:
            ValueError: If the counts are of another cluster or model.
        """
        counts = np.asarray(observation["counts"], dtype=np.float64)
        if counts.shape[1:] != self.shape:
            raise ValueError(f"counts have shape {counts.shape[1:]}, expected {self.shape}")
        batch, (servers, layers, experts) = len(counts), self.shape
        placement = np.asarray(observation["placement"]) > 0  # (B, GPUs, L, E)
        held = np.zeros((batch, *self.shape), dtype=bool)
        for g, n in enumerate(self.gpu_server):
            held[:, n] |= placement[:, g]
        # How a server's tokens fall on the experts of a layer.
        total = counts.sum(axis=3, keepdims=True)
        share = np.where(total > 0, counts / np.maximum(total, 1.0), 1.0 / experts)
        mass = np.cumsum(-np.sort(-share, axis=3), axis=3)
        at = [max(round(part * experts), 1) - 1 for part in MASS_AT]
        entropy = -(share * np.log(np.maximum(share, 1e-12))).sum(axis=3) / np.log(max(experts, 2))
        # The load of the servers, first their tokens a second since the last change.
        in_system, arrivals, backlog_s, window_s, progress = (
            np.asarray(observation[name], dtype=np.float64) for name in SCALARS
        )
        demand = counts.sum(axis=(2, 3)) / (layers * self.top_k) / (window_s + 1.0)
        load = [np.log(demand + 1e-3) / 3 - 1, *map(np.log1p, (in_system, arrivals, backlog_s))]
        load = np.stack([np.broadcast_to(x, (batch, servers)) for x in (*load, progress)], axis=-1)
        parts = [
            mass[..., at],
            entropy[..., None],
            held.mean(axis=3)[..., None],
            np.broadcast_to(self.static, (batch, *self.static.shape)),
            np.broadcast_to(load[:, :, None], (batch, servers, layers, load.shape[-1])),
        ]
        x = np.concatenate(parts, axis=-1).astype(np.float32)
        log_share = 0.5 * np.log(np.clip(share * experts, 1e-2, None)).astype(np.float32)
        return torch.from_numpy(x), torch.from_numpy(log_share)

    def plan(self, outputs: Tensor, log_share: Tensor) -> NDArray[np.float32]:
        """Scores (B, N, L, E) in [0, 1] of the network's outputs (B, N, L, 1 or 2).

        Only the order within a server matters for what the server takes, so scores are ranks.
        """
        if self.outputs == 1:
            score = self.exchanged(outputs[..., 0], log_share) + FREQUENCY_WEIGHT * log_share
        else:
            height, slope = outputs[..., 0], outputs[..., 1].clamp(-8.0, 8.0)
            score = BASE_WEIGHT * self.held + (HEIGHT_SCALE * height)[..., None]
            slope = SLOPE_AT_ZERO * torch.exp(SLOPE_GROWTH * slope)
            score = score + slope[..., None] * log_share
        flat = score.flatten(2)
        rank = flat.argsort(dim=-1, stable=True).argsort(-1)
        return (rank.float() / max(flat.shape[-1] - 1, 1)).view(log_share.shape).numpy()

    def exchanged(self, height: Tensor, log_share: Tensor) -> Tensor:
        """The base (B, N, L, E) with its layers exchanged, in the same way at all servers.

        A height says how much a server gains by holding a layer. Layers are assigned to the places
        of the base, one each, so that the sum of the heights of what is then held, and of
        `STAY_BONUS` for every layer in its own place, is greatest. A place that has the k most used
        experts of its layer has the k most used ones of the new layer. Memory and coverage stay
        what they are in the base.

        Args:
            height: (B, N, L).
            log_share: (B, N, L, E), as `__call__` gives.
        """
        used = np.exp(2.0 * log_share.numpy()).sum(axis=1)
        order = np.argsort(-used, axis=2, kind="stable")  # (B, L, E), most used first
        gain = np.einsum("bnl,nk->blk", height.numpy(), self.base)
        found = np.empty(log_share.shape, dtype=np.float32)
        held = (self.held > 0).numpy()
        for b in range(len(found)):
            _, place = linear_sum_assignment(-gain[b] - STAY_BONUS * np.eye(len(gain[b])))
            for level, at in enumerate(place):
                if at == level:
                    found[b, :, level] = held[:, level]
                else:
                    found[b][:, level, order[b, level]] = held[:, at, order[b, at]]
        return torch.from_numpy(found)


def is_first(observation: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Whether an observation is the first of its episode, (B,): its placement is free."""
    return np.asarray(observation["progress"])[:, 0] <= 0.0


def layer(inputs: int, outputs: int, std: float = 2**0.5) -> nn.Linear:
    """A linear layer with orthogonal weights and no bias at first."""
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, std)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    """Means of the outputs for servers and layers, logit of a migration, and value.

    Every server and layer is encoded alone, then again with the means over its server, over its
    layer and over all. Servers change places with their outputs, but for ``table``.

    Args:
        columns: Features of a server and layer.
        width: Hidden units of every layer.
        outputs: One or two, see `Features`.
        table: Shape (N, L, outputs) of the learnt corrections to single servers and layers of the
            training cluster; empty for none.
    """

    def __init__(
        self, columns: int, width: int, outputs: int = 2, table: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        self.columns = columns
        self.shape = {"width": width, "outputs": outputs, "table": table}
        self.table = nn.Parameter(torch.zeros(table)) if table else None
        self.encode = nn.Sequential(
            layer(columns, width), nn.Tanh(), layer(width, width), nn.Tanh()
        )
        self.mix = nn.Sequential(layer(4 * width, width), nn.Tanh())
        self.mean = layer(width, outputs, 0.01)
        self.move = layer(width, 1, 0.01)
        nn.init.constant_(self.move.bias, MIGRATE_BIAS)
        self.critic_encode = nn.Sequential(layer(columns, width), nn.Tanh())
        self.critic = nn.Sequential(layer(width, width), nn.Tanh(), layer(width, 1, 1.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Means (B, N, L, outputs), logits of a migration (B,) and values (B,).

        Args:
            x: Features (B, N, L, columns).
        """
        h = self.encode(x)
        of_server, of_layer = h.mean(2, keepdim=True), h.mean(1, keepdim=True)
        means = (of_server, of_layer, of_server.mean(1, keepdim=True))
        h = self.mix(torch.cat([h, *(part.expand_as(h) for part in means)], -1))
        migrate = self.move(h.mean((1, 2))).squeeze(-1)
        value = self.critic(self.critic_encode(x).mean((1, 2))).squeeze(-1)
        mean = self.mean(h) if self.table is None else self.mean(h) + self.table
        return mean, migrate, value


def log_prob(
    mean: Tensor, std: float, logit: Tensor, outputs: Tensor, migrate: Tensor, first: Tensor
) -> Tensor:
    """Log-probability (B,): to migrate unless that is free, and of a plan that is carried out.

    A plan that is not carried out has no effect, so it has no part in the gradient. ``mean`` and
    the drawn ``outputs`` are (B, N, L, outputs); the ``logit`` of a migration, ``migrate`` (1: the
    plan is carried out) and ``first`` (1: the first placement of an episode) are (B,).
    """
    plan = torch.distributions.Normal(mean, std).log_prob(outputs).sum((1, 2, 3))
    choice = -nn.functional.binary_cross_entropy_with_logits(logit, migrate, reduction="none")
    return torch.where(first > 0, 0.0, choice) + migrate * plan


def group_advantage(advantage: Tensor, group_size: int) -> Tensor:
    """Advantages (T, B) less the mean of their group, over a robust spread and limited to 3.

    An expert moved at the wrong time can cost a hundred times what plans differ by; without the
    limit such an episode alone would decide the update.
    """
    steps = len(advantage)
    grouped = advantage.view(steps, -1, group_size)
    centred = (grouped - grouped.median(-1, keepdim=True).values).reshape(steps, -1)
    spread = centred.abs().median().clamp_min(1e-8) * 1.5
    limited = (centred / spread).clamp(-3.0, 3.0).view(steps, -1, group_size)
    return (limited - limited.mean(-1, keepdim=True)).reshape(steps, -1)


def make_envs(args: Args, num_envs: int, **overrides: Any) -> Any:
    """The native vector environment with actions of scores; whole episodes are run."""
    kwargs: dict[str, Any] = parse_settings(args.set) | {"action_mode": "expert_score"} | overrides
    return gym.make_vec(
        args.env_id,
        num_envs=num_envs,
        vectorization_mode="vector_entry_point",
        autoreset_mode=gym.vector.AutoresetMode.DISABLED,
        **kwargs,
    )


def greedy(agent: Agent, features: Features, observation: Mapping[str, Any]) -> dict[str, Any]:
    """The likeliest action of every row."""
    x, log_share = features(observation)
    with torch.no_grad():
        mean, logit, _ = agent(x)
    migrate = is_first(observation) | (logit.numpy() > 0)
    return {"migrate": migrate.astype(np.int64), "plan": features.plan(mean, log_share)}


def evaluate(agent: Agent, features: Features, args: Args) -> dict[str, float]:
    """Mean latency (seconds) and migrations of the greedy policy on validation episodes."""
    envs = make_envs(args, args.eval_episodes, split="val")
    observation, _ = envs.reset(seed=10_000)
    ended = np.zeros(1, bool)
    info: dict[str, Any] = {}
    while not ended.any():
        observation, _, ended, _, info = envs.step(greedy(agent, features, observation))
    envs.close()
    kpis = info["episode_kpis"]
    return {
        "eval/mean_latency_s": float(np.mean(kpis["mean_latency_s"])),
        "eval/migrations": float(np.mean(kpis["migrations"])),
    }


def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors).

    Raises:
        ValueError: If an argument is out of range.
    """
    for name, low in (("group_size", 2), ("epochs", 1), ("eval_episodes", 1)):
        if getattr(args, name) < low:
            raise ValueError(f"{name} is {getattr(args, name)}; allowed is {low} or more")
    if args.num_envs < 1 or args.num_envs % args.group_size:
        raise ValueError(f"num_envs is {args.num_envs}; allowed are multiples of group_size")
    if args.base not in BASES:
        raise ValueError(f"base is {args.base!r}; allowed are {', '.join(BASES)}")
    settings = parse_settings(args.set)
    if "free_start" in settings:
        raise ValueError("set: free_start must stay True, the first placement is always made")
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    envs = make_envs(args, args.num_envs, epochs=args.epochs)
    run = Path(args.out_dir) / (args.run_name or f"ppo_placement_{args.seed}")
    run.mkdir(parents=True, exist_ok=True)

    # The start: a search that knows the prompts of the training split only.
    problem, start = make_problem(settings), None
    if args.base.startswith("best"):
        tries = START_TRIES if args.base == "best" else 0
        system = PlacementSystem.from_problem(problem, own=True)
        start = cached_best_start(
            run / "start.json", system, tries=tries, steps=START_STEPS, seed=args.seed
        )
    features = Features(problem.cluster, args.base, start and start.held, exchange=bool(start))
    servers, layers, _ = features.shape
    table = (servers, layers, features.outputs) if start else ()
    agent = Agent(features.columns, args.width, features.outputs, table)
    shared = [p for name, p in agent.named_parameters() if name != "table"]
    optimizer = torch.optim.Adam(
        [
            {"params": shared, "initial_lr": args.learning_rate},
            {"params": [agent.table] if start else [], "initial_lr": TABLE_LEARNING_RATE},
        ],
        eps=1e-5,
    )
    steps, n = args.epochs, args.num_envs
    batch_size = steps * n
    num_updates = max(args.total_timesteps // batch_size, 1)
    first_update, best_score, log_size = 0, -np.inf, 0
    state = load_snapshot(args.resume, run / "state.pt")
    if state is not None:
        agent.load_state_dict(state["agent"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        first_update, best_score = state["update"], state["best_score"]
        log_size = state["log_size"]
    log = RunLog(run, args, "ppo_placement", first_update * batch_size, log_size)
    meta = {
        "agent": "ppo_placement",
        "args": json.dumps(asdict(args)),
        "shape": json.dumps(agent.shape),
        "setting": cluster_fingerprint(problem),
    }
    if start is not None:
        meta["start"] = start.to_json()
    if first_update == 0:
        result = evaluate(agent, features, args)
        log.write(0, result)
        latency = result["eval/mean_latency_s"]
        log.bar.console.print(f"step 0: validation latency {latency:.3f} s")
        save = partial(write_checkpoint, agent, meta | {"step": "0"})
        best_score = save_best_and_last(save, args, run, -latency, best_score)

    # Buffers.
    obs = torch.zeros(steps, n, servers, layers, features.columns)
    outputs = torch.zeros(steps, n, servers, layers, features.outputs)
    migrate, first, logprobs, rewards, values = (torch.zeros(steps, n) for _ in range(5))

    for update in range(first_update, num_updates):
        frac = update / num_updates
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (1 - frac)
        std = STD_FIRST + frac * (STD_LAST - STD_FIRST)

        # Collect whole episodes. The seeds of an update follow from its number alone, so that a
        # resumed run needs no state of the environments.
        rng = np.random.default_rng([args.seed, update])
        seeds = np.repeat(rng.integers(1 << 30, size=n // args.group_size), args.group_size)
        observation, info = envs.reset(seed=seeds.tolist())
        with torch.no_grad():
            for t in range(steps):
                obs[t], log_share = features(observation)
                mean, logit, values[t] = agent(obs[t])
                outputs[t] = mean + std * torch.randn_like(mean)
                first[t] = torch.as_tensor(is_first(observation), dtype=torch.float32)
                migrate[t] = torch.maximum(first[t], torch.bernoulli(logit.sigmoid()))
                logprobs[t] = log_prob(mean, std, logit, outputs[t], migrate[t], first[t])
                plan = features.plan(outputs[t], log_share)
                action = {"migrate": migrate[t].long().numpy(), "plan": plan}
                observation, reward, _, _, info = envs.step(action)
                rewards[t] = torch.as_tensor(reward)

            # Generalised advantage estimate; nothing comes after the last decision.
            advantages, last_advantage, next_value = torch.zeros(steps, n), torch.zeros(n), 0.0
            for t in reversed(range(steps)):
                delta = rewards[t] + GAMMA * next_value - values[t]
                last_advantage = delta + GAMMA * GAE_LAMBDA * last_advantage
                advantages[t], next_value = last_advantage, values[t]
            returns = advantages + values
            advantages = group_advantage(advantages, args.group_size)

        # Update the policy and the value network.
        buffers = (obs, outputs, migrate, first, logprobs, advantages, returns)
        batch = [x.reshape(batch_size, *x.shape[2:]) for x in buffers]
        for _ in range(args.update_epochs):
            for index in torch.randperm(batch_size).chunk(NUM_MINIBATCHES):
                b_obs, b_outputs, b_migrate, b_first, b_logprobs, b_advantages, b_returns = (
                    x[index] for x in batch
                )
                mean, logit, value = agent(b_obs)
                logratio = log_prob(mean, std, logit, b_outputs, b_migrate, b_first) - b_logprobs
                ratio = logratio.exp()
                approx_kl = (ratio - 1 - logratio).mean().item()
                if approx_kl > TARGET_KL:
                    break
                clipped = ratio.clamp(1 - CLIP_COEF, 1 + CLIP_COEF)
                policy_loss = -torch.min(b_advantages * ratio, b_advantages * clipped).mean()
                value_loss = nn.functional.smooth_l1_loss(value, b_returns)
                loss = policy_loss + VF_COEF * value_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
                optimizer.step()
            if approx_kl > TARGET_KL:
                break

        step = (update + 1) * batch_size
        kpis = info["episode_kpis"]
        metrics = {
            "charts/SPS": log.advance(step),
            "charts/episodic_return": rewards.sum(0).mean().item(),
            "charts/mean_latency_s": float(np.mean(kpis["mean_latency_s"])),
            "charts/migrations": float(np.mean(kpis["migrations"])),
            "losses/policy_loss": policy_loss.item(),
            "losses/value_loss": value_loss.item(),
            "charts/std": std,
            "charts/move_rate": migrate[1:].mean().item() if steps > 1 else 0.0,
            "losses/approx_kl": approx_kl,
        }
        if interval_passed(args.eval_every, step - batch_size, step) or update + 1 == num_updates:
            result = evaluate(agent, features, args)
            metrics |= result
            latency = result["eval/mean_latency_s"]
            log.bar.console.print(f"step {step}: validation latency {latency:.3f} s")
            save = partial(write_checkpoint, agent, meta | {"step": str(step)})
            best_score = save_best_and_last(save, args, run, -latency, best_score)
        log.write(step, metrics)
        save_snapshot(
            run / "state.pt",
            agent=agent.state_dict(),
            optimizer=optimizer.state_dict(),
            rng=torch.get_rng_state(),
            update=update + 1,
            best_score=best_score,
            log_size=log.size,
        )
    log.close()
    envs.close()
    return run


class PlacementPolicy(CheckpointPolicy):
    """The greedy policy of a checkpoint."""

    start: InitialPlacement | None = None
    """Placement that the search of the training found; None for other bases."""
    step: int = 0
    """Decisions that the policy was trained on."""


def load(meta: Mapping[str, str], weights: Mapping[str, Tensor], system: Any) -> PlacementPolicy:
    """The policy of a checkpoint, see `servegym.agents.lib.checkpoint`.

    On another cluster than that of the training the policy has neither the start nor the table.
    """
    given = json_field(meta, "args")
    if "members" in given:  # the flags of earlier versions
        given |= {"num_envs": given["groups"] * given["members"], "group_size": given["members"]}
    args = saved_args(Args, given)
    system = make_problem(parse_settings(args.set)) if system is None else system
    start = InitialPlacement.from_json(meta["start"]) if "start" in meta else None
    known = start is not None and meta.get("setting") == cluster_fingerprint(system)
    shape = json_field(meta, "shape")
    held, exchange = start.held if start and known else None, shape.get("outputs") == 1
    features = Features(system.cluster, args.base, held, exchange=exchange)
    net = Agent(features.columns, **shape)
    net.load_state_dict(weights)
    if not known:
        net.table = None
    policy = PlacementPolicy(
        "ppo_placement", "graph", args, net, lambda obs, _: greedy(net, features, obs)
    )
    policy.start, policy.step = start, int(meta.get("step") or args.total_timesteps)
    policy.env_kwargs = {"action_mode": "expert_score"}
    return policy


if __name__ == "__main__":
    train(tyro.cli(Args, config=(tyro.conf.FlagConversionOff,)))
