"""What the plug-ins of all gateways share: requests of OpenAI's protocol, their ends, and failures.

A `Gate` holds a `GatewayRouter`. It reads a request from the body that a gateway has, asks the
router, and gives a `Ticket` that takes the events of that request, each of which counts once. A
`Breaker` keeps requests from a server that fails, and a request of which nothing is heard any more
is given up, so nothing is held for ever.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servegym.experiments.live.fleet_file import Endpoint, ServerSpec
from servegym.experiments.live.gateway import MAX_TOKENS, GatewayRequest, GatewayRouter
from servegym.hardware_profiles.measure.openai_protocol import (
    EventStream,
    brings_token,
    error_of,
    read_json,
)

__all__ = [
    "BYTES_PER_TOKEN",
    "Answer",
    "Breaker",
    "Gate",
    "Ticket",
    "fleet_arguments",
    "from_metadata",
    "prompt_tokens",
]

BYTES_PER_TOKEN = 4
"""Of a prompt's text, where no tokenizer counts."""
DEPTH = 4
"""Of lists in messages and prompts; what is nested more deeply is no text of theirs."""
RETRY_AFTER_S = 1
"""What a refused client is told to wait, seconds."""
CLIENTS = (400, 413, 422)
"""Statuses that are the client's doing; any other error is the server's own."""
OUTCOMES, WINDOW_S, SHARE = 10, 10.0, 0.5
BACKOFF_S, MAX_BACKOFF_S = 1.0, 8.0
MAX_ANSWER_BYTES = 1 << 20
"""Of an answer in one piece that is read; a longer one is not."""
LEASE_S = 600.0
"""Seconds of silence after which a request is given up and counts as failed."""
PREDICTIONS = ("prompt_tokens", "scores", "output_tokens")


def prompt_tokens(body: Mapping[str, Any]) -> int:
    """Tokens of the prompt of a completion or chat request, at least 1.

    Token ids are counted; of text four bytes are taken for a token.
    """

    def count(value: Any, depth: int) -> float:
        if isinstance(value, str):
            return len(value.encode("utf-8", "replace")) / BYTES_PER_TOKEN
        if isinstance(value, int):
            return 1
        if isinstance(value, Mapping):
            return count(value.get("content") or value.get("text") or "", depth)
        if not isinstance(value, Sequence) or depth == 0:
            return 0
        if value and type(value[0]) is int:  # token ids, of which there may be a million
            return len(value)
        return sum(count(one, depth - 1) for one in value)

    tokens = count(body.get("messages") or body.get("prompt") or "", DEPTH)
    return min(max(1, round(tokens)), MAX_TOKENS)


def from_metadata(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Predictions that a trusted client puts in the request: ``metadata.servegym`` of its body.

    They may have ``prompt_tokens``, ``scores`` and ``output_tokens`` as `GatewayRequest` has.
    Whoever writes them decides where the request goes.
    """
    metadata = body.get("metadata")
    found = metadata.get("servegym") if isinstance(metadata, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def fleet_arguments(servers: Sequence[Endpoint | ServerSpec], **more: Any) -> dict[str, Any]:
    """Arguments of ``servegym/LLMRouting-v1`` that describe servers with continuous batching.

    Args:
        servers: The servers, each with a profile.
        **more: Further arguments, which win.

    Raises:
        ValueError: If a server has no profile.
    """
    for one in servers:
        if not one.profile:
            raise ValueError(
                f"server {one.name!r} has no profile; make one with `servegym calibrate server`, "
                "or name a shipped one in FLEET.toml"
            )
    return {
        "profiles": [one.profile for one in servers],
        "scheduler": "chunked_prefill",
        "memory_policy": "paged",
        "running_capacity": max(one.slots for one in servers),
        "waiting_capacity": 64,
        "router_delay_s": 0.0,
        "bytes_per_token": 0.0,
        **more,
    }


class Breaker:
    """A circuit breaker: whether a server may have requests.

    It opens when half of the server's last ten outcomes of the last ten seconds are failures. After
    1 s it is half open: one request may go there, and, until an answer comes, the next one only
    after twice as long, up to 8 s. A request that was sent later than it opened closes it with its
    first token or its end. What was sent before tells nothing new, so a burst of failures is one.
    """

    def __init__(self) -> None:
        self.opened = False
        self.failures = 0
        self._sent, self._last = 0, 0  # requests sent, and how many when it opened
        self._outcomes: deque[tuple[float, bool]] = deque(maxlen=OUTCOMES)
        self._step, self._until = 0, -np.inf

    def able(self, now: float) -> bool:
        """Whether it lets a request through."""
        return not self.opened or now >= self._until

    def send(self, now: float) -> int:
        """A request goes to the server; its number."""
        self._sent += 1
        if self.opened and now >= self._until:
            self._step += 1
            self._rest(now)
        return self._sent

    def _rest(self, now: float) -> None:
        self._until = now + min(BACKOFF_S * 2.0 ** min(self._step, 16), MAX_BACKOFF_S)

    def good(self, number: int, now: float, *, ended: bool = True) -> None:
        """The request of that number brings an answer."""
        if self.opened:
            if number > self._last:
                self.opened, self._until = False, now
                self._outcomes.clear()
        elif ended:
            self._outcomes.append((now, False))
            if now - self._until > WINDOW_S:
                self._step = 0

    def bad(self, number: int, now: float) -> None:
        """The server has failed at the request of that number."""
        self.failures += 1
        if self.opened:
            if number > self._last:
                self._rest(now)
            return
        self._outcomes.append((now, True))
        recent = [failed for when, failed in self._outcomes if now - when <= WINDOW_S]
        if sum(recent) >= SHARE * len(recent):
            self.opened, self._last = True, self._sent
            self._rest(now)


@dataclass(eq=False)
class Ticket:
    """A request that a gateway sends to an expert; every method may be called late or twice.

    Attributes:
        gate: Its gate.
        id: The request's name at the router.
        expert: Number of the expert, or -1: the request is refused.
        heard_s: When it was last spoken of, by the router's clock.
        completion: Whether its answer must have the form of completions and a token.
        number: Of the request among those of its expert, for the breaker.
        tokens: Tokens of its answer so far.
    """

    gate: Gate
    id: str
    expert: int
    heard_s: float
    completion: bool = True
    number: int = 0
    tokens: int = 0

    def token(self, generated: int | None = None) -> None:
        """A token of the answer came; ``generated`` says how many there are by now."""
        gate, first = self.gate, self.tokens == 0
        told = self.tokens + 1 if generated is None else int(generated)
        self.tokens = min(max(told, 0), MAX_TOKENS)
        self.heard_s = gate.router.clock()
        gate.router.token(self.id, self.tokens)
        if first and self.tokens:
            with gate.lock:
                if self.id in gate.open:
                    gate.breakers[self.expert].good(self.number, self.heard_s, ended=False)

    def moved(self, expert: int) -> None:
        """The gateway has sent it to another expert itself: that of before has failed."""
        gate = self.gate
        with gate.lock:
            if self.id not in gate.open or not 0 <= expert < len(gate.names):
                return
            gate.blame(self)
            gate.send(self, expert)
        gate.router.moved(self.id, expert)

    def refused(self, status: int) -> None:
        """The answer is an error with this HTTP status."""
        self.end("left" if status in CLIENTS else "failed")

    def end(self, how: str) -> None:
        """The request is over.

        Args:
            how: ``finished``, the answer is complete; ``failed``, by the server; ``left``, the
                client has hung up, which is no fault of the server; ``broken``, in the midst of
                the answer, by either: it counts as left, and for the breaker as a failure, since
                few clients in ten hang up.
        """
        gate = self.gate
        with gate.lock:
            if gate.open.pop(self.id, None) is None:
                return
            breaker, now = gate.breakers[self.expert], gate.router.clock()
            if how == "finished":
                breaker.good(self.number, now)
            elif how == "failed":
                gate.blame(self)
            else:
                gate.counters["left"] += 1
                if how == "broken":
                    breaker.bad(self.number, now)
        (gate.router.finished if how == "finished" else gate.router.failed)(self.id)


class Gate:
    """Routes requests of OpenAI's protocol by a `GatewayRouter`.

    A request goes to an expert that its `Breaker` does not let it only where no other may take it.
    Whatever fails in a prediction is logged and counted, and the request goes by the train means.

    Args:
        router: The router; its policy is called here, so that it is compiled.
        names: Names of the experts, for `status`.
        predict: Predictions for a request's body, as `from_metadata` makes them; what is missing,
            and all if it raises, is the train mean, lengths up to the body's ``max_tokens``.

    Attributes:
        router: The router.
        names: Names of the experts, for `status`.
        routed: (N,) requests that were sent to each.
        breakers: N breakers.
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
        self.breakers = [Breaker() for _ in range(n)]
        self.routed = np.zeros(n, np.int64)
        self.counters = {"prediction_errors": 0, "server_failures": 0, "left": 0, "given_up": 0}
        self._elapsed: deque[float] = deque(maxlen=4096)
        router.warm()

    def enter(
        self,
        body: Mapping[str, Any],
        *,
        allowed: ArrayLike | None = None,
        completion: bool = True,
    ) -> Ticket:
        """Decide where a request goes; it counts as sent there until its ticket has ended.

        Args:
            body: The request's body.
            allowed: (N,) experts that may have it, or None: all.
            completion: Whether it asks for a completion, so that an answer without a token fails.

        Returns:
            The ticket; its expert is -1 if the request is refused.
        """
        begin, now = time.perf_counter(), self.router.clock()
        name = str(next(self._numbers))
        with self.lock:
            self._give_up(now)
            able = self.able(allowed)
        try:
            decision = self.router.decide(self._request(name, body, able))
        except Exception as error:  # predictions of another form
            self._mistaken(error)
            decision = self.router.decide(GatewayRequest(name, 1, allowed=able))
        ticket = Ticket(self, name, decision.expert, now, completion)
        with self.lock:
            self._elapsed.append(time.perf_counter() - begin)
            if not decision.dropped:
                self.send(ticket, decision.expert)
                self.open[name] = ticket
        return ticket

    def send(self, ticket: Ticket, expert: int) -> None:
        """A ticket goes to an expert; called with the lock."""
        self.routed[expert] += 1
        ticket.expert, ticket.tokens = expert, 0
        ticket.number = self.breakers[expert].send(self.router.clock())

    def _mistaken(self, error: BaseException) -> None:
        self.counters["prediction_errors"] += 1
        self.router.report("prediction", error)

    def _request(
        self, name: str, body: Mapping[str, Any], able: NDArray[np.bool_]
    ) -> GatewayRequest:
        found: Mapping[str, Any] = {}
        if self._predict is not None:
            try:
                given = self._predict(body)
                found = {key: given[key] for key in PREDICTIONS if given.get(key) is not None}
            except (Exception, SystemExit) as error:  # it may raise anything; the gateway goes on
                self._mistaken(error)
        fields = dict(found)
        if "prompt_tokens" not in fields:
            fields["prompt_tokens"] = prompt_tokens(body)
        most = body.get("max_completion_tokens") or body.get("max_tokens")
        if "output_tokens" not in fields and isinstance(most, int) and most > 0:
            mean, most = self.router.system.mean_output_tokens, min(most, MAX_TOKENS)
            fields["output_tokens"] = (
                np.full(len(mean), most) if body.get("ignore_eos") else np.minimum(mean, most)
            )
        return GatewayRequest(name, allowed=able, **fields)

    def able(self, allowed: ArrayLike | None = None) -> NDArray[np.bool_]:
        """(N,) experts that may have a request: those whose breaker lets it, or all if none does.

        Args:
            allowed: (N,) experts that may have it, or None: all.
        """
        able = np.ones(self.router.num_experts, np.bool_)
        if allowed is not None:
            able &= np.asarray(allowed, np.bool_)
        now = self.router.clock()
        closed = able & [one.able(now) for one in self.breakers]
        return closed if closed.any() else able

    def _give_up(self, now: float) -> None:
        """End requests that nobody speaks of any more."""
        for name in list(itertools.islice(self.open, 2)):  # all come round in time
            if now - self.open[name].heard_s <= LEASE_S:
                self.open.move_to_end(name)
                continue
            del self.open[name]
            self.counters["given_up"] += 1
            self.router.failed(name)

    def blame(self, ticket: Ticket) -> None:
        """The expert of a ticket has failed; called with the lock."""
        self.counters["server_failures"] += 1
        self.breakers[ticket.expert].bad(ticket.number, self.router.clock())

    def status(self) -> dict[str, Any]:
        """What has happened, for a page of the gateway: counters, experts and decision times."""
        counters = asdict(self.router.counters)
        with self.lock:
            now = self.router.clock()
            times = 1e3 * np.array(self._elapsed or [0.0])
            return {
                "policy": self.router.name,
                "policy_off": self.router.off,
                **counters,
                "fallbacks": self.router.counters.fallbacks,
                **self.counters,
                "in_flight": len(self.open),
                "decision_ms": {
                    "median": round(float(np.median(times)), 3),
                    "p99": round(float(np.quantile(times, 0.99)), 3),
                    "max": round(float(times.max()), 3),
                },
                "experts": [
                    {
                        "name": name,
                        "routed": int(self.routed[k]),
                        "in_flight": int(load),
                        "failed": self.breakers[k].failures,
                        "up": self.breakers[k].able(now),
                    }
                    for k, (name, load) in enumerate(
                        zip(self.names, self.router.load(), strict=True)
                    )
                ],
            }


class Answer:
    """Reads an answer that comes in pieces, and tells its ticket of tokens and of the end.

    The answer to a completion has failed if it is neither JSON nor a stream of events, has an error
    in it, or ends before it says so. An answer without a token is complete if it says why it ends.

    Args:
        ticket: The request's ticket.
        content_type: The header of that name.
        encoded: Whether the body is compressed, so that it cannot be read.

    Attributes:
        done: Whether a stream's last event has come.
    """

    def __init__(self, ticket: Ticket, content_type: str, *, encoded: bool = False) -> None:
        kind = content_type.partition(";")[0].strip().lower()
        self._streamed = kind == "text/event-stream"
        self.done = False
        self._ticket, self._encoded = ticket, encoded
        self._wrong = not (self._streamed or kind == "application/json")
        self._brought = self._said = False  # a token; why the answer ends
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
            self._wrong |= bool(error_of(event))
            told = (event.get("usage") or {}).get("completion_tokens")
            brought = brings_token(event)
            self._said |= any(one.get("finish_reason") for one in event.get("choices") or ())
        except (ValueError, TypeError, AttributeError, OverflowError):
            return  # no event of OpenAI's protocol, so no token
        if isinstance(told, int):
            self._ticket.token(told)
        elif brought and self._streamed:
            self._ticket.token()
        self._brought |= brought or (isinstance(told, int) and told > 0)

    def end(self) -> None:
        """The answer is over, as far as the gateway knows."""
        whole = not self._streamed
        if whole and not self._long:
            self._event(bytes(self._rest))
        read = self._encoded or (whole and self._long)
        good = read or self._said or (self._brought and (whole or self.done))
        failed = self._ticket.completion and (self._wrong or not good)
        self._ticket.end("failed" if failed else "finished")
