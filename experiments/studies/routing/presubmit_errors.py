"""How often ``servegym presubmit`` errs, by simulation with synthetic and with played episodes.

    python -m servegym.experiments.studies.routing.presubmit_errors

It writes the table ``presubmit_errors``: of each case the true gain, the shares (%) of the verdicts
of `noninferiority` on gains that are drawn from it, with 4, 8, 16, 32 and 64 episodes until the row
is told, and the mean episodes.

* ``loss of L in p``: a loss of L with probability p, else none;
* ``normal, sd S``: normal differences, as those of attainment;
* ``time``: the same of the logarithm of the time per token, with its margin;
* of a scenario and a rate: differences drawn from `EPISODES` episodes that rules were played on.
  ``lmetric`` is moved to the true gain; ``round_robin in .1`` plays ``round_robin`` in one episode
  of ten and ``llm_d`` in the others.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._command_line import run_main
from servegym.experiments.evaluation.presubmit import REQUESTS, episodes_of
from servegym.experiments.evaluation.stats import ENOUGH, noninferiority
from servegym.experiments.evaluation.tables import provenance, write_result

__all__ = ["Draw", "errors", "losses", "main", "normal", "one_in", "synthetic"]

MODULE = "servegym.experiments.studies.routing.presubmit_errors"
OUT = Path("experiments", "results", "prefix", "presubmit_errors")
LOOKS = (4, 8, 16, 32, ENOUGH)
MARGIN, MARGIN_TIME = 0.02, math.log1p(0.1)
EPISODES, SEED = 64, 709
PLAYED = (("hot-tenant", 60.0), ("gie-709", 345.0))

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]
"""(rng, n) -> gains of n episodes."""


def losses(probability: float, loss: float) -> Draw:
    """A loss with a probability, else none."""
    return lambda rng, n: np.where(rng.random(n) < probability, -loss, 0.0)


def normal(mean: float, deviation: float) -> Draw:
    """Normal gains."""
    return lambda rng, n: rng.normal(mean, deviation, n)


def one_in(probability: float, rare: NDArray[np.float64], usual: NDArray[np.float64]) -> Draw:
    """Gains of played episodes: of the one rule with a probability, else of the other."""
    return lambda rng, n: np.where(
        rng.random(n) < probability, rng.choice(rare, n), rng.choice(usual, n)
    )


def errors(draw: Draw, margin: float, runs: int, seed: int) -> dict[str, float]:
    """Shares of the verdicts (%) and mean episodes of runs with gains of a case."""
    rng = np.random.default_rng(seed)
    verdicts, episodes = [], []
    for _ in range(runs):
        gains, verdict = draw(rng, ENOUGH), "not told"
        for count in LOOKS:
            _, verdict = noninferiority(gains[:count], margin)
            if verdict != "not told":
                break
        verdicts.append(verdict)
        episodes.append(count)
    shares = {name: verdicts.count(name) for name in ("passed", "failed", "not told")}
    row = {f"{name} %": round(100.0 * n / runs, 2) for name, n in shares.items()}
    return row | {"mean episodes": round(float(np.mean(episodes)), 1)}


def synthetic() -> list[tuple[str, float, Draw, float]]:
    """Name, true gain, gains and margin of each case that is a law."""
    cases: list[tuple[str, float, Draw, float]] = [("equal", 0.0, losses(0.0, 0.0), MARGIN)]
    for true in (MARGIN, 2.0 * MARGIN):
        for chance in (0.05, 0.075, 0.1, 0.2, 0.3):
            loss = true / chance
            name = f"loss of {loss:.3g} in {chance:g}"
            cases.append((name, -true, losses(chance, loss), MARGIN))
    for times in (0.0, 1.0, 2.0):
        for deviation in (0.01, 0.02, 0.04, 0.08):
            true = -times * MARGIN
            cases.append((f"normal, sd {deviation:g}", true, normal(true, deviation), MARGIN))
    for times in (0.0, 1.0, 2.0):
        true = -times * MARGIN_TIME
        cases.append(("time, normal, sd 0.1", true, normal(true, 0.1), MARGIN_TIME))
        if times:
            draw = losses(0.1, -true / 0.1)
            cases.append((f"time, loss of {-10 * true:.3g} in 0.1", true, draw, MARGIN_TIME))
    return cases


def _played(scenario: str, rate: float) -> list[tuple[str, float, Draw, float]]:
    """The same of the cases whose gains were played."""
    rules = ("llm_d", "lmetric", "round_robin", "random")
    arguments = {
        "scenario": scenario,
        "rate": rate,
        "episode_requests": REQUESTS.get(scenario, 1000),
    }
    played = episodes_of(rules, arguments, SEED, EPISODES)
    base, lmetric, rotating, random = (rule.attainment for rule in played)
    where = f"{scenario}, {rate:g}/s"
    cases: list[tuple[str, float, Draw, float]] = []
    noise = lmetric - base - np.mean(lmetric - base)
    for times in (0.0, 1.0, 2.0):
        moved = noise - times * MARGIN
        name = f"{where}: lmetric, sd {noise.std(ddof=1):.3f}"
        cases.append((name, -times * MARGIN, one_in(1.0, moved, moved), MARGIN))
    lost = rotating - base
    for name, chance, gains in (
        ("round_robin in .1", 0.1, lost),
        ("round_robin", 1.0, lost),
        ("random", 1.0, random - base),
    ):
        draw = one_in(chance, gains, np.zeros(1))
        cases.append((f"{where}: {name}", chance * float(gains.mean()), draw, MARGIN))
    return cases


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print and write the table. Returns 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=4000, help="of each case (4000)")
    parser.add_argument("--out", type=Path, default=OUT, help=f"the table ({OUT})")
    options = parser.parse_args(arguments)
    cases = synthetic()
    for scenario, rate in PLAYED:
        cases += _played(scenario, rate)
    rows: list[dict[str, Any]] = []
    for seed, (name, true, draw, margin) in enumerate(cases):
        rows.append({"case": name, "true gain": round(true, 3) or 0.0})
        rows[-1] |= errors(draw, margin, options.runs, seed)
        print(*rows[-1].values(), sep="  ", flush=True)
    write_result(options.out, rows, provenance(f"python -m {MODULE} --runs {options.runs}"))
    return 0


if __name__ == "__main__":
    run_main(main)
