"""Unmodified agents and wrappers of others work on the environments as they are."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers

import servegym

GRAPH, FLAT = servegym.ENV_IDS[:2]
SHORT = {"num_experts": 3, "episode_requests": 100, "rate": 8.0}
SMALL_NET = {"net_arch": [32, 32]}


@pytest.fixture
def sb3():
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    return pytest.importorskip("stable_baselines3")


def parameters(model):
    return np.concatenate([p.detach().numpy().ravel() for p in model.policy.parameters()])


def test_stable_baselines3_finds_nothing_wrong(sb3, recwarn):
    from stable_baselines3.common.env_checker import check_env

    check_env(gym.make(FLAT), warn=True)
    assert not [str(w.message) for w in recwarn if w.category is UserWarning]


@pytest.mark.slow
def test_ppo_takes_the_dict_observation(sb3):
    how = {"n_steps": 100, "batch_size": 50, "n_epochs": 1, "policy_kwargs": SMALL_NET}
    model = sb3.PPO("MultiInputPolicy", gym.make(GRAPH, **SHORT), **how, seed=0, device="cpu")
    model.learn(200)
    assert np.isfinite(parameters(model)).all()


def test_maskable_ppo_finds_the_masks_itself(sb3):
    pytest.importorskip("sb3_contrib")
    from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
    from stable_baselines3.common.env_util import make_vec_env

    envs = make_vec_env(FLAT, n_envs=2, env_kwargs=SHORT)
    envs.reset()
    assert is_masking_supported(envs) and get_action_masks(envs).shape == (2, 4)


def test_gymnasium_vector_wrappers():
    envs = wrappers.vector.RecordEpisodeStatistics(gym.make_vec(FLAT, num_envs=3, **SHORT))
    envs = wrappers.vector.NormalizeObservation(envs)
    envs.reset(seed=0)
    total = np.zeros(3)
    for _ in range(100):
        seen, rewards, terminated, _, info = envs.step(np.array([0, 1, 2]))
        assert np.isfinite(seen).all()
        total += rewards
    assert terminated.all() and info["episode"]["l"].tolist() == [100] * 3
    np.testing.assert_allclose(info["episode"]["r"], total, atol=1e-4)
