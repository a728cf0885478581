"""An application of Ray Serve in which a policy routes requests of OpenAI's protocol to servers.

Before the servers stands one deployment with a replica for each, which passes requests on; the
policy chooses among these replicas (:mod:`~servegym.experiments.real.plugins.ray_serve`). A second
deployment takes the requests over HTTP. It has one replica: each would have a router of its own,
which sees its own requests alone. ``GET /servegym`` gives the router's counters.

The router is told of the tokens and of the end of each answer. If a server does not answer, or
answers with a status of 500 or more, the request is routed anew, up to twice, since nothing of an
answer has been passed on.
"""

# Ray is not installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

try:
    import aiohttp
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.config import HTTPOptions, RequestRouterConfig
    from ray.serve.exceptions import BackPressureError
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error.name} is not installed; pip install 'ray[serve]' 'serve-gym[real]'",
        name=error.name,
    ) from error

from servegym.experiments.real.fleet_file import Endpoint
from servegym.experiments.real.gateway import GatewayRouter
from servegym.experiments.real.plugins.gate import Answer, Ticket, fleet_arguments
from servegym.experiments.real.plugins.ray_serve import EXPERT, PolicyRequestRouter, status, ticket

__all__ = ["application", "run"]

PATHS = ("/v1/completions", "/v1/chat/completions")
ATTEMPTS = 3
MAX_BODY_BYTES = 4 << 20
AT_A_TIME = 4096
"""Requests that Ray lets in: who is refused before that is for the policy to say."""


class Server:
    """A replica: passes requests on to the server that has its rank.

    Args:
        servers: Name and base address of each.
    """

    def __init__(self, servers: Sequence[tuple[str, str]]) -> None:
        rank = serve.get_replica_context().rank
        self.expert = int(getattr(rank, "rank", rank))
        self.name, self.url = servers[self.expert]
        self._session: aiohttp.ClientSession | None = None

    def record_routing_stats(self) -> dict[str, Any]:
        """See Ray: tells the router which expert this is."""
        return {EXPERT: self.expert}

    async def __call__(
        self, body: Mapping[str, Any], path: str, *, name: str
    ) -> AsyncIterator[Any]:
        """Status and content type of the answer, then its bytes."""
        if self._session is None:
            limits = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(timeout=limits, connector=connector)
        url = self.url.removesuffix("/v1") + path
        try:
            async with self._session.post(url, json={**body, "model": self.name}) as response:
                yield response.status, response.content_type
                async for part in response.content.iter_any():
                    yield part
        except aiohttp.ClientConnectorError as error:
            yield 502, "application/json"
            yield _error(f"server {self.name!r} does not answer: {error.strerror}")


class Gateway:
    """Takes requests over HTTP and passes them to the deployment of the servers.

    Args:
        servers: Handle of that deployment.
    """

    def __init__(self, servers: Any) -> None:
        self._servers = servers.options(stream=True)
        self._numbers = itertools.count()

    async def __call__(self, request: Request) -> Response:
        """Answer a request of HTTP."""
        path = request.url.path
        if request.method == "GET" and path == "/health":
            return Response()
        if request.method == "GET" and path == "/servegym":
            return JSONResponse(status())
        if request.method != "POST" or path not in PATHS:
            return _refused(404, f"{request.method} {path} is not served; POST {PATHS}")
        sent = bytearray()
        async for part in request.stream():
            sent += part
            if len(sent) > MAX_BODY_BYTES:
                return _refused(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        try:
            body = json.loads(sent)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return _refused(400, "the body must be an object of JSON")
        return await self._pass_on(body, path)

    async def _pass_on(self, body: Mapping[str, Any], path: str) -> Response:
        for left in reversed(range(ATTEMPTS)):
            name = f"{next(self._numbers)}"
            parts = self._servers.remote(body, path, name=name)
            try:
                code, kind = await anext(parts)
            except BackPressureError as refused:
                again = getattr(refused, "retry_after_s", None) or 1.0
                return _refused(429, "refused by the policy", {"Retry-After": f"{again:g}"})
            except (aiohttp.ClientError, RayError) as error:
                _told(name, Ticket.failed)
                if not left:
                    return _refused(502, f"no server answers: {error}")
                continue
            except asyncio.CancelledError:
                parts.cancel()
                _told(name, Ticket.left)
                raise
            sent = ticket(name)
            assert sent is not None
            if code >= 500:
                sent.failed()
                if left:
                    parts.cancel()
                    continue
            elif code >= 400:
                sent.left()
            return StreamingResponse(_passed_on(parts, sent, kind), code, media_type=kind)
        raise AssertionError


async def _passed_on(parts: Any, sent: Ticket, kind: str) -> AsyncIterator[bytes]:
    """The bytes of an answer, of which the ticket is told; it breaks off if its server dies."""
    answer = Answer(sent, kind == "text/event-stream")
    try:
        async for part in parts:
            answer.feed(part)
            yield part
        sent.finished()
    except (aiohttp.ClientError, RayError):
        sent.failed()
        raise
    finally:
        sent.left()  # the client has hung up, if the request has not ended yet
        parts.cancel()


def _told(name: str, event: Callable[[Ticket], None]) -> None:
    sent = ticket(name)  # none, if the request was not routed
    if sent is not None:
        event(sent)


def _error(message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "servegym"}}).encode()


def _refused(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_error(message), status, headers, media_type="application/json")


def application(
    servers: Sequence[Endpoint], policy: str, *, trusted: bool = False, **settings: Any
) -> Any:
    """The application, for ``serve.run``.

    Args:
        servers: The experts, each with a profile.
        policy: Name of a policy, or a checkpoint.
        trusted: Whether clients' predictions in the metadata of requests are taken.
        **settings: Arguments of the environment, which win.

    Raises:
        ValueError: If the fleet or the policy cannot be used.
        TypeError: If the environment has no such argument.
    """
    fleet = fleet_arguments(servers, **settings)
    GatewayRouter(fleet, policy).close()  # refused here, not in a replica
    names = [one.name for one in servers]
    routing = RequestRouterConfig(
        request_router_class=PolicyRequestRouter,
        request_router_kwargs={
            "fleet": fleet,
            "policy": policy,
            "trust_metadata": trusted,
            "told": True,
            "names": names,
        },
        request_routing_stats_period_s=1.0,
    )
    deployed = serve.deployment(Server).options(
        num_replicas=len(servers),
        max_ongoing_requests=AT_A_TIME,
        ray_actor_options={"num_cpus": 0},
        request_router_config=routing,
    )
    gateway = serve.deployment(Gateway).options(
        num_replicas=1, max_ongoing_requests=AT_A_TIME, ray_actor_options={"num_cpus": 0}
    )
    return gateway.bind(deployed.bind([(one.name, one.url) for one in servers]))


def run(app: Any, host: str, port: int) -> None:
    """Serve an application until SIGINT or SIGTERM.

    Args:
        app: Of `application`.
        host: Address to listen on.
        port: Port.
    """
    serve.start(http_options=HTTPOptions(host=host, port=port))
    serve.run(app)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # Ray has taken them when it started
        signal.signal(number, lambda *_: ended.set())
    print(f"gateway at http://{host}:{port}/v1; counters at /servegym", flush=True)
    try:
        ended.wait()
    finally:
        serve.shutdown()
