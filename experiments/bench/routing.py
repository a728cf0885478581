"""Speed and memory of the routing environments, with the yardsticks of the same run.

::

    OMP_NUM_THREADS=1 servegym bench routing

It writes the table ``bench``: the vector and the single environment against those of
Gymnasium's CartPole, the replay engine, import time and memory. All timings are of one thread,
default arguments, full observations that are copied out, and actions drawn beforehand.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from servegym.experiments.bench.timing import bench_options, interleave, report, row, seconds

__all__ = ["main"]

ENV_ID = "servegym/LLMRouting-v1"

_IMPORT = """
import time
start = time.perf_counter()
import gymnasium
middle = time.perf_counter()
import servegym
print(middle - start, time.perf_counter() - middle)
"""

_MEMORY = """
import gymnasium, servegym, numpy as np, sys, os
def rss():
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
def make(n):
    envs = gymnasium.make_vec(
        "servegym/LLMRouting-v1", num_envs=n, vectorization_mode="vector_entry_point")
    envs.reset(seed=0)
    for k in range(50):
        envs.step(np.full(n, 1 + k % 6))
    return envs
one = make(1)  # code, tables and caches that any number of environments shares
before = rss()
many = make(int(sys.argv[1]))
print(before, rss())
"""


def _legal_actions(envs: Any, steps: int, seed: int) -> Any:
    """Uniform legal actions (steps, B): drawn on the run that the timed one repeats."""
    import numpy as np

    rng = np.random.default_rng(seed)
    _, info = envs.reset(seed=seed)
    actions = np.empty((steps, envs.num_envs), np.int64)
    for k in range(steps):
        mask = info["action_mask"]
        actions[k] = (rng.random(mask.shape) * mask).argmax(-1)
        info = envs.step(actions[k])[-1]
    return actions


def _vector_rate(envs: Any, actions: Any) -> float:
    """Steps a second, all systems of the batch counted."""
    envs.reset(seed=0)

    def play() -> None:
        for action in actions:
            envs.step(action)

    return envs.num_envs * len(actions) / seconds(play)


def _single_rate(env: Any, actions: Sequence[int]) -> float:
    """Steps a second, resets included."""
    env.reset(seed=0)

    def play() -> None:
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()

    return len(actions) / seconds(play)


def bench_vector(num_envs: int, steps: int, repeats: int) -> list[dict[str, Any]]:
    """The native vector environment against CartPole's and against SyncVectorEnv."""
    import gymnasium
    import numpy as np
    from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

    import servegym  # noqa: F401

    ours = gymnasium.make_vec(
        ENV_ID, num_envs=num_envs, vectorization_mode=gymnasium.VectorizeMode.VECTOR_ENTRY_POINT
    )
    cartpole = CartPoleVectorEnv(num_envs=num_envs)
    few = 8
    sync = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make(ENV_ID) for _ in range(few)])
    actions = _legal_actions(ours, steps, seed=0)
    sync_actions = _legal_actions(sync, max(1, steps // 10), seed=0)
    cart_actions = np.random.default_rng(0).integers(0, 2, (steps, num_envs))
    rates = interleave(
        {
            "native": lambda: _vector_rate(ours, actions),
            "cartpole": lambda: _vector_rate(cartpole, cart_actions),
            "sync": lambda: _vector_rate(sync, sync_actions),
        },
        repeats,
    )
    for envs in (ours, cartpole, sync):
        envs.close()
    what, native = "64 environments, steps", rates["native"]
    cart = "CartPoleVectorEnv, steps", rates["cartpole"]
    same = "SyncVectorEnv of the same id, steps", rates["sync"]
    about: dict[str, Any] = {"systems": num_envs, "steps": steps, "repeats": repeats}
    return [
        row(what, native, "1/s", cart, **about),
        row(what, native, "1/s", same, **about),
    ]


def bench_single(steps: int, repeats: int) -> list[dict[str, Any]]:
    """``gymnasium.make`` of ours against CartPole-v1, both with Gymnasium's default wrappers."""
    import gymnasium
    import numpy as np

    import servegym  # noqa: F401

    ours, cartpole = gymnasium.make(ENV_ID), gymnasium.make("CartPole-v1")
    rng = np.random.default_rng(0)
    actions: list[int] = []
    _, info = ours.reset(seed=0)
    for _ in range(steps):
        actions.append(int((rng.random(len(info["action_mask"])) * info["action_mask"]).argmax()))
        _, _, terminated, truncated, info = ours.step(actions[-1])
        if terminated or truncated:
            _, info = ours.reset()
    cart_actions = rng.integers(0, 2, steps).tolist()
    rates = interleave(
        {
            "ours": lambda: _single_rate(ours, actions),
            "cartpole": lambda: _single_rate(cartpole, cart_actions),
        },
        repeats,
    )
    what = "one environment, steps"
    cart = "CartPole-v1, steps", rates["cartpole"]
    return [row(what, rates["ours"], "1/s", cart, steps=steps, repeats=repeats)]


def bench_replay(requests: int, rate: float, repeats: int) -> list[dict[str, Any]]:
    """Requests a second of the replay engine, time inside the call.

    Poisson arrivals on one replica; prompts log-normal with mean 511, outputs log-normal with
    mean 124 tokens (shape 1 and 0.8), cut at the 2,048 tokens the profile was measured to.
    """
    import numpy as np

    from servegym.envs.llm_routing import replay

    rng = np.random.default_rng(0)

    def tokens(mean: float, sigma: float) -> Any:
        draw = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, requests)
        return np.clip(np.rint(draw), 1, 2048).astype(np.int64)

    arrival_s = np.cumsum(rng.exponential(1 / rate, requests))
    prompt, output = tokens(511, 1.0), tokens(124, 0.8)
    numbers = rng.random(1_000_000)

    def timer(scheduler: str) -> float:
        return requests / seconds(lambda: replay(arrival_s, prompt, output, scheduler=scheduler))

    rates = interleave(
        {
            "chunked_prefill": lambda: timer("chunked_prefill"),
            "orca": lambda: timer("orca"),
            "sort": lambda: len(numbers) / seconds(lambda: np.sort(numbers)),
        },
        repeats,
    )
    sort = "sorting random numbers, numbers", rates.pop("sort")
    about: dict[str, Any] = {"requests": requests, "rate_per_s": rate, "repeats": repeats}
    return [row(f"replay, {k}, requests", x, "1/s", sort, **about) for k, x in rates.items()]


def bench_import(repeats: int) -> list[dict[str, Any]]:
    """Wall time that ``import servegym`` adds to ``import gymnasium``, in fresh interpreters."""
    runs = []
    for _ in range(repeats + 1):
        out = subprocess.run(
            [sys.executable, "-c", _IMPORT], check=True, capture_output=True, text=True
        ).stdout
        runs.append([1e3 * float(word) for word in out.split()])
    theirs, ours = zip(*runs[1:], strict=True)  # the first run may have to write bytecode
    return [row("import servegym, added", ours, "ms", ("import gymnasium", theirs))]


def bench_memory(num_envs: int) -> list[dict[str, Any]]:
    """Resident memory that a batch of environments adds, in a fresh interpreter."""
    out = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(num_envs)], check=True, capture_output=True, text=True
    ).stdout
    before, after = (int(word) / 1e6 for word in out.split())
    return [row("memory of the environments", [after - before], "MB", systems=num_envs)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, print it and write the table ``bench``.

    Args:
        argv: The command line; ``sys.argv`` by default.

    Returns:
        0.
    """
    options = bench_options("routing", __doc__, argv)
    shrink = 20 if options.quick else 1
    repeats = min(options.repeats, 2) if options.quick else options.repeats
    rows = bench_vector(64, 2_000 // shrink, repeats)
    rows += bench_single(20_000 // shrink, repeats)
    rows += bench_replay(10_000 // shrink, 4.0, repeats)
    rows += bench_import(repeats)
    rows += bench_memory(1_024 // shrink)
    report(options, rows)
    return 0


if __name__ == "__main__":
    from servegym._command_line import run_main

    run_main(main)
