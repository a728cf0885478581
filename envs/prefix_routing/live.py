"""The engine of a replica that is fed while it runs, for servers that answer in real time."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from servegym._checks import whole
from servegym._jit import compile_kernels
from servegym.envs.prefix_routing.kernel import layout, live
from servegym.envs.prefix_routing.tables import EngineArguments, engine_tables, put_replicas
from servegym.hardware_profiles import Profile
from servegym.hardware_profiles.host import put_api

# Ids are int32; the room below the end lasts from one clean-up to the next.
_LAST_ID = (1 << 31) - (1 << 24)


class LiveEngine:
    """One replica with vLLM's scheduler and prefix cache: requests come, tokens go.

    It serves as :func:`~servegym.envs.prefix_routing.replay.replay_prefix` does; requests need not
    be known in advance, and may be taken back. Blocks of equal content after equal content are
    found by a hash of their tokens, as vLLM does.

    Args:
        profile: The card and its model.
        max_num_seqs: Most requests in one iteration, 1 to 4,096.
        max_num_batched_tokens: Most tokens in one iteration, at least ``max_num_seqs``.
        block_size: Tokens of a KV block.
        kv_tokens: Room of the KV cache in tokens; None takes the profile's.
        async_scheduling: Whether an iteration is planned while the one before it runs; None: if the
            profile's engine does by default.
        max_requests: Most requests that it holds at a time, waiting ones included.

    Attributes:
        capacity: KV blocks.
        block_size: Tokens of a KV block.

    Raises:
        ValueError: A bad argument, named.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        block_size: int = 16,
        kv_tokens: int | None = None,
        async_scheduling: bool | None = None,
        max_requests: int = 16384,
    ) -> None:
        whole("max_requests", max_requests, 1)
        engine = EngineArguments(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            kv_tokens=kv_tokens,
            async_scheduling=profile.plans_ahead if async_scheduling is None else async_scheduling,
        )
        tables, capacity = engine_tables([profile], engine, max_requests)
        self.block_size = block_size
        self.capacity = int(capacity[0])
        self._tables = tables
        self._systems = layout.allocate(tables.config[0], 1, np.zeros((256, 2), np.int32))
        put_replicas(self._systems, [profile], capacity)
        put_api(self._systems.replica, [profile])
        self._out_s = float(profile.host.get("api_out_s", 0.0))
        self._tokens = np.zeros(max(1024, max_num_seqs), dtype=live.TOKEN)
        arrays = (tables, self._systems)
        self._start, self._submit, self._abort, self._work = compile_kernels(
            "live engine",
            [
                (live.start, arrays),
                (live.submit, (*arrays, 0, 0.0)),
                (live.abort, (*arrays, 0)),
                (live.work, (*arrays, 0.0, self._tokens)),
            ],
        )
        self.clear()

    def clear(self) -> None:
        """Forget all requests and what is cached, as a server that starts again."""
        self._start(self._tables, self._systems)
        self._free = list(range(len(self._systems.request) - 1, -1, -1))
        self._slots: dict[int, tuple[int, int, int]] = {}  # slot: first segment, segments, class
        self._room: dict[int, list[int]] = {}  # places for 2^k segments
        self._used = 0  # segments beyond the last place
        self._ids: dict[bytes, int] = {}
        self._next_id = 0
        self._taken: frozenset[int] = frozenset()

    # -- state ----------------------------------------------------------------------------------

    @property
    def next_s(self) -> float:
        """When the tokens of the iteration in flight are told, in seconds; inf if there is none."""
        return float(self._systems.replica["end"][0, 0]) + self._out_s

    @property
    def running(self) -> int:
        """Requests that run."""
        return int(self._systems.replica["running"][0, 0])

    @property
    def waiting(self) -> int:
        """Requests that wait, those that were preempted included."""
        return int(self._systems.replica["waiting"][0, 0])

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that requests reference; what is merely cached counts as free."""
        return 1.0 - int(self._systems.replica["free"][0, 0]) / self.capacity

    @property
    def full(self) -> bool:
        """Whether it holds as many requests as it can."""
        return not self._free

    def request(self, slot: int) -> np.record:
        """The record of a slot, in which are ``admitted``, ``first``, ``hit``, ``preemptions``."""
        return self._systems.request[slot]

    # -- requests -------------------------------------------------------------------------------

    def submit(self, now: float, prompt: Sequence[int], output: Sequence[int], salt="") -> int:
        """Take a request; the engine must have worked until ``now``.

        Args:
            now: Seconds, not before an earlier call's.
            prompt: Its token ids, at least one, below 2^32.
            output: Token ids of its answer, at least one; what the next prompt may repeat.
            salt: Only requests of the same salt share blocks.

        Returns:
            Its slot, which :meth:`release` gives back.

        Raises:
            ValueError: If it can never fit into the KV memory, or the engine is full.
        """
        tokens = len(prompt) + len(output)
        need = -(-(tokens - 1) // self.block_size)  # the last token is never computed
        if not len(prompt) or not len(output):
            raise ValueError("a request has at least one token of prompt and one of output")
        if need > self.capacity:
            raise ValueError(
                f"the request needs {need} KV blocks of {self.block_size} tokens; there are "
                f"{self.capacity}"
            )
        if self.full:
            raise ValueError(f"the engine holds {len(self._slots)} requests and takes no more")
        content = np.concatenate([np.asarray(prompt, np.uint32), np.asarray(output, np.uint32)])
        runs = self.runs(content, salt)
        slot = self._free.pop()
        place, kind = self._place(len(runs))
        if runs:
            self._systems.segments[place : place + len(runs)] = runs
        self._slots[slot] = place, len(runs), kind
        r = self._systems.request[slot]
        r["prompt"], r["output"], r["first_segment"] = len(prompt), len(output), place
        self._submit(self._tables, self._systems, slot, float(now))
        return slot

    def work(self, until: float) -> list[tuple[float, int, int]]:
        """Work until a time.

        Args:
            until: Seconds.

        Returns:
            The tokens since the last call as ``(seconds, slot, 1 if it is the last)``, in order.
        """
        tokens: list[tuple[float, int, int]] = []
        while self.next_s <= until:
            # Tokens leave the API later than the engine: both clocks are apart by that.
            count = self._work(self._tables, self._systems, until - self._out_s, self._tokens)
            self._tokens["time"][:count] += self._out_s
            tokens += self._tokens[:count].tolist()
        return tokens

    def abort(self, slot: int) -> None:
        """Take a request out, as when its client hangs up, and give back its slot."""
        self._abort(self._tables, self._systems, slot)
        self.release(slot)

    def release(self, slot: int) -> None:
        """Give back the slot of a request that has ended."""
        place, count, kind = self._slots.pop(slot)
        if count:
            self._room.setdefault(kind, []).append(place)
        self._free.append(slot)

    # -- contents -------------------------------------------------------------------------------

    def runs(self, content: np.ndarray, salt: str = "") -> list[tuple[int, int]]:
        """Ids of the full blocks of a request, as (first id, blocks) of consecutive ones.

        Args:
            content: uint32, token ids of prompt and answer.
            salt: Only contents of the same salt have ids in common.
        """
        size, ids = self.block_size, self._ids
        # Contents that nobody holds any more would pile up for ever.
        if len(ids) > 4 * self.capacity + 4096:
            self._forget()
        runs: list[tuple[int, int]] = []
        data = content.tobytes()
        chain = blake2b(salt.encode("utf-8", "replace"), digest_size=16).digest() if salt else b""
        for end in range(4 * size, len(data) + 1, 4 * size):
            # The key is the block before, as in vLLM: equal blocks after other ones are not equal.
            chain = blake2b(data[end - 4 * size : end], digest_size=16, key=chain).digest()
            block = ids.get(chain)
            if block is None:
                block = self._next_id
                while block in self._taken:
                    block += 1
                ids[chain] = block
                self._next_id = block + 1
            # The kernel reads runs of ids: a prompt seen for the first time is one.
            if runs and block == runs[-1][0] + runs[-1][1]:
                runs[-1] = runs[-1][0], runs[-1][1] + 1
            else:
                runs.append((block, 1))
        return runs

    def _forget(self) -> None:
        """Forget the contents that neither a block nor a request of the engine has."""
        segments = self._systems.segments
        parts = [self._systems.block["id"]]
        for place, count, _ in self._slots.values():
            for first, blocks in segments[place : place + count].tolist():
                parts.append(np.arange(first, first + blocks, dtype=np.int32))
        live_ids = frozenset(np.concatenate(parts).tolist())
        self._ids = {chain: i for chain, i in self._ids.items() if i in live_ids}
        if self._next_id > _LAST_ID:
            self._next_id = 0
        if self._taken or self._next_id == 0:
            self._taken = live_ids  # numbers begin anew, and some are in use

    def _place(self, count: int) -> tuple[int, int]:
        """Where ``count`` segments go, and the class of the place."""
        if not count:
            return 0, 0
        # By powers of two, so that a place that is given back serves many requests.
        kind = (count - 1).bit_length()
        free = self._room.get(kind)
        if free:
            return free.pop(), kind
        place = self._used
        self._used += 1 << kind
        segments = self._systems.segments
        if self._used > len(segments):
            grown = np.zeros((2 * self._used, 2), dtype=np.int32)
            grown[: len(segments)] = segments
            self._systems = self._systems._replace(segments=grown)
        return place, kind
