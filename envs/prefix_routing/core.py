"""A batch of prefix-routing systems: the state behind the single and the vector environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from servegym._jit import compile_kernels
from servegym.envs._batch import Batch
from servegym.envs._columns import bounds
from servegym.envs.prefix_routing.config import DICT, FLAT, SUMMARY, Problem
from servegym.envs.prefix_routing.gateway import GROWING, blank, load, prompts, sizes
from servegym.envs.prefix_routing.kernel import layout, steps
from servegym.envs.prefix_routing.kernel.observation import (
    REPLICA,
    REQUEST,
    SEEN_REPLICA,
    SEEN_REQUEST,
)
from servegym.envs.prefix_routing.outcomes import outcomes_of
from servegym.envs.prefix_routing.tables import LOG_SOURCES, put_replicas, put_requests

REQUEST_LOG = np.dtype(
    [
        ("arrival_s", "f8"),
        ("admitted_s", "f8"),
        ("first_token_s", "f8"),
        ("finish_s", "f8"),
        ("session", "i4"),
        ("tenant", "i4"),
        ("turn", "i4"),
        ("prompt_tokens", "i4"),
        ("output_tokens", "i4"),
        ("match_tokens", "i4"),
        ("hit_tokens", "i4"),
        ("recomputed_tokens", "i4"),
        ("preemptions", "i4"),
        ("replica", "i2"),
        ("outcome", "i2"),
    ]
)
"""Columns of ``request_log``: ``match_tokens`` is what the index had at the routing, ``hit_tokens``
what the replica had cached at the first admission."""

GROWN = ("segments", "known")
"""Parts of the engine's arrays whose size goes by the episode."""

OUTCOMES = ("pending", "queued", "completed", "rejected", "failed")
PERCENTILES = (50, 90, 99)
MAX_TIME_S = 1e9


@dataclass
class PrefixState:
    """Everything that one system is, as plain copies: ``clone_state`` gives it.

    Attributes:
        env: record of the episode's sums.
        engine: the engine's arrays of the row by the names of `layout.Systems`.
        gateway: the gateway's by the names of `kernel.gateway.Gateway`.
        episode: requests in the order of the decisions, which were decided on, last scrape of each
            replica, and session and tenant of each request.
        first_segment: where the row's segments began.
        random: state of the generator that draws the next episodes, None in a bare batch.
        finished: whether the episode has ended.
    """

    env: np.ndarray
    engine: dict[str, np.ndarray]
    gateway: dict[str, np.ndarray]
    episode: tuple[np.ndarray, ...]
    first_segment: int
    random: Any = None
    finished: bool = False


def observation_space(problem: Problem) -> spaces.Space:
    """The observation space of one system, by the problem's view."""
    n, view = problem.num_replicas, problem.arguments.view
    replica, request = bounds(REPLICA), bounds(REQUEST)
    if view == DICT:
        low, high = np.tile(replica[:, None], (n, 1))
        most = np.iinfo(np.int32).max
        return spaces.Dict(
            {
                "ids": spaces.Box(0, most, (2,), np.int32),
                "replicas": spaces.Box(low, high, dtype=np.float32),
                "request": spaces.Box(*request, dtype=np.float32),
                "time_s": spaces.Box(0.0, MAX_TIME_S, (1,), np.float32),
            }
        )
    replica, request = np.sign(replica), np.sign(request)  # scaled
    if view == SUMMARY:
        low, high = np.tile(np.hstack([replica, request])[:, None], (n, 1))
    else:
        share = np.array([[0.0], [steps.MAX_SHARE]], np.float32)
        low, high = np.hstack([request, np.tile(np.hstack([replica, share]), n)])
    return spaces.Box(low, high, dtype=np.float32)


def action_space(problem: Problem) -> spaces.Discrete:
    """One of the replicas, or with ``admission`` none."""
    return spaces.Discrete(problem.num_replicas + problem.arguments.admission)


class PrefixBatch(Batch):
    """B independent systems of one problem, advanced together by the kernel.

    Attributes:
        problem: what the systems share.
        observation: buffers that the kernel writes: a dict, or one array where the view is one.
            Overwritten by every call.
    """

    def __init__(self, problem: Problem, num_rows: int) -> None:
        self.problem = problem
        self.num_rows = num_rows
        n, count = problem.num_replicas, problem.num_requests
        config = problem.tables.config[0]
        segments = np.zeros((num_rows * 4 * count, 2), dtype=np.int32)
        self.systems = layout.allocate(config, num_rows, segments, problem.events)
        put_replicas(self.systems, problem.profiles, problem.capacity)
        self.gateway = blank(problem.gateway, num_rows, n, count)
        self.episodes = steps.Episodes(
            settings=problem.settings,
            row=np.zeros(num_rows, dtype=steps.EPISODE),
            order=np.zeros((num_rows, count), dtype=np.int32),
            counted=np.zeros((num_rows, count), dtype=np.int8),
            scraped=np.zeros((num_rows, n)),
            ids=np.zeros((num_rows, count, 2), dtype=np.int32),
        )
        features, width = len(REPLICA), len(REQUEST)
        replicas = np.zeros((num_rows, n), SEEN_REPLICA)
        request = np.zeros(num_rows, SEEN_REQUEST)
        scaled = {DICT: 0, FLAT: width + n * (features + 1), SUMMARY: n * (features + width)}
        self.buffers = steps.Buffers(
            replicas=replicas.view(np.float32).reshape(num_rows, n, features),
            request=request.view(np.float32).reshape(num_rows, width),
            seen_replicas=replicas,
            seen_request=request,
            ids=np.zeros((num_rows, 2), dtype=np.int32),
            time_s=np.zeros((num_rows, 1), dtype=np.float32),
            scaled=np.zeros((num_rows, scaled[problem.arguments.view]), dtype=np.float32),
            mask=np.zeros((num_rows, n + problem.arguments.admission), dtype=np.int8),
            reward=np.zeros((num_rows, 2)),
        )
        self.out, self.action_mask = self.buffers.reward, self.buffers.mask
        self.observation: Any = self.buffers.scaled
        if problem.arguments.view == SUMMARY:
            self.observation = self.buffers.scaled.reshape(num_rows, n, features + width)
        elif problem.arguments.view == DICT:
            names = ("ids", "replicas", "request", "time_s")
            self.observation = {name: getattr(self.buffers, name) for name in names}
        self.terms = ("met",) if problem.arguments.reward == "slo" else (problem.arguments.reward,)
        which, actions = np.zeros(num_rows, dtype=np.int8), np.zeros(num_rows, dtype=np.int64)
        arguments = self._arguments()
        ended = problem.settings, self.systems.request[:0], np.zeros(0)
        self._begin, self._observe, self._step, self.rewards_of = compile_kernels(
            "prefix routing engine",
            [
                (steps.begin, (*arguments, which)),
                (steps.observe, (*arguments, which)),
                (steps.step, (*arguments, actions, which)),
                (steps.rewards_of, ended),
            ],
        )

    def decided(self) -> np.ndarray:
        """Decisions (B,) of the episodes so far."""
        return self.episodes.row["index"].copy()

    def outcomes(self, row: np.ndarray, decision: np.ndarray) -> np.ndarray:
        """See `outcomes_of`."""
        return outcomes_of(self, row, decision)

    def _arguments(self) -> tuple[Any, ...]:
        return self.problem.tables, self.systems, self.gateway, self.episodes, self.buffers

    def draw(self, row: int, random: np.random.Generator) -> None:
        """Draw the next episode of a row: its rate, its requests and their predicted lengths."""
        problem = self.problem
        # All chance of an episode here: what follows goes by the actions alone.
        requests, predicted = problem.draw(random)
        numbered = prompts(problem.gateway, requests)
        ids = int(requests.segments.sum(axis=1).max(initial=1))
        self._make_room(len(requests.segments), ids, sizes(numbered))
        self.systems.known[row] = 0
        first = self._first_segment(row)
        self.systems.segments[first : first + len(requests.segments)] = requests.segments
        put_requests(self.systems, row, requests, first)
        if problem.tables.config["uptime_s"][0] > 0:
            self.systems.env["failure_seed"][row] = random.integers(1 << 32)
        load(
            self.gateway,
            row,
            numbered,
            predicted=predicted,
            ttft_slo_s=problem.ttft_slo_s(requests.prompt_tokens),
            tpot_slo_s=float(problem.settings["tpot_s"][0]),
            replicas={
                "speed": problem.speed,
                "kv_tokens": problem.capacity * problem.arguments.block_size,
                "max_num_seqs": problem.arguments.max_num_seqs,
                "capacity": problem.index_entries,
            },
        )
        self.episodes.row[row] = 0
        self.episodes.ids[row, :, 0] = requests.session
        self.episodes.ids[row, :, 1] = requests.tenant

    def _first_segment(self, row: int) -> int:
        return row * (len(self.systems.segments) // self.num_rows)

    def _make_room(self, segments: int, ids: int, lengths: Mapping[str, int]) -> None:
        """Enlarge what an episode with so many segments and block ids and such arrays exceeds."""
        old = len(self.systems.segments) // self.num_rows
        if segments > old:
            # Twice what is needed: the parts of all rows move when the array grows.
            new = 2 * segments
            parts = np.zeros((self.num_rows, new, 2), dtype=np.int32)
            parts[:, :old] = self.systems.segments.reshape(self.num_rows, old, 2)
            shift = np.repeat(np.arange(self.num_rows) * (new - old), self.problem.num_requests)
            for name in ("first_segment", "segment"):
                self.systems.request[name] += shift
            self.systems = self.systems._replace(segments=parts.reshape(-1, 2))
        store = self.systems.known
        if store.shape[1] and ids > store.shape[2]:
            more = ids + ids // 2 - store.shape[2]
            self.systems = self.systems._replace(known=np.pad(store, ((0, 0), (0, 0), (0, more))))
        grown = {}
        for name, size in lengths.items():
            array = getattr(self.gateway, name)
            unused = name == "key_of_id" and self.problem.events == 0
            if array.shape[-1] < size and not unused:
                more = [(0, 0)] * (array.ndim - 1) + [(0, size + size // 2 - array.shape[-1])]
                grown[name] = np.pad(array, more)
        if grown:
            self.gateway = self.gateway._replace(**grown)

    def begin(self, which: np.ndarray) -> None:
        """Start the drawn episodes of the rows with ``which`` (int8 ``(B,)``) set."""
        self._begin(*self._arguments(), np.ascontiguousarray(which, np.int8))

    def step(self, actions: np.ndarray, which: np.ndarray) -> int:
        """Route the current request of the rows with ``which`` set; ``actions`` int64 ``(B,)``."""
        actions = np.ascontiguousarray(actions, np.int64)
        ended = self._step(*self._arguments(), actions, np.ascontiguousarray(which, np.int8))
        if ended < 0:
            raise self.out_of_range(actions, -1 - ended, action_words(self.problem))
        return ended

    def clone(self, row: int) -> PrefixState:
        """Copy one system."""
        x = self.episodes
        return PrefixState(
            env=x.row[row : row + 1].copy(),
            engine={name: part.copy() for name, part in self._engine(row).items()},
            gateway={
                name: part[row].copy()
                for name, part in self.gateway._asdict().items()
                if name != "config"
            },
            episode=tuple(part[row].copy() for part in (x.order, x.counted, x.scraped, x.ids)),
            first_segment=self._first_segment(row),
        )

    def _engine(self, row: int) -> dict[str, np.ndarray]:
        """Views of the parts of the engine's arrays that are a row's."""
        s, rows = self.systems, self.num_rows
        flat = ("request", "segments", "block", "lists")
        return {
            name: part[row] if name not in flat else part.reshape(rows, -1, *part.shape[1:])[row]
            for name, part in s._asdict().items()
        }

    def restore(self, row: int, state: PrefixState) -> None:
        """Put a copied system back in a row and write its observation."""
        current = self._engine(row)
        for name, copied in state.engine.items():
            same = copied.shape == current[name].shape
            if name in GROWN:  # the size of their longest axis goes by the episode
                same = name == "segments" or len(copied) == len(current[name])
            self.check_state(f"engine[{name!r}]", current[name], copied, same)
        lengths = {name: state.gateway[name].shape[-1] for name in GROWING}
        self._make_room(len(state.engine["segments"]), state.engine["known"].shape[1], lengths)
        for name, part in self._engine(row).items():
            copied = state.engine[name]
            if name == "segments":
                part[: len(copied)] = copied
            elif name == "known":
                part[...] = 0
                part[:, : copied.shape[1]] = copied
            elif part.ndim == 0:
                getattr(self.systems, name)[row] = copied
            else:
                part[...] = copied
        # Segments are numbered over all rows: a state from another row or batch has other numbers.
        moved = self._first_segment(row) - state.first_segment
        requests = self._engine(row)["request"]
        requests["first_segment"] += moved
        requests["segment"] += moved
        for name, copied in state.gateway.items():
            part = getattr(self.gateway, name)
            if copied.ndim == 0:
                part[row] = copied
            else:
                part[row][tuple(slice(size) for size in copied.shape)] = copied
        x = self.episodes
        x.row[row] = state.env[0]
        for part, copied in zip((x.order, x.counted, x.scraped, x.ids), state.episode, strict=True):
            part[row] = copied
        which = np.zeros(self.num_rows, dtype=np.int8)
        which[row] = 1
        self._observe(*self._arguments(), which)

    def kpis(self, row: int) -> dict[str, float]:
        """Key figures of the episode so far, over the requests that have been decided on.

        ``attainment`` is the share of the decided requests that were completed within both
        objectives; a request that is still under way or was rejected has not met them. Times are
        NaN while nothing is completed.
        """
        o, log = self.episodes.row[row], self.request_log(row)
        decided = max(int(o["index"]), 1)
        done = log[log["outcome"] == layout.COMPLETED]
        nan = float("nan")
        ttft, e2e = (done[name] - done["arrival_s"] for name in ("first_token_s", "finish_s"))
        several = done[done["output_tokens"] > 1]
        pace = (several["finish_s"] - several["first_token_s"]) / (several["output_tokens"] - 1)
        figures = {
            "attainment": int(o["met"]) / decided,
            "attainment_ttft": int(o["met_ttft"]) / decided,
            "attainment_tpot": int(o["met_tpot"]) / decided,
            "mean_ttft_s": float(ttft.mean()) if len(done) else nan,
            "mean_tpot_s": float(pace.mean()) if len(several) else nan,
            "mean_e2e_s": float(e2e.mean()) if len(done) else nan,
        }
        for name, values in (("ttft", ttft), ("tpot", pace)):
            quantiles = np.percentile(values, PERCENTILES) if len(values) else (nan,) * 3
            for share, value in zip(PERCENTILES, quantiles, strict=True):
                figures[f"p{share}_{name}_s"] = float(value)
        prompts = max(int(o["prompt_tokens"]), 1)
        claimed = int(o["claimed_tokens"])
        sent = np.bincount(log["replica"][log["replica"] >= 0], minlength=self.problem.num_replicas)
        span = float(o["last_finish"] - o["began"])
        if self.problem.tables.config["uptime_s"][0] > 0:
            figures["failure_rate"] = int((log["outcome"] == layout.FAILED).sum()) / decided
        return figures | {
            "hit_rate": int(o["hit_tokens"]) / prompts,
            "claimed_rate": claimed / prompts,
            "false_match_rate": int(o["false_tokens"]) / claimed if claimed else 0.0,
            "recomputed_tokens": float(o["recomputed_tokens"]),
            "preemption_rate": int(o["preemptions"]) / decided,
            "reject_rate": int(o["rejected"]) / decided,
            "imbalance": float(sent.max() / sent.mean()) if sent.sum() else 1.0,
            "goodput_rps": int(o["met"]) / span if span > 0 else 0.0,
            "requests": float(decided),
        }

    def request_log(self, row: int) -> np.ndarray:
        """One row per request decided on in the current episode, see :data:`REQUEST_LOG`.

        ``output_tokens`` is 0 and the hit unknown (0) before a request has ended or was admitted.
        """
        x = self.episodes
        return self._log(row, x.order[row, : int(x.row["index"][row])])

    def finished(self, row: int) -> np.ndarray:
        """The completed requests, those of the warm-up too, as in `request_log`."""
        done = self._engine(row)["request"]["outcome"] == layout.COMPLETED
        return self._log(row, np.flatnonzero(done))

    def _log(self, row: int, order: np.ndarray) -> np.ndarray:
        x = self.episodes
        engine = self._engine(row)["request"][order]
        log = np.zeros(len(order), dtype=REQUEST_LOG)
        for name, source in LOG_SOURCES.items():
            log[name] = engine[source]
        log["session"], log["tenant"] = x.ids[row, order].T
        gateway = self.gateway.request[row, order]
        log["turn"] = gateway["turn"]
        routed = gateway["replica"] >= 0
        log["match_tokens"][routed] = (gateway["prompt"] - gateway["uncached"])[routed]
        log["output_tokens"][log["outcome"] != layout.COMPLETED] = 0
        return log

    def __getstate__(self) -> dict[str, Any]:
        names = ("problem", "num_rows", "systems", "gateway", "episodes", "buffers")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Rebuilt so that the observation stays a view of the buffers.
        PrefixBatch.__init__(self, state["problem"], state["num_rows"])
        self.systems, self.gateway = state["systems"], state["gateway"]
        self.episodes = state["episodes"]
        for part, copied in zip(self.buffers, state["buffers"], strict=True):
            part[...] = copied


def action_words(problem: Problem) -> str:
    """What the actions are, for messages."""
    most = problem.num_replicas - 1
    words = f"0 to {most} name a replica"
    return f"{words}, {most + 1} rejects the request" if problem.arguments.admission else words
