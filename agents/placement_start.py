"""Where the placement agents start: the best of several placements on training requests.

The candidates are baselines and placements annealed by the estimate of `placement_estimate`, with
several factors on what links wait. Each is played in the simulator on the same episodes of the
problem, and the fastest is taken. Then layers of it are exchanged two by two, as long as it gains.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.agents.common import parse_settings
from servegym.agents.placement_estimate import Estimate
from servegym.baselines.placement.optimum import proxy_optimum
from servegym.baselines.placement.prism import prism
from servegym.baselines.placement.simple import whole_layer
from servegym.envs.expert_placement.config import Problem, with_arguments
from servegym.envs.expert_placement.core import PlacementSystem
from servegym.envs.expert_placement.decode import assign_gpus
from servegym.envs.expert_placement.env import make_problem

Bools = NDArray[np.bool_]
HEURISTICS = {"whole_layer": whole_layer, "prism": prism, "proxy_optimum": proxy_optimum}
WAITS = (0.1, 0.3, 1.0)
"""Factors on the waiting time of a queue with random arrivals that are tried."""
SWAPS = 160
"""Exchanges of two layers that are tried."""
MOST_SERVERS = 8
"""Larger clusters start from a heuristic: their estimate takes too long."""


@dataclass(frozen=True, eq=False)
class Start:
    """A placement to start from and how it was found.

    Attributes:
        held: Bool (N, L, E), experts of each server.
        name: The candidate.
        latency_s: Mean latency of every candidate on the same episodes.
        calls: Expert calls simulated to compare them.
    """

    held: Bools
    name: str
    latency_s: dict[str, float]
    calls: int

    def to_json(self) -> str:
        """As text; the placement as hexadecimal digits."""
        packed = np.packbits(self.held).tobytes().hex()
        return json.dumps(asdict(self) | {"held": packed, "shape": self.held.shape})

    @classmethod
    def from_json(cls, text: str) -> Start:
        """Inverse of `to_json`."""
        found = json.loads(text)
        shape = tuple(found.pop("shape"))
        bits = np.unpackbits(np.frombuffer(bytes.fromhex(found["held"]), np.uint8))
        return cls(**(found | {"held": bits[: np.prod(shape)].reshape(shape) > 0}))


def best_start(
    problem: Problem,
    *,
    waits: Sequence[float] = WAITS,
    tries: int = 3,
    steps: int = 3_000_000,
    episodes: int = 2,
    swaps: int = SWAPS,
    seed: int = 0,
) -> Start:
    """The fastest of the heuristics and of the annealed placements on episodes of the problem.

    Args:
        problem: What is to be placed; only its prompts are used, those of its split.
        waits: Factors to anneal with.
        tries: Annealed placements of each factor.
        steps: Proposals of one annealing.
        episodes: Episodes that every candidate plays.
        swaps: Exchanges of two layers to try at last.
        seed: Of everything drawn.
    """
    about, system, c = Estimate(problem, seed=seed), PlacementSystem(problem), problem.cluster
    held: dict[str, Bools] = {
        name: c.server_view(place(about.counts, c.slots, c.gpu_server))
        for name, place in HEURISTICS.items()
    }
    random = np.random.default_rng([seed, 1])
    played = []
    for _ in range(episodes):
        system.begin(random)
        played.append(system.requests)
    none = np.zeros((c.num_gpus, c.layers, c.experts), np.uint8)
    latency: dict[str, float] = {}
    calls = 0

    def play(name: str) -> None:
        nonlocal calls
        plan = assign_gpus(c, held[name], about.counts.sum(axis=0), none)
        seconds = []
        for requests in played:
            system.simulator.begin(requests, plan)
            system.simulator.run()
            seconds.append(float(system.simulator.latencies().mean()))
            calls += int(system.simulator.state.meta["calls"][0])
        latency[name] = float(np.mean(seconds))

    for name in HEURISTICS:
        play(name)
    best = min(latency, key=lambda name: latency[name])
    if c.num_servers <= MOST_SERVERS and c.experts <= 64:
        for wait in waits:
            for k in range(tries):
                name = f"annealed, wait {wait:g}, try {k}"
                held[name] = about.anneal(held[best], wait, steps, seed + k)
                play(name)
    best = min(latency, key=lambda name: latency[name])
    return climb(problem, Start(held[best], best, latency, calls), about.counts, swaps, seed)


def climb(problem: Problem, start: Start, counts: Any, swaps: int, seed: int) -> Start:
    """Exchange layers of a start two by two where that is faster in the simulator.

    Two layers change places at all servers: who holds how many experts of them, the most used
    first. The requests are those of three epochs, the same for all proposals.

    Args:
        problem: What is to be placed.
        start: The start.
        counts: (N, L, E) assignments, which say which experts are most used.
        swaps: Exchanges to try.
        seed: Of the requests and the exchanges.
    """
    c, calls = problem.cluster, start.calls
    if swaps < 1 or c.layers < 2:
        return start
    random = np.random.default_rng([seed, 2])
    system = PlacementSystem(with_arguments(problem, epochs=3))
    system.begin(random)
    none = np.zeros((c.num_gpus, c.layers, c.experts), np.uint8)
    order = np.argsort(-counts.sum(axis=0), axis=1, kind="stable")
    held, least, gained = start.held, np.inf, 0
    for k in range(swaps + 1):
        new = held.copy()
        if k:
            a, b = random.choice(c.layers, 2, replace=False)
            new[:, a, order[a]] = held[:, b, order[b]]
            new[:, b, order[b]] = held[:, a, order[a]]
        plan = assign_gpus(c, new, counts.sum(axis=0), none)
        system.simulator.begin(system.requests, plan)
        system.simulator.run()
        calls += int(system.simulator.state.meta["calls"][0])
        seconds = float(system.simulator.latencies().mean())
        if seconds < least:
            held, least, gained = new, seconds, gained + (k > 0)
    name = f"{start.name}, {gained} of {swaps} exchanges of layers"
    return Start(held, name, start.latency_s, calls)


def find_start(run: Path, args: Any) -> Start | None:
    """The start of a training run, kept in its folder; None if its base is not ``best``."""
    path = run / "start.json"
    if args.base != "best":
        return None
    if not path.exists():
        problem = make_problem(parse_settings(args.set))
        found = best_start(problem, tries=args.start_tries, steps=args.start_steps, seed=args.seed)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(found.to_json(), encoding="utf-8")
        temporary.replace(path)
    return Start.from_json(path.read_text(encoding="utf-8"))


def setting_word(system: Any) -> str:
    """A word that is the same where a start means the same.

    Args:
        system: A `Problem` or the description of one.
    """
    c = system.cluster
    numbers = (c.slots, c.gpu_server, c.link_bytes_s, c.latency_s, system.interarrival_s,
               [c.layers, c.experts, c.message_cost_s])  # fmt: skip
    words = [np.ascontiguousarray(part, dtype=np.float64).tobytes() for part in numbers]
    text = f"{c.model} {c.messages} {system.migration_source}"
    return hashlib.sha256(b"".join([*words, text.encode()])).hexdigest()[:16]
