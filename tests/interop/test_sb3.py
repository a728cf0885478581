"""Stable-Baselines3 on the environments as they are; the script trains, measures and learns."""

import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest

pytest.importorskip("stable_baselines3", reason="Stable-Baselines3 is not installed")

import stable_baselines3 as sb3
from stable_baselines3.common.env_checker import check_env
from stable_baselines3.common.env_util import make_vec_env

from servegym.envs.families import family_of

from . import sb3_defaults
from .settings import SMALL

GRAPH, FLAT = "servegym/LLMRouting-v1", "servegym/LLMRoutingFlat-v3"
SUMMARY, PREFIX = "servegym/LLMRoutingSummary-v3", "servegym/PrefixRoutingSummary-v3"


def test_its_checker_finds_nothing_wrong(recwarn):
    check_env(gym.make(FLAT), warn=True)
    assert not [str(w.message) for w in recwarn if w.category is UserWarning]


@pytest.mark.slow
def test_ppo_takes_the_dict_observation():
    how = {"n_steps": 100, "batch_size": 50, "n_epochs": 1, "policy_kwargs": {"net_arch": [32]}}
    model = sb3.PPO("MultiInputPolicy", gym.make(GRAPH, **SMALL[GRAPH]), **how, device="cpu")
    model.learn(200)
    weights = [part.detach().numpy() for part in model.policy.parameters()]
    assert all(np.isfinite(part).all() for part in weights)


def test_maskable_ppo_finds_the_masks_itself():
    maskable = pytest.importorskip("sb3_contrib.common.maskable.utils")
    envs = make_vec_env(FLAT, n_envs=2, env_kwargs=SMALL[FLAT])
    envs.reset()
    assert maskable.is_masking_supported(envs) and maskable.get_action_masks(envs).shape == (2, 4)


@pytest.mark.slow
def test_it_makes_a_row_of_the_table():
    """In a process of its own: TorchRL, once imported, changes how this one starts others."""
    words = ["--only", "RoutingExperts", "--steps", "200", "--episodes", "1", "--algorithms", "DQN"]
    words = [sys.executable, sb3_defaults.__file__, *words]
    *_, row = subprocess.check_output(words, text=True).splitlines()
    cells = row.split(" | ")
    assert cells[0].endswith("LLMRoutingExperts-v3`") and cells[1].startswith("`least_outstanding`")
    assert len(cells[3].split(",")) == 6  # an interval and five trainings


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(("env_id", "steps"), [(SUMMARY, 100_000), (PREFIX, 50_000)])
def test_it_learns_to_route(env_id, steps):
    """Two minutes of one core each."""
    scores, _ = sb3_defaults.trained("PPO", env_id, 1, steps, 20)
    rule = sb3_defaults.FIRST_RULES[family_of(env_id).name]
    assert scores.mean() > sb3_defaults.reached(env_id, rule, 20).mean()
