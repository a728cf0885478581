"""What one bad server and one bad client do to the others behind a gateway, by an injected clock.

    python -m servegym.experiments.studies.routing.bad_servers

Four like servers get 40 requests/s of good clients, and those of one bad client. One
server is bad from 3 to 20 s. Each pair of the two is played with each policy for 36 s; the table
``bad_servers`` has what is measured from 2 s after the turn on, and how long after its end the
server's breaker closed for good.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.experiments.evaluation.tables import note, provenance, write_result
from servegym.experiments.live.gateway import GatewayRouter
from servegym.experiments.live.gateways.gate import Gate, Ticket

__all__ = ["CLIENTS", "POLICIES", "SERVERS", "main", "play"]

MODULE = "servegym.experiments.studies.routing.bad_servers"
OUT = Path("experiments", "results", "real", "bad_servers")
POLICIES = ("least_outstanding", "fleet_search")
N, BAD, RATE = 4, 0, 40.0
TURN_S, HEALED_S, END_S, PATIENT_S = 3.0, 20.0, 36.0, 3.0
SETTLED_S = TURN_S + 2.0
FLEET = {
    "profiles": ["h100-llama-3.1-8b"] * N,
    "scheduler": "chunked_prefill",
    "memory_policy": "paged",
    "running_capacity": 32,
    "waiting_capacity": 64,
    "router_delay_s": 0.0,
    "bytes_per_token": 0.0,
}
BODY = {"messages": [{"role": "user", "content": "word " * 400}], "max_tokens": 200}

Event = tuple[float, str]
"""Seconds after a request was sent, and what happens: ``token`` and how many, a status, or how it
ends."""
Answer = Callable[[bool, int, float], list[Event] | None]


def _always(*events: Event) -> Answer:
    return lambda refused, sent, idle_s: list(events)


def _begun(after_s: float, how: str) -> Answer:
    return _always((0.03, "token"), (after_s, how))


def _flaps(*events: Event) -> Answer:
    return lambda refused, sent, idle_s: list(events) if idle_s < 0.5 else None


def _each(n: int, after_s: float, how: str) -> Answer:
    return lambda refused, sent, idle_s: None if sent % n else [(after_s, how)]


PARTIAL: dict[str, Answer] = {
    "fails one in two": _each(2, 0.005, "500"),
    "500 to a fifth": _each(5, 0.005, "500"),
    "401 to half": _each(2, 0.001, "401"),
    "one token": _always((0.02, "token"), (0.021, "finished")),
}
SERVERS: dict[str, Answer] = {
    "always 500": _always((0.005, "500")),
    "always 503": _always((0.005, "503")),
    "503, later": _always((0.005, "busy")),
    "always 401": _always((0.001, "401")),
    "always 404": _always((0.001, "404")),
    "429 forever": _always((0.002, "429")),
    "never answers": _always(),
    "resets": _always((0.005, "broken")),
    "slow 504": _always((2.5, "504")),
    "empty answers": _always((0.005, "empty")),
    "garbage": _always((0.001, "failed")),
    "leaves after 1 s": _always((1.0, "broken")),
    "wrong model 404": lambda refused, sent, idle_s: None if refused else [(0.03, "404")],
    "flapper": _flaps((0.005, "500")),
    "token, 429": _begun(0.05, "429"),
    "token, 503": _begun(0.05, "503"),
    "token, garbage": _begun(0.05, "failed"),
    "token, leaves after 1 s": _begun(1.0, "broken"),
    "token, flapper": _flaps((0.03, "token"), (0.05, "failed")),
    **PARTIAL,
}
"""A bad server -> what becomes of a request, by whether all refuse it, the requests that it got and
the seconds since the last one; None: what any server does. A flapper is well after a pause."""
GOALS = {"share_to_bad": 0.05, "back_s": 6.0}
CLIENTS: dict[str, tuple[float, Callable[[int], list[Event]]]] = {
    "none": (0.0, lambda k: []),
    "first tokens, 20/s": (20.0, lambda k: [(0.15, "token"), (0.16, "broken")]),
    "404, 40/s": (40.0, lambda k: [(0.003, "404")]),
    "401, 20/s": (20.0, lambda k: [(0.001, "401")]),
    "hang-ups, 20/s": (
        20.0,
        lambda k: [(0.15, "token"), (0.2, "broken")] if k % 2 else [(0.03, "left")],
    ),
    "timeouts, 20/s": (20.0, lambda k: [(0.06, "left")]),
    "400 and 413, 20/s": (20.0, lambda k: [(0.01, "413" if k % 2 else "400")]),
    "429, 60 at once": (1.0, lambda k: [(0.002, "429")]),
}
"""Requests/s of a bad client, and what a good server makes of its k-th."""
BURST = 60


def _arrivals(client: str, rng: np.random.Generator) -> Iterator[tuple[float, bool, int]]:
    """Time, whether of the bad client, and number of each request."""
    for bad, rate in ((False, RATE), (True, CLIENTS[client][0])):
        if rate:
            times = np.cumsum(rng.exponential(1.0 / rate, int(2 * rate * END_S) + 50))
            if bad and client.endswith("at once"):
                times = np.repeat(times, BURST)
            yield from ((when, bad, k) for k, when in enumerate(times) if when < END_S)


def _tell(ticket: Ticket, what: str) -> None:
    if what.startswith("token"):
        ticket.token(int(what[5:] or 1))
    elif what.isdecimal():
        ticket.refused(int(what))
    else:
        ticket.end(what)


def play(server: str, client: str, policy: str, *, seed: int = 0) -> dict[str, Any]:
    """One pair of server and client with one policy; ``server`` may be ``none``."""
    rng, now = np.random.default_rng(seed), [0.0]
    gate = Gate(GatewayRouter(FLEET, policy, budget_s=None, clock=lambda: now[0]))
    heap: list[tuple[float, int, Any, Any]] = []
    for when, bad, k in _arrivals(client, rng):
        heapq.heappush(heap, (when, len(heap), None, (bad, k)))
    number, last = len(heap), -np.inf
    back_s = 0.0
    refused, latencies, closed, silent = 0, [], [], []
    sent: list[tuple[float, int]] = []
    while heap:
        now[0], _, ticket, about = heapq.heappop(heap)
        if ticket is not None:
            what, bad, begun = about
            if what == "finished" and not bad and begun >= SETTLED_S:
                latencies.append(now[0] - begun)
            _tell(ticket, what)
            continue
        bad, k = about
        ticket = gate.enter(BODY)
        if now[0] >= HEALED_S and gate.breakers.opened[BAD]:
            back_s = now[0] - HEALED_S
        if SETTLED_S <= now[0]:
            sent.append((now[0], ticket.expert))
            closed.append(gate.breakers.opened[np.arange(N) != BAD].mean())
            silent.append(not gate.breakers.answering(now[0]))
        if ticket.expert < 0:
            refused += not bad
            continue
        events = None
        if ticket.expert == BAD:
            if server != "none" and TURN_S <= now[0] < HEALED_S:
                everywhere = bad and CLIENTS[client][1](k)[0][1].isdecimal()
                events = SERVERS[server](everywhere, int(gate.routed[BAD]), now[0] - last)
            last = now[0]
        if events is None and bad:
            events = CLIENTS[client][1](k)
        elif events is None:
            load = float(gate.router.load()[ticket.expert])
            first, more = rng.uniform(0.8, 1.2, 2)
            first *= 0.1 + 0.005 * load
            last_s = first + more * (0.5 + 0.01 * load)
            events = [(first, "token"), (last_s, "token 200"), (last_s, "finished")]
        if not events:
            events = [(0.06 if client.startswith("timeouts") and bad else PATIENT_S, "left")]
        for after, what in events:
            number += 1
            heapq.heappush(heap, (now[0] + after, number, ticket, (what, bad, now[0])))
    to_bad = [expert == BAD for when, expert in sent if when < HEALED_S]
    return {
        "server": server,
        "client": client,
        "policy": policy,
        "share_to_bad": round(float(np.mean(to_bad)), 4),
        "back_s": round(back_s, 2),
        "refused": refused,
        "p99_s": round(float(np.quantile(latencies, 0.99)), 4),
        "good_closed": round(float(np.mean(closed)), 4),
        "not_serving": round(float(np.mean(silent)), 4),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Play, print and write the table. Returns 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT, help=f"the table ({OUT})")
    options = parser.parse_args(arguments)
    rows = []
    for policy in POLICIES:
        for server in ("none", *SERVERS):
            alone = 0.0
            for client in CLIENTS:
                row = play(server, client, policy)
                alone = alone or row["p99_s"]
                rows.append({**row, "p99_ratio": round(row["p99_s"] / alone, 3)})
                print(*rows[-1].values(), sep="  ", flush=True)
    judged = [row for row in rows if row["server"] != "none"]
    texts = []
    for key in ("share_to_bad", "back_s", "refused", "p99_ratio", "good_closed", "not_serving"):
        worst = max(rows if key == "good_closed" else judged, key=lambda row: row[key])
        about = "; ".join(worst[name] for name in ("server", "client", "policy"))
        texts.append(f"largest {key}: {worst[key]} ({about})")
    for key, goal in GOALS.items():
        high = [row for row in judged if row[key] > goal]
        texts.append(f"{key} above {goal}: {len(high)} of {len(judged)}")
    notes = [note(text) for text in texts]
    for one in notes:
        print(one["text"])
    write_result(options.out, rows, provenance("python -m " + MODULE), notes)
    return 0


if __name__ == "__main__":
    run_main(main)
