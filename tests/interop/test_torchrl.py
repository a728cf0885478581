"""TorchRL's own wrappers and checks on the environments as they are."""

import gymnasium as gym
import pytest
from gymnasium import spaces

pytest.importorskip("torch", reason="TorchRL needs torch")
pytest.importorskip("torchrl", reason="TorchRL is not installed")

import torch
from torchrl.envs import GymEnv, GymWrapper, PettingZooWrapper
from torchrl.envs.utils import check_env_specs

from servegym.envs.expert_placement import parallel_env as placement
from servegym.envs.llm_routing import parallel_env as routing

from .settings import PLACEMENT, ROUTING, SMALL, STEPS, make

torch.set_num_threads(1)


@pytest.mark.parametrize("env_id", SMALL)
def test_gym_env_passes_the_checks_and_pays_what_gymnasium_pays(env_id):
    env = GymEnv(env_id, categorical_action_encoding=True, **SMALL[env_id])
    check_env_specs(env)
    torch.manual_seed(0)
    env.set_seed(3)
    paid = env.rollout(100)
    assert paid.shape == (STEPS[env_id],)
    ends = paid["next", "terminated"].flatten().tolist()
    assert ends == [False] * (STEPS[env_id] - 1) + [True]
    twin = make(env_id)
    twin.reset(seed=3)
    twin.reset()  # TorchRL resets once to seed and once to begin the rollout
    for step in paid:
        if isinstance(twin.action_space, spaces.Dict):  # each part has a key of its own
            action = {name: step[name].numpy() for name in twin.action_space}
        else:
            action = step["action"].numpy()
        assert twin.step(action)[1] == pytest.approx(float(step["next", "reward"]), abs=1e-6)


@pytest.mark.parametrize("env_id", [env_id for env_id in SMALL if "Placement" not in env_id])
def test_a_native_vector_environment_resets_what_has_ended(env_id):
    """Its ``num_envs`` stands outside TorchRL, and TorchRL resets; it batches no Dict actions."""
    envs = gym.make_vec(env_id, num_envs=3, autoreset_mode="Disabled", **SMALL[env_id])
    env = GymWrapper(envs, categorical_action_encoding=True)
    check_env_specs(env)
    paid = env.rollout(2 * STEPS[env_id] + 1, break_when_any_done=False)
    assert paid.shape == (3, 2 * STEPS[env_id] + 1)
    assert paid["next", "done"].sum(dim=1).flatten().tolist() == [2, 2, 2]


@pytest.mark.parametrize("shared", [False, True])
def test_the_placement_environment_in_the_pettingzoo_wrapper(shared):
    env = PettingZooWrapper(placement(**PLACEMENT, shared_reward=shared))
    check_env_specs(env)
    torch.manual_seed(0)
    paid = env.rollout(100)
    assert paid.shape == (PLACEMENT["epochs"],)
    assert paid["server", "observation", "counts"].shape == (PLACEMENT["epochs"], 3, 4, 8)
    rewards = paid["next", "server", "reward"].squeeze(-1)
    assert rewards.shape == (PLACEMENT["epochs"], 3)
    assert bool((rewards == rewards[:, :1]).all()) == shared and bool((rewards < 0).any())


def test_the_routing_environment_in_the_pettingzoo_wrapper():
    env = PettingZooWrapper(routing(num_access_points=2, view="flat", **ROUTING))
    check_env_specs(env)
    torch.manual_seed(0)
    paid = env.rollout(100)
    assert paid.shape == (2 * ROUTING["episode_requests"],)
    seen = paid["access_point", "observation"]
    assert bool((seen["turn"].sum(dim=1) == 1).all()), "one access point has the turn"
    mask = paid["access_point", "action_mask"]
    chosen = paid["access_point", "action"]
    assert bool(mask.gather(-1, chosen.unsqueeze(-1)).all()), "TorchRL samples legal actions alone"
