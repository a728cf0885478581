"""Slow, literal reference of the LLM routing engine: one iteration at a time, plain Python.

It exists to be compared with the fast kernel, so it shares no code with it and takes no
shortcut: every decode iteration is its own step, every request counts its KV blocks. Seconds and
tokens throughout; equation numbers are those of the QoS-aware routing paper.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

NAN = math.nan


# ------------------------------------------------------------------------------------- Latency laws


def segment_and_weight(axis: Sequence[float], x: float) -> tuple[int, float]:
    """Left grid index of the segment that serves `x`, and the position of `x` in it.

    The weight is 0 at the left end, 1 at the right end, and lies outside [0, 1] beyond the grid:
    the outermost segment goes on as a straight line. An axis of one point is constant.
    """
    if len(axis) == 1:
        return 0, 0.0
    left = bisect_right(axis, x) - 1
    left = max(0, min(left, len(axis) - 2))
    return left, (x - axis[left]) / (axis[left + 1] - axis[left])


def interpolate_1d(axis: Sequence[float], values: Sequence[float], x: float) -> float:
    """Piecewise linear through the points, last slope beyond them."""
    i, w = segment_and_weight(axis, x)
    if len(axis) == 1:
        return values[0]
    return values[i] + w * (values[i + 1] - values[i])


def interpolate_2d(
    axis_a: Sequence[float],
    axis_b: Sequence[float],
    values: Sequence[Sequence[float]],
    a: float,
    b: float,
) -> float:
    """Bilinear: along the second axis in the two rows around `a`, then between the rows."""
    i, w = segment_and_weight(axis_a, a)
    low = interpolate_1d(axis_b, values[i], b)
    if len(axis_a) == 1:
        return low
    high = interpolate_1d(axis_b, values[i + 1], b)
    return low + w * (high - low)


TABLES = "dense_tokens dense_s chunk_tokens context_tokens chunk_attention_s decode_sequences"
TABLES = (TABLES + " decode_context_tokens decode_attention_s head_sequences head_s").split()


class TableLaw:
    """The law of a `LawTables`-like object, its arrays copied into plain lists.

    `mixed` is the decodes' attention beside prefill chunks, where it is another table; `surplus`
    gives a `Surplus`-like object for a number of decodes.
    """

    def __init__(self, tables: Any, mixed: Any = None, surplus: Any = None) -> None:
        self.surplus = surplus
        for name in TABLES:
            setattr(self, name, np.asarray(getattr(tables, name), float).tolist())
        self.mixed_attention_s = self.decode_attention_s
        if mixed is not None:
            self.mixed_attention_s = np.asarray(mixed, float).tolist()

    def dense(self, tokens: float) -> float:
        return interpolate_1d(self.dense_tokens, self.dense_s, tokens)

    def chunk_attention(self, chunk: float, context: float) -> float:
        axes = self.chunk_tokens, self.context_tokens
        return interpolate_2d(*axes, self.chunk_attention_s, chunk, context)

    def decode_attention(self, sequences: float, mean_context: float, beside_chunks: bool) -> float:
        table = self.mixed_attention_s if beside_chunks else self.decode_attention_s
        axes = self.decode_sequences, self.decode_context_tokens
        return interpolate_2d(*axes, table, sequences, mean_context)

    def beside_chunk(self, sequences: float, longest_chunk: float) -> float:
        if self.surplus is None:
            return 0.0
        return self.surplus(sequences).chunk_s * sequences * longest_chunk

    def longest(self, sequences: float, excess: float, chunks: bool) -> float:
        if self.surplus is None:
            return 0.0
        times = self.surplus(sequences)
        return float(times.mixed_s if chunks else times.decode_s) * excess

    def head(self, sequences: float) -> float:
        return interpolate_1d(self.head_sequences, self.head_s, sequences)


def linear_law(base: float, k1: float = 0.0, kb: float = 0.0, k2: float = 0.0) -> TableLaw:
    """`base + k1*P` for a prefill of P tokens, `base + kb*b + k2*T` for b decodes holding T."""
    axis, none = [0.0, 1.0], [[0.0, 0.0]] * 2
    return TableLaw(
        SimpleNamespace(
            **dict.fromkeys(("dense_tokens", "chunk_tokens", "context_tokens"), axis),
            **dict.fromkeys(("decode_sequences", "decode_context_tokens", "head_sequences"), axis),
            dense_s=[base, base + k1],
            chunk_attention_s=none,
            decode_attention_s=[[0.0, 0.0], [kb - k1, kb - k1 + k2]],
            head_s=[0.0, 0.0],
        )
    )


def prefill_s(law: Any, tokens: int) -> float:
    """Duration of an orca prefill iteration over `tokens` tokens in total."""
    return law.dense(tokens) + law.chunk_attention(tokens, 0) + law.head(1)


def step_s(law: Any, chunks: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
    """Duration of a chunked-prefill iteration, or of an orca decode, which has no chunks.

    `chunks` holds (tokens, context before) pairs, `contexts` the tokens of every decode.
    """
    sequences = len(contexts)
    seconds = law.dense(sequences + sum(tokens for tokens, _ in chunks))
    for tokens, context in chunks:
        seconds += law.chunk_attention(tokens, context)
    if sequences > 0:
        mean = sum(contexts) / sequences
        seconds += law.decode_attention(sequences, mean, bool(chunks))
        if chunks:
            seconds += law.beside_chunk(sequences, max(tokens for tokens, _ in chunks))
        seconds += law.longest(sequences, max(contexts) - mean, bool(chunks))
    return seconds + law.head(sequences + len(chunks))


# --------------------------------------------------------------------------------- The engine's API


class Api:
    """Requests between a client and the waiting queue.

    Its event loop takes them one after another, `request_s` seconds each; the rest of `in_s` passes
    after that. Tokens take `out_s` back.
    """

    def __init__(self, in_s: float = 0.0, request_s: float = 0.0, out_s: float = 0.0) -> None:
        self.pass_s, self.request_s, self.out_s = in_s - request_s, request_s, out_s
        self.done = 0.0
        self.passing: list[tuple[float, Any]] = []  # when it is in the waiting queue, request

    def put(self, request: Any, now: float) -> None:
        """A request comes."""
        self.done = max(now, self.done) + self.request_s
        self.passing.append((self.done + self.pass_s, request))

    def next(self) -> float:
        """When the next one is in the waiting queue, inf if there is none."""
        return self.passing[0][0] if self.passing else math.inf

    def take(self, now: float) -> list[Any]:
        """Those that are in the waiting queue by now."""
        taken = []
        while self.next() <= now:
            taken.append(self.passing.pop(0)[1])
        return taken

    def empty(self) -> list[Any]:
        """It dies with all that are in it."""
        found = [request for _, request in self.passing]
        self.passing, self.done = [], 0.0
        return found


# ------------------------------------------------------------------------ Configuration and records


@dataclass(frozen=True)
class ExpertConfig:
    """One expert: its law, its KV capacity, the slopes of the router's estimator, its outages.

    `outages` are (down, up) times in seconds, in order.
    """

    law: Any
    kv_capacity_tokens: int
    k1: float = 0.0
    k2: float = 0.0
    outages: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class ReferenceConfig:
    """Everything but the episode. None lifts `waiting_capacity` or `max_output_tokens`."""

    experts: tuple[ExpertConfig, ...]
    scheduler: str = "orca"
    memory_policy: str = "reserve"
    async_scheduling: bool = False
    running_capacity: int = 5
    waiting_capacity: int | None = 5
    prefill_token_budget: int = 2048
    block_size: int = 16
    bandwidth_bps: float = 1e6
    bytes_per_token: float = 4.0
    router_delay_s: float = 0.005
    max_output_tokens: int | None = 300
    latency_requirement_s: float = 0.030
    reward: str = "qos_aware"
    penalty: str = "new_violations"
    estimator: str = "true"
    record_iterations: bool = False


@dataclass
class RequestLog:
    """What became of one request. `expert` counts from 0; -1 for a dropped request."""

    request: int
    arrival: float
    prompt_tokens: int
    output_tokens: int = 0
    score: float = 0.0
    expert: int = -1
    outcome: str | None = None
    communication_s: float = NAN
    routing_s: float = NAN
    available: float = NAN
    admitted: float = NAN
    first_token: float = NAN
    finish: float = NAN
    preemptions: int = 0

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrival

    @property
    def e2e(self) -> float:
        return self.finish - self.arrival

    @property
    def tpot(self) -> float:
        if self.output_tokens <= 1:
            return NAN
        return (self.finish - self.first_token) / (self.output_tokens - 1)

    @property
    def latency_per_token(self) -> float:
        return self.e2e / self.output_tokens if self.outcome == "completed" else NAN

    @property
    def waiting_s(self) -> float:
        return self.admitted - self.available

    @property
    def inference_s(self) -> float:
        return self.finish - self.admitted

    def qos(self, latency_requirement_s: float) -> float:
        """Eq. 1: the score if the request completed within the requirement, else 0."""
        if self.outcome == "completed" and self.latency_per_token <= latency_requirement_s:
            return self.score
        return 0.0


@dataclass(eq=False)
class Request:
    """A request inside an expert."""

    request: int
    arrival: float
    prompt: int
    output: int
    available: float
    score: float = 0.0
    predicted_score: float = 0.0
    predicted_length: float = 0.0
    generated: int = 0  # g, tokens emitted so far
    computed: int = 0  # tokens whose KV exists
    target: int = 0  # computed tokens at which the current prefill is complete
    preempted: bool = False  # waits after a preemption
    preemptions: int = 0
    blocks: int = 0  # KV blocks that it holds
    admitted: float = NAN
    first_token: float = NAN
    finish: float = NAN

    @property
    def prefilled(self) -> bool:
        return self.computed >= self.target


class Iteration(NamedTuple):
    """One iteration. Requests are named by number in the history, by object in flight."""

    start: float
    end: float
    decodes: list
    chunks: list  # (request, tokens, context before the chunk)
    preempted: list  # at the boundary that starts the iteration, newest first
    blocks: int  # that the running requests hold


# --------------------------------------------------------------------------------------- One expert


class ReferenceExpert:
    """One LLM behind an iteration-level scheduler."""

    def __init__(self, config: ReferenceConfig, expert: ExpertConfig) -> None:
        self.config = config
        self.law = expert.law
        self.k1 = expert.k1
        self.k2 = expert.k2
        self.capacity_blocks = expert.kv_capacity_tokens // config.block_size
        self.free = self.capacity_blocks
        self.scheduled: dict[int, int] = {}  # tokens of each running request in this iteration
        self.running: list[Request] = []  # in order of the latest admission
        self.waiting: list[Request] = []  # head first
        self.iteration: Iteration | None = None
        self.now = -math.inf  # time of the last boundary
        self.planned = -math.inf  # when the iteration that starts then was planned
        self.outages = list(expert.outages)
        self.down = False
        self.lost: list[Request] = []  # by failures
        self.history: list[Iteration] = []

    # -- arrivals ----------------------------------------------------------------------------

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return math.ceil(tokens / self.config.block_size)

    def is_full(self) -> bool:
        capacity = self.config.waiting_capacity
        return capacity is not None and len(self.waiting) >= capacity

    def never_fits(self, prompt: int) -> bool:
        cap = self.config.max_output_tokens
        return cap is not None and self.blocks_for(prompt + cap) > self.capacity_blocks

    def accepts(self, prompt: int) -> bool:
        """Whether a request of `prompt` tokens sent now is not rejected."""
        return not self.down and not self.is_full() and not self.never_fits(prompt)

    def dispatch(self, request: Request) -> None:
        """Put an accepted request into the waiting list by the time it becomes available."""
        place = len(self.waiting)  # after equals: ties keep the order of dispatch
        while place > 0:
            before = self.waiting[place - 1]
            if before.preempted or before.available <= request.available:
                break
            place -= 1
        self.waiting.insert(place, request)

    # -- time --------------------------------------------------------------------------------

    def next_boundary(self) -> float:
        """Time of the next boundary, inf while there is nothing to do."""
        if self.iteration is not None:
            return self.iteration.end
        if self.waiting:
            return max(self.now, self.waiting[0].available)
        return math.inf

    def advance(self, until: float) -> list[Request]:
        """Process boundaries, failures and repairs up to `until`; the requests that finished.

        With `until` = inf the clock stops when the expert has nothing left to do.
        """
        finished: list[Request] = []
        while self.outages and self.outages[0][self.down] <= until:
            if until == math.inf and not self.running and not self.waiting:
                break
            time = self.outages[0][self.down]
            finished.extend(self._boundaries(time))  # what ends at the very moment is saved
            if self.down:
                self.outages.pop(0)
                self.down = False
            else:
                self._die()
        finished.extend(self._boundaries(until))
        return finished

    def _die(self) -> None:
        """All requests here, or on their way here, are lost, and so is the KV memory."""
        self.lost += self.running + self.waiting
        self.running, self.waiting, self.iteration = [], [], None
        self.free = self.capacity_blocks
        self.down = True

    def _boundaries(self, until: float) -> list[Request]:
        finished: list[Request] = []
        while self.next_boundary() <= until and self.next_boundary() < math.inf:
            finished.extend(self.boundary())
        return finished

    def boundary(self) -> list[Request]:
        """One boundary: effects of the ending iteration, preemption, admission, next iteration."""
        now = self.next_boundary()
        self.now = now
        began = self.iteration.start if self.iteration is not None else now
        finished = self._end_iteration(now)
        self.planned, preempted = now, []
        decodes: list = []
        chunks: list = []
        duration = 0.0
        if self.config.async_scheduling:
            # Planned one iteration ahead: with what had arrived, and was free and known, when the
            # one that ends now began.
            self.planned = began
            preempted = self._schedule_running()
            decodes, chunks, duration = self._plan_chunked(now, bool(preempted))
            self._let_leave(finished)
        if not decodes and not chunks:
            self.planned = now
            self._let_leave(finished)
            preempted += (again := self._schedule_running())
            plan = self._plan_orca if self.config.scheduler == "orca" else self._plan_chunked
            decodes, chunks, duration = plan(now, bool(again))
        if decodes or chunks:
            if not duration > 0:
                raise ValueError(f"the law gives an iteration of {duration} s")
            blocks = self.allocated_blocks()
            self.iteration = Iteration(now, now + duration, decodes, chunks, preempted, blocks)
            if self.config.record_iterations:
                self.history.append(
                    Iteration(
                        now,
                        now + duration,
                        [r.request for r in decodes],
                        [(r.request, tokens, context) for r, tokens, context in chunks],
                        [r.request for r in preempted],
                        blocks,
                    )
                )
        return finished

    def _end_iteration(self, now: float) -> list[Request]:
        """Tokens are emitted; who has its last one, and is still in the running list."""
        if self.iteration is None:
            return []
        emitting: list[Request] = []
        for request in self.iteration.decodes:
            request.computed += 1
            emitting.append(request)
        for request, tokens, _ in self.iteration.chunks:
            request.computed += tokens
            if request.prefilled:
                emitting.append(request)
        self.iteration = None
        for request in emitting:
            request.generated += 1
            if request.generated == 1:
                request.first_token = now
        finished = [request for request in self.running if request.generated == request.output]
        for request in finished:
            request.finish = now
        return finished

    def _let_leave(self, finished: list[Request]) -> None:
        """Those who have their last token give back what they have."""
        for request in finished:
            if request in self.running:
                self.running.remove(request)
                self._free_blocks(request)

    # -- memory ------------------------------------------------------------------------------

    def allocated_blocks(self) -> int:
        """Blocks of the running requests."""
        return sum(r.blocks for r in self.running)

    def _allocate(self, request: Request, tokens: int) -> bool:
        """Blocks for the first `tokens` tokens of `request`, if there are as many."""
        need = max(self.blocks_for(tokens) - request.blocks, 0)
        if need > self.free:
            return False
        self.free -= need
        request.blocks += need
        return True

    def _free_blocks(self, request: Request) -> None:
        """Free the blocks of `request`."""
        self.free += request.blocks
        request.blocks = 0

    def _preempt(self) -> Request:
        """The newest admitted goes back to the head of the queue, unless it has its last token."""
        request = self.running.pop()
        self._free_blocks(request)
        request.preemptions += 1
        if request.generated == request.output:
            return request
        request.computed = 0
        request.target = 0
        request.preempted = True
        self.waiting.insert(0, request)
        return request

    def _schedule_running(self) -> list[Request]:
        """Tokens and blocks of the running requests, oldest first; who is preempted for them."""
        preempted: list[Request] = []
        self.scheduled = {}
        left = self.config.prefill_token_budget
        place = 0
        while place < len(self.running):
            request = self.running[place]
            if request.generated == request.output:  # it is about to leave
                place += 1
                continue
            tokens = 1
            if not request.prefilled:
                tokens = min(request.target - request.computed, left)
            while not self._allocate(request, request.computed + tokens):
                preempted.append(self._preempt())
                if preempted[-1] is request:
                    break
            else:
                self.scheduled[request.request] = tokens
                left -= tokens
                place += 1
        return preempted

    # -- scheduling --------------------------------------------------------------------------

    def _may_admit(self, request: Request, now: float) -> bool:
        """Availability, slot and memory; the token budgets differ and stand with the callers."""
        if request.available > self.planned:
            return False
        if len(self.running) >= self.config.running_capacity:
            return False
        if self.config.memory_policy == "reserve":
            cap = self.config.max_output_tokens
            assert cap is not None
            held = sum(self.blocks_for(r.prompt + cap) for r in self.running)
            own = self.blocks_for(request.prompt + cap)
        else:
            held = self.capacity_blocks - self.free
            own = self.blocks_for(request.prompt + request.generated)
        return held + own <= self.capacity_blocks

    def _admit(self, now: float) -> Request:
        """Move the head of the waiting list to the running list."""
        request = self.waiting.pop(0)
        request.preempted = False
        request.target = request.prompt + request.generated
        request.computed = 0
        if math.isnan(request.admitted):
            request.admitted = now
        self.running.append(request)
        return request

    def _plan_orca(self, now: float, preempted: bool) -> tuple[list, list, float]:
        admitted: list[Request] = []
        prefill_tokens = 0
        while self.waiting and not preempted:
            head = self.waiting[0]
            tokens = head.prompt + head.generated
            if admitted and prefill_tokens + tokens > self.config.prefill_token_budget:
                break
            if not self._may_admit(head, now):
                break
            admitted.append(self._admit(now))
            assert self._allocate(admitted[-1], tokens)
            prefill_tokens += tokens
        if admitted:
            chunks = [(request, request.target, 0) for request in admitted]
            return [], chunks, prefill_s(self.law, prefill_tokens)
        if self.running:
            contexts = [r.prompt + r.generated for r in self.running]
            return list(self.running), [], step_s(self.law, [], contexts)
        return [], [], 0.0

    def _plan_chunked(self, now: float, preempted: bool) -> tuple[list, list, float]:
        running = [r for r in self.running if r.request in self.scheduled]
        decodes = [r for r in running if r.prefilled]
        chunks = [(r, self.scheduled[r.request], r.computed) for r in running if not r.prefilled]
        left = self.config.prefill_token_budget - sum(self.scheduled.values())
        while self.waiting and not preempted and left > 0:
            if not self._may_admit(self.waiting[0], now):
                break
            request = self._admit(now)
            tokens = min(request.target - request.computed, left)
            assert self._allocate(request, request.computed + tokens)
            chunks.append((request, tokens, request.computed))
            left -= tokens
        if not decodes and not chunks:
            return [], [], 0.0
        contexts = [r.prompt + r.generated for r in decodes]
        pairs = [(tokens, context) for _, tokens, context in chunks]
        return decodes, chunks, step_s(self.law, pairs, contexts)


# -------------------------------------------------------------------------------- The router's view


class ReferenceSimulator:
    """An episode: observe at each arrival (s), act, go on to the next arrival.

    Scores and lengths are true ones of each request on each expert, and what the router is told.
    """

    def __init__(
        self,
        config: ReferenceConfig,
        arrivals: Sequence[float],
        prompt_tokens: Sequence[int],
        scores: Sequence[Sequence[float]],
        output_tokens: Sequence[Sequence[int]],
        predicted_scores: Sequence[Sequence[float]] | None = None,
        predicted_lengths: Sequence[Sequence[float]] | None = None,
    ) -> None:
        self.config = config
        self.experts = [ReferenceExpert(config, expert) for expert in config.experts]
        self.arrivals = [float(t) for t in arrivals]
        self.prompts = [int(p) for p in prompt_tokens]
        self.scores = [[float(v) for v in row] for row in scores]
        self.outputs = [[int(v) for v in row] for row in output_tokens]
        if predicted_scores is None:
            predicted_scores = scores
        if predicted_lengths is None:
            predicted_lengths = output_tokens
        self.predicted_scores = [[float(v) for v in row] for row in predicted_scores]
        self.predicted_lengths = [[float(v) for v in row] for row in predicted_lengths]
        count = len(self.arrivals)
        self.log = [
            RequestLog(request=j, arrival=self.arrivals[j], prompt_tokens=self.prompts[j])
            for j in range(count)
        ]
        self.current = 0  # the request that awaits its action
        self.terminated = False
        self.last_outlook = 0.0
        self._advance(before(self.arrivals[0]))

    @property
    def time(self) -> float:
        """Arrival time of the request that awaits its action."""
        return self.arrivals[self.current]

    # -- what the router sees ----------------------------------------------------------------

    def observe(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Observation in raw units, unclipped float64, and the int8 mask (N+1,)."""
        config = self.config
        n = len(self.experts)
        width = config.waiting_capacity
        if width is None:
            width = max(len(expert.waiting) for expert in self.experts)
        observation = {
            "request": np.zeros((n, 3)),
            "experts": np.zeros((n, 3)),
            "running": np.zeros((n, config.running_capacity, 6)),
            "waiting": np.zeros((n, width, 6)),
            "running_mask": np.zeros((n, config.running_capacity), dtype=np.int8),
            "waiting_mask": np.zeros((n, width), dtype=np.int8),
            "latency_requirement": np.array([config.latency_requirement_s]),
            "load": np.zeros((3, 3)),
        }
        if self.terminated:
            return observation, np.ones(n + 1, dtype=np.int8)
        j = self.current
        observation["load"] = self._load(j)
        for i, expert in enumerate(self.experts):
            observation["request"][i, 0] = self.prompts[j]
            observation["request"][i, 1] = self.predicted_scores[j][i]
            observation["request"][i, 2] = self.predicted_lengths[j][i]
            memory = expert.allocated_blocks() / expert.capacity_blocks
            observation["experts"][i, 0] = memory
            observation["experts"][i, 1] = len(expert.running)
            observation["experts"][i, 2] = len(expert.waiting)
            for row, request in enumerate(expert.running):
                observation["running"][i, row] = self._features(expert, request, self.time)
                observation["running_mask"][i, row] = 1
            # Preempted requests may push the queue past its capacity: the first rows are shown.
            for row, request in enumerate(expert.waiting[:width]):
                observation["waiting"][i, row] = self._features(expert, request, self.time)
                observation["waiting_mask"][i, row] = 1
        mask = np.ones(n + 1, dtype=np.int8)
        mask[1:] = [expert.accepts(self.prompts[j]) for expert in self.experts]
        return observation, mask

    def _load(self, newest: int) -> np.ndarray:
        """Means over the last 8, 32 and 128 requests: gap, prompt, predicted length."""
        gaps = [
            b - a
            for a, b in zip(self.arrivals[:newest], self.arrivals[1 : newest + 1], strict=True)
        ]
        prompts = [float(p) for p in self.prompts[: newest + 1]]
        lengths = [float(np.mean(each)) for each in self.predicted_lengths[: newest + 1]]
        return np.array(
            [[mean_of_last(x, h) for x in (gaps, prompts, lengths)] for h in (8, 32, 128)]
        )

    def _request(self, j: int, i: int, available: float) -> Request:
        return Request(
            request=j,
            arrival=self.arrivals[j],
            prompt=self.prompts[j],
            output=self.outputs[j][i],
            available=available,
            score=self.scores[j][i],
            predicted_score=self.predicted_scores[j][i],
            predicted_length=self.predicted_lengths[j][i],
        )

    def _features(self, expert: ReferenceExpert, request: Request, time: float) -> list[float]:
        """Eq. 6: p, predicted score, predicted length, memory, tokens so far, latency so far."""
        return [
            request.prompt,
            request.predicted_score,
            request.predicted_length,
            request.blocks / expert.capacity_blocks,
            request.generated,
            (time - request.arrival) / max(request.generated, 1),
        ]

    # -- what the router does ----------------------------------------------------------------

    def impact_penalty(self, action: int, penalty: str, estimator: str) -> float:
        """Eq. 15/16: estimated loss among the running requests if `action` were taken now."""
        if action == 0:
            return 0.0
        i = action - 1
        expert = self.experts[i]
        j = self.current
        if not expert.accepts(self.prompts[j]):
            return 0.0
        prompt = self.prompts[j]
        limit = self.config.latency_requirement_s
        own_length = self.outputs[j][i] if estimator == "true" else self.predicted_lengths[j][i]
        total = 0.0
        for request in expert.running:
            if estimator == "true":
                length, score = float(request.output), request.score
            else:
                # A predicted length below one token (the "zero" predictor) counts as one.
                length, score = max(request.predicted_length, 1.0), request.predicted_score
            overlap = max(0.0, min(length - request.generated, own_length))
            added = expert.k1 * prompt
            for k in range(1, math.floor(overlap) + 1):
                added += expert.k2 * (prompt + k)
            now = (self.time - request.arrival) / max(request.generated, 1)
            estimate = now + added / length
            if penalty == "literal":
                violated = estimate >= limit
            else:
                violated = now < limit <= estimate
            if violated:
                total += score
        return total

    def step(self, action: int) -> tuple[float, dict[str, float], bool]:
        """Act and go on to the next arrival, or drain: the reward, its terms, whether it ended."""
        config = self.config
        penalty = 0.0
        if config.reward == "qos_aware":
            penalty = self.impact_penalty(action, config.penalty, config.estimator)
        paid = self._decide(action)
        finished, lost = self._go_on()
        completed_qos = 0.0
        late = sum(entry.score for entry in lost)  # as good as late
        for done in finished:
            if done.latency_per_token <= config.latency_requirement_s:
                completed_qos += done.score
            else:
                late += done.score
        if config.reward == "completed_qos":
            terms = {"completed_qos": completed_qos}
        elif config.reward == "paid_forward":
            terms = {"paid": paid, "taken_back": -late}
        elif config.reward == "dense":
            before, self.last_outlook = self.last_outlook, self.outlook()
            change = self.last_outlook - before
            terms = {"completed_qos": completed_qos, "outlook": change - 0.6}
        else:
            terms = {"completed_qos": completed_qos, "penalty": -penalty}
        return sum(terms.values()), terms, self.terminated

    def outlook(self) -> float:
        """Predicted scores of the requests held that can be on time at the pace of one more."""
        limit, total = self.config.latency_requirement_s, 0.0
        for expert in self.experts:
            sequences = min(len(expert.running) + 1, self.config.running_capacity)
            pace = step_s(expert.law, [], [256] * sequences)
            for request in expert.running + expert.waiting:
                length = max(request.predicted_length, request.generated + 1)
                budget = limit * length - (self.time - request.arrival)
                if budget / (length - request.generated) >= pace:
                    total += request.predicted_score
        return total

    def _decide(self, action: int) -> float:
        """Drop the current request or send it to an expert; the score of what is accepted."""
        config = self.config
        j = self.current
        entry = self.log[j]
        paid = 0.0
        if action == 0:
            entry.outcome = "dropped"
        else:
            i = action - 1
            expert = self.experts[i]
            entry.expert = i
            entry.output_tokens = self.outputs[j][i]
            entry.score = self.scores[j][i]
            if not expert.accepts(self.prompts[j]):
                entry.outcome = "rejected"
            else:
                entry.routing_s = config.router_delay_s
                bits = 8 * config.bytes_per_token * self.prompts[j]
                entry.communication_s = bits / config.bandwidth_bps
                entry.available = self.time + entry.routing_s + entry.communication_s
                expert.dispatch(self._request(j, i, entry.available))
                paid = entry.score
        return paid

    def _go_on(self) -> tuple[list[RequestLog], list[RequestLog]]:
        """Go on to the next arrival, or drain: what completed and what failed."""
        if self.current + 1 == len(self.arrivals):
            self.terminated = True
            return self._advance(math.inf)
        ended = self._advance(before(self.arrivals[self.current + 1]))
        self.current += 1
        return ended

    def _advance(self, until: float) -> tuple[list[RequestLog], list[RequestLog]]:
        """Bring every expert to `until`; log entries of the requests that completed or failed."""
        completed: list[RequestLog] = []
        failed: list[RequestLog] = []
        for expert in self.experts:
            known = len(expert.lost)
            done = expert.advance(until)
            lost = expert.lost[known:]
            for request in lost:
                self.log[request.request].outcome = "failed"
                failed.append(self.log[request.request])
            for request in done + lost + expert.running + expert.waiting:
                entry = self.log[request.request]
                entry.admitted = request.admitted
                entry.first_token = request.first_token
                entry.finish = request.finish
                entry.preemptions = request.preemptions
            for request in done:
                self.log[request.request].outcome = "completed"
                completed.append(self.log[request.request])
        return completed, failed


def before(time: float) -> float:
    """The last moment before `time`: requests that arrive then find the boundary then to come."""
    return math.nextafter(time, -math.inf)


def mean_of_last(values: Sequence[float], horizon: int) -> float:
    """The mean of the first `horizon` values, into which each later one enters with its share."""
    if not values:
        return 0.0
    first, later = values[:horizon], values[horizon:]
    keep = 1 - 1 / horizon
    decayed = [x * keep ** (len(later) - 1 - k) / horizon for k, x in enumerate(later)]
    return math.fsum(first) / len(first) * keep ** len(later) + math.fsum(decayed)


def simulate(
    sim: ReferenceSimulator, actions: Sequence[int]
) -> tuple[list[float], list[RequestLog]]:
    """Take the actions one by one to the end of the episode: rewards and log."""
    return [sim.step(action)[0] for action in actions], sim.log


# ----------------------------------------------------------------------------- Replay of one expert


def replay_reference(
    requests: Sequence[tuple[float, int, int]],
    law: Any,
    kv_capacity_tokens: int,
    api: Api | None = None,
    **options: Any,
) -> list[RequestLog]:
    """Serve (arrival, prompt, output) triples, sorted by arrival, on one expert without a router.

    The waiting list is unbounded, nothing is rejected and there is no network delay. `options` are
    those of the configuration; times are those of a client of the `api`.
    """
    api = api or Api()
    for number, (arrival, *_) in enumerate(requests):
        api.put(number, float(arrival))
    available = {number: time for time, number in api.passing}
    alone = ExpertConfig(law, kv_capacity_tokens)
    config = ReferenceConfig(experts=(alone,), waiting_capacity=None, **options)
    expert = ReferenceExpert(config, alone)
    finished: list[Request] = []
    for number, (arrival, prompt, output) in enumerate(requests):
        finished.extend(expert.advance(before(arrival)))
        expert.dispatch(
            Request(number, float(arrival), int(prompt), int(output), available[number])
        )
    finished.extend(expert.advance(math.inf))
    return [
        RequestLog(
            r.request,
            r.arrival,
            r.prompt,
            r.output,
            first_token=r.first_token + api.out_s,
            finish=r.finish + api.out_s,
        )
        for r in sorted(finished, key=lambda r: r.request)
    ]
