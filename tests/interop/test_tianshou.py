"""Tianshou 2 collects from the environments and trains its own DQN, masks included."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="Tianshou needs torch")
pytest.importorskip("tianshou", minversion="2.0", reason="Tianshou 2 is not installed")

import torch
from tianshou.algorithm.modelfree.dqn import DQN, DiscreteQLearningPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.trainer import OffPolicyTrainerParams
from tianshou.utils.net.common import Net

from .settings import make

torch.set_num_threads(1)
FLAT = "servegym/LLMRoutingFlat-v3"


def dqn(space, actions):
    torch.manual_seed(0)
    np.random.seed(0)
    policy = DiscreteQLearningPolicy(
        model=Net(state_shape=space.shape, action_shape=int(actions.n), hidden_sizes=[32]),
        action_space=actions,
        observation_space=space,
        eps_training=0.3,
    )
    return DQN(policy=policy, optim=AdamOptimizerFactory(lr=1e-3), target_update_freq=20)


def weights(algorithm):
    return torch.nn.utils.parameters_to_vector(algorithm.policy.parameters()).detach().clone()


def test_its_trainer_trains_dqn():
    one = make(FLAT)
    algorithm = dqn(one.observation_space, one.action_space)
    before = weights(algorithm)
    envs = DummyVectorEnv([lambda: make(FLAT) for _ in range(2)])
    tests = DummyVectorEnv([lambda: make(FLAT, split="val")])
    buffer = VectorReplayBuffer(500, 2)
    collector = Collector(algorithm, envs, buffer, exploration_noise=True)
    collector.reset()
    result = algorithm.run_training(
        OffPolicyTrainerParams(
            training_collector=collector,
            test_collector=Collector(algorithm, tests),
            max_epochs=1,
            epoch_num_steps=240,
            collection_step_num_env_steps=40,
            update_step_num_gradient_steps_per_sample=0.1,
            batch_size=32,
            test_step_num_episodes=2,
        )
    )
    assert result.train_step == 240 and result.train_episode == 8
    assert len(buffer) == 240
    after = weights(algorithm)
    assert torch.isfinite(after).all() and not torch.equal(before, after)
