"""d3rlpy's own DQN learns on an id with one flat Box, and its model is a policy."""

import gymnasium as gym
import numpy as np
import pytest

pytest.importorskip("torch", reason="d3rlpy needs torch")
pytest.importorskip("d3rlpy", reason="d3rlpy is not installed")

import d3rlpy
import torch

from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.guest import IN_PROCESS

from .settings import ROUTING, make

torch.set_num_threads(1)
FLAT = "servegym/LLMRoutingFlat-v3"


def test_dqn_trains_and_is_evaluated():
    env = make(FLAT)
    dqn = d3rlpy.algos.DQNConfig(batch_size=16).create(device="cpu")
    dqn.build_with_env(env)
    before = torch.nn.utils.parameters_to_vector(dqn.impl.q_function.parameters()).detach().clone()
    dqn.fit_online(
        env,
        d3rlpy.dataset.create_fifo_replay_buffer(limit=1000, env=env),
        d3rlpy.algos.ConstantEpsilonGreedy(0.3),
        n_steps=120,
        n_steps_per_epoch=120,
        update_start_step=30,
        show_progress=False,
        logger_adapter=d3rlpy.logging.NoopAdapterFactory(),
    )
    after = torch.nn.utils.parameters_to_vector(dqn.impl.q_function.parameters())
    assert torch.isfinite(after).all() and not torch.equal(before, after)
    (row,) = evaluate(FLAT, [dqn], 1, 7, ROUTING, guests=IN_PROCESS)
    assert row["policy"] == "DQN"
    env = gym.make(FLAT, split="eval", **ROUTING)
    (observation, _), ended, paid = env.reset(seed=7), False, []
    while not ended:
        (action,) = dqn.predict(np.array([observation]))
        observation, reward, ended, *_ = env.step(action)
        paid.append(reward)
    assert row["return"] == pytest.approx(sum(paid))
