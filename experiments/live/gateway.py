"""A policy behind a gateway: what a gateway sees becomes the observation that the policy reads.

`GatewayRouter` keeps the state of the requests that it has sent and writes from it the observation
of ``servegym/LLMRouting-v1``. A gateway tells it when a request was sent, when tokens came and when
it ended; nothing else is known. A policy that fails or is too slow is replaced by the least load
for that request, counted and logged: a gateway never stops because of its policy.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servegym.baselines.protocol import Policy
from servegym.baselines.registry import describe_system
from servegym.envs.families import family_named
from servegym.envs.llm_routing.config import build_problem
from servegym.envs.llm_routing.kernel import layout
from servegym.envs.llm_routing.kernel.layout import (
    LOAD_HORIZONS,
    MAX_GAP_S,
    MAX_LATENCY_S_PER_TOKEN,
    MAX_PROMPT_TOKENS,
)

FALLBACK = "least_outstanding"
MAX_TOKENS = 1 << 20
"""Of a prompt or an answer: what is told of more counts as so many."""
BLOCKED_BUDGETS, BLOCKED_CALLS = 10, 3
"""A policy is switched off that keeps the interpreter for ten budgets, three times in a row."""
LOG_EVERY_S = 60.0
PATIENCE_S = 1.0  # with a policy that is in a call where its thread is to end
_log = logging.getLogger("servegym.gateway")


@dataclass(frozen=True)
class GatewayRequest:
    """A request that waits to be routed; one request in flight has its id.

    Predicted scores of the experts' answers are in [0, 1]; None are the train means.
    """

    id: str
    prompt_tokens: float | Sequence[float]  # one number, or (N,)
    scores: ArrayLike | None = None  # (N,)
    output_tokens: ArrayLike | None = None  # (N,)
    allowed: ArrayLike | None = None  # (N,) which experts may have it, or None: all


@dataclass(frozen=True)
class Decision:
    """Where a request goes."""

    expert: int  # 0 to N - 1, or -1: drop it (HTTP 429)
    policy: str  # name of what decided: the policy's, or ``least_outstanding``
    reason: str = ""  # why the policy did not decide, or empty


_Predictions = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]
"""Prompt tokens, scores and output tokens of a request, (N,) each."""


@dataclass
class _InFlight:
    expert: int
    predictions: _Predictions
    arrived: float
    available: float
    generated: int = 0


@dataclass
class Counters:
    """What has happened to the requests since the router was made."""

    decisions: int = 0
    drops: int = 0
    observation_errors: int = 0
    policy_errors: int = 0
    policy_timeouts: int = 0
    illegal_actions: int = 0
    finished: int = 0
    failed: int = 0
    last_error: str = field(default="", repr=False)
    late_s: float = 0.0  # the longest time that a policy took which was too slow

    @property
    def fallbacks(self) -> int:
        """Decisions that the least load took in place of the policy."""
        failed = self.observation_errors + self.policy_errors
        return failed + self.policy_timeouts + self.illegal_actions


class GatewayRouter:
    """Routes the requests of a gateway by a policy of ``servegym/LLMRouting-v1``.

    Which requests an engine runs and which wait is not visible from outside. The first R requests
    that were sent to an expert and have not ended count as running, which is exact for engines that
    serve in order with so many slots.

    All methods may be called from several threads. The policy runs in a thread, so one that keeps
    the interpreter, as a regular expression can, holds everything: it is switched off for good when
    it does so three times in a row.

    Args:
        fleet: Arguments of the environment that describes the fleet, as for ``gymnasium.make``.
            Experts are its profiles in their order.
        policy: A policy, the name of one, or the path of a checkpoint.
        clock: Seconds, monotonic.
        budget_s: Longest time of a decision; None waits for the policy in the caller's thread.

    Attributes:
        counters: What has happened.
        off: Why the policy is asked no more, or empty.

    Raises:
        ValueError: If the policy is unknown, needs the environment or reads another observation
            than the graph, or if the fleet is drawn anew in every episode.
    """

    def __init__(
        self,
        fleet: Mapping[str, Any],
        policy: str | os.PathLike[str] | Policy,
        *,
        clock: Callable[[], float] = time.monotonic,
        budget_s: float | None = 0.01,
    ) -> None:
        from servegym.experiments.evaluation.guest import IN_PROCESS
        from servegym.experiments.evaluation.resolve import resolve

        if budget_s is not None and not budget_s > 0:
            raise ValueError(f"budget_s is {budget_s}; allowed are seconds above 0, or None")
        self.problem = build_problem(view=layout.GRAPH, **fleet)
        if self.problem.fleets is not None:
            raise ValueError("fleet is drawn anew in every episode; describe one fleet")
        self.system = describe_system(self.problem)
        resolved = resolve(policy, self.problem, family_named("llm_routing"), guests=IN_PROCESS)
        if resolved.env_view != "graph" or resolved.needs_env:
            reads = "the environment" if resolved.needs_env else f"view {resolved.env_view!r}"
            raise ValueError(
                f"policy {resolved.name!r} reads {reads}; a gateway needs one that reads 'graph'"
            )
        self.name, self.policy = resolved.name, resolved.policy
        self.policy.reset(1, seed=0)
        self.clock, self.budget_s = clock, budget_s
        self.latency_requirement_s = float(np.mean(self.problem.arguments.latency_requirement_s))
        self.counters = Counters()
        self.off = ""
        self._blocked_calls = 0
        self._logged: dict[tuple[str, type], float] = {}
        self._lock = threading.RLock()
        self._requests: dict[str, _InFlight] = {}
        self._arrivals, self._last_arrival = 0, 0.0
        self._load = np.zeros((len(LOAD_HORIZONS), 3))
        self._worker = None if budget_s is None else _Worker()
        config = self.problem.cfg[0]
        self._slots = int(config["running_capacity"])
        self._room = int(config["waiting_capacity"])
        self._block = int(config["block_size"])
        self._delay = float(config["router_delay_s"]), float(config["delay_s_per_token"])
        self._longest = int(config["max_output_tokens"])
        self._blocks = np.array(
            [profile.kv_capacity_tokens // self._block for profile in self.problem.profiles]
        )

    @property
    def num_experts(self) -> int:
        """N."""
        return self.problem.num_experts

    def decide(self, request: GatewayRequest) -> Decision:
        """Choose an expert for a request; it counts as sent there until it has ended.

        Raises:
            ValueError: If a request of that id is in flight, or a prediction is not (N,) numbers.
        """
        with self._lock:
            if request.id in self._requests:
                raise ValueError(f"request {request.id!r} is in flight already; ids must be unique")
            predictions, now = self._predictions(request), self.clock()
            action, mask = 0, np.ones((1, self.num_experts + 1), np.int8)
            observation, reason = {}, ""
            try:
                load = self._load_with(predictions[0], predictions[2], now)
                observation, mask = self._observation(predictions, load, now)
                self._load = load
                self._arrivals, self._last_arrival = self._arrivals + 1, now
            except Exception as error:  # whatever it is, requests go on
                self.counters.observation_errors += 1
                reason = self.report("observation", error)
            if request.allowed is not None:
                mask[0, 1:] &= np.asarray(request.allowed, np.bool_)
            if not reason:
                action, reason = self._chosen(observation, mask)
            if reason:
                action = self._least(mask)
            self.counters.decisions += 1
            if action == 0:
                self.counters.drops += 1
            else:
                self._requests[request.id] = _InFlight(action - 1, predictions, now, now)
                self.moved(request.id, action - 1)
        name = FALLBACK if reason else self.name
        return Decision(action - 1, name, reason)

    def _predictions(self, request: GatewayRequest) -> _Predictions:
        arrays, n = [], self.num_experts
        for name, mean, most in (
            ("prompt_tokens", None, MAX_TOKENS),
            ("scores", self.system.mean_score, 1),
            ("output_tokens", self.system.mean_output_tokens, self._longest),
        ):
            value = getattr(request, name)
            value = mean if value is None else value
            try:
                array = np.array(value, np.float64)
            except (TypeError, ValueError, OverflowError):
                array = np.empty(0)
            if name == "prompt_tokens" and array.ndim == 0:
                array = np.full(n, array)
            if array.shape != (n,) or not np.isfinite(array).all():
                raise ValueError(
                    f"{name} is {value!r:.100}; allowed are {n} finite numbers, one an expert"
                )
            arrays.append(array.clip(0, most).astype(np.float32))
        return tuple(arrays)  # pyright: ignore[reportReturnType]

    def queues(self) -> tuple[list[list[_InFlight]], list[list[_InFlight]]]:
        """The requests that run at each expert, and that wait, in the order in which they reach it.

        Long prompts take longer to an expert.
        """
        sent: list[list[_InFlight]] = [[] for _ in range(self.num_experts)]
        for r in sorted(self._requests.values(), key=lambda r: r.available):
            sent[r.expert].append(r)
        return [some[: self._slots] for some in sent], [some[self._slots :] for some in sent]

    def _observation(
        self, predictions: _Predictions, load: NDArray[np.float64], now: float
    ) -> tuple[dict[str, NDArray[Any]], NDArray[np.int8]]:
        """The observation of ``servegym/LLMRouting-v1`` with a leading axis of 1, and the mask.

        ``load`` are the means of the load with the request to route.
        """
        prompt, scores, lengths = predictions
        n, r, w = self.num_experts, self._slots, self._room
        shown_load = np.minimum(load, (MAX_GAP_S, MAX_PROMPT_TOKENS, np.inf))
        observation: dict[str, NDArray[Any]] = {
            "request": np.stack([np.minimum(prompt, MAX_PROMPT_TOKENS), scores, lengths], 1)[None],
            "experts": np.zeros((1, n, 3), np.float32),
            "running": np.zeros((1, n, r, 6), np.float32),
            "waiting": np.zeros((1, n, w, 6), np.float32),
            "latency_requirement": np.full((1, 1), self.latency_requirement_s, np.float32),
            "load": shown_load.astype(np.float32)[None],
            "running_mask": np.zeros((1, n, r), np.int8),
            "waiting_mask": np.zeros((1, n, w), np.int8),
        }
        mask = np.ones((1, n + 1), np.int8)
        running, waiting = self.queues()
        for k in range(n):
            share = 1.0 / self._blocks[k]
            used = 0
            for name, queue, shown in (("running", running[k], r), ("waiting", waiting[k], w)):
                for i, one in enumerate(queue[:shown]):
                    tokens = int(one.predictions[0][k]) + one.generated
                    blocks = -(-tokens // self._block) if name == "running" else 0
                    used += blocks
                    observation[name][0, k, i] = self._features(one, now, blocks * share)
                observation[f"{name}_mask"][0, k, : len(queue)] = 1
            observation["experts"][0, k] = used * share, len(running[k][:r]), len(waiting[k])
            blocks = -(-int(prompt[k] + self._longest) // self._block)
            mask[0, k + 1] = len(waiting[k]) < w and blocks <= self._blocks[k]
        return observation, mask

    def _load_with(
        self, prompt: NDArray[np.float32], lengths: NDArray[np.float32], now: float
    ) -> NDArray[np.float64]:
        """The means of the load with one request more, see the environment's `load`."""
        gap = now - self._last_arrival if self._arrivals else 0.0
        new = np.array([gap, prompt.mean(dtype=np.float64), lengths.mean(dtype=np.float64)])
        counts = np.maximum([self._arrivals, self._arrivals + 1, self._arrivals + 1], 1)
        share = np.maximum(1.0 / np.array(LOAD_HORIZONS)[:, None], 1.0 / counts)
        return self._load + share * (new - self._load)

    @staticmethod
    def _features(r: _InFlight, now: float, memory: float) -> tuple[float, ...]:
        """Eq. 6: prompt, predicted score and length, memory, tokens and latency so far."""
        latency = min((now - r.arrived) / max(r.generated, 1), MAX_LATENCY_S_PER_TOKEN)
        prompt, score, length = (float(each[r.expert]) for each in r.predictions)
        return min(prompt, MAX_PROMPT_TOKENS), score, length, memory, r.generated, latency

    def _chosen(
        self, observation: Mapping[str, NDArray[Any]], mask: NDArray[np.int8]
    ) -> tuple[int, str]:
        """The policy's action, or why there is none."""
        shown = mask.copy()  # a policy may write into it, and one that is late whenever it likes

        def act() -> int:
            return int(np.asarray(self.policy.act(observation, shown)).reshape(-1)[0])

        if self.off:
            self.counters.policy_timeouts += 1
            return 0, self.off
        begin, late = self.clock(), False
        try:
            action = act() if self._worker is None else self._worker.run(act, self.budget_s)
        except _Late:
            action, late = 0, True
        except (Exception, SystemExit) as error:  # a policy may raise anything; the gateway goes on
            self.counters.policy_errors += 1
            return 0, self.report("policy", error)
        if self._worker is not None and self.budget_s is not None:
            seconds = self.clock() - begin
            # An answer that comes in time to a thread which could not run is late as well.
            blocked = seconds > BLOCKED_BUDGETS * self.budget_s
            if blocked or not late:
                self._blocked_calls = self._blocked_calls + 1 if blocked else 0
            if late or blocked:
                self.counters.policy_timeouts += 1
                self.counters.late_s = max(self.counters.late_s, seconds)
                if self._blocked_calls == BLOCKED_CALLS:
                    self.off = f"the policy is off: it kept the interpreter for {seconds:.3g} s"
                    _log.error("%s, %d times in a row", self.off, BLOCKED_CALLS)
                return 0, f"the policy was too slow: {seconds:.3g} s"
        if not 0 <= action <= self.num_experts or mask[0, action] == 0:
            self.counters.illegal_actions += 1
            return 0, f"the policy chose action {action}, which is not allowed"
        return action, ""

    def report(self, what: str, error: BaseException) -> str:
        """Log a failure and its cause, each kind once a minute, keep it and return its text.

        ``what`` has failed: ``policy``, ``observation`` or ``prediction``.
        """
        text = f"{type(error).__name__}: {error}"[:300]
        self.counters.last_error = f"{what}: {text}"
        now, kind = self.clock(), (what, type(error))
        if now - self._logged.get(kind, -np.inf) >= LOG_EVERY_S:
            self._logged[kind] = now
            _log.error("the %s failed; requests go on without it", what, exc_info=error)
        return text

    def _least(self, mask: NDArray[np.int8]) -> int:
        """The expert of the fewest requests in flight that takes the request; 0: none does."""
        load = self.load()
        legal = np.flatnonzero(mask[0, 1:])
        return 0 if len(legal) == 0 else 1 + int(legal[load[legal].argmin()])

    def load(self) -> NDArray[np.int64]:
        """(N,) requests in flight."""
        with self._lock:
            experts = [r.expert for r in self._requests.values()]
            return np.bincount(experts, minlength=self.num_experts)

    def moved(self, request: str, expert: int) -> None:
        """The request is sent to another expert now, as after a failure; it has no token yet."""
        with self._lock:
            one = self._requests.get(request)
            if one is not None:
                prompt = float(one.predictions[0][expert])
                one.expert, one.generated = expert, 0
                one.available = self.clock() + self._delay[0] + self._delay[1] * prompt

    def token(self, request: str, generated: int | None = None) -> None:
        """A token of the answer came; ``generated`` says how many there are by now."""
        with self._lock:
            one = self._requests.get(request)
            if one is not None:
                count = one.generated + 1 if generated is None else int(generated)
                one.generated = min(max(count, 0), MAX_TOKENS)

    def finished(self, request: str) -> None:
        """The answer is complete; a second call changes nothing."""
        with self._lock:
            self.counters.finished += self._requests.pop(request, None) is not None

    def failed(self, request: str) -> None:
        """The request has failed, or its client has hung up."""
        with self._lock:
            self.counters.failed += self._requests.pop(request, None) is not None

    def warm(self) -> None:
        """Compile what the policy needs before the first request; nothing of it is counted."""
        with self._lock:
            before = self._worker, self.counters, self._load, self._arrivals, self._last_arrival
            self._worker, self.counters = None, Counters()
            names = [f"warm {k}" for k in range(30)]
            for name in names:
                self.decide(GatewayRequest(name, 50))
            for name in names:
                self._requests.pop(name, None)
            self.policy.reset(1, seed=0)
            self._worker, self.counters, self._load, self._arrivals, self._last_arrival = before

    def close(self) -> None:
        """End the thread that runs the policy."""
        if self._worker is not None:
            self._worker.close()


class _Late(Exception):
    """A call has not come back in time."""


Calls = SimpleQueue[tuple[Callable[[], int], Future[int]] | None]


class _Worker:
    """One thread that calls the policy; while a call is late no other begins.

    It is joined by `close`, and where the process ends. A policy that hangs cannot be: the thread
    is a daemon, so that the process ends all the same.
    """

    def __init__(self) -> None:
        self._calls: Calls = SimpleQueue()
        self._last: Future[int] | None = None
        name = "servegym-policy"
        thread = threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _end, self._calls, thread)

    def run(self, function: Callable[[], int], limit_s: float | None) -> int:
        """The function's result, or its error; `_Late` where no call has come back in time."""
        if self._last is not None and not self._last.done():
            raise _Late
        self._last = future = Future()
        self._calls.put((function, future))
        try:
            return future.result(limit_s)
        except TimeoutError:
            if future.done():  # the policy's own
                raise
            raise _Late from None

    def close(self) -> None:
        """End the thread after the call that it is in."""
        self._end()


def _serve(calls: Calls) -> None:
    """Run what comes until None does; nothing of a call is held until the next comes."""
    while (call := calls.get()) is not None:
        function, future = call
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
        except BaseException as error:  # as of SystemExit
            other = RuntimeError(f"the policy raised {type(error).__name__}")
            other.__cause__ = error
            future.set_exception(other)
        del call, function, future


def _end(calls: Calls, thread: threading.Thread) -> None:
    """End and join the thread; a policy that has hung for so long is left behind."""
    calls.put(None)
    thread.join(PATIENCE_S)
