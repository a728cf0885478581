"""A policy as Endpoint Picker of the Gateway API inference extension: Envoy's ext-proc over gRPC.

A request is answered with ``x-gateway-destination-endpoint``, as a header and in the dynamic
metadata ``envoy.lb``, or with status 429 if the policy drops it, 503 if no endpoint may have it.
Bodies come in full duplex; an answer that is not shown to the picker counts as finished at its end.
Protocol: https://github.com/kubernetes-sigs/gateway-api-inference-extension, proposal 004, v1.0.0.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from servegym._checks import http_url
from servegym._command_line import install_line

try:
    import grpc
    from envoy_data_plane.envoy.config.core import v3 as core
    from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
        ProcessingModeBodySendMode as BodyMode,
    )
    from envoy_data_plane.envoy.service.ext_proc import v3 as ext_proc
    from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode
    from envoy_data_plane.google.protobuf import Struct
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error.name} is not installed; {install_line('gateways')}", name=error.name
    ) from error

from servegym.experiments.live.gateways.gate import REFUSED, RETRY_AFTER_S, Answer, Gate, Ticket
from servegym.hardware_profiles.measure.openai_protocol import read_json

Reply = ext_proc.ProcessingResponse
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
DESTINATION = "x-gateway-destination-endpoint"
NAMESPACE, SUBSET = "envoy.lb", "envoy.lb.subset_hint"
CHUNK_BYTES = 60_000
"""Of a body that is sent back in full duplex; Envoy takes up to 64 KiB at a time."""
MAX_BODY_BYTES = 16 << 20
SLACK_BYTES = 1 << 20
"""Of a message of gRPC beyond the body, so that a body that is too long is answered with 413."""
LOG_EVERY_S = 60.0
MESSAGES = ("request_headers", "request_body", "request_trailers")
MESSAGES += ("response_headers", "response_body", "response_trailers")
# grpc.health.v1.HealthCheckResponse
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"


def address(url: str) -> str:
    """``ip:port`` of a server's URL; a ValueError names one that has none."""
    parts = http_url("url", url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        host = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise ValueError(f"url {url!r}: {parts.hostname} has no address: {error}") from None
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def _text(headers: core.HeaderMap | None, name: str) -> str:
    for one in headers.headers if headers is not None else ():
        if one.key.lower() == name:
            return one.value or one.raw_value.decode("latin-1")
    return ""


def _entry(metadata: core.Metadata | None, space: str, key: str) -> Any:
    """An entry of a request's metadata, None without it."""
    entries = metadata.filter_metadata.get(space) if metadata is not None else None
    return None if entries is None else entries.to_dict().get(key)


def _set(name: str, value: str) -> core.HeaderValueOption:
    return core.HeaderValueOption(
        header=core.HeaderValue(key=name, raw_value=value.encode()),
        append_action=core.HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
    )


class _Refusal(Exception):
    """A request is answered by the picker itself; `response` says how."""

    def __init__(self, status: StatusCode, why: str, retry_after_s: int | None = None) -> None:
        super().__init__(why)
        error = {"message": why, "type": "servegym", "param": None, "code": int(status)}
        headers = [_set("content-type", "application/json")]
        if retry_after_s is not None:
            headers.append(_set("retry-after", str(retry_after_s)))
        self.response = Reply(
            immediate_response=ext_proc.ImmediateResponse(
                status=HttpStatus(code=status),
                headers=ext_proc.HeaderMutation(set_headers=headers),
                body=json.dumps({"error": error}).encode(),
                details="servegym",
            )
        )


def _piece(body: bytes, last: bool) -> ext_proc.BodyResponse:
    sent = ext_proc.StreamedBodyResponse(body=body, end_of_stream=last)
    mutation = ext_proc.BodyMutation(streamed_response=sent)
    return ext_proc.BodyResponse(response=ext_proc.CommonResponse(body_mutation=mutation))


def _headers(endpoints: str) -> Reply:
    """The endpoints as a header, and once more as dynamic metadata."""
    mutation = ext_proc.HeaderMutation(set_headers=[_set(DESTINATION, endpoints)])
    routed = ext_proc.CommonResponse(header_mutation=mutation, clear_route_cache=True)
    return Reply(
        request_headers=ext_proc.HeadersResponse(response=routed),
        dynamic_metadata=Struct.from_dict({NAMESPACE: {DESTINATION: endpoints}}),
    )


class EndpointPicker:
    """The ext-proc service of a gate.

    The endpoints after the chosen one are named too, least load first, for gateways that try again
    by themselves.

    Args:
        gate: The gate.
        endpoints: ``ip:port`` of the experts, in their order, one for each and none twice.
    """

    def __init__(self, gate: Gate, endpoints: Sequence[str]) -> None:
        self.gate, self.endpoints = gate, list(endpoints)
        self.stopping = False

    @property
    def healthy(self) -> bool:
        """Whether requests may come: it does not end, and any server answers."""
        return not self.stopping and self.gate.breakers.answering(self.gate.router.clock())

    async def process(
        self, requests: AsyncIterator[ext_proc.ProcessingRequest], context: Any = None
    ) -> AsyncIterator[Reply]:
        """One request of a client, from its headers to the end of its answer."""
        exchange = _Exchange(self.gate, self.endpoints)
        try:
            async for message in requests:
                for reply in exchange.replies(message):
                    yield reply
            exchange.end()
        except _Refusal as refusal:
            yield refusal.response
        finally:
            if exchange.ticket is not None:
                # The client has hung up, or the server has died in its answer.
                exchange.ticket.end("left" if exchange.answer is None else "broken")


class _Exchange:
    """What is known of one request of a client; its methods answer the messages of their names."""

    def __init__(self, gate: Gate, endpoints: Sequence[str]) -> None:
        self.gate, self.endpoints = gate, endpoints
        self.ticket: Ticket | None = None
        self.answer: Answer | None = None
        self.body = bytearray()
        self.duplex = True  # whether the picker sends back what it is shown of the answer
        self.subset: Any = None  # of the endpoints, as the gateway names it
        self.served: Any = None  # the endpoint that has answered, where the gateway says so
        self.completion = False  # whether the answer must have tokens
        self.good = True  # the answer's status

    def replies(self, message: ext_proc.ProcessingRequest) -> Iterator[Reply]:
        """What the gateway is told after a message."""
        modes = message.protocol_config
        if modes is not None:
            if modes.request_body_mode != BodyMode.FULL_DUPLEX_STREAMED:
                why = "request_body_mode must be FULL_DUPLEX_STREAMED"
                raise _Refusal(StatusCode.InternalServerError, why)
            self.duplex = modes.response_body_mode == BodyMode.FULL_DUPLEX_STREAMED
        listed = _entry(message.metadata_context, SUBSET, f"{DESTINATION}-subset")
        self.subset = self.subset if listed is None else listed
        self.served = _entry(message.metadata_context, NAMESPACE, f"{DESTINATION}-served")
        parts = {name: getattr(message, name) for name in MESSAGES}
        for name in [name for name, part in parts.items() if part is not None]:
            yield from getattr(self, name)(parts[name])

    def request_headers(self, part: ext_proc.HttpHeaders) -> Iterator[Reply]:
        path = _text(part.headers, ":path")
        self.completion = path.partition("?")[0].endswith("/completions")
        if part.end_of_stream:
            # Such as a list of models: to the least load, and not counted.
            yield _headers(self._named(self._ranked(self._allowed())))

    def request_body(self, part: ext_proc.HttpBody) -> Iterator[Reply]:
        self.body += part.body
        if len(self.body) > MAX_BODY_BYTES:
            why = f"the body is longer than {MAX_BODY_BYTES} bytes"
            raise _Refusal(StatusCode.PayloadTooLarge, why)
        if part.end_of_stream:
            yield from self._sent(last=True)

    def request_trailers(self, part: ext_proc.HttpTrailers) -> Iterator[Reply]:
        yield from self._sent(last=False)
        yield Reply(request_trailers=ext_proc.TrailersResponse())

    def _sent(self, last: bool) -> Iterator[Reply]:
        """The headers, then the whole body in pieces; ``last`` unless trailers follow it."""
        yield _headers(self._pick(_json(self.body)))
        for k in range(0, max(len(self.body), 1), CHUNK_BYTES):
            end = k + CHUNK_BYTES
            piece = _piece(bytes(self.body[k:end]), last and end >= len(self.body))
            yield Reply(request_body=piece)

    def response_headers(self, part: ext_proc.HttpHeaders) -> Iterator[Reply]:
        if self.ticket is not None:
            if self.served in self.endpoints:
                self.ticket.moved(self.endpoints.index(self.served))
            status = _text(part.headers, ":status")[:3]
            self.good = status in ("", "200") or ("200" < status < "300")
            if not self.good:
                waits = bool(_text(part.headers, "retry-after"))
                self.ticket.refused(int(status) if status.isdecimal() else 0, retry_after=waits)
            encoded = _text(part.headers, "content-encoding") not in ("", "identity")
            kind = _text(part.headers, "content-type")
            self.answer = Answer(self.ticket, kind, encoded=encoded)
            if self.good and part.end_of_stream:
                self.answer.end()
        yield Reply(response_headers=ext_proc.HeadersResponse())

    def response_body(self, part: ext_proc.HttpBody) -> Iterator[Reply]:
        if self.answer is not None:
            self.answer.feed(part.body)
            if part.end_of_stream or self.answer.done:
                self.answer.end()
        piece = _piece(part.body, part.end_of_stream) if self.duplex else ext_proc.BodyResponse()
        yield Reply(response_body=piece)

    def response_trailers(self, part: ext_proc.HttpTrailers) -> Iterator[Reply]:
        if self.answer is not None:
            self.answer.end()
        yield Reply(response_trailers=ext_proc.TrailersResponse())

    def end(self) -> None:
        """The gateway has said all: it does not show this body, or not all of it."""
        if self.ticket is not None and self.answer is not None and self.good and not self.duplex:
            self.ticket.end("finished")

    def _pick(self, body: Mapping[str, Any]) -> str:
        """Decide where the request goes: the endpoints, the chosen one first."""
        allowed = self._allowed()
        ticket = self.gate.enter(body, allowed=allowed, completion=self.completion)
        if ticket.expert < 0:
            raise _Refusal(StatusCode.TooManyRequests, REFUSED, RETRY_AFTER_S)
        self.ticket = ticket
        others = [k for k in self._ranked(allowed) if k != ticket.expert]
        return self._named([ticket.expert, *others])

    def _named(self, experts: Sequence[int]) -> str:
        return ",".join(self.endpoints[k] for k in experts)

    def _allowed(self) -> list[bool]:
        """Which endpoints the gateway lets the request go to: all unless it names a subset."""
        if self.subset is None:
            return [True] * len(self.endpoints)
        listed = self.subset.split(",") if isinstance(self.subset, str) else self.subset
        allowed = [one in listed for one in self.endpoints]
        if not any(allowed):
            raise _Refusal(StatusCode.ServiceUnavailable, "no endpoint is ready")
        return allowed

    def _ranked(self, allowed: Sequence[bool]) -> list[int]:
        """The endpoints that a request may go to: those that fail last, else by their load."""
        load, able = self.gate.router.load(), self.gate.able(allowed)
        may = [k for k, one in enumerate(allowed) if one]
        return sorted(may, key=lambda k: (not able[k], int(load[k])))


def _json(body: bytearray) -> Mapping[str, Any]:
    """The body of a request; what is no JSON object is the server's to refuse.

    One of very many elements would hold the other streams while it is read: only its length counts.
    """
    try:
        request = read_json(body)
    except OverflowError:
        return {"prompt": "." * len(body)}
    except ValueError:
        return {}
    return request if isinstance(request, dict) else {}


async def start(picker: EndpointPicker, host: str, port: int) -> tuple[Any, int]:
    """Serve a picker, and ``grpc.health.v1.Health/Check``; the server of ``grpc.aio`` and its port.

    The check says whether any server answers, and of the service ``liveness`` only that the process
    does. Port 0 takes a free one; a ValueError names one that cannot be used.
    """

    async def check(request: bytes, context: Any) -> bytes:
        return _SERVING if picker.healthy or request[2:] == b"liveness" else _NOT_SERVING

    most = MAX_BODY_BYTES + SLACK_BYTES
    # Without SO_REUSEPORT a second picker on the port is refused, and takes no half of the streams.
    options = [("grpc.max_receive_message_length", most), ("grpc.so_reuseport", 0)]
    server = grpc.aio.server(options=options)
    process = grpc.stream_stream_rpc_method_handler(
        picker.process,
        request_deserializer=ext_proc.ProcessingRequest.parse,
        response_serializer=bytes,
    )
    health = grpc.unary_unary_rpc_method_handler(check)
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(SERVICE, {"Process": process}),
            grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": health}),
        )
    )
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise ValueError(f"port {port} of {host} cannot be used: {error}") from None
    await server.start()
    return server, bound


def run(gate: Gate, urls: Sequence[str], host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM; the counters are logged every minute and at the end."""
    picker = EndpointPicker(gate, [address(url) for url in urls])
    log = logging.getLogger("servegym.endpoint_picker")
    logging.basicConfig(format="%(message)s", level=logging.INFO)

    async def serve() -> None:
        server, bound = await start(picker, host, port)
        log.info("endpoint picker at %s:%d: %s", host, bound, ", ".join(picker.endpoints))
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), LOG_EVERY_S)
            log.info("%s", json.dumps(gate.status()))
        picker.stopping = True
        await server.stop(grace=1.0)

    asyncio.run(serve())
    gate.router.close()
