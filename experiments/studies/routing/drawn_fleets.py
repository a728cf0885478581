"""One router on forty fleets that it was not trained on, beside heuristics tuned for each of them.

::

    python -m servegym.experiments.studies.routing.drawn_fleets --tuned FOLDER

searches the heuristics' parameters for every setting of ``held_out_fleets.toml`` on validation
prompts (`servegym.experiments.evaluation.tuning`; what is in ``--tuned`` already is not searched
again), drops the heuristics that are far from the best there, and plays the others, as tuned, and
the shipped ``fleet_search`` on the same episodes of the evaluation split. The best heuristic of a
setting is the one that is best in these very episodes, which favours the heuristics.
``--validation`` measures the fleets of the router's own validation, on which it was chosen, in
their place.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym._files import write_json
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.registry import make_policy
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.evaluation.stats import mean, paired_difference
from servegym.experiments.evaluation.tables import note
from servegym.experiments.evaluation.tuning import DEFAULTS, ENV_ID, Budget, heuristics, tune
from servegym.experiments.papers.plotting import pyplot, tidy
from servegym.experiments.papers.routing.common import Options, run_figures, save
from servegym.experiments.studies.routing.held_out_fleets import held_out_settings

__all__ = ["main"]

MODULE = "servegym.experiments.studies.routing.drawn_fleets"
ROUTER = "fleet_search"
EVAL_SEED = 3_000_000  # of the first episode of every setting
REQUESTS = 500
BUDGET = Budget(16, 3, 4, 3, 12, REQUESTS)
QUICK = Budget(4, 1, 1, 1, 1, 30)
SEARCHED = ("expected_qos", "priced_greedy", "route_balance")
"""Heuristics whose parameters are searched in every setting."""
NEAR = 0.03
"""QoS below the best of the heuristics on validation prompts up to which one is searched too, if it
has parameters, and measured. What is further below is no candidate for the best."""
WORSE = 0.003  # QoS that a router may lack


def tuned_parameters(setting: Mapping[str, Any], budget: Budget, file: Path) -> dict[str, Any]:
    """Parameters of the heuristics that may be the best in a setting, kept in a file."""
    if not file.exists():
        fleet = {"fleet": setting}
        found = {name: tune(name, fleet, budget) for name in SEARCHED}
        best = max(one.qos for one in found.values())
        for name in set(heuristics()) - set(SEARCHED):
            # As registered: the choice has only the default to choose from.
            plain = tune(name, fleet, budget, fixed=DEFAULTS.get(name))
            if plain.qos >= best - NEAR:
                found[name] = tune(name, fleet, budget) if name in DEFAULTS else plain
        kept = {one.policy: one.parameters for one in found.values() if one.qos >= best - NEAR}
        write_json(file, kept)
    return json.loads(file.read_text(encoding="utf-8"))


def measured(
    number: int, setting: Mapping[str, Any], file: Path, router: str, episodes: int, quick: bool
) -> list[dict[str, Any]]:
    """Rows of a setting: QoS of every policy, and what the router gains over it.

    The heuristics are tuned on validation prompts, and all policies play the same episodes.
    """
    budget = QUICK if quick else BUDGET
    parameters = tuned_parameters(setting, budget, file)
    system = RoutingSystem.from_kwargs(fleet=setting)
    variants = {(name, "tuned"): own for name, own in parameters.items()}
    variants |= {(name, "as registered"): {} for name in SEARCHED}
    policies: list[Any] = [make_policy(name, system, **own) for (name, _), own in variants.items()]
    played = evaluate(
        ENV_ID,
        [*policies, router],
        episodes,
        EVAL_SEED,
        {"fleet": setting, "split": "eval", "episode_requests": budget.requests},
    )
    qos = np.array([row["avg_qos"] for row in played]).reshape(len(policies) + 1, -1)
    ceiling = float(np.mean([row["ceiling"] for row in played]))
    rows = []
    for key, own in zip([*variants, (ROUTER, "as trained")], qos, strict=True):
        gain = paired_difference(qos[-1], own, mean)
        rows.append(
            {
                "setting": number,
                "experts": len(setting["profiles"]),
                **{key: setting[key] for key in ("running_capacity", "scheduler", "arrivals")},
                **{key: setting[key] for key in ("memory_policy", "predictor")},
                "policy": key[0],
                "variant": key[1],
                "qos": round(float(own.mean()), 6),
                "gain": round(gain.value, 6),
                "gain_low": round(gain.low, 6),
                "gain_high": round(gain.high, 6),
                "ceiling": round(ceiling, 6),
                "episodes": qos.shape[1],
                "parameters": json.dumps(variants.get(key, {})),
            }
        )
    return rows


def best_heuristics(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The row of the heuristic with the most QoS in every setting."""
    best: dict[int, Mapping[str, Any]] = {}
    for row in rows:
        one = best.get(row["setting"])
        if row["variant"] == "tuned" and (one is None or row["qos"] > one["qos"]):
            best[row["setting"]] = row
    return list(best.values())


def _counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How often the router is above and below, and by how much, over the settings of the rows."""
    gain = np.array([row["gain"] for row in rows])
    return {
        "settings": len(rows),
        "above": sum(row["gain_low"] > 0 for row in rows),
        "below": sum(row["gain_high"] < 0 for row in rows),
        "worse": int((gain < -WORSE).sum()),
        "mean": float(gain.mean()),
        "least": float(gain.min()),
    }


def findings(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the router gains over the best heuristic of every setting, and over each heuristic."""
    best = best_heuristics(rows)
    data = _counts(best)
    text = (
        f"Over the best heuristic of each of {len(best)} settings {ROUTER} is above it with the "
        f"interval in {data['above']}, below it in {data['below']}, and lacks more than {WORSE} in "
        f"{data['worse']}; mean gain {data['mean']:+.4f}, least {data['least']:+.4f}."
    )
    notes = [note(text, kind="best", **data)]
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["policy"], row["variant"]), []).append(row)
    for (name, variant), own in found.items():
        if name == ROUTER:
            continue
        more = _counts(own)
        text = (
            f"Over {name} {variant}, in the {len(own)} settings in which it was measured: above "
            f"with the interval in {more['above']}, below in {more['below']}, mean gain "
            f"{more['mean']:+.4f}."
        )
        notes.append(note(text, kind="policy", policy=name, variant=variant, **more))
    return notes


def drawn_fleets(options: Options) -> None:
    """QoS of the router and of tuned heuristics in every setting."""
    own: Any = options
    if own.validation:
        from servegym.agents.cem import DrawnFleets
        from servegym.baselines.llm_routing.fleet_features import fleet_of
        from servegym.baselines.protocol import VALIDATION

        settings = [fleet_of(VALIDATION + k, DrawnFleets({}).source)["setting"] for k in range(24)]
    else:
        settings = held_out_settings()
    settings = settings[:2] if options.quick else settings
    own.tuned.mkdir(parents=True, exist_ok=True)
    prefix = "quick_" * options.quick + ("validation" if own.validation else "held_out")
    jobs = [
        (k, one, own.tuned / f"{prefix}_{k}.json", own.router, options.episodes, options.quick)
        for k, one in enumerate(settings)
    ]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(own.workers, get_context("spawn")) as pool:
        for part in pool.map(measured, *zip(*jobs, strict=True)):
            rows += part
            best, *_ = best_heuristics(part)
            text = f"setting {part[0]['setting']}: best {best['policy']} {best['qos']:.4f}, gain "
            print(text + "{gain:+.4f} [{gain_low:+.4f}, {gain_high:+.4f}]".format(**best))
    notes = findings(rows)
    columns = ("policy", "variant", "settings", "above", "below")
    body = [[*(str(one[key]) for key in columns), f"{one['mean']:+.4f}"] for one in notes[1:]]
    print_table(f"gains of {ROUTER} over heuristics", [*columns, "mean gain"], body)
    print(notes[0]["text"])
    save(options, "drawn_fleets" + "_validation" * own.validation, rows, *notes)


def plot(rows: Sequence[Mapping[str, Any]]) -> Any:
    """The gain over the best heuristic of every setting, sorted, with its interval."""
    best = sorted(best_heuristics(rows), key=lambda row: row["gain"])
    figure, axis = pyplot().subplots(figsize=(9, 4), layout="constrained")
    gain, low, high = (
        np.array([row[key] for row in best]) for key in ("gain", "gain_low", "gain_high")
    )
    bars = np.maximum([gain - low, high - gain], 0)
    axis.errorbar(np.arange(len(best)), gain, bars, fmt="ko", markersize=4, capsize=2)
    axis.axhline(0, color="grey", linewidth=1)
    axis.set(xlabel="held-out fleets, sorted", ylabel="QoS over the best tuned heuristic")
    axis.set_xticks([])
    tidy(axis)
    return figure


FIGURES = {"drawn_fleets": drawn_fleets}
PICTURES = {"drawn_fleets": plot}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save; see ``--help``."""

    def own(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--tuned", type=Path, default=Path("runs/tuned_fleets"))
        parser.add_argument("--router", default=ROUTER, help=f"name or checkpoint ({ROUTER})")
        parser.add_argument("--workers", type=int, default=1, help="processes (1)")
        parser.add_argument("--validation", action="store_true", help="not the held-out fleets")

    return run_figures(FIGURES, PICTURES, argv, __doc__, MODULE, episodes=50, own=own)


if __name__ == "__main__":
    run_main(main)
