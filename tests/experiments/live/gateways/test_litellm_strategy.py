"""The LiteLLM strategy before servers that fail; runs where litellm is installed."""

from __future__ import annotations

import asyncio
import os

import numpy as np
import pytest

pytest.importorskip("aiohttp")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
litellm = pytest.importorskip("litellm")
if not hasattr(litellm.Router, "_acompletion"):
    pytest.skip("litellm is of another form", allow_module_level=True)

from servegym.baselines.registry import from_callable  # noqa: E402
from servegym.experiments.live.fleet_file import ServerSpec  # noqa: E402
from servegym.experiments.live.gateway import GatewayRouter  # noqa: E402
from servegym.experiments.live.gateways.gate import Gate  # noqa: E402
from servegym.experiments.live.gateways.litellm_strategy import LiteLLMStrategy  # noqa: E402
from servegym.experiments.live.serve.faults import Fault  # noqa: E402
from servegym.experiments.live.serve.server import SimulatedFleet  # noqa: E402

MESSAGES = [{"role": "user", "content": "hello"}]
NAMES = [f"e{k}" for k in range(6)]
litellm.suppress_debug_info = True


def first(observation, mask):
    return 1 + mask[:, 1:].argmax(axis=1)


def before_servers(scenario, act=first, **router):
    """Run ``scenario(router, gate, servers)`` with our strategy before six simulated servers."""

    async def run():
        specs = [ServerSpec(name, "simulated", profile="h100-llama-3.1-8b") for name in NAMES]
        gate = Gate(GatewayRouter({}, from_callable(act, "mine"), budget_s=None))
        async with SimulatedFleet(specs, speed=10.0) as fleet:
            made = litellm.Router(
                model_list=[
                    {
                        "model_name": "llm",
                        "litellm_params": {
                            "model": f"openai/{one.spec.name}",
                            "api_base": one.url,
                            "api_key": "none",
                            "max_retries": 0,
                        },
                        "model_info": {"id": one.spec.name},
                    }
                    for one in fleet.servers
                ],
                **{"num_retries": 2, "retry_after": 0, **router},
            )
            LiteLLMStrategy(gate, "llm", NAMES).attach(made)
            await scenario(made, gate, fleet.servers)

    asyncio.run(run())


def counts(gate):
    made = gate.router.counters
    return made.finished, made.failed, gate.status()["in_flight"]


def answered(servers):
    """Requests that the servers have answered."""
    return [sum(one.metrics.ended.values()) for one in servers]


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_request_is_load_until_its_answer_is_complete(chat, stream):
    async def scenario(router, gate, servers):
        more = {"max_tokens": 5, "stream": stream, "extra_body": {"ignore_eos": True}}
        if chat:
            response = await router.acompletion("llm", MESSAGES, **more)
        else:
            response = await router.atext_completion("llm", "hello", **more)
        assert gate.routed.tolist() == [1, 0, 0, 0, 0, 0]
        if stream:
            assert gate.router.load()[0] == 1
            told = []
            async for _ in response:
                running, _ = gate.router.queues()
                told += [one.generated for one in running[0]]
            assert max(told) == 5
        assert counts(gate) == (1, 0, 0)
        assert answered(servers) == [1, 0, 0, 0, 0, 0]

    before_servers(scenario)


@pytest.mark.parametrize("kind", ["error", "refuse", "stall"])
def test_a_failure_before_the_first_token_goes_to_another_server(kind):
    async def scenario(router, gate, servers):
        servers[0].faults.append(Fault(kind))
        if kind == "refuse":
            await servers[0].fail(servers[0].faults[0])
        for k in range(1 if kind == "stall" else 4):
            response = await router.acompletion("llm", MESSAGES, max_tokens=3)
            assert response.usage.completion_tokens == 3
            assert counts(gate) == (k + 1, k + 1, 0)
            assert gate.routed.tolist() == [k + 1, k + 1, 0, 0, 0, 0]
        if kind == "stall":  # the client would wait no longer
            assert gate.status()["server_failures"] == 0
        else:
            assert gate.status()["server_failures"] == 4
            await router.acompletion("llm", MESSAGES, max_tokens=3)
            assert counts(gate) == (5, 4, 0)

    before_servers(scenario, **({"timeout": 5.0} if kind == "stall" else {}))


def test_clients_that_leave_are_no_failures():
    async def scenario(router, gate, servers):
        response = await router.acompletion("llm", MESSAGES, max_tokens=9, stream=True)
        await response.__anext__()
        await response.aclose()
        assert counts(gate) == (0, 1, 0)
        response = await router.acompletion("llm", MESSAGES, max_tokens=9, stream=True)
        del response
        assert counts(gate) == (0, 2, 0)
        servers[0].faults.append(Fault("stall"))
        task = asyncio.create_task(router.acompletion("llm", MESSAGES))
        while counts(gate) != (0, 2, 1):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert counts(gate) == (0, 3, 0)
        servers[0].faults.clear()
        with pytest.raises(litellm.BadRequestError):
            await router.acompletion("llm", MESSAGES, max_tokens=10_000)
        assert counts(gate) == (0, 4, 0)
        assert gate.status()["server_failures"] == 0 and gate.status()["left"] == 4

    before_servers(scenario)


def test_a_drop_is_429_with_retry_after_and_is_not_tried_again():
    async def scenario(router, gate, servers):
        with pytest.raises(litellm.RateLimitError) as caught:
            await router.acompletion("llm", MESSAGES)
        assert caught.value.status_code == 429
        assert caught.value.headers == {"retry-after": "1"}
        assert gate.router.counters.decisions == gate.router.counters.drops == 1
        assert sum(answered(servers)) == 0
        with pytest.raises(ValueError, match="'other'.*6 experts"):
            LiteLLMStrategy(gate, "other").attach(router)

    before_servers(scenario, lambda observation, mask: np.zeros(len(mask), np.int64))
