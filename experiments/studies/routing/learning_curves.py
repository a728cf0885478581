"""How an agent learns to route from random weights: curves over trainings, with a control.

``python -m servegym.experiments.studies.routing.learning_curves --figure learning_ppo`` makes a
table of `TRAININGS`: it trains the table's agent with each of five seeds, one after another on one
thread, and once with rewards drawn from all that its environments earned so far, from which
nothing can be learnt. A curve has the agent's evaluations on validation episodes by decisions and
by processor seconds, from the one of its random weights on; the heuristics play the same episodes.
Each training's last policy, never the best of its curve, plays episodes of the evaluation split
beside the heuristics. Trainings whose folders in ``--runs`` hold the same arguments are not made
again, so that processes can share the work: ``--seeds 1 2`` beside ``--seeds 3 4 5 0`` makes these
alone (0: the shuffled rewards), and the same call without ``--seeds`` measures and writes the
table.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import gymnasium as gym
import numpy as np

from servegym._command_line import run_main
from servegym._files import write_json
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.stats import mean, over_trainings, student_interval
from servegym.experiments.evaluation.tables import Note, note
from servegym.experiments.papers import study
from servegym.experiments.papers.study import Study, command
from servegym.experiments.papers.verdicts import Rows, pick, split

__all__ = ["STUDIES", "TRAININGS", "Training", "curve", "main", "shuffled_rewards", "train"]

ENV_ID = "servegym/LLMRouting-v1"


class Training(NamedTuple):
    """The trainings of a table.

    Attributes:
        agent: Name of a module of ``servegym.agents``.
        flags: The agent's own.
        rates: Arrival rates of the evaluations, requests/s.
        validation: Episodes of the agent's evaluations and requests of each, which the heuristics
            play, too; those of its module by default.
    """

    agent: str
    flags: str
    rates: tuple[float, ...] = (8.0,)
    validation: tuple[int, int] | None = None


TRAININGS = {
    "learning_ppo": Training("ppo", "--eval_episodes 10", validation=(10, 1000)),
    "learning_sac_rows": Training("sac_rows", "", (5.0, 8.0, 10.0)),
    "learning_sac_han": Training("sac_han", "", (5.0, 8.0, 10.0)),
    "learning_td_afterstates": Training("td_afterstates", "", (5.0, 8.0, 10.0)),
}
"""Table -> its trainings."""

SEEDS = (1, 2, 3, 4, 5)
HEURISTICS = ("least_outstanding", "priced_greedy", "expected_qos")
VALIDATION_SEED = 10_000  # of the agents' evaluations; the next rate has the next seed
SHUFFLED = "shuffled"
FILE = "arguments.json"


class Options(study.Options):
    """The command line.

    Attributes:
        flags: The agent's own, after those of the table.
        seeds: Those to train now, without a table; none: all, and measure them.
        runs: Folder of the trainings, with a folder a table.
    """

    flags: str
    seeds: Sequence[int]
    runs: Path


@contextmanager
def shuffled_rewards(seed: int, agent: Any = None) -> Iterator[None]:
    """Within it, an agent learns from rewards that any system earned at any step so far.

    A permutation within a step would not do: its mean tells how well the policy does that all
    systems share, and a critic learns from that which actions were taken in better times. A module
    with a ``ReplayBuffer`` gets them there, after it has added to the environment's rewards; one
    that reads what became of requests is told another one's.
    """
    make_vec, rng = gym.make_vec, np.random.default_rng(seed)
    earned: list[float] = []

    def shuffle(rewards: Any) -> Any:
        earned.extend(rewards.tolist())
        drawn = rng.integers(0, len(earned), len(rewards))
        return np.array([earned[k] for k in drawn], rewards.dtype)

    def make_shuffled(*args: Any, **kwargs: Any) -> Any:
        envs: Any = make_vec(*args, **kwargs)
        if kwargs.get("split") == "val":  # an evaluation's
            return envs
        step = envs.step

        def shuffled(actions: Any) -> Any:
            observation, rewards, *rest = step(actions)
            return observation, shuffle(rewards), *rest

        envs.step = shuffled
        return envs

    if buffer := getattr(agent, "ReplayBuffer", None):
        plain = buffer.add

        def add(self: Any, **step: Any) -> None:
            plain(self, **step | {"reward": shuffle(step["reward"])})

        replaced = patch.object(buffer, "add", add)
    elif reader := getattr(agent, "OutcomeReader", None):
        told = reader.read

        def read(self: Any) -> Any:
            ended = told(self)
            ended["qos"] = shuffle(ended["qos"])
            return ended

        replaced = patch.object(reader, "read", read)
    else:
        replaced = patch.object(gym, "make_vec", make_shuffled)
    with replaced:
        yield


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
    shutil.rmtree(run, ignore_errors=True)
    print(f"{agent}, seed {seed}{', rewards shuffled' if shuffled else ''}", flush=True)
    if shuffled:
        with shuffled_rewards(seed, module):
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


def _measured(options: Options, at: dict[str, str], _: Sequence[str]) -> list[dict[str, Any]]:
    """Train and play; with ``--seeds`` train alone."""
    given = TRAININGS[at["table"]]
    played(HEURISTICS[0], given.rates[0], 1, episode_requests=1)  # compiles what is not yet
    flags = shlex.split(given.flags) + shlex.split(options.flags)
    seeds = SEEDS[:2] if options.quick else SEEDS
    folder = options.runs / at["table"]
    made = {
        seed: train(given.agent, flags, seed or 1, folder, shuffled=not seed)
        for seed in options.seeds or (*seeds, 0)
    }
    if options.seeds:
        return []
    rows: list[dict[str, Any]] = []

    def add(policy: str, split: str, training: Any = None, **found: Any) -> None:
        columns = dict.fromkeys(("rate", "decisions", "cpu_s", "qos", "low", "high"))
        rows.append({"policy": policy, "training": training, "split": split, **columns, **found})

    for seed, run in made.items():
        for row in curve(run, given.rates):
            add(given.agent if seed else SHUFFLED, "val", seed or 1, **row)
    agent = importlib.import_module(f"servegym.agents.{given.agent}")
    own = getattr(agent, "EVAL_EPISODES", 20), getattr(agent, "EVAL_REQUESTS", 1000)
    count, requests = (2, 50) if options.quick else given.validation or own
    more = {"episode_requests": 50} if options.quick else {}
    for k, rate in enumerate(given.rates):
        same = {"split": "val", "seed": VALIDATION_SEED + k, "episode_requests": requests}
        for name in HEURISTICS:
            found = played(name, rate, count, **same).mean()
            add(name, "val", rate=rate, qos=round(float(found), 5))
        trained = [
            played(made[seed] / "last.safetensors", rate, options.episodes, **more)
            for seed in seeds
        ]
        for seed, scores in zip(seeds, trained, strict=True):
            add(given.agent, "eval", seed, rate=rate, qos=round(float(scores.mean()), 5))
        everyone = {given.agent: trained}
        everyone |= {name: [played(name, rate, options.episodes, **more)] for name in HEURISTICS}
        for name, scores in everyone.items():
            found = over_trainings(scores, statistic=mean)
            numbers = zip(("qos", "low", "high"), (round(x, 5) for x in found), strict=True)
            add(name, "eval", "all" if name == given.agent else None, rate=rate, **dict(numbers))
    return rows


def findings(options: Any, rows: Rows) -> Iterator[Note]:
    """Notes a rate: level at the end, seconds to each heuristic's, and what the control did."""
    for at, own in split(rows, "rate"):
        rate = at["rate"]
        done = {row["policy"]: row for row in own if row["split"] == "eval" and row["low"]}
        texts = [
            f"{name} {row['qos']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
            for name, row in done.items()
        ]
        val = pick(own, split="val")
        line = {row["policy"]: row["qos"] for row in val if row["training"] is None}
        curves = {
            (one["policy"], one["training"]): part
            for one, part in split(val, "policy", "training")
            if one["training"] is not None
        }
        trained = [part for (policy, _), part in curves.items() if policy != SHUFFLED]
        yield note(
            f"{rate:g} requests/s, plain means over evaluation episodes, last policy of "
            f"{len(trained)} trainings: {', '.join(texts)}.",
            rate=rate,
            qos={name: row["qos"] for name, row in done.items()},
        )
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
        control = [row["qos"] for row in curves[SHUFFLED, 1]]
        yield note(
            f"{rate:g} requests/s, validation episodes: random weights {first.value:.3f} "
            f"[{first.low:.3f}, {first.high:.3f}] (Student's interval over trainings), at the end "
            f"{last.value:.3f} [{last.low:.3f}, {last.high:.3f}], at most {fall:.3f} below the "
            f"best point of its curve; with shuffled rewards from {control[0]:.3f} to "
            f"{control[-1]:.3f}, at most {max(control):.3f}.",
            rate=rate,
            random=first.value,
            last=last.value,
            fall=fall,
            shuffled=control[-1],
        )


def _study(table: str) -> Study:
    return Study(
        table,
        table,
        _measured,
        lambda options: ({"table": table},),
        notes=findings,
        facts=lambda options: TRAININGS[table]._asdict(),
        packages=("torch",),
    )


STUDIES = tuple(map(_study, TRAININGS))


def _add(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--flags", default="", help='the agent\'s own, as in --flags="--total_timesteps 200000"')
    words = "train these alone and write no table; 0: with shuffled rewards"
    add("--seeds", type=int, nargs="+", choices=(0, *SEEDS), default=(), help=words)
    words = "folder of trainings (runs/learning)"
    add("--runs", type=Path, default=Path("runs/learning"), help=words)


def _prepare(options: Options) -> None:
    if options.quick:
        options.flags = f"--total_timesteps 2000 {options.flags}"


main = command(__spec__.name, __doc__, STUDIES, 20, _add, _prepare)

if __name__ == "__main__":
    run_main(main)
