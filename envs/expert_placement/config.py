"""Arguments of the expert placement environments, checked and turned into a problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from servegym._checks import choose, flag, mapping, real, whole
from servegym.envs.expert_placement.cluster import (
    LOAD_DEFAULTS,
    MODELS,
    Cluster,
    ModelTimes,
    build_cluster,
)
from servegym.envs.expert_placement.cluster import scenario as scenario_arguments
from servegym.envs.expert_placement.simulator import (
    Forecast,
    Prompts,
    check_options,
    make_prompts,
)
from servegym.envs.workloads.activations import (
    SKEWS,
    Activations,
    load_activations,
    make_toy_activations,
)

ACTION_MODES = ("layer_budget", "layer_height", "expert_score", "placement")
REWARDS = ("latency", "log_latency")
TASK_MIXES = ("by_server", "mixed")
LEARNING: dict[str, Any] = {"action_mode": "layer_height", "reward": "log_latency", "epochs": 1}
"""Arguments to learn with, see Learning in `ExpertPlacementEnv`."""
# Expected number of requests of an episode: rewards are divided by it.
MIN_REQUESTS, MAX_REQUESTS = 1e-9, 1e7
# Moves of the tasks in an episode; their number is counted in 64 bits.
MOST_TURNS = 1e9
# The prompts that the first counts come from are never those of the episode.
SPLITS = {"train": "val", "val": "train", "eval": "train"}

# The small made-up model: about 1.5 places for each expert with the default GPUs.
_TOY = ModelTimes(4, 8, 2, 1024, 8_650_752, 0.0, 0.0027, 1e-3, 1e-5, 1e-3, 1e-6)


@dataclass(frozen=True, eq=False)
class Problem:
    """A placement problem: what environments and baselines share.

    Attributes:
        cluster: servers, links and times.
        activations: recorded or synthetic routing of the prompts.
        prompts: the same as the simulator reads it.
        tasks: names of the tasks; server n has the n-th, in a ring.
        rows: prompts that episodes draw from, for each task.
        history_rows: prompts of the first counts, for each task; none of ``rows``.
        interarrival_s: ``(N,)`` mean seconds between the requests of each server.
        output_tokens: range of the tokens of an answer.
        epochs, epoch_s: decisions of an episode and seconds between them.
        task_mix, rotate_s: which tasks a server's requests have.
        history_requests: requests of each server in the first counts.
        free_start: whether the first placement costs nothing.
        action_mode: one of `ACTION_MODES`.
        reward: one of `REWARDS`.
        replica_choice, replica_candidates, migration_source, serving, cache, router, execution:
            options of the simulator, see `check_options`.
        forecast: what a controller expects of a request, from ``history_rows``.
        arguments: the arguments as given.
    """

    cluster: Cluster
    activations: Activations
    prompts: Prompts
    tasks: tuple[str, ...]
    rows: tuple[np.ndarray, ...]
    history_rows: tuple[np.ndarray, ...]
    interarrival_s: np.ndarray
    output_tokens: tuple[int, int]
    epochs: int
    epoch_s: float
    task_mix: str
    rotate_s: float
    history_requests: int
    free_start: bool
    action_mode: str
    reward: str
    replica_choice: str
    replica_candidates: int
    migration_source: str
    serving: str
    cache: str
    router: str
    execution: str
    forecast: Forecast
    arguments: dict[str, Any]

    @property
    def expected_arrivals(self) -> float:
        """Mean number of requests of an epoch, over all servers."""
        return float((self.epoch_s / self.interarrival_s).sum())

    @property
    def simulator_options(self) -> dict[str, Any]:
        """Keywords of `Simulator` besides the cluster and the prompts."""
        names = "replica_choice", "replica_candidates", "migration_source", "serving", "cache"
        return {name: getattr(self, name) for name in (*names, "router", "execution", "forecast")}


@lru_cache(maxsize=8)
def _load(model: str, skew: str, seed: int) -> tuple[Activations, Prompts]:
    if model == "toy":
        found = make_toy_activations(prompts=60, seed=seed)
    else:
        found = load_activations(model, skew=skew, seed=seed)
    arrays = found.tokens, found.counts, found.bank, found.bank_start
    return found, make_prompts(*arrays, found.model.top_k)


def _tasks(given: Any, activations: Activations) -> tuple[str, ...]:
    """Names of the tasks that requests have, in the order of the servers."""
    if given is None:
        return activations.tasks
    if not isinstance(given, (list, tuple)) or not given:
        raise ValueError(f"tasks={given!r} must list at least one of {list(activations.tasks)}.")
    return tuple(choose(f"tasks[{i}]", name, activations.tasks) for i, name in enumerate(given))


def _rows(activations: Activations, split: str, tasks: tuple[str, ...]) -> tuple[np.ndarray, ...]:
    rows = np.asarray(activations.rows(split))
    numbers = [activations.tasks.index(name) for name in tasks]
    found = tuple(rows[activations.task[rows] == t] for t in numbers)
    for name, of_task in zip(tasks, found, strict=True):
        if not len(of_task):
            raise ValueError(f"split {split!r} of {activations.name!r} has no prompt of {name!r}.")
    return found


def _forecast(
    activations: Activations, rows: tuple[np.ndarray, ...], output_tokens: tuple[int, int]
) -> Forecast:
    """What the prompts of ``rows``, one array a task, let a controller expect of a request."""
    profile = np.zeros((len(activations.tasks), *activations.counts.shape[1:]))
    for of_task in rows:
        counts = activations.counts[of_task].sum(axis=0, dtype=np.float64)
        profile[activations.task[of_task[0]]] = counts / counts.sum()
    return Forecast(activations.task.astype(np.int64), profile, float(np.mean(output_tokens)))


def _cluster(model: str, arguments: dict[str, Any], cluster_kwargs: Any) -> Cluster:
    """The cluster of the scenario's arguments, some replaced by ``cluster_kwargs``."""
    arguments = arguments | mapping("cluster_kwargs", cluster_kwargs)
    if model == "toy" and arguments.get("sizes") is None:
        arguments["sizes"] = _TOY
    try:
        return build_cluster(model, **arguments)
    except TypeError as error:
        raise ValueError(f"cluster_kwargs={cluster_kwargs!r}: {error}") from None


def _interarrival_s(given: Any, servers: int) -> list[float]:
    """Mean seconds between the requests of each server."""
    gaps = list(given) if isinstance(given, (list, tuple, np.ndarray)) else [given] * servers
    if len(gaps) != servers:
        raise ValueError(
            f"mean_interarrival_s={given!r} must be one number or one for each of "
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


def _output_tokens(given: Any) -> tuple[int, int]:
    """Least and most tokens of an answer."""
    pair = list(given) if isinstance(given, (list, tuple)) else [given, given]
    pair = [whole("output_tokens", x, 1, 1 << 20) for x in pair]
    if len(pair) != 2 or pair[0] > pair[1]:
        raise ValueError(f"output_tokens={given!r} must be a number or a range (low, high).")
    return pair[0], pair[1]


def _rotate_s(given: Any, episode_s: float) -> float:
    """Seconds after which the tasks move on to the next server, 0 for never."""
    rotate = real("rotate_s", given, 0.0)
    if rotate > 0 and not episode_s / rotate <= MOST_TURNS:
        raise ValueError(
            f"rotate_s={rotate:g} makes the tasks of an episode of {episode_s:g} s move on "
            f"more than {MOST_TURNS:g} times; it must be 0 (never) or at least "
            f"{episode_s / MOST_TURNS:g}."
        )
    return rotate


def _router(router: Any, redirect: bool) -> Any:
    """The router that both arguments name; ValueError if they name two."""
    if not flag("redirect", redirect):
        return router
    if router not in ("home", "fewest_requests"):
        raise ValueError(
            f"redirect=True is the router 'fewest_requests'; router={router!r} is another one."
        )
    return "fewest_requests"


def build_problem(
    *,
    scenario: str = "edge_hetero",
    model: str = "deepseek-v2-lite",
    action_mode: str = "layer_budget",
    reward: str = "latency",
    epochs: int = 12,
    epoch_s: float = 300.0,
    split: str = "train",
    skew: str = "measured",
    activations_seed: int = 0,
    mean_interarrival_s: float | Sequence[float] | None = None,
    output_tokens: int | Sequence[int] | None = None,
    task_mix: str | None = None,
    tasks: Sequence[str] | None = None,
    rotate_s: float | None = None,
    history_requests: int = 100,
    free_start: bool = True,
    replica_choice: str = "least_finish",
    replica_candidates: int = 8,
    migration_source: str | None = None,
    serving: str = "collaborative",
    cache: str = "activation_aware",
    redirect: bool = False,
    router: str = "home",
    execution: str = "home",
    cluster_kwargs: Mapping[str, Any] | None = None,
) -> Problem:
    """Check every argument of a placement environment and build its problem.

    The arguments are those of :class:`~servegym.envs.expert_placement.env.ExpertPlacementEnv`.

    Raises:
        ValueError: naming the argument, what was given and what is allowed.
    """
    arguments = dict(locals())
    choose("model", model, [*MODELS, "toy"])
    of_cluster = scenario_arguments(scenario)
    load = {name: of_cluster.pop(name, value) for name, value in LOAD_DEFAULTS.items()}
    load["tasks"] = load["tasks"].get(model)
    load |= {name: arguments[name] for name in load if arguments[name] is not None}
    cluster = _cluster(model, of_cluster, cluster_kwargs)

    choose("skew", skew, ("measured",) if model == "toy" else SKEWS)
    activations, prompts = _load(model, skew, whole("activations_seed", activations_seed, 0))
    names = _tasks(load["tasks"], activations)

    gaps = _interarrival_s(load["mean_interarrival_s"], cluster.num_servers)
    epochs = whole("epochs", epochs, 1, 100_000)
    epoch_s = real("epoch_s", epoch_s, 0.0, open_low=True)
    _check_requests(epochs, epoch_s, gaps)
    tokens = _output_tokens(load["output_tokens"])
    rotate = _rotate_s(load["rotate_s"], epochs * epoch_s)
    mix = choose("task_mix", load["task_mix"], TASK_MIXES)

    choose("split", split, SPLITS)
    history_rows = _rows(activations, SPLITS[split], names)
    return Problem(
        cluster=cluster,
        activations=activations,
        prompts=prompts,
        tasks=names,
        rows=_rows(activations, split, names),
        history_rows=history_rows,
        interarrival_s=np.array(gaps),
        output_tokens=tokens,
        epochs=epochs,
        epoch_s=epoch_s,
        task_mix=mix,
        rotate_s=rotate,
        history_requests=whole("history_requests", history_requests, 0, 1_000_000),
        free_start=flag("free_start", free_start),
        action_mode=choose("action_mode", action_mode, ACTION_MODES),
        reward=choose("reward", reward, REWARDS),
        forecast=_forecast(activations, history_rows, tokens),
        arguments=arguments,
        **check_options(
            cluster.messages,
            replica_choice=replica_choice,
            replica_candidates=replica_candidates,
            migration_source=load["migration_source"],
            serving=serving,
            cache=cache,
            router=_router(router, redirect),
            execution=execution,
        ),
    )
