"""One router for any fleet: a linear index, searched for on drawn fleets.

The router values one expert at a time by a linear index and takes the best (`direct_search` does so
for one fleet). What it reads of an expert is scaled by what the fleet can do: a load is counted in
batches that the expert serves within L, a request's work in shares of what the expert then serves
(`servegym.agents.lib.fleet_features`), so that the same weights mean the same on two cards and on
sixteen. The weights are found by the cross-entropy method; all candidates of a generation play the
same episodes of the same drawn fleets.

``--workers`` plays the fleets in as many processes, ``--ray`` on a Ray cluster; the result is the
same.
``python agents/fleet_search.py --help`` lists the options.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from torch import Tensor, nn

from servegym.agents.lib import checkpoint
from servegym.agents.lib.arguments import RunArgs
from servegym.agents.lib.checkpoint import CheckpointPolicy
from servegym.agents.lib.cross_entropy import ELITE, STEP, fitness
from servegym.agents.lib.fleet_features import INDEX, Fleet
from servegym.agents.lib.parallel import open_pool, run_jobs
from servegym.agents.lib.run_log import RunLog, interval_passed
from servegym.agents.lib.snapshots import load_snapshot, save_snapshot
from servegym.baselines.llm_routing.fleets import FleetSystem, PerFleet
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.protocol import BasePolicy
from servegym.envs.llm_routing import kernel
from servegym.envs.llm_routing.config import Problem, build_problem, setting_problem
from servegym.envs.llm_routing.core import RoutingBatch

Observation = Mapping[str, NDArray[Any]]
Floats = NDArray[np.float32]

SIZE = 2 * INDEX + 3  # weights of the index
SPREAD = 0.5  # standard deviation of every weight at first
WIDENED = 0.04  # standard deviation added each generation at first, falling to 0 ...
WIDENED_UNTIL = 0.6  # ... at this share of the search
TURN = 4  # a generation plays one in so many of the fleets
EVAL_REQUESTS = 500  # of an episode of the validation
VALIDATION = 1_000_000  # where the streams of the validation fleets begin
NAMED = ("edge-6-heterogeneous", "paper-linear", "edge-6-homogeneous")
NAMED_EVERY = 10  # of so many training fleets one is a named one, at a drawn rate


@dataclass
class Args(RunArgs):
    """Command line of the agent."""

    total_timesteps: int = 7_680_000
    """simulated decisions of all candidates"""
    population: int = 40
    """candidates of a generation"""
    fleets: int = 64
    """drawn fleets, a quarter of them played in each generation"""
    requests: int = 300
    """requests of an episode; a candidate plays one episode on each of the generation's fleets"""
    eval_every: int = 1_920_000
    """decisions between evaluations on the validation fleets; the best index there is saved"""
    eval_fleets: int = 24
    """fleets of the validation, with validation prompts"""
    eval_episodes: int = 4
    """episodes a fleet of the validation"""
    fleet_kwargs: str = "{}"
    """what to draw the fleets from, JSON, as the environment's argument of that name"""
    workers: int = 1
    """processes that play fleets; the result is the same for every number"""
    ray: str = ""
    """Ray cluster that plays fleets in their place: auto, local or local:N; none if empty"""
    resume: bool = False
    """continue from the last generation in the run's folder"""


def index_values(weights: Floats, experts: Floats, context: Floats) -> Floats:
    """Values (B, N + 1) in scores of the linear index, of a drop first.

    Args:
        weights: (B, 2 x 24 + 3): of the features, of the features times the fleet's load; of the
            drop a constant and weights of that load and of the recent arrivals.
        experts: (B, N, 24).
        context: (B, 8).
    """
    load = context[:, 0] / 2
    own = weights[:, :INDEX] + weights[:, INDEX : 2 * INDEX] * load[:, None]
    linear = np.einsum("bnk,bk->bn", experts, own)
    drop = weights[:, -3] * 5 + weights[:, -2] * 2 * load + weights[:, -1] * context[:, 1]
    scale = 10 * np.maximum(np.abs(weights[:, :1]), 0.05)
    values = np.concatenate([drop[:, None] - 6.5 * weights[:, :1], linear], -1) / scale
    return values.astype(np.float32)


def first_weights() -> NDArray[np.float64]:
    """The index that the search starts from: expected QoS, and a price of the work under load."""
    weights = np.zeros(SIZE)
    weights[0], weights[1], weights[11] = 1.0, -1.0, -1.0
    return weights


class Agent(nn.Module):
    """The weights of the index."""

    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.as_tensor(first_weights(), dtype=torch.float32))

    def values(self, fleet: Fleet, seen: Observation) -> Floats:
        """Values (B, N + 1) in scores of the actions, legal or not."""
        experts, context = fleet.features(seen)
        return index_values(self.weights.numpy()[None].repeat(len(experts), 0), experts, context)


class OfSystem(BasePolicy):
    """The router of one system."""

    name, env_view = "fleet_search", "graph"

    def __init__(self, system: RoutingSystem, agent: Agent) -> None:
        self.fleet, self.agent = Fleet(system), agent

    def act(self, observation: Observation, action_mask: NDArray[Any]) -> NDArray[np.int64]:
        """The best legal action of every observation."""
        values = self.agent.values(self.fleet, observation)
        return np.where(np.asarray(action_mask) > 0, values, -np.inf).argmax(-1)


def draw_fleet(stream: int, fleet_kwargs: str) -> dict[str, Any]:
    """What `problem_of` takes: a drawn setting, or now and then a named fleet at a drawn rate."""
    rng = np.random.default_rng([7, stream])
    if stream < VALIDATION and stream % NAMED_EVERY == 0:
        name = NAMED[stream // NAMED_EVERY % len(NAMED)]
        low, high = (1.0, 6.0) if name == "paper-linear" else (3.0, 11.5)
        return {"profiles": name, "rate": float(rng.uniform(low, high))}
    return {"setting": _source(fleet_kwargs).draw(rng)}


@lru_cache(maxsize=4)
def _source(fleet_kwargs: str) -> Any:
    options = json.loads(fleet_kwargs) or None
    return build_problem(view=kernel.GRAPH, fleet="random", fleet_kwargs=options).fleets


def problem_of(drawn: Mapping[str, Any], **arguments: Any) -> Problem:
    """The problem of a fleet of `draw_fleet`."""
    arguments["view"] = kernel.GRAPH
    if "setting" in drawn:
        return setting_problem(drawn["setting"], **arguments)
    return build_problem(**drawn, **arguments)


@lru_cache(maxsize=128)
def _stage(stream: int, fleet_kwargs: str, rows: int, requests: int, split: str) -> Any:
    """Systems of a fleet in which candidates play, and the fleet."""
    arguments = {"split": split, "reward": "completed_qos", "episode_requests": requests}
    problem = problem_of(draw_fleet(stream, fleet_kwargs), **arguments)
    return RoutingBatch(problem, rows), Fleet(RoutingSystem.from_problem(problem))


def play(
    population: Floats, stream: int, fleet_kwargs: str, seed: int, requests: int
) -> NDArray[np.float64]:
    """Average QoS (P,) of indexes (P, K) in the same episode of a fleet."""
    batch, fleet = _stage(stream, fleet_kwargs, len(population), requests, "train")
    for row in range(len(population)):
        batch.draw(row, np.random.default_rng([seed, stream]))
    return _played(population, batch, fleet)


def _played(population: Floats, batch: RoutingBatch, fleet: Fleet) -> NDArray[np.float64]:
    """Average QoS (B,) of an index (B, K) a row in the drawn episodes of a batch."""
    every = np.ones(len(population), dtype=np.int8)
    batch.begin(every)
    total, requests = np.zeros(len(population)), batch.problem.episode_requests
    for _ in range(requests):
        values = index_values(population, *fleet.features(batch.observation))
        action = np.where(batch.action_mask > 0, values, -np.inf).argmax(-1)
        batch.step(action, every)
        total += batch.out[:, 0] + batch.out[:, 1]
    return total / requests


def measure(weights: Floats, stream: int, fleet_kwargs: str, episodes: int) -> float:
    """Average QoS of an index (K,) in validation episodes of a fleet, the same each time."""
    batch, fleet = _stage(stream, fleet_kwargs, episodes, EVAL_REQUESTS, "val")
    for row in range(episodes):
        batch.draw(row, np.random.default_rng([99, stream, row]))
    return float(_played(weights[None].repeat(episodes, 0), batch, fleet).mean())


def evaluate(weights: NDArray[np.float64], args: Args, pool: Any) -> dict[str, float]:
    """Average QoS on the validation fleets, and the mean over them."""
    streams = [VALIDATION + k for k in range(args.eval_fleets)]
    given = args.fleet_kwargs, args.eval_episodes
    jobs = [(weights.astype(np.float32), stream, *given) for stream in streams]
    found = dict(run_jobs(measure, jobs, pool))
    each = {f"eval/qos_fleet_{k}": found[k] for k in range(len(jobs))}
    return {"eval/avg_qos": float(np.mean([found[k] for k in range(len(jobs))]))} | each


def save_policy(agent: Agent, args: Args, path: Path) -> None:
    """Weights and arguments in one safetensors file."""
    meta = {"agent": "fleet_search", "args": json.dumps(asdict(args))}
    checkpoint.write_checkpoint(agent, meta, path)


def load(meta: Mapping[str, str], weights: Mapping[str, Tensor], system: Any) -> CheckpointPolicy:
    """The policy of a checkpoint, see `servegym.agents.lib.checkpoint`."""
    args = checkpoint.saved_args(Args, checkpoint.json_field(meta, "args"))
    agent = Agent()
    checkpoint.load_weights(agent, weights)
    options = json.loads(args.fleet_kwargs)
    env_kwargs = {"fleet": "random"} | ({"fleet_kwargs": options} if options else {})
    system = system or RoutingSystem.from_kwargs(**env_kwargs)
    drawn = isinstance(system, FleetSystem)
    router = PerFleet(OfSystem, system, {"agent": agent}) if drawn else OfSystem(system, agent)
    return CheckpointPolicy("fleet_search", "graph", args, agent, router.act, env_kwargs)


def check(args: Args) -> None:
    """Refuse arguments that are out of range, by name."""
    for name in ("fleets", "requests", "total_timesteps", "eval_fleets", "eval_episodes"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} is {getattr(args, name)}; allowed is 1 or more")
    if args.population * ELITE < 2:
        raise ValueError(f"population is {args.population}; allowed is {int(2 / ELITE)} or more")
    try:
        options = json.loads(args.fleet_kwargs)
    except ValueError as error:
        raise ValueError(f"fleet_kwargs is {args.fleet_kwargs!r}; give JSON ({error})") from None
    if not isinstance(options, dict):
        raise ValueError(f"fleet_kwargs is {args.fleet_kwargs!r}; give a JSON object")
    _source(args.fleet_kwargs)


def train(args: Args) -> Path:
    """Search and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors)."""
    check(args)
    torch.set_num_threads(args.torch_threads)
    pool = open_pool(args.workers, args.ray)
    run = Path(args.out_dir) / (args.run_name or f"fleet_search_{args.seed}")
    played = max(args.fleets // TURN, 1)
    generation = args.population * played * args.requests  # decisions
    mean = first_weights()
    spread, step, best, log_size = np.full_like(mean, SPREAD), 0, -np.inf, 0
    rng = np.random.default_rng([args.seed, 5])
    saved = load_snapshot(args.resume, run / "snapshot.pt")
    if saved is not None:
        mean, spread, step, best, log_size = saved["state"]
        rng.bit_generator.state = saved["rng"]
    log, agent = RunLog(run, args, "fleet_search", step, log_size), Agent()
    while step < args.total_timesteps:
        # Draw, play the same episodes of the same fleets, and move to the best.
        drawn = mean + spread * rng.standard_normal((args.population, len(mean)))
        streams = rng.choice(args.fleets, played, replace=False)
        seed, candidates = int(rng.integers(1 << 31)), drawn.astype(np.float32)
        given = args.fleet_kwargs, seed, args.requests
        jobs = [(candidates, int(stream), *given) for stream in streams]
        each = np.zeros((args.population, len(jobs)))
        for at, qos in run_jobs(play, jobs, pool):
            each[:, at] = qos
        elite = drawn[np.argsort(-fitness(each))[: int(args.population * ELITE)]]
        mean = mean + STEP * (elite.mean(0) - mean)
        widened = max(0.0, 1 - step / args.total_timesteps / WIDENED_UNTIL)
        spread = spread + STEP * (elite.std(0) - spread) + WIDENED * widened
        before, step = step, step + generation

        # Log, evaluate and save.
        metrics = {"charts/SPS": log.advance(step), "charts/avg_qos": float(each.mean())}
        metrics["charts/spread"] = float(spread.mean())
        if interval_passed(args.eval_every, before, step) or step >= args.total_timesteps:
            result = evaluate(mean, args, pool)
            metrics |= result
            log.print_qos(step, {"eval/avg_qos": result["eval/avg_qos"]})
            agent.weights.copy_(torch.as_tensor(mean))
            write = partial(save_policy, agent, args)
            best = checkpoint.save_best_and_last(write, args, run, result["eval/avg_qos"], best)
        log.write(step, metrics)
        state = (mean, spread, step, best, log.size)
        save_snapshot(run / "snapshot.pt", state=state, rng=rng.bit_generator.state)
    log.close()
    if pool is not None:
        pool.shutdown()
    return run


if __name__ == "__main__":
    train(tyro.cli(Args, config=(tyro.conf.FlagConversionOff,)))
