"""Train a router from random weights, draw how it learns, and compare it with the heuristics.

``make train``: `AGENT` learns in a process of its own while the heuristics are measured, on the
learning curve's episodes, then the evaluation split's. Ctrl-C is passed on to the training.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from servegym._checks import whole
from servegym._command_line import interrupt_on_signals, run_main
from servegym.baselines.registry import list_policies
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.output import print_table, write_text
from servegym.experiments.evaluation.stats import paired_difference, stratified_bootstrap
from servegym.experiments.evaluation.tables import provenance, write_result
from servegym.experiments.papers.plotting import as_png, decisions_axis, label_ends, pyplot
from servegym.experiments.papers.study import interval_columns
from servegym.experiments.runs import read_metrics

ENV_ID, AGENT = "servegym/LLMRouting-v1", "servegym.agents.sac_rows"
TABLE, CURVE, TRAINED = "first_command", "first_command_curve", "trained"
RATES = (5.0, 8.0, 10.0)
KEYS = ("avg_qos", *(f"avg_qos_rate_{rate:g}" for rate in RATES))
NAMED = ("random", "least_outstanding", "priced_greedy", "expected_qos")
"""Heuristics that are drawn with their names; so is the best of the others."""
BASELINES = NAMED + tuple(
    one.name
    for one in list_policies("llm_routing")
    if not one.clairvoyant and one.alias_of is None and one.name not in (*NAMED, "drop_all")
)
"""Every heuristic that is no control and knows no more than a router can."""
STEPS, POINTS = 600_000, 15  # decisions of the training; evaluations at equal distances
EVERY_S = 10.0  # between two lines at least
SAVES_WITHIN_S = 60.0  # after a signal a training that has not ended is killed
Rows = list[dict[str, Any]]


def training_command(steps: int, seed: int, folder: Path) -> list[str]:
    """The command line of the training, which a user may run as well."""
    folder = folder.resolve()  # "." has no name
    flags = {"out_dir": folder.parent, "run_name": folder.name}
    flags |= {"total_timesteps": steps, "seed": seed, "eval_every": max(steps // POINTS, 1_280)}
    words = [str(word) for key, value in flags.items() for word in (f"--{key}", value)]
    return [sys.executable, "-m", AGENT, *words, "--eval_rates", *(f"{r:g}" for r in RATES)]


def learning_curve(metrics: Rows) -> Rows:
    """The evaluations in a log, as rows of the curve's table."""
    return [
        {"policy": TRAINED, "decisions": row["global_step"], "cpu_s": row["charts/cpu_s"]}
        | {key: row[f"eval/{key}"] for key in KEYS}
        for row in metrics
        if "eval/avg_qos" in row
    ]


def validate(policy: str) -> Rows:
    """A heuristic's row in the curve's table, on the episodes that the training evaluates on."""
    agent, qos = importlib.import_module(AGENT), []
    for k, rate in enumerate(RATES):
        env_kwargs = {"rate": rate, "split": "val", "episode_requests": agent.EVAL_REQUESTS}
        n = agent.EVAL_EPISODES
        rows = evaluate(ENV_ID, [policy], n, 10_000 + k, env_kwargs, n)
        qos.append(float(np.mean([row["avg_qos"] for row in rows])))
    values = dict(zip(KEYS, [float(np.mean(qos)), *qos], strict=True))
    return [{"policy": policy, "decisions": None, "cpu_s": None, **values}]


def play(policy: str, rate: float, episodes: int, quick: bool) -> Rows:
    """Rows of `evaluate` at a rate, of a heuristic or of the trained policy by its path."""
    env_kwargs = {"rate": rate} | ({"episode_requests": 100} if quick else {})
    trained = policy not in BASELINES
    block = min(episodes, 64 if trained else 32)  # a large batch makes a network fast
    rows = evaluate(ENV_ID, [policy], episodes, None, env_kwargs, block)
    return [{**row, "policy": TRAINED if trained else policy, "rate": rate} for row in rows]


def progress(metrics: Rows, heuristics: Rows, steps: int, to_come: int) -> str:
    """What the training and the heuristics have reached; ``to_come`` measurements are left."""
    text = ""
    if metrics:
        text += f", {metrics[-1]['global_step']:,} of {steps:,} decisions"
    qos = [row["avg_qos"] for row in learning_curve(metrics)]
    if qos:
        text += f"; QoS {qos[-1]:.3f}, at first {qos[0]:.3f}"
    if heuristics:
        best = max(heuristics, key=lambda row: row["avg_qos"])
        text += f"; best heuristic {best['policy']} {best['avg_qos']:.3f}"
    return f"{text}; {to_come} left to measure"


def measure(
    command: list[str], steps: int, run: Path, episodes: int, quick: bool
) -> tuple[Rows, Rows]:
    """Train, measure the heuristics meanwhile, then compare: rows of the curve and of `play`.

    ``episodes`` are those of a policy and rate; a ``quick`` run leaves most heuristics out.

    Raises:
        RuntimeError: If the training fails; its output is in ``training.log``.
    """
    lines: Rows = []
    compared: Rows = []
    names = BASELINES[: len(NAMED) + 2] if quick else BASELINES
    how, trained = (episodes, quick), str(run / "last.safetensors")
    jobs = [(lines, partial(validate, name)) for name in names]
    jobs += [(compared, partial(play, name, r, *how)) for name in names for r in RATES]
    after = [(compared, partial(play, trained, r, *how)) for r in RATES]
    log, metrics = run / "training.log", []
    begin, printed = time.perf_counter(), -EVERY_S
    with log.open("wb") as output:
        # A group of its own: a terminal's Ctrl-C comes once, from here.
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
        )
    number = signal.SIGTERM
    try:
        while jobs or after:
            ended = child.poll() is not None
            metrics = read_metrics(run)
            if child.returncode:
                tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
                raise RuntimeError(f"{shlex.join(command)} failed: {tail}")
            if (seconds := time.perf_counter() - begin) - printed >= EVERY_S:
                text = progress(metrics, lines, steps, len(jobs) + len(after))
                print(f"{seconds:.0f} s{text}", flush=True)
                printed = seconds
            if not jobs and not ended:
                time.sleep(0.5)
                continue
            rows, job = (jobs or after).pop(0)
            rows += job()
    except KeyboardInterrupt as stopped:
        number = stopped.args[0]
        raise
    finally:
        child.send_signal(number)  # does nothing if it has ended
        try:
            child.wait(SAVES_WITHIN_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    seconds = time.perf_counter() - begin
    print(f"{seconds:.0f} s{progress(metrics, lines, steps, 0)}", flush=True)
    return learning_curve(metrics) + lines, compared


def summarise_comparison(rows: Rows) -> Rows:
    """QoS of each policy at each rate, and what the trained one gains over it, paired by episode.

    Both with 95 % intervals over the episodes.
    """
    scores: dict[tuple[str, float], list[float]] = {}
    for row in rows:
        scores.setdefault((row["policy"], row["rate"]), []).append(row["avg_qos"])
    table = []
    for (policy, rate), qos in scores.items():
        row: dict[str, Any] = {"policy": policy, "rate": rate, "episodes": len(qos)}
        row |= interval_columns("qos", stratified_bootstrap(qos))
        if policy != TRAINED:
            gain = paired_difference(scores[TRAINED, rate], qos)
            row |= interval_columns("gain", gain)
        table.append(row)
    return table


def mean_qos(table: Rows) -> dict[str, float]:
    """QoS of each policy, mean over the rates, the best first."""
    names = {row["policy"] for row in table}
    mean = {n: float(np.mean([r["qos"] for r in table if r["policy"] == n])) for n in names}
    return dict(sorted(mean.items(), key=lambda item: -item[1]))


def short(form: str, *values: float) -> list[str]:
    """Numbers without the zero before their point."""
    return [f"{value:{form}}".replace("0.", ".", 1) for value in values]


def findings(table: Rows, curve: Rows) -> list[str]:
    """What the trained router gains over the best heuristic, and when its curve passed which."""
    notes = []
    for rate in RATES:
        others = [row for row in table if row["rate"] == rate and row["policy"] != TRAINED]
        best = max(others, key=lambda row: row["qos"])
        above, below = best["gain_low"] > 0, best["gain_high"] < 0
        verdict = "above" if above else "below" if below else "not distinguished from"
        gain, low, high = short("+.4f", *(best[key] for key in ("gain", "gain_low", "gain_high")))
        text = f"at {rate:g}/s trained is {verdict} the best, {best['policy']}: "
        notes.append(f"{text}{gain} [{low}, {high}]")
    points = [row for row in curve if row["policy"] == TRAINED]
    for row in [row for row in curve if row["policy"] in NAMED]:
        at = next((k for k, p in enumerate(points) if p["avg_qos"] >= row["avg_qos"]), None)
        when = "never" if at is None else "from the first evaluation on"
        if at:
            ends = points[at - 1], points[at]
            when = "between {:,} and {:,} decisions".format(*(p["decisions"] for p in ends))
            when += " ({:.1f} to {:.1f} CPU s)".format(*(p["cpu_s"] for p in ends))
        notes.append(f"curve reaches {row['policy']} ({short('.3f', row['avg_qos'])[0]}) {when}")
    return notes


def print_comparison(table: Rows, ceiling: Sequence[float], notes: Sequence[str]) -> None:
    """Print the trained policy and seven heuristics at most, in 100 columns."""
    ranked = list(mean_qos(table))
    best = [name for name in ranked if name != TRAINED][:5]
    shown = [name for name in ranked if name in (TRAINED, "least_outstanding", "random", *best)]
    body = []
    for name in shown:
        rows = [row for row in table if row["policy"] == name]
        cells = [short(".3f", r["qos"], r["qos_low"], r["qos_high"]) for r in rows]
        gains = short("+.4f", *(row["gain"] for row in rows if "gain" in row))
        body.append([name, *(f"{q} [{low} {high}]" for q, low, high in cells), " ".join(gains)])
    body.append(["ceiling", *short(".3f", *ceiling), ""])
    heads = [*(f"QoS at {rate:g}/s" for rate in RATES), "gains at 5/8/10"]
    below = [
        f"Gains: of trained over the policy, paired by episode; all are in {TABLE}.csv.",
        "Intervals: over episodes. Ceiling: mean of the best scores.",
        *notes,
    ]
    title = f"Average QoS, interquartile mean [95 % interval]; {table[0]['episodes']} episodes"
    print_table(title, ["policy", *heads], body, below)


def plot(curve: Rows, table: Rows) -> bytes:
    """A PNG: the learning curve between the heuristics' lines, and QoS against the rate."""
    ranked = mean_qos(table)
    palette = ("tab:brown", "tab:orange", "tab:green", "tab:blue", "tab:purple")
    others = [name for name in ranked if name not in (*NAMED, TRAINED)]
    named = [name for name in NAMED if name in ranked] + others[:1]
    colours = {TRAINED: "black", **dict(zip(named, palette, strict=False))}
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(12.5, 4.8), layout="constrained")
    ends: tuple[dict[str, float], dict[str, float]] = {}, {}
    for name in ranked:
        look: dict[str, Any] = {"color": colours.get(name, "0.8"), "zorder": 1 + (name in colours)}
        look["linewidth"] = 2.4 if name == TRAINED else 1.4 if name in colours else 0.8
        points = [row for row in curve if row["policy"] == name]
        if name == TRAINED:
            decisions = [r["decisions"] for r in points]
            left.plot(decisions, [r["avg_qos"] for r in points], ".-", **look)
            decisions_axis(left, decisions)
            took = f"{points[-1]['cpu_s']:.0f} s of a core"
        else:
            left.axhline(points[0]["avg_qos"], **look)
        rows = [row for row in table if row["policy"] == name]
        qos = np.array([[row[key] for key in ("qos", "qos_low", "qos_high")] for row in rows]).T
        bars = np.maximum([qos[0] - qos[1], qos[2] - qos[0]], 0) if name in colours else None
        right.errorbar(RATES, qos[0], bars, capsize=2, **look)
        if name in colours:
            ends[0][name], ends[1][name] = points[-1]["avg_qos"], qos[0][-1]
    left.set_ylabel("validation QoS, mean of 5, 8 and 10 requests/s")
    left.set_title(f"Training from random weights, {took}")
    right.set(xlabel="arrival rate, requests/s", ylabel="average QoS", xticks=RATES)
    right.set(title=f"{table[0]['episodes']} evaluation episodes a point")
    for axis, names in zip((left, right), ends, strict=True):
        label_ends(axis, names, colours)
    return as_png(figure)


def take_folder(out: Path | None, name: str) -> Path:
    """The folder of this run: ``out``, or the first of runs/NAME, runs/NAME_2, ... that is free.

    ValueError if ``out`` is not empty.
    """
    if out is None:
        numbered = (f"{name}_{k}" if k > 1 else name for k in itertools.count(1))
        out = next(folder for one in numbered if not (folder := Path("runs", one)).exists())
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ValueError(f"--out {out} is not empty; name another folder")
    return out


def announce(steps: int, out: Path) -> None:
    """Say what is trained, by which file, what is measured and where it is written."""
    file = f"agents/{AGENT.rpartition('.')[2]}.py"
    print(f"{file} learns to route requests on {ENV_ID}, from random weights: {steps:,} decisions.")
    print("Its number is QoS, the quality of an answer from 0 to 1, or 0 where it comes too late:")
    print("the mean over 5, 8 and 10 requests/s on validation prompts. Heuristics play the same")
    print("episodes; in the end all play others, on evaluation prompts, for a table.")
    print(f"All is written to {out}, what the training prints to {out / 'training.log'}.")
    print(f"A line every {EVERY_S:.0f} s; Ctrl-C saves the policy as it is.", flush=True)


def say_what_is_next(out: Path, seconds: float) -> None:
    """Name the picture, the tables and the commands that go on from here."""
    print(f"{seconds:.0f} s. Picture: {out / TABLE}.png; tables: {TABLE}.csv, {CURVE}.csv there.")
    print("Next:")
    activate = Path(sys.prefix, "bin", "activate")
    if shutil.which("servegym") is None and activate.exists():
        print(f"  source {shlex.quote(str(activate))}")
    folder = shlex.quote(str(out))
    print(f"  servegym evaluate {ENV_ID} --policy {folder}/last.safetensors --set rate=8")
    print(f"  servegym plot {folder}")
    print(f"  servegym render --policy {folder}")


def what_is_left(out: Path) -> str:
    """What the folder has after a signal."""
    policy = out / "last.safetensors"
    if not policy.exists():
        return f"{out} has no policy yet"
    words = ["servegym", "evaluate", ENV_ID, "--policy", str(policy), "--set", "rate=8"]
    return f"the policy so far is {policy}, play it with: {shlex.join(words)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Train, evaluate, print and save; see ``--help``. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, help=f"decisions of the training ({STEPS})")
    parser.add_argument("--seed", type=int, default=1, help="seed of the training (1)")
    parser.add_argument("--episodes", type=int, default=50, help="episodes a policy and rate (50)")
    parser.add_argument("--out", type=Path, help="folder (runs/train, runs/train_2, ...)")
    parser.add_argument("--quick", action="store_true", help="a smoke run, numbers not to quote")
    words = sys.argv[1:] if argv is None else list(argv)
    args = parser.parse_args(words)
    args.steps = (2_560 if args.quick else STEPS) if args.steps is None else args.steps
    whole("--steps", args.steps, 1)
    whole("--episodes", args.episodes, 1)
    args.out = take_folder(args.out, "train-quick" if args.quick else "train")
    with interrupt_on_signals():
        try:
            train_and_compare(args, words)
        except KeyboardInterrupt as signalled:
            print(f"interrupted: {what_is_left(args.out)}")
            return 128 + signalled.args[0]
    return 0


def train_and_compare(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Do what the command line, in its ``words``, asks for."""
    if args.quick:
        print("Smoke run: it shows that everything works; its numbers are not to be quoted.")
    announce(args.steps, args.out)
    this = shlex.join(["python", "-m", "servegym.experiments.train_and_compare", *words])
    settings = {"seed": args.seed, "steps": args.steps}
    origin = provenance(this, args.quick, packages=("torch",), settings=settings)
    begin = time.perf_counter()
    episodes = min(args.episodes, 3) if args.quick else args.episodes
    command = training_command(args.steps, args.seed, args.out)
    curve, rows = measure(command, args.steps, args.out, episodes, args.quick)
    table = summarise_comparison(rows)
    notes = findings(table, curve)
    ceiling = [float(np.mean([r["ceiling"] for r in rows if r["rate"] == rate])) for rate in RATES]
    print_comparison(table, ceiling, notes)
    write_result(args.out / TABLE, table, origin, notes)
    write_result(args.out / CURVE, curve, origin)
    write_text(args.out / f"{TABLE}.png", plot(curve, table))
    say_what_is_next(args.out, time.perf_counter() - begin)


if __name__ == "__main__":
    run_main(main)
