"""Proximal policy optimisation over the HAN: the same state, features and heads as ``sac_han.py``.

On-policy, and so without replay, target networks or teacher. By default the actor starts at
`priced_greedy`: its logits are that heuristic's value of every action over a temperature, plus what
the network adds, zero at first (residual policy learning, Silver et al. 2018). ``--prior 0`` starts
from nothing. ``--encoder sets`` replaces the HAN by one small network over every expert and the sum
of its queue, ten times as fast; ``--encoder expert`` sees the experts' rows alone, as the paper's
Baseline RL does (``--prior 0``). ``python agents/ppo_han.py --help`` lists the options.
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

from servegym.agents.han import (
    HAN,
    WIDTH,
    ExpertRows,
    Head,
    Layout,
    Sets,
    held_score,
    prior,
    scale_laws,
)
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

    encoder: Literal["han", "sets", "expert"] = "han"
    """the graph attention network, a small network over every expert and its queue's sums, or one
    over the experts' rows of Eq. 7 alone"""
    law: bool = True
    """put each expert's profiled estimator (Eq. 13/14) on its node"""
    prior: float = 0.02
    """temperature, in scores, of the heuristic that the actor starts from; 0: no such start"""
    foresight: bool = True
    """let the critic, in training, see the arrivals to come: see `Foresight`"""
    total_timesteps: int = 1_000_000
    """environment steps (decisions) over all environments"""
    num_envs: int = 128
    """parallel environments"""
    num_steps: int = 32
    """steps of each environment between updates"""
    learning_rate: float = 2e-3
    """learning rate, falling linearly to zero with anneal_lr"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to zero"""
    gamma: float = 0.99
    """discount per decision"""
    gae_lambda: float = 0.9
    """lambda of the generalised advantage estimate"""
    balance: bool = True
    """divide the advantages of an environment by their own size there, or rates at which little
    can be gained have no say against those at which much can be lost"""
    holding_cost: bool = True
    """paid_forward only: charge (1 - gamma) x predicted score in flight, see `held_score`"""
    num_minibatches: int = 4
    """minibatches per epoch"""
    update_epochs: int = 4
    """passes over the collected steps"""
    average: float = 0.05
    """step of the averaged network, which is evaluated and saved, after each round of updates"""
    critic_warmup: float = 0.03
    """share of the training in which the critic alone learns"""
    clip_coef: float = 0.2
    """clipping of the probability ratio"""
    ent_coef: float = 0.0
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """gradients are clipped to this norm"""
    eval_every: int = 100_000
    """steps between evaluations on the validation split; the best policy is kept"""


class Agent(nn.Module):
    """Encoder, actor and critic; the encoder learns from both losses."""

    def __init__(self, layout: Layout, args: Args, system: RoutingSystem) -> None:
        super().__init__()
        self.layout, self.temperature = layout, args.prior
        self.foresight = args.foresight
        law = torch.as_tensor(scale_laws(system.estimator)) if args.law else None
        self.register_buffer("law", law)
        self.model = LatencyModel(system)
        width = 0 if law is None else law.shape[1]
        self.graph = args.encoder != "expert"
        kind = HAN if args.encoder == "han" else Sets
        self.encoder: nn.Module = kind(layout, width) if self.graph else ExpertRows(layout)
        self.actor = Head(layout.experts + 1, per_expert=self.graph)
        self.actor.start_small()
        self.critic = nn.Sequential(
            nn.Linear(2 * WIDTH + Foresight.WIDTH * args.foresight, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, 1),
        )

    def rows(self, obs: Mapping[str, NDArray[Any]]) -> NDArray[np.float16]:
        """Flat rows of a batch of observations."""
        return self.layout.rows(obs, self.model)

    def forward(
        self, rows: Tensor, mask: Tensor, inputs: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, N+1), illegal actions at a large negative, and values (B,).

        A critic with foresight needs `inputs` (B, Foresight.WIDTH); without them its values are 0.
        """
        request, experts = self.encoder(rows, self.law)
        logits = self.actor(request, experts)
        if self.temperature:
            start = prior(self.layout.expert(rows), self.layout.running)
            logits = logits + F.pad(start, (1, 0)) / self.temperature  # a drop is worth 0
        log_pi = logits.masked_fill(mask == 0, -1e8).log_softmax(-1)
        known = [request, experts.mean(1)]
        if self.foresight:
            if inputs is None:
                return log_pi, logits.new_zeros(len(rows))
            known.append(inputs)
        return log_pi, self.critic(torch.cat(known, -1)).squeeze(-1)

    @torch.no_grad()
    def act(self, obs: Mapping[str, NDArray[Any]], mask: NDArray[Any]) -> NDArray[np.int64]:
        """The likeliest legal action of every observation."""
        device = next(self.parameters()).device
        rows = torch.as_tensor(self.rows(obs), device=device).float()
        return self(rows, torch.as_tensor(mask, device=device))[0].argmax(-1).cpu().numpy()


def save_policy(agent: Agent, args: Args, path: Path) -> None:
    """Weights, arguments and layout in one safetensors file."""
    meta = {"args": json.dumps(asdict(args)), "layout": json.dumps(asdict(agent.layout))}
    write_checkpoint(agent, meta | {"agent": "ppo_han"}, path)


def advantages(
    reward: Tensor, done: Tensor, value: Tensor, following: Tensor, gamma: float, lam: float
) -> Tensor:
    """Generalised advantage estimate, all (T, E); `following` is the value after each step."""
    out, running = torch.zeros_like(reward), torch.zeros_like(reward[0])
    for t in reversed(range(len(reward))):
        delta = reward[t] + gamma * following[t] - value[t]
        running = delta + gamma * lam * (1 - done[t]) * running
        out[t] = running
    return out


def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors)."""
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    run = Path(args.out_dir) / (args.run_name or f"ppo_han_{args.encoder}_{args.seed}")
    run.mkdir(parents=True, exist_ok=True)
    envs, n = make_envs(args, args.num_envs), args.num_envs
    layout = Layout.of(envs, impact=True)
    if args.prior < 0 or (args.prior and args.encoder == "expert"):
        allowed = "0 with --encoder expert" if args.encoder == "expert" else "0 or a temperature"
        raise ValueError(f"prior: must be {allowed}, got {args.prior}")
    system = RoutingSystem.from_env(envs)
    agent, actions = Agent(layout, args, system).to(device), layout.experts + 1
    averaged = deepcopy(agent).requires_grad_(False)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-8)

    obs, info = envs.reset(seed=episode_seeds(args.seed, args.num_envs))
    s: dict[str, Any] = {  # everything else that a resumed run needs
        "step": 0,
        "best": -np.inf,
        "center": 0.0,
        "log_size": 0,
        "obs": obs,
        "qos": [],
        "size": None,
        "mask": info["action_mask"],
        "shares": np.zeros(actions),
    }
    if has_snapshot(args.resume, run / "snapshot.pt"):
        saved = torch.load(run / "snapshot.pt", weights_only=False)
        agent.load_state_dict(saved["agent"])
        averaged.load_state_dict(saved["averaged"])
        optimizer.load_state_dict(saved["optimizer"])
        s, envs = saved["state"], pickle.loads(saved["envs"])
        torch.set_rng_state(saved["rng"])
    log = RunLog(run, args, "ppo_han", s["step"], s["log_size"])
    foresight = Foresight(envs) if args.foresight else None
    shape, size = (args.num_steps, n), args.num_steps * n
    b_rows = torch.zeros((*shape, sum(layout.sizes)), dtype=torch.float16)
    b_inputs = torch.zeros((*shape, Foresight.WIDTH if args.foresight else 0), device=device)
    b_mask = torch.zeros((*shape, actions), dtype=torch.int8, device=device)
    b_action = torch.zeros(shape, dtype=torch.long, device=device)
    b_logp, b_reward, b_value, b_next, b_done = (
        torch.zeros(shape, device=device) for _ in range(5)
    )
    while s["step"] < args.total_timesteps:
        done_share = s["step"] / args.total_timesteps
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - done_share)
        with torch.no_grad():
            for t in range(args.num_steps + 1):
                rows = torch.as_tensor(agent.rows(s["obs"]))
                mask = torch.as_tensor(s["mask"], device=device)
                inputs = b_inputs[0, :, :0]
                if foresight is not None:
                    inputs = torch.as_tensor(foresight(), device=device)
                log_pi, value = agent(rows.to(device).float(), mask, inputs)
                if t:
                    b_next[t - 1] += (1 - b_done[t - 1]) * value
                if t == args.num_steps:
                    break
                b_rows[t], b_mask[t], b_value[t], b_inputs[t] = rows, mask, value, inputs
                b_action[t] = torch.multinomial(log_pi.exp(), 1).squeeze(1)
                b_logp[t] = log_pi.gather(1, b_action[t][:, None]).squeeze(1)
                action = b_action[t].cpu().numpy()
                s["shares"] += np.bincount(action, minlength=actions)
                s["obs"], reward, terminated, truncated, info = envs.step(action)
                done = terminated | truncated
                s["mask"] = info["action_mask"]
                b_next[t] = 0.0  # what follows the step: nothing after a termination
                if args.holding_cost and args.reward == "paid_forward":
                    cost = (1 - args.gamma) * held_score(s["obs"])
                    reward = reward - np.where(done, 0, cost)
                for i in np.flatnonzero(truncated & ~terminated):
                    final = {k: v[None] for k, v in info["final_obs"][i].items()}
                    x = torch.as_tensor(agent.rows(final), device=device).float()
                    ones = torch.ones((1, actions), device=device)
                    b_next[t, i] = agent(x, ones, inputs[:1])[1][0]
                b_reward[t], b_done[t] = torch.as_tensor(reward), torch.as_tensor(done)
                if terminated.any():
                    s["qos"] += info["final_info"]["episode_kpis"]["avg_qos"][terminated].tolist()
        if not s["step"]:
            s["center"] = float(b_reward.mean())
        adv = advantages(
            b_reward - s["center"], b_done, b_value, b_next, args.gamma, args.gae_lambda
        )
        size_now = adv.square().mean(0).sqrt()
        s["size"] = size_now if s["size"] is None else torch.lerp(s["size"], size_now, 0.1)
        s["center"] += 0.1 * (float(b_reward.mean()) - s["center"])
        s["step"] += size
        goals = adv + b_value
        weighed = adv / (s["size"] + 1e-3) if args.balance else adv
        flat = [
            x.reshape(size, *x.shape[2:])
            for x in (b_rows, b_mask, b_inputs, b_action, b_logp, weighed, goals)
        ]
        act, spread = done_share >= args.critic_warmup, float(goals.var())
        for _ in range(args.update_epochs):
            for index in torch.randperm(size).chunk(args.num_minibatches):
                rows, legal, inputs, action, old, gain, goal = (f[index.to(f.device)] for f in flat)
                log_pi, value = agent(rows.to(device).float(), legal, inputs)
                log_ratio = log_pi.gather(1, action[:, None]).squeeze(1) - old
                ratio = log_ratio.exp()
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                policy_loss = -torch.min(gain * ratio, gain * clipped).mean()
                value_loss = 0.5 * (value - goal).square().mean() / spread
                entropy = -(log_pi.exp() * log_pi).sum(-1).mean()
                loss = args.vf_coef * value_loss
                if act:
                    loss = loss + policy_loss - args.ent_coef * entropy
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
        follow(averaged, agent, args.average)
        metrics = {
            "charts/SPS": log.advance(s["step"]),
            "losses/policy_loss": policy_loss.item(),
            "losses/value_loss": value_loss.item(),
            "losses/entropy": entropy.item(),
            "losses/reward_mean": s["center"],
            "losses/approx_kl": torch.expm1(log_ratio).sub(log_ratio).mean().item(),
            "losses/explained_variance": 1 - float(adv.var()) / spread,
        }
        metrics |= {f"charts/share_{k}": v for k, v in enumerate(s["shares"] / s["shares"].sum())}
        if s["qos"]:
            metrics["charts/avg_qos"] = float(np.mean(s["qos"]))
        s.update(qos=[], shares=np.zeros(actions))
        last = s["step"] >= args.total_timesteps

        if crossed(args.eval_every, s["step"] - size, s["step"]) or last:
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
                rng=torch.get_rng_state(),
            )
    log.close()
    envs.close()
    return run


if __name__ == "__main__":
    train(tyro.cli(Args, config=(tyro.conf.FlagConversionOff,)))
