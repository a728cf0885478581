"""PPO of Stable-Baselines3 on a routing id: trains, then plays episodes of the evaluation split.

The environment is made by its id. ``VecNormalize`` scales observations and rewards, as it does for
any environment in raw units. It serves the interoperability tests and is no agent of this package.
"""

import argparse
import json
import time

import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--env-id", default="servegym:servegym/LLMRoutingSummary-v0")
    parser.add_argument("--env-kwargs", type=json.loads, default={"rate": 8.0})
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-timesteps", type=int, default=400_000)
    parser.add_argument("--gamma", type=float, default=0.97)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--num-steps", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--split", default="eval")
    parser.add_argument("--eval-seed", type=int, default=100_000)
    parser.add_argument("--no-normalize", action="store_true")
    parser.add_argument("--defaults", action="store_true")
    return parser.parse_args()


def main():
    args = parse_args()
    begin = time.process_time()
    envs = make_vec_env(args.env_id, args.num_envs, seed=args.seed, env_kwargs=args.env_kwargs)
    if not args.no_normalize:
        envs = VecNormalize(envs)
    if args.defaults:
        model = PPO("MlpPolicy", envs, seed=args.seed, device="cpu", gamma=args.gamma)
    else:
        model = PPO(
            "MlpPolicy",
            envs,
            learning_rate=lambda left: args.learning_rate * left,
            n_steps=args.num_steps,
            batch_size=args.batch_size,
            n_epochs=args.epochs,
            gamma=args.gamma,
            seed=args.seed,
            device="cpu",
        )
    model.learn(args.total_timesteps)
    trained = time.process_time() - begin

    kwargs = {**args.env_kwargs, "split": args.split, "episode_requests": 1000}
    tests = make_vec_env(args.env_id, 20, seed=args.eval_seed, env_kwargs=kwargs)
    obs, qos = tests.reset(), []
    while len(qos) < 20:
        if not args.no_normalize:
            obs = envs.normalize_obs(obs)
        action, _ = model.predict(obs, deterministic=True)
        obs, _, dones, infos = tests.step(action)
        qos += [info["episode_kpis"]["avg_qos"] for info in infos if "episode_kpis" in info]
    print(f"cpu_s={trained:.1f}")
    print(f"avg_qos={np.mean(qos):.4f}")


if __name__ == "__main__":
    main()
