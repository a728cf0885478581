"""Train a router from nothing, draw how it learns, and compare it with the heuristics.

``make train`` runs this, some six minutes of two cores. `servegym.agents.direct_search`
finds the weights of a linear rule, starting with nothing; `servegym.agents.rpi` then learns from
rollouts that follow the rule what to add to it. The terminal shows the QoS on validation episodes,
and every heuristic on the same episodes as a line; after that all of them play the same episodes of
the evaluation split at three arrival rates. It leaves in one folder

- ``router.safetensors``: the checkpoint, which ``servegym evaluate --policy`` takes;
- ``first_command_curve.csv`` and ``.json``: the QoS on validation episodes by simulated decisions,
  and that of the heuristics; ``.png`` shows it;
- ``comparison.csv`` and ``comparison.json``: one row a policy, rate and episode, and how they were
  made; ``comparison.png`` shows QoS, latency and refused requests against the rate;
- ``first_command.csv`` and ``.json``: one row a policy and rate, and what the trained router gains;
- ``search`` and ``rollouts``: the two runs, with metrics and snapshots, from which ``--resume``
  goes on.

``TRAIN_STEPS`` in the environment shortens the training; ``--quick`` shortens everything, a smoke
run whose numbers mean nothing. ``--ray WHERE`` plays the rollouts on a Ray cluster; the result is
the same.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym.baselines.registry import list_policies
from servegym.experiments.evaluate import evaluate
from servegym.experiments.output import print_table, write_text
from servegym.experiments.stats import over_trainings, stratified_bootstrap
from servegym.experiments.tables import note, provenance, write_result

__all__ = ["main"]

MODULE = "servegym.experiments.train_and_compare"
ENV_ID = "servegym/LLMRouting-v0"
TABLE, CURVE = "first_command", "first_command_curve"
RATES = (5.0, 8.0, 10.0)
CONTROLS = ("drop_all", "always_busiest")
BASELINES = tuple(
    info.name
    for info in list_policies("llm_routing")
    if not info.clairvoyant and info.alias_of is None and info.name not in CONTROLS
)
"""Every heuristic and bandit that is no control and knows no more than a router can."""
TRAINED = "trained"
STEPS, LABELS = 3_000_000, 60_000
"""Decisions of the search, and labelled states of the rollouts."""
FITS = 4  # of the network to the labels
VALIDATION = {"split": "val", "episode_requests": 500}
VALIDATION_EPISODES = 8
"""Episodes a rate that the agent evaluates itself on, by its constants; the lines are on them."""
TRAINING_RATES = (3.0, 11.5)


def validation_qos(policy: str, rates: Sequence[float]) -> float:
    """Mean QoS of a policy over the validation episodes that the training evaluates itself on."""
    means = []
    for k, rate in enumerate(rates):
        rows = evaluate(
            ENV_ID,
            [policy],
            episodes=VALIDATION_EPISODES,
            seed=10_000 + k,
            num_envs=VALIDATION_EPISODES,
            env_kwargs={"rate": rate, **VALIDATION},
        )
        means.append(np.mean([row["avg_qos"] for row in rows]))
    return float(np.mean(means))


def training_commands(
    steps: int, labels: int, seed: int, folder: Path, resume: bool, ray: str = ""
) -> list[list[str]]:
    """The command lines of both parts of the training, which a user may run as well."""
    low, high = TRAINING_RATES
    common: dict[str, Any] = {"set": f"rate=[{low:g},{high:g}]", "seed": seed, "out_dir": folder}
    common |= {"resume": resume}
    search = {
        "run_name": "search",
        "state": "estimate",
        "total_timesteps": steps,
        "population": 32,
        "threads": min(os.cpu_count() or 1, 2),
        "eval_every": 1,  # after each generation
        "checkpoint_every": 500_000,
    }
    rollouts = {
        "run_name": "rollouts",
        "start": folder / "search" / "best.safetensors",
        "total_timesteps": labels,
        "fit_every": max(labels // FITS, 1),
        "horizon_s": 5,
        "near": 0.05,
        "spread": 0.05,
        "eval_episodes": VALIDATION_EPISODES,
        "checkpoint_every": max(labels // FITS, 1),
    }
    rollouts |= {"ray": ray} if ray else {}
    commands = []
    for agent, given in (("direct_search", search), ("rpi", rollouts)):
        words = [sys.executable, "-m", f"servegym.agents.{agent}"]
        words += [
            str(word) for key, value in (common | given).items() for word in (f"--{key}", value)
        ]
        commands.append([*words, "--eval_rates", *(f"{rate:g}" for rate in RATES)])
    return commands


def read_points(folder: Path) -> list[list[tuple[int, float]]]:
    """Simulated decisions and QoS at each evaluation in the logs of both parts, one list each.

    The first begins with what the search begins with: weights of zero, which drop every request.

    Args:
        folder: Holds the runs ``search`` and ``rollouts``, or not yet.
    """
    parts, before = [], 0
    for run, key in (("search", "global_step"), ("rollouts", "charts/decisions")):
        metrics = folder / run / "metrics.jsonl"
        text = metrics.read_text(encoding="utf-8") if metrics.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # the last line may be half written
        rows = [json.loads(line) for line in whole.splitlines()]
        parts.append([(before + r[key], r["eval/avg_qos"]) for r in rows if "eval/avg_qos" in r])
        before = parts[0][-1][0] if parts[0] else 0
    return [[(0, 0.0), *parts[0]], parts[1]]


def train(
    steps: int,
    labels: int,
    seed: int,
    folder: Path,
    quick: bool,
    resume: bool = False,
    ray: str = "",
) -> tuple[Path, list[dict[str, Any]]]:
    """Train in processes of their own while this one measures the heuristics and draws.

    Args:
        steps: Decisions of the search.
        labels: Labelled states of the rollouts.
        seed: Seed of the training.
        folder: Where its runs go.
        quick: Draw one heuristic alone.
        resume: Go on from the last snapshots.
        ray: Ray cluster that plays the rollouts, or nothing.

    Returns:
        The checkpoint with the best QoS on the validation episodes, and rows of the curve: the
        trained policy at each evaluation and each heuristic, with ``decisions`` and ``avg_qos``.

    Raises:
        RuntimeError: If the training fails; its output is in ``training.log``.
    """
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from servegym.experiments.live_curve import Curve

    runs = [folder / "search", folder / "rollouts"]
    for run in runs:
        if not resume:
            (run / "metrics.jsonl").unlink(missing_ok=True)
    curve = Curve("QoS on validation episodes, mean of 5, 8 and 10 requests/s", steps)
    waiting = list(BASELINES[:1] if quick else BASELINES)
    begin = time.perf_counter()

    def view(part: int, since: float) -> Group:
        name = ("direct search for a rule", "rollouts that follow the rule")[part]
        now = time.perf_counter()
        text = f"part {part + 1} of 2, {name}; {now - begin:.0f} s"
        search, fits = read_points(folder)
        curve.points = [*search, *fits]
        curve.total = max([curve.total, *(step for step, _ in curve.points)])
        if share := min(len(fits) / FITS if part else search[-1][0] / steps, 1.0):
            text += f", about {(now - since) * (1 / share - 1):.0f} s left in this part"
        if curve.points and curve.lines:
            best = max(curve.lines, key=lambda key: curve.lines[key])
            qos = curve.points[-1][1]
            text += f"; QoS {qos:.4f}, {qos - curve.lines[best]:+.4f} over {best}"
        return Group(curve, Text(text))

    log = folder / "training.log"
    with log.open("wb") as output, Live(view(0, begin), refresh_per_second=2) as live:
        for part, command in enumerate(training_commands(steps, labels, seed, folder, resume, ray)):
            since = time.perf_counter()
            child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            try:
                while True:
                    ended = child.poll() is not None
                    live.update(view(part, since))
                    if ended and (not waiting or part == 0):
                        break
                    if waiting:
                        name = waiting.pop(0)
                        curve.lines[name] = validation_qos(name, RATES)
                    else:
                        time.sleep(0.5)
            finally:
                if child.poll() is None:
                    child.terminate()
                child.wait()
            if child.returncode:
                tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
                raise RuntimeError(f"{' '.join(command)} ended with {child.returncode}: {tail}")
    rows = [{"policy": TRAINED, "decisions": step, "avg_qos": q} for step, q in curve.points]
    rows += [{"policy": n, "decisions": None, "avg_qos": q} for n, q in curve.lines.items()]
    return runs[1] / "best.safetensors", rows


def plot_curve(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """A PNG: the curve of the training with the heuristics as lines, whole and near its end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    points = [(row["decisions"] / 1e6, row["avg_qos"]) for row in rows if row["policy"] == TRAINED]
    lines = {row["policy"]: row["avg_qos"] for row in rows if row["policy"] != TRAINED}
    lines = dict(sorted(lines.items(), key=lambda item: -item[1]))
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    colours = plt.get_cmap("tab20").colors  # type: ignore[attr-defined]
    for axis in axes:
        for k, (name, qos) in enumerate(lines.items()):
            axis.axhline(qos, color=colours[k % len(colours)], linewidth=1.2, label=name)
        axis.plot(*zip(*points, strict=True), "k.-", linewidth=2, label=TRAINED)
        axis.set_xlabel("million simulated decisions, those of the rollouts among them")
        axis.spines[["top", "right"]].set_visible(False)
    best, top = max(lines.values()), max(qos for _, qos in points)
    axes[0].set(ylabel="QoS on validation episodes", ylim=(0, None))
    axes[1].set(ylim=(best - 0.03, max(best, top) + 0.004))
    axes[0].legend(fontsize=7, ncols=2, loc="lower right", frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, format="png")
    plt.close(figure)
    return picture.getvalue()


def compare(
    checkpoints: Sequence[Path],
    rates: Sequence[float],
    episodes: int,
    env_kwargs: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Rows of `evaluate` for the checkpoints and the baselines at every rate.

    With ``rate`` and, for the checkpoints, the number of the ``training``.
    """
    from servegym.agents import load_policy

    policies: list[Any] = [[*BASELINES], *([load_policy(path)] for path in checkpoints)]
    for (policy,) in policies[1:]:
        policy.name = TRAINED
    rows = []
    for rate in rates:
        for training, each in enumerate(policies):
            found = evaluate(
                ENV_ID,
                each,
                episodes=episodes,
                num_envs=min(episodes, 32),
                env_kwargs={"rate": rate, **env_kwargs},
            )
            rows += [{"rate": rate, "training": training or None, **row} for row in found]
    return rows


def _column(
    rows: Sequence[Mapping[str, Any]], policy: str, rate: float, key: str, **also: Any
) -> Any:
    wanted = {"policy": policy, "rate": rate, **also}
    picked = [row[key] for row in rows if all(row[k] == v for k, v in wanted.items())]
    return np.array(picked, dtype=np.float64)


def _policies(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["policy"] for row in rows))


def summarise_comparison(
    rows: Sequence[Mapping[str, Any]], rates: Sequence[float]
) -> list[dict[str, Any]]:
    """QoS of each policy at each rate, and what the trained one gains over it, paired by episode.

    Both with 95 % intervals over the episodes, of several trainings over these as well.
    """
    trainings = sorted({row["training"] for row in rows if row["policy"] == TRAINED})
    table = []
    for rate in rates:
        own = [_column(rows, TRAINED, rate, "avg_qos", training=k) for k in trainings]
        for policy in _policies(rows):
            trained = policy == TRAINED
            qos = own if trained else [_column(rows, policy, rate, "avg_qos")]
            found = over_trainings(qos)
            row = {"policy": policy, "rate": rate, "trainings": len(trainings) * trained}
            row |= {"episodes": len(qos[0]), "qos": found.value}
            row |= {"qos_low": found.low, "qos_high": found.high}
            if not trained:
                gain = over_trainings(own, qos[0])
                row |= {"gain": gain.value, "gain_low": gain.low, "gain_high": gain.high}
            table.append(row)
    return table


def findings(table: Sequence[Mapping[str, Any]], rates: Sequence[float]) -> list[dict[str, Any]]:
    """A note a rate: what the trained router gains over the best of the heuristics there."""
    notes = []
    for rate in rates:
        others = [row for row in table if row["rate"] == rate and row["policy"] != TRAINED]
        best = max(others, key=lambda row: row["qos"])
        gain, low, high = (best[key] for key in ("gain", "gain_low", "gain_high"))
        verdict = "above" if low > 0 else "below" if high < 0 else "not distinguished from"
        text = (
            f"at {rate:g} requests/s {TRAINED} is {verdict} the best heuristic, {best['policy']}: "
            f"QoS {gain:+.4f} [{low:+.4f}, {high:+.4f}]"
        )
        notes.append(
            note(text, rate=rate, verdict=verdict, best=best["policy"], gain=gain, gain_low=low)
        )
    return notes


def print_comparison(
    table: Sequence[Mapping[str, Any]], rates: Sequence[float], ceilings: Sequence[float]
) -> None:
    """Print QoS by rate, and the paired gain of the trained policy over each heuristic."""

    def text(row: Mapping[str, Any], key: str, sign: str = "") -> str:
        parts = [row[key], row[f"{key}_low"], row[f"{key}_high"]]
        return "{} [{}, {}]".format(*(f"{part:{sign}.3f}" for part in parts))

    by = {(row["policy"], row["rate"]): row for row in table}
    policies = list(dict.fromkeys(row["policy"] for row in table))
    policies.sort(key=lambda policy: -sum(by[policy, rate]["qos"] for rate in rates))
    body = [
        [policy]
        + [text(by[policy, rate], "qos") for rate in rates]
        + ["" if policy == TRAINED else text(by[policy, rate], "gain", "+") for rate in rates]
        for policy in policies
    ]
    body.append(["ceiling (mean best score)", *(f"{c:.3f}" for c in ceilings), *[""] * len(rates)])
    print_table(
        "Average QoS, interquartile mean over episodes [bootstrap 95 % interval]",
        [
            "policy",
            *(f"QoS at {rate:g}/s" for rate in rates),
            *(f"{TRAINED} gains at {rate:g}/s" for rate in rates),
        ],
        body,
        [
            *(str(one["text"]) for one in findings(table, rates)),
            f"Trainings: {max(row['trainings'] for row in table)}. With one the intervals are over "
            "episodes alone.",
        ],
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
    parser.add_argument("--steps", type=int, help=f"decisions of the search ({STEPS})")
    parser.add_argument("--labels", type=int, help=f"states that rollouts label ({LABELS})")
    parser.add_argument("--seed", type=int, default=1, help="seed of the training (1)")
    parser.add_argument("--episodes", type=int, default=50, help="episodes a policy and rate (50)")
    parser.add_argument("--out", type=Path, default=Path("runs/train"), help="folder (runs/train)")
    parser.add_argument(
        "--checkpoint", type=Path, nargs="+", help="compare these trainings and train nothing"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last snapshot")
    parser.add_argument("--ray", default="", metavar="WHERE", help="cluster for the rollouts")
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
    labels = args.labels
    if labels is None:
        labels = 128 if args.quick else LABELS
    if args.quick:
        args.episodes = min(args.episodes, 3)
    if min(steps, labels, args.episodes) < 1:
        parser.error("--steps, --labels and --episodes must be 1 or more")
    for checkpoint in args.checkpoint or ():
        if not checkpoint.exists():
            parser.error(f"--checkpoint {checkpoint} does not exist")
    if args.ray:
        from servegym.agents.lib.ray_cluster import check_ray

        try:
            check_ray(args.ray)
        except (ValueError, ModuleNotFoundError) as error:
            parser.error(f"--ray: {error}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {args.out} cannot be made: {error}")

    begin = time.perf_counter()
    command = shlex.join(["python", "-m", MODULE, *words])
    settings: dict[str, Any] = {}
    if args.checkpoint is None:
        settings = {"seed": args.seed, "steps": steps, "labels": labels}
    made = provenance(command, args.quick, packages=("torch",), settings=settings)
    checkpoints = args.checkpoint
    if checkpoints is None:
        checkpoint, points = train(
            steps, labels, args.seed, args.out, args.quick, args.resume, args.ray
        )
        write_result(args.out / CURVE, points, made)
        write_text(args.out / f"{CURVE}.png", plot_curve(points))
        checkpoints = [args.out / "router.safetensors"]
        write_text(checkpoints[0], checkpoint.read_bytes())
    trained = time.perf_counter()
    env_kwargs = {"episode_requests": 100} if args.quick else {}
    rows = compare(checkpoints, RATES, args.episodes, env_kwargs)
    table = summarise_comparison(rows, RATES)
    ceilings = [float(np.mean([r["ceiling"] for r in rows if r["rate"] == rate])) for rate in RATES]
    print_comparison(table, RATES, ceilings)
    write_result(args.out / "comparison", rows, made)
    write_result(args.out / TABLE, table, made, findings(table, RATES))
    plot(rows, RATES, args.out / "comparison.png")
    print(
        f"training {trained - begin:.0f} s, comparison {time.perf_counter() - trained:.0f} s; "
        f"tables, plots and what was trained in {args.out}"
    )


if __name__ == "__main__":
    main()
