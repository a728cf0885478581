"""Checked arguments of the expert placement environments, turned into a problem."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from servegym._checks import choose, real
from servegym.envs.expert_placement.arguments import SPLITS, PlacementArguments
from servegym.envs.expert_placement.cluster import Cluster, ModelTimes, scenario_cluster
from servegym.envs.expert_placement.simulator import (
    Forecast,
    Prompts,
    SimulatorArguments,
    check_options,
    make_prompts,
)
from servegym.envs.workloads.activations import Activations, load_activations, make_toy_activations

LEARNING: dict[str, Any] = {"action_mode": "layer_height", "reward": "log_latency", "epochs": 1}
"""Arguments to learn with: an episode is one placement and the traffic after it."""
# Expected number of requests of an episode: rewards are divided by it.
MIN_REQUESTS, MAX_REQUESTS = 1e-9, 1e7
# Moves of the tasks in an episode; their number is counted in 64 bits.
MOST_TURNS = 1e9

# The small made-up model: about 1.5 places for each expert with the default GPUs.
_TOY = ModelTimes(4, 8, 2, 1024, 8_650_752, 0.0, 0.0027, 1e-3, 1e-5, 1e-3, 1e-6)


@dataclass(frozen=True, eq=False)
class Problem:
    """A placement problem: what environments and baselines share.

    Attributes:
        arguments: what ``gymnasium.make`` was given and the scenario's for the rest.
        cluster: servers, links and times.
        activations: recorded or synthetic routing of the prompts.
        prompts: the same as the simulator reads it.
        tasks: names of the tasks; server n has the n-th, in a ring.
        rows: prompts that episodes draw from, for each task.
        history_rows: prompts of the first counts, for each task; none of ``rows``.
        interarrival_s: ``(N,)`` mean seconds between the requests of each server.
        forecast: what a controller expects of a request, from ``history_rows``.
    """

    arguments: PlacementArguments
    cluster: Cluster
    activations: Activations
    prompts: Prompts
    tasks: tuple[str, ...]
    rows: tuple[np.ndarray, ...]
    history_rows: tuple[np.ndarray, ...]
    interarrival_s: np.ndarray
    forecast: Forecast

    @property
    def expected_arrivals(self) -> np.ndarray:
        """``(N,)`` mean requests of an epoch at each server."""
        return self.arguments.epoch_s / self.interarrival_s

    @property
    def simulator_options(self) -> dict[str, Any]:
        """Keywords of `Simulator` besides the cluster and the prompts."""
        options = {name: getattr(self.arguments, name) for name in SimulatorArguments.described()}
        return {**options, "forecast": self.forecast}


@lru_cache(maxsize=8)
def _load(model: str, skew: str) -> tuple[Activations, Prompts]:
    if model == "toy":
        activations = make_toy_activations(prompts=60)
    else:
        activations = load_activations(model, skew=skew)
    arrays = activations.tokens, activations.counts, activations.bank, activations.bank_start
    return activations, make_prompts(*arrays, activations.model.top_k)


def _tasks(value: Any, activations: Activations) -> tuple[str, ...]:
    """Names of the tasks that requests have, in the order of the servers."""
    if value is None:
        return activations.tasks
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"tasks={value!r} must list at least one of {list(activations.tasks)}.")
    return tuple(choose(f"tasks[{i}]", name, activations.tasks) for i, name in enumerate(value))


def _rows(activations: Activations, split: str, tasks: tuple[str, ...]) -> tuple[np.ndarray, ...]:
    rows = np.asarray(activations.rows(split))
    numbers = [activations.tasks.index(name) for name in tasks]
    prompts = tuple(rows[activations.task[rows] == t] for t in numbers)
    for name, of_task in zip(tasks, prompts, strict=True):
        if not len(of_task):
            raise ValueError(f"split {split!r} of {activations.name!r} has no prompt of {name!r}.")
    return prompts


def _forecast(
    activations: Activations, rows: tuple[np.ndarray, ...], output_tokens: tuple[int, int]
) -> Forecast:
    """What the prompts of ``rows``, one array a task, let a controller expect of a request."""
    profile = np.zeros((len(activations.tasks), *activations.counts.shape[1:]))
    for of_task in rows:
        counts = activations.counts[of_task].sum(axis=0, dtype=np.float64)
        profile[activations.task[of_task[0]]] = counts / counts.sum()
    return Forecast(activations.task.astype(np.int64), profile, float(np.mean(output_tokens)))


def _cluster(arguments: PlacementArguments) -> Cluster:
    """The cluster of the scenario, with ``cluster_kwargs`` in place of some of its arguments."""
    changes = arguments.cluster_kwargs or {}
    if arguments.model == "toy" and changes.get("sizes") is None:
        changes = {**changes, "sizes": _TOY}
    try:
        return scenario_cluster(arguments.scenario, arguments.model, **changes)
    except TypeError as error:
        raise ValueError(f"cluster_kwargs={arguments.cluster_kwargs!r}: {error}") from None


def _interarrival_s(value: Any, servers: int) -> list[float]:
    """Mean seconds between the requests of each server."""
    gaps = list(value) if isinstance(value, (list, tuple, np.ndarray)) else [value] * servers
    if len(gaps) != servers:
        raise ValueError(
            f"mean_interarrival_s={value!r} must be one number or one for each of "
            f"the {servers} servers."
        )
    return [real(f"mean_interarrival_s[{n}]", g, 0.0, open_low=True) for n, g in enumerate(gaps)]


def _check_requests(epochs: int, epoch_s: float, gaps: list[float]) -> None:
    """Check that an episode has some requests and not more than memory has room for."""
    requests = epochs * epoch_s * sum(1.0 / g for g in gaps)
    if not MIN_REQUESTS <= requests <= MAX_REQUESTS:
        raise ValueError(
            f"epochs={epochs}, epoch_s={epoch_s:g} and mean_interarrival_s={gaps} make "
            f"{requests:.3g} requests an episode; it must be from {MIN_REQUESTS:g} to "
            f"{MAX_REQUESTS:g}."
        )


def _check_turns(rotate_s: float, episode_s: float) -> None:
    """Check that the tasks move on to the next server no more often than can be counted."""
    if rotate_s > 0 and not episode_s / rotate_s <= MOST_TURNS:
        raise ValueError(
            f"rotate_s={rotate_s:g} makes the tasks of an episode of {episode_s:g} s move on "
            f"more than {MOST_TURNS:g} times; it must be 0 (never) or at least "
            f"{episode_s / MOST_TURNS:g}."
        )


def problem_of(arguments: PlacementArguments) -> Problem:
    """The problem that checked arguments describe.

    Raises:
        ValueError: arguments do not go together; it names them.
    """
    cluster = _cluster(arguments)
    if arguments.model == "toy":
        choose("skew", arguments.skew, ("measured",))
    activations, prompts = _load(arguments.model, arguments.skew)
    tasks = _tasks(arguments.tasks, activations)
    gaps = _interarrival_s(arguments.mean_interarrival_s, cluster.num_servers)
    _check_requests(arguments.epochs, arguments.epoch_s, gaps)
    _check_turns(arguments.rotate_s, arguments.epochs * arguments.epoch_s)
    history_rows = _rows(activations, SPLITS[arguments.split], tasks)
    rows = _rows(activations, arguments.split, tasks)
    check_options(arguments, cluster.messages)
    return Problem(
        arguments=arguments,
        cluster=cluster,
        activations=activations,
        prompts=prompts,
        tasks=tasks,
        rows=rows,
        history_rows=history_rows,
        interarrival_s=np.array(gaps),
        forecast=_forecast(activations, history_rows, arguments.output_range),
    )


def build_problem(**arguments: Any) -> Problem:
    """`problem_of` of arguments by name, as `PlacementArguments` has them."""
    return problem_of(PlacementArguments.fill(arguments))
