"""What Envoy says to an Endpoint Picker about one request, for tests and measurements."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from envoy_data_plane.envoy.config.core.v3 import HeaderMap, HeaderValue, Metadata
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ProcessingModeBodySendMode as BodyMode,
)
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from envoy_data_plane.google.protobuf import Struct

from servegym.experiments.live.gateways.endpoint_picker import (
    DESTINATION,
    NAMESPACE,
    SERVICE,
    SUBSET,
)

__all__ = ["BodyMode", "Exchange", "Picked"]


@dataclass
class Picked:
    """What the picker has answered.

    Attributes:
        endpoints: The chosen endpoint and those to try after it; empty if refused.
        status: 200, or the status of the refusal.
        headers: Headers that it sets.
        body: Of the refusal, or in full duplex the request's, sent back.
        metadata: Dynamic metadata.
    """

    endpoints: list[str] = field(default_factory=list)
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    metadata: dict[str, Any] = field(default_factory=dict)


def _map(pairs: dict[str, str]) -> HttpHeaders:
    values = [HeaderValue(key=key, raw_value=value.encode()) for key, value in pairs.items()]
    return HttpHeaders(headers=HeaderMap(headers=values))


def _metadata(space: str, key: str, value: Any) -> Metadata | None:
    if value is None:
        return None
    return Metadata(filter_metadata={space: Struct.from_dict({key: value})})


class Exchange:
    """One request of a client at the gateway, a stream of gRPC.

    Args:
        channel: Of ``grpc.aio``.
        mode: How bodies are sent.
    """

    def __init__(self, channel: Any, mode: BodyMode = BodyMode.FULL_DUPLEX_STREAMED) -> None:
        self._mode = mode
        self._call = channel.stream_stream(
            f"/{SERVICE}/Process",
            request_serializer=bytes,
            response_deserializer=ProcessingResponse.parse,
        )()

    async def _say(self, **parts: Any) -> None:
        await self._call.write(ProcessingRequest(**parts))

    async def _hear(self) -> ProcessingResponse:
        found = await self._call.read()
        if not isinstance(found, ProcessingResponse):
            raise ConnectionError("the picker has ended the stream")
        return found

    async def ask(
        self, body: bytes, *, subset: Any = None, trailers: bool = False, pieces: int = 1
    ) -> Picked:
        """Send headers and body of a request and take what the picker says until its end."""
        duplex = self._mode == BodyMode.FULL_DUPLEX_STREAMED
        headers = _map({":method": "POST", "content-type": "application/json"})
        headers.end_of_stream = not body
        picked = Picked()
        protocol = ProtocolConfiguration(
            request_body_mode=self._mode, response_body_mode=self._mode
        )
        await self._say(
            request_headers=headers,
            protocol_config=protocol,
            metadata_context=_metadata(SUBSET, f"{DESTINATION}-subset", subset),
        )
        if not body or not duplex:
            if self._take(picked, await self._hear()) or not body or self._mode == BodyMode.NONE:
                return picked
        size = -(-len(body) // pieces)
        for k in range(0, len(body), size):
            last = k + size >= len(body) and not trailers
            await self._say(request_body=HttpBody(body=body[k : k + size], end_of_stream=last))
        if trailers:
            await self._say(request_trailers=HttpTrailers())
        while not self._take(picked, await self._hear()):
            if picked.endpoints and (not duplex or len(picked.body) >= len(body)) and not trailers:
                break
        return picked

    def _take(self, picked: Picked, response: ProcessingResponse) -> bool:
        """Whether nothing follows."""
        refused = response.immediate_response
        if refused is not None:
            picked.status = int(refused.status.code) if refused.status is not None else 200
            picked.body, picked.endpoints = refused.body, []
            mutation = refused.headers
        else:
            part = response.request_headers or response.request_body
            common = part.response if part is not None else None
            mutation = common.header_mutation if common is not None else None
            streamed = (
                common.body_mutation.streamed_response
                if common is not None and common.body_mutation is not None
                else None
            )
            picked.body += streamed.body if streamed is not None else b""
        for one in mutation.set_headers if mutation is not None else ():
            if one.header is not None:
                picked.headers[one.header.key] = one.header.raw_value.decode()
        if response.dynamic_metadata is not None:
            picked.metadata = response.dynamic_metadata.to_dict()
        if refused is None and DESTINATION in picked.headers:
            picked.endpoints = picked.headers[DESTINATION].split(",")
        return refused is not None or response.request_trailers is not None

    async def status(
        self, status: int = 200, *, kind: str = "text/event-stream", served: str | None = None
    ) -> None:
        """The headers of the answer."""
        await self._say(
            response_headers=_map({":status": str(status), "content-type": kind}),
            metadata_context=_metadata(NAMESPACE, f"{DESTINATION}-served", served),
        )
        assert (await self._hear()).response_headers is not None

    async def part(self, data: bytes, *, last: bool = False) -> bytes | None:
        """A piece of the answer's body; what the picker sends back of it in full duplex."""
        await self._say(response_body=HttpBody(body=data, end_of_stream=last))
        found = (await self._hear()).response_body
        assert found is not None
        mutation = found.response.body_mutation if found.response is not None else None
        sent = mutation.streamed_response if mutation is not None else None
        return None if sent is None else sent.body

    async def trailers(self) -> None:
        """The answer's trailers."""
        await self._say(response_trailers=HttpTrailers())
        assert (await self._hear()).response_trailers is not None

    async def close(self) -> None:
        """The gateway ends the stream, since nothing follows."""
        await self._call.done_writing()
        while isinstance(await self._call.read(), ProcessingResponse):
            pass

    def cancel(self) -> None:
        """The gateway breaks the stream off, since its client has hung up."""
        self._call.cancel()
