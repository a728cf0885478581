"""Cross-entropy method for a linear router: the simplest strong opponent, and the first to train.

The router takes the legal action of the largest linear score. Its weights are searched for
directly: candidates are drawn from a normal distribution, all of a generation play the same
episodes, and the distribution moves to the best of them (Rubinstein, 1999). There is no gradient,
value or credit assignment, so that what a learner falls short of is a matter of its learning. What
the scores read and where episodes come from: `OneFleet`, with ``--set fleet=random`` `DrawnFleets`,
and for ``servegym/PrefixRouting-v1`` `DrawnSettings`.

Neighbour: `sac_rows` learns a network over Eq. 7 with soft actor-critic.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from servegym._checks import whole
from servegym._command_line import parse_settings
from servegym.agents.lib import checkpoint
from servegym.agents.lib.arguments import RunArgs, Threads, run_agent
from servegym.agents.lib.checkpoint import CheckpointPolicy
from servegym.agents.lib.parallel import Workers
from servegym.agents.lib.run_log import RunLog, interval_passed, saves_when_interrupted
from servegym.baselines.llm_routing import features
from servegym.baselines.llm_routing.latency import ExpectedQos
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.prefix_routing import features as prefix_features
from servegym.baselines.prefix_routing.drawn_settings import problem_of, setting_of
from servegym.baselines.prefix_routing.system import PrefixSystem
from servegym.baselines.protocol import VALIDATION
from servegym.envs.llm_routing.config import build_problem, setting_problem
from servegym.envs.llm_routing.core import RoutingBatch
from servegym.envs.llm_routing.kernel import layout
from servegym.envs.prefix_routing.core import PrefixBatch

Floats = NDArray[np.float32]
Scores = Callable[[Floats, Any], Floats]  # (B, A) from weights (B, K) and observations

ROUTING_ID, PREFIX_ID = "servegym/LLMRouting-v1", "servegym/PrefixRouting-v1"
ELITE = 0.2  # share of a generation that the distribution moves to ...
STEP = 0.7  # ... and how far it moves there
WIDENED_UNTIL = 0.6  # share of the search in which the distribution is widened, ever less
EVAL_REQUESTS = 500  # of an episode of the validation on fleets
EQ_7 = features.select(("memory", "running", "waiting"))
"""What the router of one fleet reads of an expert."""
INDEX = {"gain": 10, "harm": 10, "score": 2.5, "length": 1, "distance": 4, "work": 3, "held": 3}
INDEX |= {"memory": 1.5, "outstanding": 3, "queued": 3, "left_running": 3, "left_waiting": 3}
INDEX |= {"slack": 1, "batch": 1, "share": 1}
"""Features of an expert that the index of drawn fleets reads, and the units in which it does."""
READ = [*features.select(INDEX), features.CHARGE]
UNITS = np.array([*INDEX.values(), 10], np.float32)
FLEET = features.select(("load", "rate_32"), features.ARRIVED_FEATURES)
"""What it reads of the fleet."""
NAMED = {name: (3.0, 11.5) for name in ("edge-6-heterogeneous", "edge-6-homogeneous")}
NAMED |= {"paper-linear": (1.0, 6.0)}
"""Fleets that are met beside the drawn ones -> lowest and highest rate, requests/s."""


@dataclass
class Args(RunArgs):
    """Command line of the agent; 0 means what is usual for one fleet, drawn fleets or settings."""

    env_id: Literal["servegym/LLMRouting-v1", "servegym/PrefixRouting-v1"] = ROUTING_ID
    """environment to search a router for"""
    set: tuple[str, ...] = ()
    """environment arguments, key=value with a JSON value, as in rate=[5,5] num_experts=3"""
    total_timesteps: int = 0
    """decisions of all candidates (12,000,000, 3,840,000, 16,000,000)"""
    population: int = 0
    """candidates in a generation (64, 40, 40)"""
    worlds: int = 0
    """drawn fleets or settings of the training; one fleet is the same in all of them (8, 64, 63)"""
    episodes: int = 0
    """worlds that a generation plays, an episode each (8, 16, 9)"""
    eval_every: int = 0
    """decisions between evaluations; the best mean is saved (1,200,000, 960,000, 2,000,000)"""
    eval_worlds: int = 0
    """fleets or settings of the validation, on the validation split (3, 24, 14)"""
    eval_episodes: int = 0
    """episodes of each of them (8, 4, 4)"""
    workers: Threads = 1
    """processes that play episodes; the result is the same for every number"""
    ray: str = ""
    """Ray cluster that plays them in their place: auto, local or local:N; none if empty"""


class Task:
    """What a router is searched for: where it plays and what it reads."""

    name: str
    defaults: dict[str, int]  # of the numbers in `Args` that are 0
    spread: float  # standard deviation of every weight at first
    widened: float  # standard deviation that each generation adds at first
    logged = "charts/avg_qos", "eval/avg_qos"
    Batch: Any = RoutingBatch
    System: Any = RoutingSystem

    def __init__(self, settings: Mapping[str, Any]) -> None:
        if {"reward", "split"} & set(settings):
            raise ValueError("set: not with reward or split: it pays QoS on the train split")
        self.env_kwargs = dict(settings)

    def problem(self, stream: int) -> Any:
        """The problem of a number; from `VALIDATION` on with the validation split."""
        raise NotImplementedError

    def first_weights(self, system: Any) -> NDArray[np.float64]:
        """The weights (K,) that the search begins with."""
        raise NotImplementedError

    def scores(self, system: Any) -> Scores:
        """Linear scores of a system's actions."""
        raise NotImplementedError


def of_split(stream: int, env_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a routing problem with the split and the requests of a stream."""
    split = {"split": "val", "episode_requests": EVAL_REQUESTS} if stream >= VALIDATION else {}
    arguments = {k: v for k, v in env_kwargs.items() if k not in ("fleet", "fleet_kwargs")}
    return arguments | {"reward": "completed_qos"} | split


class OneFleet(Task):
    """One fleet, whose experts have weights of their own.

    They read what the paper's Baseline RL sees (Eq. 7: memory, running and waiting requests).
    """

    name, spread, widened = "direct_search", 1.0, 0.06
    defaults = {"total_timesteps": 12_000_000, "population": 64, "worlds": 8, "episodes": 8}
    defaults |= {"eval_every": 1_200_000, "eval_worlds": 3, "eval_episodes": 8}

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.env_kwargs = {
            "profiles": "edge-6-heterogeneous",
            "latency_requirement_s": 0.030,
            "rate": (4.0, 11.0),  # requests/s; each training episode draws its own
            "reward": "completed_qos",
            "episode_requests": 500,
        } | self.env_kwargs

    def problem(self, stream: int) -> Any:
        """See `Task`."""
        return build_problem(view=layout.GRAPH, **of_split(stream, self.env_kwargs))

    def first_weights(self, system: Any) -> NDArray[np.float64]:
        """See `Task`."""
        return np.zeros(3 * system.num_experts + 2)

    def scores(self, system: Any) -> Scores:
        """See `Task`."""
        model = ExpectedQos(system)

        def of(weights: Floats, obs: Any) -> Floats:
            load = features.of_experts(features.Facts(obs, model), EQ_7).astype(np.float32)
            each = weights[:, : 3 * load.shape[1]].reshape(load.shape)
            linear = each[..., 0] + (each[..., 1:] * load[..., 1:]).sum(-1)
            linear = linear + weights[:, -2, None] * load[..., 0]
            return np.concatenate([weights[:, -1:], linear], -1)

        return of


class DrawnFleets(Task):
    """Any fleet, now and then a named one, whose experts are valued by the same index.

    It reads features of the table and what `expected_qos` charges for an expert's time; it is that
    rule at first.
    """

    name, spread, widened = "fleet_search", 0.2, 0.02
    defaults = {"total_timesteps": 3_840_000, "population": 40, "worlds": 64, "episodes": 16}
    defaults |= {"eval_every": 960_000, "eval_worlds": 24, "eval_episodes": 4}

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        options = settings.get("fleet_kwargs")
        self.source: Any = build_problem(
            view=layout.GRAPH, fleet="random", fleet_kwargs=options
        ).fleets

    def problem(self, stream: int) -> Any:
        """See `Task`."""
        rng = np.random.default_rng([7, stream])
        arguments = of_split(stream, {"episode_requests": 300} | self.env_kwargs)
        if stream < VALIDATION and stream % 10 == 0:
            name = sorted(NAMED)[stream // 10 % len(NAMED)]
            arguments |= {"profiles": name, "rate": float(rng.uniform(*NAMED[name]))}
            return build_problem(view=layout.GRAPH, **arguments)
        return setting_problem(self.source.draw(rng), view=layout.GRAPH, **arguments)

    def first_weights(self, system: Any) -> NDArray[np.float64]:
        """See `Task`; those of `expected_qos`."""
        weights, names = np.zeros(2 * len(READ) + 3), [feature.name for feature in READ]
        for name, sign in {"gain": 1.0, "harm": -1.0, "charge": -1.0}.items():
            weights[names.index(name)] = sign
        return weights

    def scores(self, system: Any) -> Scores:
        """See `Task`.

        Weights: of the features and the charge; of the same times the fleet's load; of the drop a
        constant, of that load and of the rate of the last 32 arrivals.
        """
        model = ExpectedQos(system)

        def of(weights: Floats, obs: Any) -> Floats:
            facts = features.Facts(obs, model)
            x = features.of_experts(facts, READ).astype(np.float32) * UNITS
            load, rate = (feature.of(facts).astype(np.float32) for feature in FLEET)
            load = 1.5 * load - 1.25
            index = weights[:, : len(READ)] + weights[:, len(READ) : -3] * load[:, None]
            drop: Any = 5 * weights[:, -3] + 2 * load * weights[:, -2] + rate * weights[:, -1]
            return np.concatenate([drop[:, None], np.einsum("bnk,bk->bn", x, index)], -1)

        return of


class DrawnSettings(Task):
    """Any replicas that cache prefixes, valued by the same index, at rates near their capacity."""

    name, spread, widened = "prefix_search", 0.4, 0.03
    logged = "charts/attainment", "eval/attainment"
    defaults = {"total_timesteps": 16_000_000, "population": 40, "worlds": 63, "episodes": 9}
    defaults |= {"eval_every": 2_000_000, "eval_worlds": 14, "eval_episodes": 4}
    Batch, System = PrefixBatch, PrefixSystem

    def problem(self, stream: int) -> Any:
        """See `Task`."""
        return problem_of(setting_of(stream), **self.env_kwargs)

    def first_weights(self, system: Any) -> NDArray[np.float64]:
        """See `Task`."""
        return prefix_features.first_weights()

    def scores(self, system: Any) -> Scores:
        """See `Task`."""
        return partial(prefix_features.index_values, block_size=system.block_size)


@lru_cache(maxsize=8)
def task_of(env_id: str, settings: tuple[str, ...]) -> Task:
    """The task of an environment and its arguments."""
    arguments = parse_settings(settings)
    if env_id == PREFIX_ID:
        return DrawnSettings(arguments)
    return DrawnFleets(arguments) if arguments.get("fleet") == "random" else OneFleet(arguments)


@lru_cache(maxsize=128)
def world(env_id: str, settings: tuple[str, ...], stream: int) -> tuple[Any, Scores]:
    """A drawn problem of a task, and the scores of its actions."""
    task = task_of(env_id, settings)
    problem = task.problem(stream)
    return problem, task.scores(task.System.from_problem(problem))


def choose(scores: Floats, mask: NDArray[Any]) -> NDArray[np.int64]:
    """The legal action of the largest score; one without a score, a rejection, comes last."""
    every = np.full(mask.shape, -1e30, scores.dtype)
    every[:, : scores.shape[1]] = scores
    return np.where(np.asarray(mask) > 0, every, -np.inf).argmax(-1)


def play(
    population: Floats, env_id: str, settings: tuple[str, ...], stream: int, seeds: list[int]
) -> tuple[NDArray[np.float64], int]:
    """What weights (P, K) are paid (P, E) in a world's episodes of E seeds, and the decisions."""
    problem, scores = world(env_id, settings, stream)
    count, rows = len(seeds), len(seeds) * len(population)
    task = task_of(env_id, settings)
    batch = task.Batch(problem, rows)
    for row, seed in enumerate(seeds):
        batch.draw(row, np.random.default_rng([seed, stream]))
    batch.begin((np.arange(rows) < count).astype(np.int8))
    states = [batch.clone(row) for row in range(count)]
    for row in range(count, rows):  # all candidates begin alike
        batch.restore(row, states[row % count])
    weights, every = population.repeat(count, 0), np.ones(rows, np.int8)
    paid, ended = np.zeros(rows), 0
    while not ended:
        action = choose(scores(weights, batch.observation), batch.action_mask)
        ended = batch.step(action, every)
        paid += batch.out[:, :-1].sum(1)
    requests = problem.arguments.episode_requests
    return paid.reshape(len(population), count) / requests, rows * requests


def fitness(paid: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fitness (P,) of candidates from what they are paid (P, E) in the same episodes.

    Candidates differ ten times as much in an episode under heavy load as in one under light load.
    The root of that spread divides the differences, so that both have a say.
    """
    return ((paid - paid.mean(0)) / (paid.std(0) + 1e-3) ** 0.5).mean(1)


class Agent(nn.Module):
    """The weights (K,) of one linear router."""

    weights: Tensor

    def __init__(self, weights: NDArray[np.float64], fixed_experts: bool) -> None:
        super().__init__()
        self.fixed_experts = fixed_experts
        self.register_buffer("weights", torch.as_tensor(weights, dtype=torch.float32))


def load(meta: Mapping[str, str], weights: Mapping[str, Tensor], system: Any) -> CheckpointPolicy:
    """The policy of a checkpoint, see `servegym.agents.lib.checkpoint`."""
    args = checkpoint.saved_args(Args, checkpoint.json_field(meta, "args"))
    task = task_of(args.env_id, args.set)
    system = system or task.System.from_kwargs(**task.env_kwargs)
    fixed = isinstance(task, OneFleet)
    first = task.first_weights(system)
    if fixed and len(weights["weights"]) != len(first):
        experts = (len(weights["weights"]) - 2) // 3
        raise ValueError(f"made for {experts} experts, got {system.num_experts}")
    agent = Agent(first, fixed)
    agent.load_state_dict(weights)
    scores = task.scores(system)

    def act(observation: Any, action_mask: NDArray[Any]) -> NDArray[np.int64]:
        repeated = agent.weights.numpy()[None].repeat(len(action_mask), 0)
        return choose(scores(repeated, observation), action_mask)

    return CheckpointPolicy(task.name, "graph", args, agent, act, task.env_kwargs)


def complete(args: Args, task: Task) -> Args:
    """The arguments with the usual numbers where they are 0."""
    args = replace(args, **{k: getattr(args, k) or usual for k, usual in task.defaults.items()})
    for name in task.defaults:
        whole(name, getattr(args, name), int(2 / ELITE) if name == "population" else 1)
    if args.episodes > args.worlds:
        raise ValueError(f"episodes is {args.episodes}; allowed is up to worlds, {args.worlds}")
    return args


@saves_when_interrupted
def train(args: Args) -> Path:
    """Search and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors)."""
    task = task_of(args.env_id, args.set)
    args = complete(args, task)
    size, total = args.population, args.total_timesteps
    torch.set_num_threads(args.torch_threads)
    workers = Workers(args.workers, args.ray or None)
    mean = task.first_weights(task.System.from_kwargs(**task.env_kwargs))
    agent = Agent(mean, isinstance(task, OneFleet))
    spread, step, best = np.full_like(mean, task.spread), 0, -np.inf
    rng = np.random.default_rng([args.seed, 5])
    log, where = RunLog(args, task.name, args.env_id, task.env_kwargs), (args.env_id, args.set)
    meta = {"agent": "cem", "args": json.dumps(asdict(args))}
    write = log.save = partial(checkpoint.write_checkpoint, agent, meta)
    parts = {"agent": agent, "rng": rng}
    mean, spread, step, best = log.restore(parts, (mean, spread, step, best))
    while True:
        log.snapshot(step, parts, (mean, spread, step, best))
        if step >= total:
            break
        # Draw, play the same episodes, and move to the best.
        drawn = mean + spread * rng.standard_normal((size, len(mean)))
        streams = rng.choice(args.worlds, args.episodes, replace=False)
        seed, candidates = int(rng.integers(1 << 31)), drawn.astype(np.float32)
        jobs = [(candidates, *where, int(stream), [seed]) for stream in streams]
        each, before = np.zeros((size, args.episodes)), step
        for at, (paid, decisions) in workers(play, jobs):
            each[:, at], step = paid[:, 0], step + decisions
        elite = drawn[np.argsort(-fitness(each))[: int(size * ELITE)]]
        mean = mean + STEP * (elite.mean(0) - mean)
        agent.weights.copy_(torch.as_tensor(mean))
        widened = max(0.0, 1 - before / total / WIDENED_UNTIL)
        spread = spread + STEP * (elite.std(0) - spread) + task.widened * widened

        # Log, evaluate and save.
        metrics = {"charts/SPS": log.advance(step), "charts/spread": float(spread.mean())}
        metrics[task.logged[0]] = float(each.mean())
        if interval_passed(args.eval_every, before, step) or step >= total:
            one, seeds = mean[None].astype(np.float32), list(range(args.eval_episodes))
            streams = [VALIDATION + k for k in range(args.eval_worlds)]
            jobs = [(one, *where, stream, seeds) for stream in streams]
            means = {at: paid.mean() for at, (paid, _) in workers(play, jobs)}
            metrics[task.logged[1]] = score = float(np.mean([means[k] for k in sorted(means)]))
            log.say_score(step, task.logged[1].partition("/")[2], score)
            best = checkpoint.save_best_and_last(write, args, log.run, score, best)
        log.write(step, metrics)
    workers.close()
    return log.run


if __name__ == "__main__":
    run_agent(train, Args)
