"""What the plug-ins of all gateways share: requests of OpenAI's protocol, their ends, and failures.

A `Gate` holds a `GatewayRouter`. It reads a request from the body that a gateway has, asks the
router, and gives a `Ticket` that takes the events of that request, each of which counts once. An
expert whose server fails is left alone for a while, and a request of which nothing is heard any
more is given up, so nothing is held for ever.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servegym.experiments.live.client import brings_token
from servegym.experiments.live.fleet_file import Endpoint, ServerSpec
from servegym.experiments.live.gateway import GatewayRequest, GatewayRouter

__all__ = [
    "BYTES_PER_TOKEN",
    "Answer",
    "Gate",
    "Ticket",
    "fleet_arguments",
    "from_metadata",
    "prompt_tokens",
]

BYTES_PER_TOKEN = 4
"""Of a prompt's text, where no tokenizer counts."""
RETRY_AFTER_S = 1
"""What a refused client is told to wait, seconds."""
BACKOFF_S, MAX_BACKOFF_S = 1.0, 30.0
LEASE_S = 600.0
"""Seconds of silence after which a request is given up and counts as failed."""
PREDICTIONS = ("prompt_tokens", "scores", "output_tokens")


def prompt_tokens(body: Mapping[str, Any]) -> int:
    """Tokens of the prompt of a completion or chat request, at least 1.

    Token ids are counted; of text four bytes are taken for a token.
    """

    def count(value: Any) -> float:
        if isinstance(value, str):
            return len(value.encode("utf-8", "replace")) / BYTES_PER_TOKEN
        if isinstance(value, int):
            return 1
        if isinstance(value, Mapping):
            return count(value.get("content") or value.get("text") or "")
        return sum(map(count, value)) if isinstance(value, Sequence) else 0

    return max(1, round(count(body.get("messages") or body.get("prompt") or "")))


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


@dataclass(eq=False)
class Ticket:
    """A request that a gateway sends to an expert; every method may be called late or twice.

    Attributes:
        gate: Its gate.
        id: The request's name at the router.
        expert: Number of the expert, or -1: the request is refused.
        heard_s: When it was last spoken of, by the router's clock.
        tokens: Tokens of its answer so far.
    """

    gate: Gate
    id: str
    expert: int
    heard_s: float
    tokens: int = 0

    def token(self, generated: int | None = None) -> None:
        """A token of the answer came; ``generated`` says how many there are by now."""
        self.tokens = self.tokens + 1 if generated is None else generated
        self.heard_s = self.gate.router.clock()
        self.gate.router.token(self.id, self.tokens)

    def moved(self, expert: int) -> None:
        """The gateway has sent it to another expert itself."""
        self.gate.moved(self, expert)

    def finished(self) -> None:
        """The answer is complete."""
        self.gate.end(self, "finished")

    def failed(self) -> None:
        """The expert's server has failed."""
        self.gate.end(self, "failed")

    def left(self) -> None:
        """The client has hung up, or has sent what the server refuses: no fault of the server."""
        self.gate.end(self, "left")


class Gate:
    """Routes requests of OpenAI's protocol by a `GatewayRouter`.

    An expert is left alone for 1 s after a failure, where another may take the request, and twice
    as long after each further one, up to 30 s, until it answers.

    Args:
        router: The router; its policy is called here, so that it is compiled.
        names: Names of the experts, for `status`.
        predict: Predictions for a request's body, as `from_metadata` makes them; what is missing,
            and all if it raises, is the train mean, lengths up to the body's ``max_tokens``.

    Attributes:
        router: The router.
        names: Names of the experts, for `status`.
        routed: (N,) requests that were sent to each.
        counters: What has happened that the router does not count.
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
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._open: OrderedDict[str, Ticket] = OrderedDict()
        self._failures = np.zeros(n, np.int64)
        self._resting = np.full(n, -np.inf)
        self.routed = np.zeros(n, np.int64)
        self.counters = {"prediction_errors": 0, "server_failures": 0, "left": 0, "given_up": 0}
        self._elapsed: deque[float] = deque(maxlen=4096)
        router.warm()

    def enter(self, body: Mapping[str, Any], *, allowed: ArrayLike | None = None) -> Ticket:
        """Decide where a request goes; it counts as sent there until its ticket has ended.

        Args:
            body: The request's body.
            allowed: (N,) experts that may have it, or None: all.

        Returns:
            The ticket; its expert is -1 if the request is refused.
        """
        begin, now = time.perf_counter(), self.router.clock()
        name = str(next(self._numbers))
        with self._lock:
            self._give_up(now)
            able = self._able(allowed, now)
        try:
            decision = self.router.decide(self._request(name, body, able))
        except (TypeError, ValueError):  # predictions of another form
            self.counters["prediction_errors"] += 1
            decision = self.router.decide(GatewayRequest(name, 1, allowed=able))
        ticket = Ticket(self, name, decision.expert, now)
        with self._lock:
            self._elapsed.append(time.perf_counter() - begin)
            if not decision.dropped:
                self.routed[decision.expert] += 1
                self._open[name] = ticket
        return ticket

    def _request(
        self, name: str, body: Mapping[str, Any], able: NDArray[np.bool_]
    ) -> GatewayRequest:
        found: Mapping[str, Any] = {}
        if self._predict is not None:
            try:
                given = self._predict(body)
                found = {key: given[key] for key in PREDICTIONS if given.get(key) is not None}
            except Exception:  # a predictor may raise anything; the gateway goes on
                self.counters["prediction_errors"] += 1
        fields = dict(found)
        if "prompt_tokens" not in fields:
            fields["prompt_tokens"] = prompt_tokens(body)
        most = body.get("max_completion_tokens") or body.get("max_tokens")
        if "output_tokens" not in fields and isinstance(most, int) and most > 0:
            mean = self.router.system.mean_output_tokens
            fields["output_tokens"] = (
                np.full(len(mean), most) if body.get("ignore_eos") else np.minimum(mean, most)
            )
        return GatewayRequest(name, allowed=able, **fields)

    def _able(self, allowed: ArrayLike | None, now: float) -> NDArray[np.bool_]:
        """The experts that may have a request: not those that have just failed, if others may."""
        able = np.ones(self.router.num_experts, np.bool_)
        if allowed is not None:
            able &= np.asarray(allowed, np.bool_)
        rested = able & (now >= self._resting)
        return rested if rested.any() else able

    def _give_up(self, now: float) -> None:
        """End requests that nobody speaks of any more."""
        for name in list(itertools.islice(self._open, 2)):  # all come round in time
            if now - self._open[name].heard_s <= LEASE_S:
                self._open.move_to_end(name)
                continue
            del self._open[name]
            self.counters["given_up"] += 1
            self.router.failed(name)

    def moved(self, ticket: Ticket, expert: int) -> None:
        """See `Ticket.moved`; the expert that it was sent to has failed."""
        with self._lock:
            if ticket.id not in self._open or not 0 <= expert < len(self.names):
                return
            self._rest(ticket.expert)
            self.routed[expert] += 1
            ticket.expert, ticket.tokens = expert, 0
        self.router.moved(ticket.id, expert)

    def _rest(self, expert: int) -> None:
        self.counters["server_failures"] += 1
        self._failures[expert] += 1
        wait = BACKOFF_S * 2.0 ** min(self._failures[expert] - 1, 16)
        self._resting[expert] = self.router.clock() + min(wait, MAX_BACKOFF_S)

    def end(self, ticket: Ticket, how: str) -> None:
        """The end of a ticket: ``finished``, ``failed`` or ``left``; a second changes nothing."""
        with self._lock:
            if self._open.pop(ticket.id, None) is None:
                return
            if how == "finished":
                self._failures[ticket.expert] = 0
            elif how == "failed":
                self._rest(ticket.expert)
            else:
                self.counters["left"] += 1
        (self.router.finished if how == "finished" else self.router.failed)(ticket.id)

    def status(self) -> dict[str, Any]:
        """What has happened, for a page of the gateway: counters, experts and decision times."""
        counters = asdict(self.router.counters)
        counters.pop("last_error")
        with self._lock:
            now = self.router.clock()
            times = 1e3 * np.array(self._elapsed or [0.0])
            return {
                "policy": self.router.name,
                **counters,
                "fallbacks": self.router.counters.fallbacks,
                **self.counters,
                "in_flight": len(self._open),
                "decision_ms": {
                    "median": round(float(np.median(times)), 3),
                    "p99": round(float(np.quantile(times, 0.99)), 3),
                },
                "experts": [
                    {
                        "name": name,
                        "routed": int(self.routed[k]),
                        "in_flight": int(load),
                        "up": bool(now >= self._resting[k]),
                    }
                    for k, (name, load) in enumerate(
                        zip(self.names, self.router.load(), strict=True)
                    )
                ],
            }


class Answer:
    """Counts the tokens of an answer that comes in pieces, and tells its ticket.

    Args:
        ticket: The request's ticket.
        streamed: Whether the answer is a stream of events; of another nothing is counted.

    Attributes:
        done: Whether the stream's last event has come.
    """

    def __init__(self, ticket: Ticket, streamed: bool) -> None:
        self._ticket, self._streamed, self._rest = ticket, streamed, b""
        self.done = False

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        if not self._streamed:
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = json.loads(data)
            told = (event.get("usage") or {}).get("completion_tokens")
            if told is not None:
                self._ticket.token(int(told))
            elif brings_token(event):
                self._ticket.token()
        except (ValueError, TypeError, AttributeError):
            pass  # no event of OpenAI's protocol, so no token
