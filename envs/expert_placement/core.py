"""One system over an episode: what the single, the vector and the multi-agent environment share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import create_empty_array

from servegym.envs._batch import Batch
from servegym.envs.expert_placement.config import Problem
from servegym.envs.expert_placement.decode import (
    decode_budget,
    decode_heights,
    decode_scores,
    repair_placement,
)
from servegym.envs.expert_placement.simulator import (
    Requests,
    Simulator,
    Snapshot,
    uniform_placement,
)

MAX_COUNT = 1e9
MAX_SECONDS = 1e6
MAX_REQUESTS = 1e6
LEAST_LATENCY_S = 1e-3
"""What the logarithm of a latency is of at least, in seconds; a server without requests has it."""
# Key figures and parts of the reward are given by server for clusters of up to this many.
MAX_LISTED_SERVERS = 16

OBSERVATION: dict[str, tuple[str, float | str, str]] = {
    "arrivals": ("N", MAX_REQUESTS, "requests that arrived in the last epoch"),
    "counts": ("NLE", MAX_COUNT, "a server's tokens to an expert since the last adopted change"),
    "gpu_backlog_s": ("G", MAX_SECONDS, "queued calls of experts"),
    "in_system": ("N", MAX_REQUESTS, "requests that arrived there and are not served"),
    "link_backlog_s": ("N", MAX_SECONDS, "queued messages"),
    "loads_left": ("G", "L E", "experts still to be loaded"),
    "memory": ("G", 2.0, "slots in use over slots, above 1 with a staging slot"),
    "placement": ("GLE", 1.0, "int8, placement adopted last"),
    "progress": ("1", 1.0, "share of the episode"),
    "seconds_per_token": ("N2", MAX_SECONDS, "mean, local and remote (Eq. 4)"),
    "window_s": ("1", 1e9, "time of `counts`"),
}
"""Parts of an observation in the order of their space, which gymnasium sorts by key: axes, most and
meaning. From 0 they are clipped there."""

REQUEST_LOG = np.dtype(
    [
        ("arrival_s", "f8"),
        ("first_token_s", "f8"),
        ("finish_s", "f8"),
        ("server", "i4"),
        ("prompt", "i4"),
        ("task", "i4"),
        ("prompt_tokens", "i4"),
        ("output_tokens", "i4"),
    ]
)
_POSITION = np.dtype([("index", "i8"), ("adopted", "i8"), ("changed_s", "f8")])


@dataclass
class PlacementState:
    """Everything that one system is: ``clone_state`` gives it.

    Attributes:
        simulator: state arrays of the kernel.
        requests: the requests of the episode.
        env: record of the decisions made, of the changes adopted and of the last one's time.
        history: ``(N, L, E)`` counts from before the start, None after the first change.
        arrived: ``(N,)`` requests that had arrived before the last epoch.
        local_ratio: ``(epochs, N)`` share of each epoch's tokens served where they arrived.
        random: state of the generator that draws the next episodes.
        finished: whether the episode has ended.
    """

    simulator: Snapshot
    requests: Requests
    env: np.ndarray
    history: np.ndarray | None
    arrived: np.ndarray
    local_ratio: np.ndarray
    random: Any = None
    finished: bool = False


def observation_space(problem: Problem) -> spaces.Dict:
    """The observation space of one system."""
    c = problem.cluster
    sizes = {"N": c.num_servers, "G": c.num_gpus, "L": c.layers, "E": c.experts, "2": 2, "1": 1}
    parts: dict[str, spaces.Space] = {}
    for name, (axes, high, _) in OBSERVATION.items():
        dtype = np.int8 if name == "placement" else np.float32
        high = math.prod(sizes[x] for x in high.split()) if isinstance(high, str) else high
        parts[name] = spaces.Box(0, high, tuple(sizes[x] for x in axes), dtype)
    return spaces.Dict(parts)


def action_space(problem: Problem) -> spaces.Dict:
    """The action space of one system, by the problem's mode."""
    c = problem.cluster
    plan: spaces.Space
    mode = problem.arguments.action_mode
    if mode in ("layer_budget", "layer_height"):
        plan = spaces.Box(0.0, 1.0, (c.num_servers, c.layers), np.float32)
    elif mode == "expert_score":
        plan = spaces.Box(0.0, 1.0, (c.num_servers, c.layers, c.experts), np.float32)
    else:
        plan = spaces.MultiBinary([c.num_gpus, c.layers, c.experts])
    return spaces.Dict({"migrate": spaces.Discrete(2), "plan": plan})


def check_action(action: Any, space: Any) -> tuple[bool, np.ndarray]:
    """Both parts of an action, the plan clipped to [0, 1].

    Raises:
        ValueError: naming the part, what was given and what is allowed.
    """
    if not isinstance(action, dict) or set(action) != {"migrate", "plan"}:
        raise ValueError(f"action={action!r} must be a dict of 'migrate' and 'plan'.")
    migrate = np.asarray(action["migrate"])
    allowed = migrate.size == 1 and migrate.dtype.kind in "biu"
    if not allowed or int(migrate.reshape(())) not in (0, 1):
        raise ValueError(f"action['migrate']={action['migrate']!r} must be 0 (keep) or 1.")
    plan = np.asarray(action["plan"])
    shape = space["plan"].shape
    if plan.shape != shape or plan.dtype.kind not in "biuf":
        raise ValueError(
            f"action['plan'] must be numbers of shape {shape}, got shape {plan.shape} and dtype "
            f"{plan.dtype}."
        )
    if not np.isfinite(plan).all():
        raise ValueError("action['plan'] must be finite.")
    return bool(migrate.reshape(())), np.clip(plan, 0, 1)


class PlacementEpisode:
    """A cluster over one episode of ``epochs`` decisions.

    Attributes:
        problem: what all episodes share.
        simulator: the engine.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.simulator = Simulator(problem.cluster, problem.prompts, **problem.simulator_options)
        self._start = uniform_placement(problem.cluster)
        space: dict[str, Any] = observation_space(problem).spaces
        self._parts = {name: (float(box.high.max()), box.dtype) for name, box in space.items()}

    # ----------------------------------------------------------------------------- an episode

    def begin(self, random: np.random.Generator) -> None:
        """Draw an episode and start it, the experts spread uniformly."""
        problem = self.problem
        self.requests = self._draw_requests(random)
        self.history: np.ndarray | None = self._draw_history(random)
        self.simulator.begin(self.requests, self._start)
        self.epoch = 0
        self.adopted = 0
        self.changed_s = -problem.arguments.history_requests * float(problem.interarrival_s.mean())
        self.arrived = np.zeros(problem.cluster.num_servers, dtype=np.int64)
        self.local_ratio = np.full((problem.arguments.epochs, problem.cluster.num_servers), np.nan)

    def _draw_requests(self, random: np.random.Generator) -> Requests:
        problem = self.problem
        span = problem.arguments.epochs * problem.arguments.epoch_s
        servers = problem.cluster.num_servers
        number = random.poisson(span / problem.interarrival_s)
        home = np.repeat(np.arange(servers), number)
        arrival = random.uniform(0.0, span, len(home))
        order = np.argsort(arrival, kind="stable")
        home, arrival = home[order], arrival[order]
        low, high = problem.arguments.output_range
        return Requests(
            home=home,
            arrival=arrival,
            prompt=self._draw_prompts(random, problem.rows, home, arrival),
            outputs=random.integers(low, high + 1, len(home)),
            offset=random.integers(0, 1 << 16, len(home)),
        )

    def _draw_prompts(self, random, rows, home, arrival) -> np.ndarray:
        tasks, rotate_s = len(rows), self.problem.arguments.rotate_s
        turn = (arrival // rotate_s).astype(np.int64) if rotate_s > 0 else 0
        task = (home + turn) % tasks
        sizes = np.array([len(of_task) for of_task in rows])
        at = (random.random(len(home)) * sizes[task]).astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        return np.concatenate(rows)[starts[task] + at]

    def _draw_history(self, random: np.random.Generator) -> np.ndarray:
        problem = self.problem
        home = np.repeat(np.arange(problem.cluster.num_servers), problem.arguments.history_requests)
        prompt = self._draw_prompts(random, problem.history_rows, home, np.zeros(len(home)))
        low, high = problem.arguments.output_range
        outputs = random.integers(low, high + 1, len(home))
        return self.simulator.count_assignments(home, prompt, outputs)

    def counts(self) -> np.ndarray:
        """Int64 ``(N, L, E)``: assignments since the last adopted change, history included."""
        counts = self.simulator.counts()
        return counts if self.history is None else counts + self.history

    def decode(self, plan: np.ndarray) -> np.ndarray:
        """The feasible placement, uint8 ``(G, L, E)``, that a plan of the action space means."""
        cluster, mode = self.problem.cluster, self.problem.arguments.action_mode
        if mode == "placement":
            return repair_placement(cluster, plan, self.counts())
        of = {
            "layer_budget": decode_budget,
            "layer_height": decode_heights,
            "expert_score": decode_scores,
        }[mode]
        return of(cluster, plan, self.counts(), self.simulator.target())

    def advance(self, placement: np.ndarray | None) -> tuple[np.ndarray, bool, bool]:
        """Adopt a feasible placement, if one is given, and go on to the next decision.

        After the last epoch until all requests are served.

        Returns:
            Request-seconds that each server's requests spent in the system ``(N,)``, whether a
            change was adopted, and whether the episode has ended.
        """
        arguments, sim = self.problem.arguments, self.simulator
        if arguments.serving == "offload":
            placement = None  # caches fill themselves
        adopted = placement is not None and not np.array_equal(placement, sim.target())
        if placement is not None and adopted:
            sim.adopt(placement, at_once=arguments.free_start and self.epoch == 0)
            self.history = None
            self.changed_s = sim.now
            self.adopted += 1
        server = sim.state.server
        before = server["area"].copy()
        names = ("all_local_tokens", "all_remote_tokens")
        local, remote = (server[name].copy() for name in names)
        self.arrived = server["arrived"].copy()
        self.epoch += 1
        sim.run(self.epoch * arguments.epoch_s)
        ended = self.epoch == arguments.epochs
        if ended:
            sim.run()
        server = sim.state.server
        local, remote = server[names[0]] - local, server[names[1]] - remote
        served = local + remote
        np.divide(local, served, out=self.local_ratio[self.epoch - 1], where=served > 0)
        return sim.state.server["area"] - before, adopted, ended

    def rewards(self, area: np.ndarray) -> np.ndarray:
        """The servers' parts of the reward ``(N,)``, by their request-seconds ``(N,)``."""
        arrivals = self.problem.expected_arrivals
        if self.problem.arguments.reward == "latency":
            return -area / float(arrivals.sum())
        log_latency = np.log(np.maximum(area / arrivals, LEAST_LATENCY_S))
        return -log_latency * arrivals / float(arrivals.sum())

    # ---------------------------------------------------------------------------- looking at it

    def seconds_per_token(self) -> np.ndarray:
        """``(N, 2)``: mean seconds per assigned token of local and of remote calls.

        Of the calls that have ended since the last adopted change (Eq. 4). A server without any
        has the mean of all servers; before any call at all, one uncontended token. The paper
        refreshes its computation times every 30 s; here the mean runs over the whole window.
        """
        c, state = self.problem.cluster, self.simulator.state
        server = state.server
        local = c.expert_base_s[c.home_gpu] + c.expert_token_s[c.home_gpu]
        plant = self.simulator.plant
        stage = 2 * float(plant.cfg["stage_token"][0] + plant.cfg["stage_base"][0])
        token_s = (1.0 / c.link_bytes_s) * c.activation_bytes
        trip = token_s + token_s.T + c.latency_s + c.latency_s.T
        others = max(c.num_servers - 1, 1)
        np.fill_diagonal(trip, 0.0)
        remote = trip.sum(axis=1) / others + 2 * c.message_cost_s + stage + local.mean()
        times = np.stack([local, remote], axis=1)
        for column, name in enumerate(("local", "remote")):
            seconds, tokens = server[f"{name}_s"], server[f"{name}_tokens"]
            if tokens.sum() > 0:
                mean = seconds.sum() / tokens.sum()
                times[:, column] = np.where(tokens > 0, seconds / np.maximum(tokens, 1), mean)
        return times

    def observation(self) -> dict[str, np.ndarray]:
        """Fresh arrays, see :func:`observation_space`."""
        problem, sim = self.problem, self.simulator
        c, state, now = problem.cluster, sim.state, sim.now
        n = c.num_servers
        links = np.maximum(state.link["free"] - now, 0.0)
        links = links.reshape(n, n).max(axis=1) if c.link_model == "pairwise" else links[:n]
        left = ((state.target > 0) & (state.resident == 0)).sum(axis=1)

        values = {
            "arrivals": state.server["arrived"] - self.arrived,
            "counts": self.counts(),
            "gpu_backlog_s": state.gpu["free"] - now,
            "in_system": state.server["in_system"],
            "link_backlog_s": links,
            "loads_left": left,
            "memory": state.gpu["used"] / np.maximum(c.slots, 1),
            "placement": sim.target(),
            "progress": np.array([self.epoch / problem.arguments.epochs]),
            "seconds_per_token": self.seconds_per_token(),
            "window_s": np.array([now - self.changed_s]),
        }
        return {
            name: np.clip(values[name], 0.0, high).astype(dtype)
            for name, (high, dtype) in self._parts.items()
        }

    def kpis(self) -> dict[str, float]:
        """Key figures of the episode so far, over the requests that are served."""
        sim = self.simulator
        server, meta = sim.state.server, sim.state.meta[0]
        latency = sim.latencies()
        served = ~np.isnan(latency)
        nan = float("nan")

        def mean(values: np.ndarray) -> float:
            return float(values.mean()) if len(values) else nan

        def p99(values: np.ndarray) -> float:
            return float(np.percentile(values, 99)) if len(values) else nan

        def ratio(part: str, rest: str) -> float:
            one, other = int(server[part].sum()), int(server[rest].sum())
            return one / (one + other) if one + other else nan

        started = sim.state.request["first"] - sim.load.request["arrival"]
        steps = int(server["layer_steps"].sum())
        kpis = {
            "mean_latency_s": mean(latency[served]),
            "p99_latency_s": p99(latency[served]),
            "mean_ttft_s": mean(started[~np.isnan(started)]),
            "local_token_ratio": ratio("all_local_tokens", "all_remote_tokens"),
            "local_call_ratio": ratio("all_local_calls", "all_remote_calls"),
            "remote_layer_ratio": int(server["remote_layer_steps"].sum()) / steps if steps else nan,
            "remote_assignments": float(server["all_remote_tokens"].sum()),
            "network_bytes": float(meta["network_bytes"]),
            "weight_bytes": float(meta["weight_bytes"]),
            "messages": float(meta["messages"]),
            "migrations": float(self.adopted),
            "expert_loads": float(meta["loads"]),
            "requests": float(served.sum()),
        }
        if self.problem.cluster.num_servers <= MAX_LISTED_SERVERS:
            for n in range(self.problem.cluster.num_servers):
                of_server = latency[served & (self.requests.home == n)]
                kpis[f"mean_latency_s_server_{n}"] = mean(of_server)
                kpis[f"p99_latency_s_server_{n}"] = p99(of_server)
        return kpis

    def request_log(self) -> np.ndarray:
        """One row per request that has arrived, see :data:`REQUEST_LOG`.

        Which prompt it is, and how long its answer becomes, is known once it has ended: before
        that ``finish_s`` is NaN, ``prompt`` and ``task`` are -1 and ``output_tokens`` is 0.
        """
        count = int(self.simulator.state.meta["next_request"][0])
        requests, state = self.requests, self.simulator.state
        prompt = requests.prompt[:count]
        log = np.zeros(count, dtype=REQUEST_LOG)
        log["arrival_s"] = requests.arrival[:count]
        log["first_token_s"] = state.request["first"][:count]
        log["finish_s"] = state.request["finish"][:count]
        log["server"] = requests.home[:count]
        log["prompt"] = prompt
        log["task"] = self.problem.activations.task[prompt]
        log["prompt_tokens"] = self.problem.prompts.tokens[prompt]
        log["output_tokens"] = requests.outputs[:count]
        pending = np.isnan(log["finish_s"])
        to_come = log["first_token_s"] > self.simulator.now  # the token is on its way back
        log["first_token_s"][to_come] = np.nan
        for name, hidden in (("prompt", -1), ("task", -1), ("output_tokens", 0)):
            log[name][pending] = hidden
        return log

    def clone(self) -> PlacementState:
        """Copy the system."""
        return PlacementState(
            simulator=self.simulator.clone(),
            requests=self.requests,
            env=np.array([(self.epoch, self.adopted, self.changed_s)], _POSITION),
            history=None if self.history is None else self.history.copy(),
            arrived=self.arrived.copy(),
            local_ratio=self.local_ratio.copy(),
        )

    def restore(self, state: PlacementState) -> None:
        """Go back to a copied state."""
        ours, copied = self.simulator.state.resident, state.simulator.state.resident
        Batch.check_state("simulator.state.resident", ours, copied, ours.shape == copied.shape)
        self.requests = state.requests
        self.simulator.begin(state.requests, self._start)
        self.simulator.restore(state.simulator)
        self.epoch, self.adopted, self.changed_s = state.env[0].item()
        self.history = None if state.history is None else state.history.copy()
        self.arrived = state.arrived.copy()
        self.local_ratio = state.local_ratio.copy()


class PlacementBatch(Batch):
    """B systems of one problem, advanced one after the other: a step of one is many events.

    Attributes:
        problem: what the systems share.
        episodes: the systems.
        out: float64 ``(B, T + 1)``: the servers' parts of the last reward, of more than
            `MAX_LISTED_SERVERS` their sum; then whether the episode ended.
        adopted: bool ``(B,)``, whether the last step adopted a change of placement.
    """

    def __init__(self, problem: Problem, num_rows: int) -> None:
        self.problem = problem
        self.episodes = [PlacementEpisode(problem) for _ in range(num_rows)]
        servers = problem.cluster.num_servers
        reward = problem.arguments.reward
        self.terms = (reward,)
        if servers <= MAX_LISTED_SERVERS:
            self.terms = tuple(f"{reward}_server_{n}" for n in range(servers))
        self.observation: Any = create_empty_array(observation_space(problem), num_rows)
        self.action_mask = np.zeros((num_rows, 0), dtype=np.int8)
        self.out = np.zeros((num_rows, len(self.terms) + 1))
        self.adopted = np.zeros(num_rows, dtype=bool)

    def draw(self, row: int, random: np.random.Generator) -> None:
        """Draw the next episode of a row and put it at its start."""
        self.episodes[row].begin(random)

    def begin(self, which: np.ndarray) -> None:
        """Write the observations of the rows with ``which`` (int8 ``(B,)``) set."""
        for row in np.flatnonzero(which).tolist():
            for name, part in self.episodes[row].observation().items():
                self.observation[name][row] = part

    def step(self, actions: list[tuple[bool, np.ndarray]], which: np.ndarray) -> int:
        """Advance the rows with ``which`` set by an epoch; B actions, see `check_action`."""
        rows = np.flatnonzero(which).tolist()
        for row in rows:
            episode, (migrate, plan) = self.episodes[row], actions[row]
            area, self.adopted[row], ended = episode.advance(
                episode.decode(plan) if migrate else None
            )
            parts = episode.rewards(area)
            self.out[row, :-1] = parts if len(parts) == len(self.terms) else parts.sum()
            self.out[row, -1] = ended
        self.begin(which)
        return int(self.out[rows, -1].sum())

    def kpis(self, row: int) -> dict[str, float]:
        """Key figures of the episode so far."""
        return self.episodes[row].kpis()

    def request_log(self, row: int) -> np.ndarray:
        """One row per request that has arrived, see :data:`REQUEST_LOG`."""
        return self.episodes[row].request_log()

    def clone(self, row: int) -> PlacementState:
        """Copy one system."""
        return self.episodes[row].clone()

    def restore(self, row: int, state: PlacementState) -> None:
        """Put a copied system back in a row and write its observation."""
        self.episodes[row].restore(state)
        self.begin(np.arange(len(self.episodes)) == row)
