"""PPO of Stable-Baselines3 on a routing id: trains, then plays 20 episodes of the evaluation split.

The environment is made by its id. ``VecNormalize`` scales observations and rewards, as it does for
any environment in raw units. The file serves the interoperability tests and is no agent of this
package.
"""

import argparse
import time

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--env-id", default="servegym:servegym/LLMRoutingSummary-v1")
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--reward", default="qos_aware")
    parser.add_argument("--gamma", type=float, default=0.98)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-timesteps", type=int, default=500_000)
    return parser.parse_args()


def main():
    args = parse_args()
    torch.set_num_threads(1)
    begin = time.process_time()
    kwargs = {"rate": args.rate, "reward": args.reward}
    # The last reward of an episode has all that is still served: cut off before, and bootstrapped.
    cut = {**kwargs, "max_episode_steps": 999}
    envs = VecNormalize(make_vec_env(args.env_id, 32, seed=args.seed, env_kwargs=cut))
    model = PPO(
        "MlpPolicy",
        envs,
        learning_rate=lambda left: 1e-3 * left,
        n_steps=128,
        batch_size=1024,
        n_epochs=4,
        gamma=args.gamma,
        seed=args.seed,
        device="cpu",
    )
    model.learn(args.total_timesteps)
    print(f"cpu_s={time.process_time() - begin:.1f}")

    tests = make_vec_env(args.env_id, 20, seed=100_000, env_kwargs={**kwargs, "split": "eval"})
    observation, qos = tests.reset(), []
    while len(qos) < 20:
        observation = envs.normalize_obs(observation)
        action, _ = model.predict(observation, deterministic=True)
        observation, _, _, infos = tests.step(action)
        qos += [info["episode_kpis"]["avg_qos"] for info in infos if "episode_kpis" in info]
    print(f"avg_qos={np.mean(qos):.4f}")


if __name__ == "__main__":
    main()
