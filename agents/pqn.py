"""Parallelised Q-learning over the graph: a value-based router without replay or target network.

PQN (Gallici et al., "Simplifying Deep Temporal Difference Learning", ICLR 2025) in the manner of
CleanRL's ``pqn.py``: many environments at once, lambda returns of the greedy policy, and layer
normalisation to keep the bootstrapping stable. The value of action a is::

    Q(s, a) = V(s, what is to come) + A(s, a) + prior(s, a)

V alone sees the arrivals to come (`Foresight`; it cannot change which action is best), and `prior`
is what the heuristic `priced_greedy` thinks of the action (``--prior False``: start from nothing).
``python agents/pqn.py --help`` lists the options.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from numpy.typing import NDArray
from torch import Tensor, nn

from servegym.agents.han import HAN, WIDTH, Layout, Sets, held_score, prior, scale_laws
from servegym.agents.lib.run import (
    Foresight,
    RouterArgs,
    RunLog,
    crossed,
    episode_seeds,
    follow,
    has_snapshot,
    keep,
    make_envs,
    snapshot,
    validate,
    write_checkpoint,
)
from servegym.baselines.llm_routing.latency import LatencyModel
from servegym.baselines.llm_routing.system import RoutingSystem


@dataclass
class Args(RouterArgs):
    """Command line of the agent."""

    encoder: Literal["han", "sets"] = "sets"
    """the graph attention network, or a small network over every expert and its queue's sums"""
    law: bool = True
    """put each expert's profiled estimator (Eq. 13/14) on its node"""
    prior: bool = True
    """start at the heuristic priced_greedy"""
    foresight: bool = True
    """let the state's value, in training, see the arrivals to come: see `Foresight`"""
    total_timesteps: int = 1_000_000
    """environment steps (decisions) over all environments"""
    num_envs: int = 128
    """parallel environments"""
    num_steps: int = 32
    """steps of each environment between updates"""
    learning_rate: float = 1e-3
    """learning rate, falling linearly to zero with anneal_lr"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to zero"""
    gamma: float = 0.99
    """discount per decision"""
    q_lambda: float = 0.9
    """lambda of the returns"""
    holding_cost: bool = True
    """paid_forward only: charge (1 - gamma) x predicted score in flight, see `held_score`"""
    start_e: float = 0.2
    """share of random legal actions at first"""
    end_e: float = 0.02
    """share of random legal actions in the end"""
    exploration_fraction: float = 0.5
    """share of the training over which it falls from the one to the other"""
    num_minibatches: int = 4
    """minibatches per epoch"""
    update_epochs: int = 2
    """passes over the collected steps"""
    average: float = 0.05
    """step of the averaged network, which is evaluated and saved, after each round of updates"""
    max_grad_norm: float = 10.0
    """gradients are clipped to this norm"""
    eval_every: int = 100_000
    """steps between evaluations on the validation split; the best policy is kept"""


def layers(*widths: int) -> nn.Sequential:
    """Linear layers, all but the last followed by layer normalisation and ReLU."""
    parts: list[nn.Module] = []
    for one, two in zip(widths[:-2], widths[1:-1], strict=True):
        parts += [nn.Linear(one, two), nn.LayerNorm(two), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(widths[-2], widths[-1]))


class Agent(nn.Module):
    """Encoder, and the values of the state and of each action in it."""

    graph = True

    def __init__(self, layout: Layout, args: Args, system: RoutingSystem) -> None:
        super().__init__()
        self.layout, self.start, self.foresight = layout, args.prior, args.foresight
        law = torch.as_tensor(scale_laws(system.estimator)) if args.law else None
        self.register_buffer("law", law)
        self.model = LatencyModel(system)
        width = 0 if law is None else law.shape[1]
        self.encoder: nn.Module = (HAN if args.encoder == "han" else Sets)(layout, width)
        self.norm = nn.LayerNorm(WIDTH)
        self.drop, self.send = layers(2 * WIDTH, WIDTH, 1), layers(2 * WIDTH, WIDTH, 1)
        self.value = layers(2 * WIDTH + Foresight.WIDTH * args.foresight, WIDTH, WIDTH, 1)
        for head in (self.drop, self.send):  # no action better than another at first
            for weight in head[-1].parameters():
                nn.init.zeros_(weight)

    def rows(self, obs: Mapping[str, NDArray[Any]]) -> NDArray[np.float16]:
        """Flat rows of a batch of observations."""
        return self.layout.rows(obs, self.model)

    def forward(
        self, rows: Tensor, mask: Tensor, inputs: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Values of the actions over the state's, (B, N + 1), and the state's, (B,).

        Illegal actions get a large negative value. Without the `inputs` (B, Foresight.WIDTH) that
        a network with foresight needs, the states' values are 0.
        """
        request, experts = (self.norm(h) for h in self.encoder(rows, self.law))
        known = torch.cat([request, experts.mean(1)], -1)
        each = torch.cat([request[:, None].expand_as(experts), experts], -1)
        gain = torch.cat([self.drop(known), self.send(each).squeeze(-1)], -1)
        if self.start:  # a drop is worth 0
            gain = gain + F.pad(prior(self.layout.expert(rows), self.layout.running), (1, 0))
        gain = gain.masked_fill(mask == 0, -1e4)
        if self.foresight:
            if inputs is None:
                return gain, gain.new_zeros(len(rows))
            known = torch.cat([known, inputs], -1)
        return gain, self.value(known).squeeze(-1)

    @torch.no_grad()
    def act(self, obs: Mapping[str, NDArray[Any]], mask: NDArray[Any]) -> NDArray[np.int64]:
        """The best legal action of every observation."""
        device = next(self.parameters()).device
        rows = torch.as_tensor(self.rows(obs), device=device).float()
        return self(rows, torch.as_tensor(mask, device=device))[0].argmax(-1).cpu().numpy()


def save_policy(agent: Agent, args: Args, path: Path) -> None:
    """Weights, arguments and layout in one safetensors file."""
    meta = {"args": json.dumps(asdict(args)), "layout": json.dumps(asdict(agent.layout))}
    write_checkpoint(agent, meta | {"agent": "pqn"}, path)


def lambda_returns(
    reward: Tensor, done: Tensor, following: Tensor, gamma: float, lam: float
) -> Tensor:
    """Returns (T, E) that mix, by lambda, what follows with the best value seen there.

    Args:
        reward: Rewards (T, E).
        done: 1 where the step ended the episode.
        following: Value of the best action after each step, 0 where it terminated.
        gamma: Discount.
        lam: 0: one step and then the value; 1: the rewards up to the end of the batch.
    """
    out, after = torch.zeros_like(reward), following[-1]
    for t in reversed(range(len(reward))):
        mixed = torch.lerp(following[t], after, lam * (1 - done[t]))
        after = out[t] = reward[t] + gamma * mixed
    return out


def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors)."""
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    run = Path(args.out_dir) / (args.run_name or f"pqn_{args.encoder}_{args.seed}")
    run.mkdir(parents=True, exist_ok=True)
    envs, n = make_envs(args, args.num_envs), args.num_envs
    layout = Layout.of(envs, impact=True)
    for name in ("start_e", "end_e", "q_lambda"):
        if not 0 <= getattr(args, name) <= 1:
            raise ValueError(f"{name}: must be in [0, 1], got {getattr(args, name)}")
    system = RoutingSystem.from_env(envs)
    agent, actions = Agent(layout, args, system).to(device), layout.experts + 1
    averaged = deepcopy(agent).requires_grad_(False)
    optimizer = torch.optim.RAdam(agent.parameters(), lr=args.learning_rate)

    obs, info = envs.reset(seed=episode_seeds(args.seed, args.num_envs))
    s: dict[str, Any] = {  # everything else that a resumed run needs
        "step": 0,
        "best": -np.inf,
        "center": 0.0,
        "log_size": 0,
        "obs": obs,
        "qos": [],
        "mask": info["action_mask"],
        "shares": np.zeros(actions),
    }
    if has_snapshot(args.resume, run / "snapshot.pt"):
        saved = torch.load(run / "snapshot.pt", weights_only=False)
        agent.load_state_dict(saved["agent"])
        averaged.load_state_dict(saved["averaged"])
        optimizer.load_state_dict(saved["optimizer"])
        s, envs = saved["state"], pickle.loads(saved["envs"])
        torch.set_rng_state(saved["torch_rng"])
        rng.bit_generator.state = saved["rng"]
    log = RunLog(run, args, "pqn", s["step"], s["log_size"])
    foresight = Foresight(envs) if args.foresight else None
    shape, size = (args.num_steps, n), args.num_steps * n
    b_rows = torch.zeros((*shape, sum(layout.sizes)), dtype=torch.float16)
    b_inputs = torch.zeros((*shape, Foresight.WIDTH if args.foresight else 0), device=device)
    b_mask = torch.zeros((*shape, actions), dtype=torch.int8, device=device)
    b_action = torch.zeros(shape, dtype=torch.long, device=device)
    b_reward, b_best, b_done = (torch.zeros(shape, device=device) for _ in range(3))
    while s["step"] < args.total_timesteps:
        done_share = s["step"] / args.total_timesteps
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - done_share)
        fallen = min(done_share / max(args.exploration_fraction, 1e-9), 1.0)
        epsilon = args.start_e + (args.end_e - args.start_e) * fallen
        with torch.no_grad():
            for t in range(args.num_steps + 1):
                rows = torch.as_tensor(agent.rows(s["obs"]))
                mask = torch.as_tensor(s["mask"], device=device)
                inputs = b_inputs[0, :, :0]
                if foresight is not None:
                    inputs = torch.as_tensor(foresight(), device=device)
                gain, value = agent(rows.to(device).float(), mask, inputs)
                if t:
                    b_best[t - 1] += (1 - b_done[t - 1]) * (value + gain.max(-1).values)
                if t == args.num_steps:
                    break
                chance = np.where(s["mask"] > 0, rng.random((n, actions)), -1.0)
                explore = rng.random(n) < epsilon
                action = np.where(explore, chance.argmax(-1), gain.argmax(-1).cpu().numpy())
                b_rows[t], b_mask[t], b_inputs[t] = rows, mask, inputs
                b_action[t] = torch.as_tensor(action)
                s["shares"] += np.bincount(action, minlength=actions)
                s["obs"], reward, terminated, truncated, info = envs.step(action)
                done = terminated | truncated
                s["mask"] = info["action_mask"]
                b_best[t] = 0.0  # what follows the step: nothing after a termination
                if args.holding_cost and args.reward == "paid_forward":
                    cost = (1 - args.gamma) * held_score(s["obs"])
                    reward = reward - np.where(done, 0, cost)
                for i in np.flatnonzero(truncated & ~terminated):
                    final = {k: v[None] for k, v in info["final_obs"][i].items()}
                    x = torch.as_tensor(agent.rows(final), device=device).float()
                    ones = torch.ones((1, actions), device=device)
                    gain, value = agent(x, ones, inputs[:1])
                    b_best[t, i] = value[0] + gain.max()
                b_reward[t], b_done[t] = torch.as_tensor(reward), torch.as_tensor(done)
                if terminated.any():
                    s["qos"] += info["final_info"]["episode_kpis"]["avg_qos"][terminated].tolist()
        if not s["step"]:
            s["center"] = float(b_reward.mean())
        goals = lambda_returns(b_reward - s["center"], b_done, b_best, args.gamma, args.q_lambda)
        s["center"] += 0.1 * (float(b_reward.mean()) - s["center"])
        s["step"] += size
        flat = [x.reshape(size, *x.shape[2:]) for x in (b_rows, b_mask, b_inputs, b_action, goals)]
        losses, values = [], []
        for _ in range(args.update_epochs):
            for index in torch.randperm(size).chunk(args.num_minibatches):
                rows, legal, inputs, action, goal = (f[index.to(f.device)] for f in flat)
                gain, value = agent(rows.to(device).float(), legal, inputs)
                q = value + gain.gather(1, action[:, None]).squeeze(1)
                loss = F.mse_loss(q, goal)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
                losses.append(loss.item())
                values.append(q.mean().item())
        follow(averaged, agent, args.average)
        metrics = {
            "charts/SPS": log.advance(s["step"]),
            "charts/epsilon": epsilon,
            "losses/td_loss": float(np.mean(losses)),
            "losses/q_values": float(np.mean(values)),
            "losses/explained_variance": 1 - losses[-1] / float(goals.var()),
            "losses/reward_mean": s["center"],
        }
        metrics |= {f"charts/share_{k}": v for k, v in enumerate(s["shares"] / s["shares"].sum())}
        if s["qos"]:
            metrics["charts/avg_qos"] = float(np.mean(s["qos"]))
        s.update(qos=[], shares=np.zeros(actions))

        if (
            crossed(args.eval_every, s["step"] - size, s["step"])
            or s["step"] >= args.total_timesteps
        ):
            result = validate(averaged.act, args)
            metrics |= result
            log.say(s["step"], result)
            write = partial(save_policy, averaged, args)
            s["best"] = keep(write, args, run, result["eval/avg_qos"], s["best"])
        log.write(s["step"], metrics)
        if crossed(args.checkpoint_every, s["step"] - size, s["step"]):
            s["log_size"] = log.size
            snapshot(
                run / "snapshot.pt",
                agent=agent.state_dict(),
                state=s,
                averaged=averaged.state_dict(),
                optimizer=optimizer.state_dict(),
                envs=pickle.dumps(envs),
                rng=rng.bit_generator.state,
                torch_rng=torch.get_rng_state(),
            )
    log.close()
    envs.close()
    return run


if __name__ == "__main__":
    train(tyro.cli(Args, config=(tyro.conf.FlagConversionOff,)))
