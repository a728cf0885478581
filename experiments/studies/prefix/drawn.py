"""One PPO policy for drawn settings of prefix routing, beside rules with one set of constants.

::

    python -m servegym.experiments.studies.prefix.drawn --checkpoints runs/prefix

trains ``agents/ppo.py`` into that folder, five seeds; what is there is not trained again. Each of
its rollouts plays the next of the settings that `prefix_search` is trained on. The last policies
and the rules then play the same episodes of settings that no training and no search of constants
has seen: `HELD_OUT` draws them anew.

`weighted_load` is tuned on the training settings: the best of 36 pairs of constants, each in an
episode of every setting. The constants of the other rules named *tuned* are those of the table
``one_policy``, one set for all settings as well. The policies of ``learning``, trained on mixed
cards alone, show how far a policy of one setting carries.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from servegym._command_line import run_main
from servegym.agents import load_policy
from servegym.baselines.prefix_routing import RULES, PrefixSystem, RulePolicy
from servegym.baselines.prefix_routing.drawn_settings import (
    Setting,
    attainment,
    begin_alike,
    drawn_with_rate,
    problem_of,
    rules_decide,
    setting_of,
)
from servegym.baselines.prefix_routing.simple import WeightedLoad
from servegym.envs.prefix_routing.core import PrefixBatch
from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.evaluation.play import DEFAULT_SEED
from servegym.experiments.evaluation.stats import mean, over_trainings
from servegym.experiments.evaluation.tables import Note, note
from servegym.experiments.papers.study import RESULTS, Study, command, interval_columns
from servegym.experiments.studies.prefix import learning

__all__ = ["STUDIES", "main"]

TRAINING = range(63)
"""Streams of `setting_of`."""
HELD_OUT, HELD_OUT_SEED = range(14), 20261128
"""Streams and seed of `drawn_with_rate`."""
MIXED = "mixed-cards"
PUBLISHED = (
    *("least_load", "llm_d", "llm_d_affinity", "lmetric", "aibrix", "dynamo", "mooncake"),
    *("sglang_cache_aware", "weighted_load"),
)
AGENT: dict[str, Any] = learning.AGENT | {
    "num_envs": 8,
    "learning_rate": 5e-4,
    "average": 0.003,
    "total_timesteps": 1_600_000,
    "eval_every": 1_600_000,
}
RATES = (0.8, 1.1)
"""Range of a rollout's rate beside the setting's."""


class DrawnEnvs(gym.vector.VectorWrapper):
    """Systems of one setting at a time; every reset goes to the next, in random order.

    Args:
        settings: The settings.
        num_envs: Systems side by side.
        arguments: Of all environments, in place of the settings' own.
    """

    def __init__(self, settings: Sequence[Setting], num_envs: int, **arguments: Any) -> None:
        self._settings, self._num_envs, self._arguments = settings, num_envs, arguments
        self._order: list[int] = []
        super().__init__(self._make(settings[0]))

    def _make(self, setting: Setting) -> gym.vector.VectorEnv:
        rates = [setting["rate"] * share for share in RATES]
        arguments = setting | {"rate": rates} | self._arguments
        return gym.make_vec(learning.SUMMARY_ID, self._num_envs, "vector_entry_point", **arguments)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin episodes of the next setting; a seed is that of all to come, too."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        if not self._order:
            self._order = self._rng.permutation(len(self._settings)).tolist()
        self.env.close()
        self.env = self._make(self._settings[self._order.pop()])
        return self.env.reset(seed=int(self._rng.integers(1 << 31)), options=options)


def training(folder: Path, settings: Sequence[Setting]) -> list[Path]:
    """The runs over all settings, trained where they are missing."""
    from servegym.agents import ppo

    plain = ppo.make_envs

    def make_envs(env_id: str, num_envs: int, **arguments: Any) -> gym.vector.VectorEnv:
        if "autoreset_mode" not in arguments:  # an evaluation's
            return plain(env_id, num_envs, **arguments)
        return DrawnEnvs(settings, num_envs, **arguments)

    with patch.object(ppo, "make_envs", make_envs):
        return learning.trained(folder, "drawn", AGENT)


def tuned_weighted_load(settings: Sequence[Setting]) -> dict[str, float]:
    """Constants of `WeightedLoad` that are best in the mean of an episode of every setting."""
    reached = []
    for seed, setting in enumerate(settings):
        problem = problem_of(setting)
        batch = PrefixBatch(problem, len(learning.POINTS))
        begin_alike(batch, np.random.default_rng([seed, 0]))
        rules = [WeightedLoad(*point) for point in learning.POINTS]
        reached.append(
            attainment(batch, rules_decide(rules, PrefixSystem.from_problem(problem), seed))
        )
    best = int(np.mean(reached, axis=0).argmax())
    return dict(zip(("load_s", "power"), learning.POINTS[best], strict=True))


def rules(settings: Sequence[Setting]) -> dict[str, dict[str, Any]]:
    """Rule and constants of each row of the table, *tuned* ones with one set for all settings."""
    table = read_rows(RESULTS / "prefix" / "one_policy.csv")
    searched = {
        f"{row['policy']} tuned": json.loads(row["constants"])
        for row in table
        if row["kind"] == "joint" and row["policy"] in RULES
    }
    return (
        {name: {} for name in PUBLISHED}
        | {"weighted_load tuned": tuned_weighted_load(settings)}
        | searched
    )


def _rows(options: learning.Options, _: Any, __: Sequence[Any]) -> Iterator[dict[str, Any]]:
    some = TRAINING[:3] if options.quick else TRAINING
    settings = [setting_of(stream) for stream in some]
    constants = rules(settings)
    drawn = training(options.checkpoints, settings)
    runs = {"ppo": drawn, "ppo of mixed cards": learning.training(options.checkpoints, MIXED)}
    scores: dict[str, list[list[NDArray[np.float64]]]] = {}
    for stream in HELD_OUT[:2] if options.quick else HELD_OUT:
        setting = drawn_with_rate(stream, HELD_OUT_SEED)
        setting |= {"split": "eval"} if "split" in setting else {}
        system = PrefixSystem.from_kwargs(**setting)
        policies: dict[str, list[Any]] = {
            name: [RulePolicy(system, partial(RULES[name.split()[0]][0], **values), name)]
            for name, values in constants.items()
        }
        policies["prefix_search"] = ["prefix_search"]
        for name, folders in runs.items():
            policies[name] = [load_policy(run / "last.safetensors", system) for run in folders]
        for name, of_name in policies.items():
            each = [
                learning.played(policy, DEFAULT_SEED, options.episodes, **setting)[0]
                for policy in of_name
            ]
            scores.setdefault(name, []).append(each)
    # (policy) -> (trainings, episodes, settings)
    arrays = {name: np.moveaxis(np.array(each), 0, -1) for name, each in scores.items()}
    best = max(constants, key=lambda name: arrays[name].mean())
    for name, values in arrays.items():
        over_settings = list(values.mean(-1))
        row: dict[str, Any] = {"policy": name, "trainings": len(values)}
        row |= interval_columns("attainment", over_trainings(over_settings, statistic=mean))
        gain = over_trainings(over_settings, arrays[best].mean(-1)[0], mean)
        row |= interval_columns("minus_best_rule", gain)
        row["each_setting"] = json.dumps(values.mean((0, 1)).round(4).tolist())
        row["each_training"] = json.dumps(values.mean((1, 2)).round(4).tolist())
        row["constants"] = json.dumps(constants.get(name) or {})
        row["cpu_s"] = json.dumps([learning.seconds(run) for run in drawn] if name == "ppo" else [])
        yield row


def _notes(options: learning.Options, rows: Sequence[Mapping[str, Any]]) -> Iterator[Note]:
    for row in rows:
        if row["policy"].startswith("ppo"):
            yield note(
                f"{row['policy']}: {row['attainment']:.3f} [{row['attainment_low']:.3f}, "
                f"{row['attainment_high']:.3f}], {row['minus_best_rule']:+.3f} "
                f"[{row['minus_best_rule_low']:+.3f}, {row['minus_best_rule_high']:+.3f}] over the "
                "best rule."
            )


STUDIES = (Study(name="drawn", figure="drawn", columns=_rows, notes=_notes, packages=("torch",)),)

main = command(__spec__.name, __doc__, STUDIES, 10, learning.add_checkpoints)

if __name__ == "__main__":
    run_main(main)
