"""A batch of routing systems: the state arrays behind the single and the vector environment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from servegym._jit import compile_kernels
from servegym.envs._arguments import Range, ends
from servegym.envs._batch import Batch
from servegym.envs._columns import Column, bounds
from servegym.envs.llm_routing import kernel
from servegym.envs.llm_routing.config import MEMORY_POLICIES, SCHEDULERS, Problem
from servegym.envs.llm_routing.fleets import FLEET_COLUMNS
from servegym.envs.llm_routing.kernel import layout
from servegym.envs.llm_routing.outcomes import outcomes_of
from servegym.envs.workloads import make_arrivals
from servegym.envs.workloads.arrivals import Arrivals

REWARD_TERMS = {
    layout.COMPLETED_QOS: ("qos",),
    layout.QOS_AWARE: ("qos", "penalty"),
    layout.PAID_FORWARD: ("accepted_score", "late_score"),
    layout.DENSE: ("qos", "outlook"),
}

REQUEST_LOG = np.dtype(
    [
        ("arrival_s", "f8"),
        ("available_s", "f8"),
        ("admitted_s", "f8"),
        ("first_token_s", "f8"),
        ("finish_s", "f8"),
        ("score", "f4"),
        ("best_score", "f4"),
        ("prompt_tokens", "i4"),
        ("output_tokens", "i4"),
        ("expert", "i2"),
        ("outcome", "i2"),
        ("preemptions", "i4"),
        ("catalog_row", "i4"),
    ]
)
OBSERVATION_KEYS = (
    "request",
    "experts",
    "running",
    "waiting",
    "latency_requirement",
    "load",
    "running_mask",
    "waiting_mask",
)
"""The parts of the graph view, in the order of the buffers: numbers, then masks."""


OUTCOMES = ("pending", "completed", "dropped", "rejected", "failed")


@dataclass
class RoutingState:
    """Everything that one system is, as plain copies: ``clone_state`` gives it.

    Attributes:
        arrivals: ``(J,)`` arrival times in seconds.
        rows: ``(J,)`` catalog rows.
        env: record of clock and sums.
        expert: ``(N,)`` records.
        slot: ``(N, S)`` records of the requests in the system.
        queue: ``(N, 3 S + K)`` lists, see `layout.Queues`; K is the block size in tokens.
        log: ``(J,)`` records of the requests.
        random: state of the generator that draws the next episodes, None in a bare batch.
        finished: whether the episode has ended.
        fleet: the setting that was drawn, see `servegym.envs.llm_routing.fleets`.
    """

    arrivals: np.ndarray
    rows: np.ndarray
    env: np.ndarray
    expert: np.ndarray
    slot: np.ndarray
    queue: np.ndarray
    log: np.ndarray
    random: Any = None
    finished: bool = False
    fleet: dict[str, Any] | None = None


def observation_space(problem: Problem) -> spaces.Space:
    """The observation space of one system, by the problem's view."""
    n, arguments, cfg = problem.num_experts, problem.arguments, problem.cfg[0]
    cap_r, cap_w = arguments.running_capacity, arguments.waiting_capacity
    view, load = int(cfg["layout"]), len(layout.LOAD_HORIZONS)
    if view == layout.FLAT:
        expert = len(layout.REQUEST_COLUMNS) + len(layout.STATE_COLUMNS)
        expert += len(layout.QUEUED_COLUMNS) * (cap_r + cap_w)
        return spaces.Box(0.0, 1.0, (1 + layout.LOAD_WIDTH + n * expert,), np.float32)
    if view == layout.EXPERTS:
        return spaces.Box(0.0, 1.0, (len(layout.STATE_COLUMNS) * n,), np.float32)
    sizes = sizes_of(problem)
    if view == layout.SUMMARY:
        low, high = bounds(layout.SUMMARY_COLUMNS, **sizes)
        # All columns are 0 for an expert that there is not.
        low, high = np.minimum(low, 0.0), np.maximum(high, 0.0)
        return spaces.Box(np.tile(low, (n, 1)), np.tile(high, (n, 1)))

    def box(high: np.ndarray, *shape: int) -> spaces.Box:
        top = np.broadcast_to(high, shape).astype(np.float32)
        return spaces.Box(np.zeros(shape, np.float32), top, dtype=np.float32)

    def columns(named: Sequence[Column], *shape: int) -> spaces.Box:
        return box(bounds(named, **sizes)[1], *shape, len(named))

    boxes: tuple[spaces.Space, ...] = (
        columns(layout.REQUEST_COLUMNS, n),
        columns(layout.STATE_COLUMNS, n),
        columns(layout.QUEUED_COLUMNS, n, cap_r),
        columns(layout.QUEUED_COLUMNS, n, cap_w),
        box(np.array([layout.MAX_LATENCY_REQUIREMENT_S]), 1),
        columns(layout.LOAD_COLUMNS, load),
        spaces.Box(0, 1, (n, cap_r), np.int8),
        spaces.Box(0, 1, (n, cap_w), np.int8),
    )
    named: dict[str, spaces.Space] = dict(zip(OBSERVATION_KEYS, boxes, strict=True))
    if problem.fleets is not None:
        named["fleet"] = columns(FLEET_COLUMNS, n)
    return spaces.Dict(named)


def sizes_of(problem: Problem) -> dict[str, float]:
    """The sizes that the columns of `layout` have as bounds."""
    cap_r, cap_w = problem.arguments.running_capacity, problem.arguments.waiting_capacity
    longest, prompt = float(problem.max_output_tokens), float(problem.table[..., 0].max())
    kv = max(p.kv_capacity_tokens for p in problem.profiles)
    sizes = {"R": cap_r, "W": cap_w, "held": cap_r + cap_w, "kv": kv}
    sizes |= {"longest": longest, "tokens": prompt + longest}
    return sizes | (problem.fleets.sizes if problem.fleets is not None else {})


class RoutingBatch(Batch):
    """B independent systems of one problem, advanced together by the kernel.

    Attributes:
        problem: what the systems share.
        observation: views of the buffer that the kernel writes: a dict for the graph view, else one
            array. Overwritten by every call.
    """

    def __init__(self, problem: Problem, num_rows: int) -> None:
        self.problem = problem
        self.num_rows = num_rows
        c = problem.cfg[0]
        n, slots, length = problem.num_experts, int(c["slots"]), problem.arguments.episode_requests
        cap_r, cap_w = problem.arguments.running_capacity, problem.arguments.waiting_capacity
        self.arrivals = np.zeros((num_rows, length))
        self.rows = np.zeros((num_rows, length), dtype=np.int32)
        self.table = problem.table
        self.env = np.zeros(num_rows, dtype=layout.ENV)
        self.expert = np.zeros((num_rows, n), dtype=layout.EXPERT)
        self.config = problem.cfg
        self.fleets: list[dict[str, Any] | None] = [None] * num_rows
        if problem.fleets is None:
            self.expert["profile"] = self.expert["model"] = np.arange(n)
            blocks = [p.kv_capacity_tokens // int(c["block_size"]) for p in problem.profiles]
            self.expert["capacity"] = blocks
        else:
            self.config = np.repeat(problem.cfg, num_rows)
        self.slot = np.zeros((num_rows, n, slots), dtype=layout.SLOT)
        entries = 3 * slots + int(c["block_size"])
        self.queue = np.zeros((num_rows, n, entries), dtype=np.int32)
        self.log = np.zeros((num_rows, length), dtype=layout.LOG)
        self.out = np.zeros((num_rows, 3))
        space = observation_space(problem)
        self.observation: Any
        if isinstance(space, spaces.Dict):
            shapes = [space[name].shape or () for name in OBSERVATION_KEYS[:6]]
            masks = [(n, cap_r), (n, cap_w), (n + 1,)]
        else:
            shapes = [space.shape or ()]
            masks = [(n + 1,)]
        self._obs, values = _sections(num_rows, shapes, np.float32)
        self._masks, flags = _sections(num_rows, masks, np.int8)
        self.action_mask = flags[-1]
        if isinstance(space, spaces.Dict):
            buffers = zip(OBSERVATION_KEYS, (*values, *flags[:2]), strict=True)
            parts: dict[str, np.ndarray] = dict(buffers)
            if problem.fleets is not None:
                parts["fleet"] = np.zeros((num_rows, n, len(FLEET_COLUMNS)), dtype=np.float32)
            self.observation = dict(sorted(parts.items()))  # the order of the space
        else:
            self.observation = values[0]
        self.terms = REWARD_TERMS[int(c["reward"])]
        tables = layout.Tables(self.config, problem.law, self.table)
        systems = self._systems(self.env, self.expert, self.slot, self.queue, self.log)
        summary = np.zeros((num_rows, 0), dtype=layout.SEEN)
        if int(c["layout"]) == layout.SUMMARY:
            summary = self._obs.view(layout.SEEN).reshape(num_rows, n)
        buffers = layout.Buffers(self._obs, summary, self._masks, self.out)
        self._arguments = tables, systems, buffers
        which, actions = np.zeros(num_rows, dtype=np.int8), np.zeros(num_rows, dtype=np.int64)
        calls: list[tuple[Any, tuple[Any, ...]]] = [
            (kernel.begin, (tables, systems, which)),
            (kernel.observe, (tables, systems, buffers, which)),
            (kernel.step, (tables, systems, buffers, actions, which, 0, num_rows)),
        ]
        self._begin, self._observe, self._step = compile_kernels("LLM routing engine", calls)

    def _systems(self, *records: np.ndarray) -> layout.Systems:
        """Systems of these env, expert, slot, queue and log records, with this batch's requests."""
        env, expert, *queues = records
        flat = layout.Queues(*(part.reshape(-1) for part in queues))
        return layout.Systems(self.arrivals, self.rows, env, expert, flat)

    def _observe_rows(self, which: np.ndarray) -> None:
        """Write the whole observation of the rows with ``which`` (int8 ``(B,)``) set."""
        self._observe(*self._arguments, which)

    def decided(self) -> np.ndarray:
        """Decisions (B,) of the episodes so far."""
        return self.env["index"].copy()

    def outcomes(self, row: np.ndarray, decision: np.ndarray) -> np.ndarray:
        """See `outcomes_of`."""
        return outcomes_of(self, row, decision)

    def draw(self, row: int, random: np.random.Generator) -> None:
        """Draw the next episode of a row: its rate, L, arrival times and requests."""
        problem = self.problem
        arrivals, (rate,) = self.draw_load(row, 1, random)
        length = problem.arguments.episode_requests
        self.arrivals[row] = arrivals.sample(length, random, rate)
        if problem.arguments.requests_file is not None:
            self.rows[row] = problem.rows[:length]
        else:
            self.rows[row] = problem.rows[random.integers(0, len(problem.rows), length)]
        if problem.cfg["uptime_s"][0] > 0.0:
            self.env["failure_seed"][row] = random.integers(0, 1 << 32)

    def draw_load(
        self, row: int, streams: int, random: np.random.Generator
    ) -> tuple[Arrivals, list[float]]:
        """Draw the fleet of a row, if it is drawn, and L.

        The arrival process, and the mean rate (requests/s) of each of the streams.
        """
        problem = self.problem
        if problem.fleets is None:
            rates = [draw_from(problem.arguments.rate, random) for _ in range(streams)]
            limit = draw_from(problem.arguments.latency_requirement_s, random)
            self.env["latency_requirement"][row] = limit
            return problem.arrivals, rates
        setting = problem.fleets.draw(random)
        self._put_fleet(row, setting)
        self.env["latency_requirement"][row] = setting["latency_requirement_s"]
        rate = setting["rate"] / streams
        process = make_arrivals(setting["arrivals"], **setting["arrivals_kwargs"])
        return process, [rate] * streams

    def _put_fleet(self, row: int, setting: dict[str, Any]) -> None:
        """Make the system of a row that of a setting."""
        source, shared = self.problem.fleets, self.problem.cfg[0]
        assert source is not None
        self.fleets[row] = setting
        count, c, expert = len(setting["profiles"]), self.config[row], self.expert[row]
        c["num_experts"] = count
        c["running_capacity"] = setting["running_capacity"]
        c["waiting_capacity"] = setting["waiting_capacity"]
        c["scheduler"] = SCHEDULERS[setting["scheduler"]]
        c["memory_policy"] = MEMORY_POLICIES[setting["memory_policy"]]
        c["async_scheduling"] = shared["async_scheduling"] and c["scheduler"] == layout.CHUNKED
        c["token_budget"] = setting["prefill_token_budget"]
        expert["capacity"][:count] = np.array(setting["kv_capacity_tokens"]) // int(c["block_size"])
        expert["profile"][:count] = source.laws(setting)
        expert["model"][:count] = source.columns(setting)
        if isinstance(self.observation, dict):
            fleet = self.observation["fleet"][row]
            fleet[count:] = 0.0
            fleet[:count] = source.features(setting)

    def reset_info(self, row: int) -> dict[str, Any]:
        """What `reset` tells of a row besides the mask: the fleet that was drawn, as JSON."""
        setting = self.fleets[row]
        return {} if setting is None else {"fleet": json.dumps(setting)}

    def begin(self, which: np.ndarray) -> None:
        """Start the drawn episodes of the rows with ``which`` (int8 ``(B,)``) set."""
        which = np.ascontiguousarray(which, np.int8)
        tables, systems, _ = self._arguments
        self._begin(tables, systems, which)
        self._observe_rows(which)

    def step(self, actions: np.ndarray, which: np.ndarray) -> int:
        """Route the current request of the rows with ``which`` set; ``actions`` int64 ``(B,)``."""
        actions = np.ascontiguousarray(actions, np.int64)
        which = np.ascontiguousarray(which, np.int8)
        ended = self._step(*self._arguments, actions, which, 0, self.num_rows)
        if ended < 0:
            raise self.out_of_range(actions, -1 - ended, action_words(self.problem))
        return ended

    def clone(self, row: int) -> RoutingState:
        """Copy one system."""
        return RoutingState(
            **{name: getattr(self, name)[row].copy() for name in _OF_A_ROW},
            env=self.env[row : row + 1].copy(),
            fleet=self.fleets[row],
        )

    def restore(self, row: int, state: RoutingState) -> None:
        """Put a copied system back in a row and write its observation."""
        for name in _OF_A_ROW:
            current, copied = getattr(self, name)[row], getattr(state, name)
            same = current.shape == copied.shape and current.dtype == copied.dtype
            self.check_state(name, current, copied, same)
        if state.fleet is not None:
            self._put_fleet(row, state.fleet)
        for name in _OF_A_ROW:
            getattr(self, name)[row] = getattr(state, name)
        self.env[row] = state.env[0]
        which = np.zeros(self.num_rows, dtype=np.int8)
        which[row] = 1
        self._observe_rows(which)

    def config_of(self, row: int) -> np.void:
        """The config record of a row."""
        return self.config[row if len(self.config) > 1 else 0]

    def kpis(self, row: int) -> dict[str, float]:
        """Key figures of the episode so far, over the requests that have been decided.

        Means over completed requests are NaN when there are none, ``mean_tpot_s`` when no answer
        has more than one token.
        """
        v = self.env[row]
        decided = max(int(v["index"]), 1)
        done = int(v["completed"])
        last = max(float(v["last_finish"]), float(self.arrivals[row, decided - 1]))
        nan = float("nan")

        def mean(name: str, count: int = done) -> float:
            return float(v[name]) / count if count else nan

        extra = {}
        if self.problem.cfg["uptime_s"][0] > 0.0:
            extra["failure_rate"] = int(v["failed"]) / decided
        return {
            "avg_qos": float(v["qos"]) / decided,
            "mean_latency_s_per_token": mean("latency"),
            "mean_ttft_s": mean("ttft"),
            "mean_tpot_s": mean("tpot", int(v["multi_token"])),
            "mean_e2e_s": mean("e2e"),
            "mean_communication_s": mean("communication"),
            "mean_routing_s": float(self.problem.cfg["router_delay_s"][0]) if done else nan,
            "mean_waiting_s": mean("waiting"),
            "mean_inference_s": mean("inference"),
            "violation_rate": (done - int(v["on_time"])) / decided,
            "drop_rate": int(v["dropped"]) / decided,
            "reject_rate": int(v["rejected"]) / decided,
            "memory_use": float(v["memory"]) / decided,
            "goodput_rps": int(v["on_time"]) / last if last > 0 else 0.0,
            **extra,
            "requests": float(decided),
        }

    def request_log(self, row: int) -> np.ndarray:
        """One row per decided request of the current episode, see :data:`REQUEST_LOG`.

        What a request is, and how well it is answered, is known once it has ended: before that
        ``score`` and ``best_score`` are NaN, ``output_tokens`` is 0 and ``catalog_row`` -1.
        """
        count = int(self.env[row]["index"])
        models = self.expert["model"][row, : int(self.config_of(row)["num_experts"])]
        log = np.zeros(count, dtype=REQUEST_LOG)
        for name in set(self.log.dtype.names or ()) & set(REQUEST_LOG.names or ()):
            log[name] = self.log[row, :count][name]
        for n in range(len(models)):
            slots = self.slot[row, n]
            running, waiting = held(self.expert[row, n], self.queue[row, n])
            for r in slots[running + waiting]:
                entry = log[r["request"]]
                entry["expert"], entry["prompt_tokens"] = n, r["prompt"]
                entry["available_s"], entry["admitted_s"] = r["available"], r["admitted"]
                entry["first_token_s"], entry["preemptions"] = r["first"], r["preemptions"]
        log["arrival_s"] = self.arrivals[row, :count]
        log["catalog_row"] = self.rows[row, :count]
        log["best_score"] = self.table[log["catalog_row"][:, None], models, 1].max(axis=1)
        pending = log["outcome"] == layout.PENDING
        for name, hidden in (("score", np.nan), ("best_score", np.nan), ("catalog_row", -1)):
            log[name][pending] = hidden
        return log

    def __getstate__(self) -> dict[str, Any]:
        names = ("problem", "num_rows", "fleets", *_STATE_ARRAYS)
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Rebuilt so that the observation stays a view of the buffer.
        RoutingBatch.__init__(self, state["problem"], state["num_rows"])
        for row, setting in enumerate(state["fleets"]):
            if setting is not None:
                self._put_fleet(row, setting)
        for name in _STATE_ARRAYS:
            getattr(self, name)[...] = state[name]


_OF_A_ROW = ("arrivals", "rows", "expert", "slot", "queue", "log")
_STATE_ARRAYS = (*_OF_A_ROW, "env", "out", "_obs", "_masks")


def action_words(problem: Problem) -> str:
    """What the actions are, for messages."""
    return f"0 drops the request, 1 to {problem.num_experts} name an expert"


def held(expert: np.void, queue: np.ndarray) -> tuple[list[int], list[int]]:
    """Slots of the requests that run at an expert, in order of admission, and of those that wait.

    Args:
        expert: record of the expert.
        queue: ``(3 S + K,)`` its lists.
    """
    links = queue[int(expert["first_link"] - expert["first_place"]) :]
    queues: list[list[int]] = []
    for first, count in (("oldest", "running"), ("head", "waiting")):
        slots, i = [], int(expert[first])
        for _ in range(int(expert[count])):
            slots.append(i)
            i = int(links[2 * i])
        queues.append(slots)
    return queues[0], queues[1]


def draw_from(span: Range, random: np.random.Generator) -> float:
    """A number of a range; a range of one number takes no draw."""
    low, high = ends(span)
    return low if low == high else float(random.uniform(low, high))


def _sections(
    num_rows: int, shapes: list[tuple[int, ...]], dtype: type
) -> tuple[np.ndarray, list[np.ndarray]]:
    """One zeroed vector and views of its consecutive parts, each ``(num_rows, *shape)``."""
    sizes = [num_rows * int(np.prod(shape)) for shape in shapes]
    flat = np.zeros(sum(sizes), dtype=dtype)
    ends = np.cumsum(sizes)
    views = [
        flat[end - size : end].reshape(num_rows, *shape)
        for end, size, shape in zip(ends, sizes, shapes, strict=True)
    ]
    return flat, views
