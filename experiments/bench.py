"""Speed of every environment and both replay engines: the table ``bench``.

``OMP_NUM_THREADS=1 servegym bench``: processor time of one thread, so that other load matters less;
what is compared with a row's reference is timed in turn, and the median counts. Default arguments,
copied observations, actions drawn beforehand; new episodes are inside the time.
"""

from __future__ import annotations

import shlex
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.spaces import Discrete

import servegym
from servegym._checks import choose, whole
from servegym.envs.families import FAMILIES, family_of
from servegym.envs.llm_routing import replay
from servegym.envs.prefix_routing.replay import replay_prefix
from servegym.envs.prefix_routing.workloads import make_prefix_workload
from servegym.experiments.cli import command_parser
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.evaluation.tables import provenance, write_result

SYSTEMS, FEW = 64, 8
TURN_S = 0.2
"""Processor time of a timing, about."""
OUT = Path("experiments", "results", "bench")


def seconds(work: Callable[[], object]) -> float:
    """Processor time of a call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def interleave(timers: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Values of every timer, taken in turn so that drift hits all alike; a first turn compiles."""
    for timer in timers.values():
        timer()
    values: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(repeats):
        for name, timer in timers.items():
            values[name].append(timer())
    return values


def row(
    what: str, values: Sequence[float], reference: tuple[str, Sequence[float]]
) -> dict[str, Any]:
    """A row of what was measured (1/s): median, lowest and highest value, reference and ratio."""
    name, others = reference
    value, of_it = statistics.median(values), statistics.median(others)
    row = {"what": what, "value": value, "low": min(values), "high": max(values), "unit": "1/s"}
    return row | {"reference": name, "reference_value": of_it, "ratio": value / of_it}


def _actions(envs: Any, steps: int) -> list[Any]:
    """Uniform legal actions of the run with seed 0, which the timed one repeats."""
    rng = np.random.default_rng(0)
    space = envs.action_space
    space.seed(0)
    _, info = envs.reset(seed=0)
    single = getattr(envs, "single_action_space", space)
    actions = []
    for _ in range(steps):
        action = space.sample()
        if isinstance(single, Discrete) and "action_mask" in info:
            mask = info["action_mask"]
            action = (rng.random(mask.shape) * mask).argmax(-1)
        actions.append(action)
        _, _, terminated, truncated, info = envs.step(action)
        if space is single and (terminated or truncated):
            _, info = envs.reset()
    return actions


def _timer(envs: Any, turn_s: float) -> Callable[[], float]:
    """Measures steps a second, all systems counted; a turn takes about ``turn_s``."""
    alone = envs.action_space is getattr(envs, "single_action_space", envs.action_space)
    few = _actions(envs, 5)  # compiles

    def rate(actions: Sequence[Any]) -> float:
        envs.reset(seed=0)

        def play() -> None:
            for action in actions:
                _, _, terminated, truncated, _ = envs.step(action)
                if alone and (terminated or truncated):
                    envs.reset()

        return getattr(envs, "num_envs", 1) * len(actions) / seconds(play)

    steps = turn_s * rate(few) / getattr(envs, "num_envs", 1)
    actions = _actions(envs, int(np.clip(steps, 5, 20_000)))
    return lambda: rate(actions)


def environment(env_id: str, turn_s: float, repeats: int) -> list[dict[str, Any]]:
    """Rows: the native vector and the single environment beside their references."""
    native = gymnasium.VectorizeMode.VECTOR_ENTRY_POINT
    variants = {
        "native": gymnasium.make_vec(env_id, SYSTEMS, vectorization_mode=native),
        "sync": gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make(env_id)] * FEW),
        "cartpoles": CartPoleVectorEnv(SYSTEMS),
        "one": gymnasium.make(env_id),
        "cartpole": gymnasium.make("CartPole-v1"),
    }
    rates = interleave({name: _timer(envs, turn_s) for name, envs in variants.items()}, repeats)
    for envs in variants.values():
        envs.close()
    many, name = f"{SYSTEMS} of {env_id}, steps", env_id.split("/")[1]
    return [
        row(many, rates["native"], ("CartPoleVectorEnv, steps", rates["cartpoles"])),
        row(many, rates["native"], (f"SyncVectorEnv of {name}, steps", rates["sync"])),
        row(f"one {env_id}, steps", rates["one"], ("CartPole-v1, steps", rates["cartpole"])),
    ]


def replays(requests: int, repeats: int) -> list[dict[str, Any]]:
    """Rows: requests a second of both replay engines, time inside the call.

    ``replay``: Poisson arrivals at 4/s on one replica, log-normal prompts (mean 511) and outputs
    (mean 124 tokens), cut at the profile's 2,048. ``replay_prefix``: Mooncake's conversations at
    the recorded rate in blocks of 512 tokens on eight replicas in turn.
    """
    rng = np.random.default_rng(0)

    def tokens(mean: float, sigma: float) -> Any:
        draw = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, requests)
        return np.clip(np.rint(draw), 1, 2048).astype(np.int64)

    inputs = np.cumsum(rng.exponential(0.25, requests)), tokens(511, 1.0), tokens(124, 0.8)
    workload = make_prefix_workload("mooncake")
    drawn = workload.draw(np.random.default_rng(0), requests, 3.4, 512, dispatch="trace")
    numbers = rng.random(1_000_000)
    works: dict[str, tuple[int, Callable[[], object]]] = {
        "replay, chunked prefill": (requests, lambda: replay(*inputs)),
        "replay, orca": (requests, lambda: replay(*inputs, scheduler="orca")),
        "replay_prefix, Mooncake": (
            requests,
            lambda: replay_prefix("h100-llama-3.1-8b", drawn, num_replicas=8, kv_tokens=450_000),
        ),
        "sort": (len(numbers), lambda: np.sort(numbers)),
    }
    timers = {k: lambda n=n, work=work: n / seconds(work) for k, (n, work) in works.items()}
    with warnings.catch_warnings():
        # Contexts of up to 127,000 tokens: the law's last slopes go on, which is all the same here.
        warnings.filterwarnings("ignore", message=".*outside its domain.*")
        rates = interleave(timers, repeats)
    sort = "sorting random numbers, numbers", rates.pop("sort")
    return [row(f"{name}, requests", x, sort) for name, x in rates.items()]


def short(value: float | str) -> str:
    """A cell of a table."""
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def main(argv: Sequence[str]) -> int:
    """Run the benchmark, print it and write the table; see ``servegym bench --help``."""
    parser = command_parser("bench")
    groups = [family.group for family in FAMILIES]
    parser.add_argument("family", nargs="*", help=f"{', '.join(groups)} (all)")
    parser.add_argument("--out", type=Path, default=OUT, help=f"the table, a path ({OUT})")
    parser.add_argument("--quick", action="store_true", help="a smoke run, numbers not to quote")
    parser.add_argument("--repeats", type=int, default=7, help="timings of each number (7)")
    options = parser.parse_args(argv)
    repeats = whole("repeats", options.repeats, 1)
    chosen = [choose("family", name, groups) for name in options.family] or groups
    turn_s = TURN_S / 20 if options.quick else TURN_S
    rows: list[dict[str, Any]] = []
    for env_id in servegym.ENV_IDS:
        if family_of(env_id).group in chosen:
            rows += environment(env_id, turn_s, repeats)
    if not options.family:
        rows += replays(500 if options.quick else 10_000, repeats)
    keys = ("what", "value", "unit", "reference", "reference_value", "ratio")
    heads = ["what", "value", "unit", "reference", "of the reference", "ratio"]
    cells = [[short(one[key]) for key in keys] for one in rows]
    print_table("Medians of one thread's processor time", heads, cells)
    command = shlex.join([*parser.prog.split(), *argv])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_result(options.out, rows, provenance(command, options.quick))
    print(f"{options.out}.csv, .json")
    return 0
