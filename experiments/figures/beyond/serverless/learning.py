"""What PPO learns on the serverless family: curves, and a table against the heuristics.

``python -m servegym.experiments.figures.beyond.serverless.learning --checkpoints runs/serverless``
reads the folders of ``agents/ppo_serverless.py`` in there, one a seed. ``--figure baselines`` runs
the policies that it is compared with (``learning_baselines.csv``, one row an episode; what is there
is not run again), ``learning`` the checkpoints on the same episodes of the eval split, and
``seed_preset`` asks what is left to learn where every request is alike and cold. ``--model`` names
another model than the default one; its tables carry its name.

The share of a gap that is closed is ``(PPO - policy) / (lookahead - policy)``, its interval from a
bootstrap over the shared episodes. `lookahead` knows all requests, gaps and overheads to come, and
plans with them; it is a reference, not a bound. `warm_planner` reads the constants of the
environment that generates the requests, which the network does not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.agents import load_policy
from servegym.baselines.protocol import Observation, WrappedPolicy
from servegym.envs._command_line import run_main
from servegym.experiments.evaluate import DEFAULT_SEED, evaluate
from servegym.experiments.figures.plotting import pyplot, tidy
from servegym.experiments.figures.run import (
    FigureOptions,
    Picture,
    Pictures,
    command_line,
    figure_parser,
    run_chosen,
    save,
)
from servegym.experiments.figures.serverless.common import MODELS, with_interval
from servegym.experiments.output import print_table, write_csv
from servegym.experiments.stats import mean, over_trainings
from servegym.experiments.tables import Table, note

__all__ = ["Options", "Recorder", "closed", "curves", "main", "shares"]

MODULE = "servegym.experiments.figures.beyond.serverless.learning"
ENV_ID = "servegym/ServerlessMoE-v0"
BASELINES = (
    "mix",
    "fetch",
    "keep_alive",
    "best_constant",
    "greedy_warm",
    "remoe_sticky",
    "warm_planner",
    "lookahead",
)
BLOCK = 5
"""Episodes that run side by side; the table grows by as many."""
RIVALS = ("best_constant", "remoe_sticky", "greedy_warm", "warm_planner")
REWARD = ("mean_reward", "mean_reward_low", "mean_reward_high")
PARTS = ("b", "order", "w", "y", "z")
KEYS = (
    "mean_reward",
    "cost_over_mix",
    "ttft_violation_rate",
    "tpot_violation_rate",
    "infeasible_rate",
    "main_warm_rate",
    "mean_remote_ratio",
)


class Options(FigureOptions):
    """The command line.

    Attributes:
        checkpoints: Folder of the training runs, None without.
        model: Name of the model.
    """

    checkpoints: Path | None
    model: str

    @property
    def suffix(self) -> str:
        """Of the names of the tables: none for the default model."""
        return "" if self.model == MODELS[0] else "_" + re.sub(r"\W", "_", self.model)


class Recorder(WrappedPolicy):
    """A policy that remembers the actions of another.

    Attributes:
        actions: The actions (B, parts) of every call.
    """

    def __init__(self, policy: Any, name: str) -> None:
        super().__init__(policy, name)
        self.actions: list[NDArray[np.int64]] = []

    def act(
        self, observation: Observation, action_mask: NDArray[np.integer[Any]]
    ) -> NDArray[np.int64]:
        """See `Policy.act`."""
        self.actions.append(super().act(observation, action_mask))
        return self.actions[-1]


def shares(actions: Sequence[NDArray[np.int64]]) -> dict[str, float]:
    """How varied the actions (T arrays of (B, parts)) are.

    Returns:
        ``repeated``: share of requests with the plan of the request before; ``plans``: different
        plans; for each part ``entropy_<part>`` of its choices over requests in nats and
        ``commonest_<part>``, the share of the commonest choice. A constant has 1, 1, 0 and 1.
    """
    plans = np.stack(actions)
    flat = plans.reshape(-1, plans.shape[-1])
    found = {
        "repeated": float((plans[1:] == plans[:-1]).all(2).mean()),
        "plans": float(len(np.unique(flat, axis=0))),
    }
    for k, part in enumerate(PARTS):
        share = np.unique(flat[:, k], return_counts=True)[1] / len(flat)
        found[f"entropy_{part}"] = float(abs((share * np.log(share)).sum()))
        found[f"commonest_{part}"] = float(share.max())
    return found


def closed(
    policy: NDArray[np.float64],
    rival: NDArray[np.float64],
    ahead: NDArray[np.float64],
) -> tuple[float, float, float]:
    """Share of the gap from ``rival`` to ``ahead`` that ``policy`` closes, with its 95 % interval.

    The interval is over trainings and episodes together (`stats.over_trainings`), of the excess of
    the policy over the line that closes the same share in every episode (Fieller's linearisation).

    Args:
        policy: Mean rewards of the episodes (E,), or of several trainings (T, E).
        rival: Of the same episodes (E,).
        ahead: Of the same episodes, of the reference.
    """
    each, gap = np.atleast_2d(policy) - rival, ahead - rival
    share = float(each.mean() / gap.mean())
    around = over_trainings(list(each - share * gap), statistic=mean)
    return share, share + around.low / gap.mean(), share + around.high / gap.mean()


def curves(folder: Path) -> list[dict[str, Any]]:
    """Training and validation rewards by step of all runs in a folder.

    Returns:
        Rows of ``run``, ``step``, ``quantity`` (``val_reward``: the greedy policy on the same
        validation episodes; ``train_reward``: the exploring policy, mean since the last row;
        ``entropy``: of the exploring policy in nats, gate and parts) and ``value``.
    """
    rows: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*/metrics.jsonl")):
        since: dict[str, list[float]] = {"train_reward": [], "entropy": []}
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if entry["global_step"]:  # at 0 there is the policy that imitates, nothing of PPO
                since["train_reward"].append(entry["charts/reward"])
                since["entropy"].append(entry["losses/entropy"])
            if "eval/score" not in entry:
                continue
            values = {"val_reward": entry["eval/score"]}
            values |= {name: float(np.mean(found)) for name, found in since.items() if found}
            since = {name: [] for name in since}
            rows += [
                {
                    "run": path.parent.name,
                    "step": entry["global_step"],
                    "quantity": name,
                    "value": round(value, 5),
                }
                for name, value in values.items()
            ]
    return rows


def measure(policy: Any, first: int, episodes: int, **kwargs: Any) -> list[dict[str, Any]]:
    """One row of numbers an episode of the eval split, from episode ``first`` on."""
    rows = evaluate(
        ENV_ID, [policy], episodes, DEFAULT_SEED + first, env_kwargs=kwargs, num_envs=episodes
    )
    return [
        {"policy": row["policy"], "seed": row["seed"]} | {key: float(row[key]) for key in KEYS}
        for row in rows
    ]


def baselines(options: Options) -> list[dict[str, Any]]:
    """Episodes of the policies that PPO is compared with, measured block by block."""
    table = Table(options.out / f"learning_baselines{options.suffix}.csv", ("policy", "seed"))
    seeds = range(DEFAULT_SEED, DEFAULT_SEED + options.episodes)
    for name in BASELINES:
        while missing := table.missing((name, seed) for seed in seeds):
            first = missing[0][1] - DEFAULT_SEED
            block = min(BLOCK, len(missing))
            table.update(measure(name, first, block, model=options.model))
            print(f"baselines: {name}, {first + BLOCK} episodes", flush=True)
    return [row for row in table.rows if row["seed"] in seeds]


def _summary(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"policy": name, "episodes": len(rows)}
    found |= with_interval(REWARD[0], np.array([row["mean_reward"] for row in rows]))
    for key in KEYS[1:]:
        found[key] = float(np.mean([row[key] for row in rows]))
    return found


def learning(options: Options) -> None:
    """Curves of the runs, and their checkpoints against the baselines."""
    if options.checkpoints is None:
        print("learning: no training runs (--checkpoints FOLDER), left out")
        return
    runs = sorted(path.parent for path in options.checkpoints.glob("*/best.safetensors"))
    if not runs:
        raise ValueError(f"checkpoints: no run with best.safetensors in {options.checkpoints}")
    rivals = baselines(options)
    learnt, variety = [], {}
    for path in runs:
        policy = Recorder(load_policy(path), f"ppo_serverless {path.name}")
        learnt += measure(policy, 0, options.episodes, model=options.model)
        variety[policy.name] = shares(policy.actions)
    rewards = {
        name: np.array([row["mean_reward"] for row in rivals if row["policy"] == name])
        for name in BASELINES
    }
    each = np.array([[r["mean_reward"] for r in learnt if r["policy"] == n] for n in variety])
    rows = [_summary([r for r in rivals if r["policy"] == name], name) for name in BASELINES]
    pooled = _summary(learnt, "ppo_serverless, all seeds")
    pooled |= dict(zip(REWARD, over_trainings(list(each), statistic=mean), strict=True))
    for row, values in [(pooled, each)] + [
        (_summary([r for r in learnt if r["policy"] == name], name), one[None])
        for name, one in zip(variety, each, strict=True)
    ]:
        for rival in RIVALS:
            share = closed(values, rewards[rival], rewards["lookahead"])
            ends = ("", "_low", "_high")
            row |= {f"closed_{rival}{e}": v for e, v in zip(ends, share, strict=True)}
            more = over_trainings(list(values), rewards[rival], mean)
            row |= {f"minus_{rival}{e}": v for e, v in zip(ends, more, strict=True)}
        rows.append(row | variety.get(row["policy"], {}))
    keys = list(dict.fromkeys(key for row in rows for key in row))
    rows = [{key: row.get(key, "") for key in keys} for row in rows]
    _print(rows)
    points = curves(options.checkpoints)
    write_csv(options.out / f"learning_curves{options.suffix}.csv", points)
    settings = {
        "environment": f"{ENV_ID}, {options.model}, preset dynamic, split eval",
        "intervals": "of all seeds over trainings and episodes, else over episodes",
        "training": ", ".join(path.name for path in runs),
    }
    save(options, f"learning{options.suffix}", rows, *_findings(rows), settings=settings)


def _findings(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What PPO gains over each rival, and how varied its plans are."""
    by_name = {row["policy"]: row for row in rows}
    ours = by_name["ppo_serverless, all seeds"]
    notes = []
    for rival in RIVALS:
        other = by_name[rival]
        apart = ours[f"minus_{rival}_low"] > 0
        share, low, high = (ours[f"closed_{rival}{end}"] for end in ("", "_low", "_high"))
        text = (
            f"ppo_serverless {'beats' if apart else 'does not clearly beat'} {rival}: mean reward "
            f"{ours['mean_reward']:.3f} [{ours['mean_reward_low']:.3f}, "
            f"{ours['mean_reward_high']:.3f}] against {other['mean_reward']:.3f} "
            f"[{other['mean_reward_low']:.3f}, {other['mean_reward_high']:.3f}], on the same "
            f"episodes {ours[f'minus_{rival}']:+.4f} [{ours[f'minus_{rival}_low']:+.4f}, "
            f"{ours[f'minus_{rival}_high']:+.4f}]; it closes {100 * share:.0f} % "
            f"[{100 * low:.0f}, {100 * high:.0f}] of the rival's gap to lookahead."
        )
        notes.append(note(text, rival=rival, apart=apart, closed=[share, low, high]))
    each = [row for row in rows if row.get("plans")]
    for row in each:
        parts = ", ".join(
            f"{part} {row[f'entropy_{part}']:.2f} ({100 * row[f'commonest_{part}']:.0f} %)"
            for part in PARTS
        )
        text = (
            f"{row['policy']} makes {row['plans']:.0f} different plans, and "
            f"{100 * row['repeated']:.0f} % repeat the one before; entropy in nats (share of the "
            f"commonest choice): {parts}."
        )
        notes.append(note(text, policy=row["policy"], plans=row["plans"]))
    return notes


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    print_table(
        "preset dynamic, split eval",
        [
            "policy",
            "reward",
            "95 %",
            "cost/MIX",
            "late TTFT %",
            "late TPOT %",
            "warm %",
            *(f"closed {rival}" for rival in RIVALS),
        ],
        [
            [
                row["policy"],
                f"{row['mean_reward']:.4f}",
                f"{row['mean_reward_low']:.3f}..{row['mean_reward_high']:.3f}",
                f"{row['cost_over_mix']:.3f}",
                *(
                    f"{100 * row[key]:.1f}"
                    for key in ("ttft_violation_rate", "tpot_violation_rate", "main_warm_rate")
                ),
                *(
                    f"{100 * row[f'closed_{rival}']:.0f} %" if row[f"closed_{rival}"] != "" else ""
                    for rival in RIVALS
                ),
            ]
            for row in sorted(rows, key=lambda row: -row["mean_reward"])
        ],
    )


def _plot(rows: Sequence[Mapping[str, Any]], points: Sequence[Mapping[str, Any]]) -> Any:
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.0), layout="constrained")
    colours = {"val_reward": "tab:blue", "train_reward": "tab:grey"}
    labels = {"val_reward": "greedy, validation", "train_reward": "exploring, training"}
    for quantity, colour in colours.items():
        for k, name in enumerate(dict.fromkeys(p["run"] for p in points)):
            own = [p for p in points if (p["run"], p["quantity"]) == (name, quantity)]
            left.plot(
                [p["step"] / 1e6 for p in own],
                [p["value"] for p in own],
                color=colour,
                alpha=0.8,
                label=labels[quantity] if not k else None,
            )
    least = min(p["value"] for p in points if p["quantity"] in colours)
    left.set(
        xlabel="requests (million)",
        ylabel="mean reward a request",
        title="Training, one line a seed",
        ylim=(max(least - 0.02, -1.0), None),
    )
    left.legend(frameon=False, loc="lower right")
    shown = sorted(rows, key=lambda row: row["mean_reward"])
    values = np.array([row["mean_reward"] for row in shown])
    ends = np.array([[row["mean_reward_low"], row["mean_reward_high"]] for row in shown]).T
    names = [
        row["policy"] + (" (clairvoyant)" if row["policy"] == "lookahead" else "") for row in shown
    ]
    tint = ["tab:blue" if name.startswith("ppo") else "tab:grey" for name in names]
    for k, colour in enumerate(tint):
        right.errorbar(
            values[k],
            k,
            xerr=[[values[k] - ends[0, k]], [ends[1, k] - values[k]]],
            fmt="o",
            color=colour,
            capsize=3,
            markersize=4,
        )
    right.set_yticks(range(len(names)), names, fontsize=8)
    right.set(xlabel="mean reward a request, 95 % interval", title="Held-out prompts")
    for axis in (left, right):
        tidy(axis)
    return figure


def seed_preset(options: Options) -> None:
    """The paper's preset: how far one constant action is from the optimum."""
    names = ("mix", "best_constant", "greedy_warm", "grid_optimum")
    count = min(options.episodes, 8)
    rows = [
        _summary(measure(name, 0, count, preset="seed", episode_requests=50), name)
        for name in names
    ]
    constant, best = -rows[1]["mean_reward"], -rows[3]["mean_reward"]
    text = (
        f"preset seed: cost and penalties of best_constant are {constant:.4f} of MIX, those of "
        f"the clairvoyant optimum of every request {best:.4f}: {100 * (constant / best - 1):.2f} % "
        "are left, so that nothing learnt there would prove anything"
    )
    save(options, "learning_seed_preset", rows, text)


ONE_JOB = True
"""The figures read each other's tables, so that a cluster runs them in one job."""
FIGURES = {"baselines": baselines, "learning": learning, "seed_preset": seed_preset}
PICTURES: Pictures = {
    name: Picture(_plot, (name, name.replace("learning", "learning_curves")))
    for name in ("learning", "learning_gpt_oss_20b")
}


def main(argv: Sequence[str] | None = None) -> int:
    """Make the figures that the command line names.

    Args:
        argv: The command line; that of the process by default.
    """
    parser = figure_parser(tuple(FIGURES), __doc__, MODULE, 20)
    parser.add_argument("--checkpoints", type=Path, help="folder of the training runs")
    parser.add_argument("--model", choices=MODELS, default=MODELS[0], help="the model")
    return run_chosen(FIGURES, PICTURES, command_line(parser, argv, Options()))


if __name__ == "__main__":
    run_main(main)
