"""The request router of Ray Serve; runs where ray[serve] is installed."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("ray.serve.request_router")

from ray.serve._private.common import (  # noqa: E402
    DeploymentHandleSource,
    DeploymentID,
    RequestMetadata,
)
from ray.serve.exceptions import BackPressureError  # noqa: E402
from ray.serve.request_router import PendingRequest, ReplicaID  # noqa: E402

from servegym.baselines.registry import from_callable  # noqa: E402
from servegym.experiments.real.gateway import GatewayRouter  # noqa: E402
from servegym.experiments.real.plugins.agreement import agreement  # noqa: E402
from servegym.experiments.real.plugins.gate import Gate  # noqa: E402
from servegym.experiments.real.plugins.ray_serve import (  # noqa: E402
    EXPERT,
    PolicyRequestRouter,
    status,
    ticket,
)

LLM = DeploymentID(name="llm")


def least(observation, mask):
    load = observation["running_mask"].sum(axis=2) + observation["waiting_mask"].sum(axis=2)
    return 1 + np.where(mask[:, 1:] == 1, load, 10**6).argmin(axis=1)


def drop(observation, mask):
    return np.zeros(len(mask), np.int64)


def router_with(act=least, **kwargs):
    router = PolicyRequestRouter(LLM, DeploymentHandleSource.REPLICA)
    router.adopt(Gate(GatewayRouter({}, from_callable(act, "mine"), budget_s=None)), **kwargs)
    return router


def replicas(*names):
    return [SimpleNamespace(replica_id=ReplicaID(name, LLM)) for name in names]


def pending(name):
    body = {"prompt": "hello"}
    return PendingRequest([body], {"name": name}, RequestMetadata(name, name))


def counts(router):
    made = router.gate.router.counters
    return made.finished, made.failed, router.gate.status()["in_flight"]


def test_actions_are_those_of_the_environment():
    fleet = {"rate": 9.0, "episode_requests": 150}
    equal, _, gate = asyncio.run(agreement("ray", "priced_greedy", fleet))
    assert np.mean(equal) == 1.0
    assert gate.router.counters.drops > 0


def test_requests_that_are_routed_before_any_is_sent_are_spread():
    async def run():
        router = router_with()
        six = replicas(*"abcdef")
        asked = [pending(str(k)) for k in range(6)]
        chosen = [(await router.choose_replicas(six, one))[0][0] for one in asked]
        assert {one.replica_id.unique_id for one in chosen} == set("abcdef")
        router.on_request_completed(chosen[2].replica_id, "2")
        router.on_request_completed(chosen[2].replica_id, "2")
        assert counts(router) == (1, 0, 5)
        ((again,),) = await router.choose_replicas(six, asked[0])  # its replica was full
        assert counts(router) == (1, 1, 5)
        assert again.replica_id.unique_id in "ac"
        asked[1].future.cancel()
        await asyncio.sleep(0)
        assert counts(router) == (1, 2, 4)

    asyncio.run(run())


def test_a_drop_is_429_with_retry_after():
    async def run():
        router = router_with(drop)
        asked = pending("one")
        await router.choose_replicas(replicas("a", "b"), asked)
        error = asked.future.exception()
        assert isinstance(error, BackPressureError)
        assert (error.status_code, error.retry_after_s) == (429, 1.0)
        assert counts(router) == (0, 0, 0)

    asyncio.run(run())


def test_replicas_that_come_and_go():
    async def run():
        router = router_with()
        ((one,),) = await router.choose_replicas(replicas("a", "b"), pending("1"))
        assert one.replica_id.unique_id == "a"
        router.on_replica_actor_died(one.replica_id)
        assert counts(router) == (0, 1, 0)
        ((other,),) = await router.choose_replicas(replicas("b", "c"), pending("2"))
        assert other.replica_id.unique_id == "b"  # c has the number of a, which has just failed
        many = replicas(*(f"r{k}" for k in range(9)))
        names = {
            (await router.choose_replicas(many, pending(f"m{k}")))[0][0].replica_id.unique_id
            for k in range(12)
        }
        assert len(names) <= 6
        assert await router.choose_replicas(many, None) == [many]

    asyncio.run(run())


def test_replicas_that_say_which_expert_they_are():
    async def run():
        router = router_with(told=True)
        silent = replicas("a", "b")
        for one in silent:
            one.routing_stats = {}
        asked = pending("1")
        assert await router.choose_replicas(silent, asked) == []  # Ray asks again later
        assert asked.routing_context.should_backoff
        silent[0].routing_stats = {EXPERT: 4}
        silent[1].routing_stats = {EXPERT: 6}  # there are six
        for k in range(2):
            ((one,),) = await router.choose_replicas(silent, pending(f"2{k}"))
            assert one is silent[0]
        (state,) = (each for each in status() if each["decisions"] == 2)
        assert [one["routed"] for one in state["experts"]] == [0, 0, 0, 0, 2, 0]

    asyncio.run(run())


def test_a_caller_that_tells_has_the_ticket_once():
    async def run():
        router = router_with(told=True)
        six = replicas(*"abcdef")
        for k, one in enumerate(six):
            one.routing_stats = {EXPERT: k}
        ((one,),) = await router.choose_replicas(six, pending("first"))
        router.on_request_completed(one.replica_id, "first")
        sent = ticket("first")
        assert ticket("first") is None is ticket("never")
        assert counts(router) == (0, 0, 1)
        sent.failed()
        assert counts(router) == (0, 1, 0)
        names = {
            (await router.choose_replicas(six, pending(f"m{k}")))[0][0].replica_id.unique_id
            for k in range(10)
        }
        assert names == set("abcdef") - {one.replica_id.unique_id}

    asyncio.run(run())


def ask(url, body=None, seconds=30.0):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            return response.status, response.headers, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


FLEET = """
[[server]]
name = "fast"
engine = "simulated"
profile = "l40s-llama-3.1-8b"
slots = 4
context = 2048

[[server]]
name = "good"
engine = "simulated"
profile = "a10-llama-3.1-8b"
slots = 8
context = 2048
"""
CLI = [sys.executable, "-c", "from servegym.experiments.cli import app; app()"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_servers_behind_ray_serve(tmp_path):
    pytest.importorskip("aiohttp")
    from servegym.experiments.real.launcher import free_port

    (tmp_path / "fleet.toml").write_text(FLEET)
    endpoints, port = tmp_path / "endpoints.json", free_port()
    words = [*CLI, "serve", str(tmp_path / "fleet.toml"), "--endpoints", str(endpoints)]
    running = [subprocess.Popen(words)]
    try:
        end = time.monotonic() + 300
        while not endpoints.exists() and time.monotonic() < end:
            time.sleep(0.2)
        words = [*CLI, "gateway", "ray", str(endpoints), "--policy", "least_outstanding"]
        log = tmp_path / "ray.log"
        with log.open("wb") as out:
            running.append(subprocess.Popen([*words, "--port", str(port)], stdout=out))
        while "gateway at" not in log.read_text() and time.monotonic() < end:
            assert running[1].poll() is None
            time.sleep(0.5)
        url = f"http://127.0.0.1:{port}"
        body = {"model": "llm", "prompt": "one two three", "max_tokens": 5, "ignore_eos": True}
        for _ in range(6):
            code, _, text = ask(f"{url}/v1/completions", body)
            assert code == 200 and json.loads(text)["usage"]["completion_tokens"] == 5, text
        code, headers, text = ask(f"{url}/v1/completions", {**body, "stream": True})
        assert code == 200 and headers["Content-Type"].startswith("text/event-stream")
        assert text.count("data: ") >= 6 and text.rstrip().endswith("[DONE]")
        code, _, text = ask(f"{url}/v1/completions", {**body, "n": 2})
        assert (code, json.loads(text)["error"]["param"]) == (400, "n")  # the server's own words
        assert ask(f"{url}/v1/completions", [1])[0] == 400
        assert ask(f"{url}/v1/nothing", {})[0] == 404
        assert ask(f"{url}/v1/completions", {**body, "prompt": "x" * (4 << 20)})[0] == 413
        (state,) = json.loads(ask(f"{url}/servegym")[2])
        assert (state["decisions"], state["finished"], state["left"]) == (8, 7, 1)
        assert state["in_flight"] == 0
        assert {one["name"]: one["routed"] > 0 for one in state["experts"]}["fast"]
        running[0].send_signal(signal.SIGTERM)
        assert running[0].wait(30) == 0
        code, _, text = ask(f"{url}/v1/completions", body)
        assert code == 502 and "does not answer" in text
        (state,) = json.loads(ask(f"{url}/servegym")[2])
        assert state["server_failures"] == 3 and state["in_flight"] == 0
        assert {one["name"] for one in state["experts"] if not one["up"]} == {"fast", "good"}
        running[1].send_signal(signal.SIGTERM)
        assert running[1].wait(60) == 0
    finally:
        for one in running:
            one.kill()
