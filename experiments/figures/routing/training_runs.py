"""The trainings that the routing tables and figures compare, the most useful first.

The paper's three learners are trained from their own reward alone: SAC-HAN (``sac_han``) with the
QoS-aware reward, Baseline RL (``baseline_rl``) with the experts' rows and the completed QoS, and
Baseline RL + DSA (``baseline_rl_dsa``) with the graph and the completed QoS. None of them starts at
a heuristic, learns from labels or lets its critics read the coming arrivals (`FROM_NOTHING`).
Their other settings come from their sweeps on the validation split (`TUNED`, `TUNED_ROWS`). With
the graph they take a million steps, ten minutes of a core; Baseline RL takes 400,000.
``direct_search`` has the state of Baseline RL and no learning: what a policy over that state can
be. The group ``general`` has one policy for all rates: ``residual`` is SAC-HAN that corrects a
heuristic, ``baseline_rl`` the paper's baseline. The group ``mixed`` has one policy for every fleet,
load, requirement and number of experts, which ships as ``rpi``.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["POINTS", "RUNS", "TrainingRun", "select"]

PAPER_STEPS = {
    "sac_han": 1_000_000,
    "baseline_rl": 400_000,
    "baseline_rl_dsa": 1_000_000,
    "direct_search": 12_000_000,
}
"""Steps of the group ``paper`` by variant."""
STEPS = {"sac_han": 300_000, "baseline_rl": 400_000, "direct_search": 12_000_000}
"""Steps of the other groups by the learner."""
GENERAL_STEPS = 240_000

POINTS: dict[str, dict[str, Any]] = {
    "het8": {
        "profiles": "edge-6-heterogeneous",
        "rate_low": 8.0,
        "rate_high": 8.0,
        "eval_rates": (8.0,),
    },
    "linear5": {
        "profiles": "paper-linear",
        "rate_low": 5.0,
        "rate_high": 5.0,
        "eval_rates": (5.0,),
    },
    "het5": {
        "profiles": "edge-6-heterogeneous",
        "rate_low": 5.0,
        "rate_high": 5.0,
        "eval_rates": (5.0,),
    },
    "het4-11": {
        "profiles": "edge-6-heterogeneous",
        "rate_low": 4.0,
        "rate_high": 11.0,
        "eval_rates": (5.0, 8.0, 10.0),
    },
    "all": {
        "profiles": "edge-6-heterogeneous",
        "rate_low": 2.0,
        "rate_high": 22.0,
        "eval_rates": (3.0, 5.0, 8.0, 11.0, 16.0),
    },
}
"""Fleet and arrival rates of training and of the evaluations on the validation split."""

SHORT_MEMORY = {"buffer_size": 50_000, "max_episode_steps": 250}
FROM_NOTHING = {"rollout_labels": 0, "prior": 0.0, "privileged_critic": False, **SHORT_MEMORY}
"""What the paper's learners do without: labels, a heuristic, foresight. Their replay is short, so
that it forgets how they began, and their training episodes are: in one of 1,000 requests the empty
system of its start is out of the replay long before the end, and a policy that no longer knows it
may drop everything there."""

TUNED = {"alpha": 0.088, "n_step": 8, "gamma": 0.98, "lr": 3.9e-3, "actor_lr": 2.8e-3}
"""The best of the eight points of the sweeps ``sac_han_paper`` and ``baseline_rl_dsa`` for the
latter; for SAC-HAN level with the best one (.434 and .435), which went on less well after the
sweep's 50,000 steps."""
TUNED_ROWS = {"alpha": 0.195, "n_step": 8, "gamma": 0.995, "lr": 3.0e-3, "actor_lr": 1.7e-3}
"""The best of the thirty trials of the sweep ``baseline_rl``."""

RESIDUAL = {"rollout_labels": 0, "prior": 0.02, "privileged_critic": True}
"""SAC alone, as a correction of `priced_greedy`."""

VARIANTS: dict[str, dict[str, Any]] = {
    "general": {"reward": "paid_forward", **RESIDUAL},
    "sac_han": {"reward": "qos_aware", **FROM_NOTHING, **TUNED},
    "baseline_rl": {
        "reward": "completed_qos",
        "updates_per_step": 1,
        **SHORT_MEMORY,
        **TUNED_ROWS,
    },
    "baseline_rl_dsa": {"reward": "completed_qos", **FROM_NOTHING, **TUNED},
    "direct_search": {"reward": "completed_qos"},
}
"""Arguments of the agent by variant."""

AGENTS = {"baseline_rl": "baseline_rl", "direct_search": "direct_search"}
"""Module of ``servegym.agents`` by variant where it is not ``sac_han``."""

PREDICTORS = {
    "ps_pl": (),
    "zs_pl": ('score_predictor="zero"',),
    "ps_zl": ('length_predictor="zero"',),
    "zs_zl": ('score_predictor="zero"', 'length_predictor="zero"'),
    "mean": ('score_predictor="mean"', 'length_predictor="mean"'),
}
"""Predicted or no scores and lengths (the paper's Fig. 18), and each expert's train means."""

LIMITS = "latency_requirement_s=[0.014,0.048]"
"""Range of the latency requirement L for the routers of Fig. 13, drawn anew for each episode."""

EXPERTS = {"linear5": (3, 9, 12), "het5": (3, 6, 9, 12)}
"""Numbers of experts to train for at the rate of the paper's Fig. 11, by point."""

MIXTURE = tuple(
    f"profiles={fleet} num_experts={count} rate={rate}"
    for fleet, counts in (
        ("edge-6-heterogeneous", (3, 9, 12)),
        ("edge-6-homogeneous", (9,)),
        ("paper-linear", (3, 9, 12)),
    )
    for count, rate in (
        *((6, rate) for rate in ("[2,7]", "[4,12]", "[8,22]")),
        *((n, "[2,12]") for n in counts),
    )
)
"""What the router that ships as ``rpi`` is trained on, all together: fleets, numbers of experts and
rates, each with every latency requirement L."""
RPI: dict[str, Any] = {
    "mixture": MIXTURE,
    "set": ("episode_requests=400", LIMITS),
    "num_envs": 24 * len(MIXTURE),
    "fit_every": 80_000,
    "horizon_s": 5.0,
    "near": 0.05,
    "improve_from": 160_000,
    "eval_episodes": 8,
}
RPI_LABELS = 480_000


@dataclass(frozen=True)
class TrainingRun:
    """One training.

    Attributes:
        group: What it belongs to: ``paper``, ``general``, ``mixed``, ``predictors``,
            ``limits`` or ``experts``.
        variant: Name of the learner or of the change.
        point: Key of `POINTS`.
        seed: Seed of the training.
        steps: Decisions to train for.
        settings: Arguments of the agent that differ from its defaults.
        agent: Module of ``servegym.agents``.
    """

    group: str
    variant: str
    point: str
    seed: int
    steps: int
    settings: Mapping[str, Any] = field(hash=False)
    agent: str = "sac_han"

    @property
    def network(self) -> str:
        """Network over the state: ``han``, ``sets``; over the rows alone ``expert``, ``linear``."""
        fixed = {"baseline_rl": "expert", "direct_search": "linear", "rpi": "sets"}
        return fixed.get(self.agent, "han")

    @property
    def from_nothing(self) -> bool:
        """Whether the policy does not start at the heuristic `priced_greedy`."""
        beginners = ("baseline_rl", "direct_search")
        return self.agent in beginners or self.settings.get("prior") == 0.0

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the agent; in ``set`` those of the environment that ``settings`` names."""
        given = dict(self.settings)
        items = [f"rate=[{given.pop('rate_low'):g},{given.pop('rate_high'):g}]"]
        for key in ("profiles", "reward", "max_episode_steps"):
            items += [f"{key}={given.pop(key)}"] if key in given else []
        if self.agent == "sac_han" and not self.settings["rollout_labels"]:
            items.append("episode_requests=1000")  # shorter ones are for its labels
        return given | {"set": (*items, *given.get("set", ()))}

    @property
    def name(self) -> str:
        """Folder of the run."""
        return f"{self.group}_{self.variant}_{self.point}_s{self.seed}"

    def command(self, runs: Path, snapshot_steps: int) -> list[str]:
        """The command line that trains it or goes on training it."""
        given = {
            **self.arguments,
            "seed": self.seed,
            "total_timesteps": self.steps,
            "out_dir": str(runs),
            "run_name": self.name,
            "checkpoint_every": snapshot_steps,
            "resume": True,
        }
        words = [sys.executable, "-m", f"servegym.agents.{self.agent}"]
        for key, value in given.items():
            values = value if isinstance(value, tuple) else (value,)
            words += [f"--{key}", *(str(one) for one in values)]
        return words


def _run(group: str, variant: str, base: str, point: str, seed: int, **changes: Any) -> TrainingRun:
    steps = changes.pop("steps", STEPS.get(base, STEPS["sac_han"]))
    settings = {**POINTS[point], **VARIANTS[base], **changes}
    agent = AGENTS.get(base, "sac_han")
    return TrainingRun(group, variant, point, seed, steps, settings, agent)


def _paper(seeds: Sequence[int]) -> Iterator[TrainingRun]:
    for seed in seeds:
        for point in ("het8", "linear5"):
            for variant, steps in PAPER_STEPS.items():
                yield _run("paper", variant, variant, point, seed, steps=steps)


def _general(seeds: Sequence[int]) -> Iterator[TrainingRun]:
    for seed in seeds:
        yield _run("general", "residual", "general", "het4-11", seed, steps=GENERAL_STEPS)
        yield _run("general", "baseline_rl", "baseline_rl", "het4-11", seed)


def _mixed(seeds: Sequence[int]) -> Iterator[TrainingRun]:
    for seed in seeds:
        settings = {**POINTS["all"], "reward": "paid_forward", **RPI}
        yield TrainingRun("mixed", "rpi", "all", seed, RPI_LABELS, settings, "rpi")


def _limits(seeds: Sequence[int]) -> Iterator[TrainingRun]:
    for seed in seeds:
        for point in ("het8", "linear5"):
            yield _run("limits", "direct_search", "direct_search", point, seed, set=(LIMITS,))


def _short(seeds: Sequence[int]) -> Iterator[TrainingRun]:
    """Shorter trainings, all of one seed before the next; `_paper` has paper-linear's N = 6."""
    for seed in seeds:
        for name, given in PREDICTORS.items():
            yield _run("predictors", name, "sac_han", "het8", seed, set=given)
        for point, counts in EXPERTS.items():
            for count in counts:
                for base in ("sac_han", "baseline_rl", "direct_search"):
                    given = (f"num_experts={count}",)
                    yield _run("experts", f"{base}_n{count}", base, point, seed, set=given)


RUNS: tuple[TrainingRun, ...] = (
    *_paper((1, 2, 3, 4, 5)),
    *_general((1, 2, 3)),
    *_mixed((1, 2)),
    *_limits((1, 2, 3)),
    *_short((1, 2, 3)),
)
"""All runs, the most useful first."""


def select(only: Sequence[str], runs: Sequence[TrainingRun] = RUNS) -> list[TrainingRun]:
    """The runs whose name contains any of the words; all runs for no words.

    Raises:
        ValueError: If a word is in no run's name.
    """
    names = [run.name for run in runs]
    for word in only:
        if not any(word in name for name in names):
            near = difflib.get_close_matches(word, names, n=1, cutoff=0.3)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"only is {word!r}, which is in no run's name{hint}; see --list")
    return [run for run in runs if not only or any(word in run.name for word in only)]
