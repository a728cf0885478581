"""Rollout policy iteration: learn a router from what its actions do on copies of the simulator.

In some of the states that the router meets, a few actions are tried on copies of the simulator that
share their future (`servegym.agents.branches`), a heuristic, later the policy itself, decides the
requests after them, and the difference of the rewards is a label: how much better one action was,
with far less noise than a return has. A network regresses on the labels from what the router sees,
which averages over the futures that it cannot know; the policy takes the best action. That is
approximate policy iteration by rollouts (Bertsekas, Tsitsiklis 1996; Lagoudakis, Parr, ICML 2003).

The network values one expert at a time and reads its latency law and the requirement L, so that one
set of weights serves any fleet, number of experts and L; ``--mixture`` trains on several together.
``python agents/rpi.py --help`` lists the options.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from numpy.typing import NDArray
from torch import Tensor, nn

from servegym.agents.branches import (
    Branches,
    Values,
    choose_candidates,
    fleet_load,
    heuristic_values,
    noise_weights,
)
from servegym.agents.han import HAN, Head, Layout, Sets, prior, scale_laws
from servegym.agents.lib.run import (
    RouterArgs,
    RunLog,
    crossed,
    episode_seeds,
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

    rate_low: float = 3.0
    """lowest mean arrival rate, requests/s; each training episode draws its own"""
    rate_high: float = 11.5
    """highest mean arrival rate, requests/s"""
    reward: Literal["paid_forward", "completed_qos"] = "paid_forward"
    """the environment's reward; only paid_forward tells an action's worth before its answer ends"""
    set: tuple[str, ...] = ("episode_requests=400",)
    """further environment arguments, key=value with a JSON value, as in num_experts=3"""
    encoder: Literal["han", "sets"] = "sets"
    """the graph attention network, or a small network over every expert and its queue's sums"""
    law: bool = True
    """put each expert's profiled estimator (Eq. 13/14) on its node"""
    mixture: tuple[str, ...] = ()
    """configurations to train on together, each further environment arguments beside those of
    --set, as in "profiles=paper-linear num_experts=3 rate=[1,6]"; none: the one of the flags"""
    total_timesteps: int = 200_000
    """states to label; each costs as many rollouts as `candidates`"""
    num_envs: int = 128
    """parallel environments, as many of each configuration"""
    skip: int = 5
    """decisions of every environment between two states that are labelled"""
    explore: float = 0.15
    """share of random legal actions between them"""
    candidates: int = 3
    """actions tried in a state: that of the rollouts' policy and likely ones"""
    spread: float = 0.1
    """temperature, in scores, at which the likely ones are drawn"""
    horizon_s: float = 8.0
    """length of a rollout, simulated seconds: about what the longest answer takes within L"""
    near: float = 0.0
    """what an action may cost, in scores, to be taken by all copies of a state alike"""
    improve_from: int = 0
    """labels after which rollouts follow the last fit in place of the heuristic (0: never)"""
    fit_every: int = 50_000
    """labels between two fits; each starts afresh on all of them, and its policy goes on"""
    epochs: int = 6
    """passes over the labels in a fit"""
    batch_size: int = 256
    """labels in a minibatch"""
    learning_rate: float = 2e-3
    """learning rate at the start of a fit, falling linearly to zero"""
    weight_decay: float = 1e-4
    """weight decay of AdamW"""
    ridge: float = 0.5
    """weight of the squares of what is added to actions that were not tried"""
    holdout: float = 0.1
    """share of the labels, the latest ones, that a fit leaves out and is measured on"""
    eval_episodes: int = 16
    """episodes per rate and evaluation on the validation split; the best policy is kept"""
    eval_rates: tuple[float, ...] = (3.0, 5.0, 8.0, 10.0)
    """arrival rates of the evaluation"""


class Agent(nn.Module):
    """Values of the actions: the heuristic's, and what the network adds, little at first."""

    graph = True
    law: Tensor | None

    def __init__(self, layout: Layout, args: Args, system: RoutingSystem) -> None:
        super().__init__()
        self.temperature, self.by_law = 1.0, args.law
        self.register_buffer("law", None, persistent=False)
        width = system.estimator.shape[1] if args.law else 0
        self.encoder: Any = (HAN if args.encoder == "han" else Sets)(layout, width)
        self.actor = Head(layout.experts + 1, per_expert=True)
        self.actor.start_small()
        self.turn_to(layout, LatencyModel(system))

    def turn_to(self, layout: Layout, model: LatencyModel) -> None:
        """Serve these experts: the weights are for any one of them, whatever its law."""
        self.layout = self.encoder.layout = layout
        self.model = model
        if self.by_law:
            device = self.actor.out.weight.device
            self.law = torch.as_tensor(scale_laws(model.system.estimator), device=device)

    def rows(self, obs: Mapping[str, NDArray[Any]]) -> NDArray[np.float16]:
        """Flat rows of a batch of observations."""
        return self.layout.rows(obs, self.model)

    def forward(self, rows: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Values (B, N + 1) in scores, illegal actions at a large negative, and what was added."""
        added = self.actor(*self.encoder(rows, self.law))
        start = prior(self.layout.expert(rows), self.layout.running)
        value = added + F.pad(start, (1, 0))  # a drop is worth 0
        return value.masked_fill(mask == 0, -1e4), added

    @torch.no_grad()
    def values(self, obs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        """Values (B, N + 1) of the actions, legal or not."""
        rows = torch.as_tensor(self.rows(obs), device=self.actor.out.weight.device).float()
        return self(rows, rows.new_ones(len(rows), self.layout.experts + 1))[0].cpu().numpy()

    def act(self, obs: Mapping[str, NDArray[Any]], mask: NDArray[Any]) -> NDArray[np.int64]:
        """The best legal action of every observation."""
        return np.where(np.asarray(mask) > 0, self.values(obs), -np.inf).argmax(-1)


class Point:
    """A configuration of the environment: its systems as they stand, and the labels from them."""

    def __init__(self, args: Args, num_envs: int, seed: int) -> None:
        self.args = args
        self.envs = make_envs(args, num_envs)
        self.layout = Layout.of(self.envs, impact=True)
        self.system = RoutingSystem.from_env(self.envs)
        self.model = LatencyModel(self.system)
        self.branches = Branches(self.envs, args.candidates)
        self.obs, info = self.envs.reset(seed=episode_seeds(seed, num_envs))
        self.mask = info["action_mask"]
        self.labels: list[tuple[NDArray[Any], ...]] = []

    def label(self, agent: Agent, improve: bool, rng: np.random.Generator) -> None:
        """Label the present states with the returns of some of their actions."""
        args, mask = self.args, self.mask
        value = agent.values(self.obs)
        follow: Values = agent.values if improve else self.heuristic
        first = np.where(mask > 0, follow(self.obs), -np.inf).argmax(1)
        tries, legal = choose_candidates(value, first, mask, args.candidates, args.spread, rng)
        returns = self.branches.returns(tries, legal, args.horizon_s, follow, args.near)
        self.labels.append((agent.rows(self.obs), tries.astype(np.int8), returns))

    def step(self, agent: Agent, fitted: bool, rng: np.random.Generator) -> None:
        """Let the policy decide, the heuristic before there is one, or chance now and then."""
        mask, values = self.mask, agent.values if fitted else self.heuristic
        action = np.where(mask > 0, values(self.obs), -np.inf).argmax(1)
        chance = np.where(mask > 0, rng.random(mask.shape), -1.0)
        action = np.where(rng.random(len(mask)) < self.args.explore, chance.argmax(-1), action)
        self.obs, _, _, _, info = self.envs.step(action)
        self.mask = info["action_mask"]

    def heuristic(self, obs: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
        """Values (B, N + 1) of the heuristic."""
        return heuristic_values(obs, self.model)

    def state(self) -> tuple[Any, ...]:
        """What a resumed run needs."""
        return self.envs, self.obs, self.mask, self.labels

    def restore(self, state: tuple[Any, ...]) -> None:
        """Go on from what `state` gave."""
        self.envs, self.obs, self.mask, self.labels = state
        self.branches = Branches(self.envs, self.args.candidates)


class Lessons:
    """The labels of a point as tensors: differences of the returns to that of the first action."""

    def __init__(self, point: Point, device: torch.device) -> None:
        self.point, self.device = point, device
        self.rows, tried, returns = (
            np.concatenate(part) for part in zip(*point.labels, strict=True)
        )
        gain = returns[:, 1:] - returns[:, :1]
        load = fleet_load(self.rows, point.layout)
        self.tried = torch.as_tensor(tried.astype(np.int64), device=device)
        self.weight = torch.as_tensor(noise_weights(load, gain), device=device)
        self.there = torch.as_tensor(np.isfinite(gain), device=device)
        self.gain = torch.as_tensor(np.nan_to_num(gain), device=device)
        self.cut = max(int(len(gain) * (1 - point.args.holdout)), 1)

    def errors(self, agent: Agent, index: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted squared errors (K,) of some labels, and squares of what nobody tried."""
        agent.turn_to(self.point.layout, self.point.model)
        x = torch.as_tensor(self.rows[index.numpy()], device=self.device).float()
        i = index.to(self.device)
        value, added = agent(x, x.new_ones(len(x), agent.layout.experts + 1))
        value = value.gather(1, self.tried[i])
        error = (value[:, 1:] - value[:, :1] - self.gain[i]).square() * self.there[i]
        added = added - added.gather(1, self.tried[i][:, :1])
        strange = torch.ones_like(added).scatter(1, self.tried[i], 0.0)
        weight = self.weight[i]
        return weight * error.sum(1), weight * (strange * added.square()).mean(1)

    def held_out(self) -> tuple[Tensor, ...]:
        """Indexes of the labels that a fit leaves out, in parts."""
        return torch.arange(min(self.cut, len(self.rows) - 1), len(self.rows)).split(4096)


def fit(agent: Agent, points: Sequence[Point], args: Args) -> dict[str, float]:
    """Regress differences of values on differences of returns, both to the first action.

    A minibatch is of one point; the points take turns by chance, and each counts as much.

    Returns:
        Weighted mean squared errors on the held-out labels, after the fit, of the heuristic's
        values, and of no difference at all.
    """
    lessons = [Lessons(point, agent.actor.out.weight.device) for point in points]

    @torch.no_grad()
    def held_out() -> float:
        found = [one.errors(agent, part)[0] for one in lessons for part in one.held_out()]
        return float(torch.cat(found).mean())

    start = held_out()
    optimizer = torch.optim.AdamW(
        agent.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay
    )
    steps = args.epochs * sum(-(-one.cut // args.batch_size) for one in lessons)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(args.epochs):
        parts = [
            (one, x) for one in lessons for x in torch.randperm(one.cut).split(args.batch_size)
        ]
        for k in torch.randperm(len(parts)).tolist():
            error, strange = parts[k][0].errors(agent, parts[k][1])
            optimizer.zero_grad()
            (error.mean() + args.ridge * strange.mean()).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    nothing = torch.cat(
        [
            (one.weight[:, None] * one.there * one.gain.square()).sum(1)[part]
            for one in lessons
            for part in one.held_out()
        ]
    )
    return {
        "losses/held_out": held_out(),
        "losses/held_out_heuristic": start,
        "losses/held_out_nothing": float(nothing.mean()),
    }


def evaluate(agent: Agent, points: Sequence[Point]) -> dict[str, float]:
    """`validate` at every point, and means over the points."""
    results = []
    for point in points:
        agent.turn_to(point.layout, point.model)
        results.append(validate(agent.act, point.args))
    if len(points) == 1:
        return results[0]
    keys = [key for key in results[0] if "qos" in key]
    means = {key: float(np.mean([result[key] for result in results])) for key in keys}
    each = {f"eval/avg_qos_point_{k}": r["eval/avg_qos"] for k, r in enumerate(results)}
    return each | means


def save_policy(agent: Agent, args: Args, path: Path) -> None:
    """Weights, arguments and layout in one safetensors file."""
    meta = {"args": json.dumps(asdict(args)), "layout": json.dumps(asdict(agent.layout))}
    write_checkpoint(agent, meta | {"agent": "rpi"}, path)


def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors)."""
    if args.candidates < 2 or args.skip < 1 or not args.horizon_s > 0:
        raise ValueError(
            f"candidates, skip and horizon_s: must be at least 2, 1 and above 0, got "
            f"{args.candidates}, {args.skip} and {args.horizon_s}"
        )
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    run = Path(args.out_dir) / (args.run_name or f"rpi_{args.encoder}_{args.seed}")
    run.mkdir(parents=True, exist_ok=True)
    mixture = [replace(args, set=args.set + tuple(item.split())) for item in args.mixture or ("",)]
    each = max(args.num_envs // len(mixture), 1)
    points = [Point(own, each, args.seed + 1000 * k) for k, own in enumerate(mixture)]

    def fresh() -> Agent:
        return Agent(points[0].layout, args, points[0].system).to(device)

    agent = fresh()
    s: dict[str, Any] = {"step": 0, "labels": 0, "best": -np.inf, "log_size": 0, "fitted": False}
    if has_snapshot(args.resume, run / "snapshot.pt"):
        saved = torch.load(run / "snapshot.pt", weights_only=False)
        agent.load_state_dict(saved["agent"])
        s = saved["state"]
        for point, state in zip(points, pickle.loads(saved["points"]), strict=True):
            point.restore(state)
        torch.set_rng_state(saved["torch_rng"])
        rng.bit_generator.state = saved["rng"]
    log = RunLog(run, args, "rpi", s["labels"], s["log_size"])
    while s["labels"] < args.total_timesteps:
        before = s["labels"]
        improve = s["fitted"] and 0 < args.improve_from <= before
        for point in points:
            agent.turn_to(point.layout, point.model)
            if s["step"] % args.skip == args.skip - 1:
                point.label(agent, improve, rng)
                s["labels"] += each
                log.advance(s["labels"])
            point.step(agent, s["fitted"], rng)
        s["step"] += 1
        if crossed(args.fit_every, before, s["labels"]) or s["labels"] >= args.total_timesteps:
            agent = fresh()
            metrics = fit(agent, points, args)
            s["fitted"] = True
            result = evaluate(agent, points)
            log.say(s["labels"], result)
            decisions = each * len(points) * s["step"]
            log.write(
                s["labels"],
                {"charts/SPS": log.sps, "charts/decisions": decisions} | metrics | result,
            )
            agent.turn_to(points[0].layout, points[0].model)
            write = partial(save_policy, agent, args)
            s["best"] = keep(write, args, run, result["eval/avg_qos"], s["best"])
        if crossed(args.checkpoint_every, before, s["labels"]):
            s["log_size"] = log.size
            snapshot(
                run / "snapshot.pt",
                agent=agent.state_dict(),
                state=s,
                points=pickle.dumps([point.state() for point in points]),
                rng=rng.bit_generator.state,
                torch_rng=torch.get_rng_state(),
            )
    log.close()
    for point in points:
        point.envs.close()
    return run


if __name__ == "__main__":
    train(tyro.cli(Args, config=(tyro.conf.FlagConversionOff,)))
