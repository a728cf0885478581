"""One trained index against the gateways' rules on cells that nobody saw.

Stages, each of which is kept and not done again::

    OMP_NUM_THREADS=1 python -m servegym.experiments.figures.prefix.one_policy --checkpoints runs

``--set 2`` takes the second set of held-out cells, and ``--set 0`` the validation cells of the
training on episodes that no selection saw, without rules tuned in the cell: for what is compared
before the held-out cells are looked at. The names of their tables begin with ``one_policy_2`` and
``one_policy_validation``.

- ``one_policy_joint``: each rule's constants for all cells. Dynamo's cost, the strongest rule in
  `tuned_rules`, is searched for on the training cells of `servegym.agents.cem` by the
  same method (three constants instead of 46 weights: half of the candidates, a quarter of the
  decisions); the others take the best of the published constants and 59 other points on the
  training's validation cells.
- ``one_policy_trials``: each rule tuned in each held-out cell by 60 points, on
  sessions (``val``) and seeds apart from the evaluation.
- ``one_policy``: SLO attainment (%) of all of them and of the trained indexes in ten episodes of
  each held-out cell, with 95 % intervals over episodes and, for the indexes, over trainings too.
  ``one_policy_summary`` has the mean over the cells, ``one_policy_rate`` the highest rate at which
  95 % of what an idle fleet keeps is kept, ``one_policy_speed`` the time of a decision,
  ``one_policy_searches`` what the trainings reached on their validation cells.
- ``one_policy_own``: the shipped index searched for further in each cell where the best tuned rule
  is more than two points above it, to tell what the index cannot express from what it cannot know.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from servegym.agents import load_policy
from servegym.agents.cem import ELITE, STEP, WIDENED_UNTIL, Cells, choose, fitness
from servegym.agents.lib.checkpoint import shipped
from servegym.baselines.prefix_routing import RULES
from servegym.baselines.prefix_routing.cells import (
    IDLE,
    VALIDATION,
    Cell,
    Decide,
    attainment,
    begin_alike,
    cell_of,
    problem_of,
    rules_decide,
)
from servegym.baselines.prefix_routing.dynamo import DynamoRows
from servegym.baselines.prefix_routing.features import first_weights, index_values
from servegym.baselines.prefix_routing.system import PrefixSystem
from servegym.envs.prefix_routing.core import PrefixBatch
from servegym.experiments.figures.prefix.held_out_cells import held_out_cells
from servegym.experiments.figures.prefix.own_index import GENERATIONS, POPULATION, play, search
from servegym.experiments.figures.prefix.tuned_rules import PLAIN, SPACES, STAGES, points
from servegym.experiments.figures.run import (
    FigureOptions,
    command_line,
    figure_parser,
    run_chosen,
    save,
)
from servegym.experiments.stats import (
    difference,
    mean,
    over_trainings,
    paired_difference,
    student_interval,
)
from servegym.experiments.tables import Table, note

Row = dict[str, Any]
Floats = NDArray[np.float64]

SEARCH_SEED, EVAL_SEED, RATE_SEED = 30_000, 40_000, 50_000
RULE, START = "dynamo", "index at the start"
CONSTANTS = ("prefill_scale", "credit", "request_weight")
FIRST = (5.4, 2.6, 0.2)
"""Dynamo's constants that the search begins with: the best single set of `tuned_rules`."""
SPREAD, WIDENED = 0.7, 0.05
RATE_SHARES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4)
RATE_KEPT, RATE_EPISODES = 0.95, 5
RATE_CELLS = (0, 1, 5, 6)
BEHIND = 2.0
"""Points behind the best tuned rule from which on a cell is searched in."""
PREFIX = {0: "one_policy_validation", 1: "one_policy", 2: "one_policy_2"}
"""How the names of a set's tables begin."""
SHORT = {
    "published": ("lmetric", "mooncake", "llm_d", "llm_d_affinity"),
    "joint": (RULE, "llm_d_affinity"),
    "tuned": tuple(SPACES),
}
"""Rules that play the other sets: the first set's best, and all that are tuned in the cell."""


@dataclass
class Options(FigureOptions):
    """Command line of this module."""

    checkpoints: Path = Path("runs")
    set: int = 1

    def cells(self) -> list[Cell]:
        """The cells of the set, or the first of them."""
        if self.set == 0:
            streams = range(1 if self.quick else Cells.defaults[5])
            return [cell_of(VALIDATION + k) for k in streams]
        return held_out_cells(self.set)[: 1 if self.quick else None]

    def table(self, part: str) -> str:
        """Name of the set's table."""
        return PREFIX[self.set] + (f"_{part}" if part else "")

    def constants(self) -> dict[str, Mapping[str, float]]:
        """Rule -> its constants for all cells."""
        rows = Table(self.out / "one_policy_joint.csv", ("rule",)).rows
        return {row["rule"]: json.loads(row["constants"]) for row in rows}

    def trials(self) -> list[Row]:
        """The rows of the rules' tuning in the set's cells."""
        return Table(self.out / f"{self.table('trials')}.csv", ("cell", "rule")).rows


def played(cell: Cell, rows: int, seed: int, decide: Any, **arguments: Any) -> Floats:
    """Attainment (rows,) in one drawn episode; ``decide`` maps a problem to a `Decide`."""
    problem = problem_of(cell, **arguments)
    batch = PrefixBatch(problem, rows)
    begin_alike(batch, np.random.default_rng([seed, 0]))
    return attainment(batch, decide(problem))


def rules_played(
    cell: Cell, contestants: Sequence[tuple[str, Mapping[str, float]]], seed: int, **arguments: Any
) -> Floats:
    """Attainment of rules with their constants in one drawn episode."""

    def decide(problem: Any) -> Decide:
        rules = [RULES[name][0](**own) for name, own in contestants]
        return rules_decide(rules, PrefixSystem.from_problem(problem), seed)

    return played(cell, len(contestants), seed, decide, **arguments)


def _dynamo_rows(constants: Floats, problem: Any) -> DynamoRows:
    return DynamoRows(constants, problem.block_size)


def dynamo_for_all(cells: Sequence[Cell], decisions: int, population: int, each: int) -> Floats:
    """Constants of Dynamo's cost by the cross-entropy method on the logarithms, as the index's."""
    centre, spread, step = np.log(FIRST), np.full(3, SPREAD), 0
    rng = np.random.default_rng(1)
    while step < decisions:
        drawn = centre + spread * rng.standard_normal((population, 3))
        chosen = [cells[k] for k in rng.choice(len(cells), each, replace=False)]
        seed = int(rng.integers(1 << 31))
        met = np.stack(
            [
                played(cell, population, seed, partial(_dynamo_rows, np.exp(drawn)))
                for cell in chosen
            ],
            axis=1,
        )
        elite = drawn[np.argsort(-fitness(met))[: int(population * ELITE)]]
        centre = centre + STEP * (elite.mean(0) - centre)
        widened = max(0.0, 1 - step / decisions / WIDENED_UNTIL)
        spread = spread + STEP * (elite.std(0) - spread) + WIDENED * widened
        step += population * sum(cell["episode_requests"] for cell in chosen)
        print(f"{step} decisions: {np.exp(centre).round(3).tolist()}, {met.mean():.4f}", flush=True)
    return np.exp(centre)


def joint(options: Options) -> None:
    """``one_policy_joint``: constants of each rule for all cells."""
    table = Table(options.out / "one_policy_joint.csv", ("rule",), load=not options.quick)
    total, population, count, each, _, validation, _ = Cells.defaults
    if options.quick:
        total, population, count, each, validation = 4, 20, 2, 2, 2
    cells = [cell_of(k) for k in range(count)]
    unseen = [cell_of(VALIDATION + k) for k in range(validation)]
    for (rule,) in table.missing([(rule,) for rule in SPACES]):
        if rule == RULE:
            found = dynamo_for_all(cells, total // 4, population // 2, each)
            best = dict(zip(CONSTANTS, (float(f"{x:.4g}") for x in found), strict=True))
            chosen, trials = best, total // 4
        else:
            tried = points(rule)[: 3 if options.quick else None]
            reached = [
                rules_played(cell, [(rule, own) for own in tried], SEARCH_SEED) for cell in unseen
            ]
            chosen, trials = tried[int(np.mean(reached, axis=0).argmax())], len(tried)
        table.update([{"rule": rule, "constants": json.dumps(chosen), "trials": trials}])
        print(f"{rule}: {chosen}", flush=True)
    save(options, "one_policy_joint", table.rows, settings={"seed": SEARCH_SEED, "first": FIRST})


def tuned(options: Options) -> None:
    """``one_policy_trials``: 60 points of each rule in each held-out cell.

    Raises:
        ValueError: The set is that of the validation cells.
    """
    if options.set == 0:
        raise ValueError(
            "set is 0, whose cells no rule is tuned in; allowed with tuned are 1 and 2"
        )
    name, cells = options.table("trials"), options.cells()
    table = Table(options.out / f"{name}.csv", ("cell", "rule"), load=not options.quick)
    for at, rule in table.missing([(k, rule) for k in range(len(cells)) for rule in SPACES]):
        cell = cells[at] | ({"split": "val"} if "split" in cells[at] else {})
        tried = points(rule)[: 3 if options.quick else None]
        alive, seed = list(range(len(tried))), SEARCH_SEED
        reached: list[list[float]] = [[] for _ in tried]
        for keep, episodes in STAGES:
            alive = sorted(alive, key=lambda k: -np.mean(reached[k] or [0.0]))[:keep]
            for _ in range(episodes):
                met = rules_played(cell, [(rule, tried[k]) for k in alive], seed)
                seed += 1
                for k, value in zip(alive, met, strict=True):
                    reached[k].append(float(value))
        table.update(
            [
                {
                    "cell": at,
                    "rule": rule,
                    "trial": k,
                    "constants": json.dumps(own),
                    "mean": round(100 * float(np.mean(reached[k])), 2),
                    "episodes": len(reached[k]),
                }
                for k, own in enumerate(tried)
            ]
        )
        print(f"cell {at} {rule}", flush=True)
    save(options, name, table.rows, settings={"stages": STAGES, "seed": SEARCH_SEED})


def _best_points(rows: Sequence[Row], cell: int) -> dict[str, Mapping[str, float]]:
    best = {}
    for rule in SPACES:
        own = [r for r in rows if (r["cell"], r["rule"]) == (cell, rule)]
        most = max(r["episodes"] for r in own)
        top = max((r for r in own if r["episodes"] == most), key=lambda r: r["mean"])
        best[rule] = json.loads(top["constants"])
    return best


class Trained(NamedTuple):
    """An index of a training, or that at the start: what it has in common, and weights (46,)."""

    arm: str
    weights: NDArray[np.float32]


def indexes(folder: Path) -> list[Trained]:
    """The trainings in a folder and the index at the start.

    Raises:
        FileNotFoundError: There is none.
    """
    paths = sorted(folder.glob("prefix_search_*/best.safetensors"))
    if not paths:
        raise FileNotFoundError(f"no prefix_search_SEED/best.safetensors in {folder}: train first")
    found = [Trained("prefix_search", load_policy(path).net.weights.numpy()) for path in paths]
    return [*found, Trained(START, first_weights().astype(np.float32))]


def indexes_decide(trained: Sequence[Trained], problem: Any) -> Decide:
    """One index a row."""
    weights, size = np.stack([one.weights for one in trained]), problem.block_size
    return lambda seen, mask: choose(index_values(weights, seen, size), mask)


def measured(options: Options) -> None:
    """``one_policy`` and what follows from it."""
    for_all, trials, trained = options.constants(), options.trials(), indexes(options.checkpoints)
    arms = list(dict.fromkeys(one.arm for one in trained))
    rows: list[Row] = []
    reached: dict[str, list[Floats]] = {}  # policy -> (trainings, episodes) of each cell
    for at, cell in enumerate(options.cells()):
        contestants = [("published", rule, {}) for rule in (*PLAIN, *SPACES)]
        contestants += [("joint", rule, own) for rule, own in for_all.items()]
        if options.set != 0:
            contestants += [("tuned", rule, own) for rule, own in _best_points(trials, at).items()]
        if options.set != 1:
            contestants = [each for each in contestants if each[1] in SHORT[each[0]]]
        named = [(rule, own) for _, rule, own in contestants]
        seeds = [EVAL_SEED + k for k in range(options.episodes)]
        of_rules = 100 * np.array([rules_played(cell, named, seed) for seed in seeds]).T
        decide, count = partial(indexes_decide, trained), len(trained)
        own = 100 * np.array([played(cell, count, seed, decide) for seed in seeds]).T
        best: dict[str, tuple[str, Floats]] = {}
        for (kind, rule, constants), values in zip(contestants, of_rules, strict=True):
            reached.setdefault(f"{rule} {kind}", []).append(values[None])
            rows.append(_row(at, rule, kind, values[None], json.dumps(constants)))
            if kind not in best or values.mean() > best[kind][1].mean():
                best[kind] = rule, values
        for arm in arms:
            values = own[[one.arm == arm for one in trained]]
            reached.setdefault(arm, []).append(values)
            rows.append(_row(at, arm, "trained", values, ""))
            for kind, (rule, of_rule) in best.items():
                gain = over_trainings(list(values), of_rule, mean)
                names = f"{kind}_gain", f"{kind}_low", f"{kind}_high"
                rows[-1] |= {f"{kind}_best": rule} | dict(zip(names, _rounded(gain), strict=True))
        print(f"cell {at}: {rows[-len(arms)]}", flush=True)
    summary, notes = _summary(reached, arms, rows)
    save(options, options.table("summary"), summary)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    rows = [{name: row.get(name, "") for name in columns} for row in rows]
    trainings = {arm: sum(one.arm == arm for one in trained) for arm in arms}
    settings = {"trainings": trainings, "eval_seed": EVAL_SEED}
    save(options, options.table(""), rows, *notes, settings=settings)


def _rounded(interval: Sequence[float]) -> list[float]:
    return [round(float(value), 2) for value in interval]


def _row(cell: int, policy: str, kind: str, values: Floats, constants: str) -> Row:
    """Attainment (T, E) of the trainings of a policy."""
    interval = over_trainings(list(values), None, mean)
    numbers = dict(zip(("attainment", "low", "high"), _rounded(interval), strict=True))
    return {"cell": cell, "policy": policy, "kind": kind, **numbers, "constants": constants}


def _summary(
    reached: Mapping[str, list[Floats]], arms: Sequence[str], rows: Sequence[Row]
) -> tuple[list[Row], list[dict[str, Any]]]:
    """The mean over the cells of each policy, and what the first arm gains over it."""
    scores = {policy: np.stack(of, axis=2) for policy, of in reached.items()}  # (T, E, cells)
    means = {policy: list(of.mean(2)) for policy, of in scores.items()}
    ours = arms[0]
    found = []
    for policy, of in scores.items():
        row: Row = {"policy": policy, "trainings": len(of)}
        value = _rounded(over_trainings(means[policy], None, mean))
        row |= dict(zip(("attainment", "low", "high"), value, strict=True))
        if policy != ours:
            gain = _rounded(difference(means[ours], means[policy], mean))
            each = scores[ours].mean((0, 1)) - of.mean((0, 1))
            over_cells = _rounded(student_interval(each))[1:]
            row |= dict(zip(("gain", "gain_low", "gain_high"), gain, strict=True))
            row |= dict(zip(("cells_low", "cells_high"), over_cells, strict=True))
            row["worst_gain"] = round(float(each.min()), 2)
        found.append(row)
    found.sort(key=lambda row: -row["attainment"])
    notes = []
    for arm in arms:
        own = [row for row in rows if row["policy"] == arm]
        for kind in ("published", "tuned"):
            if f"{kind}_gain" not in own[0]:
                continue
            each = [row[f"{kind}_gain"] for row in own]
            above = sum(row[f"{kind}_low"] > 0 for row in own)
            below = sum(row[f"{kind}_high"] < 0 for row in own)
            text = (
                f"{arm} against the best {kind} rule of each cell: {np.mean(each):+.1f} points in "
                f"the mean, least {min(each):+.1f}; above in {above} cells, below in {below}."
            )
            notes.append(note(text, gains=each))
    top = next(row for row in found if row["policy"].endswith(" joint"))
    notes.append(
        note(
            f"One policy for all cells: {np.mean(means[ours]):.1f} % ({ours}) against "
            f"{top['attainment']} % of {top['policy']}: {top['gain']:+.1f} "
            f"[{top['gain_low']:.1f}, {top['gain_high']:.1f}]."
        )
    )
    return [{**dict.fromkeys(found[-1], ""), **row} for row in found], notes


def own(options: Options) -> None:
    """``one_policy_own``: an index of the cell's own where the shipped one is far behind."""
    rows = Table(options.out / f"{options.table('')}.csv", ("cell", "policy", "kind")).rows
    weights = load_policy(shipped("prefix_routing")["prefix_search"]).net.weights.numpy()
    first = weights[: len(first_weights())].astype(np.float64)
    generations, population = (1, 10) if options.quick else (GENERATIONS, POPULATION)
    found = []
    for at, cell in enumerate(options.cells()):
        mine = [r for r in rows if r["cell"] == at]
        rule = max((r for r in mine if r["kind"] == "tuned"), key=lambda r: r["attainment"])
        names = "prefix_search", "prefix_search, memory 0"
        (index,) = (r for r in mine if r["kind"] == "trained" and r["policy"] in names)
        if rule["attainment"] - index["attainment"] <= BEHIND and not options.quick:
            continue
        apart = cell | ({"split": "val"} if "split" in cell else {})
        weights = search(apart, first, generations, population)
        both = np.stack([first, weights]).astype(np.float32)
        seeds = [EVAL_SEED + k for k in range(options.episodes)]
        reached = 100 * np.array([play(both, cell, seed) for seed in seeds])
        gain = _rounded(paired_difference(reached[:, 1], reached[:, 0], mean))
        row = {"cell": at, "best_tuned": rule["policy"], "tuned": rule["attainment"]}
        row |= {"index": round(float(reached[:, 0].mean()), 2)}
        row |= {"own": round(float(reached[:, 1].mean()), 2)}
        found.append(row | dict(zip(("gain", "low", "high"), gain, strict=True)))
        print(found[-1], flush=True)
    settings = {"generations": generations, "population": population, "behind": BEHIND}
    save(options, options.table("own"), found, settings=settings)


def searches(options: Options) -> None:
    """``one_policy_searches``: attainment on the validation cells as the trainings went on."""
    rows: list[Row] = []
    for path in sorted(options.checkpoints.glob("prefix_search_*/best.safetensors")):
        args = load_policy(path).args
        for line in (path.parent / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            logged = json.loads(line)
            if "eval/attainment" in logged:
                row = {"seed": args.seed, "decisions": logged["global_step"]}
                rows.append(row | {"attainment": round(100 * logged["eval/attainment"], 2)})
    save(options, "one_policy_searches", rows)


def rates(options: Options) -> None:
    """``one_policy_rate``: the highest rate at which 95 % of an idle fleet's attainment is kept."""
    cells, for_all, trials = held_out_cells(1), options.constants(), options.trials()
    trained = indexes(options.checkpoints)
    ours = [one for one in trained if one.arm == trained[0].arm]
    rows = []
    for at in RATE_CELLS[: 1 if options.quick else None]:
        cell, episodes = cells[at], 1 if options.quick else RATE_EPISODES
        named = [(f"{rule} published", rule, {}) for rule in (*PLAIN, *SPACES)]
        named += [(f"{RULE} joint", RULE, for_all[RULE])]
        named += [(f"{rule} tuned", rule, own) for rule, own in _best_points(trials, at).items()]
        reached = []
        for share in (1 / IDLE, *RATE_SHARES):
            rate = cell["rate"] * share
            met = []
            for seed in range(RATE_SEED, RATE_SEED + episodes):
                pairs = [(rule, own) for _, rule, own in named]
                of_rules = rules_played(cell, pairs, seed, rate=rate)
                decide = partial(indexes_decide, ours)
                own = played(cell, len(ours), seed, decide, rate=rate)
                met.append(np.append(of_rules, own.mean()))
            reached.append(np.mean(met, axis=0))
        wanted = RATE_KEPT * reached[0].max()
        for k, label in enumerate([*(label for label, _, _ in named), ours[0].arm]):
            kept = _crossing([one[k] for one in reached[1:]], wanted)
            rows.append(
                {
                    "cell": at,
                    "policy": label,
                    "rate": round(kept * cell["rate"], 3),
                    "share_of_cell_rate": round(kept, 3),
                    "wanted": round(100 * wanted, 2),
                }
            )
        print(f"cell {at}: {rows[-1]}", flush=True)
    save(options, "one_policy_rate", rows, settings={"shares": RATE_SHARES, "kept": RATE_KEPT})


def _crossing(values: Sequence[float], wanted: float) -> float:
    """Where the attainment first falls below, linear between the rates; 0 if it always is."""
    if values[0] < wanted:
        return 0.0
    for k in range(1, len(values)):
        if values[k] < wanted:
            low, high = RATE_SHARES[k - 1], RATE_SHARES[k]
            return low + (high - low) * (values[k - 1] - wanted) / (values[k - 1] - values[k])
    return RATE_SHARES[-1]


def speed(options: Options) -> None:
    """``one_policy_speed``: CPU time of one decision with 16 replicas, observation to action."""
    cell = {"num_replicas": 16, "rate": 60.0, "episode_requests": 2000, "warmup_requests": 500}
    problem = problem_of(cell)
    batch = PrefixBatch(problem, 1)
    begin_alike(batch, np.random.default_rng(0))
    index = indexes_decide(indexes(options.checkpoints)[:1], problem)
    every, spent, ended = np.ones(1, np.int8), [], 0
    while not ended:
        begin = time.thread_time_ns()
        action = index(batch.observation, batch.action_mask)
        spent.append((time.thread_time_ns() - begin) / 1e3)
        ended = batch.step(action, every)
    p50, p99 = np.percentile(spent, [50, 99])
    row = {
        "replicas": 16,
        "p50_us": round(p50, 1),
        "p99_us": round(p99, 1),
        "decisions": len(spent),
    }
    save(options, "one_policy_speed", [row])


FIGURES = {
    "joint": joint,
    "tuned": tuned,
    "measured": measured,
    "own": own,
    "searches": searches,
    "rates": rates,
    "speed": speed,
}
PICTURES: dict[str, Any] = {}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; see the module's docstring."""
    module = "servegym.experiments.figures.prefix.one_policy"
    parser = figure_parser(list(FIGURES), __doc__, module, 10)
    parser.add_argument(
        "--checkpoints", type=Path, default=Path("runs"), help="folder of prefix_search_SEED runs"
    )
    parser.add_argument(
        "--set", type=int, choices=PREFIX, default=1, help="which set of cells, see above (1)"
    )
    return run_chosen(FIGURES, PICTURES, command_line(parser, argv, Options()))


if __name__ == "__main__":
    sys.exit(main())
