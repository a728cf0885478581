r"""RLlib's PPO on the environments: train, save a checkpoint, compare it with the baselines.

::

    python -m servegym.experiments.cluster.rllib servegym/LLMRoutingFlat-v1 --set rate=8 \
        --ray local:2
    python -m servegym.experiments.cluster.rllib servegym/expert_placement-v0 --set model=toy

One agent acts in the ids with ``Flat``; in the PettingZoo id every server is an agent, and all
share one policy. Episodes are sampled by ``--env-runners`` processes wherever the cluster has a
processor. The checkpoint is RLlib's own (``Algorithm.from_checkpoint`` takes it); what is evaluated
is read back from it, with the likeliest action, on the evaluator's episodes. Action masks are not
used in training; the evaluation leaves illegal actions out. Made for Ray's new API stack.
"""

# Ray is an extra that need not be installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import servegym
from servegym._checks import choose
from servegym._command_line import parse_settings, run_main
from servegym.agents.lib.ray_cluster import check_ray, cluster
from servegym.experiments.cluster.rllib_policy import (
    PARALLEL_IDS,
    SHARED,
    compare,
    draw,
    finding,
    make_parallel,
    trained_family,
    untrained,
)
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.output import print_table, write_csv, write_text
from servegym.experiments.evaluation.reporting import report_of
from servegym.experiments.evaluation.tables import provenance, write_result

__all__ = ["ENV_IDS", "main", "parser", "ppo", "register", "train"]

FLAT_IDS = tuple(env_id for env_id in servegym.ENV_IDS if "Flat" in env_id)
ENV_IDS = (*FLAT_IDS, *PARALLEL_IDS)
"""Ids that can be trained on: those of one agent, and those of PettingZoo."""

MODULE = "servegym.experiments.cluster.rllib"
OUT = Path("rllib")


def register(env_id: str) -> str:
    """Make an id known to RLlib under its own name.

    Args:
        env_id: One of `ENV_IDS`.

    Returns:
        The id, for ``AlgorithmConfig.environment``.

    Raises:
        ValueError: If it is none of them.
    """
    choose("env_id", env_id, ENV_IDS)
    from ray import tune

    if env_id in PARALLEL_IDS:
        from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv

        tune.register_env(env_id, lambda config: ParallelPettingZooEnv(make_parallel(config)))
    else:
        # The prefix has a process that knows nothing of this package import it.
        tune.register_env(env_id, lambda config: gymnasium.make(f"servegym:{env_id}", **config))
    return env_id


def ppo(env_id: str, env_config: Mapping[str, Any], args: argparse.Namespace) -> Any:
    """RLlib's configuration of PPO for an id.

    Args:
        env_id: One of `ENV_IDS`; it is registered.
        env_config: Arguments of the environment.
        args: The command line.
    """
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    steps = max(args.batch // (max(args.env_runners, 1) * args.num_envs), 1)
    multi_agent = env_id in PARALLEL_IDS
    config = (
        PPOConfig()
        .environment(register(env_id), env_config=dict(env_config))
        .env_runners(
            num_env_runners=args.env_runners,
            # RLlib does not put several copies of a multi-agent environment side by side.
            num_envs_per_env_runner=1 if multi_agent else args.num_envs,
            rollout_fragment_length="auto" if multi_agent else steps,
            sample_timeout_s=900.0,  # on a busy machine the default of 60 s loses whole batches
        )
        .learners(num_learners=0)
        .training(
            lr=args.learning_rate,
            gamma=args.gamma,
            lambda_=0.95,
            clip_param=0.2,
            entropy_coeff=args.ent_coef,
            vf_clip_param=math.inf,
            grad_clip=0.5,
            train_batch_size=args.batch,
            minibatch_size=max(args.batch // 8, 1),
            num_epochs=6,
        )
        .rl_module(
            model_config=DefaultModelConfig(
                fcnet_hiddens=[args.width, args.width],
                fcnet_activation="tanh",
                vf_share_layers=False,
            )
        )
        .debugging(seed=args.seed, log_level="ERROR")
        .fault_tolerance(restart_failed_env_runners=True)
    )
    if multi_agent:
        config = config.multi_agent(
            policies={SHARED}, policy_mapping_fn=lambda agent, *args, **kwargs: SHARED
        )
    return config


def train(config: Any, iterations: int, checkpoint: Path) -> list[dict[str, Any]]:
    """Train, and save RLlib's checkpoints: the last one, and the one before the first batch.

    Args:
        config: What `ppo` returned.
        iterations: Batches to learn from.
        checkpoint: Folder of the last checkpoint; the first one has ``_untrained`` in its name.

    Returns:
        A row an iteration: ``iteration``, ``steps``, ``episodes`` ended, their mean return
        ``episode_return_mean``, ``seconds`` so far.
    """
    algorithm = config.build_algo()
    rows: list[dict[str, Any]] = []
    begin, episodes = time.monotonic(), 0
    try:
        algorithm.save_to_path(str(untrained(checkpoint).resolve()))
        for iteration in range(1, iterations + 1):
            # Without numbers where the process that samples was lost and is started again.
            result = algorithm.train().get("env_runners", {})
            episodes += int(result.get("num_episodes", 0))
            before = rows[-1]["steps"] if rows else 0
            rows.append(
                {
                    "iteration": iteration,
                    "steps": int(result.get("num_env_steps_sampled_lifetime", before)),
                    "episodes": episodes,
                    "episode_return_mean": float(result.get("episode_return_mean", math.nan)),
                    "seconds": round(time.monotonic() - begin, 1),
                }
            )
            last = rows[-1]
            print(
                f"{iteration}/{iterations}: {last['steps']} steps, mean return "
                f"{last['episode_return_mean']:.3f} ({last['seconds']:.0f} s)",
                flush=True,
            )
        algorithm.save_to_path(str(checkpoint.resolve()))
    finally:
        algorithm.stop()
    return rows


def parser() -> argparse.ArgumentParser:
    """The command line."""
    words = argparse.ArgumentParser(
        prog=f"python -m {MODULE}", description=(__doc__ or "").partition("\n")[0]
    )
    words.add_argument("env_id", metavar="ENV_ID", help=", ".join(ENV_IDS))
    words.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="argument of the environment; repeatable",
    )
    words.add_argument(
        "--ray",
        default="local",
        metavar="WHERE",
        help="auto (a cluster that runs), local or local:N (local)",
    )
    for name, value, meaning in (
        ("iterations", 40, "batches to learn from"),
        ("batch", 4000, "steps of a batch"),
        ("env-runners", 1, "processes that sample; 0 samples in the learner's"),
        ("num-envs", 8, "environments side by side in each, where there is one agent"),
        ("width", 128, "hidden units of both layers"),
        ("seed", 1, "of networks and exploration"),
        ("episodes", 20, "evaluation episodes"),
        ("learning-rate", 3e-4, "of Adam"),
        ("gamma", 0.97, "discount"),
        ("ent-coef", 0.003, "weight of the entropy"),
    ):
        words.add_argument(
            f"--{name}", type=type(value), default=value, help=f"{meaning} ({value})"
        )
    words.add_argument("--out", type=Path, default=OUT, help=f"folder of the results ({OUT})")
    words.add_argument("--name", help="name of the files (rllib_ppo)", default="rllib_ppo")
    words.add_argument("--checkpoint", type=Path, help="folder of the checkpoint (OUT/NAME)")
    return words


def main(argv: Sequence[str] | None = None) -> int:
    """Train, save, evaluate and draw; see ``--help``. Returns 0.

    Raises:
        ValueError: If an argument is not valid, before anything runs.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    options = parser().parse_args(words)
    choose("env_id", options.env_id, ENV_IDS)
    for name in ("iterations", "batch", "num_envs", "width", "episodes"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} is {getattr(options, name)}; allowed is 1 or more")
    if options.env_runners < 0:
        raise ValueError(f"env_runners is {options.env_runners}; allowed is 0 or more")
    workers = check_ray(options.ray, "torch", "ray.tune", "ray.rllib")
    env_config = parse_settings(options.set)
    multi_agent = options.env_id in PARALLEL_IDS
    family = trained_family(options.env_id)
    report = report_of(family)
    env: Any = (
        make_parallel(env_config) if multi_agent else gymnasium.make(options.env_id, **env_config)
    )
    servers = len(env.possible_agents) if multi_agent else 1
    env.close()
    checkpoint = options.checkpoint or options.out / options.name
    options.out.mkdir(parents=True, exist_ok=True)

    import torch

    torch.set_num_threads(1)
    # The learner's process needs a processor of its own.
    with cluster(options.ray, workers or options.env_runners + 1):
        rows = train(ppo(options.env_id, env_config, options), options.iterations, checkpoint)
    if multi_agent and env_config.get("shared_reward"):  # every server gets the sum
        for row in rows:
            row["episode_return_mean"] /= servers
    found = compare(options.env_id, env_config, checkpoint, options.episodes)
    env_kwargs = {key: value for key, value in env_config.items() if key != "shared_reward"}
    random_rows = evaluate(
        family.env_id, ["random"], options.episodes, env_kwargs={"split": "train", **env_kwargs}
    )
    random_return = float(np.mean([row["return"] for row in random_rows]))
    headline = report.headline
    keys = (headline, f"{headline}_low", f"{headline}_high", "return_mean")
    print_table(
        f"{options.env_id}, {options.episodes} evaluation episodes",
        ["policy", report.heading, "low", "high", "return"],
        [[row["policy"], *(f"{row[key]:.3f}" for key in keys)] for row in found],
    )
    write_csv(options.out / f"{options.name}_curve.csv", rows)
    first, last = rows[0], rows[-1]
    made = provenance(
        shlex.join([*parser().prog.split(), *words]),
        packages=("ray", "torch"),
        settings={"training_s": last["seconds"], "random_return": random_return},
    )
    notes = [
        finding(found, headline, report.higher_is_better),
        f"Learning curve: {first['episode_return_mean']:.3f} after {first['steps']} steps, "
        f"{last['episode_return_mean']:.3f} after {last['steps']} (exploring, training episodes); "
        f"random {random_return:.3f} on training episodes.",
        "One training run: intervals are over episodes, not over trainings.",
    ]
    write_result(options.out / options.name, found, made, notes)
    write_text(options.out / f"{options.name}.png", draw(options.out / f"{options.name}.csv"))
    print(f"{options.out / options.name}.csv, .json, .png, _curve.csv")
    return 0


if __name__ == "__main__":
    run_main(main)
