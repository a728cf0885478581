"""The table and curves of what PPO learns on the serverless family."""

import gymnasium as gym

from servegym.experiments.studies.serverless import learning


def test_shuffled_rewards_are_those_of_the_step_in_another_order():
    made = {"num_envs": 16, "vectorization_mode": "vector_entry_point", "model": "toy"}
    plain, shuffled = (gym.make_vec("servegym/ServerlessMoEFlat-v1", **made) for _ in range(2))
    shuffled = learning.Shuffled(shuffled)
    plain.reset(seed=0)
    shuffled.reset(seed=0)
    actions = plain.action_space.sample()
    own, other = plain.step(actions)[1], shuffled.step(actions)[1]
    assert (own != other).any() and sorted(own) == sorted(other)
