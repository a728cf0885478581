"""Train the router and compare it with the heuristics on episodes that it has not seen.

``make train`` runs this: a few minutes of training on two cores, then every policy on the same
episodes of the evaluation split at three arrival rates. It leaves in one folder

- ``router.safetensors``: the checkpoint, which ``servegym evaluate --policy`` takes;
- ``comparison.csv`` and ``comparison.json``: one row a policy, rate and episode, and how they were
  made;
- ``comparison.png``: QoS, latency and refused requests against the rate.

``TRAIN_STEPS`` in the environment shortens the training; ``--quick`` shortens everything, a smoke
run whose numbers mean nothing.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym.experiments.evaluate import evaluate, print_summary
from servegym.experiments.output import print_table, write_text
from servegym.experiments.stats import Interval, iqm, paired_difference, stratified_bootstrap
from servegym.experiments.tables import provenance, write_result

__all__ = ["main"]

MODULE = "servegym.experiments.train_and_compare"
ENV_ID = "servegym/LLMRouting-v0"
RATES = (5.0, 8.0, 10.0)
BASELINES = (
    "random",
    "round_robin",
    "least_outstanding",
    "power_of_two",
    "vllm_dp",
    "always_best",
    "least_latency",
    "greedy_qos",
    "priced_greedy",
)
TRAINED = "sac_han"
STEPS = 240_000
"""Decisions to train for: with the comparison under ten minutes on two cores."""


def train(steps: int, seed: int, folder: Path, quick: bool) -> Path:
    """Train the agent with its own defaults but for the steps and return the checkpoint.

    Args:
        steps: Decisions to train for.
        seed: Seed of the training run.
        folder: Where its run goes.
        quick: Shrink the validation, too.
    """
    from servegym.agents import sac_han

    settings: dict[str, Any] = {"seed": seed, "out_dir": str(folder), "run_name": "training"}
    settings["total_timesteps"] = steps
    if quick:
        settings |= {"num_envs": 32, "eval_every": 2_000, "eval_rates": RATES[:1]}
    run = sac_han.train(sac_han.Args(**settings))
    best = run / "best.safetensors"
    return best if best.exists() else run / "last.safetensors"


def compare(
    checkpoint: Path, rates: Sequence[float], episodes: int, env_kwargs: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Rows of `evaluate` for the checkpoint and the baselines at every rate, with ``rate``."""
    from servegym.agents import load_policy

    policy = load_policy(checkpoint)
    policy.name = TRAINED
    rows = []
    for rate in rates:
        logs: dict[str, list[Any]] = {}
        found = evaluate(
            ENV_ID,
            [*BASELINES, policy],
            episodes=episodes,
            num_envs=min(episodes, 32),
            env_kwargs={"rate": rate, **env_kwargs},
            logs=logs,
        )
        print_summary(found, logs=logs)
        rows += [{"rate": rate, **row} for row in found]
    return rows


def _column(rows: Sequence[Mapping[str, Any]], policy: str, rate: float, key: str) -> Any:
    picked = [row[key] for row in rows if row["policy"] == policy and row["rate"] == rate]
    return np.array(picked, dtype=np.float64)


def _policies(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["policy"] for row in rows))


def print_comparison(rows: Sequence[Mapping[str, Any]], rates: Sequence[float]) -> None:
    """Print QoS by rate, and the paired difference of the trained policy to each heuristic."""

    def text(interval: Interval, sign: str = "") -> str:
        return f"{interval.value:{sign}.3f} [{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]"

    body = []
    for policy in _policies(rows):
        cells = [policy]
        for rate in rates:
            qos = _column(rows, policy, rate, "avg_qos")
            cells.append(text(stratified_bootstrap(qos, iqm)))
        for rate in rates:
            gain = paired_difference(
                _column(rows, TRAINED, rate, "avg_qos"), _column(rows, policy, rate, "avg_qos")
            )
            cells.append("" if policy == TRAINED else text(gain, "+"))
        body.append(cells)
    ceilings = [float(np.mean([r["ceiling"] for r in rows if r["rate"] == rate])) for rate in rates]
    body.append(["ceiling (mean best score)", *(f"{c:.3f}" for c in ceilings), *[""] * len(rates)])
    print_table(
        "Average QoS, interquartile mean over episodes [bootstrap 95 % interval]",
        [
            "policy",
            *(f"QoS at {rate:g}/s" for rate in rates),
            *(f"{TRAINED} gains at {rate:g}/s" for rate in rates),
        ],
        body,
        ["One training run with one seed: the intervals are over episodes, not over trainings."],
    )


def plot(rows: Sequence[Mapping[str, Any]], rates: Sequence[float], path: Path) -> None:
    """Draw QoS, latency and refused requests against the arrival rate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter

    figure, axes = plt.subplot_mosaic(
        [["qos", "latency"], ["qos", "refused"]],
        figsize=(11, 5.5),
        width_ratios=[1.35, 1],
        layout="constrained",
    )
    policies = _policies(rows)
    colours = plt.get_cmap("tab10").colors  # type: ignore[attr-defined]
    markers = "osD^v<>PX*"
    spread = 0.12
    for index, policy in enumerate(policies):
        trained = policy == TRAINED
        style: dict[str, Any] = {
            "color": "black" if trained else colours[index % len(colours)],
            "linewidth": 2.6 if trained else 1.3,
            "markersize": 7 if trained else 4.5,
            "marker": "*" if trained else markers[index % len(markers)],
            "zorder": 3 if trained else 2,
        }
        # Shifted a little apart, so that intervals at one rate do not hide each other.
        x = np.array(rates) + spread * (index - (len(policies) - 1) / 2) / len(policies) * 2
        qos = [stratified_bootstrap(_column(rows, policy, rate, "avg_qos")) for rate in rates]
        values = np.array([interval.value for interval in qos])
        bars = np.array([[i.value - i.low, i.high - i.value] for i in qos]).T
        axes["qos"].errorbar(x, values, np.maximum(bars, 0), label=policy, capsize=2, **style)
        latency = [
            1e3 * float(np.mean(_column(rows, policy, rate, "mean_latency_s_per_token")))
            for rate in rates
        ]
        axes["latency"].plot(x, latency, **style)
        refused = [
            100
            * float(
                np.mean(
                    _column(rows, policy, rate, "drop_rate")
                    + _column(rows, policy, rate, "reject_rate")
                )
            )
            for rate in rates
        ]
        axes["refused"].plot(x, refused, **style)
    ceilings = [float(np.mean([r["ceiling"] for r in rows if r["rate"] == rate])) for rate in rates]
    axes["qos"].plot(rates, ceilings, "k--", linewidth=1, label="ceiling: best score")
    env_kwargs = json.loads(rows[0]["env_kwargs"])
    limit = 1e3 * env_kwargs["latency_requirement_s"]
    axes["latency"].axhline(limit, color="grey", linestyle=":", linewidth=1)
    axes["latency"].annotate(
        "L", (1, limit), xycoords=("axes fraction", "data"), va="center", color="grey"
    )
    axes["qos"].set(ylabel="average QoS", xlabel="arrival rate, requests/s", ylim=(0, None))
    axes["latency"].set(ylabel="latency, ms/token\n(served requests)", yscale="log")
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes["latency"].yaxis.set_major_formatter(plain)
    axes["latency"].yaxis.set_minor_formatter(plain)
    axes["refused"].set(ylabel="dropped or\nrejected, %", xlabel="arrival rate, requests/s")
    axes["refused"].set_ylim(bottom=0)
    for axis in axes.values():
        axis.set_xticks(rates)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes["qos"].legend(fontsize=8, ncols=2, loc="lower left", frameon=False)
    episodes = len({row["seed"] for row in rows})
    figure.suptitle(
        f"LLM routing, fleet {env_kwargs['profiles']}: {episodes} evaluation episodes a point",
        fontsize=11,
    )
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, format="png")
    write_text(path, picture.getvalue())
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, evaluate, print and save; see ``--help``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, help=f"decisions to train for ({STEPS})")
    parser.add_argument("--seed", type=int, default=1, help="seed of the training (1)")
    parser.add_argument("--episodes", type=int, default=20, help="episodes a policy and rate (20)")
    parser.add_argument("--out", type=Path, default=Path("runs/train"), help="folder (runs/train)")
    parser.add_argument("--checkpoint", type=Path, help="compare this one and train nothing")
    parser.add_argument("--quick", action="store_true", help="a smoke run, numbers not to quote")
    words = sys.argv[1:] if argv is None else list(argv)
    args = parser.parse_args(words)
    steps = args.steps
    if steps is None and os.environ.get("TRAIN_STEPS"):
        try:
            steps = int(os.environ["TRAIN_STEPS"])
        except ValueError:
            parser.error(f"TRAIN_STEPS is {os.environ['TRAIN_STEPS']!r}; give a whole number")
    if steps is None:
        steps = 2_560 if args.quick else STEPS
    if args.quick:
        args.episodes = min(args.episodes, 3)
    if steps < 1 or args.episodes < 1:
        parser.error("--steps and --episodes must be 1 or more")
    if args.checkpoint is not None and not args.checkpoint.exists():
        parser.error(f"--checkpoint {args.checkpoint} does not exist")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {args.out} cannot be made: {error}")

    import torch

    torch.set_num_threads(1)  # two threads on two busy cores are many times slower
    begin = time.perf_counter()
    checkpoint = args.checkpoint or train(steps, args.seed, args.out, args.quick)
    trained = time.perf_counter()
    target = args.out / "router.safetensors"
    if checkpoint.resolve() != target.resolve():
        write_text(target, checkpoint.read_bytes())
    env_kwargs = {"episode_requests": 100} if args.quick else {}
    rows = compare(target, RATES, args.episodes, env_kwargs)
    print_comparison(rows, RATES)
    made = provenance(
        shlex.join(["python", "-m", MODULE, *words]),
        args.quick,
        packages=("torch",),
        settings={"seed": args.seed, "steps": None if args.checkpoint else steps},
    )
    write_result(args.out / "comparison", rows, made)
    plot(rows, RATES, args.out / "comparison.png")
    print(
        f"training {trained - begin:.0f} s, comparison {time.perf_counter() - trained:.0f} s; "
        f"checkpoint, table and plot in {args.out}"
    )


if __name__ == "__main__":
    main()
