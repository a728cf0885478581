"""skrl wraps every native vector environment by itself, and its PPO trains on one."""

import gymnasium as gym
import pytest

pytest.importorskip("torch", reason="skrl needs torch")
pytest.importorskip("skrl", reason="skrl is not installed")

import torch
from skrl.agents.torch.ppo import PPO
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.trainers.torch import SequentialTrainer
from skrl.utils.model_instantiators.torch import categorical_model, deterministic_model

from servegym.envs.expert_placement import parallel_env as placement
from servegym.envs.llm_routing import parallel_env as routing

from .settings import PLACEMENT, ROUTING, SMALL, STEPS

torch.set_num_threads(1)
SUMMARY = "servegym/LLMRoutingSummary-v3"


@pytest.mark.parametrize("env_id", SMALL)
def test_it_finds_the_wrapper_of_a_native_vector_environment(env_id):
    envs = wrap_env(gym.make_vec(env_id, num_envs=3, **SMALL[env_id]), verbose=False)
    observation, _ = envs.reset()
    assert type(envs).__name__ == "GymnasiumWrapper" and envs.num_envs == len(observation) == 3


def test_it_finds_the_wrapper_of_the_parallel_environments():
    for env in (routing(**ROUTING), placement(**PLACEMENT)):
        assert type(wrap_env(env, verbose=False)).__name__ == "PettingZooWrapper"


def test_ppo_trains_on_the_summary():
    torch.manual_seed(0)
    envs = gym.make_vec(SUMMARY, num_envs=4, autoreset_mode="SameStep", **SMALL[SUMMARY])
    envs = wrap_env(envs, verbose=False)
    spaces = {
        "observation_space": envs.observation_space,
        "action_space": envs.action_space,
        "device": envs.device,
    }
    network = [
        {"name": "net", "input": "OBSERVATIONS", "layers": ["flatten", 32], "activations": "tanh"}
    ]
    models = {
        "policy": categorical_model(network=network, output="ACTIONS", **spaces),
        "value": deterministic_model(network=network, output="ONE", **spaces),
    }
    for model in models.values():
        model.init_state_dict()
    memory = RandomMemory(memory_size=50, num_envs=4, device=envs.device)
    quiet = {"write_interval": 0, "checkpoint_interval": 0}
    cfg = {"rollouts": 50, "mini_batches": 4, "experiment": quiet}
    agent = PPO(models=models, memory=memory, cfg=cfg, **spaces)
    before = torch.nn.utils.parameters_to_vector(models["policy"].parameters()).detach().clone()
    how = {
        "timesteps": 10 * STEPS[SUMMARY],
        "headless": True,
        "disable_progressbar": True,
        "close_environment_at_exit": False,
    }
    SequentialTrainer(env=envs, agents=agent, cfg=how).train()
    after = torch.nn.utils.parameters_to_vector(models["policy"].parameters())
    assert torch.isfinite(after).all() and not torch.equal(before, after)
