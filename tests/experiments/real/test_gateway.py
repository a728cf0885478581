"""A policy behind a gateway decides as in the environment, and never stops the gateway."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from servegym.baselines.registry import from_callable
from servegym.envs.llm_routing import kernel
from servegym.envs.llm_routing.config import build_problem
from servegym.envs.llm_routing.core import RoutingBatch, held
from servegym.experiments.evaluate import resolve
from servegym.experiments.real.gateway import GatewayRequest, GatewayRouter

FLEET = {"rate": 9.0, "episode_requests": 700}


def replayed(policy, fleet, *, admitted=True, seed=0):
    """An episode of the environment and, beside it, a router that is told what a gateway sees.

    Yields the observations and the masks of both and the actions of both; the environment's counts.
    """
    problem = build_problem(view=kernel.GRAPH, **fleet)
    batch = RoutingBatch(problem, 1)
    batch.draw(0, np.random.default_rng(seed))
    every = np.ones(1, np.int8)
    batch.begin(every)
    now = 0.0
    router = GatewayRouter(problem, policy, clock=lambda: now, budget_s=None)
    own = resolve(policy, router.system).policy
    own.reset(1, seed=0)
    in_system: set[str] = set()
    for k in range(problem.episode_requests):
        now = float(batch.env["now"][0])
        seen, mask = batch.observation, batch.action_mask
        told: set[str] = set()
        for n in range(problem.num_experts):
            slots = batch.slot[0, n]
            running, waiting = held(batch.expert[0, n], slots, batch.queue[0, n])
            for i, slot in enumerate(running):
                name = str(slots[slot]["request"])
                told.add(name)
                if admitted:
                    router.admitted(name)
                router.token(name, int(seen["running"][0, n, i, 4]))
            told |= {str(slots[slot]["request"]) for slot in waiting}
        for name in in_system - told:
            router.finished(name)
        asked = seen["request"][0]
        arguments = asked[:, 0], asked[:, 1], asked[:, 2], now
        ours = router.observation(*arguments)
        expected = int(own.act(seen, mask)[0])
        request = GatewayRequest(str(k), *asked.T, arrived_s=float(batch.arrivals[0, k]))
        found = router.decide(request)
        if found.expert != expected - 1:  # the log goes on with what the environment did
            router.finished(str(k))
            if expected:
                router.sent(request, expected - 1)
        yield seen, mask, *ours, expected, found
        in_system = told | ({str(k)} if expected else set())
        batch.step(np.array([expected]), every)


@pytest.mark.parametrize("policy", ["priced_greedy", "expected_qos"])
def test_observation_mask_and_action_are_those_of_the_environment(policy):
    for seen, mask, ours, our_mask, expected, found in replayed(policy, FLEET):
        for name, part in ours.items():
            np.testing.assert_allclose(part, seen[name], rtol=2e-6, atol=1e-9, err_msg=name)
        np.testing.assert_array_equal(our_mask, mask)
        assert found.expert == expected - 1
        assert found.policy == policy


@pytest.mark.slow
def test_ten_thousand_actions_are_those_of_the_environment():
    equal = {True: [], False: []}
    for admitted, seed, length in ((True, 0, 5000), (True, 1, 5000), (False, 2, 1500)):
        fleet = FLEET | {"episode_requests": length, "rate": 8.0 + seed}
        equal[admitted] += [
            found.expert == expected - 1
            for *_, expected, found in replayed("fleet_search", fleet, admitted=admitted, seed=seed)
        ]
    assert len(equal[True]) >= 10_000
    assert np.mean(equal[True]) >= 0.999
    assert np.mean(equal[False]) > 0.99  # what runs is inferred, and wrong for up to an iteration


def router_with(act, **arguments):
    return GatewayRouter({}, from_callable(act, "mine"), **arguments)


def ask(router, name="a", **more):
    return router.decide(GatewayRequest(name, 40, **more))


def test_a_policy_that_fails_gives_way_to_the_least_load():
    def fails(observation, mask):
        raise KeyError("nothing here")

    router = router_with(fails)
    first, second = ask(router, "a"), ask(router, "b")
    assert {first.policy, second.policy} == {"least_outstanding"}
    assert (first.expert, second.expert) == (0, 1)
    assert router.counters.policy_errors == router.counters.fallbacks == 2
    assert "nothing here" in first.reason
    router.close()


def test_a_policy_that_hangs_does_not_hold_the_gateway():
    hang = threading.Event()

    def slow(observation, mask):
        hang.wait(20)
        return np.ones(1, np.int64)

    router = router_with(slow, budget_s=0.02)
    begin = time.perf_counter()
    for k in range(5):
        assert ask(router, str(k)).policy == "least_outstanding"
    assert time.perf_counter() - begin < 5
    assert router.counters.policy_timeouts == 5
    hang.set()
    while ask(router, "later").policy != "mine":
        router.finished("later")
    router.close()


def test_an_action_that_is_not_allowed_is_not_taken():
    router = router_with(lambda observation, mask: np.full(len(mask), 1))
    router.set_up(0, up=False)
    assert ask(router).expert == 1
    assert router.counters.illegal_actions == 1
    router.close()


def test_requests_count_until_they_end_and_once():
    router = router_with(lambda observation, mask: np.full(len(mask), 2))
    for k in range(7):
        ask(router, str(k))
    assert router.load().tolist() == [0, 7, 0, 0, 0, 0]
    running, waiting = router.queues()
    assert (len(running[1]), len(waiting[1])) == (5, 2)
    router.finished("0")
    router.finished("0")
    router.failed("1")
    router.token("0")
    assert router.load()[1] == 5
    assert (router.counters.finished, router.counters.failed) == (1, 1)
    with pytest.raises(ValueError, match="'6'.*unique"):
        ask(router, "6")
    router.close()


def test_a_request_that_is_sent_again_is_the_load_of_the_other_expert():
    router = router_with(lambda observation, mask: np.full(len(mask), 2))
    ask(router, "a")
    router.token("a", 4)
    router.moved("a", 3)
    router.moved("of nobody", 3)
    assert router.load().tolist() == [0, 0, 0, 1, 0, 0]
    assert router.queues()[0][3][0].generated == 0
    router.close()


def test_a_drop_is_no_load():
    router = router_with(lambda observation, mask: np.zeros(len(mask), np.int64))
    assert ask(router).dropped
    assert router.load().sum() == 0 and router.counters.drops == 1
    router.close()


@pytest.mark.parametrize(
    "fleet, policy, message",
    [
        ({"fleet": "random"}, "priced_greedy", "fleet"),
        ({}, from_callable(lambda seen, mask: 1, "flat", env_view="flat"), "view 'flat'"),
        ({}, "rollout", "rollout.*environment"),
        ({}, "nothing", "nothing"),
    ],
)
def test_what_no_gateway_can_serve_is_refused(fleet, policy, message):
    with pytest.raises(ValueError, match=message):
        GatewayRouter(fleet, policy)


def test_predictions_of_another_shape_are_refused():
    router = router_with(lambda observation, mask: np.ones(len(mask), np.int64))
    with pytest.raises(ValueError, match="scores.*6"):
        ask(router, scores=[0.5, 0.5])
    router.close()
