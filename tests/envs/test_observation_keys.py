"""Dict observations of every environment list their keys in the order of the space."""

import gymnasium as gym
import pytest
from gymnasium import spaces

import servegym
from servegym.envs import expert_placement, llm_routing


@pytest.mark.parametrize("mode", ["vector_entry_point", "sync"])
@pytest.mark.parametrize("env_id", servegym.ENV_IDS)
def test_vector_observations_have_the_order_of_the_space(env_id, mode):
    envs = gym.make_vec(env_id, num_envs=2, vectorization_mode=mode)
    space = envs.single_observation_space
    if not isinstance(space, spaces.Dict):
        pytest.skip("one Box")
    reset, _ = envs.reset(seed=0)
    step = envs.step(envs.action_space.sample())[0]
    assert list(reset) == list(step) == list(space) == list(envs.observation_space)


@pytest.mark.parametrize("env_id", servegym.ENV_IDS)
def test_single_observations_have_the_order_of_the_space(env_id):
    env = gym.make(env_id)
    space = env.observation_space
    if not isinstance(space, spaces.Dict):
        pytest.skip("one Box")
    reset, _ = env.reset(seed=0)
    step = env.step(env.action_space.sample())[0]
    assert list(reset) == list(step) == list(space)


@pytest.mark.parametrize("family", [llm_routing, expert_placement])
def test_observations_of_agents_have_the_order_of_their_spaces(family):
    env = family.parallel_env()
    observations, _ = env.reset(seed=0)
    for agent, observation in observations.items():
        assert list(observation) == list(env.observation_space(agent))
