"""The Endpoint Picker as a gateway meets it over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re

import numpy as np
import pytest

pytest.importorskip("envoy_data_plane")
grpc = pytest.importorskip("grpc")

from servegym.baselines.registry import from_callable  # noqa: E402
from servegym.experiments.live.gateway import GatewayRouter  # noqa: E402
from servegym.experiments.live.gateways import endpoint_picker  # noqa: E402
from servegym.experiments.live.gateways.endpoint_picker import (  # noqa: E402
    EndpointPicker,
    address,
    start,
)
from servegym.experiments.live.gateways.gate import Gate  # noqa: E402

from .envoy import BodyMode, Exchange  # noqa: E402

ENDPOINTS = [f"10.0.0.{k}:8000" for k in range(1, 7)]
BODY = json.dumps({"model": "llm", "prompt": "hello there", "max_tokens": 5}).encode()
TOKEN = b'data: {"choices": [{"delta": {"content": "w"}}]}\n\n'
LAST = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"
WHOLE = b'{"choices": [{"text": "w"}]}'


def first(observation, mask):
    return 1 + mask[:, 1:].argmax(axis=1)


def picking(scenario, act=first):
    """Run ``scenario(gate, channel)`` before a picker."""

    async def run():
        gate = Gate(GatewayRouter({}, from_callable(act, "mine"), budget_s=None))
        server, port = await start(EndpointPicker(gate, ENDPOINTS), "127.0.0.1", 0)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(server.stop, None)
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
            await scenario(gate, await stack.enter_async_context(channel))

    asyncio.run(run())


def counts(gate):
    made = gate.router.counters
    return made.finished, made.failed, gate.status()["in_flight"]


async def until(gate, wanted):
    while counts(gate) != wanted:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("trailers", [False, True])
@pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "STREAMED"])
def test_one_request_from_its_headers_to_its_end(mode, trailers):
    """``mode`` is that of the answer's body."""

    async def scenario(gate, channel):
        exchange = Exchange(channel, BodyMode[mode])
        picked = await exchange.ask(BODY, trailers=trailers, pieces=3)
        assert picked.endpoints == ENDPOINTS and picked.body == BODY
        listed = ",".join(ENDPOINTS)
        assert picked.metadata == {"envoy.lb": {"x-gateway-destination-endpoint": listed}}
        assert gate.router.load().tolist() == [1, 0, 0, 0, 0, 0]
        await exchange.status()
        for part in (TOKEN[:9], TOKEN[9:] + TOKEN, TOKEN + LAST):
            sent = await exchange.part(part)
            assert sent == (part if mode == "FULL_DUPLEX_STREAMED" else None)
        assert gate.router.queues()[0][0][0].generated == 3
        assert counts(gate) == (0, 0, 1)
        if trailers:
            await exchange.trailers()
        else:
            await exchange.part(b"", last=True)
        assert counts(gate) == (1, 0, 0)
        await exchange.close()
        assert counts(gate) == (1, 0, 0)

    picking(scenario)


def test_bodies_that_are_long_without_end_hidden_or_missing(monkeypatch):
    monkeypatch.setattr(endpoint_picker, "MAX_BODY_BYTES", 300_000)

    async def scenario(gate, channel):
        exchange = Exchange(channel, BodyMode.NONE)  # the gateway does not show answers
        assert (await exchange.ask(BODY)).endpoints == ENDPOINTS
        await exchange.status()
        await exchange.close()
        await until(gate, (1, 0, 0))
        body = json.dumps({"prompt": "x" * 200_001}).encode()
        exchange = Exchange(channel)
        assert (await exchange.ask(body, pieces=4)).body == body  # in pieces that Envoy takes
        assert (await Exchange(channel).ask(2 * body, pieces=2)).status == 413
        buffered = Exchange(channel, requests=BodyMode.BUFFERED)
        assert b"must be FULL_DUPLEX_STREAMED" in (await buffered.ask(b"")).body
        # Such as a list of models: to the least load, and not counted.
        assert (await Exchange(channel).ask(b"")).endpoints[0] == ENDPOINTS[1]
        assert gate.router.counters.decisions == 2

    picking(scenario)


def test_a_drop_is_429_with_retry_after():
    async def scenario(gate, channel):
        picked = await Exchange(channel).ask(BODY)
        assert (picked.status, picked.endpoints) == (429, [])
        assert picked.headers["retry-after"] == "1"
        error = json.loads(picked.body)["error"]
        assert error["code"] == 429 and set(error) == {"message", "type", "param", "code"}
        assert counts(gate) == (0, 0, 0) and gate.router.counters.drops == 1

    picking(scenario, lambda seen, mask: np.zeros(len(mask), np.int64))


def test_only_endpoints_of_the_subset_are_chosen():
    async def scenario(gate, channel):
        subset = [ENDPOINTS[4], ENDPOINTS[2]]
        assert (await Exchange(channel).ask(BODY, subset=subset)).endpoints == subset[::-1]
        listed = ",".join(subset)
        assert (await Exchange(channel).ask(BODY, subset=listed)).endpoints[0] == subset[1]
        for nothing in ([], ["10.9.9.9:1"]):
            assert (await Exchange(channel).ask(BODY, subset=nothing)).status == 503
        for _ in range(4):  # it is left alone for a while
            gate.enter({}, allowed=[k == 2 for k in range(6)]).end("failed")
        assert (await Exchange(channel).ask(BODY, subset=subset)).endpoints[0] == subset[0]

    picking(scenario)


@pytest.mark.parametrize("body", [b"no json", b"[1, 2]", b'{"messages": 7, "max_tokens": "x"}'])
def test_what_is_no_request_is_left_to_the_server(body):
    async def scenario(gate, channel):
        exchange = Exchange(channel)
        assert (await exchange.ask(body)).endpoints[0] == ENDPOINTS[0]
        await exchange.status(400, kind="application/json")
        assert counts(gate) == (0, 1, 0)
        assert gate.status()["server_failures"] == 0

    picking(scenario)


def test_failures_of_servers_and_clients_that_leave():
    async def scenario(gate, channel):
        exchange = Exchange(channel)
        await exchange.ask(BODY)
        await exchange.status(503)
        await exchange.part(b"upstream connect error", last=True)
        assert counts(gate) == (0, 1, 0)
        exchange = Exchange(channel)
        assert (await exchange.ask(BODY)).endpoints[0] == ENDPOINTS[0]
        await exchange.status()
        await exchange.part(TOKEN)
        exchange.call.cancel()
        await until(gate, (0, 2, 0))
        # Whether the client or the server broke it off cannot be seen; the breaker counts it.
        assert [one["failed"] for one in gate.status()["experts"]][:2] == [2, 0]
        exchange = Exchange(channel)
        await exchange.ask(BODY)
        await exchange.close()
        await until(gate, (0, 3, 0))
        assert gate.status()["server_failures"] == 1

    picking(scenario)


JSON, EVENTS = "application/json; charset=utf-8", "text/event-stream"
EMPTY = b'{"choices": [{"message": {"content": ""}, "finish_reason": "stop"}]}'


@pytest.mark.parametrize(
    ("status", "kind", "parts", "blamed"),
    [
        (302, JSON, [b"{}"], True),
        (500, JSON, [b"{}"], True),
        (429, JSON, [b"{}"], False),
        (200, JSON, [], True),
        (200, JSON, [b'{"choices": []}'], True),
        (200, JSON, [WHOLE[:9], WHOLE[9:]], None),
        (200, JSON, [EMPTY], None),
        (200, "text/html", [b"<html>log in</html>"], True),
        (200, EVENTS, [DONE], True),
        (200, EVENTS, [LAST, DONE], None),  # empty and regular
        (200, EVENTS, [TOKEN], True),
        (200, EVENTS, [TOKEN, b'data: {"error": {"message": "no"}}\n\n', DONE], True),
    ],
)
def test_wrong_answers_count_against_the_server(status, kind, parts, blamed):
    async def scenario(gate, channel):
        for _ in range(6):
            exchange = Exchange(channel)
            await exchange.ask(BODY)
            await exchange.status(status, kind=kind, last=not parts)
            for k, part in enumerate(parts, 1):
                await exchange.part(part, last=k == len(parts))
            if gate.breakers.opened[0]:
                break
        ended = int(gate.routed[0])
        assert ended >= 4
        assert counts(gate) == ((0, ended, 0) if blamed is not None else (ended, 0, 0))
        assert gate.status()["server_failures"] == (ended if blamed else 0)
        assert (await Exchange(channel).ask(BODY)).endpoints[0] == ENDPOINTS[1 if blamed else 0]

    picking(scenario)


def test_a_server_that_says_when_to_come_again_has_not_failed():
    async def scenario(gate, channel):
        for _ in range(4):
            exchange = Exchange(channel)
            await exchange.ask(BODY)
            await exchange.status(503, kind=JSON, last=True, **{"retry-after": "1"})
        assert counts(gate) == (0, 4, 0) and gate.status()["server_failures"] == 0
        assert (await Exchange(channel).ask(BODY)).endpoints[0] == ENDPOINTS[0]

    picking(scenario)


def test_other_endpoints_are_named_in_the_order_of_their_load_and_failing_ones_last():
    async def scenario(gate, channel):
        for expert, count in ((1, 3), (2, 1), (3, 2)):
            for _ in range(count):
                gate.enter({}, allowed=[k == expert for k in range(6)])
        for _ in range(40):  # all but one answer
            for expert in range(6):
                ticket = gate.enter({}, allowed=[k == expert for k in range(6)])
                ticket.end("failed" if expert == 4 else "finished")
        ranked = [ENDPOINTS[k] for k in (0, 5, 2, 3, 1, 4)]
        assert (await Exchange(channel).ask(b"")).endpoints == ranked  # such as a list of models
        exchange = Exchange(channel)
        assert (await exchange.ask(BODY)).endpoints == ranked
        await exchange.status(served=ENDPOINTS[5])  # as the gateway does after a failure
        assert gate.router.load().tolist() == [0, 3, 1, 2, 0, 1]

    picking(scenario)


def test_health_and_addresses():
    async def scenario(gate, channel):
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await check(b"") == b"\x08\x01"
        for k in range(3 * len(ENDPOINTS)):
            assert await check(b"") == b"\x08\x01"
            gate.enter({}, allowed=[k % 6 == one for one in range(6)]).end("failed")
        assert await check(b"") == b"\x08\x02"
        assert await check(b"\x0a\x08liveness") == b"\x08\x01"
        other, port = await start(EndpointPicker(gate, ENDPOINTS), "127.0.0.1", 0)
        with pytest.raises(ValueError, match=f"port {port} of 127.0.0.1 cannot be used"):
            await start(EndpointPicker(gate, ENDPOINTS), "127.0.0.1", port)
        await other.stop(None)

    picking(scenario)
    assert address("http://127.0.0.1:8001/v1") == "127.0.0.1:8001"
    assert address("http://[::1]:8001/v1") == "[::1]:8001"
    for wrong in ("nothing", "http://me:secret@127.0.0.1:8000/v1"):
        with pytest.raises(ValueError, match=f"url is '{re.escape(wrong)}'"):
            address(wrong)
