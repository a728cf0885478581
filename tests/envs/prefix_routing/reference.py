"""Slow, literal reference of the prefix routing engine: one iteration at a time, plain Python.

vLLM's scheduler (v1) and its KV cache manager with automatic prefix caching (``schedule`` in
``vllm/v1/core/sched/scheduler.py`` and ``allocate_slots`` in ``vllm/v1/core/kv_cache_manager.py``,
commit 003df29), written from their rules with objects and lists, and its loop with two batches in
flight (``step_with_batch_queue`` in ``vllm/v1/engine/core.py``, commit 00080ee, and
``vllm/v1/core/sched/async_scheduler.py``, 014b235), in which a step is scheduled when the one
before it begins. It exists to be compared with the fast kernel, so it shares no code with it and
takes no shortcut. Seconds and tokens throughout.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from servegym.envs.prefix_routing.requests import PrefixRequests

from ..llm_routing.reference import Api, step_s

NAN = math.nan


@dataclass(eq=False)
class Block:
    """One KV block; ``id`` names its content and all before it, None for none."""

    id: int | None = None
    references: int = 0


@dataclass(eq=False)
class Request:
    """A request: ``ids`` are those of the full blocks of its prompt and output."""

    index: int
    prompt: int
    output: int
    ids: list[int]
    tokens: int = 0  # prompt and generated so far
    sampled: int = 0  # tokens that scheduled steps will add
    computed: int = 0  # tokens whose KV exists once the scheduled steps have run
    prefilling: bool = False
    blocks: list[Block] = field(default_factory=list)
    named: int = 0
    lost: int = 0
    replica: int = -1
    outcome: str = "pending"
    arrival: float = NAN
    admitted: float = NAN
    first: float = NAN
    finish: float = NAN
    hit: int = 0
    recomputed: int = 0
    preemptions: int = 0


@dataclass
class Step:
    """What is scheduled for an iteration; ``effects`` are seen of requests when it begins."""

    parts: list[tuple[Request, int, int, bool]] = field(default_factory=list)
    """Request, tokens, context before them, and whether a token is sampled."""
    decodes: list[int] = field(default_factory=list)  # their contexts
    chunks: list[tuple[int, int]] = field(default_factory=list)
    effects: list[tuple[Request, str, int]] = field(default_factory=list)


class BlockPool:
    """Free blocks in order of eviction, and the blocks of every id in the order they got it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free: OrderedDict[Block, None] = OrderedDict((Block(), None) for _ in range(capacity))
        self.cached: dict[int, list[Block]] = {}
        self.events: list[tuple[int, int]] = []
        self.evictions = 0
        self.twins = 0

    def take(self) -> Block:
        """Pop the head of the free list; its id is lost."""
        block, _ = self.free.popitem(last=False)
        if block.id is not None:
            self.cached[block.id].remove(block)
            if not self.cached[block.id]:
                del self.cached[block.id]
            self.events.append((block.id, -1))
            self.evictions += 1
            block.id = None
        block.references = 1
        return block

    def name(self, block: Block, content: int) -> None:
        """Cache a full block under its id, beside equal ones."""
        block.id = content
        self.twins += content in self.cached
        self.cached.setdefault(content, []).append(block)
        self.events.append((content, 1))

    def touch(self, block: Block) -> None:
        """Reference a cached block."""
        if block.references == 0:
            del self.free[block]
        block.references += 1

    def release(self, blocks: Sequence[Block]) -> None:
        """Give blocks back, the last one first: with an id to the tail, without to the head."""
        for block in reversed(blocks):
            block.references -= 1
            if block.references == 0:
                self.free[block] = None
                if block.id is None:
                    self.free.move_to_end(block, last=False)


class Replica:
    """One engine; ``changes`` are the times at which it goes down, comes back, and so on."""

    def __init__(
        self,
        number: int,
        law: Any,
        capacity: int,
        block_size: int,
        max_seqs: int,
        budget: int,
        changes: Sequence[float] = (),
        ahead: bool = False,
        api: Api | None = None,
    ) -> None:
        self.number = number
        self.changes = [*changes, math.inf]
        self.down = False
        self.law = law
        self.pool = BlockPool(capacity)
        self.block_size = block_size
        self.max_seqs = max_seqs
        self.budget = budget
        self.ahead = ahead
        self.api = api or Api()
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.steps: list[Step] = []  # the one under way, and the next one
        self.began = -math.inf  # the step under way
        self.end = math.inf
        self.done: list[Request] = []
        self.events: list[tuple[float, int, int]] = []
        self.blocked = 0
        self.full_hits = 0
        self.same_step_hits = 0

    # -- memory ------------------------------------------------------------------------------

    def cached_prefix(self, request: Request) -> list[Block]:
        """The longest chain of cached blocks; the last token is never among them."""
        found: list[Block] = []
        for content in request.ids[: (request.tokens - 1) // self.block_size]:
            if content not in self.pool.cached:
                break
            found.append(self.pool.cached[content][0])
        return found

    def allocate(self, request: Request, tokens: int) -> bool:
        """Blocks for the first ``tokens`` tokens; those full of known ones are cached at once."""
        need = math.ceil(tokens / self.block_size) - len(request.blocks)
        if need > len(self.pool.free):
            return False
        for _ in range(need):
            request.blocks.append(self.pool.take())
        self.cache(request, min(tokens, request.tokens))
        return True

    def cache(self, request: Request, tokens: int) -> None:
        """Cache the blocks that the first ``tokens`` tokens fill."""
        while request.named < tokens // self.block_size:
            self.pool.name(request.blocks[request.named], request.ids[request.named])
            request.named += 1

    def release(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        request.named = 0

    # -- scheduler ---------------------------------------------------------------------------

    def preempt(self, step: Step) -> Request:
        """The newest running request goes back to the head of the queue."""
        request = self.running.pop()
        self.release(request)
        request.lost, request.computed = request.computed, 0
        step.effects.append((request, "preemptions", 1))
        self.waiting.insert(0, request)
        return request

    def admit(self, request: Request, step: Step) -> bool:
        """Whether the memory takes all tokens of the head of the queue; its hits are touched."""
        hits = self.cached_prefix(request)
        need = math.ceil(request.tokens / self.block_size) - len(hits)
        need += sum(block.references == 0 for block in hits)
        if need > len(self.pool.free):
            self.blocked += 1
            return False
        fresh = {id(b) for other, *_ in step.parts for b in other.blocks}
        self.same_step_hits += any(id(block) in fresh for block in hits)
        for block in hits:
            self.pool.touch(block)
        request.blocks = list(hits)
        request.named = len(hits)
        request.computed = len(hits) * self.block_size
        self.full_hits += request.computed >= request.tokens - self.block_size
        return True

    def schedule(self) -> Step:
        """The next step: the running requests, then the head of the waiting queue."""
        step = Step()
        budget = self.budget
        preempted = False
        place = 0
        while place < len(self.running) and budget > 0:
            request = self.running[place]
            total = request.tokens + request.sampled
            if total == request.prompt + request.output:  # its last token is under way
                place += 1
                continue
            count = min(total - request.computed, budget)
            while not self.allocate(request, request.computed + count):
                preempted = True
                if self.preempt(step) is request:
                    break
            else:
                self.add(step, request, count)
                budget -= count
                place += 1
        while self.waiting and not preempted and budget > 0:
            request = self.waiting[0]
            if len(self.running) == self.max_seqs or not self.admit(request, step):
                break
            self.waiting.pop(0)
            self.running.append(request)
            request.prefilling = True
            step.effects.append((request, "hit", request.computed))
            count = min(request.tokens - request.computed, budget)
            assert self.allocate(request, request.computed + count)
            self.add(step, request, count)
            budget -= count
        return step

    def add(self, step: Step, request: Request, count: int) -> None:
        """Put tokens of a request into a step."""
        before = request.computed
        request.computed += count
        ends = request.computed == request.tokens + request.sampled
        step.parts.append((request, count, before, ends))
        if request.prefilling:
            step.chunks.append((count, before))
        else:
            step.decodes.append(request.computed)
        if ends:
            request.sampled += 1
            request.prefilling = False

    def begin(self, now: float) -> None:
        """The first of the scheduled steps begins; what it has changed becomes known."""
        step = self.steps[0]
        for request, what, count in step.effects:
            if what == "preemptions":
                request.preemptions += 1
            elif math.isnan(request.admitted):
                request.admitted, request.hit = now, count
            else:
                request.recomputed += max(request.lost - count, 0)
        self.began = now
        self.end = now + step_s(self.law, step.chunks, step.decodes)

    def update(self, step: Step, now: float) -> None:
        """A step has run: tokens are known; requests complete."""
        for request, *_, sampled in step.parts:
            if not sampled:
                continue
            request.sampled -= 1
            request.tokens += 1
            if request in self.running:
                self.cache(request, request.computed - request.sampled)
            generated = request.tokens - request.prompt
            if generated == 1:
                request.first = now
            if generated == request.output:
                (self.running if request in self.running else self.waiting).remove(request)
                self.release(request)
                request.outcome, request.finish = "completed", now
                self.done.append(request)

    def publish(self, now: float) -> None:
        """Tell what has changed in the cache."""
        self.events += [(now, *event) for event in self.pool.events]
        self.pool.events = []

    def plan_ahead(self) -> None:
        """Schedule the step after the one under way, with all who had come when that began."""
        if self.ahead and len(self.steps) == 1:
            self.waiting += self.api.take(self.began)
            self.steps.append(self.schedule())

    def boundary(self) -> None:
        """A step ends, and the next one begins."""
        now = self.end
        self.plan_ahead()
        self.waiting += self.api.take(now)
        if self.steps:
            self.update(self.steps.pop(0), now)
        if not self.steps or not self.steps[0].parts:
            told = self.steps[0].effects if self.steps else []
            self.steps = [self.schedule()]
            self.steps[0].effects[:0] = told
        self.publish(now)
        if not self.steps[0].parts:
            assert not self.waiting
            self.steps = []
            self.end = self.api.next()
            return
        self.begin(now)

    def change(self) -> None:
        """It fails, and loses all that it has, or it comes back."""
        self.changes.pop(0)
        self.down = not self.down
        if not self.down:
            return
        for request in self.running + self.waiting + self.api.empty():
            request.outcome = "failed"
            self.done.append(request)
        self.running, self.waiting, self.steps = [], [], []
        self.pool = BlockPool(self.pool.capacity)
        self.end = math.inf

    def enqueue(self, request: Request, now: float) -> None:
        request.replica = self.number
        request.tokens = request.prompt
        if now > self.began:
            self.plan_ahead()
        self.api.put(request, now)
        if not self.steps:
            self.end = self.api.next()

    def busy(self) -> bool:
        """Whether it has any request."""
        return bool(self.running or self.waiting or self.api.next() < math.inf)

    # -- what can be compared ----------------------------------------------------------------

    def labels(self) -> dict[Block, tuple[int, int]]:
        """A cached block's id, and how many got it before and still have it."""
        return {
            block: (content, rank)
            for content, blocks in self.pool.cached.items()
            for rank, block in enumerate(blocks)
        }

    def memory(self) -> tuple[list[tuple[int, int]], dict[tuple[int, int], int]]:
        """Free blocks in order of eviction, and the references of every cached one."""
        labels = self.labels()
        order = [labels.get(block, (-1, 0)) for block in self.pool.free]
        return order, {label: block.references for block, label in labels.items()}


class ReferenceSystem:
    """Replicas behind a router, with requests that wait for others."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        requests: Any,
        choose: Callable[[ReferenceSystem, int], int],
        look: Callable[[ReferenceSystem, int], None] = lambda system, j: None,
    ) -> None:
        self.replicas = list(replicas)
        self.requests = [
            Request(
                j,
                int(requests.prompt_tokens[j]),
                int(requests.output_tokens[j]),
                [int(i) for i in requests.block_ids(j)],
            )
            for j in range(requests.num_requests)
        ]
        self.parent = [int(j) for j in requests.parent]
        self.think = [float(x) for x in requests.think_s]
        self.arrivals: list[tuple[float, int]] = []
        for j, parent in enumerate(self.parent):
            if parent < 0:
                heapq.heappush(self.arrivals, (float(requests.arrival_s[j]), j))
        self.choose = choose
        self.look = look
        self.order: list[int] = []
        self.now = 0.0

    def spawn(self, parent: int, time: float) -> None:
        for j, other in enumerate(self.parent):
            if other == parent:
                heapq.heappush(self.arrivals, (time + self.think[j], j))

    def run(self) -> None:
        """Everything to its end; arrivals come before boundaries and failures at the same time."""
        while self.arrivals or any(replica.busy() for replica in self.replicas):
            arrival = self.arrivals[0][0] if self.arrivals else math.inf
            replica = min(self.replicas, key=lambda replica: min(replica.end, replica.changes[0]))
            time = min(replica.end, replica.changes[0])
            if time < arrival:
                if replica.end <= replica.changes[0]:
                    replica.boundary()
                else:
                    replica.change()
                for request in replica.done:
                    told = time + replica.api.out_s if request.outcome == "completed" else time
                    self.spawn(request.index, told)
                replica.done = []
                continue
            self.now, j = heapq.heappop(self.arrivals)
            self.order.append(j)
            self.look(self, j)
            request = self.requests[j]
            request.arrival = self.now
            n = self.choose(self, j)
            need = 0
            if n >= 0:
                target = self.replicas[n]
                need = math.ceil((request.prompt + request.output - 1) / target.block_size)
            if n < 0 or need > target.pool.capacity or target.down:
                request.outcome = "rejected"
                self.spawn(j, self.now)
            else:
                target.enqueue(request, self.now)


def requests_with(prompt, output, segments, block_size=4, **columns) -> PrefixRequests:
    """Requests with their segments (first id, blocks), all at once but for ``columns``."""
    count = len(prompt)
    zeros = ("arrival_s", "think_s", "session", "tenant", "turn")
    columns = dict.fromkeys(zeros, np.zeros(count)) | {"parent": np.full(count, -1)} | columns
    columns |= {"prompt_tokens": prompt, "output_tokens": output}
    kinds = {"arrival_s": np.float64, "think_s": np.float64}
    return PrefixRequests(
        **{name: np.array(part, kinds.get(name, np.int32)) for name, part in columns.items()},
        first_segment=np.cumsum([0, *map(len, segments)]),
        segments=np.array([x for own in segments for x in own], np.int32).reshape(-1, 2),
        block_size=block_size,
    )


def infinite_hits(requests, replica=None, recompute_last=True):
    """Cached blocks (J,) of each prompt if no cache evicts and every request is kept whole.

    Requests come in the order of their indices to the caches of ``replica`` (J,), or to one. The
    block of a prompt's last token is computed again, unless ``recompute_last`` is false.
    """
    caches: dict[int, set[int]] = {}
    found = []
    for j, prompt in enumerate(requests.prompt_tokens.tolist()):
        cache = caches.setdefault(0 if replica is None else int(replica[j]), set())
        ids = requests.block_ids(j).tolist()
        most = (prompt - recompute_last) // requests.block_size
        found.append(next((k for k in range(most) if ids[k] not in cache), most))
        cache.update(ids)
    return np.array(found)
