"""Speed of the serverless MoE environment beside CartPole's vector environment, in one run.

Seconds are processor time of the one thread that runs everything, so that other load on the
machine matters less; the two environments are timed in turn::

    python -m servegym.experiments.bench_serverless --out runs/bench_serverless.json

Actions are drawn beforehand, uniformly; observations are copied out and episodes begin anew inside
the timed part.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Sequence
from typing import Any

__all__ = ["bench", "main"]

ENV_ID = "servegym/ServerlessMoE-v0"


def _seconds(envs: Any, actions: Any) -> float:
    """Processor seconds of stepping through all actions."""
    envs.reset(seed=0)
    start = time.thread_time()
    for action in actions:
        envs.step(action)
    return time.thread_time() - start


def bench(num_envs: int, steps: int, repeats: int, model: str) -> dict[str, Any]:
    """Requests per second of both granularities, and CartPole's steps.

    Args:
        num_envs: systems stepped together.
        steps: steps of one timing.
        repeats: timings of each, taken in turn; medians are reported.
        model: the MoE model.

    Returns:
        Numbers by name; speeds are per second of processor time.
    """
    import gymnasium
    import numpy as np
    from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

    import servegym  # noqa: F401

    rng = np.random.default_rng(0)
    runs: dict[str, tuple[Any, Any]] = {}
    for granularity in ("global", "per_layer"):
        envs = gymnasium.make_vec(
            ENV_ID,
            num_envs=num_envs,
            vectorization_mode="vector_entry_point",
            model=model,
            granularity=granularity,
        )
        nvec = envs.unwrapped.problem.nvec  # pyright: ignore[reportAttributeAccessIssue]
        actions = (rng.random((steps, num_envs, len(nvec))) * nvec).astype(np.int64)
        runs[granularity] = envs, actions
        if granularity == "global":
            runs["global, nothing remote"] = envs, np.zeros_like(actions)
    cart = CartPoleVectorEnv(num_envs=num_envs)
    runs["CartPole"] = cart, rng.integers(0, 2, (steps, num_envs))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for envs, actions in runs.values():
        _seconds(envs, actions[:2])  # compile
    for _ in range(repeats):
        for name, (envs, actions) in runs.items():
            times[name].append(_seconds(envs, actions))
    for name in ("global", "per_layer", "CartPole"):
        runs[name][0].close()
    speeds = {name: num_envs * steps / statistics.median(x) for name, x in times.items()}
    return {
        "model": model,
        "num_envs": num_envs,
        "steps": steps,
        "repeats": repeats,
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "requests_per_s": speeds,
        "ratio_to_cartpole": {name: x / speeds["CartPole"] for name, x in speeds.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print it."""
    from servegym.experiments.output import print_table

    parser = argparse.ArgumentParser(
        prog="bench_serverless", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default="deepseek-v2-lite")
    parser.add_argument("--out", help="also write the numbers to this JSON file")
    args = parser.parse_args(arguments)
    result = bench(args.num_envs, args.steps, args.repeats, args.model)
    rows = [
        [name, f"{speed:.0f}", f"{result['ratio_to_cartpole'][name]:.4f}"]
        for name, speed in result["requests_per_s"].items()
    ]
    title = f"{args.model}, {args.num_envs} systems"
    print_table(title, ["environment", "steps/s per core", "over CartPole"], rows)
    if args.out:
        from servegym.envs.workloads._util import write_json

        write_json(args.out, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
