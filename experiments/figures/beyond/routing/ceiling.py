"""What is left above the routers: exact predictions, and clairvoyant play on the true future.

``python -m servegym.experiments.figures.beyond.routing.ceiling`` compares, on the same evaluation
episodes, the heuristics and the shipped routers with

- ``priced_greedy, exact predictions``: what the predictors' errors cost the heuristic;
- ``rollout, H``: every action tried on a copy of the true state with priced_greedy to follow for H
  requests, true scores, lengths and arrivals known. It is one step of improvement on that
  heuristic, cheats, and is no bound; but what it gains no router gains without seeing as much.

The best score whatever the latency (``ceiling``) is the only bound here, and a loose one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.registry import make_policy
from servegym.experiments.figures.plotting import legend, pyplot, tidy
from servegym.experiments.figures.routing.common import (
    Options,
    chosen,
    gain,
    play,
    print_rows,
    run_figures,
    save,
    summarise_parts,
)
from servegym.experiments.tables import Note, note

__all__ = ["main"]

MODULE = "servegym.experiments.figures.beyond.routing.ceiling"
FLEET = "edge-6-heterogeneous"
RATES = (5.0, 8.0, 10.0)
HORIZONS = (30, 100, 300)
REQUESTS = 500
REFERENCE = "priced_greedy"
EXACT = {"score_predictor": "exact", "length_predictor": "exact"}


def _measured(
    policy: Any, name: str, options: Options, kwargs: Mapping[str, Any]
) -> list[dict[str, Any]]:
    policy.name = name
    return play([policy], options.episodes, kwargs)


def ceiling(options: Options) -> None:
    """QoS of heuristics, shipped routers, exact predictions and clairvoyant rollouts."""
    from servegym.agents import load_policy

    rows: list[dict[str, Any]] = []
    notes: list[Note] = []
    horizons = HORIZONS[:1] if options.quick else HORIZONS
    for rate in RATES[-1:] if options.quick else RATES:
        kwargs = {
            "profiles": FLEET,
            "rate": rate,
            "episode_requests": 60 if options.quick else REQUESTS,
        }
        system = RoutingSystem.from_kwargs(**kwargs)
        found = {
            name: _measured(make_policy(name, system), name, options, kwargs)
            for name in ("greedy_qos", REFERENCE)
        }
        for one in chosen(options, FLEET):
            found[one.label] = _measured(load_policy(one.path, system), one.label, options, kwargs)
        name = f"{REFERENCE}, exact predictions"
        exact = {**kwargs, **EXACT}
        own = make_policy(REFERENCE, RoutingSystem.from_kwargs(**exact))
        found[name] = _measured(own, name, options, exact)
        for horizon in horizons:
            name = f"rollout, {horizon} requests"
            policy = make_policy("rollout", system, horizon=horizon)
            found[name] = _measured(policy, name, options, kwargs)
        gained: dict[str, float] = {}
        for name, part in found.items():
            more = gain("gain", [part], found[REFERENCE])
            gained[name] = more["gain"]
            point = {"policy": name, "rate": rate, "trainings": int("shipped" in name)}
            rows.append(point | summarise_parts([part]) | more)
            if name != REFERENCE:
                text = (
                    f"{rate:g} requests/s: {name} over {REFERENCE}: QoS {more['gain']:+.4f} "
                    f"[{more['gain_low']:+.4f}, {more['gain_high']:+.4f}]."
                )
                notes.append(note(text, rate=rate, policy=name, **more))
        notes.append(_summary(rate, gained, rows[-1]["ceiling"]))
    print_rows("ceiling", rows, ["rate"])
    save(options, "ceiling", rows, *notes)


def _summary(rate: float, gained: Mapping[str, float], best_score: float) -> dict[str, Any]:
    """The best router's share of what the best clairvoyant rollout gains over the heuristic."""
    learnt = {name: more for name, more in gained.items() if "shipped" in name}
    rollouts = {name: more for name, more in gained.items() if name.startswith("rollout")}
    best = max(rollouts, key=lambda name: rollouts[name])
    text = (
        f"{rate:g} requests/s: the best clairvoyant policy ({best}) gains {rollouts[best]:+.4f} "
        f"over {REFERENCE}; the best score of every request would be a QoS of {best_score:.3f}"
    )
    data: dict[str, Any] = {"rate": rate, "clairvoyant": best, "gain": rollouts[best]}
    if learnt and rollouts[best] > 0:
        name = max(learnt, key=lambda key: learnt[key])
        share = learnt[name] / rollouts[best]
        text += f"; {name} has {100 * share:.0f} % of that gain"
        data |= {"policy": name, "share": share}
    return note(f"{text}.", **data)


def _plot(rows: Sequence[Mapping[str, Any]]) -> Any:
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    names = list(dict.fromkeys(row["policy"] for row in rows))
    figure, axes = pyplot().subplots(
        1,
        len(rates),
        figsize=(3.6 * len(rates) + 1.4, 0.3 * len(names) + 1.5),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for axis, rate in zip(axes[0], rates, strict=True):
        own = [row for row in rows if row["rate"] == rate]
        kinds = {
            "heuristic": [r for r in own if r["policy"] in ("greedy_qos", REFERENCE)],
            "trained": [r for r in own if r["trainings"]],
            "knows what no router can": [
                r for r in own if "exact" in r["policy"] or "rollout" in r["policy"]
            ],
        }
        for (kind, part), colour in zip(
            kinds.items(), ("#4c72b0", "#b30000", "#999999"), strict=True
        ):
            if not part:
                continue
            qos = np.array([(row["qos"], row["qos_low"], row["qos_high"]) for row in part]).T
            bars = np.maximum([qos[0] - qos[1], qos[2] - qos[0]], 0)
            at = [-names.index(row["policy"]) for row in part]
            axis.barh(at, qos[0], xerr=bars, color=colour, capsize=2, label=kind)
        axis.axvline(own[0]["ceiling"], color="black", linestyle="--", linewidth=1)
        axis.set_yticks(-np.arange(len(names)), names, fontsize=8)
        axis.set(title=f"{rate:g} requests/s", xlabel="average QoS (dashed: best score)")
        low = min(row["qos_low"] for row in own)
        axis.set_xlim(max(0.0, low - 0.05), None)
        tidy(axis)
        axis.set_axisbelow(True)
    legend(figure, axes[0, 0])
    return figure


FIGURES = {"ceiling": ceiling}
PICTURES = {"ceiling": _plot}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save; see ``--help``."""
    return run_figures(FIGURES, PICTURES, argv, __doc__, MODULE, episodes=12)


if __name__ == "__main__":
    run_main(main)
