"""A policy behind a gateway decides as in the environment, and never stops the gateway."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from servegym.baselines.registry import describe_system, from_callable, make_policy
from servegym.envs.llm_routing.config import build_problem
from servegym.envs.llm_routing.core import RoutingBatch, held
from servegym.envs.llm_routing.kernel import layout
from servegym.experiments.live.gateway import GatewayRequest, GatewayRouter

FLEET = {"rate": 9.0, "episode_requests": 300}


def replayed(policy, fleet, *, told=True, seed=0):
    """An episode of the environment and, beside it, a router that is told what a gateway sees.

    Where it is ``told`` it knows, too, which requests the engines run.

    Yields at each decision the observation, the mask and the action, the environment's and the
    router's.
    """
    problem = build_problem(view=layout.GRAPH, **fleet)
    batch = RoutingBatch(problem, 1)
    batch.draw(0, np.random.default_rng(seed))
    every = np.ones(1, np.int8)
    batch.begin(every)
    own = make_policy(policy, describe_system(problem))
    own.reset(1, seed=0)
    now, noted = 0.0, {}
    router = GatewayRouter(fleet, policy, clock=lambda: now, budget_s=None)
    act = router.policy.act

    def noting(seen, mask):
        noted.update(seen=seen, mask=mask.copy())
        return act(seen, mask)

    router.policy.act = noting
    if told:
        router.queues = lambda: queues
    under_way = set()
    for k in range(problem.arguments.episode_requests):
        seen, mask, now = batch.observation, batch.action_mask, float(batch.env["now"][0])
        inside, queues = set(), ([], [])
        for n in range(problem.num_experts):
            slots = batch.slot[0, n]
            running, waiting = held(batch.expert[0, n], batch.queue[0, n])
            for queue, held_there in zip(queues, (running, waiting), strict=True):
                names = [str(slots[slot]["request"]) for slot in held_there]
                queue.append([router._requests[name] for name in names])
                inside |= {*names}
            for i, slot in enumerate(running):
                router.token(str(slots[slot]["request"]), int(seen["running"][0, n, i, 4]))
        for name in under_way - inside:
            router.finished(name)
        action = int(own.act(seen, mask)[0])
        found = router.decide(GatewayRequest(str(k), *seen["request"][0].T))
        yield seen, mask, action, noted["seen"], noted["mask"], found
        if found.expert != action - 1:  # what follows is what the environment did
            router.moved(str(k), action - 1) if action else router.finished(str(k))
        under_way = inside | ({str(k)} if action else set())
        batch.step(np.array([action]), every)


def test_observation_mask_and_action_are_those_of_the_environment():
    for seen, mask, action, ours, our_mask, found in replayed("priced_greedy", FLEET):
        for name, part in ours.items():
            np.testing.assert_allclose(part, seen[name], rtol=2e-6, atol=1e-9, err_msg=name)
        np.testing.assert_array_equal(our_mask, mask)
        assert (found.expert, found.policy) == (action - 1, "priced_greedy")


def test_what_runs_is_inferred_where_no_engine_tells():
    steps = replayed("priced_greedy", FLEET, told=False)
    # Wrong for up to an iteration.
    assert np.mean([found.expert == action - 1 for _, _, action, *_, found in steps]) > 0.98


def router_with(act, budget_s=None, **arguments):
    return GatewayRouter({}, from_callable(act, "mine"), budget_s=budget_s, **arguments)


def ask(router, name="a", **more):
    return router.decide(GatewayRequest(name, 40, **more))


def test_a_policy_that_writes_into_what_it_is_shown_harms_nobody():
    def writes(observation, mask):
        for array in (*observation.values(), mask):
            array[:] = 0
        return np.full(len(mask), 3)

    router = router_with(writes)
    assert [(ask(router, str(k)).expert, router.counters.drops) for k in range(3)] == [(2, 0)] * 3
    router = router_with(lambda observation, mask: mask.__imul__(0)[:, 0] - 1)
    assert [ask(router, str(k)).expert for k in range(3)] == [0, 1, 2]  # the least load


def test_a_policy_that_hangs_does_not_hold_the_gateway():
    hang = threading.Event()

    def slow(observation, mask):
        hang.wait()
        return np.ones(1, np.int64)

    router = router_with(slow, budget_s=0.02)
    for k in range(5):
        assert ask(router, str(k)).policy == "least_outstanding"
    assert router.counters.policy_timeouts == 5
    hang.set()
    while ask(router, "later").policy != "mine":
        router.finished("later")
    names = [thread.name for thread in threading.enumerate()]
    router.close()
    left = [thread.name for thread in threading.enumerate()]
    assert names.count("servegym-policy") == left.count("servegym-policy") + 1


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), TimeoutError("mine")])
def test_no_error_of_a_policy_ends_the_gateway(error, caplog):
    def fails(observation, mask):
        raise error

    router = router_with(fails, budget_s=60.0)
    assert ask(router).policy == "least_outstanding"
    assert (router.counters.policy_errors, router.counters.policy_timeouts) == (1, 0)
    assert type(error).__name__ in caplog.text and "fails" in caplog.text  # with its traceback
    assert type(error).__name__ in router.counters.last_error
    router.close()


def test_an_observation_that_fails_gives_way_and_each_cause_is_logged_once_a_minute(caplog):
    now = [0.0]
    router = router_with(lambda observation, mask: np.ones(1, np.int64), clock=lambda: now[0])
    router._observation = lambda *_: 1 / 0
    for k in range(70):
        now[0] = float(k)
        assert ask(router, str(k), allowed=[False] * 5 + [True]).expert == 5
    assert router.counters.observation_errors == router.counters.fallbacks == 70
    assert caplog.text.count("ZeroDivisionError: ") == 2


def test_an_action_that_is_not_allowed_is_not_taken():
    router = router_with(lambda observation, mask: np.full(len(mask), 1))
    assert ask(router, allowed=[False, True, True, True, True, True]).expert == 1
    assert router.counters.illegal_actions == 1


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


def test_a_request_that_is_sent_again_is_the_load_of_the_other_expert():
    router = router_with(lambda observation, mask: np.full(len(mask), 2))
    ask(router, "a")
    router.token("a", 4)
    router.moved("a", 3)
    router.moved("of nobody", 3)
    assert router.load().tolist() == [0, 0, 0, 1, 0, 0]
    assert router.queues()[0][3][0].generated == 0


def test_what_no_gateway_can_serve_is_refused():
    flat = from_callable(lambda seen, mask: 1, "flat", env_view="flat")
    for fleet, policy, message in (
        ({"fleet": "random"}, "priced_greedy", "fleet"),
        ({}, flat, "view 'flat'"),
        ({}, "rollout", "rollout.*environment"),
    ):
        with pytest.raises(ValueError, match=message):
            GatewayRouter(fleet, policy)


def test_a_policy_that_keeps_the_interpreter_is_switched_off(caplog):
    now, calls = [0.0], []

    def keeps(observation, mask):
        calls.append(1)
        now[0] += 4.0 if len(calls) != 3 else 0.0  # the third comes in time
        return np.ones(1, np.int64)

    router = router_with(keeps, budget_s=60.0, clock=lambda: now[0])
    router.budget_s = 0.01  # which the thread may take long to say on a busy machine
    router._worker.run = lambda act, limit_s: act()
    found = [ask(router, str(k)) for k in range(9)]
    assert [one.policy == "mine" for one in found] == [k == 2 for k in range(9)]
    assert len(calls) == 6 and "kept the interpreter for 4 s" in router.off
    assert router.off in caplog.text and found[-1].reason == router.off
    assert router.counters.policy_timeouts == 8 and router.counters.late_s == 4.0
