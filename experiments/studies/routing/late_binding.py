"""What late binding gains: one rule that binds on arrival or holds requests back, both tuned.

``python -m servegym.experiments.studies.routing.late_binding`` searches the parameters of
``expected_qos`` on validation prompts, then those of ``late_qos`` twice: its two own with the rest
as found for ``expected_qos``, so that holding is all that changes, and all of them. What the last
search found plays without holding, too. The rules play the same episodes of the evaluation split on
the default fleet at light, medium and heavy load. With another drawn fleet in every episode both
rules play as registered. Two clairvoyant rollouts play on the default fleet besides, one that may
hold and one that may not: what they differ by is what holding is worth to who knows the future.
What is in ``--tuned`` already is not searched again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym._files import write_json
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.registry import make_policy
from servegym.experiments.evaluate import evaluate
from servegym.experiments.figures.routing.common import Options, run_figures, save
from servegym.experiments.output import print_table
from servegym.experiments.stats import mean, paired_difference, stratified_bootstrap
from servegym.experiments.tables import note
from servegym.experiments.tuning import ENV_ID, Budget, tune

__all__ = ["main"]

MODULE = "servegym.experiments.studies.routing.late_binding"
FLEET = "edge-6-heterogeneous"
SETTINGS: dict[str, dict[str, Any]] = {
    f"{FLEET}, {rate:g}/s": {"profiles": FLEET, "rate": rate} for rate in (5.0, 8.0, 10.0)
}
DRAWN = "drawn fleets"
DRAWN_REQUESTS = 200
EARLY, LATE = "expected_qos", "late_qos"
BUDGET = Budget(16, 4, 8, 6, 24, 500)
QUICK = Budget(4, 1, 1, 1, 1, 30)
EVAL_SEED = 4_000_000  # of the first episode of every setting
CLAIRVOYANT_EPISODES, CLAIRVOYANT_REQUESTS, HORIZON = 16, 300, 60

BINDS = "binds on arrival"
REGISTERED = {BINDS: (EARLY, {}), "may hold, else the same": (LATE, {})}

Rule = tuple[str, dict[str, Any]]


def tuned_rules(kwargs: Mapping[str, Any], budget: Budget) -> dict[str, Rule]:
    """Policies with the parameters that a search on validation prompts found, by what they are."""
    early = tune(EARLY, kwargs, budget).parameters
    own = tune(LATE, kwargs, budget, fixed=early).parameters
    every = tune(LATE, kwargs, budget).parameters
    return {
        BINDS: (EARLY, early),
        "may hold, else the same": (LATE, own),
        "may hold, all tuned": (LATE, every),
    }


def kept_rules(
    setting: str, kwargs: Mapping[str, Any], budget: Budget, file: Path
) -> dict[str, Rule]:
    """The rules of a setting as kept in a file, or searched and kept there; and a control."""
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if setting not in kept:
        kept[setting] = tuned_rules(kwargs, budget)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, kept)
    rules = {rule: (name, given) for rule, (name, given) in kept[setting].items()}
    name, given = rules["may hold, all tuned"]
    return rules | {"tuned to hold, never does": (name, {**given, "worth": 0.0})}


def clairvoyant_rules() -> dict[str, Rule]:
    """Rollouts on the true future, which may hold and which may not."""
    return {
        "clairvoyant, binds on arrival": ("rollout", {"horizon": HORIZON}),
        "clairvoyant, may hold": ("rollout", {"horizon": HORIZON, "hold": True}),
    }


def measured(
    setting: str, rules: Mapping[str, Rule], kwargs: Mapping[str, Any], episodes: int, requests: int
) -> list[dict[str, Any]]:
    """A row for each rule: its KPIs and what it gains over the first, on the same episodes."""
    world = {**kwargs, "split": "eval", "episode_requests": requests}
    system = RoutingSystem.from_kwargs(**kwargs)
    policies = [make_policy(name, system, **given) for name, given in rules.values()]
    played = evaluate(ENV_ID, policies, episodes, EVAL_SEED, world)
    parts = [played[k * episodes : (k + 1) * episodes] for k in range(len(rules))]
    first = np.array([row["avg_qos"] for row in parts[0]])
    rows = []
    for (rule, (name, given)), part in zip(rules.items(), parts, strict=True):
        qos = np.array([row["avg_qos"] for row in part])
        gain = paired_difference(qos, first, mean)
        value = stratified_bootstrap(qos, mean)

        def average(key: str, part: Sequence[Mapping[str, Any]] = part) -> float:
            return round(float(np.nanmean([row.get(key, 0.0) for row in part])), 6)

        rows.append(
            {
                "setting": setting,
                "rule": rule,
                "policy": name,
                "qos": round(value.value, 6),
                "qos_low": round(value.low, 6),
                "qos_high": round(value.high, 6),
                "gain": round(gain.value, 6),
                "gain_low": round(gain.low, 6),
                "gain_high": round(gain.high, 6),
                "latency_ms_per_token": round(1e3 * average("mean_latency_s_per_token"), 4),
                "drop_rate": average("drop_rate"),
                "violation_rate": average("violation_rate"),
                "mean_hold_s": average("mean_hold_s"),
                "mean_waiting_s": average("mean_waiting_s"),
                "episodes": episodes,
                "requests": requests,
                "parameters": json.dumps(given),
            }
        )
    return rows


def late_binding(options: Options) -> None:
    """QoS of the rules and of the rollouts in every setting."""
    rows: list[dict[str, Any]] = []
    notes: list[dict[str, Any]] = []
    own: Any = options
    file = own.tuned.with_name("quick_" * options.quick + own.tuned.name)
    budget, requests = (QUICK, QUICK.requests) if options.quick else (BUDGET, options.requests)
    names = [*list(SETTINGS)[1:2], DRAWN] if options.quick else [*SETTINGS, DRAWN]
    for setting in names:
        if setting == DRAWN:
            size = min(requests, DRAWN_REQUESTS)
            part = measured(setting, REGISTERED, {"fleet": "random"}, options.episodes, size)
        else:
            kwargs = SETTINGS[setting]
            rules = kept_rules(setting, kwargs, budget, file)
            part = measured(setting, rules, kwargs, options.episodes, requests)
            count = min(CLAIRVOYANT_EPISODES, options.episodes)
            size = min(CLAIRVOYANT_REQUESTS, requests)
            part += measured(setting, clairvoyant_rules(), kwargs, count, size)
        for row in part:
            if row["rule"].endswith(BINDS):
                continue
            text = (
                "{setting}: {rule}: QoS {gain:+.4f} [{gain_low:+.4f}, {gain_high:+.4f}] over "
                "who binds on arrival, {episodes} episodes; held for {mean_hold_s:.3f} s."
            ).format(**row)
            print(text, flush=True)
            notes.append(note(text, **{k: row[k] for k in ("setting", "rule", "gain")}))
        rows += part
        save(options, "late_binding", rows, *notes)
    columns = ("setting", "rule")
    body = [[*(row[key] for key in columns), f"{row['qos']:.4f}"] for row in rows]
    print_table("late binding", [*columns, "QoS"], body)


FIGURES = {"late_binding": late_binding}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save; see ``--help``."""

    def own(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--tuned", type=Path, default=Path("runs/late_binding.json"))

    return run_figures(FIGURES, {}, argv, __doc__, MODULE, episodes=50, own=own)


if __name__ == "__main__":
    run_main(main)
