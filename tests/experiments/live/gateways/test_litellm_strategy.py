"""The LiteLLM strategy before servers that fail; runs where litellm is installed."""

from __future__ import annotations

import asyncio
import contextlib
import os

import numpy as np
import pytest

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
litellm = pytest.importorskip("litellm")

from servegym.baselines.registry import from_callable  # noqa: E402
from servegym.experiments.live.gateway import GatewayRouter  # noqa: E402
from servegym.experiments.live.gateways.gate import Gate  # noqa: E402
from servegym.experiments.live.gateways.litellm_strategy import LiteLLMStrategy  # noqa: E402
from servegym.experiments.studies.gateways.agreement import agreement  # noqa: E402
from servegym.experiments.studies.gateways.faulty import FaultyServer  # noqa: E402

MESSAGES = [{"role": "user", "content": "hello"}]
NAMES = [f"e{k}" for k in range(6)]
litellm.suppress_debug_info = True


def first(observation, mask):
    return 1 + mask[:, 1:].argmax(axis=1)


@contextlib.asynccontextmanager
async def proxied(act=first, **router):
    servers = [FaultyServer(0.002) for _ in NAMES]
    for one in servers:
        await one.start()
    made = litellm.Router(
        model_list=[
            {
                "model_name": "llm",
                "litellm_params": {
                    "model": f"openai/{name}",
                    "api_base": one.url,
                    "api_key": "none",
                    "max_retries": 0,
                },
                "model_info": {"id": name},
            }
            for name, one in zip(NAMES, servers, strict=True)
        ],
        **{"num_retries": 2, "retry_after": 0, **router},
    )
    gate = Gate(GatewayRouter({}, from_callable(act, "mine"), budget_s=None))
    LiteLLMStrategy(gate, "llm", NAMES).attach(made)
    try:
        yield made, gate, servers
    finally:
        for one in servers:
            await one.stop()


def counts(gate):
    made = gate.router.counters
    return made.finished, made.failed, gate.status()["in_flight"]


async def read(response):
    return "".join([chunk.choices[0].delta.content or "" async for chunk in response])


def test_actions_are_those_of_the_environment():
    fleet = {"rate": 9.0, "episode_requests": 150}
    equal, _, gate = asyncio.run(agreement("litellm", "priced_greedy", fleet))
    assert np.mean(equal) == 1.0
    assert gate.router.counters.decisions == 150


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_request_is_load_until_its_answer_is_complete(chat, stream):
    async def run():
        async with proxied() as (router, gate, servers):
            if chat:
                call = router.acompletion("llm", MESSAGES, max_tokens=5, stream=stream)
            else:
                call = router.atext_completion("llm", "hello", max_tokens=5, stream=stream)
            response = await call
            assert gate.routed.tolist() == [1, 0, 0, 0, 0, 0]
            assert gate.last.expert == 0
            if stream:
                assert gate.router.load()[0] == 1
                async for _ in response:
                    pass
                assert gate.last.tokens == 5
            assert counts(gate) == (1, 0, 0)
            assert servers[0].served == 1

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["500", "refuse"])
def test_a_failure_before_the_first_token_goes_to_another_server(fault):
    async def run():
        async with proxied() as (router, gate, servers):
            if fault == "refuse":
                await servers[0].stop()
            servers[0].fault = fault
            response = await router.acompletion("llm", MESSAGES, max_tokens=3, stream=True)
            assert await read(response) == "w w w "
            assert counts(gate) == (1, 1, 0)
            assert gate.routed.tolist() == [1, 1, 0, 0, 0, 0]
            assert gate.status()["server_failures"] == 1
            servers[0].fault = ""
            if fault == "refuse":
                await servers[0].start()
            await router.acompletion("llm", MESSAGES, max_tokens=3)
            assert counts(gate) == (2, 1, 0)

    asyncio.run(run())


def test_a_server_that_dies_in_the_middle_is_no_second_answer():
    async def run():
        async with proxied() as (router, gate, servers):
            servers[0].fault = "die"
            response = await router.acompletion("llm", MESSAGES, max_tokens=9, stream=True)
            with pytest.raises(Exception, match="(?i)connection|payload|stream"):
                await read(response)
            assert counts(gate) == (0, 1, 0)
            assert sum(one.requests for one in servers) == 1

    asyncio.run(run())


def test_a_server_that_stalls_is_left_by_the_time_limit():
    async def run():
        async with proxied(timeout=0.5) as (router, gate, servers):
            servers[0].fault = "stall"
            response = await router.acompletion("llm", MESSAGES, max_tokens=3)
            assert response.choices[0].message.content == "w w w "
            assert counts(gate) == (1, 1, 0)

    asyncio.run(run())


def test_clients_that_leave_are_no_failures():
    async def run():
        async with proxied() as (router, gate, servers):
            response = await router.acompletion("llm", MESSAGES, max_tokens=9, stream=True)
            await response.__anext__()
            await response.aclose()
            assert counts(gate) == (0, 1, 0)
            response = await router.acompletion("llm", MESSAGES, max_tokens=9, stream=True)
            del response
            assert counts(gate) == (0, 2, 0)
            servers[0].fault = "stall"
            task = asyncio.create_task(router.acompletion("llm", MESSAGES))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert counts(gate) == (0, 3, 0)
            servers[0].fault = "400"
            with pytest.raises(litellm.BadRequestError):
                await router.acompletion("llm", MESSAGES)
            assert counts(gate) == (0, 4, 0)
            assert gate.status()["server_failures"] == 0
            assert gate.status()["left"] == 4

    asyncio.run(run())


def test_a_drop_is_429_with_retry_after_and_is_not_tried_again():
    async def run():
        drop = lambda observation, mask: np.zeros(len(mask), np.int64)  # noqa: E731
        async with proxied(drop) as (router, gate, servers):
            with pytest.raises(litellm.RateLimitError) as caught:
                await router.acompletion("llm", MESSAGES)
            assert caught.value.status_code == 429
            assert caught.value.headers == {"retry-after": "1"}
            assert gate.router.counters.decisions == gate.router.counters.drops == 1
            assert sum(one.requests for one in servers) == 0

    asyncio.run(run())


def test_a_policy_that_fails_does_not_stop_the_gateway():
    def fails(observation, mask):
        raise KeyError("nothing here")

    async def run():
        async with proxied(fails) as (router, gate, servers):
            for _ in range(3):
                await router.acompletion("llm", MESSAGES, max_tokens=2)
            assert counts(gate) == (3, 0, 0)
            assert gate.status()["policy_errors"] == 3

    asyncio.run(run())


def test_another_fleet_is_refused():
    async def run():
        async with proxied() as (router, gate, _):
            with pytest.raises(ValueError, match="'other'.*6 experts"):
                LiteLLMStrategy(gate, "other").attach(router)

    asyncio.run(run())
