"""What old metrics, an index that lags, and the weights of the scorers do to published rules.

``staleness`` varies the time between two scrapes of the replicas' metrics, ``index_delay`` the age
at which cache events reach the index, ``weights`` the scorers' weights of prefix and queue::

    python -m servegym.experiments.studies.prefix.signals

Rules that read the gateway's own accounting (``least_load``, ``lmetric``) are the control of the
first: nothing that they read is scraped. All rules play the same episodes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from servegym.baselines.prefix_routing import RULES, Rule
from servegym.baselines.prefix_routing.llm_d import LlmdScorers
from servegym.baselines.prefix_routing.policy import RulePolicy
from servegym.baselines.prefix_routing.system import PrefixSystem
from servegym.envs.prefix_routing.vector_env import PrefixRoutingVectorEnv
from servegym.experiments.figures.run import (
    FigureOptions,
    command_line,
    figure_parser,
    run_chosen,
    save,
)
from servegym.experiments.stats import student_interval
from servegym.experiments.tables import Note, note

__all__ = ["PICTURES", "main", "play"]

SEEDS = 10
FIRST_SEED = 40_000
CELLS = (("hot-tenant", 60.0), ("hot-tenant", 72.0), ("mixed-cards", 40.0))
"""Scenario and requests/s."""
SCRAPES_S = (0.0, 0.05, 0.2, 1.0, 5.0)
DELAYS_S = (0.0, 0.1, 1.0, 5.0, 20.0)
READERS = ("llm_d", "load", "vllm_dp", "least_load", "lmetric")
QUEUE_WEIGHTS = (1.0, 2.0, 3.0, 4.0, 8.0)
PREFIX_WEIGHT = 4.0
LOADS = (*CELLS, ("mixed-cards", 46.0))


def play(make: Callable[[], Rule], seeds: int, **arguments: Any) -> list[dict[str, float]]:
    """Key figures of an episode of each seed under a rule.

    Args:
        make: Makes the rule.
        seeds: Number of episodes.
        **arguments: Of the environment.
    """
    envs = PrefixRoutingVectorEnv(
        num_envs=seeds, autoreset_mode="Disabled", copy=False, **arguments
    )
    policy = RulePolicy(PrefixSystem.from_env(envs), make, "rule")
    policy.reset(seeds, FIRST_SEED)
    observation, info = envs.reset(seed=FIRST_SEED)
    policy.episode_start(np.ones(seeds, dtype=np.bool_))
    ended = False
    while not ended:
        actions = policy.act(observation, info["action_mask"])
        observation, _, terminated, _, info = envs.step(actions)
        ended = bool(terminated.all())
    found = [envs.batch.kpis(row) for row in range(seeds)]
    envs.close()
    return found


def _rule(name: str) -> Callable[[], Rule]:
    """A rule by its name; ``load`` is llm-d's scorers without the prefix."""
    if name == "load":
        return lambda: LlmdScorers(queue=1.0, kv=1.0, prefix=0.0)
    return RULES[name][0]


def _row(found: Sequence[dict[str, float]], first: Sequence[dict[str, float]]) -> dict[str, float]:
    """Attainment with its interval and its paired change from ``first``, percent, and the rest.

    ``p99_ratio`` is the geometric mean over episodes of the ratio of TTFT at 99 % to ``first``'s.
    """
    share = 100 * np.array([one["attainment"] for one in found])
    change = share - 100 * np.array([one["attainment"] for one in first])
    values = [*student_interval(share), *student_interval(change)]
    names = ("attainment", "low", "high", "change", "change_low", "change_high")
    tails = [np.array([one["p99_ttft_s"] for one in part]) for part in (found, first)]
    ratio = np.exp(np.array(student_interval(np.log(tails[0] / tails[1]))))
    rest = {
        name: float(np.mean([one[name] for one in found]))
        for name in ("p99_ttft_s", "hit_rate", "false_match_rate")
    }
    both = dict(zip(names, values, strict=True)) | rest
    both |= dict(zip(("p99_ratio", "p99_low", "p99_high"), ratio.tolist(), strict=True))
    return {name: float(f"{value:.4g}") for name, value in both.items()}


def _interval(row: dict[str, Any]) -> str:
    return f"{row['change']:+.1f} [{row['change_low']:+.1f}, {row['change_high']:+.1f}]"


def staleness(options: FigureOptions) -> None:
    """``signals_staleness``: attainment by the time between scrapes."""
    rows: list[dict[str, Any]] = []
    notes: list[Note] = []
    for cell, rate in CELLS:
        for name in READERS:
            first: list[dict[str, float]] = []
            for scrape in SCRAPES_S:
                found = play(
                    _rule(name), options.episodes, scenario=cell, rate=rate, scrape_s=scrape
                )
                first = first or found
                about = {"cell": cell, "rate": rate, "rule": name, "scrape_s": scrape}
                rows.append(about | _row(found, first))
        last = [r for r in rows[-len(READERS) * len(SCRAPES_S) :] if r["scrape_s"] == SCRAPES_S[-1]]
        text = ", ".join(
            f"{r['rule']} {_interval(r)}, TTFT at 99 % {r['p99_ratio']:.2f} times "
            f"[{r['p99_low']:.2f}, {r['p99_high']:.2f}]"
            for r in last
        )
        notes.append(
            note(
                f"{cell} at {rate:g} requests/s: attainment with metrics scraped every "
                f"{SCRAPES_S[-1]:g} s against live ones, points: {text}."
            )
        )
    save(options, "signals_staleness", rows, *notes, settings={"seeds": options.episodes})


def index_delay(options: FigureOptions) -> None:
    """``signals_index``: attainment of llm-d's scorers by the delay of cache events."""
    rows: list[dict[str, Any]] = []
    notes: list[Note] = []
    for cell, rate in CELLS:
        first: list[dict[str, float]] = []
        settings = [("precise", {"index_delay_s": delay}) for delay in DELAYS_S]
        for index, keywords in [*settings, ("approximate", {}), ("none", {})]:
            found = play(
                _rule("llm_d"),
                options.episodes,
                scenario=cell,
                rate=rate,
                index=index,
                index_kwargs=keywords,
            )
            first = first or found
            delay = keywords.get("index_delay_s", "")
            about = {"cell": cell, "rate": rate, "index": index, "delay_s": delay}
            rows.append(about | _row(found, first))
        own = rows[-len(DELAYS_S) - 1 :]
        text = ", ".join(f"{r['index']} {r['delay_s']} {_interval(r)}" for r in own)
        notes.append(
            note(
                f"{cell} at {rate:g} requests/s: attainment of llm_d against a precise index "
                f"without delay, points: {text}."
            )
        )
    save(options, "signals_index", rows, *notes, settings={"seeds": options.episodes})


def weights(options: FigureOptions) -> None:
    """``signals_weights``: attainment by the weight of the queue, prefix 4 and no KV scorer."""
    rows: list[dict[str, Any]] = []
    notes: list[Note] = []
    for cell, rate in LOADS:
        first: list[dict[str, float]] = []
        for queue in QUEUE_WEIGHTS:
            found = play(
                lambda queue=queue: LlmdScorers(queue=queue, kv=0.0, prefix=PREFIX_WEIGHT),
                options.episodes,
                scenario=cell,
                rate=rate,
            )
            first = first or found
            rows.append({"cell": cell, "rate": rate, "queue": queue, **_row(found, first)})
        text = ", ".join(
            f"{PREFIX_WEIGHT:g}:{r['queue']:g} {r['attainment']:.1f} % and {r['p99_ttft_s']:.2g} s"
            for r in rows[-len(QUEUE_WEIGHTS) :]
        )
        notes.append(note(f"{cell} at {rate:g} requests/s, attainment and TTFT at 99 %: {text}."))
    save(options, "signals_weights", rows, *notes, settings={"seeds": options.episodes})


FIGURES = {"staleness": staleness, "index_delay": index_delay, "weights": weights}
PICTURES = {}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; see the module's docstring."""
    module = "servegym.experiments.studies.prefix.signals"
    parser = figure_parser(list(FIGURES), __doc__, module, SEEDS)
    return run_chosen(FIGURES, PICTURES, command_line(parser, argv, FigureOptions()))


if __name__ == "__main__":
    sys.exit(main())
