"""The request router of Ray Serve; runs where ray[serve] is installed."""

from __future__ import annotations

import asyncio
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
from servegym.experiments.real.plugins.ray_serve import PolicyRequestRouter  # noqa: E402

LLM = DeploymentID(name="llm")


def least(observation, mask):
    load = observation["running_mask"].sum(axis=2) + observation["waiting_mask"].sum(axis=2)
    return 1 + np.where(mask[:, 1:] == 1, load, 10**6).argmin(axis=1)


def drop(observation, mask):
    return np.zeros(len(mask), np.int64)


def router_with(act=least):
    router = PolicyRequestRouter(LLM, DeploymentHandleSource.REPLICA)
    router.adopt(Gate(GatewayRouter({}, from_callable(act, "mine"), budget_s=None)))
    return router


def replicas(*names):
    return [SimpleNamespace(replica_id=ReplicaID(name, LLM)) for name in names]


def pending(name):
    return PendingRequest([{"prompt": "hello"}], {}, RequestMetadata(name, name))


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
