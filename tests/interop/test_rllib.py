"""RLlib's PPO on the environments, single and multi-agent, on a local Ray."""

import gymnasium as gym
import numpy as np
import pytest

pytest.importorskip("torch", reason="RLlib needs torch")
pytest.importorskip("ray", reason="Ray is not installed")
pytest.importorskip("ray.rllib", reason="RLlib is not installed: pip install 'ray[rllib]'")

from ray import tune
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.env_to_module import FlattenObservations
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv

import servegym  # noqa: F401  registers the ids
from servegym.envs.expert_placement import parallel_env as placement
from servegym.envs.llm_routing import parallel_env as routing

from .settings import PLACEMENT, ROUTING

pytestmark = [pytest.mark.usefixtures("two_workers"), pytest.mark.slow, pytest.mark.timeout(600)]


def ppo(name, env_config, steps):
    return (
        PPOConfig()
        .environment(name, env_config=env_config)
        .env_runners(num_env_runners=0, rollout_fragment_length=steps)
        .learners(num_learners=0)
        .training(train_batch_size=steps, minibatch_size=steps // 2, num_epochs=1)
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[32]))
        .debugging(seed=0, log_level="ERROR")
    )


def shared_policy(config):
    """One policy for all agents, their Dict observations flattened by RLlib."""
    return config.env_runners(
        env_to_module_connector=lambda *args, **kwargs: FlattenObservations(multi_agent=True)
    ).multi_agent(policies={"shared"}, policy_mapping_fn=lambda agent, *args, **kwargs: "shared")


def train(config, iterations, module="default_policy"):
    """Whole episodes' metrics of every iteration; fails if no weight of the policy moves."""
    algorithm = config.build_algo()
    try:
        before = {k: np.copy(v) for k, v in algorithm.get_module(module).get_state().items()}
        results = [algorithm.train()["env_runners"] for _ in range(iterations)]
        after = algorithm.get_module(module).get_state()
        assert all(np.isfinite(after[key]).all() for key in after)
        layers = [key for key in before if key.endswith(".weight")]
        assert len(layers) == 2  # the encoder's and the policy's
        assert all(not np.array_equal(before[key], after[key]) for key in layers)
    finally:
        algorithm.stop()
    return results


def test_ppo_learns_from_a_registered_id():
    tune.register_env(
        "servegym-routing", lambda config: gym.make("servegym/LLMRoutingFlat-v3", **config)
    )
    results = train(ppo("servegym-routing", ROUTING, 120), 2)
    for result in results:
        assert result["episode_len_mean"] == ROUTING["episode_requests"]
        # At most one for a request served on time, at least -1 for one dropped.
        assert -30.0 <= result["episode_return_min"] <= result["episode_return_max"] <= 30.0
    assert results[-1]["num_env_steps_sampled_lifetime"] == 240


def test_ppo_on_the_servers_of_the_placement_environment():
    """Dict actions of a switch and a plan in [0, 1], which RLlib scales and clips itself."""
    tune.register_env(
        "servegym-placement", lambda config: ParallelPettingZooEnv(placement(**config))
    )
    (result,) = train(shared_policy(ppo("servegym-placement", PLACEMENT, 24)), 1, "shared")
    assert result["episode_len_mean"] == PLACEMENT["epochs"]
    assert set(result["agent_episode_returns_mean"]) == {"server_0", "server_1", "server_2"}
    parts = sum(result["agent_episode_returns_mean"].values())
    assert result["episode_return_mean"] == pytest.approx(parts) and parts < 0.0


def test_ppo_on_the_access_points_of_the_routing_environment():
    tune.register_env("servegym-points", lambda config: ParallelPettingZooEnv(routing(**config)))
    settings = {**ROUTING, "num_access_points": 2, "view": "flat"}
    (result,) = train(shared_policy(ppo("servegym-points", settings, 120)), 1, "shared")
    assert result["episode_len_mean"] == 2 * ROUTING["episode_requests"]
    assert set(result["agent_episode_returns_mean"]) == {"access_point_0", "access_point_1"}
