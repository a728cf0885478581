"""How an agent learns to route from random weights: curves over trainings, with a control.

``python -m servegym.experiments.studies.routing.learning_curves --agent ppo`` trains an
agent of ``servegym.agents`` with each of five seeds, one after another on one thread, and once
with rewards drawn from all that its environments earned so far, from which nothing can be learnt.
``--flags`` are the agent's own, as in ``--flags="--total_timesteps 200000"``. A curve has the
agent's evaluations on validation episodes by decisions and by processor seconds, from the one of
its random weights on; the heuristics play the same episodes. Each training's last policy, never
the best of its curve, plays episodes of the evaluation split beside the heuristics. Trainings
whose folders in ``--runs`` hold the same arguments are not made again, so that processes can share
the work: ``--seeds 1 2`` beside ``--seeds 3 4 5 0`` makes these alone (0: the shuffled rewards),
and the same call without ``--seeds`` then measures and writes the table.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from servegym._command_line import run_main
from servegym._files import write_json
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.stats import mean, over_trainings, student_interval
from servegym.experiments.evaluation.tables import note
from servegym.experiments.papers.plotting import pyplot, tidy
from servegym.experiments.papers.run import (
    FigureOptions,
    command_line,
    figure_parser,
    run_chosen,
    save,
)

__all__ = ["curve", "main", "shuffled_rewards", "train"]

MODULE = "servegym.experiments.studies.routing.learning_curves"
ENV_ID = "servegym/LLMRouting-v1"
AGENTS = ("ppo", "sac_han", "baseline_rl")
TABLES = (
    *(f"learning_{agent}" for agent in AGENTS),
    "learning_baseline_rl_dsa",
    "learning_baseline_rl_qos_aware",
    "learning_sac_han_rates",
)
HEURISTICS = ("least_outstanding", "priced_greedy", "expected_qos")
VALIDATION_SEED = 10_000  # of the agents' evaluations; the next rate has the next seed
SHUFFLED = "shuffled"
FILE = "arguments.json"


class Options(FigureOptions):
    """The command line.

    Attributes:
        agent: Name of a module of ``servegym.agents``.
        flags: The agent's own flags.
        trainings: How many, with seeds 1, 2, ...
        seeds: Those to train now, without a table; none: all, and measure them.
        rates: Arrival rates of the evaluations, requests/s.
        validation: Episodes of a validation and requests of each.
        runs: Folder of the trainings, one a table.
        table: Name of the table.
        no_control: Whether the training with shuffled rewards is left out.
    """

    agent: str
    flags: str
    trainings: int
    seeds: Sequence[int]
    rates: Sequence[float]
    validation: Sequence[int]
    runs: Path
    table: str
    no_control: bool


@contextmanager
def shuffled_rewards(seed: int) -> Iterator[None]:
    """Within it, vector environments pay rewards that any system earned at any step so far.

    A permutation within a step would not do: its mean tells how well the policy does that all
    systems share, and a critic learns from that which actions were taken in better times.
    """
    make_vec, rng = gym.make_vec, np.random.default_rng(seed)

    def make_shuffled(*args: Any, **kwargs: Any) -> Any:
        envs: Any = make_vec(*args, **kwargs)
        if kwargs.get("split") == "val":  # an evaluation's
            return envs
        step, earned = envs.step, []

        def shuffled(actions: Any) -> Any:
            observation, rewards, *rest = step(actions)
            earned.extend(rewards.tolist())
            drawn = rng.integers(0, len(earned), len(rewards))
            return observation, np.array([earned[k] for k in drawn]), *rest

        envs.step = shuffled
        return envs

    gym.make_vec = make_shuffled
    try:
        yield
    finally:
        gym.make_vec = make_vec


def train(agent: str, flags: Sequence[str], seed: int, folder: Path, shuffled: bool) -> Path:
    """The folder of a training, which is made unless it is there with the same arguments."""
    import tyro

    module = importlib.import_module(f"servegym.agents.{agent}")
    run = folder / f"{agent}_{SHUFFLED if shuffled else 'seed'}_{seed}"
    words = [*flags, f"--seed={seed}", f"--out_dir={folder}", f"--run_name={run.name}"]
    args = tyro.cli(module.Args, args=words, config=(tyro.conf.FlagConversionOff,))
    wanted = json.loads(json.dumps(asdict(args)))
    if (run / FILE).exists() and json.loads((run / FILE).read_text(encoding="utf-8")) == wanted:
        return run
    print(f"{agent}, seed {seed}{', rewards shuffled' if shuffled else ''}", flush=True)
    if shuffled:
        with shuffled_rewards(seed):
            module.train(args)
    else:
        module.train(args)
    write_json(run / FILE, wanted)  # last, so that a training that was cut off is made again
    return run


def curve(run: Path, rates: Sequence[float]) -> list[dict[str, Any]]:
    """Evaluations in a training's log: rows of ``rate``, ``decisions``, ``cpu_s``, ``qos``.

    Raises:
        ValueError: If the log has none at a rate.
    """
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    rows = []
    for rate in rates:
        own = f"eval/avg_qos_rate_{rate:g}"
        names = (own,) if len(rates) > 1 else (own, "eval/avg_qos", "eval/score")
        name = next((name for name in names if any(name in row for row in log)), None)
        if name is None:
            raise ValueError(f"{run}: no evaluation at {rate:g} requests/s; give --rates")
        for row in log:
            if name in row:
                when = {"decisions": row["global_step"], "cpu_s": round(row["charts/cpu_s"], 2)}
                rows.append({"rate": rate, **when, "qos": round(row[name], 5)})
    return rows


def played(policy: Any, rate: float, episodes: int, **more: Any) -> Any:
    """Average QoS (episodes,) of a policy's episodes."""
    seed = more.pop("seed", None)
    rows = evaluate(ENV_ID, [policy], episodes, seed, {"rate": rate, **more})
    return np.array([row["avg_qos"] for row in rows])


def measure(options: Options) -> None:
    """Train, play and write the table; with ``--seeds`` train alone."""
    played(HEURISTICS[0], options.rates[0], 1, episode_requests=1)  # compiles what is not yet
    flags, seeds = shlex.split(options.flags), range(1, options.trainings + 1)
    made = {
        seed: train(options.agent, flags, seed or 1, options.runs, shuffled=not seed)
        for seed in options.seeds or (*seeds, *([] if options.no_control else [0]))
    }
    if options.seeds:
        return
    runs = {seed: made[seed] for seed in seeds}
    rows: list[dict[str, Any]] = []

    def add(policy: str, split: str, training: Any = None, **found: Any) -> None:
        columns = dict.fromkeys(("rate", "decisions", "cpu_s", "qos", "low", "high"))
        rows.append({"policy": policy, "training": training, "split": split, **columns, **found})

    for seed, run in made.items():
        for row in curve(run, options.rates):
            add(options.agent if seed else SHUFFLED, "val", seed or 1, **row)
    count, requests = options.validation
    for k, rate in enumerate(options.rates):
        given = {"split": "val", "seed": VALIDATION_SEED + k, "episode_requests": requests}
        for name in HEURISTICS:
            found = played(name, rate, count, **given).mean()
            add(name, "val", rate=rate, qos=round(float(found), 5))
        more = {"episode_requests": 50} if options.quick else {}
        trained = [
            played(run / "last.safetensors", rate, options.episodes, **more)
            for run in runs.values()
        ]
        for training, scores in zip(runs, trained, strict=True):
            add(options.agent, "eval", training, rate=rate, qos=round(float(scores.mean()), 5))
        everyone = {options.agent: trained}
        everyone |= {name: [played(name, rate, options.episodes, **more)] for name in HEURISTICS}
        for name, scores in everyone.items():
            found = over_trainings(scores, statistic=mean)
            numbers = {
                key: round(value, 5)
                for key, value in zip(("qos", "low", "high"), found, strict=True)
            }
            add(name, "eval", "all" if name == options.agent else None, rate=rate, **numbers)
    arguments = json.loads((runs[1] / FILE).read_text(encoding="utf-8"))
    arguments = {k: v for k, v in arguments.items() if k not in ("seed", "out_dir", "run_name")}
    settings = {"agent": options.agent, "seeds": list(seeds), "arguments": arguments}
    save(
        options,
        options.table,
        rows,
        *findings(rows, options),
        settings=settings,
        packages=["torch"],
    )


def findings(rows: Sequence[Mapping[str, Any]], options: Options) -> Iterator[dict[str, Any]]:
    """Notes a rate: level at the end, seconds to each heuristic's, and what the control did."""
    for rate in options.rates:
        own = [row for row in rows if row["rate"] == rate]
        line = {row["policy"]: row["qos"] for row in own if row["training"] is None}
        done = {row["policy"]: row for row in own if row["split"] == "eval" and row["low"]}
        texts = [
            f"{name} {row['qos']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
            for name, row in done.items()
        ]
        yield note(
            f"{rate:g} requests/s, evaluation episodes, last policy of {options.trainings} "
            f"trainings: {', '.join(texts)}.",
            rate=rate,
            qos={name: row["qos"] for name, row in done.items()},
        )
        val = [row for row in own if row["split"] == "val"]
        curves = {
            (policy, k): [r for r in val if (r["policy"], r["training"]) == (policy, k)]
            for policy, k in dict.fromkeys((r["policy"], r["training"]) for r in val)
            if k is not None
        }
        line = {row["policy"]: row["qos"] for row in val if row["training"] is None}
        trained = [curve for (policy, _), curve in curves.items() if policy == options.agent]
        for name, level in line.items():
            times = [next((r["cpu_s"] for r in c if r["qos"] >= level), None) for c in trained]
            told = ", ".join("never" if t is None else f"{t:.0f}" for t in times)
            yield note(
                f"{rate:g} requests/s: processor seconds to {name} ({level:.3f}) on validation "
                f"episodes, by training: {told}.",
                rate=rate,
                policy=name,
                level=level,
                cpu_s=times,
            )
        first, last = (student_interval([c[k]["qos"] for c in trained]) for k in (0, -1))
        fall = max(max(r["qos"] for r in c) - c[-1]["qos"] for c in trained)
        text, ended = "", None
        if control := curves.get((SHUFFLED, 1)):
            ended = control[-1]["qos"]
            text = (
                f"; with shuffled rewards from {control[0]['qos']:.3f} to {ended:.3f}, at most "
                f"{max(r['qos'] for r in control):.3f}"
            )
        yield note(
            f"{rate:g} requests/s, validation episodes: random weights {first.value:.3f} "
            f"[{first.low:.3f}, {first.high:.3f}] (Student's interval over trainings), at the end "
            f"{last.value:.3f} [{last.low:.3f}, {last.high:.3f}], at most {fall:.3f} below the "
            f"best point of its curve{text}.",
            rate=rate,
            random=first.value,
            last=last.value,
            fall=fall,
            shuffled=ended,
        )


def _plot(rows: Sequence[Mapping[str, Any]]) -> Any:
    val = [row for row in rows if row["split"] == "val"]
    rates = list(dict.fromkeys(row["rate"] for row in val))
    figure, axes = pyplot().subplots(
        1, len(rates), figsize=(6.0 * len(rates), 4.2), squeeze=False, layout="constrained"
    )
    for axis, rate in zip(axes[0], rates, strict=True):
        own = [row for row in val if row["rate"] == rate]
        for policy, k in dict.fromkeys((row["policy"], row["training"]) for row in own):
            mine = [row for row in own if (row["policy"], row["training"]) == (policy, k)]
            if policy in HEURISTICS:
                axis.axhline(mine[0]["qos"], color="grey", linewidth=1, linestyle="--")
                axis.annotate(
                    policy, (1, mine[0]["qos"]), xycoords=("axes fraction", "data"), fontsize=8
                )
                continue
            look = {"color": "tab:red" if policy == SHUFFLED else "tab:blue", "linewidth": 1.2}
            label = {"label": policy if k == 1 else None}
            axis.plot([r["cpu_s"] for r in mine], [r["qos"] for r in mine], ".-", **look, **label)
        axis.set(xlabel="processor seconds", ylabel="QoS on validation episodes", ylim=(0, None))
        axis.set_title(f"{rate:g} requests/s", fontsize=10)
        axis.legend(fontsize=8, loc="lower right", frameon=False)
        tidy(axis)
    return figure


PICTURES = dict.fromkeys(TABLES, _plot)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, measure, print and save; see ``--help``."""
    parser = figure_parser(("learning_curves",), __doc__, MODULE, episodes=20)
    add = parser.add_argument
    add("--agent", default=AGENTS[0], help=f"agent of servegym.agents ({AGENTS[0]})")
    add("--flags", default="", help='the agent\'s own, as in --flags="--total_timesteps 200000"')
    add("--trainings", type=_positive, default=5, help="how many, with seeds 1, 2, ... (5)")
    add(
        "--seeds",
        type=int,
        nargs="+",
        default=(),
        help="train these alone and write no table; 0: with shuffled rewards",
    )
    add("--rates", type=float, nargs="+", default=[8.0], help="of the evaluations, per second (8)")
    add(
        "--validation",
        type=_positive,
        nargs=2,
        metavar=("EPISODES", "REQUESTS"),
        help="those of the agent's own evaluations, which the heuristics play too (the agent's "
        "EVAL_EPISODES and EVAL_REQUESTS, or 20 1000)",
    )
    add("--runs", type=Path, help="folder (runs/learning/TABLE)")
    add("--table", default="", help="name of the table (learning_AGENT)")
    add("--no-control", action="store_true", help="train none with shuffled rewards")
    options = command_line(parser, argv, Options())
    options.table = options.table or f"learning_{options.agent}"
    options.runs = options.runs or Path("runs/learning", options.table)
    if options.draw:
        return run_chosen({}, PICTURES, options)
    if any(not 0 <= seed <= options.trainings for seed in options.seeds):
        raise ValueError(f"seeds: got {options.seeds}; allowed are 0 to {options.trainings}")
    if options.validation is None:
        agent = importlib.import_module(f"servegym.agents.{options.agent}")
        own = (getattr(agent, "EVAL_EPISODES", 20), getattr(agent, "EVAL_REQUESTS", 1000))
        options.validation = own
    if options.quick:
        options.flags = f"--total_timesteps 2000 {options.flags}"
        options.trainings, options.validation = min(options.trainings, 2), [2, 50]
    return run_chosen({"learning_curves": measure}, PICTURES, options)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


if __name__ == "__main__":
    run_main(main)
