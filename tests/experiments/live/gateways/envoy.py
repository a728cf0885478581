"""What Envoy says to an Endpoint Picker about one request."""

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

DUPLEX = BodyMode.FULL_DUPLEX_STREAMED


@dataclass
class Picked:
    """What the picker has answered; the body is the request's, sent back."""

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
    """One request of a client at the gateway, a stream of gRPC."""

    def __init__(self, channel: Any, answers: BodyMode = DUPLEX, requests: BodyMode = DUPLEX):
        self.modes = {"request_body_mode": requests, "response_body_mode": answers}
        self.call = channel.stream_stream(
            f"/{SERVICE}/Process",
            request_serializer=bytes,
            response_deserializer=ProcessingResponse.parse,
        )()

    async def say(self, **parts: Any) -> None:
        await self.call.write(ProcessingRequest(**parts))

    async def told(self, **parts: Any) -> ProcessingResponse:
        """Say something, and hear the answer."""
        await self.say(**parts)
        return await self.call.read()

    async def ask(
        self, body: bytes, *, subset: Any = None, trailers: bool = False, pieces: int = 1
    ) -> Picked:
        """Send headers and body of a request and take what the picker says until its end."""
        headers = _map({":path": "/v1/chat/completions", "content-type": "application/json"})
        headers.end_of_stream = not body
        await self.say(
            request_headers=headers,
            protocol_config=ProtocolConfiguration(**self.modes),
            metadata_context=_metadata(SUBSET, f"{DESTINATION}-subset", subset),
        )
        size = -(-len(body) // pieces) or 1
        for k in range(0, len(body), size):
            last = k + size >= len(body) and not trailers
            await self.say(request_body=HttpBody(body=body[k : k + size], end_of_stream=last))
        if trailers:
            await self.say(request_trailers=HttpTrailers())
        picked = Picked()
        while not self._take(picked, await self.call.read()):
            if picked.endpoints and len(picked.body) >= len(body) and not trailers:
                break
        return picked

    def _take(self, picked: Picked, response: ProcessingResponse) -> bool:
        """Whether nothing follows."""
        refused = response.immediate_response
        if refused is not None:
            picked.status, picked.body = int(refused.status.code), refused.body
            mutation = refused.headers
        else:
            part = response.request_headers or response.request_body
            common = part.response if part is not None else None
            mutation = common.header_mutation if common is not None else None
            if common is not None and common.body_mutation is not None:
                picked.body += common.body_mutation.streamed_response.body
        for one in mutation.set_headers if mutation is not None else ():
            picked.headers[one.header.key] = one.header.raw_value.decode()
        if response.dynamic_metadata is not None:
            picked.metadata = response.dynamic_metadata.to_dict()
        if refused is None and DESTINATION in picked.headers:
            picked.endpoints = picked.headers[DESTINATION].split(",")
        return refused is not None or response.request_trailers is not None

    async def status(
        self,
        status: int = 200,
        *,
        kind: str = "text/event-stream",
        served: str | None = None,
        last: bool = False,
        **more: str,
    ) -> None:
        """The headers of the answer."""
        headers = _map({":status": str(status), "content-type": kind, **more})
        headers.end_of_stream = last
        found = await self.told(
            response_headers=headers,
            metadata_context=_metadata(NAMESPACE, f"{DESTINATION}-served", served),
        )
        assert found.response_headers is not None

    async def part(self, data: bytes, *, last: bool = False) -> bytes | None:
        """A piece of the answer's body; what the picker sends back of it in full duplex."""
        found = await self.told(response_body=HttpBody(body=data, end_of_stream=last))
        common = found.response_body.response
        return None if common is None else common.body_mutation.streamed_response.body

    async def trailers(self) -> None:
        """The answer's trailers."""
        assert (await self.told(response_trailers=HttpTrailers())).response_trailers is not None

    async def close(self) -> None:
        """The gateway ends the stream, since nothing follows."""
        await self.call.done_writing()
        while isinstance(await self.call.read(), ProcessingResponse):
            pass
