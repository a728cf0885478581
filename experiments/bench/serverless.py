"""Speed of the serverless MoE family, with the yardsticks of the same run.

    OMP_NUM_THREADS=1 servegym bench serverless

It writes the table ``bench``: requests per second of the vector environments against
Gymnasium's CartPole, and the time of a decision of Remoe's readings. Seconds are processor time of
one thread, so that other load on the machine matters less, and what is compared is timed in turn.

Environments: uniform actions drawn beforehand, or the same one always; observations copied out,
episodes beginning anew inside the timed part; 200 output tokens. Decisions: requests of the eval
split, everything that is cached for a prediction dropped before each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from servegym.experiments.bench.timing import bench_options, interleave, report, row, seconds

__all__ = ["decisions", "environments", "main"]

ENV_ID = "servegym/ServerlessMoE-v0"
OUTPUTS = 200
PROMPTS = 5_000
POLICIES = ("remoe", "remoe_cost", "remoe_sticky")
WARM_UP = 8


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
    # Plans are remembered by prediction, prompt tokens and action: the same action is soon known.
    runs["requests, global, the same action"] = envs, 0 * actions + nvec // 2
    cart = CartPoleVectorEnv(num_envs=num_envs)
    runs["cartpole"] = cart, rng.integers(0, 2, (steps, num_envs))

    def timer(envs: Any, actions: Any) -> float:
        envs.reset(seed=0)

        def play() -> None:
            for action in actions:
                envs.step(action)

        return num_envs * steps / seconds(play)

    speeds = interleave({name: lambda run=run: timer(*run) for name, run in runs.items()}, repeats)
    for envs in {id(envs): envs for envs, _ in runs.values()}.values():
        envs.close()
    about: dict[str, Any] = {
        "model": model,
        "systems": num_envs,
        "outputs": OUTPUTS,
        "repeats": repeats,
    }
    yardstick = "steps of CartPoleVectorEnv", speeds.pop("cartpole")
    return [row(name, x, "1/s", yardstick, **about) for name, x in speeds.items()]


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
    from servegym.baselines.serverless_moe import ServerlessSystem
    from servegym.baselines.serverless_moe.prediction import LARGE_DATA, make_predictor

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
    rng = np.random.default_rng(0)
    numbers = rng.random(1_000_000)
    sorts = [1e3 * seconds(lambda: np.sort(numbers)) for _ in range(9)]
    yardstick = "sorting a million numbers", sorts
    for name in POLICIES:
        policy: Any = make_policy(name, system, family="serverless_moe")
        observation, info = envs.reset(seed=0)
        policy.reset(1, seed=0)
        taken = []
        for _ in range(requests + WARM_UP):
            policy.table.clear_cache()
            start = time.process_time()
            action = policy.act(observation, info["action_mask"])
            taken.append(1e3 * (time.process_time() - start))
            observation, _, _, _, info = envs.step(action)
        times = np.array(taken[WARM_UP:])
        slowest = max(slowest, float(np.quantile(times, 0.99)))
        for q in (50, 99):
            what, value = f"decision, {name}, p{q}", float(np.quantile(times, q / 100))
            about: dict[str, Any] = {"model": model, "requests": requests}
            rows.append(row(what, [value], "ms", yardstick, **about))
    envs.close()
    vectors = rng.normal(size=(PROMPTS, 384))
    shape = (system.model.moe_layers, system.model.num_experts)
    shares = rng.dirichlet(np.ones(shape[1]), (PROMPTS, shape[0])).astype(np.float32)
    predictor = make_predictor("sps", **LARGE_DATA).fit(vectors, shares)
    taken = []
    for k in range(100 + WARM_UP):
        taken.append(1e3 * seconds(lambda k=k: predictor.predict(vectors[k : k + 1])))
    p99 = float(np.quantile(taken[WARM_UP:], 0.99))
    about: dict[str, Any] = {"prompts": PROMPTS, **LARGE_DATA}
    rows.append(row("prediction, sps, p99", [p99], "ms", yardstick, **about))
    what = "decision and prediction, slowest p99"
    rows.append(row(what, [slowest + p99], "ms", yardstick, model=model))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, print it and write the table ``bench``.

    Args:
        argv: The command line; ``sys.argv`` by default.

    Returns:
        0.
    """

    def model(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model", default="deepseek-v2-lite", help="the MoE model")

    options = bench_options("serverless", __doc__, argv, model)
    if options.quick:
        rows = environments(options.model, 8, 10, 2)
        rows += decisions(options.model, 5)
    else:
        rows = environments(options.model, repeats=options.repeats)
        rows += decisions(options.model)
    ratio = next(r["ratio"] for r in rows if r["what"] == "requests, global")
    note = f"A request of all layers costs as much as {1 / ratio:.0f} steps of CartPole."
    report(options, rows, note)
    return 0


if __name__ == "__main__":
    from servegym._command_line import run_main

    run_main(main)
