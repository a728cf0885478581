"""What the studies of expert placement share: episodes, intervals, changes, findings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import servegym.baselines.expert_placement  # noqa: F401  registers the policies
from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.baselines.registry import make_policy
from servegym.envs.expert_placement.config import Problem, build_problem
from servegym.envs.expert_placement.core import PlacementEpisode
from servegym.envs.expert_placement.simulator import Requests
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.play import DEFAULT_SEED
from servegym.experiments.evaluation.stats import Interval, student_interval
from servegym.experiments.evaluation.tables import Note, note
from servegym.experiments.papers.placement.claims import CLAIMS
from servegym.experiments.papers.study import interval_columns
from servegym.experiments.papers.verdicts import Rows, found_for

ENV_ID, SEED = "servegym/ExpertPlacement-v0", DEFAULT_SEED
GROWTH, BACKLOG = 0.2, 0.03
"""Twice the arrivals make an overloaded point's mean grow by more; the mean over the time of
arrivals from which on it is tried, as below it no queue worth the name is there."""


def interval(values: Any, name: str) -> dict[str, float]:
    """Mean of a few episodes and Student's 95 % interval as ``name``, ``name_low``, ``name_high``.

    The low end is not below 0, since no value is.
    """
    value, low, high = student_interval(np.asarray(values, dtype=np.float64))
    return interval_columns(name, (value, float(np.maximum(low, 0.0)), high))


KEYS = (
    "mean_latency_s",
    "p99_latency_s",
    "mean_ttft_s",
    "local_token_ratio",
    "local_call_ratio",
    "remote_layer_ratio",
    "migrations",
    "requests",
)


def measure(
    point: Mapping[str, Any], policies: Sequence[str], episodes: int, **kwargs: Any
) -> list[dict[str, Any]]:
    """Rows of policies on the same evaluation episodes, with ``kwargs`` of the environment.

    ``point``, the mean over episodes and its interval of every figure, each server's (up to 16)
    included, `_doubled`, and as ``_latency`` each episode's mean latency.
    """
    rows = []
    for policy in policies:
        runs = evaluate(ENV_ID, [policy], episodes, env_kwargs=kwargs)
        row = dict(point) | {"policy": policy, "episodes": episodes}
        servers = [key for key in runs[0] if key.startswith("mean_latency_s_server_")]
        for key in (*KEYS, *servers):
            row |= interval([run[key] for run in runs], key)
        row |= _doubled(policy, row["mean_latency_s"], kwargs)
        rows.append(row | {"_latency": np.array([run["mean_latency_s"] for run in runs])})
    return rows


def _doubled(policy: str, mean_s: float, kwargs: Mapping[str, Any]) -> dict[str, float]:
    """Whether the mean is that of the length of the run: one episode with twice the arrivals.

    It has twice the epochs, but a single one is made twice as long: no decision is added to it.
    ``doubled_s`` is its mean latency, NaN where the queue is short (`BACKLOG`) and none is played;
    ``overloaded`` is 1 where that is more than `GROWTH` above the mean.
    """
    epochs, epoch_s = kwargs.get("epochs", 12), kwargs.get("epoch_s", 300.0)
    if not mean_s > BACKLOG * epochs * epoch_s:
        return {"doubled_s": float("nan"), "overloaded": 0.0}
    longer = {"epoch_s": 2 * epoch_s} if epochs == 1 else {"epochs": 2 * epochs}
    (run,) = evaluate(ENV_ID, [policy], 1, env_kwargs={**kwargs, **longer})
    doubled = run["mean_latency_s"]
    return {"doubled_s": doubled, "overloaded": float(doubled > (1 + GROWTH) * mean_s)}


def growing(rows: Sequence[Mapping[str, Any]], *keys: str) -> dict[str, Any]:
    """A note on the points that are overloaded."""
    grow = [" ".join(str(row[key]) for key in keys) for row in rows if row["overloaded"]]
    if not grow:
        text = "No point is overloaded: twice the arrivals raise no mean by more than 20 %."
        return note(text, overloaded=[])
    text = (
        f"Overloaded points ({', '.join(keys)}), whose mean grows with the length of the run, by "
        f"more than 20 % with twice the arrivals: {'; '.join(grow)}."
    )
    return note(text, overloaded=grow)


def findings(table: str, *keys: str) -> Callable[[Any, Rows], list[Note]]:
    """The notes of a study: what the claims find in its table, and the points that are overloaded.

    ``keys`` are the columns that tell these apart.
    """
    of_claims = found_for(CLAIMS, table)
    return lambda options, rows: [*of_claims(options, rows), growing(rows, *keys)]


def change(one: np.ndarray, other: np.ndarray) -> Interval:
    """Change from ``other`` to ``one`` on the same few episodes, in % of ``other``.

    The ratio of means and Student's interval around a jackknife's deviation; NaN ends for a single
    episode.
    """
    value, n = 100 * (one.mean() / other.mean() - 1), len(one)
    if n < 2:
        return Interval(float(value), float("nan"), float("nan"))
    from scipy.stats import t

    left = 100 * ((one.sum() - one) / (other.sum() - other) - 1)
    half = t.ppf(0.975, n - 1) * np.sqrt((n - 1) * np.mean((left - left.mean()) ** 2))
    return Interval(float(value), float(value - half), float(value + half))


def add_change(row: dict[str, Any], other: Mapping[str, Any], name: str) -> None:
    """Put the `change` from another row of `measure` into a row, as ``change_pct_`` and a name."""
    columns = change(row["_latency"], other["_latency"])
    row |= interval_columns(f"change_pct_{name}", columns)


def drive(
    kwargs: Mapping[str, Any],
    policy: str,
    seed: int,
    slices: int = 5,
    requests: Callable[[Problem, np.random.Generator], Requests] | None = None,
    pooled_start: bool = False,
    static: bool = False,
    history: np.ndarray | None = None,
) -> tuple[PlacementEpisode, list[dict[str, float]]]:
    """Run one episode and look at it several times an epoch, between decisions.

    Without the last four arguments it is the episode that `evaluate` runs with this seed.

    Args:
        kwargs: Arguments of the environment.
        policy: A registered name.
        seed: Seed of the episode.
        slices: Looks an epoch.
        requests: Makes other requests than the environment draws.
        pooled_start: Whether the counts before the start are those of all servers together, as
            from a data set without the servers of its requests.
        static: Whether only the first decision counts.
        history: (N, L, E) other counts before the start.

    Returns:
        The system at its end, and per look ``start_s``, ``end_s``, tokens and calls served here and
        elsewhere since the look before, and ``adopted``, whether a change was adopted at its start.
    """
    problem = build_problem(**{"split": "eval", **kwargs, "action_mode": "placement"})
    described = PlacementSystem.from_problem(problem)
    agent: Any = make_policy(policy, described, family="expert_placement")
    agent.reset(1, seed=seed)
    # More and shorter epochs than the policy decides in.
    epochs, epoch_s = problem.arguments.epochs * slices, problem.arguments.epoch_s / slices
    fine = dataclasses.replace(problem.arguments, epochs=epochs, epoch_s=epoch_s)
    system = PlacementEpisode(dataclasses.replace(problem, arguments=fine))
    rng = np.random.default_rng(seed)
    system.begin(rng)
    if requests is not None:
        system.requests = requests(problem, rng)
        system.simulator.begin(system.requests, system.simulator.target())
    if history is not None:
        system.history = history
    elif pooled_start and system.history is not None:
        system.history = np.broadcast_to(system.history.sum(axis=0), system.history.shape).copy()
    names = [f"all_{place}_{unit}" for place in ("local", "remote") for unit in ("tokens", "calls")]
    looks, before = [], dict.fromkeys(names, 0)
    for part in range(epochs):
        plan = None
        if part % slices == 0 and not (static and part):
            observation = {key: value[None] for key, value in system.observation().items()}
            action = agent.act(observation)
            if action["migrate"][0]:
                plan = np.asarray(action["plan"][0], dtype=np.uint8)
        _, adopted, _ = system.advance(plan)
        now = {name: int(system.simulator.state.server[name].sum()) for name in names}
        look = {"start_s": part * epoch_s, "end_s": (part + 1) * epoch_s}
        looks.append(look | {n: now[n] - before[n] for n in names} | {"adopted": float(adopted)})
        before = now
    return system, looks


def local_shares(looks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Share of tokens and calls served at home, with intervals, over looks of several episodes."""
    row: dict[str, float] = {}
    for unit in ("tokens", "calls"):
        here = np.array([look[f"all_local_{unit}"] for look in looks], dtype=np.float64)
        away = np.array([look[f"all_remote_{unit}"] for look in looks])
        row |= interval(here / np.maximum(here + away, 1), f"local_{unit}")
    return row
