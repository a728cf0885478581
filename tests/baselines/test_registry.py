"""The registry: names, families, parameters, and functions as policies."""

import gymnasium
import numpy as np
import pytest

from servegym._checks import nearest
from servegym.baselines.protocol import Policy
from servegym.baselines.registry import (
    describe_system,
    from_callable,
    list_policies,
    make_policy,
    register_policy,
)
from servegym.envs.families import FAMILIES

SMALL = {
    "llm_routing": {"episode_requests": 10},
    "serverless_moe": {"model": "toy", "episode_requests": 4},
    "expert_placement": {"model": "toy", "epochs": 1},
    "prefix_routing": {"episode_requests": 10, "warmup_requests": 0},
}


@pytest.fixture(scope="module")
def system():
    env = gymnasium.make("servegym/LLMRouting-v1", **SMALL["llm_routing"])
    return describe_system(env.unwrapped.problem)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_describes_its_system_and_makes_policies(family):
    env = gymnasium.make(family.env_id, **SMALL.get(family.name, {}))
    described = describe_system(env.unwrapped.problem, family=family.name)
    infos = {info.name: info for info in list_policies(family.name)}
    assert len(infos) == len(list_policies(family.name))
    policy = make_policy("random", described, family=family.name)
    assert isinstance(policy, Policy) and policy.env_view == "graph"
    assert policy.clairvoyant == infos["random"].clairvoyant
    assert {info.family for info in infos.values()} == {family.name}


@pytest.mark.parametrize(
    ("given", "names", "meant"),
    [
        ("gredy", ["random", "greedy_qos"], "greedy_qos"),
        ("RANDOM", ["random", "round_robin"], "random"),
        ("Least-Load", ["least_loaded", "least_load"], "least_load"),
        ("prefix", ["servegym/PrefixRoutingFlat-v1", "servegym/PrefixRouting-v1"], "-v1"),
        ("llmrouting-v1", ["servegym/PrefixRouting-v1", "servegym/LLMRouting-v1"], "LLMRouting-v1"),
        ("gie709", ["gie-709", "drift"], "gie-709"),
        ("greedy", ["preble", "mooncake"], None),
        ("x", ["xenon"], None),
    ],
)
def test_the_name_that_is_meant(given, names, meant):
    found = nearest(given, names)
    assert found is None if meant is None else found.endswith(meant) and "Flat" not in found


def test_unknown_names_and_parameters_are_refused(system):
    with pytest.raises(ValueError, match="Did you mean 'least_outstanding'"):
        make_policy("least_outstandin", system)
    with pytest.raises(ValueError, match="Did you mean 'llm_routing'"):
        list_policies("llm_routin")
    for name in ("greedy_qos", "expected_qos", "rollout", "priced_greedy"):  # by ``**``, too
        with pytest.raises(ValueError, match="policy.*no_such_parameter"):
            make_policy(name, system, no_such_parameter=1)
    assert make_policy("expected_qos", system, price_full=0.5, share=0.3).name == "expected_qos"
    with pytest.raises(ValueError, match="already registered"):
        register_policy("random", lambda system: None, "again")
    with pytest.raises(ValueError, match="num_envs"):
        make_policy("random", system).reset(0)


def test_from_callable_checks_what_the_function_returns():
    observation, mask = {"request": np.zeros((4, 2, 3))}, np.ones((4, 7), np.int8)
    policy = from_callable(lambda o, m: np.ones(4, int), name="ones")
    policy.reset(4)
    assert policy.name == "ones" and isinstance(policy, Policy)
    assert policy.act(observation, mask).tolist() == [1, 1, 1, 1]
    for wrong in (np.ones(3, int), np.ones(4), np.full(4, 7), np.full(4, -1)):
        with pytest.raises(ValueError, match="must return"):
            from_callable(lambda o, m, wrong=wrong: wrong).act(observation, mask)
    with pytest.raises(ValueError, match="callable"):
        from_callable(3)
    with pytest.raises(ValueError, match="env_view"):
        from_callable(lambda o, m: m, env_view="graf")
