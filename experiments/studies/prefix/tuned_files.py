"""llm-d's default file tuned by `servegym tune`'s search, several times, beside published rules.

::

    python -m servegym.experiments.studies.prefix.tuned_files --resume

Each search has episodes and candidates of its own seed and `Case.budget` seconds on all cores; all
are judged on the same episodes, which no search and no choice has seen, at `Case.judged`. So is
``ppo``, which begins at the file that a search has found: a network, 0 at first, is added to the
file's scores, and ``agents/ppo.py`` trains it at rates between those of the search, each decision
paid for its own request.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from servegym._command_line import run_main
from servegym.agents import load_policy, ppo
from servegym.agents.lib.parallel import Workers
from servegym.baselines.prefix_routing import PrefixSystem, plugins
from servegym.baselines.prefix_routing.gateway_files import default_file
from servegym.baselines.prefix_routing.policy import BatchView
from servegym.envs.prefix_routing.kernel.observation import REPLICA_HIGH, REQUEST_HIGH
from servegym.experiments.evaluation import tuning
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.stats import student_interval
from servegym.experiments.evaluation.tables import Note, note
from servegym.experiments.evaluation.targets import GatewayTarget, Player
from servegym.experiments.papers.study import Options, Study, command
from servegym.experiments.studies.prefix.learning import AGENT

__all__ = ["STUDIES", "main"]

RULES = "rules"
"""In the place of a seed: the rules that are not searched."""


HEAT = 0.4
"""Of the softmax of a file's scores: draws from it keep what the file does within a point."""
HIGH = np.array([*REPLICA_HIGH, *REQUEST_HIGH])


class Case(NamedTuple):
    """Rates of the search and of the verdict (requests/s), seconds of a search, searches.

    The last are the decisions of a training that begins at what was found, if there is one.
    """

    rates: tuple[float, ...]
    judged: tuple[float, ...]
    budget: float
    searches: int
    decisions: int = 0


MIXED_RATES = (30.0, 33.0, 36.0, 38.0, 40.0)
CASES = {
    "mixed-cards": Case((30.0, 34.0, 37.0, 40.0), MIXED_RATES, 300.0, 5, 960_000),
    "mooncake": Case((10.0, 11.5, 13.0), (10.0, 11.5, 13.0), 240.0, 3),
    "hot-tenant": Case((65.0, 70.0, 75.0), (65.0, 70.0, 75.0), 60.0, 3),
}


def _settings(options: Options) -> list[dict[str, Any]]:
    return [
        {"scenario": name, "seed": seed}
        for name, case in CASES.items()
        for seed in (RULES, *range(1 if options.quick else case.searches))
    ]


def _rows(
    options: Options, setting: Mapping[str, Any], _: Sequence[Any]
) -> Iterator[dict[str, Any]]:
    case = CASES[setting["scenario"]]
    target = GatewayTarget(default_file("llm-d"), {"scenario": setting["scenario"]})
    cores = os.cpu_count() or 1
    workers = Workers(cores)
    player = Player(workers, cores)
    if setting["seed"] == RULES:
        values = tuning.compared({"file": (target, target.starts()[0])}, case.judged, workers)
        facts: dict[str, Any] = {}
    else:
        values, facts = _searched(target, case, int(setting["seed"]), player, options.quick)
    workers.close()
    for policy, found in values.items():
        for rate, shares in zip(case.judged, found, strict=True):
            row = {**setting, "policy": policy, "rate": rate, "share": float(shares.mean())}
            yield row | {"worst": float(shares.min()), **(facts if policy == "tuned" else {})}


def _searched(
    target: GatewayTarget, case: Case, seed: int, player: Player, quick: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shares of the file that a search found, and facts of it."""
    begin, rates = time.monotonic(), case.rates
    seconds = 1.0 if quick else tuning.SEARCHED * case.budget
    with tempfile.TemporaryDirectory() as folder:
        search = tuning.Search(target, rates, player, Path(folder), seed)
        for _ in search.generations(seconds):
            pass
        candidates = len(search.study.trials)
        finalists = [found for _, found in search.best(tuning.FINALISTS)]
    tuned = tuning.chosen(target, finalists, rates, player)
    took = time.monotonic() - begin
    both = [target.starts()[0], tuned]
    first = tuning.SEARCH_SEED + 1000 * seed
    gains = {
        "gain_searched": player(target, both, rates, "train", range(first, first + 4)),
        "gain": player(target, both, rates, "eval", tuning.VERDICT_SEEDS),
        "gain_drawn": player(target, both, rates, "eval", tuning.VERDICT_SEEDS, draws=True),
    }
    facts: dict[str, Any] = {"candidates": candidates, "seconds": took}
    facts |= {name: float((new - old).mean()) for name, (old, new) in gains.items()}
    facts["file"] = target.text(tuned)
    judged = player(target, [tuned], case.judged, "eval", tuning.VERDICT_SEEDS)[0]
    found = {"tuned": judged}
    if case.decisions:
        found["ppo"] = learned(target, tuned, case, seed, 64 if quick else case.decisions)
    return found, facts


class Scored(ppo.Moments):
    """Scaled inputs, and in a further column the file's score of each replica over `HEAT`."""

    def __init__(self, columns: int, system: PrefixSystem, setting: Mapping[str, float]) -> None:
        super().__init__(columns)
        self.system, self.setting = system, setting

    def forward(self, x: Tensor) -> Tensor:
        """Inputs (..., N, columns + 1) of observations of ``PrefixRoutingSummary``."""
        scaled, of_replica = x[..., : len(HIGH)].double().numpy(), len(REPLICA_HIGH)
        raw = np.rint(np.expm1(scaled * np.log1p(HIGH)))  # requests and tokens are whole numbers
        raw = np.where(HIGH > 1.0, raw, scaled)
        seen = {"replicas": raw[..., :of_replica], "request": raw[..., 0, of_replica:]}
        view: Any = BatchView(seen, raw[..., 1], self.system, None)
        cost, _ = plugins.llm_d(view, view.up, self.setting)
        score = torch.as_tensor(-cost / HEAT).float()
        return torch.cat([super().forward(x), score[..., None]], -1)


class FromFile(ppo.Agent):
    """The agent's network, 0 at first, added to the scores of a file."""

    def __init__(
        self, system: PrefixSystem, setting: Mapping[str, float], *sizes: Any, **more: Any
    ) -> None:
        super().__init__(*sizes, **more)
        self.moments = Scored(self.shape[-1], system, setting)
        nn.init.zeros_(self.score.weight)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """See `ppo.Agent`."""
        log_pi, value = super().forward(x[..., :-1], mask)
        return (log_pi + x[..., -1]).log_softmax(-1), value


def learned(
    target: GatewayTarget, tuned: Mapping[str, float], case: Case, seed: int, decisions: int
) -> np.ndarray:
    """Shares (rates, episodes) of PPO that begins at a file."""
    system = PrefixSystem.from_problem(target.problem(case.rates[0], "train"))
    ends = f"rate=[{min(case.rates)},{max(case.rates)}]"
    settings = (f'scenario="{target.arguments["scenario"]}"', ends)
    arguments = {**AGENT, "num_steps": 1000, "num_minibatches": 16, "eval_every": 10**9}
    agent = partial(FromFile, system, tuned)
    with tempfile.TemporaryDirectory() as folder, patch.object(ppo, "Agent", agent):
        arguments |= {"set": settings, "total_timesteps": decisions, "seed": seed + 1}
        run = ppo.train(ppo.Args(**arguments, out_dir=folder))
        policy = load_policy(run / "last.safetensors", system)
    seeds, values = tuning.VERDICT_SEEDS, []
    for rate in case.judged:
        rows = evaluate(target.env_id, [policy], len(seeds), seeds[0], target.at(rate))
        values.append([row["attainment"] for row in rows])
    return np.array(values)


def _of(rows: Sequence[Mapping[str, Any]], scenario: str, policy: str) -> np.ndarray:
    """Shares (seeds, rates)."""
    mine = [r for r in rows if r["scenario"] == scenario and r["policy"] == policy]
    seeds = list(dict.fromkeys(row["seed"] for row in mine))
    return np.array([[r["share"] for r in mine if r["seed"] == seed] for seed in seeds])


def _by_rate(values: np.ndarray, rates: Sequence[float]) -> str:
    """Means of searches (searches, rates) with their intervals, in words."""
    each = zip(map(student_interval, values.T), rates, strict=True)
    return ", ".join(f"{x.value:.3f} [{x.low:.3f}, {x.high:.3f}] at {r:g}/s" for x, r in each)


def _notes(options: Options, rows: Sequence[Mapping[str, Any]]) -> Iterator[Note]:
    for scenario, case in CASES.items():
        tuned = _of(rows, scenario, "tuned")
        if len(tuned) < 2:
            continue
        text = _by_rate(tuned, case.judged)
        facts = [r for r in rows if r["scenario"] == scenario and r["policy"] == "tuned"]
        facts = facts[:: len(case.judged)]
        kept = " and ".join(
            f"{np.mean([r[key] for r in facts]):+.3f} {where}"
            for key, where in (
                ("gain_searched", "on the search's episodes"),
                ("gain", "on others"),
                ("gain_drawn", "in drawn worlds"),
            )
        )
        yield note(f"{scenario}: {text}; over {len(tuned)} searches. Gain over the file: {kept}.")
        if case.decisions:
            gains = _of(rows, scenario, "ppo") - tuned
            whole, text = student_interval(gains.mean(1)), _by_rate(gains, case.judged)
            text = f"{whole.value:+.3f} [{whole.low:+.3f}, {whole.high:+.3f}] in the mean, {text}"
            yield note(f"{scenario}: PPO that begins at the files gains {text}.")


STUDIES = (
    Study(
        name="tuned_files",
        figure="tuned_files",
        settings=_settings,
        columns=_rows,
        notes=_notes,
        key=("scenario", "seed"),
        packages=("optuna", "torch"),
    ),
)

main = command(__spec__.name, __doc__, STUDIES, 10)

if __name__ == "__main__":
    run_main(main)
