"""A live page of a simulated fleet: queues, memory, hits, requests and objectives."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections import deque
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from aiohttp import web

from servegym._checks import real
from servegym.experiments.live.serve.server import Served, SimulatedFleet, SimulatedServer, Site

PERIOD_S = 0.5
WINDOW_S = 30.0
"""Rates and shares are over so many seconds of simulated time."""
_LISTED = 14
_KEPT = 240  # samples of the queues


def _tpot_s(one: Served) -> float:
    return (one.last_s - one.first_s) / (one.count - 1) if one.count > 1 else 0.0


def _number(value: float) -> float | None:
    return round(value, 5) if math.isfinite(value) else None


def _spread(values: Sequence[float]) -> list[float | None]:
    """Median, 95th and 99th percentile; None without a value."""
    ordered = sorted(values) or [math.nan]
    return [_number(ordered[round((len(ordered) - 1) * q)]) for q in (0.5, 0.95, 0.99)]


def listen(host: str, port: int) -> socket.socket:
    """A socket for the page; port 0 takes a free one, a ValueError names one that is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"dashboard: port {port} of {host} cannot be used: {why}") from None


class Dashboard:
    """The page of a fleet and its stream of events, on a port of its own.

    ``ttft_s`` and ``tpot_s`` are the objectives for the time to the first token and per output
    token, seconds.
    """

    def __init__(self, fleet: SimulatedFleet, ttft_s: float = 0.5, tpot_s: float = 0.05) -> None:
        self._fleet = fleet
        self._ttft_s = real("slo-ttft", ttft_s, 0.0, open_low=True)
        self._tpot_s = real("slo-tpot", tpot_s, 0.0, open_low=True)
        self._page = files("servegym.experiments.live.serve").joinpath("dashboard.html")
        app = web.Application()
        app.router.add_get("/", self._index)
        app.router.add_get("/events", self._events)
        self._site = Site(app)
        self._past: deque[tuple[float | None, list[list[int]]]] = deque(maxlen=_KEPT)
        self._sampler: asyncio.Task[None] | None = None

    def state(self) -> dict[str, Any]:
        """What one event of the stream tells; times are simulated seconds."""
        servers = self._fleet.servers
        requests = sorted(
            ((one, server.spec.name) for server in servers for one in server.recent),
            key=lambda pair: pair[0].arrived_s,
        )[-_LISTED:]
        return {
            "time_s": _number(servers[0].now),
            "speed": self._fleet.speed,
            "slo": {"ttft_s": self._ttft_s, "tpot_s": self._tpot_s},
            "fleet": self._facts(servers),
            "servers": [self._server(server) for server in servers],
            "requests": [
                {
                    "server": name,
                    "arrived_s": _number(one.arrived_s),
                    "prompt": one.prompt,
                    "hit": one.hit,
                    "tokens": one.count,
                    "ttft_s": _number(one.first_s - one.arrived_s),
                    "tpot_s": _number(_tpot_s(one)) if one.count > 1 else None,
                    "end": one.end,
                    "met": self._met(one),
                }
                for one, name in reversed(requests)
            ],
        }

    def _met(self, one: Served) -> bool:
        return (
            one.end in ("stop", "length")
            and one.first_s - one.arrived_s <= self._ttft_s
            and _tpot_s(one) <= self._tpot_s
        )

    def _facts(self, servers: Sequence[SimulatedServer]) -> dict[str, Any]:
        """What a server, or a fleet, does now and has done in the window."""
        now = servers[0].now
        window = min(WINDOW_S, max(now, 1e-9))
        recent = [
            one for server in servers for one in server.recent if not one.last_s < now - WINDOW_S
        ]
        done = [one for one in recent if one.end in ("stop", "length")]
        ended = [one for one in recent if one.end != "abort"]
        prompt = sum(one.prompt for one in done)
        metrics = [server.metrics for server in servers]
        refused = sum(server.refused for server in servers)
        return {
            "running": sum(server.engine.running for server in servers),
            "slots": sum(server.spec.slots for server in servers),
            "waiting": sum(server.engine.waiting for server in servers),
            "kv": _number(sum(server.engine.kv_usage for server in servers) / len(servers)),
            "hits": _number(sum(one.hit for one in done) / prompt) if prompt else None,
            "requests_per_s": _number(len(done) / window),
            "ttft_s": _spread([one.first_s - one.arrived_s for one in done]),
            "tpot_s": _spread([_tpot_s(one) for one in done]),
            "met": _number(sum(map(self._met, ended)) / len(ended)) if ended else None,
            "total": sum(sum(one.ended.values()) for one in metrics) + refused,
            "failed": sum(one.ended["error"] for one in metrics) + refused,
            "aborted": sum(one.ended["abort"] for one in metrics),
        }

    def _server(self, server: SimulatedServer) -> dict[str, Any]:
        return {
            **self._facts([server]),
            "name": server.spec.name,
            "model": server.model,
            "listening": server.listening,
            "lag_s": _number(server.lag_s),
        }

    async def _index(self, _: web.Request) -> web.Response:
        return web.Response(text=self._page.read_text(encoding="utf-8"), content_type="text/html")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        past = {"past": list(self._past)}  # of the time before the page was opened
        while True:
            event = json.dumps({**self.state(), **past})
            past = {}
            await response.write(f"data: {event}\n\n".encode())
            await asyncio.sleep(PERIOD_S)

    async def _sample(self) -> None:
        while True:
            servers = self._fleet.servers
            load = [[one.engine.running, one.engine.waiting] for one in servers]
            self._past.append((_number(servers[0].now), load))
            await asyncio.sleep(PERIOD_S)

    async def start(self, listener: socket.socket) -> str:
        """Answer on a socket that listens, see `listen`; the page's address."""
        await self._site.listen(sock=listener)
        self._sampler = asyncio.create_task(self._sample())
        host, port = listener.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"

    async def stop(self) -> None:
        """Stop listening."""
        if self._sampler is not None:
            self._sampler.cancel()
        await self._site.stop()
