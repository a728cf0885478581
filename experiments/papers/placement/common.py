"""What the figures of expert placement share: policies, episodes, intervals, line styles."""

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
from servegym.experiments.evaluation.evaluate import DEFAULT_SEED, evaluate
from servegym.experiments.evaluation.stats import (
    Interval,
    mean,
    stratified_bootstrap,
    student_interval,
)
from servegym.experiments.evaluation.tables import note
from servegym.experiments.papers.run import (
    FigureOptions,
    Pictures,
    command_line,
    figure_parser,
    run_chosen,
)

__all__ = [
    "COLOURS",
    "ENV_ID",
    "POLICIES",
    "SEED",
    "apart",
    "as_text",
    "band",
    "change",
    "change_columns",
    "drive",
    "growing",
    "interval",
    "make",
    "measure",
    "overloaded",
    "ratio_of",
    "run_figures",
    "seconds_axis",
    "setting",
    "versus",
]

ENV_ID = "servegym/ExpertPlacement-v0"
POLICIES = (
    "uniform",
    "redundance",
    "smartmoe",
    "eplb",
    "eplb_global",
    "prism",
    "prism_printed",
    "proxy_optimum",
    "whole_layer",
    "latency_dp",
)
COLOURS: dict[str, str] = dict(
    zip(
        POLICIES,
        (
            "0.6",
            "0.35",
            "tab:olive",
            "tab:cyan",
            "tab:blue",
            "tab:red",
            "tab:pink",
            "tab:green",
            "tab:orange",
            "tab:purple",
        ),
        strict=True,
    )
)


def run_figures(
    figures: Mapping[str, Callable[[FigureOptions], object]],
    pictures: Pictures,
    argv: Sequence[str] | None,
    description: str | None,
    module: str,
    episodes: int,
) -> int:
    """Parse a figure module's command line and make its figures; returns 0."""
    parser = figure_parser(tuple(figures), description, module, episodes)
    return run_chosen(figures, pictures, command_line(parser, argv, FigureOptions()))


def setting(problem: Problem) -> str:
    """Link model, cost of a message and what else decides the size of latencies, in words."""
    c = problem.cluster
    rates = sorted({float(b) / 1e6 for b in c.nic_bps})
    return (
        f"{c.model}, {c.num_gpus} GPUs on {c.num_servers} servers, link model {c.link_model}, "
        f"messages {c.messages}, h = {1e3 * c.message_cost_s:g} ms, NIC "
        f"{' / '.join(f'{r:g}' for r in rates)} Mbps, replica choice {problem.replica_choice}, "
        f"weights from {problem.migration_source}, {problem.activations.kind} activations "
        f"({problem.arguments['skew']} skew), tasks {', '.join(problem.tasks)}"
    )


FEW = 10
"""Below so many episodes intervals are Student's: a bootstrap of five holds the mean in 85 %."""
LEAST_APART = 5
"""Episodes from which on intervals of two means are compared."""
GROWTH, BACKLOG = 0.2, 0.03
"""Twice the arrivals make an overloaded point's mean grow by more; the mean over the time of
arrivals from which on it is tried, as below it no queue worth the name is there."""


def interval(values: Any, name: str, scale: float = 1.0) -> dict[str, float]:
    """Mean of episodes and its 95 % interval as ``name``, ``name_low``, ``name_high``.

    Student's below `FEW` episodes, with no low end below 0 since no value is; else by bootstrap.
    """
    array = scale * np.asarray(values, dtype=np.float64)
    if array.size < FEW:
        found = student_interval(array)
        low = max(found.low, 0.0) if found.low == found.low else found.low
        found = Interval(found.value, low, found.high)
    else:
        found = stratified_bootstrap(array, mean)
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


def make(name: str, described: PlacementSystem, quick: bool = False, **arguments: Any) -> Any:
    """A registered policy; in a smoke run ``best_start`` searches for a moment only."""
    if quick and name == "best_start":
        arguments = {"tries": 1, "steps": 1_000, "swaps": 4} | arguments
    return make_policy(name, described, family="expert_placement", **arguments)


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
    policies: Sequence[Any], episodes: int, point: Mapping[str, Any], **kwargs: Any
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Run policies on the same evaluation episodes.

    Args:
        policies: Registered names or policies.
        episodes: Episodes of each.
        point: Columns put before the others.
        **kwargs: Arguments of the environment.

    Returns:
        One row a policy with the mean over episodes and its interval of every figure, the mean
        latency of each server (up to 16) and their mean included, and `_doubled`; and the mean
        latency of each episode ``(episodes,)`` by policy.
    """
    rows, latency = [], {}
    for given in policies:
        runs = evaluate(ENV_ID, [given], episodes, env_kwargs=kwargs)
        policy = given if isinstance(given, str) else given.name
        row = dict(point) | {"policy": policy, "episodes": episodes}
        for key in KEYS:
            row |= interval([run[key] for run in runs], key)
        servers = [key for key in runs[0] if key.startswith("mean_latency_s_server_")]
        for key in servers:
            row |= interval([run[key] for run in runs], key)
        if servers:
            of_servers = [np.mean([run[key] for key in servers]) for run in runs]
            row |= interval(of_servers, "mean_of_servers_s")
        rows.append(row)
        latency[policy] = np.array([run["mean_latency_s"] for run in runs])
        row |= _doubled(given, row["mean_latency_s"], kwargs)
        print(f"{dict(point)} {policy}: {row['mean_latency_s']:.2f} s")
    return rows, latency


def _doubled(policy: Any, mean_s: float, kwargs: Mapping[str, Any]) -> dict[str, float]:
    """Whether the mean is that of the length of the run: one episode with twice the arrivals.

    It has twice the epochs, but a single one is made twice as long: no decision is added to it.

    Returns:
        ``doubled_s``, its mean latency (NaN where the queue is short, see `BACKLOG`, and none is
        played), and ``overloaded``, 1 where that is more than `GROWTH` above the mean.
    """
    epochs, epoch_s = kwargs.get("epochs", 12), kwargs.get("epoch_s", 300.0)
    if not mean_s > BACKLOG * epochs * epoch_s:
        return {"doubled_s": float("nan"), "overloaded": 0.0}
    longer = {"epoch_s": 2 * epoch_s} if epochs == 1 else {"epochs": 2 * epochs}
    (run,) = evaluate(ENV_ID, [policy], 1, env_kwargs={**kwargs, **longer})
    doubled = run["mean_latency_s"]
    return {"doubled_s": doubled, "overloaded": float(doubled > (1 + GROWTH) * mean_s)}


def overloaded(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Policies of rows whose latency grows with the length of the run."""
    return [row["policy"] for row in rows if row.get("overloaded", 0.0) > 0]


def growing(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """A note on the points that are overloaded."""
    grow = [" ".join(str(row[key]) for key in keys) for row in rows if row["overloaded"]]
    if not grow:
        text = "No point is overloaded: twice the arrivals raise no mean by more than 20 %."
        return [note(text, overloaded=[])]
    text = (
        f"Overloaded points ({', '.join(keys)}), whose mean grows with the length of the run, by "
        f"more than 20 % with twice the arrivals: {'; '.join(grow)}."
    )
    return [note(text, overloaded=grow)]


def change(one: np.ndarray, other: np.ndarray) -> Interval:
    """Change from ``other`` to ``one`` on the same episodes, in % of ``other``.

    The ratio of means. Its interval is Student's around a jackknife's deviation below `FEW`
    episodes, else a bootstrap over episodes; NaN ends for a single one.
    """
    value, n = 100 * (one.mean() / other.mean() - 1), len(one)
    if n >= FEW:
        drawn = np.random.default_rng(0).integers(n, size=(2000, n))
        changes = 100 * (one[drawn].mean(axis=1) / other[drawn].mean(axis=1) - 1)
        low, high = np.percentile(changes, [2.5, 97.5])
        return Interval(float(value), float(low), float(high))
    if n < 2:
        return Interval(float(value), float("nan"), float("nan"))
    from scipy.stats import t

    left = 100 * ((one.sum() - one) / (other.sum() - other) - 1)
    half = t.ppf(0.975, n - 1) * np.sqrt((n - 1) * np.mean((left - left.mean()) ** 2))
    return Interval(float(value), float(value - half), float(value + half))


def change_columns(one: np.ndarray, other: np.ndarray, name: str) -> dict[str, float]:
    """`change` and its ends as columns ``change_pct_<name>``, by what it is held against."""
    found = change(one, other)
    ends = (("", found.value), ("_low", found.low), ("_high", found.high))
    return {f"change_pct_{name}{end}": value for end, value in ends}


def ratio_of(one: np.ndarray, other: np.ndarray) -> Interval:
    """Change from ``other`` to ``one`` in % of ``other``, of independent episodes.

    Welch's interval of the logarithm of the ratio of means; NaN ends if either has one episode.
    """
    log = float(np.log(one.mean() / other.mean()))
    value = 100 * np.expm1(log)
    if min(len(one), len(other)) < 2:
        return Interval(value, float("nan"), float("nan"))
    from scipy.stats import t

    parts = [x.var(ddof=1) / len(x) / x.mean() ** 2 for x in (one, other)]
    freedom = sum(p**2 / (len(x) - 1) for p, x in zip(parts, (one, other), strict=True))
    half = t.ppf(0.975, sum(parts) ** 2 / freedom) * np.sqrt(sum(parts)) if freedom > 0 else 0.0
    return Interval(value, 100 * np.expm1(log - half), 100 * np.expm1(log + half))


def as_text(found: Interval, form: str = "+.1f") -> str:
    """A change as text: ``-20.0 % [-21.0, -19.0]``; of one episode without an interval."""
    if np.isnan(found.low):
        return f"{found.value:{form}} % (one episode)"
    return f"{found.value:{form}} % [{found.low:{form}}, {found.high:{form}}]"


def versus(one: np.ndarray, other: np.ndarray) -> str:
    """`change` in words; negative where ``one`` is less."""
    return as_text(change(one, other))


def apart(one: Mapping[str, Any], other: Mapping[str, Any], paired: Interval, number: int) -> str:
    """Whether one policy's latency is lower than another's, in words.

    Args:
        one: Its row, with the mean's interval.
        other: The other's.
        paired: `change` on the same episodes.
        number: Of these.
    """
    if number < LEAST_APART:
        return f"{number} episodes are too few for a verdict"
    if one["mean_latency_s_high"] < other["mean_latency_s_low"]:
        return "lower; intervals apart"
    if paired.high < 0:
        return "lower on the same episodes; intervals of the means overlap"
    return "not lower"


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
    """Run one episode and look at it several times between decisions.

    Without the last four arguments it is the episode that `evaluate` runs with this seed.

    Args:
        kwargs: Arguments of the environment.
        policy: A registered name.
        seed: Of the episode.
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
    agent: Any = make(policy, PlacementSystem.from_problem(problem))
    agent.reset(1, seed=seed)
    # More and shorter epochs than the policy decides in.
    fine = dataclasses.replace(
        problem, epochs=problem.epochs * slices, epoch_s=problem.epoch_s / slices
    )
    system = PlacementEpisode(fine)
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
    for part in range(fine.epochs):
        plan = None
        if part % slices == 0 and not (static and part):
            observation = {key: value[None] for key, value in system.observation().items()}
            action = agent.act(observation)
            if action["migrate"][0]:
                plan = np.asarray(action["plan"][0], dtype=np.uint8)
        _, adopted, _ = system.advance(plan)
        now = {name: int(system.simulator.state.server[name].sum()) for name in names}
        look = {"start_s": part * fine.epoch_s, "end_s": (part + 1) * fine.epoch_s}
        looks.append(look | {n: now[n] - before[n] for n in names} | {"adopted": float(adopted)})
        before = now
    return system, looks


def band(axis: Any, rows: Sequence[Mapping[str, Any]], x: str, y: str, **look: Any) -> None:
    """A line of ``y`` over ``x`` with its interval as a band."""
    at = [row[x] for row in rows]
    (line,) = axis.plot(at, [row[y] for row in rows], **look)
    axis.fill_between(
        at,
        [row[f"{y}_low"] for row in rows],
        [row[f"{y}_high"] for row in rows],
        color=line.get_color(),
        alpha=0.15,
        linewidth=0,
    )


def seconds_axis(axis: Any) -> None:
    """A logarithmic axis of seconds with plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


SEED = DEFAULT_SEED
"""Seed of the first evaluation episode."""
