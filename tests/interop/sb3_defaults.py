"""Stable-Baselines3 with every default on the ids with one Box, beside the rule that comes first.

``python tests/interop/sb3_defaults.py`` trains PPO, and DQN where actions are Discrete, with one
environment and 100,000 steps, five seeds each, and prints a row of a table for each id: means over
20 episodes of the evaluation split, the same for all, with 95 % intervals over trainings and
episodes together. ``--only`` and ``--algorithms`` take fewer ids and algorithms; PPO32 is PPO with
the lines that ``docs/interop.md`` recommends, which take more steps in less time.
"""

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import gymnasium
import numpy as np
import torch
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.env_util import make_vec_env

import servegym
from servegym.baselines.registry import from_callable
from servegym.envs.families import family_of
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.guest import IN_PROCESS
from servegym.experiments.evaluation.reporting import report_of
from servegym.experiments.evaluation.stats import mean, over_trainings

FIRST_RULES = {
    "llm_routing": "least_outstanding",
    "prefix_routing": "round_robin",
    "serverless_moe": "fetch",
}
SEEDS = range(1, 6)
ALGORITHMS = {"PPO": PPO, "DQN": DQN, "PPO32": PPO}
THREE_LINES = {"n_steps": 128, "batch_size": 1024, "learning_rate": 1e-3}


def one_box_ids():
    for env_id in servegym.ENV_IDS:
        if family_of(env_id).view_of(env_id) != "graph":
            yield env_id


def reached(env_id, policy, episodes):
    """The headline measure of each episode: QoS, attainment or the mean reward of a request."""
    family = family_of(env_id)
    rows = evaluate(family.env_id, [policy], episodes, num_envs=episodes, guests=IN_PROCESS)
    return np.array([float(row[report_of(family).headline]) for row in rows])


def trained(algorithm, env_id, seed, steps, episodes):
    """Scores of a training's last policy, and its processor seconds."""
    torch.set_num_threads(1)
    begin = time.process_time()
    more, env = {}, gymnasium.make(env_id)
    if algorithm == "PPO32":
        more, env = THREE_LINES, make_vec_env(env_id, 32, seed=seed)
    model = ALGORITHMS[algorithm]("MlpPolicy", env, seed=seed, device="cpu", **more)
    model.learn(steps)
    seconds = time.process_time() - begin

    def act(observation, _):
        return model.predict(observation, deterministic=True)[0]

    family = family_of(env_id)
    policy = from_callable(act, algorithm, env_view=family.view_of(env_id))
    return reached(env_id, policy, episodes), seconds


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="ids that have this in their name")
    parser.add_argument("--algorithms", nargs="+", default=["PPO", "DQN"], choices=ALGORITHMS)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--episodes", type=int, default=20)
    args = parser.parse_args(words)
    columns = ("id", "rule", "random", *args.algorithms)
    print("| " + " | ".join(columns) + " |\n" + "| --- " * len(columns) + "|")
    with ProcessPoolExecutor(args.workers) as pool:
        runs = {}
        for env_id in one_box_ids():
            discrete = isinstance(gymnasium.make(env_id).action_space, gymnasium.spaces.Discrete)
            for algorithm in args.algorithms:
                if args.only in env_id and (discrete or algorithm != "DQN"):
                    run = partial(trained, algorithm, env_id, steps=args.steps)
                    run = partial(run, episodes=args.episodes)
                    runs[env_id, algorithm] = [pool.submit(run, seed) for seed in SEEDS]
        for env_id in dict.fromkeys(env_id for env_id, _ in runs):
            rule = FIRST_RULES[family_of(env_id).name]
            first, by_chance = (reached(env_id, name, args.episodes) for name in (rule, "random"))
            cells = [f"`{rule}` {first.mean():.3f}", f"{by_chance.mean():.3f}"]
            for algorithm in args.algorithms:
                done = [run.result() for run in runs.get((env_id, algorithm), ())]
                if done:
                    scores, seconds = zip(*done, strict=True)
                    value, low, high = over_trainings(scores, statistic=mean)
                    each = ", ".join(f"{x.mean():.3f}" for x in scores)
                    taken = f"{min(seconds):.0f} to {max(seconds):.0f} s"
                    cells.append(f"{value:.3f} [{low:.3f}, {high:.3f}] ({each}; {taken})")
                else:
                    cells.append("")
            print(f"| `{env_id}` | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
