"""What it is worth to know what no controller of the serverless family can know.

::

    python -m servegym.experiments.figures.beyond.serverless.information_value

runs `warm_planner` on held-out prompts as it is and with pieces of what it has to guess: the regime
of the present request's overhead, the gap to the next request, and the present request itself
(routing, output length, overheads). None of them can be observed before the plan is made. The table
also has `lookahead`, which knows the whole episode and plans with what stays warm, and
`greedy_warm`, whose gap to `lookahead` the learnt policy is measured by. `lookahead` is no bound,
but the part of the gap that information fills is closed to every controller. `warm_planner` knows
the constants of the environment that generates the requests (lengths, gaps, overheads, keep-alive),
as no controller of a real platform does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._command_line import run_main
from servegym.baselines.registry import make_policy
from servegym.baselines.serverless_moe.base import Observed
from servegym.baselines.serverless_moe.clairvoyant import Clairvoyant
from servegym.baselines.serverless_moe.system import ServerlessSystem
from servegym.baselines.serverless_moe.warm_planner import WarmPlanner
from servegym.experiments.evaluate import evaluate
from servegym.experiments.figures.plotting import pyplot, tidy
from servegym.experiments.figures.run import (
    FigureOptions,
    Pictures,
    command_line,
    figure_parser,
    run_chosen,
    save,
)
from servegym.experiments.figures.serverless.common import with_interval
from servegym.experiments.output import print_table
from servegym.experiments.stats import mean, paired_difference
from servegym.experiments.tables import note

__all__ = ["InformedPlanner", "main", "shares"]

MODULE = "servegym.experiments.figures.beyond.serverless.information_value"
ENV_ID = "servegym/ServerlessMoE-v0"
SETTING: dict[str, Any] = {}
"""Arguments of the environment that are not the default's."""
VARIANTS: dict[str, tuple[str, ...]] = {
    "knows the regime": ("regime",),
    "knows the gap": ("gap",),
    "knows the regime and the gap": ("regime", "gap"),
    "knows the request and the gap": ("request", "gap"),
}
"""Name -> what the planner knows. The request implies its regime."""
Floats = NDArray[np.float64]


class InformedPlanner(Clairvoyant, WarmPlanner):
    """The planner with some of what it otherwise has to guess.

    Args:
        planner: The planner, whose tables it shares.
        name: Its name in tables.
        known: Of ``regime`` (of the present request's overhead), ``gap`` (whether the next request
            comes while things are warm) and ``request`` (the present one as it is).
    """

    def __init__(self, planner: WarmPlanner, name: str, known: Sequence[str]) -> None:
        vars(self).update(vars(planner))
        self.name, self.known = name, set(known)

    def regimes(self, row: int, observed: Observed) -> Floats:
        """See `WarmPlanner.regimes`."""
        likely = super().regimes(row, observed)
        if not self.known & {"regime", "request"}:
            return likely
        trem = self._batch.arrays.trem[row, self.position(row) + 1]
        return np.eye(len(likely))[self.system.regime(float(trem.mean()))]

    def now(self, row: int, observed: Observed) -> Floats:
        """See `WarmPlanner.now`."""
        if "request" not in self.known:
            return super().now(row, observed)
        load, _ = self.true_load(row, self.position(row))
        return np.repeat(self.rewards(observed, load, spread=0.0)[None], len(self.worth), axis=0)

    def later(self, row: int) -> Floats:
        """See `WarmPlanner.later`."""
        if "gap" not in self.known:
            return super().later(row)
        gaps, following = self._batch.arrays.requests[row]["gap"], self.position(row) + 1
        warm = following < len(gaps) and gaps[following] <= self.system.keep_alive_s
        return self.worth / self.chance if warm else np.zeros_like(self.worth)


def shares(rewards: dict[str, Floats]) -> dict[str, float]:
    """Of the gap from `greedy_warm` to `lookahead`: what planning gains and what information does.

    Args:
        rewards: Name -> mean rewards of the same episodes.

    Returns:
        ``planning`` (the planner as it is), ``information`` (the request and the gap known, above
        that), ``rest`` (later requests, and what the planner leaves); they sum to 1.
    """
    steps = ("greedy_warm", "warm_planner", "knows the request and the gap", "lookahead")
    at = np.array([rewards[name].mean() for name in steps])
    parts = np.diff(at) / (at[-1] - at[0])
    return dict(zip(("planning", "information", "rest"), parts.tolist(), strict=True))


def information_value(options: FigureOptions) -> None:
    """The table and its figure."""
    kwargs = SETTING | ({"episode_requests": 10} if options.quick else {})
    system = ServerlessSystem.from_kwargs(split="eval", **kwargs)
    planner = WarmPlanner(system)
    policies: list[Any] = [make_policy("greedy_warm", system, family="serverless_moe"), planner]
    policies += [InformedPlanner(planner, name, known) for name, known in VARIANTS.items()]
    policies.append(make_policy("lookahead", system, family="serverless_moe"))
    found = evaluate(
        ENV_ID,
        policies,
        options.episodes,
        env_kwargs=kwargs,
        progress=lambda name, done, of: print(
            f"information_value: {name}, {done} of {of}", flush=True
        ),
    )
    rewards = {
        policy.name: np.array([r["mean_reward"] for r in found if r["policy"] == policy.name])
        for policy in policies
    }
    rows = []
    for name, values in rewards.items():
        more = paired_difference(values, rewards["warm_planner"], mean)
        row = {"policy": name, "episodes": len(values)} | with_interval("mean_reward", values)
        keys = ("minus_planner", "minus_planner_low", "minus_planner_high")
        rows.append(row | dict(zip(keys, more, strict=True)))
    part = shares(rewards)
    print_table(
        "preset dynamic, split eval",
        ["policy", "reward", "95 %", "minus warm_planner"],
        [
            [
                row["policy"],
                f"{row['mean_reward']:.4f}",
                f"{row['mean_reward_low']:.3f}..{row['mean_reward_high']:.3f}",
                f"{row['minus_planner']:+.4f} [{row['minus_planner_low']:+.4f}, "
                f"{row['minus_planner_high']:+.4f}]",
            ]
            for row in rows
        ],
    )
    text = (
        f"Of the gap from greedy_warm ({rewards['greedy_warm'].mean():.4f}) to lookahead "
        f"({rewards['lookahead'].mean():.4f}) planning closes {100 * part['planning']:.0f} %; "
        "knowing what no controller knows (the request as it is, and whether the next one comes "
        f"while functions are warm) closes {100 * part['information']:.0f} %; knowledge of later "
        f"requests and better planning would close the other {100 * part['rest']:.0f} %. Neither "
        "the planner nor lookahead is an optimum: the shares say where the gap lies, not what can "
        "be had at most. The planner knows the constants of the generator of the requests."
    )
    settings = {"environment": f"{ENV_ID}, preset dynamic, split eval"}
    save(options, "information_value", rows, note(text, **part), settings=settings)


def _plot(rows: Sequence[dict[str, Any]]) -> Any:
    figure, axis = pyplot().subplots(figsize=(7.5, 3.4), layout="constrained")
    for k, row in enumerate(rows):
        value = row["mean_reward"]
        ends = [[value - row["mean_reward_low"]], [row["mean_reward_high"] - value]]
        seeing = row["policy"] not in ("greedy_warm", "warm_planner")
        axis.errorbar(
            value,
            -k,
            xerr=ends,
            fmt="o",
            capsize=3,
            markersize=4,
            color="tab:green" if seeing else "tab:blue",
        )
    names = [row["policy"].replace("knows", "planner, knows") for row in rows]
    axis.set_yticks(-np.arange(len(rows)), names, fontsize=8)
    axis.set(
        xlabel="mean reward a request, 95 % interval over episodes",
        title="Blue: sees what a controller sees; green: knows more",
    )
    tidy(axis)
    return figure


FIGURES = {"information_value": information_value}
PICTURES: Pictures = {"information_value": _plot}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns 0."""
    parser = figure_parser(tuple(FIGURES), __doc__, MODULE, 20)
    return run_chosen(FIGURES, PICTURES, command_line(parser, argv, FigureOptions()))


if __name__ == "__main__":
    run_main(main)
