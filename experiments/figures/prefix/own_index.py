"""What an index of its own would gain in validation cells over one index for all cells.

The shipped index of `servegym.agents.cem` is searched for further in one cell alone, by
the same method and with as many weights, then both play the same ten episodes of that cell that
no search saw. The difference is what is to be gained by knowing in which cell one is::

    OMP_NUM_THREADS=1 python -m servegym.experiments.figures.prefix.own_index

The cells are validation cells of the training, one of each kind of workload but coding agents
(which take longest to play), and none of those held out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.agents import load_policy
from servegym.agents.cem import ELITE, STEP, fitness
from servegym.agents.lib.checkpoint import shipped
from servegym.baselines.prefix_routing.cells import (
    KINDS,
    VALIDATION,
    Cell,
    attainment,
    begin_alike,
    cell_of,
    problem_of,
)
from servegym.baselines.prefix_routing.features import first_weights, index_values
from servegym.envs.prefix_routing.core import PrefixBatch
from servegym.experiments.figures.run import (
    FigureOptions,
    command_line,
    figure_parser,
    run_chosen,
    save,
)
from servegym.experiments.stats import mean, paired_difference, stratified_bootstrap
from servegym.experiments.tables import Table, note

Floats = NDArray[np.float64]

GENERATIONS, POPULATION = 12, 32
SPREAD = 0.2
"""Standard deviation of every weight about the shipped one, at first."""
EVAL_SEED = 60_000
CELLS = 6
"""The first so many validation cells."""


def play(population: Any, cell: Cell, seed: int) -> Floats:
    """SLO attainment (P,) of indexes (P, 46) in the same episode of a cell."""
    problem = problem_of(cell)
    batch = PrefixBatch(problem, len(population))
    begin_alike(batch, np.random.default_rng(seed))
    values = partial(index_values, population, block_size=problem.block_size)
    return attainment(
        batch, lambda seen, mask: np.where(mask > 0, values(seen), -np.inf).argmax(-1)
    )


def search(cell: Cell, first: Floats, generations: int, population: int) -> Floats:
    """Weights (46,) found in one cell: all candidates of a generation play the same episode."""
    rng = np.random.default_rng(1)
    centre, spread = first.copy(), np.full_like(first, SPREAD)
    for _ in range(generations):
        drawn = centre + spread * rng.standard_normal((population, len(centre)))
        met = play(drawn.astype(np.float32), cell, int(rng.integers(1 << 31)))
        elite = drawn[np.argsort(-fitness(met[:, None]))[: int(population * ELITE)]]
        centre = centre + STEP * (elite.mean(0) - centre)
        spread = spread + STEP * (elite.std(0) - spread)
    return centre


def own_index(options: FigureOptions) -> None:
    """``own_index``: SLO attainment (%) of both in those cells, and the difference."""
    path = shipped("prefix_routing")["prefix_search"]
    found = load_policy(path).net.weights.numpy()
    first = found[: len(first_weights())].astype(np.float64)
    generations, population = (1, 10) if options.quick else (GENERATIONS, POPULATION)
    table = Table(options.out / "own_index.csv", ("cell",), load=not options.quick)
    numbers = [(k,) for k in range(1 if options.quick else CELLS)]
    for (at,) in table.missing(numbers):
        cell = cell_of(VALIDATION + at)
        own = search(cell, first, generations, population)
        both = np.stack([first, own]).astype(np.float32)
        seeds = range(EVAL_SEED, EVAL_SEED + options.episodes)
        reached = 100 * np.array([play(both, cell, seed) for seed in seeds])
        row: dict[str, Any] = {
            "cell": at,
            "kind": KINDS[at % len(KINDS)],
            "replicas": len(cell["profiles"]),
            "rate": cell["rate"],
        }
        for name, values in (("for_all", reached[:, 0]), ("own", reached[:, 1])):
            row[name] = round(float(stratified_bootstrap(values, mean).value), 2)
        gain = paired_difference(reached[:, 1], reached[:, 0], mean)
        row |= dict(zip(("gain", "low", "high"), (round(x, 2) for x in gain), strict=True))
        row["differences"] = json.dumps((reached[:, 1] - reached[:, 0]).round(2).tolist())
        table.update([row])
        print(row, flush=True)
    differences = np.array([json.loads(row["differences"]) for row in table.rows]).T
    gain = stratified_bootstrap(differences, mean)
    finding = note(
        f"An index of its own gains {gain.value:+.1f} points [{gain.low:.1f}, {gain.high:.1f}] in "
        f"the mean of {len(table.rows)} cells, {differences.mean(0).max():+.1f} at most.",
        gains=differences.mean(0).round(2).tolist(),
    )
    settings = {"generations": generations, "population": population, "spread": SPREAD}
    save(options, "own_index", table.rows, finding, settings=settings)


FIGURES = {"own_index": own_index}
PICTURES: dict[str, Any] = {}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; see the module's docstring."""
    module = "servegym.experiments.figures.prefix.own_index"
    parser = figure_parser(list(FIGURES), __doc__, module, 10)
    return run_chosen(FIGURES, PICTURES, command_line(parser, argv, FigureOptions()))


if __name__ == "__main__":
    sys.exit(main())
