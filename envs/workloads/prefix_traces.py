"""Recorded requests with the prefixes that their prompts share.

A recorded request is described by the earlier request whose tokens it begins with, and how many of
them: a tree of prefixes that holds for blocks of any size. Two kinds of files are read:

========= =======================================================================================
files     content
========= =======================================================================================
requests  those of `traces`; ``hash_ids`` are a chain of ids of blocks of 512 tokens, in Bailian's
          format of 16, the last one covering what is left of the prompt; of a later turn of a
          session they cover its ``input_length``. Without them only a session's turns share
kvcache   JSON files of kv-cache-tester, one a session: ``block_size``, ``tool_tokens``,
          ``system_tokens``, ``requests`` of ``t`` (s), ``in``, ``out``, ``hash_ids`` (full blocks)
          and perhaps ``think_time``; an entry of type ``subagent`` has ``requests`` of its own,
          whose ``t`` counts from its ``t``
========= =======================================================================================
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from servegym._checks import choose
from servegym._files import MalformedFileError, parse_time, read_json
from servegym.envs.workloads.files import DATA_DIR, read_arrays
from servegym.envs.workloads.traces import Kinds, cell, read_requests, read_tokens

BLOCKS = {"bailian": 16}
MOONCAKE_BLOCK = 512
EXTENDED_BLOCKS = 2
"""Full blocks that a request must have for another to count as its next turn: in Mooncake's
conversations the first block is common to all requests."""
TRACES = ("mooncake-conversation", "mooncake-synthetic", "agents")
_CHAIN = "write the ids of the prompt's blocks in order, an id always after the same id"


@dataclass(frozen=True, eq=False)
class PrefixTrace:
    """n recorded requests and the prefixes they share.

    Request j begins with the first ``shared_tokens[j]`` tokens of request ``source[j]``, which is
    the longest prefix recorded that it shares with an earlier request. Where ``repeats_output[j]``,
    it also repeats the rest of the source's prompt and the source's whole output. The traces record
    no outputs: an output is taken to be repeated by the first later request whose prompt begins
    with all full blocks of the source's prompt, shares nothing longer, and is at least as long as
    the source's prompt and output together.

    Attributes:
        block_size: Tokens of a recorded block.
        time_s: float64 (n,), when it was sent, within its session for sessions recorded one by one.
        prompt_tokens: int32 (n,), at least 1.
        output_tokens: int32 (n,), at least 1.
        source: int32 (n,), index of an earlier request, -1 for none.
        shared_tokens: int32 (n,).
        repeats_output: bool (n,).
        session: int32 (n,), numbered from 0.
        after: int32 (n,), the earlier request whose end it waited for, -1 for none.
        think_s: float64 (n,), seconds between that end, or the sending of that request where no end
            was recorded, and its own sending.
        system_tokens: int32 (n,), tokens of tool definitions and system prompt, 0 where unknown.
        common_tokens: Tokens at the beginning of every prompt that all requests share.
        partial_blocks: Whether the last block of a prompt has an id although the prompt fills it
            in part.
    """

    block_size: int
    time_s: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    source: np.ndarray
    shared_tokens: np.ndarray
    repeats_output: np.ndarray
    session: np.ndarray
    after: np.ndarray
    think_s: np.ndarray
    system_tokens: np.ndarray
    common_tokens: int = 0
    partial_blocks: bool = False

    @property
    def num_requests(self) -> int:
        """The number of requests, n."""
        return len(self.time_s)

    def recorded_hits(self) -> tuple[int, int]:
        """Blocks of all prompts whose ids earlier prompts have, and blocks of all prompts.

        With ``partial_blocks`` the last block of a prompt counts as one.
        """
        up = self.block_size - 1 if self.partial_blocks else 0
        hits = ((self.shared_tokens + up) // self.block_size).sum(dtype=np.int64)
        blocks = ((self.prompt_tokens + up) // self.block_size).sum(dtype=np.int64)
        return int(hits), int(blocks)

    def stream_shared(self, output_reuse: bool = True) -> np.ndarray:
        """Tokens that each request shares with its source: int64 (n,).

        With ``output_reuse`` also those of outputs that are taken to be repeated.
        """
        shared = self.shared_tokens.astype(np.int64)
        if output_reuse:
            at = np.flatnonzero(self.repeats_output)
            of = self.source[at]
            shared[at] = self.prompt_tokens[of].astype(np.int64) + self.output_tokens[of]
        return shared


def load_prefix_trace(name: str | os.PathLike[str]) -> PrefixTrace:
    """A packaged trace by its name, or one in a published format by its path.

    Args:
        name: ``"mooncake-conversation"``, ``"mooncake-synthetic"`` or ``"agents"``; else a path:
            a ``.json`` file or a folder of them is read as kv-cache-tester's, any other file as
            one of requests.

    Raises:
        ValueError: An unknown name that is no path either.
        MalformedFileError: A file that cannot be used; names file, line or request, and field.
    """
    path = Path(name)
    if isinstance(name, str) and (name in TRACES or not path.exists()):
        return _packaged(choose("trace", name, TRACES))
    if path.is_dir():
        files = sorted(path.glob("*.json"))
        if not files:
            raise ValueError(f"trace={os.fspath(path)!r} is a folder without .json files.")
        return _read_kvcache(files)
    return _read_kvcache([path]) if path.suffix == ".json" else _read_requests(path)


@lru_cache(maxsize=len(TRACES))
def _packaged(name: str) -> PrefixTrace:
    path = DATA_DIR / f"prefixes-{name}.npz"
    fix = "install servegym again, or run servegym.envs.workloads.build.prefix_traces"
    about = read_json(path.with_suffix(".json"), fix)
    return unpack(read_arrays(path, fix), about["layout"])


def unpack(arrays: dict[str, np.ndarray], layout: dict[str, Any]) -> PrefixTrace:
    """A trace as stored: whole milliseconds, blocks, distances back; ``layout`` has the rest."""
    index = np.arange(len(arrays["time_ms"]), dtype=np.int32)
    source, after = (
        np.where(arrays[name] == 0, -1, index - arrays[name]).astype(np.int32)
        for name in ("source_back", "after_back")
    )
    prompt = arrays["prompt_tokens"]
    shared = np.minimum(arrays["shared_blocks"].astype(np.int32) * layout["block_size"], prompt)
    columns = {
        "time_s": arrays["time_ms"] / 1e3,
        "prompt_tokens": prompt,
        "output_tokens": arrays["output_tokens"].astype(np.int32),
        "source": source,
        "shared_tokens": shared,
        "repeats_output": arrays["repeats_output"],
        "session": arrays["session"],
        "after": after,
        "think_s": arrays["think_ms"] / 1e3,
        "system_tokens": arrays["system_tokens"].astype(np.int32),
    }
    for array in columns.values():
        array.setflags(write=False)
    return PrefixTrace(**layout, **columns)


class _Chains:
    """Finds, request by request, the earlier request with the longest common chain of ids."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.before: dict[int, tuple[int, int]] = {}  # id -> id before it, its place
        self.holder: dict[int, int] = {}  # id -> the last request that has it
        self.whole: dict[int, int] = {}  # last full id -> the last request with it
        self.repeated: set[int] = set()
        self.prompt: list[int] = []
        self.output: list[int] = []
        self.row: list[int] = []  # of the request in the trace

    def add(
        self, ids: Sequence[int], prompt: int, output: int, turn_before: int = -1
    ) -> tuple[int, int, bool, int]:
        """Source, shared tokens, whether it repeats the output, and the request it extends.

        After a ``turn_before`` the ids are those of the new tokens, which nobody shares.

        Raises:
            LookupError: With the place of the first id that another id preceded elsewhere.
        """
        if turn_before >= 0:
            self.repeated.add(turn_before)
            self.prompt.append(prompt)
            self.output.append(output)
            return turn_before, self.prompt[turn_before], True, turn_before
        last = -1
        for place, name in enumerate(ids):
            if self.before.setdefault(name, (last, place)) != (last, place):
                raise LookupError(place)
            last = name
        prefix = next((k for k, name in enumerate(ids) if name not in self.holder), len(ids))
        source = self.holder[ids[prefix - 1]] if prefix else -1
        extended = -1
        for blocks in range(prefix, EXTENDED_BLOCKS - 1, -1):
            if ids[blocks - 1] in self.whole:
                extended = self.whole[ids[blocks - 1]]
                source = extended if blocks == prefix else source
                break
        shared = min(prefix * self.block_size, prompt)
        if source >= 0:
            shared = min(shared, self.prompt[source])
        repeats = (
            extended >= 0
            and source == extended
            and prefix == self.prompt[source] // self.block_size
            and prompt >= self.prompt[source] + self.output[source]
            and source not in self.repeated
        )
        if repeats:
            self.repeated.add(source)
        index = len(self.prompt)
        self.prompt.append(prompt)
        self.output.append(output)
        self.holder.update(dict.fromkeys(ids, index))
        if prompt >= self.block_size:
            self.whole[ids[prompt // self.block_size - 1]] = index
        return source, shared, repeats, extended


def _ids(path: Path, line: int | str, value: object, blocks: int) -> list[int]:
    if isinstance(value, str):  # a cell of a CSV
        with suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value, list) or any(type(name) is not int or name < 0 for name in value):
        problem = "is not a list of whole numbers of at least 0"
        raise MalformedFileError(path, line, "hash_ids", problem, _CHAIN)
    if len(value) != blocks:
        problem = f"has {len(value)} ids; the prompt has {blocks} blocks"
        raise MalformedFileError(path, line, "hash_ids", problem, _CHAIN)
    return value


def _not_a_chain(path: Path, line: int | str, ids: list[int], place: int) -> MalformedFileError:
    problem = f"{ids[place]} (place {place}) is no prefix chain: it came after another id before"
    return MalformedFileError(path, line, "hash_ids", problem, _CHAIN)


def _seconds(path: Path, line: int | str, name: str, row: dict) -> float:
    """Seconds of at least 0; a date is refused."""
    return float(parse_time(path, line, name, cell(path, line, row, name), "number")[0])


def _read_requests(path: Path) -> PrefixTrace:
    def kinds(names: Sequence[str]) -> Kinds:
        wanted = {"arrival_s": "time", "prompt_tokens": "tokens", "output_tokens": "outputs"}
        parents = ("chat_id", "parent_chat_id") if "parent_chat_id" in names else ()
        ids = ("hash_ids",) if parents or "hash_ids" in names else ()
        for name in names if not ids else ():
            if "hash" in name.lower():
                fix = "name it hash_ids, or leave it out"
                raise MalformedFileError(path, None, name, "is not known", fix)
        return wanted | dict.fromkeys((*ids, *parents), "any")

    file = read_requests(path, kinds, from_first=True)
    time_s, prompt, output = (file.columns.pop(name) for name in list(file.columns)[:3])
    given = file.columns.pop("hash_ids", None)
    size = BLOCKS.get(file.fmt, MOONCAKE_BLOCK)
    chains = _Chains(size)
    rows: list[tuple[int, int, bool, int]] = []
    first: set[int] = set()
    fresh = itertools.count()  # ids of blocks that nobody shares
    requests = zip(file.lines, prompt.tolist(), output.tolist(), file.before, strict=True)
    for j, (line, tokens, answer, turn_before) in enumerate(requests):
        old = int(prompt[turn_before] + output[turn_before]) if turn_before >= 0 else 0
        blocks = -(-(tokens - old) // size)
        if given is None:
            ids = list(itertools.islice(fresh, blocks))
        else:
            ids = _ids(path, line, given[j], blocks)
        try:
            rows.append(chains.add(ids, tokens, answer, turn_before))
        except LookupError as error:
            raise _not_a_chain(path, line, ids, error.args[0]) from None
        if turn_before < 0:
            first.add(ids[0])
    source, shared, repeats, after = (np.array(column) for column in zip(*rows, strict=True))
    if file.columns:  # it says what each goes on from
        chats: dict[str, int] = {}
        for j, (chat, parent) in enumerate(zip(*file.columns.values(), strict=True)):
            after[j] = -1 if str(parent) == "-1" else chats.get(str(parent), -1)
            chats[str(chat)] = j
    session = np.empty(len(rows), dtype=np.int32)
    count = 0
    for j, before in enumerate(after):
        session[j] = count if before < 0 else session[before]
        count += before < 0
    return PrefixTrace(
        block_size=size,
        time_s=time_s,
        prompt_tokens=prompt.astype(np.int32),
        output_tokens=output.astype(np.int32),
        source=source.astype(np.int32),
        shared_tokens=shared.astype(np.int32),
        repeats_output=repeats,
        session=session,
        after=after.astype(np.int32),
        think_s=np.where(after < 0, 0.0, time_s - time_s[after]),
        system_tokens=np.zeros(len(rows), dtype=np.int32),
        common_tokens=size if len(first) == 1 and len(rows) > 1 else 0,
        partial_blocks=True,
    )


def think_times(time_s: np.ndarray, after: np.ndarray, recorded: np.ndarray) -> np.ndarray:
    """Think times (n,) of sessions that were recorded with some of their think times.

    The recorded time counts from the end of the last request whose end was recorded, so it is at
    most the time between the two requests; where none was recorded, that time stands in for it.

    Args:
        time_s: float64 (n,), when each request was sent.
        after: int (n,), the request that each waited for, -1 for none.
        recorded: float64 (n,), recorded think times, NaN where there are none.
    """
    gap = time_s - time_s[after]
    return np.where(after < 0, 0.0, np.maximum(np.fmin(recorded, gap), 0.0))


# Of a request: from its time to the tokens of its system prompt.
_COLUMNS = [field.name for field in fields(PrefixTrace)][1:11]


def _read_kvcache(paths: Sequence[Path]) -> PrefixTrace:
    rows: list[tuple] = []
    block_size = 0
    everywhere: _Chains | None = None
    for session, path in enumerate(paths):
        trace = read_json(path, "give a JSON file of kv-cache-tester")
        if not isinstance(trace, dict):
            problem = "is a JSON array" if isinstance(trace, list) else "is not a JSON object"
            fix = "give a session of kv-cache-tester, or one JSON object on each line of a .jsonl"
            raise MalformedFileError(path, None, None, problem, fix)
        size = read_tokens(path, "head", "block_size", {"block_size": 64} | trace)
        if block_size not in (0, size):
            problem = f"{size} differs from the other files' {block_size}"
            raise MalformedFileError(path, "head", "block_size", problem, "read them apart")
        block_size = size
        system = sum(
            read_tokens(path, "head", name, {name: 0} | trace, 0)
            for name in ("tool_tokens", "system_tokens")
        )
        # Ids are numbered for the whole collection, or anew in each session and sub-agent.
        chains = None
        if trace.get("hash_id_scope") == "global":
            chains = everywhere = everywhere or _Chains(size)
        _read_context(path, "", trace, (0.0, -1), chains, size, (session, system), rows)
    arrays = {
        name: np.array(column)
        for name, column in zip(_COLUMNS, zip(*rows, strict=True), strict=True)
    }
    exact: dict[str, Any] = {name: arrays.pop(name) for name in ("time_s", "repeats_output")}
    think = think_times(exact["time_s"], arrays["after"], arrays.pop("think_s"))
    whole: dict[str, Any] = {name: array.astype(np.int32) for name, array in arrays.items()}
    return PrefixTrace(block_size=block_size, think_s=think, **exact, **whole)


def _read_context(
    path: Path,
    where: str,
    context: dict[str, Any],
    start: tuple[float, int],
    scope: _Chains | None,
    size: int,
    about: tuple[int, int],
    rows: list[tuple],
) -> None:
    """Append the requests of a session or of a sub-agent, which began after the row ``start[1]``.

    The first request of a sub-agent waits for the request before the call; the calling session goes
    on from its own requests, not from the sub-agent's.
    """
    chains = scope or _Chains(size)
    requests = context.get("requests")
    if not isinstance(requests, list) or not requests:
        place = where.strip() or None
        fix = "give a list with at least one request"
        raise MalformedFileError(path, place, "requests", "is missing or empty", fix)
    began, after = start
    last = began
    for k, row in enumerate(requests):
        place = f"{where}request {k}"
        if not isinstance(row, dict):
            raise MalformedFileError(path, place, None, "is not a JSON object", "write one")
        at = began + _seconds(path, place, "t", row)
        if row.get("type") == "subagent":
            _read_context(path, place + " ", row, (at, after), scope, size, about, rows)
            continue
        if at < last:
            problem = f"{row['t']!r} is earlier than the request before it"
            raise MalformedFileError(path, place, "t", problem, "sort the requests by time")
        last = at
        prompt = read_tokens(path, place, "in", row)
        output = max(read_tokens(path, place, "out", row, 0), 1)
        full = prompt // size
        value = row.get("hash_ids")
        partial = isinstance(value, list) and len(value) == full + 1 and prompt % size > 0
        ids = _ids(path, place, value, full + partial)[:full]
        think = row.get("think_time")
        if think is not None:
            think = _seconds(path, place, "think_time", row)
        try:
            source, shared, repeats, _ = chains.add(ids, prompt, output)
        except LookupError as error:
            raise _not_a_chain(path, place, ids, error.args[0]) from None
        source = chains.row[source] if source >= 0 else -1
        chains.row.append(len(rows))
        session, system = about
        think = np.nan if think is None else think
        rows.append((at, prompt, output, source, shared, repeats, session, after, think, system))
        after = len(rows) - 1
