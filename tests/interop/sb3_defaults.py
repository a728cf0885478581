"""Stable-Baselines3 with every default on the ids with one Box, beside the rule that comes first.

``python tests/interop/sb3_defaults.py`` trains PPO, and DQN where actions are Discrete, with one
environment and 100,000 steps, five seeds each, and prints a row of a table for each id: means over
20 episodes of the evaluation split, the same for all, with 95 % intervals over trainings and
episodes together. ``--only PrefixRouting`` and ``--workers 2`` do what they say.
"""

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import gymnasium
import numpy as np
import torch
from stable_baselines3 import DQN, PPO

import servegym
from servegym.baselines.registry import from_callable
from servegym.envs.families import family_of
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.stats import mean, over_trainings

FIRST_RULES = {
    "llm_routing": "least_outstanding",
    "prefix_routing": "round_robin",
    "serverless_moe": "fetch",
}
SEEDS = range(1, 6)
ALGORITHMS = {"PPO": PPO, "DQN": DQN}


def one_box_ids():
    for env_id in servegym.ENV_IDS:
        if family_of(env_id).view_of(env_id) != "graph":
            yield env_id


def reached(env_id, policy, episodes):
    """The headline measure of each episode: QoS, attainment or the mean reward of a request."""
    family = family_of(env_id)
    from servegym.experiments.evaluation.reporting import report_of

    headline = report_of(family).headline
    graph = family.env_id
    # The id's own defaults: rate, episodes and all else are the family's.
    rows = evaluate(graph, [policy], episodes, num_envs=episodes, in_process=True)
    return np.array([float(row[headline]) for row in rows])


def trained(algorithm, env_id, seed, steps, episodes):
    """Scores of a training's last policy, and its processor seconds."""
    torch.set_num_threads(1)
    begin = time.process_time()
    model = ALGORITHMS[algorithm]("MlpPolicy", gymnasium.make(env_id), seed=seed, device="cpu")
    model.learn(steps)
    seconds = time.process_time() - begin

    def act(observation, _):
        return model.predict(observation, deterministic=True)[0]

    family = family_of(env_id)
    policy = from_callable(act, algorithm, env_view=family.view_of(env_id))
    return reached(env_id, policy, episodes), seconds


def shown(interval):
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="ids that have this in their name")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--episodes", type=int, default=20)
    args = parser.parse_args()
    columns = ("id", "rule", "random", *ALGORITHMS, "seconds of a core")
    print("| " + " | ".join(columns) + " |\n" + "| --- " * len(columns) + "|")
    with ProcessPoolExecutor(args.workers) as pool:
        for env_id in one_box_ids():
            if args.only not in env_id:
                continue
            rule = FIRST_RULES[family_of(env_id).name]
            first, by_chance = (reached(env_id, name, args.episodes) for name in (rule, "random"))
            cells = [f"`{rule}` {first.mean():.3f}", f"{by_chance.mean():.3f}"]
            taken = []
            for algorithm in ALGORITHMS:
                if algorithm == "DQN" and not isinstance(
                    gymnasium.make(env_id).action_space, gymnasium.spaces.Discrete
                ):
                    cells.append("")
                    continue
                run = partial(trained, algorithm, env_id, steps=args.steps, episodes=args.episodes)
                scores, seconds = zip(*pool.map(run, SEEDS), strict=True)
                cells.append(shown(over_trainings(scores, statistic=mean)))
                taken += seconds
            cells.append(f"{min(taken):.0f} to {max(taken):.0f}")
            print(f"| `{env_id}` | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
