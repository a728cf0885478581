"""Simulated servers: the engine in real or scaled time behind OpenAI's protocol."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import select
import selectors
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from servegym._checks import keywords, real, whole
from servegym.envs.prefix_routing.live import LiveEngine
from servegym.experiments.live.fleet_file import ServerSpec
from servegym.experiments.live.serve.faults import Fault
from servegym.experiments.live.serve.metrics import ServerMetrics
from servegym.experiments.live.serve.protocol import (
    Ask,
    BadRequest,
    answer,
    inflate,
    read_json,
    read_request,
)
from servegym.hardware_profiles import load

BODY_TIMEOUT_S = 30.0
HEADERS_S = 30.0
"""A connection without a whole request for so long is closed; looked at every `SWEEP_S`."""
SWEEP_S = 1.0
NAMED = "X-Servegym-Server"
_OPTIONS = ("kv_tokens", "block_size", "async_scheduling")
_SHUT = ("refuse", "crash")  # kinds of failures in which the port is closed


class _FineSelector(selectors.EpollSelector):
    """epoll counts in milliseconds; tokens come every few of them."""

    def select(self, timeout: float | None = None) -> Any:
        if timeout is not None and timeout > 0.0:
            select.select([self.fileno()], [], [], timeout)
            timeout = 0.0
        return super().select(timeout)


def _bare(record: logging.LogRecord) -> bool:
    """Of an error only its kind and place are logged: its words may be a request's."""
    error = record.exc_info[1] if record.exc_info else None
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    record.msg, record.args = "a request failed: %s%s", (type(error).__name__, place)
    record.exc_info = record.exc_text = None
    return True


_log = logging.getLogger("servegym.serve")
_log.addFilter(_bare)


def new_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose timers are exact to some 0.1 ms where the system allows that."""
    if hasattr(selectors, "EpollSelector"):
        return asyncio.SelectorEventLoop(_FineSelector())
    return asyncio.new_event_loop()


class _Connection(web.RequestHandler):
    """Whatever goes wrong is told in OpenAI's form; aiohttp's own answers repeat the request."""

    def handle_error(
        self, request: Any, status: int = 500, exc: Any = None, message: Any = None
    ) -> web.Response:
        """The answer to what is no HTTP, or to a request that failed; the connection ends."""
        self.log_exception("", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        response = _error(431 if isinstance(exc, LineTooLong) else status)
        response.force_close()
        return response

    async def finish_response(self, request: Any, resp: Any, start_time: Any) -> Any:
        """Send an answer."""
        if isinstance(resp, web.HTTPException):
            too_long = "The body is larger than the server takes."
            resp = _error(resp.status, too_long if resp.status == 413 else "")
        return await super().finish_response(request, resp, start_time)


class Site:
    """An application at an address; a log of its requests would have keys."""

    def __init__(self, app: web.Application) -> None:
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.2)
        self._listener: asyncio.Server | None = None

    async def listen(self, **where: Any) -> int:
        """Answer requests at an address, see ``loop.create_server``; its port."""
        if self._runner.server is None:
            await self._runner.setup()
        loop, kind = asyncio.get_running_loop(), cast(Any, _Connection)  # its hints want a log
        # What aiohttp inflates it inflates on the loop, however much that is.
        more = {"access_log": None, "logger": _log, "auto_decompress": False}
        connect = partial(kind, self._runner.server, loop=loop, **more)
        self._listener = await loop.create_server(connect, **where)
        return self._listener.sockets[0].getsockname()[1]

    @property
    def listening(self) -> bool:
        """Whether its port is open."""
        return self._listener is not None and self._listener.is_serving()

    @property
    def connections(self) -> set[asyncio.Transport]:
        """Those that are open."""
        assert self._runner.server is not None
        found = {one.transport for one in self._runner.server.connections}
        return {one for one in found if isinstance(one, asyncio.Transport)}

    def close(self) -> None:
        """Refuse connections; those that are there go on."""
        if self._listener is not None:
            self._listener.close()

    async def stop(self) -> None:
        """Refuse connections and end those that are there."""
        self.close()
        if self._runner.server is not None:
            await self._runner.cleanup()


@dataclass
class Served:
    """A request that a server took; times are simulated seconds since the server's start."""

    prompt: int  # tokens
    output: int  # tokens of the whole answer
    arrived_s: float
    first_s: float = math.nan
    last_s: float = math.nan  # of the last token so far
    count: int = 0  # tokens so far
    hit: int = 0  # tokens of the prompt that were cached
    end: str = ""  # why it ended: stop, length, abort or error
    slot: int = -1
    reason: str = "length"  # why its answer ends
    news: asyncio.Event = field(default_factory=asyncio.Event, repr=False)  # a token, or the end


class SimulatedServer:
    """One server of a fleet, see `SimulatedFleet`.

    The ``profile`` of its description is its card, ``slots`` are the most requests that run, and
    ``options`` may have ``kv_tokens``, ``block_size`` and ``async_scheduling``.
    """

    def __init__(
        self, spec: ServerSpec, faults: Sequence[Fault], speed: float, seed: int, body_bytes: int
    ) -> None:
        self.spec, self.model = spec, spec.model or spec.name
        self.faults, self.speed, self.body_bytes = list(faults), speed, body_bytes
        self._seed = seed
        self._chance = random.Random(f"{seed} {spec.name}")
        try:
            if not spec.profile:
                raise ValueError("profile is missing; servers are simulated by their profiles")
            keywords(_OPTIONS, spec.options)
            self.engine = LiveEngine(
                load(spec.profile),
                max_num_seqs=spec.slots,
                max_num_batched_tokens=spec.batched_tokens,
                **spec.options,
            )
            room = self.engine.capacity * self.engine.block_size
            if spec.context > room:
                raise ValueError(f"context is {spec.context}; the KV memory has {room} tokens")
        except ValueError as error:
            raise ValueError(f"server {spec.name!r}: {error}") from None
        self.metrics = ServerMetrics(self.model, spec.context)
        self.lag_s = 0.0  # how late tokens leave, moving average of wall seconds
        self._open: dict[int, Served] = {}
        self._site = Site(self._app())
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        # When the last request of a connection ended; infinite while there is one.
        self._since: dict[asyncio.Transport | None, float] = {}
        self._count = 0
        self.port = spec.port
        self._started = 0.0
        self._worked = 0.0  # the engine's time when it worked last

    # -- time -----------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Simulated seconds since the fleet's start."""
        return (self._loop.time() - self._started) * self.speed

    def _frozen(self, now: float) -> tuple[float, float]:
        """Seconds for which the engine stood still, and when the present standstill ends."""
        total, until = 0.0, 0.0
        for one in self.faults:
            if one.kind == "freeze" and one.start_s < now:
                total += min(now, one.end_s) - one.start_s
                until = max(until, one.end_s if one.at(now) else 0.0)
        return total, until

    def _work(self) -> None:
        """Let the engine work until now, and hand out its tokens."""
        now = self.now
        engine_now = now - self._frozen(now)[0]
        tokens = self.engine.work(engine_now)
        self._worked = engine_now
        if tokens:
            self._hand_out(tokens)
            late = (engine_now - tokens[-1][0]) / self.speed
            self.lag_s += 0.02 * (late - self.lag_s)

    def _tick(self) -> None:
        self._work()
        self._schedule()

    def _schedule(self) -> None:
        """Call again when the iteration in flight ends."""
        if self._timer is not None:
            self._timer.cancel()
        frozen, until = self._frozen(self.now)
        due = max(self.engine.next_s + frozen, until)
        if due < math.inf:
            self._timer = self._loop.call_at(self._started + due / self.speed, self._tick)

    def _hand_out(self, tokens: Sequence[tuple[float, int, int]]) -> None:
        metrics, scale = self.metrics, 1.0 / self.speed
        for time_s, slot, last in tokens:
            one = self._open[slot]
            one.count += 1
            if one.count == 1:
                record = self.engine.request(slot)
                one.first_s, one.hit = time_s, int(record["hit"])
                metrics.total["prefix_cache_queries"] += one.prompt
                metrics.total["prefix_cache_hits"] += one.hit
                metrics.total["prompt_tokens"] += one.prompt
                metrics.observe(time_to_first_token_seconds=(time_s - one.arrived_s) * scale)
            else:
                gap_s = (time_s - one.last_s) * scale
                metrics.observe(
                    inter_token_latency_seconds=gap_s, time_per_output_token_seconds=gap_s
                )
            one.last_s = time_s
            if last:
                self._end(one, one.reason)
            one.news.set()
        metrics.total["generation_tokens"] += len(tokens)

    def _end(self, one: Served, reason: str) -> None:
        """A request is over; its slot is given back."""
        if one.end:
            return
        one.end = reason
        del self._open[one.slot]
        record = self.engine.request(one.slot)
        metrics, scale = self.metrics, 1.0 / self.speed
        metrics.total["num_preemptions"] += int(record["preemptions"])
        metrics.ended[reason] += 1
        if reason in ("stop", "length"):
            admitted = float(record["admitted"])
            metrics.observe(
                e2e_request_latency_seconds=(one.last_s - one.arrived_s) * scale,
                request_queue_time_seconds=(admitted - one.arrived_s) * scale,
                request_inference_time_seconds=(one.last_s - admitted) * scale,
                request_prefill_time_seconds=(one.first_s - admitted) * scale,
                request_decode_time_seconds=(one.last_s - one.first_s) * scale,
                request_prompt_tokens=one.prompt,
                request_generation_tokens=one.count,
            )
            if one.count > 1:
                each_s = (one.last_s - one.first_s) * scale / (one.count - 1)
                metrics.observe(request_time_per_output_token_seconds=each_s)
            self.engine.release(one.slot)
        else:
            self.engine.abort(one.slot)

    def _hit_by(self, kind: str) -> Fault | None:
        """The failure of this kind that the next request meets, if any."""
        now = self.now
        there = (one for one in self.faults if one.kind == kind and one.at(now))
        return next((one for one in there if self._chance.random() < one.rate), None)

    # -- requests -------------------------------------------------------------------------------

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        came = self.now
        chat = request.path.endswith("/chat/completions")
        try:
            data = await asyncio.wait_for(request.read(), BODY_TIMEOUT_S)
        except TimeoutError:
            return _error(408, f"The body did not come within {BODY_TIMEOUT_S:g} s.")
        except web.RequestPayloadError:
            return _error(400, "The body cannot be decoded.")
        fault = self._hit_by("error")
        if fault is not None:
            return _error(fault.status, "A failure that was asked for with --fail.")
        encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding != "identity":
            data = await asyncio.to_thread(inflate, data, encoding, self.body_bytes)
        body = read_json(data, self.spec.context)
        ask = read_request(body, chat, (self.model, self.spec.name), self.spec.context)
        self._count += 1
        writer = _Writer(f"{self.spec.name}-{self._count}", ask, self.model)
        if self._hit_by("stall") is not None:
            if ask.stream:
                await self._open_stream(request)
            await asyncio.Event().wait()  # until the client hangs up
        if self.engine.full:
            return _error(503, "The server holds as many requests as it can.", retry_s=1)
        text, ids, reason = answer(ask, self._seed)
        cut_after = sys.maxsize
        if self._hit_by("cut") is not None:
            cut_after = self._chance.randint(1, len(text))
        arrived = max(came - self._frozen(came)[0], self._worked)
        one = Served(len(ask.prompt), len(text), arrived, reason=reason)
        one.slot = self.engine.submit(one.arrived_s, ask.prompt, ids, ask.cache_salt)
        self._open[one.slot] = one
        self._schedule()
        try:
            response = await self._open_stream(request) if ask.stream else None
            sent = 0
            while sent < one.count or not one.end:
                if sent == one.count:
                    one.news.clear()
                    await one.news.wait()
                    continue
                first, sent = sent, min(one.count, cut_after)
                if response is not None:
                    await response.write(writer.tokens(text, first, sent, one))
                if sent == cut_after:
                    _break(request)
            if one.end == "error":
                _break(request)
            if response is None:
                headers = {NAMED: self.spec.name}
                return web.json_response(text=writer.whole("".join(text), one), headers=headers)
            await response.write(writer.end(one))
            await response.write_eof()
            return response
        finally:
            if not one.end:  # the client has hung up, or the connection was cut
                self._work()
                self._end(one, "abort")
                self._schedule()

    async def _open_stream(self, request: web.Request) -> web.StreamResponse:
        kind = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers={**kind, NAMED: self.spec.name})
        await response.prepare(request)
        return response

    # -- other pages ----------------------------------------------------------------------------

    async def _models(self, _: web.Request) -> web.Response:
        entry = {
            "id": self.model,
            "object": "model",
            "created": int(self._created),
            "owned_by": "servegym",
            "root": self.model,
            "parent": None,
            "max_model_len": self.spec.context,
        }
        return web.json_response({"object": "list", "data": [entry]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, _: web.Request) -> web.Response:
        self._work()
        text = self.metrics.text(self.engine, self.lag_s)
        kind = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=text.encode(), headers=kind)

    # -- life -----------------------------------------------------------------------------------

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=self.body_bytes, middlewares=[self._around])
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ping", self._health)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def start(self, started: float) -> None:
        """Listen; simulated time began at ``started``, on the clock of the event loop."""
        self._loop = asyncio.get_running_loop()
        self._started, self._created = started, time.time()
        try:
            await self._listen()
        except OSError as error:
            raise ValueError(
                f"server {self.spec.name!r}: port {self.spec.port} of {self.spec.host} cannot be "
                f"used: {error.strerror or error}"
            ) from None
        shut = [self.fail(one) for one in self.faults if one.kind in _SHUT]
        self._tasks = [asyncio.create_task(one) for one in (*shut, self._sweep())]

    @web.middleware
    async def _around(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """A connection with a request is not idle."""
        connection = request.transport
        self._since[connection] = math.inf
        try:
            return await handler(request)
        except BadRequest as error:
            return _error(error.status, str(error), error.param)
        except ConnectionError:  # the client has gone while it was written to
            raise asyncio.CancelledError from None
        finally:
            self._since[connection] = self._loop.time()

    async def _sweep(self) -> None:
        """Close connections whose headers do not come; aiohttp waits for them without end."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self._close_idle(self._loop.time())

    def _close_idle(self, now: float) -> None:
        """Close the connections that have had no request for `HEADERS_S` at a time of the loop."""
        self._since = {one: self._since.get(one, now) for one in self._site.connections}
        for one, begin in self._since.items():
            if one is not None and now - begin > HEADERS_S:
                one.close()

    async def _listen(self) -> None:
        self.port = await self._site.listen(host=self.spec.host, port=self.port, backlog=1024)

    async def fail(self, fault: Fault) -> None:
        """Refuse connections or crash from the failure's begin to its end."""
        await asyncio.sleep(max(0.0, (fault.start_s - self.now) / self.speed))
        self._site.close()
        if fault.kind == "crash":
            self._crash()
        if fault.end_s < math.inf:
            await asyncio.sleep(max(0.0, (fault.end_s - self.now) / self.speed))
            # Another failure may keep it shut.
            now = self.now
            if not any(one.kind in _SHUT and one.at(now) for one in self.faults):
                await self._listen()

    def _crash(self) -> None:
        self._work()
        for one in list(self._open.values()):
            self._end(one, "error")
            one.news.set()
        self.engine.clear()
        self._schedule()
        for connection in self._site.connections:
            connection.abort()

    async def stop(self) -> None:
        """End all requests and stop listening."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        await self._site.stop()

    @property
    def url(self) -> str:
        """The base address of OpenAI's protocol."""
        return self.spec.url(self.port)


class SimulatedFleet:
    """Simulated servers that run as long as an ``async with`` block.

    Args:
        specs: The servers, each with a profile.
        faults: Failures of servers by name, or of all.
        speed: Simulated seconds a second.
        seed: Of answers and failures.
        body_bytes: Largest body of a request.

    Attributes:
        servers: The servers, in the order of ``specs``.

    Raises:
        ValueError: If a description cannot be used, with the server and the field.
    """

    def __init__(
        self,
        specs: Sequence[ServerSpec],
        faults: Sequence[Fault] = (),
        *,
        speed: float = 1.0,
        seed: int = 0,
        body_bytes: int = 4 << 20,
    ) -> None:
        self.speed = real("speed", speed, 0.001, 1000.0)
        whole("body_bytes", body_bytes, 1024)
        self.servers = []
        for spec in specs:
            met = [one for one in faults if one.server in ("", spec.name)]
            self.servers.append(SimulatedServer(spec, met, speed, seed, body_bytes))

    async def __aenter__(self) -> SimulatedFleet:
        started = asyncio.get_running_loop().time()
        try:
            for server in self.servers:
                await server.start(started)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(server.stop() for server in self.servers))


# -- the form of answers -------------------------------------------------------------------------


class _Writer:
    """Answers to one request in OpenAI's form."""

    def __init__(self, name: str, ask: Ask, model: str) -> None:
        self._ask = ask
        kind = "chat.completion" if ask.chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if ask.chat else 'cmpl'}-{name}",
            "object": f"{kind}.chunk" if ask.chat and ask.stream else kind,
            "created": int(time.time()),
            "model": model,
        }
        start = json.dumps(self._head)[:-1] + ', "choices": [{"index": 0, '
        self._start = f"data: {start}"
        self._text = ('"delta": {"content": "', '"}') if ask.chat else ('"text": "', '"')

    def tokens(self, text: Sequence[str], first: int, end: int, one: Served) -> bytes:
        """Events of the tokens from ``first`` to ``end``; generated words need no escapes."""
        before, after = self._text
        head = self._start + before
        rest = ', "logprobs": null, "finish_reason": null}]'
        events = [
            f"{head}{text[k]}{after}{rest}{self._so_far(one, k + 1)}" for k in range(first, end)
        ]
        if first == 0 and self._ask.chat:
            role = '"delta": {"role": "assistant", "content": ""}'
            events.insert(0, self._start + role + rest + self._so_far(one, 0))
        if end == one.output:
            events[-1] = events[-1].replace(
                '"finish_reason": null', f'"finish_reason": "{one.reason}"'
            )
        return "".join(events).encode()

    def _so_far(self, one: Served, count: int) -> str:
        """The end of an event, with the counts of tokens if they were asked for."""
        usage = f', "usage": {json.dumps(_usage(one, count))}' if self._ask.running else ""
        return usage + "}\n\n"

    def end(self, one: Served) -> bytes:
        """What ends a stream."""
        event = b""
        if self._ask.usage:
            data = {**self._head, "choices": [], "usage": _usage(one, one.count)}
            event = f"data: {json.dumps(data)}\n\n".encode()
        return event + b"data: [DONE]\n\n"

    def whole(self, text: str, one: Served) -> str:
        """An answer in one piece."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": one.reason}
        if self._ask.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        return json.dumps({**self._head, "choices": [choice], "usage": _usage(one, one.count)})


def _usage(one: Served, count: int) -> dict[str, Any]:
    return {
        "prompt_tokens": one.prompt,
        "completion_tokens": count,
        "total_tokens": one.prompt + count,
        "prompt_tokens_details": {"cached_tokens": one.hit},
    }


def _break(request: web.Request) -> None:
    """Break the connection in the middle of an answer."""
    if request.transport is not None:
        request.transport.abort()
    raise asyncio.CancelledError


_TYPES = {404: "NotFoundError", 429: "RateLimitError"}


def _error(
    status: int, message: str = "", param: str | None = None, retry_s: int | None = None
) -> web.Response:
    """An error in OpenAI's form; without a message it has the name of its status."""
    message = message or HTTPStatus(status).phrase
    kind = _TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return web.json_response(
        {"error": {"message": message, "type": kind, "param": param, "code": status}},
        status=status,
        headers={} if retry_s is None else {"Retry-After": str(retry_s)},
    )
