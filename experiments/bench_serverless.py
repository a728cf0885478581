"""Speed of the serverless MoE family, with the yardsticks of the same run.

    OMP_NUM_THREADS=1 python -m servegym.experiments.bench_serverless

It writes ``bench.csv`` and ``bench.txt``: requests per second of the vector environments beside
Gymnasium's CartPole, the time of a decision of Remoe's readings, and the tree search of similar
prompts beside a brute force on the same pooled vectors. Seconds are processor time of one thread,
so that other load on the machine matters less, and what is compared is timed in turn.

Environments: uniform actions drawn beforehand, observations copied out, episodes beginning anew
inside the timed part; 200 output tokens. Decisions: requests of the eval split, everything that is
cached for a prediction dropped before each.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from servegym.experiments import figure_run
from servegym.experiments.output import print_table

__all__ = ["GOALS", "decisions", "environments", "main", "searches"]

ENV_ID = "servegym/ServerlessMoE-v0"
OUTPUTS = 200
PROMPTS = 5_000
POLICIES = ("remoe", "remoe_cost", "remoe_sticky")
WARM_UP = 8
GOALS: dict[str, tuple[str, float]] = {
    "requests, global": (">=", 20_000.0),
    "requests, per_layer": (">=", 5_000.0),
    **{f"decision, {name}, p{q}": ("<", 50.0) for name in POLICIES for q in (50, 99)},
    "decision and prediction, slowest p99": ("<", 50.0),
    "search, over brute force": (">=", 10.0),
    "search, batch over brute force": (">=", 10.0),
    "tree build": ("<=", 0.5),
}
"""What each figure should reach; those that are not here are yardsticks."""


class Options(figure_run.FigureOptions):
    """The command line.

    Attributes:
        model: The MoE model.
    """

    model: str


def _row(what: str, value: float, unit: str, low: float, high: float, **about: Any) -> dict:
    """A row: the value, its spread over the repeats, and whether it meets its goal."""
    sign, goal = GOALS.get(what, ("", float("nan")))
    met = {">=": value >= goal, "<=": value <= goal, "<": value < goal}.get(sign, "")
    return {"what": what, "value": value, "low": low, "high": high, "unit": unit,
            "goal": f"{sign} {goal:g}" if sign else "", "met": met,
            "about": " ".join(f"{k}={v}" for k, v in about.items())}  # fmt: skip


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def environments(
    model: str = "deepseek-v2-lite", num_envs: int = 64, steps: int = 200, repeats: int = 7
) -> list[dict[str, Any]]:
    """Requests per second of both granularities and views, and CartPole's steps.

    Args:
        model: the MoE model.
        num_envs: systems stepped together.
        steps: steps of one timing.
        repeats: timings of each, taken in turn; the median counts, lowest and highest are shown.

    Returns:
        Rows of the table.
    """
    import gymnasium
    import numpy as np
    from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

    import servegym  # noqa: F401

    rng = np.random.default_rng(0)
    runs: dict[str, tuple[Any, Any]] = {}
    for name, env_id, granularity in (
        ("requests, global", ENV_ID, "global"),
        ("requests, per_layer", ENV_ID, "per_layer"),
        ("requests, global, flat view", ENV_ID.replace("MoE", "MoEFlat"), "global"),
    ):
        envs = gymnasium.make_vec(
            env_id,
            num_envs=num_envs,
            vectorization_mode="vector_entry_point",
            model=model,
            granularity=granularity,
            output_tokens=OUTPUTS,
        )
        nvec = envs.unwrapped.problem.nvec  # pyright: ignore[reportAttributeAccessIssue]
        runs[name] = envs, (rng.random((steps, num_envs, len(nvec))) * nvec).astype(np.int64)
    envs, actions = runs["requests, global"]
    runs["requests, global, nothing remote"] = envs, np.zeros_like(actions)
    cart = CartPoleVectorEnv(num_envs=num_envs)
    runs["steps of CartPole"] = cart, rng.integers(0, 2, (steps, num_envs))
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(-1, repeats):  # the first one compiles
        for name, (envs, actions) in runs.items():
            envs.reset(seed=0)

            def play(envs: Any = envs, actions: Any = actions) -> None:
                for action in actions:
                    envs.step(action)

            taken = _seconds(play)
            if repeat >= 0:
                speeds[name].append(num_envs * steps / taken)
    for envs in {id(envs): envs for envs, _ in runs.values()}.values():
        envs.close()
    about = {"model": model, "systems": num_envs, "outputs": OUTPUTS, "repeats": repeats}
    return [
        _row(name, statistics.median(x), "1/s", min(x), max(x), **about)
        for name, x in speeds.items()
    ]


def decisions(model: str = "deepseek-v2-lite", requests: int = 200) -> list[dict[str, Any]]:
    """Milliseconds of a decision of each of Remoe's readings, and of a prediction before it.

    Args:
        model: the MoE model.
        requests: requests decided by each, in turn; one episode of the eval split.

    Returns:
        Rows of the table.
    """
    import gymnasium
    import numpy as np

    import servegym  # noqa: F401
    from servegym.baselines.registry import make_policy
    from servegym.baselines.serverless import ServerlessSystem
    from servegym.baselines.serverless.prediction import LARGE_DATA, make_predictor

    envs = gymnasium.make_vec(
        ENV_ID,
        num_envs=1,
        vectorization_mode="vector_entry_point",
        model=model,
        split="eval",
        episode_requests=requests + WARM_UP,
    ).unwrapped
    system = ServerlessSystem.from_env(envs)
    rows, slowest = [], 0.0
    for name in POLICIES:
        policy: Any = make_policy(name, system, family="serverless_moe")
        observation, info = envs.reset(seed=0)
        policy.reset(1, seed=0)
        taken = []
        for _ in range(requests + WARM_UP):
            policy.table.forget()
            start = time.process_time()
            action = policy.act(observation, info["action_mask"])
            taken.append(1e3 * (time.process_time() - start))
            observation, _, _, _, info = envs.step(action)
        times = np.array(taken[WARM_UP:])
        slowest = max(slowest, float(np.quantile(times, 0.99)))
        for q in (50, 99):
            value = float(np.quantile(times, q / 100))
            rows.append(
                _row(
                    f"decision, {name}, p{q}",
                    value,
                    "ms",
                    float(times.min()),
                    float(times.max()),
                    model=model,
                    requests=requests,
                )
            )
    envs.close()
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(PROMPTS, 384))
    shape = (system.model.moe_layers, system.model.num_experts)
    shares = rng.dirichlet(np.ones(shape[1]), (PROMPTS, shape[0])).astype(np.float32)
    predictor = make_predictor("sps", **LARGE_DATA).fit(vectors, shares)
    times = []
    for row in range(100 + WARM_UP):
        times.append(1e3 * _seconds(lambda row=row: predictor.predict(vectors[row : row + 1])))
    times = np.array(times[WARM_UP:])
    p99 = float(np.quantile(times, 0.99))
    low, high = float(times.min()), float(times.max())
    rows.append(_row("prediction, sps, p99", p99, "ms", low, high, prompts=PROMPTS, **LARGE_DATA))
    total = slowest + p99
    what = "decision and prediction, slowest p99"
    rows.append(_row(what, total, "ms", total, total, model=model))
    yardstick = rng.random(1_000_000)
    sorts = [1e3 * _seconds(lambda: np.sort(yardstick)) for _ in range(9)]
    what = "sorting a million numbers"
    rows.append(_row(what, statistics.median(sorts), "ms", min(sorts), max(sorts)))
    return rows


def searches(prompts: int = PROMPTS, repeats: int = 9) -> list[dict[str, Any]]:
    """The tree of similar prompts beside a brute force on the same pooled vectors.

    Args:
        prompts: Historical prompts, resampled with noise from those of GPT-OSS-20B.
        repeats: Runs of which the fastest counts, in turns.

    Returns:
        Rows of the table, for the paper's setting at so many prompts.
    """
    from servegym.envs.workloads.activations import load_activations
    from servegym.experiments.serverless_prediction import times

    embeddings = load_activations("gpt-oss-20b").embeddings["token"]
    found = times(embeddings, prompts, repeats, pam=False)[-1]
    about = {name: found[name] for name in ("prompts", "alpha", "beta", "fork", "recall")}
    return [
        _row(what, found[key], unit, found[key], found[key], **about)
        for what, key, unit in (
            ("search, over brute force", "speedup_one", "x"),
            ("search, batch over brute force", "speedup_batch", "x"),
            ("search of one prompt, tree", "sps_one_us", "us"),
            ("search of one prompt, brute force", "bf_one_us", "us"),
            ("tree build", "build_s", "s"),
        )
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, print it and write ``bench.csv`` and ``bench.txt``.

    Args:
        argv: The command line; ``sys.argv`` by default.

    Returns:
        0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m servegym.experiments.bench_serverless",
        description=(__doc__ or "").partition("\n")[0],
    )
    out = Path("experiments", "results", "serverless")
    parser.add_argument("--out", type=Path, default=out, help=f"folder of the results ({out})")
    parser.add_argument("--quick", action="store_true", help="a smoke run, figures not to quote")
    parser.add_argument("--model", default="deepseek-v2-lite", help="the MoE model")
    parser.set_defaults(default_episodes=1, episodes=1)
    options = figure_run.command_line(parser, argv, Options())
    if options.quick:
        rows = environments(options.model, 8, 10, 2)
        rows += decisions(options.model, 5)
        rows += searches(1_000, 2)
    else:
        rows = environments(options.model)
        rows += decisions(options.model)
        rows += searches()
    print_table(
        "Speed of the serverless MoE family, one core",
        ["what", "value", "lowest", "highest", "unit", "goal", "met"],
        [
            [r["what"], *(f"{r[k]:.4g}" for k in ("value", "low", "high")), r["unit"], r["goal"],
             {True: "yes", False: "NO"}.get(r["met"], "")]
            for r in rows
        ],
    )  # fmt: skip
    cart = next(r["value"] for r in rows if r["what"] == "steps of CartPole")
    ratio = next(r["value"] for r in rows if r["what"] == "requests, global") / cart
    missed = [f"{r['what']}: {r['value']:.3g} {r['unit']}" for r in rows if r["met"] is False]
    notes = [f"missed: {'; '.join(missed)}"] if missed else ["every goal is met"]
    notes.append(f"a request of all layers costs as much as {1 / ratio:.0f} steps of CartPole")
    figure_run.save(options, "bench", rows, None, *notes)
    return 0


if __name__ == "__main__":
    from servegym.hardware_profiles.script import run

    run(main)
