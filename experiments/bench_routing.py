"""Speed and memory of the routing environments, with the yardsticks of the same run.

Absolute steps per second say more about the machine than about the code, so every figure stands
beside one of Gymnasium's own environments, measured alternately with it in one process::

    servegym bench --out runs/bench.json

All timings are of one thread, default arguments, full observations that are copied out, and
actions drawn beforehand.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["main"]

ENV_ID = "servegym/LLMRouting-v0"

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
        "servegym/LLMRouting-v0", num_envs=n, vectorization_mode="vector_entry_point")
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


def _time_vector(envs: Any, actions: Any, seed: int) -> float:
    """Seconds a step of the whole batch."""
    envs.reset(seed=seed)
    start = time.perf_counter()
    for action in actions:
        envs.step(action)
    return (time.perf_counter() - start) / len(actions)


def _time_single(env: Any, actions: Sequence[int], seed: int) -> float:
    """Seconds a step, resets included."""
    env.reset(seed=seed)
    start = time.perf_counter()
    for action in actions:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
    return (time.perf_counter() - start) / len(actions)


def _interleave(timers: dict[str, Callable[[], float]], repeats: int) -> dict[str, dict[str, Any]]:
    """Median and all values of every timer, taken in turn so that drift hits all alike."""
    for timer in timers.values():
        timer()  # compile and warm up
    values: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(repeats):
        for name, timer in timers.items():
            values[name].append(timer())
    return {
        name: {"median_s": statistics.median(times), "all_s": times}
        for name, times in values.items()
    }


def bench_vector(num_envs: int, steps: int, repeats: int) -> dict[str, Any]:
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
    short = max(1, steps // 10)
    actions = _legal_actions(ours, steps, seed=0)
    sync_actions = _legal_actions(sync, short, seed=0)
    cart_actions = np.random.default_rng(0).integers(0, 2, (steps, num_envs))
    times = _interleave(
        {
            "native": lambda: _time_vector(ours, actions, 0),
            "cartpole": lambda: _time_vector(cartpole, cart_actions, 0),
            "sync": lambda: _time_vector(sync, sync_actions, 0),
        },
        repeats,
    )
    for envs in (ours, cartpole, sync):
        envs.close()
    native = num_envs / times["native"]["median_s"]
    cart = num_envs / times["cartpole"]["median_s"]
    per_sync = few / times["sync"]["median_s"]
    return {
        "num_envs": num_envs,
        "steps_per_repeat": steps,
        "native_steps_per_s": native,
        "cartpole_vector_steps_per_s": cart,
        "ratio_to_cartpole_vector": native / cart,
        "sync_num_envs": few,
        "sync_steps_per_s": per_sync,
        "ratio_to_sync": native / per_sync,
        "times": times,
    }


def bench_parts(num_envs: int, steps: int, repeats: int) -> dict[str, Any]:
    """Where a step of the vector environment spends its time, in seconds a step of one system.

    ``kernel`` is the compiled call, ``engine`` the same without the queues' rows in the
    observation (the view of the experts alone), ``copy`` the copy handed out, ``memcpy`` one flat
    copy of as many bytes: the floor of any environment that hands out this observation. ``step``
    less ``kernel`` and ``copy`` is Python.
    """
    import gymnasium
    import numpy as np

    import servegym  # noqa: F401

    def make(env_id: str) -> Any:
        envs = gymnasium.make_vec(
            env_id,
            num_envs=num_envs,
            vectorization_mode=gymnasium.VectorizeMode.VECTOR_ENTRY_POINT,
            episode_requests=steps + 1,
        )
        return envs.unwrapped

    ours, experts = make(ENV_ID), make("servegym/LLMRoutingExperts-v0")
    actions = _legal_actions(ours, steps, seed=0)
    which = np.ones(num_envs, np.int8)
    flat = np.concatenate([part.ravel().view(np.int8) for part in ours.batch.observation.values()])

    def kernel(envs: Any) -> float:
        envs.reset(seed=0)
        start = time.perf_counter()
        for action in actions:
            envs.batch.step(action, which)
        return (time.perf_counter() - start) / steps

    def repeat(call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            call()
        return (time.perf_counter() - start) / steps

    times = _interleave(
        {
            "step": lambda: _time_vector(ours, actions, 0),
            "kernel": lambda: kernel(ours),
            "engine": lambda: kernel(experts),
            "copy": lambda: repeat(ours.batch.fresh_observation),
            "memcpy": lambda: repeat(flat.copy),
        },
        repeats,
    )
    return {
        "bytes_per_step": flat.size / num_envs,
        **{f"{name}_s": value["median_s"] / num_envs for name, value in times.items()},
    }


def bench_single(steps: int, repeats: int) -> dict[str, Any]:
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
    times = _interleave(
        {
            "ours": lambda: _time_single(ours, actions, 0),
            "cartpole": lambda: _time_single(cartpole, cart_actions, 0),
        },
        repeats,
    )
    ours_rate = 1 / times["ours"]["median_s"]
    cart_rate = 1 / times["cartpole"]["median_s"]
    return {
        "steps_per_s": ours_rate,
        "cartpole_steps_per_s": cart_rate,
        "ratio_to_cartpole": ours_rate / cart_rate,
        "times": times,
    }


def bench_replay(requests: int, rate: float, repeats: int) -> dict[str, Any]:
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
    result: dict[str, Any] = {"requests": requests, "rate_per_s": rate}

    def timer(scheduler: str) -> Callable[[], float]:
        def run() -> float:
            start = time.perf_counter()
            replay(arrival_s, prompt, output, scheduler=scheduler)
            return time.perf_counter() - start

        return run

    times = _interleave({name: timer(name) for name in ("chunked_prefill", "orca")}, repeats)
    for name, values in times.items():
        result[f"{name}_requests_per_s"] = requests / values["median_s"]
    result["times"] = times
    return result


def bench_import(repeats: int) -> dict[str, Any]:
    """Seconds that ``import servegym`` adds to ``import gymnasium``, in fresh interpreters."""
    runs = []
    for _ in range(repeats + 1):
        out = subprocess.run(
            [sys.executable, "-c", _IMPORT], check=True, capture_output=True, text=True
        ).stdout
        runs.append([float(word) for word in out.split()])
    runs = runs[1:]  # the first run may have to write bytecode
    return {
        "gymnasium_s": statistics.median(run[0] for run in runs),
        "servegym_added_s": statistics.median(run[1] for run in runs),
        "all_s": runs,
    }


def bench_memory(num_envs: int) -> dict[str, Any]:
    """Resident memory that a batch of environments adds, in a fresh interpreter."""
    out = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(num_envs)], check=True, capture_output=True, text=True
    ).stdout
    before, after = (int(word) for word in out.split())
    return {
        "num_envs": num_envs,
        "process_bytes": after,
        "added_bytes": after - before,
        "bytes_per_env": (after - before) / num_envs,
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print it and write it as JSON; see ``servegym bench --help``."""
    parser = argparse.ArgumentParser(
        prog="servegym bench", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--out", type=Path, help="write the figures to FILE.json", metavar="FILE")
    parser.add_argument("--repeats", type=int, default=7, help="repeats of every timing (7)")
    parser.add_argument("--quick", action="store_true", help="a smoke run, figures not to quote")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats is {args.repeats}; allowed is 1 or more")

    from servegym.experiments.figure_run import machine, versions
    from servegym.experiments.output import check_writable, print_table, write_json

    if args.out is not None:
        try:
            check_writable(args.out, (".json",))
        except ValueError as error:
            parser.error(str(error))
    shrink = 20 if args.quick else 1
    repeats = min(args.repeats, 2) if args.quick else args.repeats
    vector = bench_vector(64, 2_000 // shrink, repeats)
    parts = bench_parts(64, 1_000 // shrink, repeats)
    single = bench_single(20_000 // shrink, repeats)
    replayed = bench_replay(10_000 // shrink, 4.0, repeats)
    imported = bench_import(repeats)
    memory = bench_memory(1_024 // shrink)
    result = {
        "command": "servegym bench " + " ".join(argv if argv is not None else sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
        "repeats": repeats,
        "vector": vector,
        "parts": parts,
        "single": single,
        "replay": replayed,
        "import": imported,
        "memory": memory,
    }

    def count(value: float) -> str:
        return f"{value:,.0f}"

    print_table(
        f"{ENV_ID}, medians of {repeats}, one thread: {result['machine']['cpu']}",
        ["figure", "servegym", "yardstick", "ratio"],
        [
            [
                "64 envs, steps/s, to CartPoleVectorEnv",
                count(vector["native_steps_per_s"]),
                count(vector["cartpole_vector_steps_per_s"]),
                f"{vector['ratio_to_cartpole_vector']:.2f}",
            ],
            [
                "64 envs, steps/s, to SyncVectorEnv of the same id",
                count(vector["native_steps_per_s"]),
                count(vector["sync_steps_per_s"]),
                f"{vector['ratio_to_sync']:.2f}",
            ],
            [
                "single env, steps/s, to CartPole-v1",
                count(single["steps_per_s"]),
                count(single["cartpole_steps_per_s"]),
                f"{single['ratio_to_cartpole']:.2f}",
            ],
            [
                "replay, requests/s, chunked_prefill",
                count(replayed["chunked_prefill_requests_per_s"]),
                "",
                "",
            ],
            ["replay, requests/s, orca", count(replayed["orca_requests_per_s"]), "", ""],
            [
                "import time added, ms, to gymnasium's own",
                f"{1e3 * imported['servegym_added_s']:.1f}",
                f"{1e3 * imported['gymnasium_s']:.1f}",
                f"{imported['servegym_added_s'] / imported['gymnasium_s']:.2f}",
            ],
            [
                f"memory of {memory['num_envs']} envs, MB",
                f"{memory['added_bytes'] / 1e6:.1f}",
                "",
                "",
            ],
        ],
    )
    print_table(
        "Where a step of one of the 64 systems goes, ns",
        ["part", "ns", "share of the step"],
        [
            [text, f"{1e9 * parts[name + '_s']:.0f}", f"{parts[name + '_s'] / parts['step_s']:.0%}"]
            for name, text in (
                ("step", "step of the vector environment"),
                ("kernel", "compiled kernel"),
                ("engine", "of it the engine and the experts' rows"),
                ("copy", f"copy of the observation, {parts['bytes_per_step']:,.0f} bytes"),
                ("memcpy", "one flat copy of as many bytes"),
            )
        ],
    )
    if args.out is not None:
        write_json(args.out, result)
        print(f"written to {args.out}")
    return result


if __name__ == "__main__":
    main()
