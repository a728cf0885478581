"""A policy behind a gateway decides as in the environment, and never stops the gateway."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from servegym.baselines.registry import from_callable
from servegym.envs.llm_routing import kernel
from servegym.envs.llm_routing.config import build_problem
from servegym.experiments.live.gateway import GatewayRequest, GatewayRouter
from servegym.experiments.studies.gateways.agreement import played

FLEET = {"rate": 9.0, "episode_requests": 700}


def replayed(policy, fleet, *, admitted=True, seed=0):
    """An episode of the environment and, beside it, a router that is told what a gateway sees.

    Yields each decision of the environment, the router's observation and mask, and its decision.
    """
    problem = build_problem(view=kernel.GRAPH, **fleet)
    now = 0.0
    router = GatewayRouter(problem, policy, clock=lambda: now, budget_s=None)
    for step in played(policy, problem, seed):
        now = step.now
        for name, tokens in step.running:
            if admitted:
                router.admitted(name)
            router.token(name, tokens)
        for name in step.ended:
            router.finished(name)
        prompt, scores, lengths = step.request
        ours = router.observation(prompt, scores, lengths, now)
        request = GatewayRequest(
            step.name, prompt.tolist(), scores, lengths, arrived_s=step.arrived_s
        )
        found = router.decide(request)
        if found.expert != step.action - 1:  # the log goes on with what the environment did
            router.finished(step.name)
            if step.action:
                router.sent(request, step.action - 1)
        yield step, *ours, found


@pytest.mark.parametrize("policy", ["priced_greedy", "expected_qos"])
def test_observation_mask_and_action_are_those_of_the_environment(policy):
    for step, ours, our_mask, found in replayed(policy, FLEET):
        for name, part in ours.items():
            np.testing.assert_allclose(part, step.seen[name], rtol=2e-6, atol=1e-9, err_msg=name)
        np.testing.assert_array_equal(our_mask, step.mask)
        assert found.expert == step.action - 1
        assert found.policy == policy


@pytest.mark.slow
def test_ten_thousand_actions_are_those_of_the_environment():
    equal = {True: [], False: []}
    for admitted, seed, length in ((True, 0, 5000), (True, 1, 5000), (False, 2, 1500)):
        fleet = FLEET | {"episode_requests": length, "rate": 8.0 + seed}
        equal[admitted] += [
            found.expert == step.action - 1
            for step, *_, found in replayed("fleet_search", fleet, admitted=admitted, seed=seed)
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


def test_an_expert_that_the_request_may_not_have_is_not_taken():
    router = router_with(lambda observation, mask: mask.argmax(axis=1))
    assert ask(router, allowed=[False, False, True, True, False, False]).dropped
    router = router_with(lambda observation, mask: 1 + mask[:, 1:].argmax(axis=1))
    assert ask(router, allowed=[False, False, True, True, False, False]).expert == 2
    router.close()


def test_what_is_compiled_ahead_is_not_counted():
    router = router_with(lambda observation, mask: np.ones(len(mask), np.int64), budget_s=0.05)
    ask(router, "before")
    router.warm()
    assert router.counters.decisions == 1
    assert router.load().tolist() == [1, 0, 0, 0, 0, 0]
    assert ask(router, "after").policy == "mine"
    router.close()
