"""Why a router learns from paired rollouts and not from returns: what a choice is worth, and noise.

``python -m servegym.experiments.figures.beyond.routing.credit`` takes states that priced_greedy
meets and draws their future anew: arrivals and prompts, which no router knows. Each action is tried
on each future with priced_greedy to follow, and paid forward until all answers have ended. In one
half of the futures the best two actions of a state are chosen, in the other half measured:

- ``worth``: how much more the best earns than the next best, in scores;
- ``return_std``: standard deviation of the best one's return over the futures, which is what a
  learner from returns regresses on;
- ``n_step_std``: the same for its first eight rewards, the part of an 8-step target that is drawn;
- ``paired_std``: standard deviation of the difference of both on the same future.

From them follows how many samples of one state tell both actions apart, by one standard error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.agents.lib.environments import make_envs
from servegym.baselines.llm_routing.greedy_qos import PricedGreedy
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.envs._command_line import run_main
from servegym.envs.llm_routing import kernel
from servegym.envs.llm_routing.config import build_problem
from servegym.envs.llm_routing.core import RoutingBatch
from servegym.experiments.figures.plotting import pyplot, tidy
from servegym.experiments.figures.routing.common import Options, run_figures, save
from servegym.experiments.tables import note

__all__ = ["main"]

MODULE = "servegym.experiments.figures.beyond.routing.credit"
FLEET = "edge-6-heterogeneous"
RATES = (5.0, 8.0, 10.0)
WARM_UP = 120  # requests before the states are taken
HORIZON_S = 9.0  # the longest answer, 300 tokens, takes as long within L
N_STEP = 8  # rewards that SAC-HAN sums before it bootstraps
FUTURES = 48


def futures_of(
    envs: Any, row: int, futures: int, rate: float, policy: Any, rng: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Returns of all actions of a state over futures drawn anew.

    Args:
        envs: The native vector environment, paid forward.
        row: The system whose present state is meant.
        futures: How many.
        rate: Mean arrival rate of the Poisson arrivals, requests/s.
        policy: Decides the requests after the first.
        rng: Draws the futures.

    Returns:
        Sums of all rewards and of the first `N_STEP`, (actions, futures) each, and which actions
        are legal (actions,).
    """
    env = envs.unwrapped
    legal = np.asarray(env.batch.action_mask[row]) > 0
    problem = build_problem(view=kernel.GRAPH, **env.problem.arguments)
    batch = RoutingBatch(problem, legal.size * futures)
    state = env.clone_state(row)
    length = problem.episode_requests
    for k in range(futures):
        gaps = rng.exponential(1 / rate, length)
        drawn = problem.rows[rng.integers(0, len(problem.rows), length)]
        for action in range(legal.size):
            copy = action * futures + k
            batch.restore(copy, state)
            index = int(batch.env["index"][copy])
            left = length - index - 1
            now = batch.arrivals[copy, index]
            batch.arrivals[copy, index + 1 :] = now + np.cumsum(gaps[:left])
            batch.rows[copy, index + 1 : index + 1 + left] = drawn[:left]
    choice = np.repeat(np.arange(legal.size), futures)
    live = np.repeat(legal, futures).astype(np.int8)
    every, end = np.arange(live.size), float(state.env["now"][0]) + HORIZON_S
    total, first = np.zeros(live.size), np.zeros(live.size)
    step = 0
    while live.any():
        batch.step(choice, live)
        reward = np.where(live > 0, batch.out[:, 0] + batch.out[:, 1], 0.0)
        total += reward
        first += reward * (step < N_STEP)
        step += 1
        at = np.minimum(batch.env["index"].astype(int), length - 1)
        live &= (batch.out[:, 2] == 0.0) & (batch.arrivals[every, at] < end)
        choice = policy.act(batch.observation, batch.action_mask)
    return total.reshape(-1, futures), first.reshape(-1, futures), legal


def measured(
    total: NDArray[np.float64], first: NDArray[np.float64], legal: NDArray[np.bool_]
) -> tuple[float, float, float, float]:
    """Worth, and variances of return, first rewards and paired difference, of one state.

    The best two actions are those of the even futures; all numbers are of the odd ones.
    """
    mean = np.where(legal, total[:, ::2].mean(1), -np.inf)
    best, second = np.argsort(-mean)[:2]
    gap = total[best, 1::2] - total[second, 1::2]
    variances = (part[best, 1::2].var(ddof=1) for part in (total, first))
    return (float(gap.mean()), *map(float, variances), float(gap.var(ddof=1)))  # type: ignore[return-value]


def summary(found: NDArray[np.float64], rng: np.random.Generator) -> dict[str, float]:
    """Means over states (S, 4) of `measured`, samples needed, 95 % bootstrap intervals."""

    def numbers(part: NDArray[np.float64]) -> dict[str, float]:
        worth, whole, first, paired = part.mean(0)
        return {
            "worth": worth,
            "return_std": whole**0.5,
            "n_step_std": first**0.5,
            "paired_std": paired**0.5,
            "returns_needed": 2 * whole / worth**2,
            "n_step_needed": 2 * first / worth**2,
            "pairs_needed": paired / worth**2,
        }

    resampled = [numbers(found[rng.integers(0, len(found), len(found))]) for _ in range(2000)]
    row = {}
    for key, value in numbers(found).items():
        low, high = np.quantile([one[key] for one in resampled], (0.025, 0.975))
        row |= {key: float(value), f"{key}_low": float(low), f"{key}_high": float(high)}
    return row


def credit(options: Options) -> None:
    """What a choice is worth beside the noise of returns and of paired rollouts."""
    rows, notes = [], []
    states, futures = (6, 8) if options.quick else (options.episodes, FUTURES)
    for rate in RATES[:1] if options.quick else RATES:
        kwargs = {"profiles": FLEET, "rate": rate, "reward": "paid_forward"}
        envs = make_envs("servegym/LLMRouting-v0", states, episode_requests=400, **kwargs)
        policy = PricedGreedy(RoutingSystem.from_env(envs))
        obs, info = envs.reset(seed=1)
        for _ in range(WARM_UP):
            obs, *_, info = envs.step(policy.act(obs, info["action_mask"]))
        rng = np.random.default_rng(1)
        found = [
            measured(*futures_of(envs, row, futures, rate, policy, rng)) for row in range(states)
        ]
        row = {"rate": rate, "states": states, "futures": futures}
        row |= summary(np.array(found), rng)
        rows.append(row)

        def text(key: str, digits: int, row: Mapping[str, Any] = row) -> str:
            parts = (row[key], row[f"{key}_low"], row[f"{key}_high"])
            return "{} [{}, {}]".format(*(f"{part:,.{digits}f}" for part in parts))

        notes.append(
            note(
                f"{rate:g} requests/s: the best action is worth {text('worth', 3)} more than the "
                f"next best; the return of one state and action has a standard deviation of "
                f"{text('return_std', 2)}, its first {N_STEP} rewards {text('n_step_std', 2)}, the "
                f"difference of two actions on the same future {text('paired_std', 2)}: "
                f"{text('returns_needed', 0)} returns of each, or {text('pairs_needed', 0)} "
                "paired rollouts, of one state tell them apart by one standard error.",
                rate=rate,
                ratio=row["returns_needed"] / row["pairs_needed"],
            )
        )
    save(options, "credit", rows, *notes)


def _plot(rows: Sequence[Mapping[str, Any]]) -> Any:
    figure, axis = pyplot().subplots(figsize=(6, 3.2), layout="constrained")
    kinds = {"worth": "worth of the choice", "paired_std": "std of a paired difference"}
    kinds |= {"n_step_std": f"std of {N_STEP} rewards", "return_std": "std of a return"}
    for k, (key, label) in enumerate(kinds.items()):
        at = np.arange(len(rows)) + 0.2 * (k - 1.5)
        value, low, high = (
            np.array([row[key + end] for row in rows]) for end in ("", "_low", "_high")
        )
        axis.bar(at, value, 0.18, yerr=np.maximum([value - low, high - value], 0), label=label)
    axis.set_xticks(np.arange(len(rows)), [f"{row['rate']:g}" for row in rows])
    axis.set(yscale="log", xlabel="arrival rate, requests/s", ylabel="scores")
    axis.legend(fontsize=8, frameon=False)
    tidy(axis)
    return figure


FIGURES = {"credit": credit}
PICTURES = {"credit": _plot}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save; see ``--help``."""
    return run_figures(FIGURES, PICTURES, argv, __doc__, MODULE, episodes=48)


if __name__ == "__main__":
    run_main(main)
