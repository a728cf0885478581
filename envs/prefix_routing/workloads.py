"""Workloads of requests that share prefixes: recorded, fitted and made.

============ =====================================================================================
name         content
============ =====================================================================================
``mooncake`` Mooncake's traces, whole. More load is more copies of the trace, each shifted in time
             and with content of its own; less load is fewer of its sessions. Time is never
             compressed, so that the time between the uses of a prefix stays as recorded.
``agents``   710 recorded sessions of a coding agent, which start by a Poisson process.
``sessions`` Conversations drawn from laws fitted to Mooncake's, which start by a Poisson process.
``tenants``  Groups of users with a long common prefix each, the shape of llm-d's benchmark.
============ =====================================================================================

An episode is the first requests of the stationary process seen from a random moment on: sessions
that began before it are under way, with a context that no replica has cached. An episode of n
requests at rate r lasts n / r seconds; a prefix that is used again later than that is lost to it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from servegym._checks import LARGEST, choose, flag, keywords, real, whole
from servegym.envs.prefix_routing.requests import PrefixRequests
from servegym.envs.workloads.files import read_fitted
from servegym.envs.workloads.lengths import fitted_lengths, length_quantiles, sample_lengths
from servegym.envs.workloads.prefix_traces import MAX_TOKENS, PrefixTrace, load_prefix_trace

DISPATCHES = ("think", "trace")
"""When a session's next request comes: some time after the last one ended, or when recorded."""
MAX_REQUESTS = 1 << 22
MIN_RATE = 1e-3
MAX_RATES = {"tenants": LARGEST, "sessions": 500.0, "agents": 200.0, "mooncake": 1000.0}
"""Most requests/s by workload: more sessions under way at once take gigabytes."""
CHAT_HISTORY_S = 3600.0
"""How long before the episode conversations may have begun."""
Episode = tuple[int, int, str]
"""Requests, tokens of a block and dispatch of an episode to draw."""
FIRST_PROMPTS = ("only_prompt_tokens", "first_prompt_tokens")
"""Laws of the first prompt in sessions of one turn and of more."""
LLM_D_STAGES = (
    *((15.0, 50.0), (3.0, 20.0), (10.0, 20.0), (15.0, 20.0), (20.0, 38.0), (22.0, 34.0)),
    *((25.0, 30.0), (30.0, 25.0), (35.0, 21.0), (40.0, 38.0), (43.0, 36.0), (46.0, 33.0)),
    *((49.0, 30.0), (52.0, 29.0), (55.0, 27.0), (57.0, 26.0), (60.0, 25.0)),
)
"""Stages of llm-d's benchmark with eight pods at a rate of 1 request/s: factor and seconds."""


class PrefixWorkload:
    """Draws the requests of an episode; a workload fills in `_draw`.

    Attributes:
        MAX_RATE: Most requests/s.
    """

    MAX_RATE: float = LARGEST

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

        Raises:
            ValueError: An argument out of range; names it.
        """
        whole("num_requests", num_requests, 1, MAX_REQUESTS)
        whole("block_size", block_size, 1, MAX_TOKENS)
        choose("dispatch", dispatch, DISPATCHES)
        real("rate", rate, MIN_RATE, self.MAX_RATE)
        return self._draw(rng, num_requests, rate, (num_requests, block_size, dispatch))

    def _draw(
        self, rng: np.random.Generator, num_requests: int, rate: float, episode: Episode
    ) -> PrefixRequests:
        """`draw` with checked arguments."""
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
        self,
        row: np.ndarray,
        copy: np.ndarray,
        arrival_s: np.ndarray,
        episode: Episode,
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
            wanted = np.where(self.after[row] < 0, -1, copy * rows + self.after[row])
            at = np.minimum(np.searchsorted(name[by_name], wanted), len(row) - 1)
            found = name[by_name[at]] == wanted
            parent[found] = by_name[at[found]]
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


def _longest(max_context: int | None) -> int:
    return whole("max_context", MAX_TOKENS if max_context is None else max_context, 1, MAX_TOKENS)


SPLITS = {"train": (0.0, 0.6), "val": (0.6, 0.8), "eval": (0.8, 1.0), "all": (0.0, 1.0)}
"""Parts of a recording: its sessions by a hash of their number, which is in [0, 1)."""


def _of_split(trace: PrefixTrace, split: str) -> np.ndarray:
    """Which requests are of a session of the split: bool (n,)."""
    low, high = SPLITS[choose("split", split, SPLITS)]
    place = (trace.session.astype(np.uint64) * 2654435761 % (1 << 32)) / (1 << 32)
    return (place >= low) & (place < high)


def _recorded(
    trace: PrefixTrace,
    max_context: int | None,
    output_reuse: bool,
    split: str,
    warm_prefix: float = 0.0,
) -> tuple[_Content, np.ndarray]:
    """The content of a trace, and the rows of it that a longest context and a split leave."""
    length = trace.prompt_tokens.astype(np.int64) + trace.output_tokens
    kept = (length <= _longest(max_context)) & _of_split(trace, split)
    if not kept.any():
        raise ContextTooShortError(
            f"max_context={max_context!r} leaves no request; the shortest has {length.min()} "
            "tokens."
        )
    # A request waits for the last one before it that is kept.
    after = trace.after.astype(np.int64)
    while (lost := (after >= 0) & ~kept[after]).any():
        after[lost] = after[after[lost]]
    turn = np.zeros(trace.num_requests, dtype=np.int32)
    for j in np.flatnonzero(kept & (after >= 0)):
        turn[j] = turn[after[j]] + 1
    source, shared = trace.source.astype(np.int64), trace.stream_shared(output_reuse)
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
    return content, np.flatnonzero(kept)


class SuperposedTrace(PrefixWorkload):
    """A recorded hour, or several shifted copies of it at the same time.

    Each copy begins at a random moment of the trace and goes round. Its content is its own, except
    what all requests of the trace begin with. A rate below a whole number of copies leaves out
    sessions at random. With dispatch ``"think"`` a request that begins with all full blocks of an
    earlier one (at least two) comes as long after that one's end as it was sent after it in the
    recording, which states no ends: think times are too long by the recorded latency.

    Args:
        trace: ``"conversation"``, ``"synthetic"``, or the path of a trace in Mooncake's format.
        max_context: Requests with a longer prompt and output are dropped; None keeps all.
        output_reuse: Whether outputs are repeated in the session's next prompt, see `PrefixTrace`.
        split: ``"train"``, ``"val"``, ``"eval"`` or ``"all"``, see `SPLITS`.
    """

    MAX_RATE = MAX_RATES["mooncake"]

    def __init__(
        self,
        trace: str | os.PathLike[str] = "conversation",
        *,
        max_context: int | None = None,
        output_reuse: bool = True,
        split: str = "all",
    ) -> None:
        short = isinstance(trace, str) and trace in ("conversation", "synthetic")
        recorded = load_prefix_trace(f"mooncake-{trace}" if short else trace)
        reuse = flag("output_reuse", output_reuse)
        self._content, self._rows = _recorded(recorded, max_context, reuse, split)
        times = recorded.time_s[self._rows]
        if times[-1] <= 0:
            raise ValueError(f"trace={trace!r} has no two requests at different times.")
        self._times = times
        self._period_s = float(times[-1]) * len(times) / max(len(times) - 1, 1)

    def _draw(
        self, rng: np.random.Generator, num_requests: int, rate: float, episode: Episode
    ) -> PrefixRequests:
        share = rate * self._period_s / len(self._times)
        copies = int(np.ceil(share))
        begin = rng.random(copies) * self._period_s
        sessions = int(self._content.session.max()) + 1
        keep = rng.random((copies, sessions)) * copies < share
        session = self._content.session[self._rows]
        span = 1.2 * num_requests / rate
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
            if len(row) >= num_requests:
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

    Args:
        trace: ``"agents"``, or the path of a session of kv-cache-tester or of a folder of them.
        max_context: Requests with a longer prompt and output are dropped and their sessions go on
            without them; None keeps all.
        output_reuse: Whether outputs are repeated in the session's next prompt, see `PrefixTrace`.
        split: ``"train"``, ``"val"``, ``"eval"`` or ``"all"``, see `SPLITS`.
        warm_prefix: Share of the tool definitions and system prompt that is common to all sessions.
            The recording has no content shared by sessions; kv-cache-tester replays it with 0.5.
    """

    MAX_RATE = MAX_RATES["agents"]

    def __init__(
        self,
        trace: str | os.PathLike[str] = "agents",
        *,
        max_context: int | None = None,
        output_reuse: bool = True,
        split: str = "all",
        warm_prefix: float = 0.0,
    ) -> None:
        recorded = load_prefix_trace(trace)
        share = real("warm_prefix", warm_prefix, 0.0, 1.0)
        reuse = flag("output_reuse", output_reuse)
        self._content, rows = _recorded(recorded, max_context, reuse, split, share)
        self._rows = rows[np.argsort(recorded.session[rows], kind="stable")]
        _, first, self._requests = np.unique(
            recorded.session[self._rows], return_index=True, return_counts=True
        )
        self._first = first
        # Time within the session, from its first request that is kept.
        at = recorded.time_s[self._rows]
        self._time_s = at - np.repeat(np.minimum.reduceat(at, first), self._requests)
        self._duration_s = np.maximum.reduceat(self._time_s, first)

    def _draw(
        self, rng: np.random.Generator, num_requests: int, rate: float, episode: Episode
    ) -> PrefixRequests:
        span = 1.2 * num_requests / rate
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
            if int(shown.sum()) >= num_requests:
                row = self._rows[at[shown]]
                return self._content.episode(row, copy[shown], arrival_s[shown], episode)
            span *= 1.5


class _Sessions(NamedTuple):
    """Requests and when each is sent if nothing is waited for: float64 (R,)."""

    content: _Content
    sent_s: np.ndarray


class ChatSessions(PrefixWorkload):
    """Conversations whose turns repeat all before them; sessions start by a Poisson process.

    Lengths, the number of turns and the times between turns are drawn from laws fitted to
    Mooncake's conversations (`envs/workloads/data/chat-sessions.json`), independently but for first
    prompts, whose law is one for sessions of one turn and another for sessions of more. With
    dispatch ``"think"`` a turn comes that time after the end of the one before it. The recording
    states no ends, so think times are too long by the recorded latency.

    Args:
        system_tokens: Tokens that all prompts begin with.
        max_context: A session ends before the turn whose prompt and output would be longer; one
            whose first turn would be is left out; None sets no limit.
    """

    MAX_RATE = MAX_RATES["sessions"]

    def __init__(self, system_tokens: int = 512, *, max_context: int | None = None) -> None:
        laws = read_fitted("chat-sessions.json", "chat_sessions")
        self._system = whole("system_tokens", system_tokens, 0, MAX_TOKENS // 4)
        self._max_context = _longest(max_context)
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
                f"max_context={max_context!r} leaves no session; at least {least}."
            )
        sample = self._sessions(np.random.default_rng(0), np.zeros(20_000))
        self._mean_turns = len(sample.sent_s) / len(np.unique(sample.content.session))

    def _draw(
        self, rng: np.random.Generator, num_requests: int, rate: float, episode: Episode
    ) -> PrefixRequests:
        span = 1.2 * num_requests / rate + 60.0
        while True:
            sessions = rng.poisson(rate / self._mean_turns * (CHAT_HISTORY_S + span))
            start_s = rng.random(sessions) * (CHAT_HISTORY_S + span) - CHAT_HISTORY_S
            content, sent_s = self._sessions(rng, start_s)
            shown = np.flatnonzero((sent_s >= 0) & (sent_s < span))
            if len(shown) >= num_requests:
                copy = np.zeros(len(shown), dtype=np.int64)
                return content.episode(shown, copy, sent_s[shown], episode)
            span *= 1.5

    def _sessions(self, rng: np.random.Generator, start_s: np.ndarray) -> _Sessions:
        """Whole sessions that start at ``start_s`` (n,), the turns of each in one run."""

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
        return _Sessions(content, sent_s[order])


class Tenants(PrefixWorkload):
    """Groups of users; a group's prompts begin with its prefix, then comes a question.

    Requests come by a Poisson process and wait for none, so ``dispatch`` changes nothing. The
    defaults are those of llm-d's benchmark with eight pods: 750 prompts, asked one after the other
    in a random order, over and over. Its load is ``stages=LLM_D_STAGES`` at a rate of 1.

    Args:
        groups: Number of groups; a group is a tenant.
        users: Users of a group; a user is a session.
        prefix_tokens: Tokens of a group's prefix.
        question_tokens: Tokens of a question, the range (low, high) it is drawn from, or the name
            of a trace whose prompts' fitted lengths it has: ``"azure"``, ``"mooncake"`` or
            ``"sharegpt"``.
        output_tokens: Tokens of an output, likewise.
        questions: ``"repeated"``: a user always asks the same question; ``"fresh"``: never.
        order: ``"cycle"``: all users in turn; ``"random"``: each request is of a group drawn by its
            popularity and of any of its users.
        skew: Exponent of the groups' popularity, ``rank ** -skew``.
        hot_factor: Factor on the requests of the most popular group.
        drift_s: Time after which the groups' ranks are drawn anew; None keeps them.
        stages: Course of the load, pairs (factor on the rate, seconds) one after the other; a
            factor of 0 is a pause, and the last stage, which must not be one, goes on. None keeps
            the rate.
        max_context: A longer prompt and output are refused; None sets no limit.
    """

    def __init__(
        self,
        groups: int = 150,
        users: int = 5,
        prefix_tokens: int = 6000,
        question_tokens: int | Sequence[int] | str = 1200,
        output_tokens: int | Sequence[int] | str = 1000,
        *,
        questions: str = "repeated",
        order: str = "cycle",
        skew: float = 0.0,
        hot_factor: float = 1.0,
        drift_s: float | None = None,
        stages: Sequence[Sequence[float]] | None = None,
        max_context: int | None = None,
    ) -> None:
        self._groups = whole("groups", groups, 1, 1 << 20)
        self._users = whole("users", users, 1, 1 << 20)
        self._prefix = whole("prefix_tokens", prefix_tokens, 0, MAX_TOKENS // 4)
        self._question = _lengths("question_tokens", question_tokens, "prompt_tokens")
        self._output = _lengths("output_tokens", output_tokens, "output_tokens")
        self._stages = _course([(1.0, 1.0)] if stages is None else stages)
        longest = self._prefix + int(self._question[-1]) + int(self._output[-1])
        if longest > _longest(max_context):
            raise ContextTooShortError(
                f"max_context={max_context!r}: prefix_tokens, question_tokens and output_tokens "
                f"come to {longest}; shorten them."
            )
        self._fresh = choose("questions", questions, ("repeated", "fresh")) == "fresh"
        self._cycle = choose("order", order, ("cycle", "random")) == "cycle"
        popularity = np.arange(1.0, self._groups + 1) ** -real("skew", skew, 0.0, 100.0)
        popularity[0] *= real("hot_factor", hot_factor, 1.0, 1e6)
        self._popularity = popularity / popularity.sum()
        self._drift_s = None if drift_s is None else real("drift_s", drift_s, 0.0, open_low=True)
        if self._cycle and (skew or hot_factor != 1 or drift_s is not None):
            raise ValueError(
                f"order={order!r}: skew, hot_factor and drift_s need order='random'; in a cycle "
                "all groups are equally popular."
            )

    def _draw(
        self, rng: np.random.Generator, num_requests: int, rate: float, episode: Episode
    ) -> PrefixRequests:
        _, block_size, _ = episode
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


def _course(given: Sequence[Sequence[float]]) -> np.ndarray:
    """Stages of a load as float64 (stages, 2): factor on the rate, seconds."""
    stages = list(given)
    for stage in stages:
        if len(stage) != 2:
            raise ValueError(f"stages has {stage!r}; a stage is a pair (factor, seconds).")
        real("stages", stage[0], 0.0)
        real("stages", stage[1], 0.0, open_low=True)
    if not stages or stages[-1][0] == 0:
        raise ValueError(f"stages={given!r} must end with a stage of a factor above 0.")
    return np.array(stages, dtype=np.float64)


def _lengths(argument: str, given: int | Sequence[int] | str, kind: str) -> np.ndarray:
    """Quantiles of a trace's lengths, or the lowest and the highest of an even range."""
    if isinstance(given, str):
        choose(argument, given, fitted_lengths()["traces"])
        return np.maximum(length_quantiles(given, kind), 1.0)
    low, high = _whole_range(argument, given)
    return np.array([low, high - 1])


def _draw_lengths(rng: np.random.Generator, lengths: np.ndarray, size: int) -> np.ndarray:
    """Lengths (size,), int64, of `_lengths`."""
    if len(lengths) == 2:
        return rng.integers(lengths[0], lengths[1] + 1, size=size)
    return sample_lengths(lengths, rng.random(size)).astype(np.int64)


def _whole_range(argument: str, given: int | Sequence[int]) -> tuple[int, int]:
    """A number of tokens or a pair (low, high) as a range with an open end."""
    pair = given if isinstance(given, list | tuple) else (given, given)
    if len(pair) != 2:
        raise ValueError(f"{argument}={given!r} must be a whole number or a pair (low, high).")
    low, high = (whole(argument, value, 1, MAX_TOKENS // 4) for value in pair)
    if low > high:
        raise ValueError(f"{argument}={given!r}: the low end is above the high end.")
    return low, high + 1


_MAKERS: Mapping[str, Callable[..., PrefixWorkload]] = {
    "mooncake": SuperposedTrace,
    "agents": RecordedSessions,
    "sessions": ChatSessions,
    "tenants": Tenants,
}
RECORDED = ("mooncake", "agents")
"""Those that have splits."""


def list_prefix_workloads() -> list[str]:
    """Names that :func:`make_prefix_workload` knows."""
    return list(_MAKERS)


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
    make = _MAKERS[choose("workload", name, _MAKERS)]
    keywords(inspect.signature(make).parameters, kwargs)
    return make(**kwargs)
