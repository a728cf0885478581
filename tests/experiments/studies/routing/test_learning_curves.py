"""Learning curves of the agents: the control, and the flags of the trainings."""

import gymnasium as gym
import numpy as np
import pytest

from servegym.experiments.studies.routing import learning_curves


def test_shuffled_rewards_are_those_of_any_system_and_step_but_in_evaluations():
    def rewards(**more):
        envs = gym.make_vec("servegym/LLMRoutingSummary-v2", 8, reward="completed_qos", **more)
        envs.reset(seed=0)
        return np.array([envs.step(np.ones(8, np.int64))[1] for _ in range(40)])

    plain = rewards()
    with learning_curves.shuffled_rewards(0):
        shuffled, evaluation = rewards(), rewards(split="val")
    assert (plain != shuffled).any() and set(shuffled.ravel()) <= set(plain.ravel())
    np.testing.assert_array_equal(evaluation, rewards(split="val"))
    np.testing.assert_array_equal(plain, rewards())


@pytest.mark.parametrize("table", learning_curves.TRAININGS)
def test_every_training_has_flags_that_its_agent_takes(table):
    import importlib
    import shlex

    import tyro

    given = learning_curves.TRAININGS[table]
    module = importlib.import_module(f"servegym.agents.{given.agent}")
    flags = shlex.split(given.flags)
    assert tyro.cli(module.Args, args=flags, config=(tyro.conf.FlagConversionOff,)).seed
