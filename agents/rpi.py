"""Rollout policy iteration: learn a router from what its actions do on copies of the simulator.

All chance of an episode is drawn at reset and a state can be cloned, so that two actions can be
compared on the same future. In some of the states that the router meets, a few actions are tried
on copies, the heuristic `priced_greedy` decides the requests after them, and the difference of the
rewards is a label: an unbiased sample of how much better one action is than another (common random
numbers), with far less noise than a return has. A network regresses on the labels from what the
router sees, which averages over the futures that it cannot know; the policy takes the best action.
That is approximate policy iteration by rollouts (Bertsekas & Tsitsiklis 1996; Lagoudakis & Parr,
ICML 2003). ``python agents/rpi.py --help`` lists the options.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from numpy.typing import NDArray
from torch import Tensor, nn

from servegym.agents.common import RunLog, make_envs, snapshot, validate, write_checkpoint
from servegym.agents.han import HAN, Head, Layout, Sets, prior, scale_laws
from servegym.baselines.llm_routing.greedy_qos import PricedGreedy
from servegym.baselines.llm_routing.latency import LatencyModel
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.envs.llm_routing import kernel
from servegym.envs.llm_routing.config import build_problem
from servegym.envs.llm_routing.core import RoutingBatch


@dataclass
class Args:
    """Command line of the agent."""

    seed: int = 1
    """seed of the networks, the exploration and the training episodes"""
    env_id: str = "servegym/LLMRouting-v0"
    """a routing environment with the Dict observation"""
    profiles: str = "edge-6-heterogeneous"
    """fleet of the experts"""
    latency_requirement_s: float = 0.030
    """latency requirement L, seconds per token"""
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
    total_timesteps: int = 200_000
    """states to label; each costs as many rollouts as `candidates`"""
    num_envs: int = 128
    """parallel environments"""
    skip: int = 5
    """decisions of every environment between two states that are labelled"""
    explore: float = 0.15
    """share of random legal actions between them"""
    candidates: int = 3
    """actions tried in a state: the heuristic's and likely ones of the policy"""
    spread: float = 0.1
    """temperature, in scores, at which the likely ones are drawn"""
    horizon_s: float = 8.0
    """length of a rollout, simulated seconds: about what the longest answer takes within L"""
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
    eval_requests: int = 500
    """requests per evaluation episode"""
    torch_threads: int = 1
    """threads of torch"""
    cuda: bool = False
    """run the networks on a GPU"""
    track: bool = False
    """log to wandb as well"""
    wandb_project_name: str = "servegym"
    """wandb project"""
    wandb_entity: str | None = None
    """wandb team"""
    save_model: bool = True
    """write best.safetensors and last.safetensors"""
    checkpoint_every: int = 0
    """labels between snapshots to resume from (0: none); a snapshot holds the labels"""
    resume: bool = False
    """continue from the snapshot in the run's folder; the log goes on as if uninterrupted"""
    out_dir: str = "runs"
    """folder of the runs"""
    run_name: str = ""
    """folder of this run (default: rpi_encoder_seed)"""


class Agent(nn.Module):
    """Values of the actions: the heuristic's, and what the network adds, little at first."""

    graph = True

    def __init__(self, layout: Layout, args: Args, system: RoutingSystem) -> None:
        super().__init__()
        self.layout, self.temperature = layout, 1.0
        law = torch.as_tensor(scale_laws(system.estimator)) if args.law else None
        self.register_buffer("law", law)
        self.model = LatencyModel(system)
        width = 0 if law is None else law.shape[1]
        self.encoder: nn.Module = (HAN if args.encoder == "han" else Sets)(layout, width)
        self.actor = Head(layout.experts + 1, per_expert=True)
        self.actor.start_small()

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
    def act(self, obs: Mapping[str, NDArray[Any]], mask: NDArray[Any]) -> NDArray[np.int64]:
        """The best legal action of every observation."""
        device = next(self.parameters()).device
        rows = torch.as_tensor(self.rows(obs), device=device).float()
        return self(rows, torch.as_tensor(mask, device=device))[0].argmax(-1).cpu().numpy()


class Branches:
    """Copies of the environments' states on which actions are tried."""

    def __init__(self, envs: gym.vector.VectorEnv, system: RoutingSystem, tries: int) -> None:
        """Make room for ``tries`` copies of every environment of a native vector environment."""
        self.envs: Any = envs.unwrapped
        self.tries, self.greedy = tries, PricedGreedy(system)
        problem = build_problem(view=kernel.GRAPH, **self.envs.problem.arguments)
        self.batch = RoutingBatch(problem, tries * self.envs.num_envs)

    def returns(
        self, actions: NDArray[np.int64], legal: NDArray[np.bool_], horizon_s: float
    ) -> NDArray[np.float32]:
        """Sum of the rewards of each action and of what `PricedGreedy` does after it.

        There is no discount: a score is paid when the request is let in and taken back when it ends
        late, and a discounted bill would make late answers look good.

        Args:
            actions: First actions (B, tries), of every environment in its present state.
            legal: Which of them to try (B, tries).
            horizon_s: No request that arrives so many seconds later is decided; a rollout also
                stops where its episode ends.

        Returns:
            (B, tries), NaN where not tried.
        """
        batch, legal = self.batch, legal.copy()
        for row in range(len(actions)):
            state = self.envs.clone_state(row)
            legal[row] &= not state.finished
            for k in np.flatnonzero(legal[row]):
                batch.restore(row * self.tries + int(k), state)
        live, every = legal.reshape(-1).astype(np.int8), np.arange(legal.size)
        total, choice = np.zeros(live.size), actions.reshape(-1).astype(np.int64)
        last = batch.arrivals.shape[1] - 1

        def now() -> NDArray[np.float64]:
            return batch.arrivals[every, np.minimum(batch.env["index"].astype(int), last)]

        end = now() + horizon_s
        while live.any():
            batch.step(choice, live)
            total += np.where(live > 0, batch.out[:, 0] + batch.out[:, 1], 0.0)
            live &= (batch.out[:, 2] == 0.0) & (now() < end)
            left = np.flatnonzero(live)
            seen = {key: value[left] for key, value in batch.observation.items()}
            choice[left] = self.greedy.act(seen, batch.action_mask[left])
        return np.where(legal, total.reshape(actions.shape), np.nan).astype(np.float32)


def choose_candidates(
    value: NDArray[np.floating[Any]], first: NDArray[np.int64], mask: NDArray[Any], args: Args,
    rng: np.random.Generator,
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:  # fmt: skip
    """Actions to try (B, candidates) and which of them are legal.

    The first is given, the others are drawn without replacement with probabilities that rise with
    their value (Gumbel top-k): what is surely worse is not tried, and the ridge keeps it there.
    """
    legal = np.asarray(mask) > 0
    key = np.where(legal, value / args.spread + rng.gumbel(size=value.shape), -np.inf)
    np.put_along_axis(key, first[:, None], np.inf, 1)
    chosen = np.argsort(-key, axis=1, kind="stable")[:, : args.candidates]
    return chosen, np.take_along_axis(legal, chosen, 1)


def fleet_load(layout: Layout, rows: NDArray[np.float16]) -> NDArray[np.float64]:
    """Outstanding requests per running slot of the whole fleet, (B,)."""
    expert = layout.expert(torch.as_tensor(rows, dtype=torch.float32)).double().numpy()
    return 3 * expert[..., 1:3].sum((1, 2)) / (layout.experts * layout.running)


def noise_weights(load: NDArray[np.float64], gain: NDArray[np.float32]) -> NDArray[np.float32]:
    """Weights of the labels (B,), mean 1: the inverse of their variance at such a load.

    The fates of two actions part the further the busier the fleet is; unweighted, labels from
    busy fleets would drown the small and certain differences on idle ones.
    """
    edges = np.quantile(load, np.linspace(0, 1, 11)[1:-1])
    place = np.searchsorted(edges, load, side="right")
    square = np.nan_to_num(gain).astype(np.float64) ** 2
    total, count = (
        np.bincount(place, x.sum(1), 10) for x in (square, np.isfinite(gain).astype(np.float64))
    )
    weight = 1 / ((total / np.maximum(count, 1))[place] + 0.02)
    return (weight / weight.mean()).astype(np.float32)


def fit(
    agent: Agent, rows: NDArray[np.float16], actions: NDArray[np.int8],
    returns: NDArray[np.float32], args: Args,
) -> dict[str, float]:  # fmt: skip
    """Regress differences of values on differences of returns, both to the first action.

    Returns:
        Weighted mean squared errors on the held-out labels, after the fit, of the heuristic's
        values, and of no difference at all.
    """
    device = next(agent.parameters()).device
    gain = returns[:, 1:] - returns[:, :1]
    weight = torch.as_tensor(noise_weights(fleet_load(agent.layout, rows), gain), device=device)
    there = torch.as_tensor(np.isfinite(gain), device=device)
    goal = torch.as_tensor(np.nan_to_num(gain), device=device)
    tried = torch.as_tensor(actions.astype(np.int64), device=device)
    cut = max(len(rows) - int(len(rows) * args.holdout), 1)

    def errors(index: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.as_tensor(rows[index.numpy()], device=device).float()
        i = index.to(device)
        value, added = agent(x, torch.ones((len(x), agent.layout.experts + 1), device=device))
        value = value.gather(1, tried[i])
        error = (value[:, 1:] - value[:, :1] - goal[i]).square() * there[i]
        added = added - added.gather(1, tried[i][:, :1])
        strange = torch.ones_like(added).scatter(1, tried[i], 0.0)
        return weight[i] * error.sum(1), weight[i] * (strange * added.square()).mean(1)

    @torch.no_grad()
    def held_out() -> float:
        parts = torch.arange(min(cut, len(rows) - 1), len(rows)).split(4096)
        return float(torch.cat([errors(part)[0] for part in parts]).mean())

    start = held_out()
    optimizer = torch.optim.AdamW(
        agent.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay
    )
    steps = args.epochs * -(-cut // args.batch_size)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(args.epochs):
        for index in torch.randperm(cut).split(args.batch_size):
            error, strange = errors(index)
            optimizer.zero_grad()
            (error.mean() + args.ridge * strange.mean()).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    nothing = (weight[:, None] * there * goal.square()).sum(1)[min(cut, len(rows) - 1) :]
    return {"losses/held_out": held_out(), "losses/held_out_heuristic": start,
            "losses/held_out_nothing": float(nothing.mean())}  # fmt: skip


def save_policy(agent: Agent, args: Args, path: Path) -> None:
    """Weights, arguments and layout in one safetensors file."""
    meta = {"args": json.dumps(asdict(args)), "layout": json.dumps(asdict(agent.layout))}
    write_checkpoint(agent, meta | {"agent": "rpi"}, path)


def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors)."""
    if args.candidates < 2 or args.skip < 1 or not args.horizon_s > 0:
        raise ValueError(f"candidates, skip and horizon_s: must be at least 2, 1 and above 0, got "
                         f"{args.candidates}, {args.skip} and {args.horizon_s}")  # fmt: skip
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    run = Path(args.out_dir) / (args.run_name or f"rpi_{args.encoder}_{args.seed}")
    run.mkdir(parents=True, exist_ok=True)
    envs, n = make_envs(args, args.num_envs), args.num_envs
    space = envs.single_observation_space
    if not isinstance(space, gym.spaces.Dict):
        raise ValueError(f"env_id: {args.env_id!r} has no Dict observation")
    system = RoutingSystem.from_env(envs)
    experts, running = space["running_mask"].sample().shape
    layout = Layout(experts, running, space["waiting_mask"].sample().shape[1], impact=True)
    agent = Agent(layout, args, system).to(device)
    greedy = PricedGreedy(system)

    obs, info = envs.reset(seed=args.seed)
    s: dict[str, Any] = {  # everything else that a resumed run needs
        "step": 0, "labels": 0, "best": -np.inf, "log_size": 0, "obs": obs, "fitted": False,
        "mask": info["action_mask"], "rows": [], "actions": [], "returns": [],
    }  # fmt: skip
    if args.resume and (run / "snapshot.pt").exists():
        saved = torch.load(run / "snapshot.pt", weights_only=False)
        agent.load_state_dict(saved["agent"])
        s, envs = saved["state"], pickle.loads(saved["envs"])
        torch.set_rng_state(saved["torch_rng"])
        rng.bit_generator.state = saved["rng"]
    log = RunLog(run, args, "rpi", s["labels"], s["log_size"])
    branches = Branches(envs, system, args.candidates)
    while s["labels"] < args.total_timesteps:
        first = greedy.act(s["obs"], s["mask"])
        action = agent.act(s["obs"], s["mask"]) if s["fitted"] else first
        before = s["labels"]
        if s["step"] % args.skip == args.skip - 1:
            rows = agent.rows(s["obs"])
            with torch.no_grad():
                x = torch.as_tensor(rows, device=device).float()
                value = agent(x, torch.as_tensor(s["mask"], device=device))[0].cpu().numpy()
            tries, legal = choose_candidates(value, first, s["mask"], args, rng)
            s["returns"].append(branches.returns(tries, legal, args.horizon_s))
            s["rows"].append(rows)
            s["actions"].append(tries.astype(np.int8))
            s["labels"] += n
            log.advance(s["labels"])
        chance = np.where(s["mask"] > 0, rng.random((n, experts + 1)), -1.0)
        action = np.where(rng.random(n) < args.explore, chance.argmax(-1), action)
        s["obs"], _, _, _, info = envs.step(action)
        s["mask"] = info["action_mask"]
        s["step"] += 1

        def crossed(every: int, before: int = before) -> bool:
            return every > 0 and s["labels"] // every > before // every

        last = s["labels"] >= args.total_timesteps
        if crossed(args.fit_every) or last:
            agent = Agent(layout, args, system).to(device)
            x, tries, y = (np.concatenate(s[key]) for key in ("rows", "actions", "returns"))
            metrics = fit(agent, x, tries, y, args)
            s["fitted"] = True
            result = validate(agent.act, args)
            log.say(s["labels"], result)
            log.write(s["labels"], {"charts/SPS": log.sps, "charts/decisions": n * s["step"]}
                      | metrics | result)  # fmt: skip
            if args.save_model:
                save_policy(agent, args, run / "last.safetensors")
                if result["eval/avg_qos"] > s["best"]:
                    save_policy(agent, args, run / "best.safetensors")
            s["best"] = max(s["best"], result["eval/avg_qos"])
        if crossed(args.checkpoint_every):
            s["log_size"] = log.size
            snapshot(run / "snapshot.pt", agent=agent.state_dict(), state=s,
                     envs=pickle.dumps(envs), rng=rng.bit_generator.state,
                     torch_rng=torch.get_rng_state())  # fmt: skip
    log.close()
    envs.close()
    return run


if __name__ == "__main__":
    train(tyro.cli(Args, config=(tyro.conf.FlagConversionOff,)))
