"""What the plug-ins of all gateways share: requests of OpenAI's protocol, their ends, and failures.

A `Gate` holds a `GatewayRouter`. It reads a request from the body that a gateway has, asks the
router, and gives a `Ticket` that takes the events of that request, each of which counts once.
`Breakers` keep requests from servers that fail, and a request of which nothing is heard any more is
given up, so nothing is held for ever.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servegym.envs.llm_routing.config import MAX_CAPACITY, RoutingArguments
from servegym.experiments.live.fleet_file import ServerSpec
from servegym.experiments.live.gateway import MAX_TOKENS, GatewayRequest, GatewayRouter
from servegym.experiments.live.gateways.breakers import PARDONED, Breakers
from servegym.hardware_profiles.measure.openai_protocol import (
    EventStream,
    brings_token,
    error_of,
    read_json,
)

BYTES_PER_TOKEN = 4
"""Of a prompt's text, where no tokenizer counts."""
DEPTH = 16
"""Of lists and objects in prompts; what is nested more deeply is no text of theirs."""
RETRY_AFTER_S = 1
REFUSED = f"the router refuses the request; try again in {RETRY_AFTER_S} s"
"""What a client is told whose request is dropped."""
MAX_ANSWER_BYTES = 1 << 20
"""Of an answer in one piece that is read; a longer one is not."""
LEASE_S = 600.0
"""Seconds of silence after which a request is given up and counts as failed."""
PREDICTIONS = ("prompt_tokens", "scores", "output_tokens")
PROMPTS, SCHEMAS = ("messages", "prompt", "input", "instructions", "system"), ("tools", "functions")
TEXTS = ("content", "text", "reasoning_content", "tool_calls", "function_call", "function")
TEXTS = (*TEXTS, "name", "arguments", "input", "output")
"""What counts of a body: its prompts, the whole of its schemas, and these fields of a message."""
LONGEST = ("max_completion_tokens", "max_output_tokens", "max_tokens")
REFUSALS = {401: "denied", 403: "denied", 404: "unknown"}
STATUSES = {
    **{"invalid_request_error": 400, "authentication_error": 401, "permission_error": 403},
    **{"not_found_error": 404, "request_too_large": 413, "invalid_prompt": 400},
    **{"rate_limit_error": 429, "rate_limit_exceeded": 429, "context_length_exceeded": 400},
    **{"insufficient_quota": 429, "BadRequestError": 400, "NotFoundError": 404},
}
"""Of errors that are told by a name; all others are the server's."""


def prompt_tokens(body: Mapping[str, Any]) -> int:
    """Tokens of the prompt of a request of OpenAI's or Anthropic's protocol, at least 1.

    Token ids are counted; of text, and of schemas of tools, four bytes are taken for a token.
    """

    def count(value: Any, depth: int, schema: bool) -> float:
        if isinstance(value, str):
            return len(value.encode("utf-8", "replace")) / BYTES_PER_TOKEN
        if isinstance(value, int):
            return 1
        if depth == 0:
            return 0
        if isinstance(value, Mapping):
            if schema:
                names = sum(len(str(key)) for key in value) / BYTES_PER_TOKEN
                return names + sum(count(one, depth - 1, True) for one in value.values())
            return sum(count(value[key], depth - 1, False) for key in TEXTS if key in value)
        if not isinstance(value, Sequence):
            return 0
        if value and type(value[0]) is int:  # token ids, of which there may be a million
            return len(value)
        return sum(count(one, depth - 1, schema) for one in value)

    tokens = sum(count(body.get(key), DEPTH, False) for key in PROMPTS)
    tokens += sum(count(body.get(key), DEPTH, True) for key in SCHEMAS)
    return min(max(1, round(tokens)), MAX_TOKENS)


def error_status(event: Mapping[str, Any], completion: bool = True) -> int:
    """The HTTP status of the error that an event or an answer has or is, 0 if it is none.

    A number from 400 on in the error or beside it is the status, whatever its field's name; else
    the error's name says it, and 500 stands for all that say nothing. An answer to a completion
    that has no choices but a ``detail`` or a ``message`` is an error as well.
    """
    inner = event.get("response")
    error = error_of(event) or (inner.get("error") if isinstance(inner, Mapping) else None)
    if not error and completion and not event.get("choices"):
        error = event.get("detail") or event.get("message")
    if not error and event.get("type") in ("error", "response.failed"):
        error = event
    if not error:
        return 0
    if isinstance(error, str):  # an event whose name says that it is an error
        with contextlib.suppress(ValueError, OverflowError):
            error = read_json(error.encode("utf-8", "replace"))
    found = [event]
    while isinstance(error, Mapping) and len(found) < DEPTH:
        found.insert(0, error)
        error = error.get("error")
    keys = ("code", "status", "status_code", "error_code", "type")
    values = [str(one.get(key)) for one in found for key in keys]
    numbers = [int(text) for text in values if len(text) == 3 and text.isdecimal()]
    names = [STATUSES[text] for text in values if text in STATUSES]
    return next((one for one in (*numbers, *names) if 400 <= one < 600), 500)


def from_metadata(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Predictions that a trusted client puts in the request: ``metadata.servegym`` of its body.

    They may have ``prompt_tokens``, ``scores`` and ``output_tokens`` as `GatewayRequest` has.
    Whoever writes them decides where the request goes.
    """
    metadata = body.get("metadata")
    ours = metadata.get("servegym") if isinstance(metadata, Mapping) else None
    return ours if isinstance(ours, Mapping) else {}


def fleet_arguments(servers: Sequence[ServerSpec], **more: Any) -> dict[str, Any]:
    """Arguments of ``servegym/LLMRouting-v1`` that describe servers with continuous batching.

    Further arguments win.

    Raises:
        ValueError: If a server has no profile, or more slots than an environment.
    """
    for one in servers:
        if not one.profile:
            raise ValueError(
                f"server {one.name!r} has no profile; make one with `servegym calibrate server`, "
                "or name a shipped one in FLEET.toml"
            )
        if one.slots > MAX_CAPACITY:
            raise ValueError(f"server {one.name!r} has slots={one.slots}; allowed: {MAX_CAPACITY}")
    slots = max(one.slots for one in servers)
    return {
        "profiles": [one.profile for one in servers],
        "scheduler": "chunked_prefill",
        "memory_policy": "paged",
        "running_capacity": slots,
        "prefill_token_budget": max(slots, RoutingArguments.prefill_token_budget),
        "waiting_capacity": 64,
        "router_delay_s": 0.0,
        "bytes_per_token": 0.0,
        **more,
    }


@dataclass(eq=False)
class Ticket:
    """A request that a gateway sends to an expert; every method may be called late or twice."""

    gate: Gate
    id: str  # the request's name at the router
    expert: int  # its number, or -1: the request is refused
    heard_s: float  # when it was sent or its last token came, by the router's clock
    completion: bool = True  # whether its answer must have the form of completions and a token
    sent_s: float = 0.0
    number: int = 0  # of the request among all that were sent, for the breakers
    tokens: int = 0  # of its answer so far

    def token(self, generated: int | None = None) -> None:
        """A token of the answer came; ``generated`` says how many there are by now."""
        gate, first, now = self.gate, self.tokens == 0, self.gate.router.clock()
        count = self.tokens + 1 if generated is None else int(generated)
        self.tokens = min(max(count, self.tokens), MAX_TOKENS)
        gate.router.token(self.id, self.tokens)
        if first and self.tokens:
            with gate.lock:
                if self.id in gate.open:
                    gate.breakers.begun(self.expert, self.number, now - self.heard_s)
        self.heard_s = now

    def moved(self, expert: int) -> None:
        """The gateway has sent it to another expert itself: that of before has failed."""
        gate = self.gate
        with gate.lock:
            there = 0 <= expert < len(gate.names) and expert != self.expert
            if self.id not in gate.open or not there:
                return
            gate.tell(self, "failed")
            gate.send(self, expert)
        gate.router.moved(self.id, expert)

    def refused(self, status: int, *, retry_after: bool = False) -> None:
        """The answer is an error with this HTTP status; 503 with ``Retry-After`` is as 429."""
        busy, pardoned = status == 429 or (status == 503 and retry_after), 400 <= status < 500
        how = REFUSALS.get(status, "refused") if pardoned else "failed"
        self.end("busy" if busy else how)

    def end(self, how: str) -> None:
        """The request is over.

        Args:
            how: ``finished``, the answer is complete; ``empty``, it is complete and has no token;
                ``failed``, by the server; one of `PARDONED`, so too, for no fault of its own;
                ``left``, the client has hung up; ``broken``, in the midst of the answer, by either:
                it counts as left, and for the breaker as a failure, since hung-up clients break
                answers of all servers.
        """
        gate = self.gate
        with gate.lock:
            if gate.open.pop(self.id, None) is None:
                return
            gate.tell(self, how)
        good = how in ("finished", "empty")
        (gate.router.finished if good else gate.router.failed)(self.id)


class Gate:
    """Routes requests of OpenAI's protocol by a `GatewayRouter`.

    A request goes to an expert whose breaker does not let it only where no other may take it.
    Whatever fails in a prediction is logged and counted, and the request goes by the train means.

    Args:
        router: The router; its policy is called here, so that it is compiled.
        names: Of the experts, for `status`.
        predict: Predictions for a request's body, as `from_metadata` makes them; what is missing,
            and all if it raises, is the train mean, lengths up to the body's ``max_tokens``.

    Attributes:
        routed: (N,) requests that were sent to each expert.
        breakers: Of the experts.
        counters: What has happened that the router does not count.
        open: Tickets that have not ended, by name, under `lock`.
    """

    def __init__(
        self,
        router: GatewayRouter,
        *,
        names: Sequence[str] | None = None,
        predict: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    ) -> None:
        n = router.num_experts
        self.names = list(names) if names is not None else [str(k) for k in range(n)]
        if len(self.names) != n:
            raise ValueError(f"names are {len(self.names)}; the fleet has {n} experts")
        self.router, self._predict = router, predict
        self.lock = threading.Lock()
        self._numbers = itertools.count()
        self.open: OrderedDict[str, Ticket] = OrderedDict()
        self.breakers = Breakers(n)
        self.routed = np.zeros(n, np.int64)
        self.counters = {"prediction_errors": 0, "server_failures": 0, "left": 0, "given_up": 0}
        self._elapsed: deque[float] = deque(maxlen=4096)
        router.warm()

    def enter(
        self, body: Mapping[str, Any], *, allowed: ArrayLike | None = None, completion: bool = True
    ) -> Ticket:
        """Decide where a request goes; it counts as sent there until its ticket has ended.

        Args:
            body: The request's body.
            allowed: (N,) experts that may have it, or None: all.
            completion: Whether it asks for a completion, so that an answer without a token fails.
        """
        begin, now = time.perf_counter(), self.router.clock()
        name = str(next(self._numbers))
        with self.lock:
            self._give_up(now)
            waiting = (one for one in self.open.values() if not one.tokens)
            self.breakers.judge(now, [(t.expert, t.number, now - t.heard_s) for t in waiting])
            able = self.able(allowed)
        try:
            decision = self.router.decide(self._request(name, body, able))
        except Exception as error:  # predictions of another form
            self._mistaken(error)
            decision = self.router.decide(GatewayRequest(name, 1, allowed=able))
        ticket = Ticket(self, name, decision.expert, now, completion)
        with self.lock:
            self._elapsed.append(time.perf_counter() - begin)
            if decision.expert >= 0:
                self.send(ticket, decision.expert)
                self.open[name] = ticket
        return ticket

    def send(self, ticket: Ticket, expert: int) -> None:
        """A ticket goes to an expert; called with the lock."""
        self.routed[expert] += 1
        ticket.expert, ticket.tokens, ticket.sent_s = expert, 0, self.router.clock()
        ticket.heard_s, ticket.number = ticket.sent_s, self.breakers.send(expert, ticket.sent_s)

    def _mistaken(self, error: BaseException) -> None:
        self.counters["prediction_errors"] += 1
        self.router.report("prediction", error)

    def _request(
        self, name: str, body: Mapping[str, Any], able: NDArray[np.bool_]
    ) -> GatewayRequest:
        fields: dict[str, Any] = {}
        if self._predict is not None:
            try:
                predicted = self._predict(body)
                fields = {k: predicted[k] for k in PREDICTIONS if predicted.get(k) is not None}
            except (Exception, SystemExit) as error:  # it may raise anything; the gateway goes on
                self._mistaken(error)
        if "prompt_tokens" not in fields:
            fields["prompt_tokens"] = prompt_tokens(body)
        most = next((body[key] for key in LONGEST if body.get(key)), None)
        if "output_tokens" not in fields and isinstance(most, int) and most > 0:
            mean, most = self.router.system.mean_output_tokens, min(most, MAX_TOKENS)
            fields["output_tokens"] = (
                np.full(len(mean), most) if body.get("ignore_eos") else np.minimum(mean, most)
            )
        return GatewayRequest(name, allowed=able, **fields)

    def able(self, allowed: ArrayLike | None = None) -> NDArray[np.bool_]:
        """(N,) which of the allowed experts a breaker lets have a request; all of them if none."""
        able = np.ones(self.router.num_experts, np.bool_)
        if allowed is not None:
            able &= np.asarray(allowed, np.bool_)
        return self.breakers.able(self.router.clock(), able)

    def _give_up(self, now: float) -> None:
        """End requests that nobody speaks of any more."""
        for name in list(itertools.islice(self.open, 2)):  # all come round in time
            if now - self.open[name].heard_s <= LEASE_S:
                self.open.move_to_end(name)
                continue
            self.counters["left"] -= 1  # it counts as given up
            self.counters["given_up"] += 1
            self.tell(self.open.pop(name), "left")
            self.router.failed(name)

    def tell(self, ticket: Ticket, how: str) -> None:
        """Count how a ticket has ended at its expert; called with the lock."""
        now, begun, one = self.router.clock(), ticket.tokens > 0, (ticket.expert, ticket.number)
        self.counters["server_failures"] += how == "failed"
        self.counters["left"] += how in (*PARDONED, "left", "broken")
        if how == "finished" and not begun:
            self.breakers.begun(*one, now - ticket.heard_s)
        sent_s, tokens = ticket.sent_s, ticket.tokens
        self.breakers.ended(*one, how, now, begun=begun, sent_s=sent_s, tokens=tokens)

    def status(self) -> dict[str, Any]:
        """What has happened, for a page of the gateway: counters, experts and decision times."""
        counters = asdict(self.router.counters)
        with self.lock:
            numbers = self.routed, self.router.load(), self.breakers.failures, self.able()
            columns = (self.names, *(column.tolist() for column in numbers))
            keys = ("name", "routed", "in_flight", "failed", "up")
            experts = [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]
            times = np.quantile(1e3 * np.array(self._elapsed or [0.0]), [0.5, 0.99, 1.0])
            names, rounded = ("median", "p99", "max"), times.round(3).tolist()
            return {
                "policy": self.router.name,
                "policy_off": self.router.off,
                **counters,
                "fallbacks": self.router.counters.fallbacks,
                **self.counters,
                "in_flight": len(self.open),
                "decision_ms": dict(zip(names, rounded, strict=True)),
                "experts": experts,
            }


class Answer:
    """Reads an answer that comes in pieces, and tells its ticket of tokens and of the end.

    An error in it counts as its status would. The answer to a completion has also failed if it is
    neither JSON nor a stream of events, or ends before it says so. An answer without a token is
    empty if it says why it ends.

    A body that is ``encoded`` is compressed, so that it cannot be read.

    Attributes:
        done: Whether a stream's last event, or an error, has come.
    """

    def __init__(self, ticket: Ticket, content_type: str, *, encoded: bool = False) -> None:
        kind = content_type.partition(";")[0].strip().lower()
        self._streamed = kind == "text/event-stream"
        self.done = False
        self._ticket, self._encoded = ticket, encoded
        self._wrong = not (self._streamed or kind == "application/json")
        self._status = 0  # of an error in it
        self._has_token = self._has_reason = False  # a token; why the answer ends
        self._events = EventStream()
        self._rest, self._long = bytearray(), False

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        if self._encoded:
            return
        if not self._streamed:
            self._long |= len(self._rest) + len(data) > MAX_ANSWER_BYTES
            self._rest += b"" if self._long else data
            return
        for event in self._events.feed(data):
            if event.strip() == b"[DONE]":
                self.done = True
            else:
                self._event(event)

    def _event(self, data: bytes) -> None:
        try:
            event = read_json(data)
            self._status = self._status or error_status(event, self._ticket.completion)
            self.done |= self._status > 0
            count = (event.get("usage") or {}).get("completion_tokens")
            has_token = brings_token(event)
            self._has_reason |= any(one.get("finish_reason") for one in event.get("choices") or ())
        except (ValueError, TypeError, AttributeError, OverflowError):
            return  # no event of OpenAI's protocol, so no token
        seen = self._ticket.tokens + (has_token and self._streamed)
        if isinstance(count, int):  # a count below what was seen, as of 0, is none
            self._ticket.token(max(count, seen))
        elif seen > self._ticket.tokens:
            self._ticket.token(seen)
        self._has_token |= has_token or (isinstance(count, int) and count > 0)

    def end(self) -> None:
        """The answer is over, as far as the gateway knows."""
        whole = not self._streamed
        if whole and not self._long:
            self._event(bytes(self._rest))
        read = self._encoded or (whole and self._long)
        good = read or self._has_reason or (self._has_token and (whole or self.done))
        failed = self._ticket.completion and (self._wrong or not good)
        empty = self._ticket.completion and not (read or self._has_token)
        if self._status:
            self._ticket.refused(self._status)
        self._ticket.end("failed" if failed else "empty" if empty else "finished")
