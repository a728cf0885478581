"""Discrete soft actor-critic over a dense, masked heterogeneous graph attention network (HAN).

The router of the paper's section V: the state is a graph of the arrived request, the experts and
the requests they hold (Eq. 6-12); each graph is encoded by two layers of PyG's ``HANConv`` maths,
computed per graph and without padding; actor and twin critics read the embeddings.
``python agents/sac_han.py --help`` lists the options; ``--state expert --reward completed_qos`` is
the paper's Baseline RL, ``--state han --reward completed_qos`` its Baseline RL + DSA. By default
actor and critics start at the heuristic `priced_greedy` and learn what to add to it (residual
policy learning, Silver et al. 2018); ``--prior 0`` trains from nothing.
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
    what_followed,
    write_checkpoint,
)
from servegym.agents.replay import ReplayBuffer
from servegym.baselines.llm_routing.latency import LatencyModel
from servegym.baselines.llm_routing.system import RoutingSystem


@dataclass
class Args(RouterArgs):
    """Command line of the agent."""

    state: Literal["han", "expert"] = "han"
    """the whole graph, or the experts' rows of Eq. 7 alone (the paper's Baseline RL)"""
    head: Literal["expert", "arrived"] = "expert"
    """logits from every expert's embedding, or (literally) from the arrived request's alone"""
    law: bool = True
    """put each expert's profiled estimator (Eq. 13/14) on its node: tells idle experts apart"""
    impact: bool = True
    """add what the action impact estimator predicts to the experts' and requests' features"""
    prior: float = 0.02
    """temperature, in scores, of the heuristic that the networks start from; 0: no such start"""
    encoder: Literal["han", "sets"] = "han"
    """of the graph: the HAN, or a small network over every expert and its queue's sums"""
    foresight: bool = True
    """let the critics, in training, see the arrivals to come: see `Foresight`"""
    total_timesteps: int = 300_000
    """environment steps (decisions) over all environments"""
    num_envs: int = 128
    """parallel environments"""
    cut_after: int = 0
    """decisions after which training episodes are cut, to keep empty systems in replay; 0: never"""
    buffer_size: int = 200_000
    """transitions kept for replay"""
    learning_starts: int = 8_000
    """steps taken by the warm-up policy before the first update"""
    warmup_random: float = 0.2
    """share of uniform legal actions in the warm-up"""
    updates_per_step: int = 2
    """gradient updates after each step of all environments"""
    batch_size: int = 128
    """transitions per update"""
    gamma: float = 0.99
    """discount per decision"""
    holding_cost: bool = True
    """paid_forward only: charge (1 - gamma) x predicted score in flight, see `held_score`"""
    n_step: int = 8
    """rewards summed before bootstrapping"""
    tau: float = 0.02
    """step of the target network towards the online one, per update"""
    average: float = 0.01
    """step of the averaged network, which is evaluated and saved, after each round of updates"""
    lr: float = 1e-3
    """learning rate of the encoder and the critics"""
    actor_lr: float = 3e-4
    """learning rate of the actor"""
    critic_warmup: float = 0.25
    """with a prior: share of the training, from its start, in which the critics alone learn"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to a tenth"""
    autotune: bool = False
    """learn the temperature"""
    alpha: float = 0.02
    """the temperature, or its first value with autotune"""
    target_entropy_scale: float = 0.25
    """entropy target of a state as a share of log(number of legal actions)"""
    average_q: bool = False
    """take the mean of the twin critics in place of their minimum"""
    entropy_in_target: bool = False
    """keep the entropy bonus in the critics' target"""
    eval_every: int = 30_000
    """steps between evaluations on the validation split; the best policy is kept"""


class Agent(nn.Module):
    """Encoder shared by actor and twin critics; the critics' loss alone trains the encoder."""

    def __init__(self, layout: Layout, args: Args, system: RoutingSystem | None) -> None:
        super().__init__()
        self.layout, self.graph, laws = layout, args.state == "han", None
        if system is not None and self.graph and args.law:
            laws = torch.as_tensor(scale_laws(system.estimator))
        self.register_buffer("law", laws)
        self.model = LatencyModel(system) if layout.impact and system is not None else None
        kind, width = Sets if args.encoder == "sets" else HAN, 0 if laws is None else laws.shape[1]
        self.temperature = args.prior if layout.impact and args.head == "expert" else 0.0
        self.encoder: nn.Module = kind(layout, width) if self.graph else ExpertRows(layout)
        extra = Foresight.WIDTH * args.foresight
        heads = [
            Head(layout.experts + 1, self.graph and args.head == "expert", width)
            for width in (0, extra, extra)
        ]
        self.actor, self.q1, self.q2 = heads
        if self.temperature:
            for head in heads:
                head.start_small()

    def rows(self, obs: Mapping[str, NDArray[Any]]) -> NDArray[np.float16]:
        """Flat rows of a batch of observations."""
        return self.layout.rows(obs, self.model)

    def encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Embeddings of the request (B, 64) and the experts (B, N, 64); what to start from."""
        h = self.encoder(rows, self.law)
        if self.temperature:  # a drop is worth 0
            h = (*h, F.pad(prior(self.layout.expert(rows), self.layout.running), (1, 0)))
        return h

    def log_policy(self, h: tuple[Tensor, ...], mask: Tensor) -> Tensor:
        """Log-probabilities (B, N+1); illegal actions get a large finite negative logit."""
        logits = self.actor(*h[:2])
        if self.temperature:
            logits = logits + h[2] / self.temperature
        return logits.masked_fill(mask == 0, -1e8).log_softmax(-1)

    def values(self, h: tuple[Tensor, ...], inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Both critics' values of every action (B, N+1); inputs (B, Foresight.WIDTH or 0)."""
        start = h[2] if self.temperature else 0.0
        return self.q1(*h[:2], inputs) + start, self.q2(*h[:2], inputs) + start

    @torch.no_grad()
    def act(self, obs: Mapping[str, NDArray[Any]], mask: NDArray[Any]) -> NDArray[np.int64]:
        """The likeliest legal action of every observation."""
        device = next(self.parameters()).device
        h = self.encode(torch.as_tensor(self.rows(obs), device=device).float())
        return self.log_policy(h, torch.as_tensor(mask, device=device)).argmax(-1).cpu().numpy()


def critic_target(
    batch: Mapping[str, Tensor], log_pi: Tensor, q1: Tensor, q2: Tensor, alpha: float, args: Args
) -> Tensor:
    """Return + discount * sum_a pi(a|s') (Q(s', a) - alpha log pi(a|s')), zero once terminated."""
    q = (q1 + q2) / 2 if args.average_q else torch.minimum(q1, q2)
    if args.entropy_in_target:
        q = q - alpha * log_pi
    value = (log_pi.exp() * q).sum(-1)
    return batch["return"] + batch["discount"] * (1 - batch["terminated"].float()) * value


def update(
    agent: Agent,
    target: Agent,
    log_alpha: Tensor,
    optimizer: torch.optim.Optimizer,
    batch: Mapping[str, Tensor],
    args: Args,
    act: bool = True,
) -> dict[str, Tensor]:
    """One gradient step on critics, encoder, actor and temperature; the target follows by tau."""
    alpha = log_alpha.exp().item()
    with torch.no_grad():
        h = target.encode(batch["next_obs"])
        log_pi = target.log_policy(h, batch["next_mask"])
        goal = critic_target(batch, log_pi, *target.values(h, batch["next_inputs"]), alpha, args)
    h = agent.encode(batch["obs"])
    q1, q2 = agent.values(h, batch["inputs"])
    chosen = batch["action"][:, None]
    q1_loss, q2_loss = (F.mse_loss(q.gather(1, chosen).squeeze(1), goal) for q in (q1, q2))

    log_pi = agent.log_policy(tuple(x.detach() for x in h), batch["mask"])
    q = ((q1 + q2) / 2 if args.average_q else torch.minimum(q1, q2)).detach()
    actor_loss = (log_pi.exp() * (alpha * log_pi - q)).sum(-1).mean()
    entropy = -(log_pi.exp() * log_pi).sum(-1).detach()
    wanted = args.target_entropy_scale * batch["mask"].sum(-1).float().log()
    alpha_loss = (log_alpha.exp() * (entropy - wanted)).mean() if args.autotune else 0.0

    optimizer.zero_grad()
    loss = q1_loss + q2_loss
    if act:
        loss = loss + actor_loss + alpha_loss
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), 10.0)
    optimizer.step()
    follow(target, agent, args.tau)
    log = {
        "losses/qf1_loss": q1_loss,
        "losses/qf2_loss": q2_loss,
        "losses/actor_loss": actor_loss,
        "losses/qf1_values": q1.mean(),
        "losses/alpha": log_alpha.exp(),
        "charts/policy_entropy": entropy.mean(),
    }
    return {k: v.detach() for k, v in log.items()}


def save_policy(agent: Agent, args: Args, path: Path) -> None:
    """Weights, arguments and layout in one safetensors file."""
    meta = {"args": json.dumps(asdict(args)), "layout": json.dumps(asdict(agent.layout))}
    write_checkpoint(agent, meta | {"agent": "sac_han"}, path)


def check(args: Args) -> None:
    """ValueError for arguments that would train something else than they say, or fail late."""
    if args.prior < 0:
        raise ValueError(f"prior: must be 0 or a temperature above 0, got {args.prior}")
    if not 1 <= args.n_step <= args.buffer_size // args.num_envs:
        held = f"{args.buffer_size // args.num_envs}, what buffer_size holds of an environment"
        raise ValueError(f"n_step: must be from 1 to {held}; got {args.n_step}")
    if args.cut_after and args.foresight:
        raise ValueError("foresight: must be False with cut_after, as what follows a cut is gone")


def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors)."""
    check(args)
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    usual = f"{args.state}_{args.reward}_{args.head}_{args.seed}"
    run = Path(args.out_dir) / (args.run_name or usual)
    run.mkdir(parents=True, exist_ok=True)

    envs = make_envs(args, args.num_envs, max_episode_steps=args.cut_after or None)
    layout = Layout.of(envs, impact=args.impact and args.state == "han")
    system = RoutingSystem.from_env(envs)
    agent = Agent(layout, args, system).to(device)
    target, averaged = (deepcopy(agent).requires_grad_(False) for _ in range(2))
    log_alpha = torch.tensor(float(np.log(args.alpha)), device=device, requires_grad=True)
    slow = list(agent.actor.parameters())
    fast = [p for part in (agent.encoder, agent.q1, agent.q2) for p in part.parameters()]
    groups = [
        {"params": fast, "lr": args.lr},
        {"params": slow, "lr": args.actor_lr},
        {"params": [log_alpha], "lr": 1e-3},
    ]
    optimizer = torch.optim.Adam(groups, fused=True)
    extra = Foresight.WIDTH * args.foresight
    columns, actions = sum(layout.sizes), layout.experts + 1
    buffer = ReplayBuffer(args.buffer_size, args.num_envs, columns, actions, extra)
    parts: dict[str, Any] = {
        "agent": agent,
        "target": target,
        "averaged": averaged,
        "optimizer": optimizer,
        "buffer": buffer,
    }

    obs, info = envs.reset(seed=episode_seeds(args.seed, args.num_envs))
    s: dict[str, Any] = {  # everything else that a resumed run needs
        "step": 0,
        "best": -np.inf,
        "center": 0.0,
        "log_size": 0,
        "mask": info["action_mask"],
        "obs": obs,
        "return": np.zeros(args.num_envs),
        "episodes": [],
        "qos": [],
        "shares": np.zeros(actions),
    }
    if has_snapshot(args.resume, run / "snapshot.pt"):
        saved = torch.load(run / "snapshot.pt", weights_only=False)
        for key, part in parts.items():
            part.load_state_dict(saved[key])
        log_alpha.data = saved["log_alpha"].to(device)
        s, envs = saved["state"], pickle.loads(saved["envs"])
        rng.bit_generator.state = saved["rng"]
    log = RunLog(run, args, "sac_han", s["step"], s["log_size"])
    foresight = Foresight(envs) if args.foresight else None
    inputs = foresight() if foresight else np.zeros((args.num_envs, 0), np.float32)
    losses: dict[str, Tensor] = {}
    while s["step"] < args.total_timesteps:
        obs, mask = s["obs"], s["mask"]
        rows = agent.rows(obs)
        warm_up = s["step"] < args.learning_starts
        score = rng.random(mask.shape)
        if warm_up:
            # The least loaded expert below a cap that differs between environments.
            held = obs["experts"][..., 1:].sum(-1)
            cap = 1 + np.arange(args.num_envs)[:, None] % (layout.running + layout.waiting)
            calm = rng.random((args.num_envs, 1)) >= args.warmup_random
            score -= calm * np.concatenate([cap - 0.5, held], -1)
        if not warm_up or agent.temperature:  # in half the environments where it starts well
            with torch.no_grad():
                h = agent.encode(torch.as_tensor(rows, device=device).float())
                own = agent.log_policy(h, torch.as_tensor(mask, device=device)).cpu().numpy()
            own = own + rng.gumbel(size=own.shape)
            own_turn = np.arange(args.num_envs) >= args.num_envs // 2 * warm_up
            score = np.where(own_turn[:, None], own, score)
        action = np.where(mask, score, -1e30).argmax(-1)
        obs, reward, terminated, truncated, info = envs.step(action)
        done = terminated | truncated
        after, next_mask = what_followed(obs, info, done)
        if terminated.any():
            s["qos"] += info["final_info"]["episode_kpis"]["avg_qos"][terminated].tolist()
        before, earned = inputs, reward
        if foresight is not None:
            inputs = foresight()
        if args.reward == "paid_forward" and args.holding_cost:
            earned = reward - (1 - args.gamma) * held_score(after)
        buffer.add(
            obs=rows,
            mask=mask,
            action=action,
            reward=earned,
            terminated=terminated,
            done=done,
            next_obs=agent.rows(after),
            next_mask=next_mask,
            inputs=before,
            next_inputs=inputs,
        )
        s["obs"], s["mask"] = obs, info["action_mask"]
        was, s["step"] = s["step"], s["step"] + args.num_envs
        s["center"] += (earned.mean() - s["center"]) * max(0.002, 1 / buffer.count)
        s["shares"] += np.bincount(action, minlength=actions)
        s["return"] += reward
        s["episodes"] += s["return"][done].tolist()
        s["return"][done] = 0

        if s["step"] >= args.learning_starts and buffer.count >= args.n_step:
            left = 1 - 0.9 * s["step"] / args.total_timesteps
            # A start at a heuristic is kept until the critics know better; one at nothing is not.
            act = not agent.temperature or s["step"] >= args.critic_warmup * args.total_timesteps
            for group, lr in zip(optimizer.param_groups, (args.lr, args.actor_lr), strict=False):
                group["lr"] = lr * (left if args.anneal_lr else 1.0)
            for _ in range(args.updates_per_step):
                sample = buffer.sample(args.batch_size, args.n_step, args.gamma, s["center"], rng)
                batch = {k: torch.as_tensor(v, device=device) for k, v in sample.items()}
                batch |= {k: batch[k].float() for k in ("obs", "next_obs", "inputs", "next_inputs")}
                losses = update(agent, target, log_alpha, optimizer, batch, args, act)
            follow(averaged, agent, args.average)

        last = s["step"] >= args.total_timesteps
        if crossed(2_000, was, s["step"]) or last:
            metrics = {"charts/SPS": log.advance(s["step"])}
            metrics |= {k: float(v) for k, v in losses.items()} | {"charts/reward": s["center"]}
            taken = enumerate(s["shares"] / s["shares"].sum())
            metrics |= {f"charts/share_{k}": v for k, v in taken}
            means = {"charts/episodic_return": "episodes", "charts/avg_qos": "qos"}
            metrics |= {k: float(np.mean(s[v])) for k, v in means.items() if s[v]}
            s.update(episodes=[], qos=[], shares=np.zeros(actions))
            log.write(s["step"], metrics)
        if losses and (crossed(args.eval_every, was, s["step"]) or last):
            result = validate(averaged.act, args)
            log.write(s["step"], result)
            log.say(s["step"], result)
            write = partial(save_policy, averaged, args)
            s["best"] = keep(write, args, run, result["eval/avg_qos"], s["best"])
        if crossed(args.checkpoint_every, was, s["step"]):
            s["log_size"] = log.size
            learned = {key: part.state_dict() for key, part in parts.items()}
            snapshot(
                run / "snapshot.pt",
                **learned,
                log_alpha=log_alpha.data,
                state=s,
                rng=rng.bit_generator.state,
                envs=pickle.dumps(envs),
            )
    log.close()
    envs.close()
    return run


if __name__ == "__main__":
    train(tyro.cli(Args, config=(tyro.conf.FlagConversionOff,)))
