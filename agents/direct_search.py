"""Cross-entropy search for a linear router over the experts' rows: the simplest strong opponent.

The router sees what the paper's Baseline RL sees (Eq. 7: memory, running and waiting requests of
every expert) and takes the action with the largest linear score. Its 3 N + 2 weights are searched
for directly: candidates are drawn from a normal distribution, all of a generation play the same
episodes, and the distribution moves to the best of them (cross-entropy method, Rubinstein 1999).
There is no gradient, value or credit assignment, so that what a learner with the same state falls
short of is a matter of its learning. A search takes half a minute of a core.

Neighbour: `baseline_rl` learns a network over the same state with soft actor-critic.
``python agents/direct_search.py --help`` lists the options.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from torch import Tensor, nn

from servegym.agents.lib import checkpoint, environments
from servegym.agents.lib.arguments import RunArgs
from servegym.agents.lib.checkpoint import CheckpointPolicy
from servegym.agents.lib.evaluation import evaluate_router
from servegym.agents.lib.run_log import RunLog, interval_passed
from servegym.agents.lib.snapshots import load_snapshot, save_snapshot
from servegym.envs._command_line import parse_settings

Observation = Mapping[str, NDArray[Any]]

ENV_ID, ROWS_ID = "servegym/LLMRouting-v0", "servegym/LLMRoutingExperts-v0"
ENV = {
    "profiles": "edge-6-heterogeneous",
    "latency_requirement_s": 0.030,
    "rate": (4.0, 11.0),  # requests/s; each training episode draws its own
    "reward": "completed_qos",
    "episode_requests": 500,
}
"""Arguments of the training environment; ``--set`` changes them and adds others."""

ELITE = 0.2  # share of a generation that the distribution moves to
STEP = 0.7  # how far it moves there
SPREAD = 1.0  # standard deviation of every weight at first
WIDENED = 0.06  # standard deviation added each generation at first, falling to 0 ...
WIDENED_UNTIL = 0.6  # ... at this share of the search
EVAL_EPISODES, EVAL_REQUESTS = 8, 500  # of an evaluation: episodes per rate, requests per episode


@dataclass
class Args(RunArgs):
    """Command line of the agent."""

    set: tuple[str, ...] = ()
    """environment arguments, key=value with a JSON value, as in rate=[5,5] num_experts=3"""
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


class Agent(nn.Module):
    """The weights (3 N + 2,) of one linear router."""

    weights: Tensor
    fixed_experts = True

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.register_buffer("weights", torch.zeros(3 * experts + 2))

    def act(self, obs: Observation, mask: NDArray[Any]) -> NDArray[np.int64]:
        """The legal action of the largest score for every observation.

        Raises:
            ValueError: If the number of experts is not the agent's.
        """
        batch, experts, _ = obs["experts"].shape
        if experts != self.experts:
            raise ValueError(f"made for {self.experts} experts, got {experts}")
        weights = np.asarray(self.weights)[None].repeat(batch, 0)
        return np.where(mask, scores(weights, scaled(obs["experts"])), -np.inf).argmax(-1)


def play(
    envs: Any, population: NDArray[np.float32], seeds: list[int], requests: int
) -> NDArray[np.float64]:
    """Average QoS (P,) of every candidate over one episode for each seed, the same for all.

    Args:
        envs: P x len(seeds) environments with the experts' rows, scaled to 1, as observation.
        population: Weights (P, 3 N + 2).
        seeds: Seeds of the episodes.
        requests: Requests of an episode.
    """
    problem = envs.unwrapped.problem
    running, waiting = problem.running_capacity, problem.waiting_capacity
    rows, info = envs.reset(seed=seeds * len(population))
    weights, total = population.repeat(len(seeds), 0), np.zeros(len(rows))
    for _ in range(requests):
        experts = rows.reshape(len(rows), -1, 3) * (1, running, running + waiting)
        score = np.where(info["action_mask"], scores(weights, scaled(experts)), -np.inf)
        rows, reward, _, _, info = envs.step(score.argmax(-1))
        total += reward
    return total.reshape(len(population), -1).mean(1) / requests


def save_policy(agent: Agent, args: Args, path: Path) -> None:
    """Weights and arguments in one safetensors file."""
    meta = {"agent": "direct_search", "args": json.dumps(asdict(args))}
    checkpoint.write_checkpoint(agent, meta, path)


def load(meta: Mapping[str, str], weights: Mapping[str, Tensor], system: Any) -> CheckpointPolicy:
    """The policy of a checkpoint, see `servegym.agents.lib.checkpoint`."""
    args = checkpoint.saved_args(Args, checkpoint.json_field(meta, "args"))
    agent = Agent((len(weights["weights"]) - 2) // 3)
    if system is not None and system.num_experts != agent.experts:
        raise ValueError(f"made for {agent.experts} experts, got {system.num_experts}")
    checkpoint.load_weights(agent, weights)
    env_kwargs = ENV | parse_settings(args.set)
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
    envs: Any = environments.make_envs(ROWS_ID, args.population * args.episodes, **env_kwargs)
    agent = Agent(envs.unwrapped.problem.num_experts)
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
        qos = play(envs, drawn.astype(np.float32), seeds, requests)
        elite = drawn[np.argsort(-qos)[: int(args.population * ELITE)]]
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
    envs.close()
    return run


if __name__ == "__main__":
    train(tyro.cli(Args, config=(tyro.conf.FlagConversionOff,)))
