"""TD(lambda) over afterstates: values, labels and returns, against slow references."""

import numpy as np
import pytest
import torch

from servegym.agents import td_afterstates as td
from servegym.agents.lib.environments import make_envs
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.hardware_profiles import load_fleet


def a_system():
    return RoutingSystem.from_kwargs(num_experts=4, running_capacity=3, waiting_capacity=2)


def an_agent(system=None):
    torch.manual_seed(0)
    return td.Agent(system or a_system())


def test_the_value_of_sending_is_that_of_the_queue_with_the_request_less_without(random_obs):
    agent, obs = an_agent(), random_obs(5, 4, 3, 2)
    queues = td.read_queues(obs, agent.system)
    send, own, later = agent.judge(queues)
    assert not queues.there[..., -1].any()
    for b, n in np.ndindex(5, 4):
        worth = []
        for arrived in (False, True):
            there = torch.as_tensor(queues.there[b, n]).float()
            there[-1] = arrived
            requests = torch.as_tensor(queues.requests[b, n])
            with torch.no_grad():
                odds, ahead = agent(requests, there, torch.as_tensor(queues.experts[b, n]))
            chance = odds.sigmoid() * there
            worth.append(float((chance * requests[:, 1]).sum() + ahead))
            assert float(ahead) == pytest.approx(later[int(arrived), b, n], abs=1e-5)
        assert float(chance[-1] * requests[-1, 1]) == pytest.approx(own[b, n], abs=1e-5)
        assert worth[1] - worth[0] == pytest.approx(send[b, n], abs=1e-5)


def test_experts_are_told_apart_by_what_they_are_and_not_by_their_place(random_obs):
    order, fleet = np.array([2, 0, 3, 1]), load_fleet("edge-6-heterogeneous")
    systems = [
        RoutingSystem.from_kwargs(
            profiles=[fleet.profiles[k].name for k in some], models=[fleet.models[k] for k in some]
        )
        for some in (range(4), order)
    ]
    obs, whole = random_obs(3), ("latency_requirement", "load")
    moved = {key: part if key in whole else part[:, order] for key, part in obs.items()}
    one, two = (
        an_agent(system).judge(td.read_queues(seen, system))[0]
        for system, seen in zip(systems, (obs, moved), strict=True)
    )
    np.testing.assert_allclose(one[:, order], two, atol=1e-5)
    assert np.ptp(one, 1).min() > 1e-4


def test_returns_mix_the_expected_next_values():
    rng = np.random.default_rng(0)
    expected, value = rng.random((2, 6, 3, 2))
    found = td.lambda_returns(expected, value, 0.9, 0.7)
    for t in range(5):
        total, weight = np.zeros((3, 2)), 1.0
        for k in range(t + 1, 6):
            # What the step adds over the value before it, discounted by gamma and lambda.
            total += weight * 0.9 * (expected[k] - 0.0)
            if k < 5:
                total -= weight * 0.9 * 0.7 * value[k]
            weight *= 0.9 * 0.7
        # The last return is the last value.
        np.testing.assert_allclose(found[t], total, atol=1e-12)
    np.testing.assert_array_equal(found[5], value[5])


def test_probabilities_are_a_softmax_with_some_chance():
    args = td.Args(temperature=0.1, explore=0.2)
    values, mask = np.array([[0.0, 0.3, 0.1, 0.9]]), np.array([[1, 1, 1, 0]])
    likely = np.exp(np.array([0.0, 3.0, 1.0]))
    wanted = 0.8 * likely / likely.sum() + 0.2 / 3
    np.testing.assert_allclose(td.probabilities(values, mask, args)[0], [*wanted, 0.0])


def test_labels_are_what_became_of_the_requests():
    kwargs = td.ENV | {"num_experts": 3, "rate": 6.0, "episode_requests": 120}
    envs = make_envs(td.ENV_ID, 3, autoreset_mode="Disabled", **kwargs)
    envs.reset(seed=[1, 2, 3])
    agent, steps = an_agent(RoutingSystem.from_env(envs)), 120
    data, qos = td.play(agent, envs, td.Args(), 1.0, np.random.default_rng(0))
    kept = steps - td.LAST
    in_time, there = (data[k].view(kept, 3, 3, -1).numpy() for k in ("in_time", "there"))
    assert (in_time >= 0)[there > 0].mean() > 0.95 and (in_time[there == 0] == -1).all()
    for row in range(3):
        log = envs.unwrapped.batch.request_log(row)
        ontime = qos[row] > 0
        for t in range(kept):
            sent = np.flatnonzero(there[t, row, :, -1])
            if len(sent):  # its own label, in the last slot
                assert in_time[t, row, sent[0], -1] == ontime[t]
                assert log["expert"][t] == sent[0]
            held = (in_time[t, row] == 1).sum(), (in_time[t, row] == 0).sum()
            assert sum(held) <= t + 1
    assert 0.2 < (qos > 0).mean() < 1.0
