"""Workloads of requests that share prefixes: recorded, fitted and made.

An episode is the first requests of the stationary process seen from a random moment on: sessions
that began before it are under way, with a context that no replica has cached. An episode of n
requests at rate r lasts n / r seconds; a prefix that is used again later than that is lost to it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from servegym._checks import LARGEST, choose, one_or_pair, real, whole
from servegym.envs import _arguments as arg
from servegym.envs._arguments import Arguments
from servegym.envs.prefix_routing.requests import PrefixRequests
from servegym.envs.workloads.files import read_fitted
from servegym.envs.workloads.lengths import length_quantiles, sample_lengths
from servegym.envs.workloads.prefix_traces import PrefixTrace, load_prefix_trace
from servegym.envs.workloads.traces import MAX_TOKENS

DISPATCHES = ("think", "trace")
"""When a session's next request comes: some time after the last one ended, or when recorded."""
MIN_RATE = 1e-3
SPLITS = {"train": (0.0, 0.6), "val": (0.6, 0.8), "eval": (0.8, 1.0), "all": (0.0, 1.0)}
"""Parts of a recording: its sessions by a hash of their number, which is in [0, 1)."""
CHAT_HISTORY_S = 3600.0
"""How long before the episode conversations may have begun."""
FIRST_PROMPTS = ("only_prompt_tokens", "first_prompt_tokens")
"""Laws of the first prompt in sessions of one turn and of more."""
LLM_D_STAGES = (
    *((15.0, 50.0), (3.0, 20.0), (10.0, 20.0), (15.0, 20.0), (20.0, 38.0), (22.0, 34.0)),
    *((25.0, 30.0), (30.0, 25.0), (35.0, 21.0), (40.0, 38.0), (43.0, 36.0), (46.0, 33.0)),
    *((49.0, 30.0), (52.0, 29.0), (55.0, 27.0), (57.0, 26.0), (60.0, 25.0)),
)
"""Stages of llm-d's benchmark with eight pods at a rate of 1 request/s: factor and seconds."""


@dataclass(frozen=True, kw_only=True)
class RecordedArguments(Arguments):
    """The arguments of recorded workloads."""

    trace: str | os.PathLike[str] = arg.other("conversation", "a name, or the path of a trace")
    max_context: int | None = arg.whole(
        None, 1, "requests with a longer prompt and output are dropped", high=MAX_TOKENS
    )
    output_reuse: bool = arg.switch(True, "a session's next prompt repeats outputs")
    split: str = arg.choice("all", SPLITS, "sessions by a hash of their number")


@dataclass(frozen=True, kw_only=True)
class SessionArguments(RecordedArguments):
    """The arguments of recorded sessions."""

    trace: str | os.PathLike[str] = arg.other(
        "agents", "or a session of kv-cache-tester, or a folder"
    )
    # The recording has no content shared by sessions; kv-cache-tester replays it with 0.5.
    warm_prefix: float = arg.number(
        0.0, 0.0, "share of tools and system prompt that is common to all sessions", high=1.0
    )


@dataclass(frozen=True, kw_only=True)
class ChatArguments(Arguments):
    """The arguments of conversations."""

    system_tokens: int = arg.whole(512, 0, "that all prompts begin with", high=MAX_TOKENS // 4)
    # One whose first turn would be longer is left out.
    max_context: int | None = arg.whole(
        None, 1, "a session ends before the turn that would be longer", high=MAX_TOKENS
    )


def _tokens(name: str, value: Any) -> int | str | tuple[int, int]:
    """Check of a trace's name, of a number of tokens or of a pair (low, high)."""
    if isinstance(value, str):
        return choose(name, value, read_fitted("lengths.json")["traces"])
    return one_or_pair(name, value, partial(whole, low=1, high=MAX_TOKENS // 4))


def _course(name: str, value: Any) -> tuple[tuple[float, float], ...]:
    """Check of the stages of a load."""
    stages = list(value)
    for stage in stages:
        if len(stage) != 2:
            raise ValueError(f"{name} has {stage!r}; a stage is a pair (factor, seconds).")
    if not stages or stages[-1][0] == 0:
        raise ValueError(f"{name}={value!r} must end with a stage of a factor above 0.")
    return tuple((real(name, x, 0.0), real(name, s, 0.0, open_low=True)) for x, s in stages)


@dataclass(frozen=True, kw_only=True)
class TenantArguments(Arguments):
    """The arguments of tenants; a trace stands for its prompts' or outputs' fitted lengths."""

    groups: int = arg.whole(150, 1, "a group is a tenant", high=1 << 20)
    users: int = arg.whole(5, 1, "of a group; a user is a session", high=1 << 20)
    prefix_tokens: int = arg.whole(6000, 0, "that a group begins with", high=MAX_TOKENS // 4)
    question_tokens: int | str | tuple[int, int] = arg.other(
        1200, "a number, a range, or `azure`, `mooncake`, `sharegpt`", _tokens
    )
    output_tokens: int | str | tuple[int, int] = arg.other(1000, "likewise", _tokens)
    questions: str = arg.choice("repeated", ("repeated", "fresh"), "a user's: always one, or never")
    # All users in turn, or each request of a group drawn by its popularity, of any of its users.
    order: str = arg.choice("cycle", ("cycle", "random"), "who asks next")
    skew: float = arg.number(0.0, 0.0, "a group's popularity is rank ** -skew", high=100.0)
    hot_factor: float = arg.number(1.0, 1.0, "on the most popular group's requests", high=1e6)
    drift_s: float | None = arg.number(
        None, 0.0, "time after which ranks are drawn anew", open_low=True
    )
    # A factor of 0 is a pause, and the last stage goes on.
    stages: tuple[tuple[float, float], ...] = arg.other(
        ((1.0, 1.0),), "(factor on the rate, seconds) one after the other", _course
    )
    max_context: int | None = arg.whole(
        None, 1, "a longer prompt and output are refused", high=MAX_TOKENS
    )


class Episode(NamedTuple):
    """What the requests of an episode are, beside their workload and rate."""

    num_requests: int
    block_size: int
    dispatch: str


class PrefixWorkload:
    """Draws the requests of an episode; a workload fills in `_prepare` and `_draw`.

    Attributes:
        MAX_RATE: Most requests/s: more sessions under way at once take gigabytes.
        OPTIONS: The record of its arguments.
    """

    MAX_RATE: float = LARGEST
    OPTIONS: type[Arguments] = Arguments

    def __init__(self, **arguments: Any) -> None:
        self._prepare(self.OPTIONS.fill(arguments))

    def _prepare(self, a: Any) -> None:
        """Read checked arguments."""
        raise NotImplementedError

    def draw(
        self,
        rng: np.random.Generator,
        num_requests: int,
        rate: float,
        block_size: int,
        dispatch: str = "think",
    ) -> PrefixRequests:
        """Draw an episode.

        Args:
            rng: The source of chance.
            num_requests: Requests of the episode.
            rate: Requests/s in the long run, if no request waits for a slow answer.
            block_size: Tokens of a block.
            dispatch: ``"think"``: a session's next request comes some time after the last one
                ended; ``"trace"``: all come at their times, whatever became of others.
        """
        return self._draw(rng, rate, Episode(num_requests, block_size, dispatch))

    def _draw(self, rng: np.random.Generator, rate: float, episode: Episode) -> PrefixRequests:
        """See `draw`."""
        raise NotImplementedError


class _Tree(NamedTuple):
    """Contents as a tree of prefixes; row v holds the tokens from ``shared[v]`` to ``length[v]``.

    Attributes:
        length: int64 (R,), tokens of the prompt and output.
        source: int64 (R,), the row whose first ``shared`` tokens it begins with, -1 for none.
        shared: int64 (R,).
        common: bool (R,), content that all copies have.
        rank: int64 (R,), the order in which rows get their ids: a session's rows in one run.
    """

    length: np.ndarray
    source: np.ndarray
    shared: np.ndarray
    common: np.ndarray
    rank: np.ndarray

    def segments(
        self, row: np.ndarray, copy: np.ndarray, block_size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """``first_segment`` and ``segments`` of requests: rows (J,) of copies (J,)."""
        rows = len(self.length)
        owners, keys, counts = [], [], []
        owner, node, limit = np.arange(len(row)), row, self.length[row]
        while owner.size:
            start = self.shared[node]
            used = limit > start
            owners.append(owner[used])
            keys.append((np.where(self.common[node], 0, copy * rows) + self.rank[node])[used])
            counts.append((limit // block_size - start // block_size)[used])
            limit = np.minimum(limit, start)
            node = self.source[node]
            further = (node >= 0) & (limit > 0)
            owner, node, limit, copy = (x[further] for x in (owner, node, limit, copy))
        # The deepest ancestors hold the beginning of a prompt.
        owner, key, count = (np.concatenate(x[::-1]) for x in (owners, keys, counts))
        order = np.argsort(owner, kind="stable")
        order = order[count[order] > 0]
        owner, key, count = owner[order], key[order], count[order]
        _, place = np.unique(key, return_inverse=True)
        extent = np.zeros(int(place.max(initial=-1)) + 1, dtype=np.int64)
        np.maximum.at(extent, place, count)
        first = (np.cumsum(extent) - extent)[place]
        begins = np.ones(len(owner), dtype=np.bool_)
        begins[1:] = (owner[1:] != owner[:-1]) | (first[1:] != first[:-1] + count[:-1])
        at = np.flatnonzero(begins)
        blocks = np.add.reduceat(count, at) if at.size else count
        starts = np.zeros(len(row) + 1, dtype=np.int64)
        np.cumsum(np.bincount(owner[at], minlength=len(row)), out=starts[1:])
        return starts, np.stack([first[at], blocks], axis=1).astype(np.int32)


class _Content(NamedTuple):
    """Requests with their contents, from which an episode is picked.

    Attributes:
        tree: R rows at least, the first R of them the requests.
        prompt_tokens: int32 (R,).
        output_tokens: int32 (R,).
        session: int (R,).
        turn: int32 (R,).
        after: int64 (R,), the request that each waits for, -1 for none.
        think_s: float64 (R,).
    """

    tree: _Tree
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    session: np.ndarray
    turn: np.ndarray
    after: np.ndarray
    think_s: np.ndarray

    def episode(
        self, row: np.ndarray, copy: np.ndarray, arrival_s: np.ndarray, episode: Episode
    ) -> PrefixRequests:
        """The first of the given requests in time, each a row of a copy."""
        num_requests, block_size, dispatch = episode
        order = np.lexsort((row, copy, arrival_s))[:num_requests]
        row, copy, arrival_s = row[order], copy[order], arrival_s[order]
        rows = len(self.session)
        parent = np.full(len(row), -1, dtype=np.int32)
        if dispatch == "think":
            name = copy * rows + row
            by_name = np.argsort(name)
            before = np.where(self.after[row] < 0, -1, copy * rows + self.after[row])
            at = np.minimum(np.searchsorted(name[by_name], before), len(row) - 1)
            present = name[by_name[at]] == before
            parent[present] = by_name[at[present]]
        sessions = int(self.session.max()) + 1
        _, session = np.unique(copy * sessions + self.session[row], return_inverse=True)
        first_segment, segments = self.tree.segments(row, copy, block_size)
        return PrefixRequests(
            arrival_s=arrival_s,
            parent=parent,
            think_s=np.where(parent < 0, 0.0, self.think_s[row]),
            prompt_tokens=self.prompt_tokens[row],
            output_tokens=self.output_tokens[row],
            session=session.astype(np.int32),
            tenant=np.zeros(len(row), dtype=np.int32),
            turn=self.turn[row],
            first_segment=first_segment,
            segments=segments,
            block_size=block_size,
        )


class ContextTooShortError(ValueError):
    """No request of a workload fits into ``max_context``."""


def _of_split(trace: PrefixTrace, split: str) -> np.ndarray:
    """Which requests are of a session of the split: bool (n,)."""
    low, high = SPLITS[split]
    place = (trace.session.astype(np.uint64) * 2654435761 % (1 << 32)) / (1 << 32)
    return (place >= low) & (place < high)


def _recorded(
    trace: PrefixTrace, arguments: RecordedArguments, warm_prefix: float = 0.0
) -> tuple[_Content, np.ndarray]:
    """The content of a trace, and the rows of it that a longest context and a split leave."""
    length = trace.prompt_tokens.astype(np.int64) + trace.output_tokens
    longest = arguments.max_context or MAX_TOKENS
    of_split = _of_split(trace, arguments.split)
    if not of_split.any():
        sessions = f"none of the trace's {trace.session.max() + 1} sessions"
        raise ValueError(f"split={arguments.split!r} has {sessions}: give a longer trace.")
    usable = (length <= longest) & of_split
    if not usable.any():
        raise ContextTooShortError(
            f"max_context={arguments.max_context!r} leaves no request; the shortest has "
            f"{length.min()} tokens."
        )
    # A request waits for the last usable one before it.
    after = trace.after.astype(np.int64)
    while (lost := (after >= 0) & ~usable[after]).any():
        after[lost] = after[after[lost]]
    turn = np.zeros(trace.num_requests, dtype=np.int32)
    for j in np.flatnonzero(usable & (after >= 0)):
        turn[j] = turn[after[j]] + 1
    source, shared = trace.source.astype(np.int64), trace.stream_shared(arguments.output_reuse)
    # One more row has what all prompts begin with.
    rootless = source < 0
    system = np.floor(warm_prefix * trace.system_tokens).astype(np.int64)
    begin = np.maximum(system, trace.common_tokens)
    shared[rootless] = np.minimum(begin, trace.prompt_tokens)[rootless]
    source[rootless] = trace.num_requests
    order = np.lexsort((np.arange(len(source)), trace.session))
    rank = np.empty(len(source) + 1, dtype=np.int64)
    rank[order] = np.arange(1, len(source) + 1)
    rank[-1] = 0
    tree = _Tree(
        length=np.append(length, begin.max(initial=0)),
        source=np.append(source, -1),
        shared=np.append(shared, 0),
        common=np.arange(len(source) + 1) == len(source),
        rank=rank,
    )
    content = _Content(
        tree=tree,
        prompt_tokens=trace.prompt_tokens,
        output_tokens=trace.output_tokens,
        session=trace.session,
        turn=turn,
        after=after,
        think_s=trace.think_s,
    )
    return content, np.flatnonzero(usable)


class SuperposedTrace(PrefixWorkload):
    """A recorded hour, or several shifted copies of it at the same time.

    Each copy begins at a random moment of the trace and goes round. Its content is its own, except
    what all requests of the trace begin with. A rate below a whole number of copies leaves out
    sessions at random. With dispatch ``"think"`` a request that begins with all full blocks of an
    earlier one (at least two) comes as long after that one's end as it was sent after it in the
    recording, which states no ends: think times are too long by the recorded latency.
    """

    MAX_RATE, OPTIONS = 1000.0, RecordedArguments

    def _prepare(self, a: RecordedArguments) -> None:
        short = isinstance(a.trace, str) and a.trace in ("conversation", "synthetic")
        recorded = load_prefix_trace(f"mooncake-{a.trace}" if short else a.trace)
        self._content, self._rows = _recorded(recorded, a)
        times = recorded.time_s[self._rows]
        if times[-1] <= 0:
            raise ValueError(f"trace={a.trace!r} has no two requests at different times.")
        self._times = times
        self._period_s = float(times[-1]) * len(times) / max(len(times) - 1, 1)

    def _draw(self, rng: np.random.Generator, rate: float, episode: Episode) -> PrefixRequests:
        share = rate * self._period_s / len(self._times)
        copies = int(np.ceil(share))
        begin = rng.random(copies) * self._period_s
        sessions = int(self._content.session.max()) + 1
        keep = rng.random((copies, sessions)) * copies < share
        session = self._content.session[self._rows]
        if not any(each[session].any() for each in keep):  # or no request would ever come
            keep[0, session[rng.integers(len(session))]] = True
        span = 1.2 * episode.num_requests / rate
        while True:
            parts = []
            for k in range(copies):
                low, high = begin[k], begin[k] + span
                for turn in range(int(high // self._period_s) + 1):
                    shift = turn * self._period_s
                    bounds = np.searchsorted(self._times, (low - shift, high - shift))
                    at = np.arange(*bounds)
                    at = at[keep[k, session[at]]]
                    parts.append((at, self._times[at] + shift - low, np.full(at.size, k), turn))
            passes = max(part[3] for part in parts) + 1
            row = self._rows[np.concatenate([part[0] for part in parts])]
            if len(row) >= episode.num_requests:
                arrival_s = np.concatenate([part[1] for part in parts])
                # Each time round the content is new.
                copy = np.concatenate([part[2] * passes + part[3] for part in parts])
                return self._content.episode(row, copy, arrival_s, episode)
            span *= 1.5


class RecordedSessions(PrefixWorkload):
    """Recorded sessions, drawn at random, that start by a Poisson process.

    Sessions under way at the beginning of the episode go on from where they are. With dispatch
    ``"think"`` a request comes its recorded think time after the end of the session's request
    before it; with ``"trace"`` it comes at its recorded time within the session.
    """

    MAX_RATE, OPTIONS = 200.0, SessionArguments

    def _prepare(self, a: SessionArguments) -> None:
        recorded = load_prefix_trace(a.trace)
        self._content, rows = _recorded(recorded, a, a.warm_prefix)
        self._rows = rows[np.argsort(recorded.session[rows], kind="stable")]
        _, first, self._requests = np.unique(
            recorded.session[self._rows], return_index=True, return_counts=True
        )
        self._first = first
        # Time within the session, from its first request that is kept.
        at = recorded.time_s[self._rows]
        self._time_s = at - np.repeat(np.minimum.reduceat(at, first), self._requests)
        self._duration_s = np.maximum.reduceat(self._time_s, first)

    def _draw(self, rng: np.random.Generator, rate: float, episode: Episode) -> PrefixRequests:
        span = 1.2 * episode.num_requests / rate
        while True:
            # Starts of each session that leave a part of it in the episode.
            window = self._duration_s + span
            starts = rng.poisson(rate / len(self._rows) * window)
            which = np.repeat(np.arange(len(starts)), starts)
            start_s = rng.random(which.size) * window[which] - self._duration_s[which]
            size = self._requests[which]
            copy = np.repeat(np.arange(which.size), size)
            inside = np.arange(int(size.sum())) - np.repeat(np.cumsum(size) - size, size)
            at = self._first[which][copy] + inside
            arrival_s = start_s[copy] + self._time_s[at]
            shown = (arrival_s >= 0) & (arrival_s < span)
            if int(shown.sum()) >= episode.num_requests:
                row = self._rows[at[shown]]
                return self._content.episode(row, copy[shown], arrival_s[shown], episode)
            span *= 1.5


class ChatSessions(PrefixWorkload):
    """Conversations whose turns repeat all before them; sessions start by a Poisson process.

    Lengths, the number of turns and the times between turns are drawn from laws fitted to
    Mooncake's conversations (`envs/workloads/data/chat-sessions.json`), independently but for first
    prompts, whose law is one for sessions of one turn and another for sessions of more. With
    dispatch ``"think"`` a turn comes that time after the end of the one before it. The recording
    states no ends, so think times are too long by the recorded latency.
    """

    MAX_RATE, OPTIONS = 500.0, ChatArguments

    def _prepare(self, a: ChatArguments) -> None:
        laws = read_fitted("chat-sessions.json")
        self._system, self._max_context = a.system_tokens, a.max_context or MAX_TOKENS
        self._laws = {
            name: np.array(laws[name]["quantiles"], dtype=np.float64)
            for name in (*FIRST_PROMPTS, "new_tokens", "output_tokens", "gap_s")
        }
        # The fitted prompts have the trace's common tokens; only what follows them is drawn.
        for name in FIRST_PROMPTS:
            self._laws[name] -= laws["system_tokens"]
        self._continuation = np.array(laws["continuation"])
        least = self._system + int(min(self._laws[name][0] for name in FIRST_PROMPTS)) + 1
        if self._max_context < least:
            raise ContextTooShortError(
                f"max_context={a.max_context!r} leaves no session; at least {least}."
            )
        sample, sent_s = self._sessions(np.random.default_rng(0), np.zeros(20_000))
        self._mean_turns = len(sent_s) / len(np.unique(sample.session))

    def _draw(self, rng: np.random.Generator, rate: float, episode: Episode) -> PrefixRequests:
        span = 1.2 * episode.num_requests / rate + 60.0
        while True:
            sessions = rng.poisson(rate / self._mean_turns * (CHAT_HISTORY_S + span))
            start_s = rng.random(sessions) * (CHAT_HISTORY_S + span) - CHAT_HISTORY_S
            content, sent_s = self._sessions(rng, start_s)
            shown = np.flatnonzero((sent_s >= 0) & (sent_s < span))
            if len(shown) >= episode.num_requests:
                copy = np.zeros(len(shown), dtype=np.int64)
                return content.episode(shown, copy, sent_s[shown], episode)
            span *= 1.5

    def _sessions(
        self, rng: np.random.Generator, start_s: np.ndarray
    ) -> tuple[_Content, np.ndarray]:
        """Whole sessions that start at ``start_s`` (n,), the turns of each in one run.

        And when each request is sent if nothing is waited for: float64 (R,).
        """

        def sample(law: str, count: int) -> np.ndarray:
            return sample_lengths(self._laws[law], rng.random(count)).astype(np.int64)

        session = np.arange(len(start_s))
        sent_s, gap_s = start_s, np.zeros(len(start_s), dtype=np.int64)
        goes_on = rng.random(len(session)) < self._continuation[0]
        only, first = (sample(name, len(session)) for name in FIRST_PROMPTS)
        prompt = self._system + np.where(goes_on, first, only)
        output = sample("output_tokens", len(session))
        turns = []
        while True:
            fits = np.flatnonzero(prompt + output <= self._max_context)
            session, sent_s, gap_s, prompt, output, goes_on = (
                x[fits] for x in (session, sent_s, gap_s, prompt, output, goes_on)
            )
            if not len(session):
                break
            turns.append((session, sent_s, gap_s, prompt, output))
            on = np.flatnonzero(goes_on)
            session, gap_s = session[on], sample("gap_s", len(on))
            sent_s = sent_s[on] + gap_s
            prompt = prompt[on] + output[on] + sample("new_tokens", len(on))
            output = sample("output_tokens", len(on))
            chance = self._continuation[min(len(turns), len(self._continuation) - 1)]
            goes_on = rng.random(len(on)) < chance
        turn = np.repeat(np.arange(len(turns)), [len(columns[0]) for columns in turns])
        session, sent_s, gap_s, prompt, output = (
            np.concatenate(column) for column in zip(*turns, strict=True)
        )
        order = np.lexsort((turn, session))
        turn, prompt, output = turn[order], prompt[order], output[order]
        rows = len(order)
        first = turn == 0
        before = np.arange(-1, rows - 1)
        tree = _Tree(
            length=np.append(prompt + output, self._system),
            source=np.append(np.where(first, rows, before), -1),
            shared=np.append(np.where(first, self._system, (prompt + output)[before]), 0),
            common=np.arange(rows + 1) == rows,
            rank=np.append(np.arange(1, rows + 1), 0),
        )
        content = _Content(
            tree=tree,
            prompt_tokens=prompt.astype(np.int32),
            output_tokens=output.astype(np.int32),
            session=session[order],
            turn=turn.astype(np.int32),
            after=np.where(first, -1, before),
            think_s=gap_s[order].astype(np.float64),
        )
        return content, sent_s[order]


class Tenants(PrefixWorkload):
    """Groups of users; a group's prompts begin with its prefix, then comes a question.

    Requests come by a Poisson process and wait for none, so ``dispatch`` changes nothing. The
    defaults are those of llm-d's benchmark with eight pods: 750 prompts, asked one after the other
    in a random order, over and over. Its load is ``stages=LLM_D_STAGES`` at a rate of 1.
    """

    OPTIONS = TenantArguments

    def _prepare(self, a: TenantArguments) -> None:
        self._groups, self._users, self._prefix = a.groups, a.users, a.prefix_tokens
        self._question = _lengths(a.question_tokens, "prompt_tokens")
        self._output = _lengths(a.output_tokens, "output_tokens")
        self._stages = np.array(a.stages)
        longest = self._prefix + int(self._question[-1]) + int(self._output[-1])
        if longest > (a.max_context or MAX_TOKENS):
            raise ContextTooShortError(
                f"max_context={a.max_context!r}: prefix_tokens, question_tokens and output_tokens "
                f"come to {longest}; shorten them."
            )
        self._fresh, self._cycle = a.questions == "fresh", a.order == "cycle"
        popularity = np.arange(1.0, self._groups + 1) ** -a.skew
        popularity[0] *= a.hot_factor
        self._popularity = popularity / popularity.sum()
        self._drift_s = a.drift_s
        if self._cycle and (a.skew or a.hot_factor != 1 or a.drift_s is not None):
            raise ValueError(
                "order='cycle': skew, hot_factor and drift_s need order='random'; in a cycle all "
                "groups are equally popular."
            )

    def _draw(self, rng: np.random.Generator, rate: float, episode: Episode) -> PrefixRequests:
        num_requests, block_size, _ = episode
        work = np.cumsum(rng.standard_exponential(num_requests))
        per_s, seconds = self._stages.T * np.array([[rate], [1.0]])
        done = np.concatenate([[0.0], np.cumsum(per_s * seconds)])
        stage = np.minimum(np.searchsorted(done, work, side="right") - 1, len(seconds) - 1)
        began = np.concatenate([[0.0], np.cumsum(seconds)])
        arrival_s = began[stage] + (work - done[stage]) / per_s[stage]
        group, user = self._who(rng, arrival_s)
        everyone = self._groups * self._users
        count = 1 if self._fresh else everyone
        question = _draw_lengths(rng, self._question, num_requests if self._fresh else count)
        asker = group * self._users + user
        tokens = question if self._fresh else question[asker]
        output = _draw_lengths(rng, self._output, num_requests)
        # Rows of the tree: the groups' prefixes, the users' questions, the requests.
        prompt = self._prefix + tokens
        rows = self._groups + (0 if self._fresh else everyone)
        users = np.zeros(0, dtype=np.int64) if self._fresh else np.arange(everyone)
        tree = _Tree(
            length=np.concatenate(
                [
                    np.full(self._groups, self._prefix),
                    self._prefix + question if users.size else users,
                    prompt + output,
                ]
            ),
            source=np.concatenate(
                [
                    np.full(self._groups, -1),
                    users // self._users,
                    group if self._fresh else self._groups + asker,
                ]
            ),
            shared=np.concatenate(
                [
                    np.zeros(self._groups, dtype=np.int64),
                    np.full(users.size, self._prefix),
                    np.full(num_requests, self._prefix) if self._fresh else prompt,
                ]
            ),
            common=np.zeros(rows + num_requests, dtype=np.bool_),
            rank=np.arange(rows + num_requests),
        )
        row = rows + np.arange(num_requests)
        first_segment, segments = tree.segments(row, np.zeros_like(row), block_size)
        none = np.zeros(num_requests)
        turn = np.empty(num_requests, dtype=np.int32)
        by_asker = np.argsort(asker, kind="stable")
        first_of = np.searchsorted(asker[by_asker], asker[by_asker])
        turn[by_asker] = np.arange(num_requests) - first_of
        return PrefixRequests(
            arrival_s=arrival_s,
            parent=np.full(num_requests, -1, dtype=np.int32),
            think_s=none,
            prompt_tokens=prompt.astype(np.int32),
            output_tokens=output.astype(np.int32),
            session=asker.astype(np.int32),
            tenant=group.astype(np.int32),
            turn=turn,
            first_segment=first_segment,
            segments=segments,
            block_size=block_size,
        )

    def _who(
        self, rng: np.random.Generator, arrival_s: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Group and user of each request: int64 (J,), (J,)."""
        if self._cycle:
            everyone = rng.permutation(self._groups * self._users)
            return np.divmod(everyone[np.arange(len(arrival_s)) % everyone.size], self._users)
        rank = rng.choice(self._groups, size=len(arrival_s), p=self._popularity)
        group = np.empty_like(rank)
        period = self._drift_s or np.inf
        epoch = np.floor(arrival_s / period).astype(np.int64)
        for at in np.split(np.arange(len(rank)), np.flatnonzero(np.diff(epoch)) + 1):
            group[at] = rng.permutation(self._groups)[rank[at]]
        return group, rng.integers(self._users, size=len(arrival_s))


def _lengths(tokens: int | str | tuple[int, int], kind: str) -> np.ndarray:
    """Quantiles of a trace's lengths, or the lowest and the highest of an even range."""
    if isinstance(tokens, str):
        return np.maximum(length_quantiles(tokens, kind), 1.0)
    return np.array(tokens if isinstance(tokens, tuple) else (tokens, tokens))


def _draw_lengths(rng: np.random.Generator, lengths: np.ndarray, size: int) -> np.ndarray:
    """Lengths (size,), int64, of `_lengths`."""
    if len(lengths) == 2:
        return rng.integers(lengths[0], lengths[1] + 1, size=size)
    return sample_lengths(lengths, rng.random(size)).astype(np.int64)


WORKLOADS: Mapping[str, type[PrefixWorkload]] = {
    "mooncake": SuperposedTrace,
    "agents": RecordedSessions,
    "sessions": ChatSessions,
    "tenants": Tenants,
}


def make_prefix_workload(name: str, /, **kwargs: Any) -> PrefixWorkload:
    """Make a workload.

    Args:
        name: ``"mooncake"`` (`SuperposedTrace`), ``"agents"`` (`RecordedSessions`), ``"sessions"``
            (`ChatSessions`) or ``"tenants"`` (`Tenants`).
        **kwargs: Arguments of the class.

    Raises:
        ValueError: An unknown name or argument, or one out of range.
        MalformedFileError: A trace that cannot be used.
    """
    return WORKLOADS[choose("workload", name, WORKLOADS)](**kwargs)
