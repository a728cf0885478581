"""Rollout policy iteration with the simulator as its model: it copies the simulator to learn.

In some of the states that the router meets, a few actions are tried on copies of the simulator that
share their future; a router in the field has no such copies. A heuristic, later the policy itself,
decides the requests after them, and the difference of the rewards is a label with far less noise
than a return has. A network regresses on the labels; the policy takes the best action. That is
approximate policy iteration by rollouts (Lagoudakis, Parr, ICML 2003).

The network values one expert at a time and reads its latency law and the requirement L, so that one
set of weights takes any fleet and serves those that are like the ones it was trained on;
``--mixture`` trains on several together, ``--set fleet=random`` on drawn ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from servegym._checks import whole
from servegym._command_line import parse_settings
from servegym.agents.lib import checkpoint, environments
from servegym.agents.lib.arguments import Positive, RunArgs, Weight, run_agent
from servegym.agents.lib.checkpoint import CheckpointPolicy
from servegym.agents.lib.evaluation import evaluate_router
from servegym.agents.lib.parallel import SERIAL, Workers
from servegym.agents.lib.run_log import RunLog, interval_passed, saves_when_interrupted
from servegym.agents.lib.snapshots import restore_state, state_of
from servegym.baselines.llm_routing import features
from servegym.baselines.llm_routing.latency import LatencyModel
from servegym.baselines.llm_routing.rollout import (
    Rollouts,
    Values,
    choose_candidates,
    noise_weights,
)
from servegym.baselines.llm_routing.system import RoutingSystem

ENV_ID = "servegym/LLMRouting-v1"
Observation = Mapping[str, NDArray[Any]]

ENV = {
    "profiles": "edge-6-heterogeneous",
    "latency_requirement_s": 0.030,
    "rate": (3.0, 11.5),  # requests/s; each training episode draws its own
    "reward": "paid_forward",  # it alone pays for an action before the answer ends
    "episode_requests": 400,
}
"""Arguments of the training environment; ``--set`` changes them and adds others."""

WIDTH = 64  # of every hidden layer
LABEL_EVERY = 5  # decisions of every environment between two labelled states
EXPLORE = 0.15  # share of random legal actions between them
EPOCHS, BATCH_SIZE = 6, 256  # of a fit: passes over the labels, labels in a minibatch
LEARNING_RATE, WEIGHT_DECAY = 2e-3, 1e-4  # of AdamW; the first falls linearly to zero in a fit
HOLDOUT = 0.1  # share of the labels, the latest ones, that a fit leaves out and is measured on
EVAL_REQUESTS = 500  # per episode of an evaluation
OF_EXPERT = ("memory", "running", "waiting", "prompt", "score", "length", "distance")
READ = features.select((*OF_EXPERT, "gain", "harm"))
"""Features of an expert that are read, at the predicted lengths (`LatencyModel`)."""
LAWS = (0.02, 1e-4, 5e-6, 1e-3)  # scales of the coefficients of an expert's latency law
EXPERT = len(READ) + 1 + len(LAWS) + 2  # numbers of an expert, see `Agent.rows`


@dataclass
class Args(RunArgs):
    """Command line of the agent."""

    cuda: bool = False
    """run the networks on a GPU"""
    set: tuple[str, ...] = ()
    """environment arguments, key=value with a JSON value, as in rate=[5,5] num_experts=3"""
    mixture: tuple[str, ...] = ()
    """configurations to train on together, each further environment arguments besides those of
    --set, as in "profiles=paper-linear num_experts=3 rate=[1,6]"; none: that of --set alone"""
    total_timesteps: int = 200_000
    """states to label; each costs as many rollouts as `candidates`"""
    num_envs: int = 128
    """parallel environments, as many of each configuration"""
    candidates: int = 3
    """actions tried in a state: that of the rollouts' policy and likely ones"""
    spread: Positive = 0.1
    """temperature, in scores, at which the likely ones are drawn"""
    horizon_s: Positive = 8.0
    """length of a rollout, simulated seconds: about what the longest answer takes within L"""
    near: Weight = 0.0
    """loss, in scores, up to which all copies of a state take the same action"""
    improve_from: int = 0
    """labels after which rollouts follow the last fit in place of the heuristic (0: never)"""
    fit_every: int = 50_000
    """labels between two fits; each starts afresh on all of them, and its policy goes on"""
    ridge: Weight = 0.5
    """weight of the squares of what is added to actions that were not tried"""
    eval_episodes: int = 16
    """episodes per rate and evaluation on the validation split; the best policy is saved"""
    eval_rates: tuple[Positive, ...] = (3.0, 5.0, 8.0, 10.0)
    """arrival rates of the evaluation"""
    ray: str = ""
    """Ray cluster that plays the rollouts: auto, local or local:N; none if empty"""


def split(rows: Any, experts: int) -> tuple[Any, ...]:
    """The parts of `Agent.rows`; arrays or tensors.

    Returns:
        Arrived (B, 2), experts (B, N, 16), queued requests (B, N, S, 8), 1 where there is one
        (B, N, S).
    """
    at = 2 + EXPERT * experts
    slots = (rows.shape[1] - at) // (experts * (features.REQUEST + 1))
    masks = at + experts * slots * features.REQUEST
    expert = rows[:, 2:at].reshape(len(rows), experts, EXPERT)
    requests = rows[:, at:masks].reshape(len(rows), experts, slots, features.REQUEST)
    return rows[:, :2], expert, requests, rows[:, masks:].reshape(len(rows), experts, slots)


def of_experts(facts: features.Facts) -> NDArray[Any]:
    """Numbers (B, N, 16) of the experts.

    The features of `READ`; seconds of its time that the request takes; its law (Eq. 13 and 14);
    requests over the running slots; 1, as it exists.
    """
    law = facts.model.system.library.estimator[facts.placed.card] / LAWS
    load = (facts.running + facts.waiting) / facts.slots
    own = [facts.estimate.work_s[..., None], law, load[..., None], facts.exists[..., None]]
    return np.concatenate([features.of_experts(facts, READ), *own], -1) * facts.exists[..., None]


def priced_values(expert: Any) -> Any:
    """Value (B, N), in scores, that `PricedGreedy` gives to experts (B, N, 16).

    The new request's score if it is answered within L, less the scores it pushes over L and the
    price of the expert's time, which rises with the fourth power of the load; a drop is worth 0.
    """
    load, exists = expert[..., -2], expert[..., -1]
    fleet = load.sum(-1)[..., None] / exists.sum(-1)[..., None].clip(1)
    score, lost, work = expert[..., 7], expert[..., 8], expert[..., 9]
    return score - lost - ((load + fleet) / 2) ** 4 * work


def heuristic_values(model: LatencyModel, obs: Observation) -> NDArray[np.floating[Any]]:
    """`priced_values` of all actions (B, N + 1) for a batch of observations, of a drop first."""
    return np.pad(priced_values(of_experts(features.Facts(obs, model))), ((0, 0), (1, 0)))


class Sets(nn.Module):
    """One small network over every expert and the sums of its queue.

    An expert's input is the arrived request, its features and law, and mean and maximum of those
    of its queue.
    """

    def __init__(self) -> None:
        super().__init__()
        inputs = 2 + EXPERT - 2 + 2 * features.REQUEST
        self.each = nn.Sequential(
            nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()
        )
        self.all = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())

    def forward(self, rows: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Embed a batch of flat rows: all, the experts, and which of them there are (B, N, 1)."""
        arrived, expert, requests, mask = split(rows, experts)
        read, law = expert.split((len(READ) + 1, EXPERT - len(READ) - 1), -1)
        there = expert[..., -1:]
        mean = requests.sum(2) / mask.sum(2, keepdim=True).clamp(min=1)
        top = requests.masked_fill(mask[..., None] == 0, -2.0).amax(2)
        parts = [arrived[:, None].expand(-1, experts, 2), read, mean, top, law[..., :-2]]
        embedded = self.each(torch.cat(parts, -1)) * there
        return self.all(features.mean_over(embedded, there)), embedded, there


class Head(nn.Module):
    """One value per action (B, N+1): drop from MLP[h_r | mean h], expert n from MLP[h_r | h_n]."""

    def __init__(self) -> None:
        super().__init__()
        self.request = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
        self.by_request, self.by_expert = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 1)
        with torch.no_grad():  # what is added to the heuristic is small at first
            for linear in (self.request[2], self.out):
                for weight in linear.parameters():
                    weight.mul_(0.1 if weight.ndim > 1 else 0.0)  # no bias

    def forward(self, request: Tensor, experts: Tensor, there: Tensor) -> Tensor:
        """Embeddings -> (B, N+1); a value common to all actions is added (dueling)."""
        everyone = torch.cat([request, features.mean_over(experts, there)], -1)
        drop, common = self.request(everyone).split(1, -1)
        hidden = (self.by_request(request)[:, None] + self.by_expert(experts)).relu()
        return torch.cat([drop, self.out(hidden).squeeze(-1)], -1) + common


class Agent(nn.Module):
    """Values of the actions: the heuristic's, and what the network adds, little at first."""

    def __init__(self, system: RoutingSystem) -> None:
        super().__init__()
        self.encoder, self.actor = Sets(), Head()
        self.set_system(LatencyModel(system))

    def set_system(self, model: LatencyModel) -> None:
        """Serve the experts of a system: the weights are for any expert, whatever its law."""
        self.model = model

    def rows(self, obs: Observation) -> NDArray[np.float16]:
        """Flat rows (B, 2 + 16 N + 8 N S + N S) of a batch of observations, see `split`.

        Of the arrived request its prompt and L; of a queued one `features.REQUEST_FEATURES`.

        Raises:
            ValueError: If the number of experts is not that of the system.
        """
        facts = features.Facts(obs, self.model)
        limit, prompt = obs["latency_requirement"], facts.prompt.max(1)[:, None]
        there = np.concatenate([obs["running_mask"], obs["waiting_mask"]], 2)
        queued = np.stack([feature.of(facts) for feature in features.REQUEST_FEATURES], -1)
        parts = [of_experts(facts), queued * there[..., None], there]
        rows = [np.log1p(prompt) / 6, limit / 0.03, *(x.reshape(len(limit), -1) for x in parts)]
        return np.concatenate(rows, -1, dtype=np.float16, casting="unsafe")

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Values (B, N + 1) in scores, and what the network added to the heuristic's."""
        experts = self.model.system.num_experts
        added = self.actor(*self.encoder(rows, experts))
        priced = priced_values(split(rows, experts)[1])
        return added + F.pad(priced, (1, 0)), added  # a drop is worth 0

    @torch.no_grad()
    def values(self, obs: Observation) -> NDArray[np.float32]:
        """Values (B, N + 1) of the actions, legal or not."""
        rows = torch.as_tensor(self.rows(obs), device=self.actor.out.weight.device)
        return self(rows.float())[0].cpu().numpy()

    def act(self, obs: Observation, mask: NDArray[Any]) -> NDArray[np.int64]:
        """The best legal action of every observation."""
        return np.where(np.asarray(mask) > 0, self.values(obs), -np.inf).argmax(-1)


class Configuration:
    """One configuration of the environment: its systems as they stand, and the labels from them."""

    def __init__(self, args: Args, num_envs: int, seed: int, workers: Workers = SERIAL) -> None:
        self.args, self.env_kwargs = args, environments.routing_arguments(ENV, args.set)
        self.envs = environments.make_envs(ENV_ID, num_envs, **self.env_kwargs)
        self.model = LatencyModel(RoutingSystem.from_env(self.envs))
        self.heuristic: Values = partial(heuristic_values, self.model)
        self.rollouts = Rollouts(self.envs, workers if args.ray else None)
        self.obs, info = self.envs.reset(seed=environments.episode_seeds(seed, num_envs))
        self.mask = info["action_mask"]
        self.labels: list[tuple[NDArray[Any], ...]] = []

    def state_dict(self) -> dict[str, Any]:
        """The systems, the labels and the decisions of the rollouts, for a snapshot."""
        counts = {"decisions": self.rollouts.decisions}
        return counts | {"envs": state_of(self.envs), "labels": self.labels}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        self.rollouts.decisions, self.labels = state["decisions"], state["labels"]
        restore_state(self.envs, state["envs"])
        self.obs, self.mask = self.envs.unwrapped.observe()  # pyright: ignore

    def label(self, agent: Agent, improve: bool, rng: np.random.Generator) -> None:
        """Label the present states with the returns of some of their actions."""
        args, mask = self.args, self.mask
        value = agent.values(self.obs)
        rollout_values: Values = agent.values if improve else self.heuristic
        first = np.where(mask > 0, rollout_values(self.obs), -np.inf).argmax(1)
        tries, legal = choose_candidates(value, first, mask, args.candidates, args.spread, rng)
        returns = self.rollouts.returns(tries, legal, args.horizon_s, rollout_values, args.near)
        self.labels.append((agent.rows(self.obs), tries.astype(np.int8), returns))

    def step(self, values: Values, rng: np.random.Generator) -> None:
        """Take the actions of the highest values, now and then random ones."""
        action = np.where(self.mask > 0, values(self.obs), -np.inf).argmax(1)
        chance = np.where(self.mask > 0, rng.random(self.mask.shape), -1.0)
        action = np.where(rng.random(len(self.mask)) < EXPLORE, chance.argmax(-1), action)
        self.obs, _, _, _, info = self.envs.step(action)
        self.mask = info["action_mask"]


class Labels:
    """A configuration's labels as tensors: differences of returns to the first action's."""

    def __init__(self, source: Configuration, device: torch.device) -> None:
        self.model, self.device = source.model, device
        self.rows, tried, returns = (np.concatenate(x) for x in zip(*source.labels, strict=True))
        gain, experts = returns[:, 1:] - returns[:, :1], source.model.system.num_experts
        *_, slots, there = np.moveaxis(split(self.rows, experts)[1].astype(np.float64), -1, 0)
        load = slots.sum(1) / there.sum(1)  # requests per running slot of the whole fleet
        self.tried = torch.as_tensor(tried.astype(np.int64), device=device)
        self.weight = torch.as_tensor(noise_weights(load, gain), device=device)
        self.valid = torch.as_tensor(np.isfinite(gain), device=device)
        self.gain = torch.as_tensor(np.nan_to_num(gain), device=device)
        self.train = max(int(len(gain) * (1 - HOLDOUT)), 1)  # labels to fit, the earliest

    def errors(self, agent: Agent, index: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted squared errors (K,) of some labels, and squares added to untried actions."""
        agent.set_system(self.model)
        i = index.to(self.device)
        rows = torch.as_tensor(self.rows[index.numpy()], device=self.device).float()
        value, added = agent(rows)
        value = value.gather(1, self.tried[i])
        error = (value[:, 1:] - value[:, :1] - self.gain[i]).square() * self.valid[i]
        added = added - added.gather(1, self.tried[i][:, :1])
        untried = torch.ones_like(added).scatter(1, self.tried[i], 0.0)
        weight = self.weight[i]
        return weight * error.sum(1), weight * (untried * added.square()).mean(1)

    def held_out(self) -> tuple[Tensor, ...]:
        """Indexes of the labels that a fit leaves out, in parts."""
        return torch.arange(min(self.train, len(self.rows) - 1), len(self.rows)).split(4096)


def fit(agent: Agent, sources: Sequence[Configuration], args: Args) -> dict[str, float]:
    """Regress differences of values on differences of returns, both to the first action.

    Returns weighted mean squared errors on the held-out labels, after the fit, of the heuristic's
    values, and of no difference at all. A minibatch is of one configuration.
    """
    device = agent.actor.out.weight.device
    every = [Labels(source, device) for source in sources]

    @torch.no_grad()
    def held_out() -> float:
        errors = [one.errors(agent, part)[0] for one in every for part in one.held_out()]
        return float(torch.cat(errors).mean())

    start = held_out()
    optimizer = torch.optim.AdamW(agent.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    steps = EPOCHS * sum(-(-one.train // BATCH_SIZE) for one in every)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(EPOCHS):
        batches = [(one, x) for one in every for x in torch.randperm(one.train).split(BATCH_SIZE)]
        for k in torch.randperm(len(batches)).tolist():
            error, untried = batches[k][0].errors(agent, batches[k][1])
            optimizer.zero_grad()
            (error.mean() + args.ridge * untried.mean()).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    squares = [(x.weight[:, None] * x.valid * x.gain.square()).sum(1) for x in every]
    nothing = [of[part] for of, x in zip(squares, every, strict=True) for part in x.held_out()]
    metrics = {"losses/held_out": held_out(), "losses/held_out_heuristic": start}
    return metrics | {"losses/held_out_nothing": float(torch.cat(nothing).mean())}


def evaluate(agent: Agent, sources: Sequence[Configuration], args: Args) -> dict[str, float]:
    """`evaluate_router` in every configuration, and means over them."""
    results = []
    for source in sources:
        agent.set_system(source.model)
        numbers = (args.eval_rates, args.eval_episodes, EVAL_REQUESTS)
        results.append(evaluate_router(agent.act, ENV_ID, source.env_kwargs, *numbers))
    if len(sources) == 1:
        return results[0]
    means = {k: float(np.mean([r[k] for r in results])) for k in results[0] if "qos" in k}
    each = {f"eval/avg_qos_point_{k}": r["eval/avg_qos"] for k, r in enumerate(results)}
    return each | means


def load(meta: Mapping[str, str], weights: Mapping[str, Tensor], system: Any) -> CheckpointPolicy:
    """The policy of a checkpoint, see `servegym.agents.lib.checkpoint`."""
    args = checkpoint.saved_args(Args, checkpoint.json_field(meta, "args"))
    env_kwargs = environments.routing_arguments(ENV, args.set)
    env_kwargs.pop("max_episode_steps", None)  # truncates the training alone
    agent = Agent(system or RoutingSystem.from_kwargs(**env_kwargs))
    agent.load_state_dict(weights)
    return CheckpointPolicy("rpi", "graph", args, agent, agent.act, env_kwargs)


@saves_when_interrupted
def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors)."""
    whole("candidates", args.candidates, 2)
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    # What a configuration says of an argument counts before what --set says of it.
    common = parse_settings(args.set)
    each = [common | parse_settings(item.split()) for item in args.mixture] or [common]
    sets = [tuple(f"{key}={json.dumps(v)}" for key, v in settings.items()) for settings in each]
    mixture = [replace(args, set=settings) for settings in sets]
    n = max(args.num_envs // len(mixture), 1)
    workers = Workers(ray=args.ray or None)
    seeds = [args.seed + 1000 * k for k in range(len(mixture))]
    sources = [Configuration(part, n, s, workers) for part, s in zip(mixture, seeds, strict=True)]

    first_system = sources[0].model.system
    agent = Agent(first_system).to(device)
    log = RunLog(args, "rpi", ENV_ID, sources[0].env_kwargs)
    meta = {"agent": "rpi", "args": json.dumps(asdict(args))}
    log.save = lambda path: checkpoint.write_checkpoint(agent, meta, path)
    parts = {"agent": agent, "rng": rng} | {str(k): each for k, each in enumerate(sources)}
    step, labels, best, fitted = log.restore(parts, (0, 0, -np.inf, False))
    while True:
        log.snapshot(labels, parts | {"agent": agent}, (step, labels, best, fitted))
        if labels >= args.total_timesteps:
            break
        before = labels
        improve = fitted and 0 < args.improve_from <= before
        for source in sources:
            agent.set_system(source.model)
            if step % LABEL_EVERY == LABEL_EVERY - 1:
                source.label(agent, improve, rng)
                labels += n
                log.advance(labels)
            source.step(agent.values if fitted else source.heuristic, rng)
        step += 1
        if interval_passed(args.fit_every, before, labels) or labels >= args.total_timesteps:
            fresh = Agent(first_system).to(device)
            metrics = fit(fresh, sources, args)
            agent, fitted = fresh, True
            result = evaluate(agent, sources, args)
            log.say_qos(labels, result)
            decisions = n * len(sources) * step + sum(one.rollouts.decisions for one in sources)
            metrics |= {"charts/SPS": log.sps, "charts/decisions": decisions}
            log.write(labels, metrics | result)
            agent.set_system(sources[0].model)
            score = result["eval/avg_qos"]
            best = checkpoint.save_best_and_last(log.save, args, log.run, score, best)
    workers.close()
    for source in sources:
        source.envs.close()
    return log.run


if __name__ == "__main__":
    run_agent(train, Args)
