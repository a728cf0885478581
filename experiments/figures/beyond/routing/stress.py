"""What routers do when their inputs fail them: shuffled scores, old states, experts that die.

``python -m servegym.experiments.figures.beyond.routing.stress`` compares the baselines and the
shipped routers (``--checkpoints FOLDER``: your own) on three tables:

- ``shuffle``: the predicted scores of every request dealt to the experts at random. A control: a
  router that loses nothing by it does not use them;
- ``stale``: the experts' rows and the mask are as old as ``staleness_s``;
- ``failures``: experts that die and come back; what they held is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.protocol import Observation, Policy, WrappedPolicy
from servegym.baselines.registry import make_policy
from servegym.envs._command_line import run_main
from servegym.experiments.figures.plotting import legend, pyplot, tidy
from servegym.experiments.figures.routing.common import (
    Options,
    chosen,
    measure,
    play,
    plot_lines,
    print_rows,
    run_figures,
    save,
    summarise_parts,
)
from servegym.experiments.figures.run import Pictures
from servegym.experiments.stats import paired_difference
from servegym.experiments.tables import note

__all__ = ["ShuffledScores", "main"]

MODULE = "servegym.experiments.figures.beyond.routing.stress"
FLEET = "edge-6-heterogeneous"
BASELINES = ("shortest_queue", "least_latency", "greedy_qos", "priced_greedy")
RATES = (5.0, 8.0, 10.0)
STALENESS_S = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
UPTIMES_S = (30.0, 60.0, 120.0, 300.0, 1200.0)
REPAIR_S = 20.0


class ShuffledScores(WrappedPolicy):
    """A router that sees every new request's predicted scores dealt to the experts at random."""

    def __init__(self, policy: Policy) -> None:
        """Wrap a policy that reads the Dict observation."""
        super().__init__(policy, f"{policy.name}, shuffled")

    def act(
        self, observation: Observation, action_mask: NDArray[np.integer[Any]]
    ) -> NDArray[np.int64]:
        """See `Policy.act`."""
        request = np.array(observation["request"])
        request[..., 1] = self.rng.permuted(request[..., 1], axis=1)
        return super().act({**observation, "request": request}, action_mask)


def _routers(options: Options, kwargs: Mapping[str, Any]) -> list[Policy]:
    from servegym.agents import load_policy
    from servegym.baselines.llm_routing.system import RoutingSystem

    system = RoutingSystem.from_kwargs(**kwargs)
    found: list[Policy] = []
    for name in BASELINES:
        found.append(make_policy(name, system))
        found[-1].name = name  # not that of which it is an alias
    for one in chosen(options, FLEET):
        policy = load_policy(one.path, system)
        policy.name = one.label
        found.append(policy)
    return found


def shuffle(options: Options) -> None:
    """QoS with the predicted scores as they are and dealt at random, on the same episodes."""
    rows, notes = [], []
    for rate in RATES[-1:] if options.quick else RATES:
        kwargs = {"profiles": FLEET, "rate": rate}
        played = {**kwargs, "episode_requests": options.requests}
        for policy in _routers(options, kwargs):
            parts = {
                scores: play([router], options.episodes, played)
                for scores, router in (("predicted", policy), ("shuffled", ShuffledScores(policy)))
            }
            for scores, part in parts.items():
                head = {"policy": policy.name, "rate": rate, "scores": scores, "trainings": 0}
                rows.append(head | summarise_parts([part]))
            qos = {name: [row["avg_qos"] for row in part] for name, part in parts.items()}
            loss = paired_difference(qos["shuffled"], qos["predicted"])
            text = (
                f"{rate:g} requests/s: shuffled scores change the QoS of {policy.name} by "
                f"{loss.value:+.4f} [{loss.low:+.4f}, {loss.high:+.4f}]."
            )
            found = {"change": loss.value, "low": loss.low, "high": loss.high}
            notes.append(note(text, rate=rate, policy=policy.name, **found))
    print_rows("shuffled scores", rows, ["rate", "scores"])
    save(options, "control_shuffled_scores", rows, *notes)


def _plot_shuffle(rows: Sequence[Mapping[str, Any]]) -> Any:
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    figure, axes = pyplot().subplots(
        1,
        len(rates),
        figsize=(3.8 * len(rates) + 1, 3.4),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for axis, rate in zip(axes[0], rates, strict=True):
        for shift, scores in ((-0.2, "predicted"), (0.2, "shuffled")):
            own = [row for row in rows if row["rate"] == rate and row["scores"] == scores]
            qos = np.array([(row["qos"], row["qos_low"], row["qos_high"]) for row in own]).T
            bars = np.maximum([qos[0] - qos[1], qos[2] - qos[0]], 0)
            axis.barh(
                -np.arange(len(own)) - shift,
                qos[0],
                0.38,
                xerr=bars,
                capsize=2,
                label=f"{scores} scores",
            )
        axis.set_yticks(-np.arange(len(own)), [row["policy"] for row in own])
        axis.set(title=f"{rate:g} requests/s", xlabel="average QoS")
        tidy(axis)
    legend(figure, axes[0, 0])
    return figure


def losses(rows: Sequence[Mapping[str, Any]], key: str) -> list[dict[str, Any]]:
    """QoS of every policy at the lowest and the highest value of ``key``, a note a panel."""
    notes = []
    for panel in dict.fromkeys(row["panel"] for row in rows):
        own = [row for row in rows if row["panel"] == panel]
        ends = sorted({row[key] for row in own})
        found = {}
        for name in dict.fromkeys(row["policy"] for row in own):
            qos = {row[key]: row["qos"] for row in own if row["policy"] == name}
            found[name] = [qos[ends[0]], qos[ends[-1]]]
        listed = ", ".join(f"{name} {one:.3f} and {two:.3f}" for name, (one, two) in found.items())
        text = f"{panel}, QoS with {key} at {ends[0]:g} and at {ends[-1]:g}: {listed}."
        notes.append(note(text, panel=panel, **{key: [ends[0], ends[-1]]}, qos=found))
    return notes


def stale(options: Options) -> None:
    """QoS against the age of what the router sees of the experts."""
    rows = []
    ages = STALENESS_S[::6] if options.quick else STALENESS_S
    for rate in (5.0, 8.0):
        for age in ages:
            point = {"panel": f"{rate:g} requests/s", "staleness_s": age}
            kwargs = {"profiles": FLEET, "rate": rate, "staleness_s": age}
            rows += measure(options, kwargs, point, chosen(options, FLEET), BASELINES)
    print_rows("stale states", rows, ["panel", "staleness_s"])
    save(options, "stress_staleness", rows, *losses(rows, "staleness_s"))


def _plot_staleness(rows: Sequence[Mapping[str, Any]]) -> Any:
    title = f"{FLEET}: age of the state that the router sees"
    return plot_lines(rows, "staleness_s", "age of the state, s", "panel", title)


def failures(options: Options) -> None:
    """QoS against the mean time between failures of an expert."""
    rows = []
    for rate in (5.0, 8.0):
        for uptime in UPTIMES_S[::4] if options.quick else UPTIMES_S:
            point = {"panel": f"{rate:g} requests/s", "mean_time_to_failure_s": uptime}
            given = {"mean_time_to_failure_s": uptime, "mean_time_to_repair_s": REPAIR_S}
            kwargs = {"profiles": FLEET, "rate": rate, "failures": given}
            rows += measure(options, kwargs, point, chosen(options, FLEET), BASELINES)
    print_rows("failures", rows, ["panel", "mean_time_to_failure_s"])
    repair = f"An expert that failed is back after {REPAIR_S:g} s on average."
    save(options, "stress_failures", rows, repair, *losses(rows, "mean_time_to_failure_s"))


def _plot_failures(rows: Sequence[Mapping[str, Any]]) -> Any:
    title = f"{FLEET}: experts that fail, {REPAIR_S:g} s to repair"
    label = "mean time to failure of an expert, s"
    figure = plot_lines(rows, "mean_time_to_failure_s", label, "panel", title)
    for axis in figure.axes:
        axis.set_xscale("log")
    return figure


FIGURES = {"shuffle": shuffle, "stale": stale, "failures": failures}
PICTURES: Pictures = {
    "control_shuffled_scores": _plot_shuffle,
    "stress_staleness": _plot_staleness,
    "stress_failures": _plot_failures,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save; see ``--help``."""
    return run_figures(FIGURES, PICTURES, argv, __doc__, MODULE, episodes=20)


if __name__ == "__main__":
    run_main(main)
