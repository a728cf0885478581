r"""RLlib's PPO on the flat ids: train, save a checkpoint, compare it with the baselines.

::

    python -m servegym.experiments.cluster.rllib servegym/LLMRoutingFlat-v1 --set rate=8 \
        --ray local:2

Episodes are sampled by ``--env-runners`` processes wherever the cluster has a processor. The
checkpoint is RLlib's own (``Algorithm.from_checkpoint`` takes it); what is evaluated is read back
from it, with the likeliest action, on the evaluator's episodes. Action masks are not used in
training; the evaluation leaves illegal actions out. Made for Ray's new API stack.
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
from servegym.baselines.protocol import BasePolicy
from servegym.envs.families import family_of
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.output import print_table, write_csv
from servegym.experiments.evaluation.reporting import report_of
from servegym.experiments.evaluation.stats import iqm, stratified_bootstrap
from servegym.experiments.evaluation.tables import provenance, write_result

__all__ = ["ENV_IDS", "RLlibPolicy", "main", "parser", "ppo", "register", "train"]

ENV_IDS = tuple(env_id for env_id in servegym.ENV_IDS if "Flat" in env_id)
"""Ids that can be trained on."""

BASELINES = {
    "llm_routing": ("random", "shortest_queue", "greedy_qos"),
    "serverless_moe": ("random", "mix", "greedy_warm"),
}
"""Policies that the trained one is compared with, by family; of the others ``random`` alone."""

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
    return (
        PPOConfig()
        .environment(register(env_id), env_config=dict(env_config))
        .env_runners(
            num_env_runners=args.env_runners,
            num_envs_per_env_runner=args.num_envs,
            rollout_fragment_length=steps,
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


def train(config: Any, iterations: int, checkpoint: Path) -> list[dict[str, Any]]:
    """Train, and save RLlib's checkpoint.

    Args:
        config: What `ppo` returned.
        iterations: Batches to learn from.
        checkpoint: Folder of the checkpoint.

    Returns:
        A row an iteration: ``iteration``, ``steps``, ``episodes`` ended, their mean return
        ``episode_return_mean``, ``seconds`` so far.
    """
    algorithm = config.build_algo()
    rows: list[dict[str, Any]] = []
    begin, episodes = time.monotonic(), 0
    try:
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


class RLlibPolicy(BasePolicy):
    """The policy of an RLlib checkpoint, for the evaluator.

    Args:
        checkpoint: Folder that `train` wrote.
        action_space: Space of one action.

    Raises:
        ValueError: If there is no policy in the folder.
    """

    name, env_view = "rllib_ppo", "flat"

    def __init__(self, checkpoint: Path, action_space: gymnasium.Space[Any]) -> None:
        from ray.rllib.core.rl_module.rl_module import RLModule

        module = Path("learner_group", "learner", "rl_module", "default_policy")
        folder = checkpoint.resolve() / module
        if not folder.is_dir():
            raise ValueError(f"checkpoint is {str(checkpoint)!r}; there is no policy in {folder}")
        self.module: Any = RLModule.from_checkpoint(str(folder))
        self.action_space = action_space

    def act(self, observation: Any, action_mask: Any = None) -> Any:
        """The likeliest action (B, ...) of every row (B, n); of a `Discrete` space, a legal one."""
        import torch
        from ray.rllib.core.columns import Columns

        with torch.no_grad():
            seen = torch.as_tensor(np.asarray(observation, np.float32))
            logits = self.module.forward_inference({Columns.OBS: seen})[Columns.ACTION_DIST_INPUTS]
            if isinstance(self.action_space, gymnasium.spaces.Discrete) and action_mask is not None:
                legal = torch.as_tensor(np.asarray(action_mask) != 0)
                logits = logits.masked_fill(~legal, -torch.inf)
            law = self.module.get_inference_action_dist_cls().from_logits(logits)
            return law.to_deterministic().sample().numpy().astype(np.int64)


def compare(
    env_id: str, env_config: Mapping[str, Any], checkpoint: Path, episodes: int
) -> list[dict[str, Any]]:
    """A row a policy: the checkpoint's and the baselines' numbers on the same episodes.

    Returns:
        ``policy``, the family's headline (interquartile mean) with ``_low`` and ``_high``, its
        mean, the mean return and the number of episodes.
    """
    family = family_of(env_id)
    headline = report_of(family).headline
    env = gymnasium.make(env_id, **env_config)
    policy = RLlibPolicy(checkpoint, env.action_space)
    env.close()
    names = BASELINES.get(family.name, ("random",))
    rows = evaluate(env_id, [policy, *names], episodes, env_kwargs=env_config)
    found = []
    for name in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == name]
        value = stratified_bootstrap([row[headline] for row in own], iqm)
        found.append(
            {
                "policy": name,
                headline: value.value,
                f"{headline}_low": value.low,
                f"{headline}_high": value.high,
                f"{headline}_mean": float(np.mean([row[headline] for row in own])),
                "return_mean": float(np.mean([row["return"] for row in own])),
                "episodes": len(own),
            }
        )
    return found


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
        ("num-envs", 8, "environments side by side in each"),
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
    """Train, save and evaluate; see ``--help``. Returns 0.

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
    gymnasium.make(options.env_id, **env_config).close()  # refused before a cluster is started
    checkpoint = options.checkpoint or options.out / options.name
    options.out.mkdir(parents=True, exist_ok=True)

    import torch

    torch.set_num_threads(1)
    # The learner's process needs a processor of its own.
    with cluster(options.ray, workers or options.env_runners + 1):
        rows = train(ppo(options.env_id, env_config, options), options.iterations, checkpoint)
    found = compare(options.env_id, env_config, checkpoint, options.episodes)
    report = report_of(family_of(options.env_id))
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
        settings={"training_s": last["seconds"]},
    )
    notes = [
        f"Learning curve: {first['episode_return_mean']:.3f} after {first['steps']} steps, "
        f"{last['episode_return_mean']:.3f} after {last['steps']} (exploring, training episodes).",
        "One training run: intervals are over episodes, not over trainings.",
    ]
    write_result(options.out / options.name, found, made, notes)
    print(f"{options.out / options.name}.csv, .json, _curve.csv")
    return 0


if __name__ == "__main__":
    run_main(main)
