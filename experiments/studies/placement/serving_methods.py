r"""Placements, caches and forwarding with every router at 1, 5 and 10 times the load.

::

    python -m servegym.experiments.studies.placement.serving_methods --resume

A *method* is a placement algorithm whose layers return to the request's server, a cache that
fetches what it lacks from host memory, or forwarding, where the hidden states move on to a server
that holds the next layer whole. Each method is played with every router on validation episodes; the
router with the least mean latency is then played once on the evaluation episodes. Validation
chooses the best method of each kind, too. Its episodes have seeds of their own and draw the prompts
of the training split, since the validation split has one summary; placements are planned there from
the prompts for validation.

* ``methods``: every method in the six scenarios, those of constant tasks with 1, 5 and 10 times the
  arrivals, too. A method that is overloaded at a load is not played at a higher one. Placements are
  planned for requests that are served at home but for ``latency_local_search``, which simulates
  the router that it is played with. In ``drift``
  placements load weights over the network while caches find all of them in host memory;
  ``drift, host`` gives placements the host memory, too, and ``host memory for half`` lets caches
  find half of the experts there and read the others from a drive.
* ``saturation``: the best method of each kind under more and more arrivals, until twice the time of
  arrivals raises the mean by more than 20 %. At loads that ``methods`` has not, its router is that
  at the normal load.

``bound_s`` is the latency of the same requests if each were alone, all of its experts on the
serving server, each on a GPU of its own: no placement, cache, router or execution gets below it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from servegym._command_line import run_main
from servegym.envs.expert_placement.config import Problem, build_problem
from servegym.envs.expert_placement.core import PlacementEpisode
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.stats import Interval
from servegym.experiments.evaluation.tables import Table, note
from servegym.experiments.papers import study
from servegym.experiments.papers.placement.measuring import (
    ENV_ID,
    SEED,
    change,
    interval,
    measure,
    setting,
)
from servegym.experiments.papers.plotting import Lines
from servegym.experiments.papers.study import RESULTS, Study, command
from servegym.experiments.papers.verdicts import pick, split

__all__ = ["SCENARIOS", "STUDIES", "METHODS", "Method", "alone_s", "main"]

EPISODES, VALIDATION_EPISODES = 5, 2
LARGE_EPISODES = 3
VALIDATION_SEED = 50_000
LOADS = (1.0, 5.0, 10.0)
MORE_LOADS = (2.0, 3.0, 14.0, 20.0, 30.0)
ROUTERS = ("home", "fewest_requests", "least_load_per_gpu", "affinity")
SCENARIOS: dict[str, dict[str, Any]] = {
    "edge_hetero": {},
    "edge_decode": {},
    "paper_testbed": {},
    "paper_testbed_multi": {},
    "drift": {"epochs": 4},
    "drift, host": {"scenario": "drift", "migration_source": "host", "epochs": 4},
    "scale_64": {"epochs": 1},
}
"""Arguments of each: tasks of ``drift`` rotate every third epoch."""
EPOCHS, BUSY_EPOCHS = 2, 1
"""Epochs of 300 s with the scenario's arrivals, and with more of them."""
LARGE = "scale_64"
LARGE_EPOCH_S = 60.0
"""Seconds of an epoch with more arrivals at the 48 servers of `LARGE`."""


class Method(NamedTuple):
    """A method of serving.

    Attributes:
        name: What the table calls it.
        kind: ``placement``, ``caches`` or ``forwarding``.
        policy: A registered policy.
        env_kwargs: Arguments of the environment besides the router.
        loads: At which it is played.
    """

    name: str
    kind: str
    policy: str
    env_kwargs: Mapping[str, Any]
    loads: tuple[float, ...] = LOADS[:1]


def _caches(name: str, cache: str, loads: tuple[float, ...] = LOADS[:1], **host: float) -> Method:
    """Caches whose fetches cost no message: 12 GB/s alone are MoE-Infinity's published times."""
    kwargs = {
        "serving": "offload",
        "cache": cache,
        "cluster_kwargs": {"fetch_overhead_s": 0.0} | host,
    }
    return Method(f"caches, {name}", "caches", "keep", kwargs, loads)


_FORWARD = {"execution": "forward"}
METHODS = (
    *(Method(name, "placement", name, {}) for name in ("redundance", "eplb_global", "prism")),
    Method("proxy_optimum", "placement", "proxy_optimum", {}, LOADS),
    Method("whole_layer", "placement", "whole_layer", {}, LOADS),
    Method("latency_dp", "placement", "latency_dp", {}),
    Method("latency_local_search", "placement", "latency_local_search", {}),
    _caches("lru", "lru"),
    _caches("lfu", "lfu", LOADS),
    _caches("activation aware", "activation_aware"),
    _caches("lfu, host memory for half", "lfu", host_bytes=14.4e9),
    Method("forward", "forwarding", "forward", _FORWARD, LOADS),
    Method("forward, whole_layer", "forwarding", "whole_layer", _FORWARD, LOADS),
)
KINDS = tuple(dict.fromkeys(method.kind for method in METHODS))


class Options(study.Options):
    """The command line.

    Attributes:
        scenarios, methods: Names of those to measure.
        loads: Loads of ``methods``.
        resume: Whether rows that the table has already are not measured again.
    """

    scenarios: Sequence[str]
    methods: Sequence[str]
    loads: Sequence[float]
    resume: bool


def arguments(scenario: str, load: float, quick: bool = False) -> dict[str, Any]:
    """Arguments of the environment of a scenario with more arrivals."""
    kwargs: dict[str, Any] = {"scenario": scenario, "epochs": EPOCHS} | SCENARIOS[scenario]
    if quick:
        kwargs |= {"epochs": 2, "epoch_s": 60.0}
    elif load > 1:
        kwargs["epochs"] = BUSY_EPOCHS
        if scenario == LARGE:
            kwargs["epoch_s"] = LARGE_EPOCH_S
    gaps = build_problem(**kwargs).interarrival_s
    return kwargs | {"mean_interarrival_s": [float(gap) / load for gap in gaps]}


def alone_s(problem: Problem, episode: PlacementEpisode) -> float:
    """Mean latency of an episode's requests if each were alone with every expert at hand.

    A layer then takes the non-expert part and its slowest expert call, on the fastest server and
    GPU.

    Args:
        problem: The problem.
        episode: An episode that has begun.
    """
    c, prompts, requests = problem.cluster, problem.prompts, episode.requests
    base, token = c.expert_base_s.min(), c.expert_token_s.min()
    dense, dense_token = c.dense_base_s.min(), c.dense_token_s.min()
    most = prompts.counts.max(axis=2).sum(axis=1)  # tokens of the slowest calls, over the layers
    fixed = c.layers * (dense + base)
    first = fixed + c.layers * dense_token * prompts.tokens + token * most
    step = fixed + c.layers * (dense_token + token)
    return float(np.mean(first[requests.prompt] + (requests.outputs - 1) * step))


def _validation(method: Method, kwargs: Mapping[str, Any], episodes: int) -> dict[str, float]:
    """Mean latency on validation episodes by router."""
    return {
        router: float(
            np.mean(
                [
                    run["mean_latency_s"]
                    for run in evaluate(
                        ENV_ID,
                        [method.policy],
                        episodes,
                        VALIDATION_SEED,
                        {**kwargs, **method.env_kwargs, "router": router, "split": "train"},
                    )
                ]
            )
        )
        for router in ROUTERS
    }


COLUMNS = ("mean_latency_s", "p99_latency_s", "mean_ttft_s")
PLAIN = ("local_call_ratio", "remote_layer_ratio", "requests", "doubled_s", "overloaded")


def _row(
    scenario: str, load: float, method: Method, options: Options, router: str | None
) -> dict[str, Any]:
    """A method at a load: its router, by validation unless given, and its evaluation episodes."""
    kwargs = arguments(scenario, load, options.quick)
    episodes = min(options.episodes, LARGE_EPISODES) if scenario == LARGE else options.episodes
    by_router: dict[str, float] = {}
    if router is None:
        by_router = _validation(method, kwargs, VALIDATION_EPISODES)
        router = min(by_router, key=by_router.__getitem__)
    point = {"scenario": scenario, "load": load, "method": method.name, "kind": method.kind}
    point |= {"router": router, "episodes": episodes}
    (found,) = measure(
        point, [method.policy], episodes, **kwargs, **method.env_kwargs, router=router
    )
    row = dict(point)
    for key in COLUMNS:
        row |= {f"{key}{end}": found[f"{key}{end}"] for end in ("", "_low", "_high")}
    row |= {key: found[key] for key in PLAIN}
    row |= interval(_alone(kwargs, episodes), "bound_s")
    row |= {f"validation_s_{name}": value for name, value in by_router.items()}
    return row | {"episodes_s": " ".join(f"{x:.6g}" for x in found["_latency"])}


def _alone(kwargs: Mapping[str, Any], episodes: int) -> list[float]:
    problem = build_problem(**kwargs, split="eval")
    episode, found = PlacementEpisode(problem), []
    for seed in range(SEED, SEED + episodes):
        episode.begin(np.random.default_rng(seed))
        found.append(alone_s(problem, episode))
    return found


KEY = ("scenario", "load", "method")
TEXT = ("scenario", "method", "kind", "router", "episodes_s")


def _table(options: Options, stem: str) -> Table:
    path = options.out / f"{stem}.csv"
    return Table(path, KEY, text=TEXT, empty=math.nan, load=options.resume)


def _extend(
    table: Table,
    options: Options,
    scenario: str,
    load: float,
    method: Method,
    router: str | None = None,
) -> Mapping[str, Any]:
    """The row of a method at a load, added unless the table has it.

    A method that is overloaded at a lower load is not played: its row has no latency.
    """
    key = (scenario, load, method.name)
    if table.missing([key]):
        lower = [row for row in table.rows if (row["scenario"], row["method"]) == key[::2]]
        if any(row["overloaded"] and row["load"] < load for row in lower):
            point = {"scenario": scenario, "load": load, "method": method.name, "kind": method.kind}
            table.update([point | {"router": "-", "overloaded": 1.0}])
        else:
            table.update([_row(scenario, load, method, options, router)])
    return next(row for row in table.rows if table.key_of(row) == key)


def _methods(options: Options, *_: Any) -> list[dict[str, Any]]:
    """Every method at every load in every scenario."""
    table = _table(options, "serving_methods")
    for load in LOADS[:1] if options.quick else options.loads:
        for scenario in options.scenarios:
            for method in (
                method
                for method in METHODS
                if method.name in options.methods and load in method.loads
            ):
                if _possible(method, scenario, load):
                    _extend(table, options, scenario, load, method)
    return table.rows


def _possible(method: Method, scenario: str, load: float) -> bool:
    """Whether a method is there and differs from what it is in another scenario."""
    if scenario.startswith("drift") and load > 1:  # too short for the tasks to rotate
        return False
    return method.kind == "placement" or scenario != "drift, host"


def best(rows: Sequence[Mapping[str, Any]], kind: str) -> Mapping[str, Any] | None:
    """The row of a kind with the least latency on the validation episodes; None without any."""
    own = [row for row in rows if row["kind"] == kind and not math.isnan(_chosen_s(row))]
    return min(own, key=_chosen_s, default=None)


def _chosen_s(row: Mapping[str, Any]) -> float:
    """Latency on the validation episodes with the router chosen; NaN where it was not played."""
    return float(row.get(f"validation_s_{row['router']}", math.nan))


def latencies(row: Mapping[str, Any]) -> np.ndarray:
    """Mean latency of each evaluation episode."""
    return np.array([float(x) for x in str(row["episodes_s"]).split()])


def as_text(found: Interval) -> str:
    """A change as text: ``-20.0 % [-21.0, -19.0]``; of one episode without an interval."""
    if np.isnan(found.low):
        return f"{found.value:+.1f} % (one episode)"
    return f"{found.value:+.1f} % [{found.low:+.1f}, {found.high:+.1f}]"


def _seconds(row: Mapping[str, Any]) -> str:
    """A latency with its interval, or that the method is overloaded."""
    if row["overloaded"]:
        return "overloaded"
    low, high = (row[f"mean_latency_s_{end}"] for end in ("low", "high"))
    return f"{row['mean_latency_s']:.2f} s [{low:.2f}, {high:.2f}]"


def _findings(options: Options, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The best method of each kind at each point, forwarding against the others on its episodes."""
    notes = []
    for scenario, load in sorted({(row["scenario"], row["load"]) for row in rows}):
        own = pick(rows, scenario=scenario, load=load)
        winners = {kind: row for kind in KINDS if (row := best(own, kind)) is not None}
        if not winners:
            continue
        listed = [
            f"{row['method']} (router {row['router']}) {_seconds(row)}" for row in winners.values()
        ]
        text = f"{scenario}, {load:g} x the arrivals: {'; '.join(listed)}"
        data: dict[str, Any] = {"scenario": scenario, "load": load}
        data["best"] = {kind: row["method"] for kind, row in winners.items()}
        forward = winners.get("forwarding")
        for kind, row in winners.items():
            if forward is not None and kind != "forwarding":
                if not (row["overloaded"] or forward["overloaded"]):
                    found = change(latencies(forward), latencies(row))
                    text += f"; forwarding against {row['method']} {as_text(found)}"
                    data[f"forwarding_against_{kind}_pct"] = list(found)
        bound = next(row["bound_s"] for row in own if not math.isnan(row["bound_s"]))
        notes.append(note(f"{text}; a request alone {bound:.2f} s.", **data, bound_s=bound))
    known = {tuple(row[key] for key in KEY) for row in rows}
    wanted = [
        (scenario, load, method.name)
        for scenario in SCENARIOS
        for method in METHODS
        for load in method.loads
        if _possible(method, scenario, load)
    ]
    missing = [
        f"{method} in {scenario} at {load:g} x"
        for scenario, load, method in wanted
        if (scenario, load, method) not in known
    ]
    if missing:
        notes.append(note(f"Not played: {'; '.join(missing)}.", missing=missing))
    return notes


def _saturation(options: Options, *_: Any) -> list[dict[str, Any]]:
    """The best method of each kind, by validation at the normal load, until it is overloaded."""
    paths = [folder / "serving_methods.csv" for folder in (options.out, RESULTS / "placement")]
    found = next(path for path in paths if path.exists())
    known = Table(found, KEY, text=TEXT, empty=math.nan).rows
    table = _table(options, "saturation")
    best_methods = set()
    for scenario in options.scenarios:
        for kind in ("placement", "caches", "forwarding"):
            row = best(pick(known, scenario=scenario, load=1.0), kind)
            if row is None:
                continue
            best_methods.add((scenario, row["method"]))
            table.update(pick(known, scenario=scenario, method=row["method"]))
            method = next(method for method in METHODS if method.name == row["method"])
            for load in sorted({*MORE_LOADS, *LOADS}):
                if _extend(table, options, scenario, load, method, row["router"])["overloaded"]:
                    break
    return [
        row
        for row in table.rows
        if row["scenario"] not in options.scenarios
        or (row["scenario"], row["method"]) in best_methods
    ]


def _limits(options: Options, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Between which loads each method's queues begin to grow."""
    notes = []
    for at, own in split(rows, "scenario", "method"):
        scenario, method = at["scenario"], at["method"]
        grow = [row["load"] for row in own if row["overloaded"]]
        holds = [row["load"] for row in own if not row["overloaded"]]
        last, first = max(holds, default=0.0), min(grow, default=math.inf)
        text = f"{scenario}, {method}: holds {last:g} x the arrivals"
        text += "." if math.isinf(first) else f", is overloaded at {first:g} x."
        notes.append(note(text, scenario=scenario, method=method, holds=last, overloaded_at=first))
    missing = [name for name in SCENARIOS if name not in {row["scenario"] for row in rows}]
    if missing:
        notes.append(note(f"Not played: {', '.join(missing)}.", missing=missing))
    return notes


def _facts(options: Options) -> dict[str, Any]:
    facts = {name: setting(**arguments(name, 1.0)) for name in options.scenarios}
    return facts | {"runs": "several, resumed"} if options.resume else facts


STUDIES = (
    Study("serving_methods", "methods", _methods, notes=_findings, facts=_facts),
    Study(
        "saturation",
        "saturation",
        _saturation,
        notes=_limits,
        picture=Lines(
            x="load",
            y="mean_latency_s",
            line="method",
            panels="scenario",
            where=lambda row: not row["overloaded"],
            log="xy",
            reference="bound_s",
        ),
    ),
)


def _add(parser: argparse.ArgumentParser) -> None:
    add, names, every = parser.add_argument, [method.name for method in METHODS], list(SCENARIOS)
    add("--scenarios", nargs="+", choices=every, default=every, help="(all)")
    add("--loads", nargs="+", type=float, choices=LOADS, default=LOADS, help="of `methods` (all)")
    add("--methods", nargs="+", choices=names, default=names, help="(all)")
    add("--resume", action="store_true", help="measure only what is missing")


main = command(__spec__.name, __doc__, STUDIES, EPISODES, _add)

if __name__ == "__main__":
    run_main(main)
