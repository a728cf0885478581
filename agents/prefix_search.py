"""One router for any replicas that cache prefixes: a linear index, searched for on drawn cells.

The router values one replica at a time by a linear index and takes the best. What it reads is
scaled by what the replica can do and the request may take: prefills count in shares of the
objective of the time to first token, contexts in shares of the KV memory, so that the same weights
mean the same on two cards and on sixteen. Dynamo's cost and LMetric's are close to special cases,
and the search begins with the former's constants. Each weight has a second one that is multiplied
by the load of all replicas; with ``--memory 64``, seven of them have one for each of five
statistics that the router keeps of its own observations: averages over the last 64 requests or so,
since one request does not tell whether prompts repeat. The weights are found by the cross-entropy
method; all candidates of a generation play the same episodes of the same drawn cells
(`servegym.agents.lib.prefix_cells`).

``--memory 1`` has the same weights for the statistics of the present request alone. ``--workers``
plays the cells in as many processes, with the same result.
``python agents/prefix_search.py --help`` lists the options.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from rich.progress import track
from torch import Tensor, nn

from servegym.agents.lib import checkpoint
from servegym.agents.lib.arguments import RunArgs
from servegym.agents.lib.checkpoint import CheckpointPolicy
from servegym.agents.lib.cross_entropy import ELITE, STEP, fitness
from servegym.agents.lib.parallel import open_pool, run_jobs
from servegym.agents.lib.prefix_cells import (
    Cell,
    attainment,
    begin_alike,
    drawn_at_the_knee,
    problem_of,
)
from servegym.agents.lib.run_log import RunLog, interval_passed
from servegym.agents.lib.snapshots import load_snapshot, save_snapshot
from servegym.envs.prefix_routing.core import PrefixBatch
from servegym.envs.prefix_routing.kernel.observation import REPLICA_FEATURES, REQUEST_FEATURES

Observation = Mapping[str, NDArray[Any]]
Floats = NDArray[np.float32]

FEATURES = (
    "prefill",  # s of the uncached part of the prompt / TTFT objective
    "matched",  # s that the match saves / TTFT objective
    "backlog",  # s of the prefills in flight / TTFT objective
    "late",  # what prefill and backlog are over the objective
    "context",  # tokens in flight / KV memory
    "blocks",  # the same, shared ones counted once
    "full",  # what blocks and the prompt are over the memory
    "in_flight",  # requests / 32
    "queue",  # requests in flight beyond those that run at once / 32
    "waiting",  # requests / 8, scraped
    "kv_usage",  # scraped
    "session",  # the session's last request went there
    "share",  # matched share of the prompt
    "old_match",  # that share x log(1 + s since the match was used)
    "full_match",  # that share x blocks
    "hot_match",  # that share x the tenant's share of the recent requests
    "index_fill",
    "ttft",  # moving average / objective
    "ttft_error",  # of the expectation / objective
    "tpot",  # moving average / objective
    "lmetric",  # prefill x in_flight
    "log_prefill",
    "log_in_flight",
)
"""What the index reads of a replica; the times are clipped at `MOST` objectives."""
F = len(FEATURES)
STATISTICS = (
    "shared",  # best matched share of a prompt
    "copies",  # share of the replicas whose match is at least half of the best
    "short",  # -log(s of the prefill where it is shortest / TTFT objective + .01) / 4
    "age",  # log(1 + s since the best match was used) / 4
    "loaded",  # load of all replicas
)
"""What the router keeps averages of, each centred by `CENTRES`."""
CENTRES = np.array([0.5, 0.4, 0.6, 0.3, 0.5], np.float32)
CONDITIONED = ("prefill", "matched", "backlog", "blocks", "in_flight", "share", "lmetric")
"""Features whose weights go by the statistics."""
K, C = len(STATISTICS), len(CONDITIONED)
_OWN = [FEATURES.index(name) for name in CONDITIONED]
MOST = 8.0
WIDENED = 0.03  # standard deviation added each generation at first, falling to 0 ...
WIDENED_UNTIL = 0.6  # ... at this share of the search
VALIDATION = 1_000_000  # where the streams of the validation cells begin
SEED_OF_CELLS = 0
_AT = {name: k for k, name in enumerate(REPLICA_FEATURES)}
_ASKED = {name: k for k, name in enumerate(REQUEST_FEATURES)}


@dataclass
class Args(RunArgs):
    """Command line of the agent."""

    total_timesteps: int = 16_000_000
    """simulated decisions of all candidates"""
    population: int = 40
    """candidates of a generation"""
    cells: int = 63
    """drawn cells"""
    cells_per_generation: int = 9
    """cells that a generation plays, an episode each; they take turns"""
    eval_every: int = 2_000_000
    """decisions between evaluations on the validation cells; the best index there is saved"""
    eval_cells: int = 14
    """cells of the validation"""
    eval_episodes: int = 4
    """episodes a cell of the validation"""
    memory: int = 0
    """requests that the router's statistics average over; 0: no statistics, 46 weights"""
    start: str = ""
    """checkpoint of this agent whose index the search begins with (default: Dynamo's cost)"""
    spread: float = 0.4
    """standard deviation of every weight at first"""
    workers: int = 1
    """processes that play cells; the result is the same for every number"""
    resume: bool = False
    """continue from the last generation in the run's folder"""


def features(seen: Observation, block_size: int) -> tuple[Floats, Floats]:
    """What the index reads: of the replicas (B, N, 23), and the load (B,) of all together.

    Args:
        seen: Dict observation of the environment, with a leading axis of B.
        block_size: Tokens of a KV block.
    """
    of, asked = seen["replicas"], seen["request"]
    prompt = asked[:, _ASKED["prompt_tokens"], None]
    heat = asked[:, _ASKED["tenant_heat"], None]
    ttft = np.maximum(asked[:, _ASKED["ttft_slo_s"], None], 1e-3)
    tpot = np.maximum(asked[:, _ASKED["tpot_slo_s"], None], 1e-4)
    speed = np.maximum(of[:, :, _AT["prefill_tokens_per_s"]], 1.0) * ttft  # tokens an objective
    memory = np.maximum(of[:, :, _AT["kv_tokens"]], 1.0)
    match, share = of[:, :, _AT["match_tokens"]], of[:, :, _AT["match_share"]]
    in_flight = of[:, :, _AT["in_flight"]]
    x = np.empty((*match.shape, F), np.float32)
    x[..., 0] = np.minimum((prompt - match) / speed, MOST)
    x[..., 1] = np.minimum(match / speed, MOST)
    x[..., 2] = np.minimum(of[:, :, _AT["prefill_tokens"]] / speed, MOST)
    x[..., 3] = np.maximum(x[..., 0] + x[..., 2] - 1.0, 0.0)
    x[..., 4] = np.minimum(of[:, :, _AT["context_tokens"]] / memory, MOST)
    x[..., 5] = np.minimum(of[:, :, _AT["decode_blocks"]] * block_size / memory, MOST)
    x[..., 6] = np.clip(x[..., 5] + prompt / memory - 1.0, 0.0, MOST)
    x[..., 7] = in_flight / 32
    x[..., 8] = np.maximum(in_flight - of[:, :, _AT["max_num_seqs"]], 0.0) / 32
    x[..., 9] = np.minimum(of[:, :, _AT["waiting"]] / 8, MOST)
    x[..., 10] = of[:, :, _AT["kv_usage"]]
    x[..., 11] = of[:, :, _AT["session_replica"]]
    x[..., 12] = share
    x[..., 13] = share * np.log1p(of[:, :, _AT["match_age_s"]])
    x[..., 14] = share * x[..., 5]
    x[..., 15] = share * heat
    x[..., 16] = of[:, :, _AT["index_fill"]]
    x[..., 17] = np.minimum(of[:, :, _AT["ttft_s"]] / ttft, MOST)
    x[..., 18] = np.clip(of[:, :, _AT["ttft_error_s"]] / ttft, -MOST, MOST)
    x[..., 19] = np.minimum(of[:, :, _AT["tpot_s"]] / tpot, MOST)
    x[..., 20] = x[..., 0] * x[..., 7]
    x[..., 21] = np.log(x[..., 0] + 0.01)
    x[..., 22] = np.log1p(in_flight)
    up = of[:, :, _AT["up"]]
    load = ((x[..., 2] + x[..., 5]) * up).sum(1) / np.maximum(up.sum(1), 1.0)
    return x, np.minimum(load, 2.0)


def statistics(x: Floats, load: Floats, seen: Observation) -> Floats:
    """`STATISTICS` (B, 5) of one request each, from its `features`, centred.

    Of the replicas that are up, or of all if none is.
    """
    of = seen["replicas"]
    up = of[:, :, _AT["up"]] > 0
    up |= ~up.any(1, keepdims=True)
    share = np.where(up, x[..., FEATURES.index("share")], 0.0)
    best = share.argmax(1)
    rows = np.arange(len(best))
    top = share[rows, best]
    alike = ((share >= 0.5 * top[:, None]) & up & (top > 0)[:, None]).sum(1)
    least = np.where(up, x[..., FEATURES.index("prefill")], MOST).min(1)
    found = np.empty((len(best), K), np.float32)
    found[:, 0] = top
    found[:, 1] = alike / np.maximum(up.sum(1), 1)
    found[:, 2] = -np.log(least + 0.01) / 4
    found[:, 3] = np.log1p(of[rows, best, _AT["match_age_s"]]) / 4
    found[:, 4] = load
    return found - CENTRES


def first_weights(memory: int = 0) -> NDArray[np.float64]:
    """The index that the search begins with: Dynamo's cost with one set of tuned constants.

    With ``memory`` there are 81 weights, without 46: of the features, of the features times the
    load, and of `CONDITIONED` times each of `STATISTICS`.

    Its cost in blocks, 5.4 (prefill tokens in flight + L - 2.6 m) / 16 + decode blocks + .2 x
    requests in flight, over 5.4 / 16 and the tokens that an H100 prefills in 1.1 s.
    """
    weights = np.zeros(2 * F + K * C * (memory > 0))
    tokens = 48_500 * 1.1
    weights[FEATURES.index("prefill")] = -1.0
    weights[FEATURES.index("matched")] = 1.6
    weights[FEATURES.index("backlog")] = -1.0
    weights[FEATURES.index("blocks")] = -455_000 / 5.4 / tokens
    weights[FEATURES.index("in_flight")] = -32 * 0.2 * 16 / 5.4 / tokens
    return weights


class Agent(nn.Module):
    """The weights of the index."""

    weights: Tensor

    def __init__(self, memory: int) -> None:
        super().__init__()
        first = torch.as_tensor(first_weights(memory), dtype=torch.float32)
        self.register_buffer("weights", first)


class Index:
    """Takes the replica of highest value, by one index a row.

    It remembers the averages of each row's statistics from one call to the next, until `forget`.

    Args:
        weights: (B, 46) or (B, 81), or of one row for every row.
        block_size: Tokens of a KV block.
        memory: Requests that the statistics average over; (B,) if it goes by the row.
    """

    def __init__(
        self, weights: Floats, block_size: int, memory: int | NDArray[np.int64] = 0
    ) -> None:
        self.weights, self.block_size, self.memory = weights, block_size, memory
        self.average = np.zeros((0, K), np.float32)
        self.requests = np.zeros(0, np.int64)

    def forget(self, rows: NDArray[np.bool_]) -> None:
        """Start anew in those of the B rows."""
        if len(rows) != len(self.requests):
            self.average, self.requests = np.zeros((len(rows), K), np.float32), rows * 0
        self.average[rows], self.requests[rows] = 0.0, 0

    def values(self, seen: Observation) -> Floats:
        """Values (B, N) of the replicas for the next request of every row, which is counted."""
        x, load = features(seen, self.block_size)
        own = self.weights[:, :F] + self.weights[:, F : 2 * F] * load[:, None]
        if self.weights.shape[1] > 2 * F:
            if len(load) != len(self.requests):
                self.forget(np.ones(len(load), np.bool_))
            self.requests += 1
            step = 1.0 / np.minimum(self.requests, self.memory)[:, None]
            self.average += step.astype(np.float32) * (statistics(x, load, seen) - self.average)
            more = self.weights[:, 2 * F :].reshape(-1, K, C)
            own[:, _OWN] += np.einsum("bk,bkc->bc", self.average, more)
        return np.einsum("bnf,bf->bn", x, own)

    def __call__(self, seen: Observation, mask: Any) -> NDArray[np.int64]:
        """Actions (B,); where nobody takes the request, rejection or replica 0."""
        values = self.values(seen)
        mask = np.asarray(mask)
        count = values.shape[1]
        best = np.where(mask[:, :count] > 0, values, -np.inf).argmax(-1)
        taken = (mask[:, :count] > 0).any(-1)
        return np.where(taken, best, count if mask.shape[1] > count else 0)


class IndexPolicy(CheckpointPolicy):
    """An index as a policy; its rows begin anew with their episodes."""

    decide: Index  # pyright: ignore[reportIncompatibleVariableOverride]

    def episode_start(self, mask: NDArray[np.bool_]) -> None:
        """Forget the statistics of the rows."""
        self.decide.forget(np.asarray(mask, np.bool_))


def cell_of(stream: int) -> Cell:
    """A drawn cell; validation cells have recorded sessions of the split ``val``."""
    cell = drawn_at_the_knee(stream, SEED_OF_CELLS)
    return cell | ({"split": "val"} if "split" in cell and stream >= VALIDATION else {})


def play(population: Floats, cell: Cell, seed: int, memory: int = 0) -> NDArray[np.float64]:
    """SLO attainment (P,) of indexes (P, 46 or 81) in the same episode of a cell."""
    problem = problem_of(cell)
    batch = PrefixBatch(problem, len(population))
    begin_alike(batch, np.random.default_rng(seed))
    return attainment(batch, Index(population, problem.block_size, memory))


def measure(weights: Floats, cell: Cell, episodes: int, memory: int = 0) -> float:
    """Average attainment of an index (46 or 81,) in the same validation episodes of a cell."""
    problem = problem_of(cell)
    batch = PrefixBatch(problem, episodes)
    for row in range(episodes):
        batch.draw(row, np.random.default_rng([99, row]))
    batch.begin(np.ones(episodes, np.int8))
    index = Index(weights[None], problem.block_size, memory)
    return float(attainment(batch, index).mean())


def evaluate(
    weights: NDArray[np.float64], cells: Sequence[Cell], episodes: int, memory: int, pool: Any
) -> dict[str, float]:
    """Average attainment on the validation cells, and the mean over them."""
    jobs = [(weights.astype(np.float32), cell, episodes, memory) for cell in cells]
    found = dict(run_jobs(measure, jobs, pool))
    each = {f"eval/attainment_cell_{k}": found[k] for k in range(len(jobs))}
    return {"eval/attainment": float(np.mean([found[k] for k in range(len(jobs))]))} | each


def save_policy(agent: Agent, args: Args, path: Path) -> None:
    """Weights and arguments in one safetensors file."""
    meta = {"agent": "prefix_search", "args": json.dumps(asdict(args))}
    checkpoint.write_checkpoint(agent, meta, path)


def load(meta: Mapping[str, str], weights: Mapping[str, Tensor], system: Any) -> CheckpointPolicy:
    """The policy of a checkpoint, see `servegym.agents.lib.checkpoint`."""
    from servegym.baselines.prefix_routing.system import PrefixSystem

    args = checkpoint.saved_args(Args, checkpoint.json_field(meta, "args"))
    if len(weights["weights"]) == 2 * F:
        args.memory = 0
    agent = Agent(args.memory)
    checkpoint.load_weights(agent, weights)
    system = system or PrefixSystem.from_kwargs()
    index = Index(agent.weights.numpy()[None], system.block_size, args.memory)
    return IndexPolicy("prefix_search", "graph", args, agent, index)


def check(args: Args) -> None:
    """Refuse arguments that are out of range, by name."""
    names = "total_timesteps", "cells", "cells_per_generation", "eval_every", "eval_cells"
    for name in (*names, "eval_episodes"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} is {getattr(args, name)}; allowed is 1 or more")
    if args.memory < 0:
        raise ValueError(f"memory is {args.memory}; allowed is 0 or more")
    if not 0.0 < args.spread <= 10.0:
        raise ValueError(f"spread is {args.spread}; allowed is above 0, up to 10")
    if args.population * ELITE < 2:
        raise ValueError(f"population is {args.population}; allowed is {int(2 / ELITE)} or more")
    if args.cells_per_generation > args.cells:
        raise ValueError(
            f"cells_per_generation is {args.cells_per_generation}; "
            f"allowed is up to cells, which is {args.cells}"
        )


def begin_with(args: Args) -> NDArray[np.float64]:
    """The index that the search begins with; statistics that ``start`` has not count for nothing.

    Raises:
        ValueError: The index of ``start`` has more weights than ``memory`` allows.
    """
    mean = first_weights(args.memory)
    if args.start:
        given = checkpoint.load_policy(args.start).net.weights.numpy()
        if len(given) > len(mean):
            raise ValueError(
                f"start is {args.start}, an index with statistics; memory is {args.memory}, "
                "allowed with it is 1 or more"
            )
        mean[:] = np.pad(given, (0, len(mean) - len(given)))
    return mean


def draw_cells(args: Args, pool: Any) -> tuple[list[Cell], list[Cell]]:
    """The cells of the training and of the validation; a minute or two goes into their rates."""
    streams = [*range(args.cells), *(VALIDATION + k for k in range(args.eval_cells))]
    found: dict[int, Cell] = {}
    for at, cell in track(
        run_jobs(cell_of, [(stream,) for stream in streams], pool), "cells", len(streams)
    ):
        found[at] = cell
    cells = [found[at] for at in range(len(streams))]
    return cells[: args.cells], cells[args.cells :]


def train(args: Args) -> Path:
    """Search and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors)."""
    check(args)
    mean = begin_with(args)
    torch.set_num_threads(args.torch_threads)
    pool = open_pool(args.workers)
    run = Path(args.out_dir) / (args.run_name or f"prefix_search_{args.seed}")
    spread, step, best, log_size = np.full_like(mean, args.spread), 0, -np.inf, 0
    rng = np.random.default_rng([args.seed, 6])
    saved = load_snapshot(args.resume, run / "snapshot.pt")
    if saved is not None:
        mean, spread, step, best, log_size = saved["state"]
        rng.bit_generator.state = saved["rng"]
    cells, unseen = draw_cells(args, pool)
    log, agent = RunLog(run, args, "prefix_search", step, log_size), Agent(args.memory)
    while step < args.total_timesteps:
        # Draw, play the same episodes of the same cells, and move to the best.
        drawn = mean + spread * rng.standard_normal((args.population, len(mean)))
        played = [
            cells[k] for k in rng.choice(args.cells, args.cells_per_generation, replace=False)
        ]
        seed, candidates = int(rng.integers(1 << 31)), drawn.astype(np.float32)
        jobs = [(candidates, cell, seed, args.memory) for cell in played]
        each = np.zeros((args.population, len(jobs)))
        for at, met in run_jobs(play, jobs, pool):
            each[:, at] = met
        elite = drawn[np.argsort(-fitness(each))[: int(args.population * ELITE)]]
        mean = mean + STEP * (elite.mean(0) - mean)
        widened = max(0.0, 1 - step / args.total_timesteps / WIDENED_UNTIL)
        spread = spread + STEP * (elite.std(0) - spread) + WIDENED * widened
        before = step
        step += args.population * sum(cell["episode_requests"] for cell in played)

        # Log, evaluate and save.
        metrics = {"charts/SPS": log.advance(step), "charts/attainment": float(each.mean())}
        metrics["charts/spread"] = float(spread.mean())
        if interval_passed(args.eval_every, before, step) or step >= args.total_timesteps:
            result = evaluate(mean, unseen, args.eval_episodes, args.memory, pool)
            metrics |= result
            log.bar.console.print(f"step {step}: attainment {result['eval/attainment']:.4f}")
            agent.weights.copy_(torch.as_tensor(mean))
            write = partial(save_policy, agent, args)
            best = checkpoint.save_best_and_last(write, args, run, result["eval/attainment"], best)
        log.write(step, metrics)
        state = (mean, spread, step, best, log.size)
        save_snapshot(run / "snapshot.pt", state=state, rng=rng.bit_generator.state)
    log.close()
    if pool is not None:
        pool.shutdown()
    return run


if __name__ == "__main__":
    train(tyro.cli(Args, config=(tyro.conf.FlagConversionOff,)))
