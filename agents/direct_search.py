"""Cross-entropy search for a linear router: the simplest strong opponent, and the first to train.

The router takes the action with the largest linear score. Its weights are searched for directly:
candidates are drawn from a normal distribution, all of a generation play the same episodes, and the
distribution moves to the best of them (cross-entropy method, Rubinstein 1999). There is no
gradient, value or credit assignment, so that what a learner with the same state falls short of is a
matter of its learning.

By default the router sees what the paper's Baseline RL sees (Eq. 7: memory, running and waiting
requests of every expert) and has 3 N + 2 weights; a search takes half a minute of a core. With
``--state estimate`` it also reads the predicted scores and the action impact estimator (Eq. 13-15):
what `priced_greedy` reads, with no rule given. See `index_features`.

Neighbour: `baseline_rl` learns a network over the same state with soft actor-critic.
``python agents/direct_search.py --help`` lists the options.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from torch import Tensor, nn

from servegym._command_line import parse_settings
from servegym.agents.lib import checkpoint, environments
from servegym.agents.lib.arguments import RunArgs
from servegym.agents.lib.checkpoint import CheckpointPolicy
from servegym.agents.lib.cross_entropy import ELITE, STEP, fitness
from servegym.agents.lib.evaluation import evaluate_router
from servegym.agents.lib.run_log import RunLog, interval_passed
from servegym.agents.lib.snapshots import load_snapshot, save_snapshot
from servegym.baselines.llm_routing.features import impact_of, steeper
from servegym.baselines.llm_routing.greedy_qos import with_mean_scores
from servegym.baselines.llm_routing.lengths import ExpectedQos
from servegym.baselines.llm_routing.system import RoutingSystem

Observation = Mapping[str, NDArray[Any]]

ENV_ID, ROWS_ID = "servegym/LLMRouting-v1", "servegym/LLMRoutingExperts-v1"
ENV = {
    "profiles": "edge-6-heterogeneous",
    "latency_requirement_s": 0.030,
    "rate": (4.0, 11.0),  # requests/s; each training episode draws its own
    "reward": "completed_qos",
    "episode_requests": 500,
}
"""Arguments of the training environment; ``--set`` changes them and adds others."""

INDEX = 26  # features of an expert in the index, see `index_features`
SPREAD = 1.0  # standard deviation of every weight at first
WIDENED = 0.06  # standard deviation added each generation at first, falling to 0 ...
WIDENED_UNTIL = 0.6  # ... at this share of the search
EVAL_EPISODES, EVAL_REQUESTS = 8, 500  # of an evaluation: episodes per rate, requests per episode


@dataclass
class Args(RunArgs):
    """Command line of the agent."""

    set: tuple[str, ...] = ()
    """environment arguments, key=value with a JSON value, as in rate=[5,5] num_experts=3"""
    state: Literal["rows", "estimate"] = "rows"
    """what the router reads: Baseline RL's state, or the predictions and the estimator too"""
    threads: int = 1
    """threads that play candidates; the search is the same for every number"""
    total_timesteps: int = 12_000_000
    """environment steps (decisions) over all candidates"""
    population: int = 64
    """candidates in a generation"""
    episodes: int = 8
    """episodes that each candidate plays, the same for all of a generation"""
    eval_every: int = 1_200_000
    """steps between evaluations of the mean on the validation split; the best one is saved"""
    eval_rates: tuple[float, ...] = (5.0, 8.0, 10.0)
    """arrival rates of the evaluation"""
    checkpoint_every: int = 0
    """steps between snapshots to resume from (0: none)"""
    resume: bool = False
    """continue from the snapshot in the run's folder; the log goes on as if uninterrupted"""


def scaled(experts: NDArray[Any]) -> NDArray[np.float32]:
    """Features (B, N, 3) from memory in use, running and waiting requests of the experts."""
    return np.asarray(experts * (2, 1 / 3, 1 / 3), np.float32)


def scores(weights: NDArray[np.float32], features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Linear score (B, N + 1) of every action, of a drop first.

    Args:
        weights: (B, 3 N + 2): a constant, a weight of the running and one of the waiting requests
            for each expert, then the weight of the memory, common to all, and the drop's constant.
        features: (B, N, 3), see `scaled`.
    """
    batch, n, _ = features.shape
    own = weights[:, : 3 * n].reshape(batch, n, 3)
    linear = own[..., 0] + (own[..., 1:] * features[..., 1:]).sum(-1)
    linear = linear + weights[:, -2, None] * features[..., 0]
    return np.concatenate([weights[:, -1:], linear], -1)


def index_features(obs: Observation, model: ExpectedQos) -> NDArray[np.float32]:
    """Features (B, N, 26) of an expert that an index weighs alike for every expert.

    Of the new request at the expert: its predicted score; whether it is late, and by how much
    (`impact_features`); its score times the chance that it is in time, whatever the lengths of the
    answers turn out to be, and the scores that it is expected to make late (`ExpectedQos`); the
    scores that it makes late at mean lengths, counted and as two sums of distances; the seconds of
    the expert's time that it takes, alone, times the fourth power of the mean of the expert's and
    the fleet's load, and times the square of the expert's load; that load, in requests per running
    slot. Then the same thirteen times the fleet's load, centred, so that each weight may change
    with the load. The scales make each weight of order one.
    """
    gain, harm, estimate = model(with_mean_scores(obs, model.system))
    of_expert, of_queued = impact_of(estimate, obs)
    distance, own, lost, work = np.moveaxis(of_expert, -1, 0)
    queued = [obs[key][..., 1] * obs[f"{key}_mask"] for key in ("running", "waiting")]
    queued = np.concatenate(queued, -1)
    nearer, likelier = (
        (queued * (x[..., 1] - x[..., 0])).sum(-1) for x in (of_queued, steeper(of_queued))
    )
    load = obs["experts"][..., 1:].sum(-1) / model.system.running_capacity
    fleet = np.broadcast_to(load.mean(1, keepdims=True), load.shape)
    parts = [10 * obs["request"][..., 1] - 6.5, 8.0 * (own == 0), 4 * distance]
    parts += [
        10 * gain - 6.5,
        10 * harm,
        4 * steeper(distance),
        8 * lost,
        4 * nearer,
        4 * likelier,
        3 * work,
    ]
    parts += [10 * work * ((load + fleet) / 2) ** 4, 5 * work * load**2, 3 * load]
    return np.stack([*parts, *(x * (1.5 * fleet - 1.2) for x in parts)], -1, dtype=np.float32)


def index_scores(
    weights: NDArray[np.float32], obs: Observation, model: ExpectedQos
) -> NDArray[np.float32]:
    """Linear score (B, N + 1) of every action from predictions and estimates, of a drop first.

    Args:
        weights: (B, 26 + 2 N + 2): of the features of `index_features`; a constant and a weight of
            the load for each expert; a constant and a weight of the fleet's load for the drop.
        obs: A batch of Dict observations.
        model: The estimator of the system.
    """
    x = index_features(obs, model)
    load = x[..., INDEX // 2 - 1] / 3
    constant, slope = np.split(weights[:, INDEX:-2], 2, -1)
    linear = np.einsum("bnk,bk->bn", x, weights[:, :INDEX]) + constant + slope * load
    drop = 5 * weights[:, -2] + weights[:, -1] * load.mean(1)
    return np.concatenate([drop[:, None], linear], -1)


class Agent(nn.Module):
    """The weights of one linear router: (3 N + 2,), or (2 N + 28,) with an estimator."""

    weights: Tensor
    fixed_experts = True

    def __init__(self, experts: int, model: ExpectedQos | None = None) -> None:
        super().__init__()
        self.experts, self.model = experts, model
        size = 3 * experts + 2 if model is None else INDEX + 2 * experts + 2
        self.register_buffer("weights", torch.zeros(size))

    def scores(self, weights: NDArray[np.float32], obs: Observation) -> NDArray[np.float32]:
        """Scores (B, N + 1) of the actions with weights (B, K), a row for each observation."""
        if self.model is None:
            return scores(weights, scaled(obs["experts"]))
        return index_scores(weights, obs, self.model)

    def values(self, obs: Observation) -> NDArray[np.float32]:
        """Scores of the actions less the best, with 1 for a predicted score of 1, at -5 or above.

        Raises:
            ValueError: If the number of experts is not the agent's.
        """
        batch, experts, _ = obs["experts"].shape
        if experts != self.experts:
            raise ValueError(f"made for {self.experts} experts, got {experts}")
        weights = np.asarray(self.weights)
        score = self.scores(weights[None].repeat(batch, 0), obs)
        return np.maximum((score - score.max(1, keepdims=True)) / (10 * abs(weights[0])), -5)

    def act(self, obs: Observation, mask: NDArray[Any]) -> NDArray[np.int64]:
        """The legal action of the largest score for every observation.

        Raises:
            ValueError: If the number of experts is not the agent's.
        """
        batch, experts, _ = obs["experts"].shape
        if experts != self.experts:
            raise ValueError(f"made for {self.experts} experts, got {experts}")
        weights = np.asarray(self.weights)[None].repeat(batch, 0)
        return np.where(mask, self.scores(weights, obs), -np.inf).argmax(-1)


class Play:
    """Environments in which candidates play the same episodes."""

    def __init__(self, agent: Agent, candidates: int, args: Args, env_kwargs: Any) -> None:
        """Make ``candidates`` x ``args.episodes`` environments with what the agent reads."""
        env_id = ROWS_ID if agent.model is None else ENV_ID
        count = candidates * args.episodes
        self.envs: Any = environments.make_envs(env_id, count, **env_kwargs, copy=False)
        self.agent = agent

    def __call__(
        self, population: NDArray[np.float32], seeds: list[int], requests: int
    ) -> NDArray[np.float64]:
        """Average QoS (P, E) of every candidate in one episode for each seed, the same for all.

        Args:
            population: Weights (P, K).
            seeds: Seeds of the episodes.
            requests: Requests of an episode.
        """
        problem = self.envs.unwrapped.problem
        running, waiting = problem.running_capacity, problem.waiting_capacity
        obs, info = self.envs.reset(seed=seeds * len(population))
        weights, total = population.repeat(len(seeds), 0), 0.0
        for _ in range(requests):
            if self.agent.model is None:
                rows = obs.reshape(len(obs), -1, 3) * (1, running, running + waiting)
                obs = {"experts": rows}
            score = np.where(info["action_mask"], self.agent.scores(weights, obs), -np.inf)
            obs, reward, _, _, info = self.envs.step(score.argmax(-1))
            total = total + reward
        return np.reshape(total, (len(population), -1)) / requests


def save_policy(agent: Agent, args: Args, path: Path) -> None:
    """Weights and arguments in one safetensors file."""
    meta = {"agent": "direct_search", "args": json.dumps(asdict(args))}
    checkpoint.write_checkpoint(agent, meta, path)


def load(meta: Mapping[str, str], weights: Mapping[str, Tensor], system: Any) -> CheckpointPolicy:
    """The policy of a checkpoint, see `servegym.agents.lib.checkpoint`."""
    args = checkpoint.saved_args(Args, checkpoint.json_field(meta, "args"))
    env_kwargs = ENV | parse_settings(args.set)
    if args.state == "estimate":
        system = system or RoutingSystem.from_kwargs(**env_kwargs)
        experts, model = (len(weights["weights"]) - INDEX) // 2 - 1, ExpectedQos(system)
    else:
        experts, model = (len(weights["weights"]) - 2) // 3, None
    if system is not None and system.num_experts != experts:
        raise ValueError(f"made for {experts} experts, got {system.num_experts}")
    agent = Agent(experts, model)
    checkpoint.load_weights(agent, weights)
    return CheckpointPolicy("direct_search", "graph", args, agent, agent.act, env_kwargs)


def train(args: Args) -> Path:
    """Search and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors)."""
    env_kwargs = ENV | parse_settings(args.set)
    if env_kwargs["reward"] == "qos_aware":
        raise ValueError("set: reward is 'qos_aware'; allowed are those whose sum is the QoS")
    if args.population * ELITE < 2:
        raise ValueError(f"population is {args.population}; allowed is {int(2 / ELITE)} or more")
    torch.set_num_threads(args.torch_threads)
    rng = np.random.default_rng(np.random.SeedSequence(args.seed))
    if args.threads < 1:
        raise ValueError(f"threads is {args.threads}; allowed is 1 or more")
    system = RoutingSystem.from_kwargs(**env_kwargs)
    agent = Agent(system.num_experts, ExpectedQos(system) if args.state == "estimate" else None)
    parts = np.array_split(np.arange(args.population), min(args.threads, args.population))
    players = [Play(agent, len(part), args, env_kwargs) for part in parts]
    pool = ThreadPoolExecutor(len(parts))
    requests = int(env_kwargs["episode_requests"])
    generation = args.population * args.episodes * requests
    run = Path(args.out_dir) / (args.run_name or f"direct_search_{args.seed}")

    mean = np.zeros(len(agent.weights))
    spread, step, best, log_size = np.full_like(mean, SPREAD), 0, -np.inf, 0
    saved = load_snapshot(args.resume, run / "snapshot.pt")
    if saved is not None:
        mean, spread, step, best, log_size = saved["state"]
        rng.bit_generator.state = saved["rng"]
    log = RunLog(run, args, "direct_search", step, log_size)

    while step < args.total_timesteps:
        # Draw, play the same episodes, and move to the best.
        share_done = step / args.total_timesteps
        drawn = mean + spread * rng.standard_normal((args.population, len(mean)))
        seeds = rng.integers(0, 2**31, args.episodes).tolist()
        candidates = drawn.astype(np.float32)
        played = [
            pool.submit(player, candidates[part], seeds, requests)
            for player, part in zip(players, parts, strict=True)
        ]
        each = np.concatenate([one.result() for one in played])
        qos = each.mean(1)
        order = np.argsort(-fitness(each) if args.state == "estimate" else -qos)
        elite = drawn[order[: int(args.population * ELITE)]]
        mean = mean + STEP * (elite.mean(0) - mean)
        spread = spread + STEP * (elite.std(0) - spread)
        spread = spread + WIDENED * max(0.0, 1 - share_done / WIDENED_UNTIL)
        before, step = step, step + generation

        # Log, evaluate and save.
        metrics = {"charts/SPS": log.advance(step), "charts/avg_qos": float(qos.mean())}
        metrics |= {"charts/best_qos": float(qos.max()), "charts/spread": float(spread.mean())}
        if interval_passed(args.eval_every, before, step) or step >= args.total_timesteps:
            agent.weights.copy_(torch.as_tensor(mean))
            result = evaluate_router(
                agent.act, ENV_ID, env_kwargs, args.eval_rates, EVAL_EPISODES, EVAL_REQUESTS
            )
            metrics |= result
            log.print_qos(step, result)
            write = partial(save_policy, agent, args)
            best = checkpoint.save_best_and_last(write, args, run, result["eval/avg_qos"], best)
        log.write(step, metrics)
        if interval_passed(args.checkpoint_every, before, step):
            state = (mean, spread, step, best, log.size)
            save_snapshot(run / "snapshot.pt", state=state, rng=rng.bit_generator.state)
    log.close()
    pool.shutdown()
    return run


if __name__ == "__main__":
    train(tyro.cli(Args, config=(tyro.conf.FlagConversionOff,)))
