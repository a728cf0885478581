"""The heuristics with parameters tuned to the setting, and what lengths as distributions gain.

::

    python -m servegym.experiments.figures.beyond.routing.tuned_heuristics

searches every heuristic's parameters on validation prompts (`servegym.experiments.tuning`), at each
arrival rate and for both kinds of predictions, and measures it as registered and as tuned: on fresh
validation episodes and on those of an evaluation. `priced_greedy` and `expected_qos` are one rule
with predicted lengths and with survival curves, searched with the same budget. The shipped router
plays the same episodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.registry import make_policy
from servegym.experiments.evaluate import DEFAULT_SEED, evaluate
from servegym.experiments.figures.routing.common import Options, run_figures, save
from servegym.experiments.output import print_table
from servegym.experiments.stats import Interval, mean, paired_difference, stratified_bootstrap
from servegym.experiments.tables import Note, note
from servegym.experiments.tuning import ENV_ID, SPACES, Budget, heuristics, tune

__all__ = ["main"]

MODULE = "servegym.experiments.figures.beyond.routing.tuned_heuristics"
FLEET = "edge-6-heterogeneous"
RATES = (5.0, 8.0, 10.0)
PREDICTIONS = ("confusion", "learned")
SEEDS = {"val": 500_000, "eval": DEFAULT_SEED}
"""Seed of the first episode by split; the search and its choice have other episodes."""
REGISTERED, TUNED = "as registered", "tuned"
REFERENCE, INFORMED, ROUTER = "priced_greedy", "expected_qos", "rpi"
QUICK = Budget(4, 1, 1, 1, 1, 30)

Variant = tuple[str, str]


def _variants(kwargs: Mapping[str, Any], budget: Budget) -> dict[Variant, dict[str, Any]]:
    """Parameters by policy and variant, searched for a setting."""
    searched = [name for name in heuristics() if name in SPACES]
    found: dict[Variant, dict[str, Any]] = {(name, REGISTERED): {} for name in heuristics()}
    return found | {(name, TUNED): tune(name, kwargs, budget).parameters for name in searched}


def tuned_heuristics(options: Options) -> None:
    """QoS of every heuristic as registered and as tuned, on validation and evaluation prompts."""
    rows: list[dict[str, Any]] = []
    notes: list[Note] = []
    rates = RATES[1:2] if options.quick else RATES
    for predictions in PREDICTIONS[:1] if options.quick else PREDICTIONS:
        for rate in rates:
            kwargs = {"profiles": FLEET, "rate": rate}
            kwargs |= {f"{of}_predictor": predictions for of in ("score", "length")}
            variants = _variants(kwargs, QUICK if options.quick else Budget())
            for split in SEEDS:
                point = {"predictions": predictions, "rate": rate, "split": split}
                part = _measured(point, variants, kwargs, options)
                rows += part[0]
                notes += part[1]
            save(options, "tuned_heuristics", rows, *notes)
    body = [
        [*(str(row[key]) for key in ("predictions", "rate", "split", "policy", "variant"))]
        + [f"{row['qos']:.4f}", f"{row['gain']:+.4f}"]
        for row in rows
    ]
    headings = ["predictions", "rate", "split", "policy", "variant", "QoS", "gain"]
    print_table("tuned heuristics", headings, body)


def _measured(
    point: Mapping[str, Any],
    variants: Mapping[Variant, dict[str, Any]],
    kwargs: Mapping[str, Any],
    options: Options,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and findings of a setting on the episodes of a split."""
    requests = QUICK.requests if options.quick else options.requests
    system = RoutingSystem.from_kwargs(**kwargs)
    played = evaluate(
        ENV_ID,
        [make_policy(name, system, **given) for (name, _), given in variants.items()] + [ROUTER],
        options.episodes,
        SEEDS[point["split"]],
        {**kwargs, "split": point["split"], "episode_requests": requests},
    )
    qos = np.array([row["avg_qos"] for row in played]).reshape(len(variants) + 1, -1)
    by_variant = dict(zip([*variants, (ROUTER, REGISTERED)], qos, strict=True))
    rows = []
    for (name, variant), own in by_variant.items():
        gain = paired_difference(own, by_variant[name, REGISTERED], mean)
        rows.append(
            {
                **point,
                "policy": name,
                "variant": variant,
                **_columns("qos", stratified_bootstrap(own, mean)),
                **_columns("gain", gain),
                "parameters": json.dumps(variants.get((name, variant), {})),
            }
        )
    where = f"{point['rate']:g} requests/s, {point['predictions']} predictions, {point['split']}"
    notes: list[dict[str, Any]] = []
    more = paired_difference(by_variant[INFORMED, TUNED], by_variant[REFERENCE, TUNED], mean)
    text = f"{where}: {INFORMED} over {REFERENCE}, both tuned"
    notes.append(_finding(text, more, **point, policy=INFORMED, comparison="lengths"))
    best = max(
        (key for key in variants if key[1] == TUNED), key=lambda key: float(by_variant[key].mean())
    )
    for rival in (REFERENCE, ROUTER):
        more = paired_difference(by_variant[best], by_variant[rival, REGISTERED], mean)
        text = f"{where}: {best[0]}, the best as tuned, over {rival} as registered"
        notes.append(_finding(text, more, **point, policy=best[0], comparison=rival))
    for one in notes:
        print(one["text"], flush=True)
    return rows, notes


def _columns(name: str, interval: Interval) -> dict[str, float]:
    value, low, high = (round(number, 6) for number in interval)
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def _finding(text: str, more: Interval, **data: Any) -> dict[str, Any]:
    value, low, high = more
    return note(f"{text}: QoS {value:+.4f} [{low:+.4f}, {high:+.4f}].", **data, **more._asdict())


FIGURES = {"tuned_heuristics": tuned_heuristics}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save; see ``--help``."""
    return run_figures(FIGURES, {}, argv, __doc__, MODULE, episodes=20)


if __name__ == "__main__":
    run_main(main)
