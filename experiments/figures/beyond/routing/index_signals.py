"""What an index over drawn fleets lacks beside a rule that is tuned for each of them.

::

    python -m servegym.experiments.figures.beyond.routing.index_signals --searched FOLDER

A rule tuned for a setting knows its rate and burstiness, which one observation does not show. Here
seven weights of the shipped index of `servegym.agents.fleet_search` (of harm, of prices and of a
drop) may move by a linear function of what is given, searched with one budget on the training
fleets:

- nothing more: a constant;
- besides it the true load (rate over what the fleet serves within L) and burstiness (index of
  dispersion) of the setting;
- besides it estimates that a gateway can keep: exponential averages of arrivals, of their variation
  and of the load.

The constant searched for each fleet alone bounds what any function of whatever is given could gain
by these weights. `expected_qos` is tuned for each fleet with as many decisions. All play the same
episodes of the drawn validation fleets. What is in ``--searched`` already is not searched again.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.agents.fleet_search import SIZE, VALIDATION, draw_fleet, index_values, problem_of
from servegym.agents.lib.checkpoint import load_policy, shipped
from servegym.agents.lib.cross_entropy import ELITE, STEP, fitness
from servegym.agents.lib.fleet_features import Fleet
from servegym.agents.lib.parallel import open_pool, run_jobs
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.registry import make_policy
from servegym.envs._command_line import run_main
from servegym.envs._files import write_json
from servegym.envs.llm_routing.core import RoutingBatch
from servegym.experiments.figures.routing.common import Options, run_figures, save
from servegym.experiments.output import print_table
from servegym.experiments.stats import mean, paired_difference, stratified_bootstrap
from servegym.experiments.tables import note
from servegym.experiments.tuning import Budget, tune

__all__ = ["main"]

Floats = NDArray[np.float64]

MODULE = "servegym.experiments.figures.beyond.routing.index_signals"
NOTHING, TRUE, RUNNING = "nothing more", "true load and burstiness", "running estimates"
SIGNALS = {NOTHING: 1, TRUE: 3, RUNNING: 5}
"""Numbers given besides the observation, by arm; the first is 1."""
SHIPPED, ALONE = "as shipped", "each fleet alone"
TUNED, REGISTERED = "expected_qos tuned", "expected_qos as registered"
TOUCHED = (1, 9, 11, 12, 13, 14, SIZE - 3)
"""Weights that move with what is given: of harm, work, its prices by load, and of a drop."""
SPREAD = 0.25  # standard deviation of every weight at first
POPULATION, GENERATIONS, FLEETS, PLAYED, REQUESTS = 24, 10, 64, 16, 300
ALONE_POPULATION, ALONE_GENERATIONS, ALONE_EPISODES = 16, 8, 4
VALIDATION_FLEETS, EVAL_REQUESTS = 24, 500
BUDGET = Budget(16, 3, 4, 3, 12, EVAL_REQUESTS)
QUICK = Budget(4, 1, 1, 1, 1, 20)
EVAL_SEED = 77  # of the measured episodes; the search and the choice have others
MEMORY = (100.0, 10.0, 50.0)  # decisions that the averages of arrivals and of the load remember


def dispersion(arrivals: str, given: Mapping[str, float]) -> float:
    """Index of dispersion of the arrivals over long times: 1 for Poisson, larger for bursts."""
    if arrivals == "gamma":
        return given["cv"] ** 2
    if arrivals == "mmpp":
        busy, ratio = given["busy_share"], given["rate_ratio"]
        calm = 1 / (1 - busy + busy * ratio)
        spread = busy * (1 - busy) * calm * (ratio - 1)
        return 1 + 2 * given["cycle_requests"] * spread**2
    return 1.0


class Estimates:
    """Exponential averages that a gateway keeps of every row's arrivals and load."""

    def __init__(self, rows: int, served_rps: float) -> None:
        """Begin with arrivals at 85 % of what the fleet serves, as after five requests."""
        self.served, self.count = served_rps, 0
        self.gaps = np.full((2, rows), 1 / 0.85)
        self.variation, self.load = np.ones(rows), np.zeros(rows)
        self.last = np.zeros(rows)

    def signals(self, now: Floats, load: Floats) -> Floats:
        """What is estimated when requests arrive at ``now`` (s) and meet a ``load``, (B, 4).

        The rate over a long time, that over a short one relative to it, the variation of the gaps,
        and the load.
        """
        step = [max(1 / (self.count + 5), 1 / memory) for memory in MEMORY]
        if self.count:
            gap = np.maximum(now - self.last, 0.0) * self.served
            for k in (0, 1):
                self.gaps[k] += step[k] * (gap - self.gaps[k])
            off = gap / np.maximum(self.gaps[0], 1e-3) - 1
            self.variation += step[0] * (off**2 - self.variation)
        self.load += step[2] * (load - self.load)
        self.count, self.last = self.count + 1, now
        long, short = -np.log(np.maximum(self.gaps, 1e-3))
        varied = 0.5 * np.log((0.1 + self.variation) / 1.1)
        return np.clip(np.stack([long + 0.2, short - long, varied, self.load - 0.8], -1), -2, 2)


@lru_cache(maxsize=96)
def _stage(stream: int, rows: int, requests: int, split: str) -> tuple[RoutingBatch, Fleet, Any]:
    """Systems of a drawn fleet, the fleet, and its load and burstiness."""
    drawn = draw_fleet(stream, "{}")
    given = {"split": split, "reward": "completed_qos", "episode_requests": requests}
    problem = problem_of(drawn, **given)
    setting = drawn.get("setting", {"arrivals": "poisson", "arrivals_kwargs": {}, **drawn})
    fleet = Fleet(RoutingSystem.from_problem(problem))
    return RoutingBatch(problem, rows), fleet, setting


Act = Callable[[RoutingBatch, Fleet], NDArray[np.int64]]


def _run(batch: RoutingBatch, fleet: Fleet, act: Act) -> Floats:
    """Average QoS (B,) of what ``act`` decides in the drawn episodes of a batch."""
    every = np.ones(len(batch.action_mask), dtype=np.int8)
    total, requests = np.zeros(len(every)), batch.problem.episode_requests
    for _ in range(requests):
        batch.step(act(batch, fleet), every)
        total += batch.out[:, 0] + batch.out[:, 1]
    return total / requests


@lru_cache(maxsize=1)
def shipped_weights() -> Floats:
    """The 51 weights of the shipped index."""
    return load_policy(shipped("llm_routing")["fleet_search"]).net.weights.numpy().astype(float)


def index_qos(arm: str, weights: Floats, stage: tuple[RoutingBatch, Fleet, Any]) -> Floats:
    """Average QoS (B,) of an index a row in the drawn episodes, by weights (B, signals x 7)."""
    batch, fleet, setting = stage
    rows, count = len(weights), SIGNALS[arm]
    batch.begin(np.ones(rows, dtype=np.int8))
    limit = np.asarray(batch.observation["latency_requirement"][:1, 0], dtype=np.float64)
    _, rate, feasible = fleet.within(limit)
    served = float((rate * feasible).sum()) or float(rate.sum())
    base, moves = shipped_weights(), weights.reshape(rows, count, len(TOUCHED))
    given = np.ones((rows, count))
    if arm == TRUE:
        bursts = dispersion(setting["arrivals"], setting["arrivals_kwargs"])
        both = math.log(setting["rate"] / served) + 0.2, 0.4 * math.log(bursts) - 0.5
        given[:, 1:] = np.clip(both, -2, 2)
    kept, every = Estimates(rows, served), np.arange(rows)
    last = batch.arrivals.shape[1] - 1

    def act(batch: RoutingBatch, fleet: Fleet) -> NDArray[np.int64]:
        experts, context = fleet.features(batch.observation)
        if arm == RUNNING:
            now = batch.arrivals[every, np.minimum(batch.env["index"].astype(int), last)]
            given[:, 1:] = kept.signals(now, (context[:, 0] + 2.5) / 3)
        own = np.tile(base, (rows, 1))
        own[:, TOUCHED] += np.einsum("bs,bst->bt", given, moves)
        values = index_values(own.astype(np.float32), experts, context)
        return np.where(batch.action_mask > 0, values, -np.inf).argmax(-1)

    return _run(batch, fleet, act)


def play(arm: str, population: Floats, stream: int, seeds: Sequence[int], split: str) -> Floats:
    """Average QoS (P, E) of indexes (P, K) in the same E episodes of a fleet."""
    stage = _stage(stream, len(population) * len(seeds), REQUESTS, split)
    for row in range(len(population) * len(seeds)):
        seed = seeds[row // len(population)]
        stage[0].draw(row, np.random.default_rng([seed, stream]))
    return index_qos(arm, np.tile(population, (len(seeds), 1)), stage).reshape(len(seeds), -1).T


def search(
    arm: str, population: int, generations: int, seed: int, qos: Callable[..., Floats]
) -> Floats:
    """The mean that the cross-entropy method ends at; ``qos(candidates, rng)`` is (P, E)."""
    center = np.zeros(SIGNALS[arm] * len(TOUCHED))
    spread = np.full_like(center, SPREAD)
    rng = np.random.default_rng([seed, 11])
    for _ in range(generations):
        drawn = center + spread * rng.standard_normal((population, len(center)))
        elite = drawn[np.argsort(-fitness(qos(drawn, rng)))[: max(int(population * ELITE), 2)]]
        center = center + STEP * (elite.mean(0) - center)
        spread = spread + STEP * (elite.std(0) - spread)
    return center


def search_arm(arm: str, seed: int, quick: bool, pool: Any) -> Floats:
    """Weights of an arm, searched on the training fleets."""

    def qos(candidates: Floats, rng: np.random.Generator) -> Floats:
        streams = rng.choice(FLEETS, 2 if quick else PLAYED, replace=False)
        seeds = [int(rng.integers(1 << 31))]
        jobs = [(arm, candidates, int(stream), seeds, "train") for stream in streams]
        found = dict(run_jobs(play, jobs, pool))
        return np.concatenate([found[k] for k in range(len(jobs))], 1)

    size, generations = (10, 1) if quick else (POPULATION, GENERATIONS)
    return search(arm, size, generations, seed, qos)


def search_alone(stream: int, quick: bool) -> Floats:
    """Weights of the index for one fleet, and on validation prompts as `tune` has them."""

    def qos(candidates: Floats, rng: np.random.Generator) -> Floats:
        seeds = rng.integers(1 << 31, size=1 if quick else ALONE_EPISODES).tolist()
        return play(NOTHING, candidates, stream, seeds, "val")

    size, generations = (10, 1) if quick else (ALONE_POPULATION, ALONE_GENERATIONS)
    return search(NOTHING, size, generations, stream, qos)


def tune_rule(stream: int, quick: bool) -> dict[str, Any]:
    """Parameters of `expected_qos` for one fleet."""
    fleet = {"fleet": draw_fleet(stream, "{}")["setting"]}
    return tune("expected_qos", fleet, QUICK if quick else BUDGET).parameters


def measure(
    stream: int,
    indexes: Sequence[tuple[str, Floats]],
    rules: Sequence[Mapping[str, Any]],
    episodes: int,
    requests: int,
) -> Floats:
    """Average QoS (policies, E) of indexes, then of `expected_qos`, in the same episodes."""
    stage = _stage(stream, episodes, requests, "val")
    batch, fleet, _ = stage

    def redraw() -> None:
        for row in range(episodes):
            batch.draw(row, np.random.default_rng([EVAL_SEED, stream, row]))

    found = []
    for arm, weights in indexes:
        redraw()
        found.append(index_qos(arm, np.tile(weights, (episodes, 1)), stage))
    for given in rules:
        policy = make_policy("expected_qos", fleet.system, **given)
        policy.reset(episodes, 0)
        redraw()
        batch.begin(np.ones(episodes, dtype=np.int8))
        found.append(_run(batch, fleet, lambda b, _, p=policy: p.act(b.observation, b.action_mask)))
    return np.array(found)


def _kept(file: Path, made: Callable[[], Any]) -> Any:
    """What is in the file, made first if there is none."""
    if not file.exists():
        write_json(
            file, np.asarray(value).tolist() if not isinstance(value := made(), dict) else value
        )
    return json.loads(file.read_text(encoding="utf-8"))


def index_signals(options: Options) -> None:
    """QoS of every arm on the validation fleets, and what it gains over nothing more."""
    own: Any = options
    quick, folder = options.quick, own.searched
    folder.mkdir(parents=True, exist_ok=True)
    mark = "quick_" * quick
    streams = [VALIDATION + k for k in range(2 if quick else VALIDATION_FLEETS)]
    pool = open_pool(own.workers)
    labels: list[str] = []
    indexes: list[tuple[str, Floats]] = []
    for seed in range(own.searches):
        for k, arm in enumerate(SIGNALS):
            file = folder / f"{mark}arm_{k}_{seed}.json"
            weights = _kept(file, lambda a=arm, s=seed: search_arm(a, s, quick, pool))
            indexes.append((arm, np.array(weights)))
            labels.append(arm)
            print(f"{arm}, search {seed + 1}: done", flush=True)
    alone, rules = {}, {}
    for name, function, into in (("alone", search_alone, alone), ("rule", tune_rule, rules)):
        files = {s: folder / f"{mark}{name}_{s}.json" for s in streams}
        missing = [s for s in streams if not files[s].exists()]
        for at, found in run_jobs(function, [(s, quick) for s in missing], pool):
            _kept(files[missing[at]], lambda f=found: f)
            print(f"{name}: fleet {missing[at] - VALIDATION} done", flush=True)
        into.update({s: _kept(files[s], dict) for s in streams})
    requests = QUICK.requests if quick else EVAL_REQUESTS
    indexes.append((NOTHING, np.zeros(len(TOUCHED))))
    jobs = []
    for stream in streams:
        each = [*indexes, (NOTHING, np.array(alone[stream]))]
        jobs.append((stream, each, [{}, rules[stream]], options.episodes, requests))
    measured = dict(run_jobs(measure, jobs, pool))
    if pool is not None:
        pool.shutdown()
    names = [*labels, SHIPPED, ALONE, REGISTERED, TUNED]
    every = np.array([measured[k] for k in range(len(streams))])
    qos = {  # (fleets, E), means over the searches of an arm
        arm: every[:, [k for k, name in enumerate(names) if name == arm]].mean(1)
        for arm in dict.fromkeys(names)
    }
    save(options, "index_signals", *_table(qos, own.searches))


def _table(qos: Mapping[str, Floats], searches: int) -> tuple[Any, ...]:
    """Rows of every fleet and policy, and a note a policy; both are printed."""
    rows, notes, body = [], [], []
    for arm, own in qos.items():
        for k, one in enumerate(own):
            gain = paired_difference(one, qos[NOTHING][k], mean)
            rows.append(
                {
                    "fleet": k,
                    "policy": arm,
                    "qos": round(float(one.mean()), 6),
                    "gain": round(gain.value, 6),
                    "gain_low": round(gain.low, 6),
                    "gain_high": round(gain.high, 6),
                    "episodes": len(one),
                    "searches": searches if arm in SIGNALS else 1,
                }
            )
        # Over the fleets, which differ more than the episodes of one do.
        more = {
            rival: stratified_bootstrap((own - qos[rival]).mean(1), mean)
            for rival in (NOTHING, TUNED)
        }
        text = {r: "{:+.4f} [{:+.4f}, {:+.4f}]".format(*one) for r, one in more.items()}
        notes.append(
            note(
                f"{arm}: QoS {own.mean():.4f}, {text[NOTHING]} over {NOTHING}, {text[TUNED]} over "
                f"{TUNED}; intervals over {len(own)} fleets.",
                policy=arm,
                qos=float(own.mean()),
                **more[NOTHING]._asdict(),
                over_tuned=more[TUNED]._asdict(),
            )
        )
        body.append([arm, f"{own.mean():.4f}", *text.values()])
    headings = ["index", "QoS", f"over {NOTHING}", f"over {TUNED}"]
    print_table("mean QoS over validation fleets", headings, body)
    return rows, *notes


FIGURES = {"index_signals": index_signals}


def main(argv: Sequence[str] | None = None) -> int:
    """Search, measure, print and save; see ``--help``."""

    def own(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--searched", type=Path, default=Path("runs/index_signals"))
        parser.add_argument("--searches", type=int, default=1, help="of each arm (1)")
        parser.add_argument("--workers", type=int, default=1, help="processes (1)")

    return run_figures(FIGURES, {}, argv, __doc__, MODULE, episodes=16, own=own)


if __name__ == "__main__":
    run_main(main)
