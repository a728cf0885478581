"""Requests whose prompts share prefixes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from servegym._checks import whole
from servegym._files import LATEST_S
from servegym.envs.workloads.traces import MAX_TOKENS

_MOST_IDS = 1 << 31


class PrefixRequests(NamedTuple):
    """The J requests of an episode, in blocks of ``block_size`` tokens.

    A block id names the content of a full block and of all blocks before it, as the chain hash of
    an engine does: two blocks have the same id if and only if their prefixes up to there are equal.
    A request's ids cover the full blocks of its prompt and output,
    ``(prompt_tokens + output_tokens) // block_size`` of them. They are the concatenation of its
    segments, the ids within a segment being consecutive. The blocks of an output have the ids with
    which the session's next turn repeats them; else nobody else has them.

    A request without a parent arrives at ``arrival_s``. A request with a parent arrives ``think_s``
    after the parent's completion or rejection, and its ``arrival_s`` is ignored.

    Attributes:
        arrival_s: float64 (J,), seconds.
        parent: int32 (J,), index of the earlier request that it waits for, -1 for none.
        think_s: float64 (J,), seconds between the parent's end and this arrival.
        prompt_tokens: int32 (J,), at least 1.
        output_tokens: int32 (J,), at least 1.
        session: int32 (J,), the conversation it belongs to.
        tenant: int32 (J,), the customer it belongs to.
        turn: int32 (J,), its place in its session, counted from 0.
        first_segment: int64 (J + 1,), request j has the segments from ``first_segment[j]`` to
            ``first_segment[j + 1]``, the latter excluded.
        segments: int32 (S, 2), the first block id and the number of blocks.
        block_size: Tokens of a block.
    """

    arrival_s: np.ndarray
    parent: np.ndarray
    think_s: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    session: np.ndarray
    tenant: np.ndarray
    turn: np.ndarray
    first_segment: np.ndarray
    segments: np.ndarray
    block_size: int

    @property
    def num_requests(self) -> int:
        """The number of requests, J."""
        return len(self.arrival_s)

    def block_ids(self, j: int) -> np.ndarray:
        """Ids of the full blocks of request ``j``, prompt and output: int32 (blocks,)."""
        segments = self.segments[self.first_segment[j] : self.first_segment[j + 1]]
        return expand(segments).astype(np.int32)

    def num_blocks(self) -> np.ndarray:
        """Full blocks of prompt and output: int64 (J,)."""
        tokens = self.prompt_tokens.astype(np.int64) + self.output_tokens
        return tokens // self.block_size

    def check(self) -> PrefixRequests:
        """Return the requests if they are well formed; the workloads' own draws are.

        Raises:
            ValueError: Naming the field, the request and what is allowed: arrays of other shapes or
                types, times that are negative or not finite, a parent that is not an earlier
                request (a session that waits on itself), lengths below 1, segments that do not add
                up to the request's full blocks, or block ids that are no prefix chain.
        """
        whole("block_size", self.block_size, 1, MAX_TOKENS)
        count = len(self.arrival_s)
        if count == 0:
            raise ValueError("arrival_s is empty; at least one request is needed.")
        for name, array in zip(self._fields[:-1], self[:-1], strict=True):
            dtype = _TYPES.get(name, np.int32)
            shape = {"first_segment": (count + 1,), "segments": (len(array), 2)}.get(name, (count,))
            if array.dtype != dtype or array.shape != shape:
                raise ValueError(
                    f"{name} is {array.dtype} of shape {array.shape}; it must be "
                    f"{np.dtype(dtype)} of shape {shape}."
                )
        for name in ("arrival_s", "think_s"):
            array = getattr(self, name)
            wrong = ~np.isfinite(array) | (array < 0) | (array >= LATEST_S)
            _refuse(name, array, wrong, f"seconds, at least 0 and below {LATEST_S:g}")
        for name in ("prompt_tokens", "output_tokens"):
            array = getattr(self, name)
            _refuse(name, array, (array < 1) | (array > MAX_TOKENS), f"in [1, {MAX_TOKENS}]")
        index = np.arange(count)
        late = (self.parent >= index) | (self.parent < -1)
        _refuse("parent", self.parent, late, "-1 or the index of an earlier request")
        first, sizes = self.first_segment, self.segments
        if first[0] != 0 or first[-1] != len(sizes) or (np.diff(first) < 0).any():
            raise ValueError(
                f"first_segment must rise from 0 to {len(sizes)}, the number of segments; it goes "
                f"from {first[0]} to {first[-1]}."
            )
        ids = sizes[:, 0].astype(np.int64)
        wrong = (ids < 0) | (sizes[:, 1] < 1) | (ids + sizes[:, 1] > _MOST_IDS)
        _refuse("segments", sizes, wrong, "(an id of at least 0, at least 1 block), within int32")
        ends = np.concatenate([[0], np.cumsum(sizes[:, 1], dtype=np.int64)])[first]
        blocks = self.num_blocks()
        wrong = np.flatnonzero(np.diff(ends) != blocks)
        if wrong.size:
            j = int(wrong[0])
            raise ValueError(
                f"segments of request {j} have {np.diff(ends)[j]} blocks; they must have "
                f"{blocks[j]}, the full blocks of its prompt and output."
            )
        self._check_chains()
        return self

    def _check_chains(self) -> None:
        """Refuse an id that follows two different ids, or begins one request and not another."""
        first, blocks = self.segments.T.astype(np.int64)
        last = first + blocks - 1
        before = np.roll(last, 1)
        before[self.first_segment[:-1][np.diff(self.first_segment) > 0]] = -1
        order = np.argsort(first, kind="stable")
        begins, follows = first[order], before[order]
        same = begins[1:] == begins[:-1]
        # It begins within a segment that begins earlier.
        inside = ~same & (begins[1:] <= np.maximum.accumulate(last[order])[:-1])
        wrong = (same & (follows[1:] != follows[:-1])) | (inside & (follows[1:] != begins[1:] - 1))
        if wrong.any():
            at = int(order[1:][wrong].min())
            j = int(np.searchsorted(self.first_segment, at, side="right")) - 1
            raise ValueError(
                f"segments of request {j}: block id {first[at]} follows id {before[at]} there and "
                "another id elsewhere (-1: it begins the prompt); block ids must be a prefix chain."
            )


_TYPES = {"arrival_s": np.float64, "think_s": np.float64, "first_segment": np.int64}


def _refuse(name: str, array: np.ndarray, wrong: np.ndarray, allowed: str) -> None:
    at = np.flatnonzero(wrong)
    if at.size:
        raise ValueError(f"{name}[{at[0]}] is {array[at[0]]}; it must be {allowed}.")


def expand(segments: np.ndarray) -> np.ndarray:
    """Ids of segments (S, 2), one after the other: int64."""
    first, blocks = segments[:, 0].astype(np.int64), segments[:, 1].astype(np.int64)
    ends = np.cumsum(blocks)
    total = int(ends[-1]) if ends.size else 0
    return np.repeat(first - ends + blocks, blocks) + np.arange(total)
