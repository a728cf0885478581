"""Every policy of the serverless family on held-out prompts: reward, cost, SLOs, cold starts.

``python -m servegym.experiments.figures.beyond.serverless.policies`` runs all of them on the
registered environment, both models and both presets, on the same episodes of the eval split: the
presets ``dynamic`` (functions stay warm, cold starts are billed, t_rem changes, tight SLOs) and
``seed`` (the paper's: every request cold, nothing billed for it). Policies that enumerate all
actions of every request run fewer episodes, ``--slow-episodes``. ``policies_episodes.csv`` keeps
the episodes; ``--resume`` goes on from there after a run that was cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from servegym.baselines.registry import list_policies, make_policy
from servegym.baselines.serverless_moe.system import ServerlessSystem
from servegym.envs._command_line import run_main
from servegym.envs.serverless_moe.config import DEPLOYMENTS
from servegym.experiments.evaluate import DEFAULT_SEED, evaluate
from servegym.experiments.figures.script import (
    FigureOptions,
    command_line,
    figure_parser,
    pyplot,
    run_chosen,
    tidy,
)
from servegym.experiments.figures.serverless.common import MODELS, OUT, save, with_interval
from servegym.experiments.output import print_table, read_rows, write_csv
from servegym.experiments.stats import mean, paired_difference

__all__ = ["Options", "main", "measure", "summarise"]

MODULE = "servegym.experiments.figures.beyond.serverless.policies"
ENV_ID = "servegym/ServerlessMoE-v0"
PRESETS = ("dynamic", "seed")
SLOW = ("remoe_cost", "remoe_sticky", "grid_optimum", "lookahead")
BLOCK = 5
"""Episodes that run side by side; finished blocks are kept."""
ALIKE = 5
"""Most episodes in the preset ``seed``, whose requests differ by little."""
READINGS = ("remoe", "remoe_cost", "remoe_sticky")
KEYS = (
    "mean_reward",
    "cost_over_mix",
    "ttft_violation_rate",
    "tpot_violation_rate",
    "infeasible_rate",
    "cold_rate",
    "cold_cost_share",
    "penalty",
    "mean_ttft_s",
    "mean_tpot_s",
    "mean_cold_start_s",
    "mean_remote_ratio",
    "mean_cost_usd",
    "bound",
)
"""Numbers of an episode. ``cold_rate``: requests whose main function starts cold;
``cold_cost_share``: billed starts as a share of the cost; ``penalty``: mean penalty of a request;
``bound``: reward that no policy exceeds, known of `lookahead` alone."""


class Options(FigureOptions):
    """The command line.

    Attributes:
        slow_episodes: Episodes of the policies in `SLOW`.
        resume: Whether to take finished policies from ``policies_episodes.csv``.
        requests: Requests of an episode.
    """

    slow_episodes: int
    resume: bool
    requests: int


def measure(
    name: str, model: str, preset: str, first: int, episodes: int, requests: int
) -> list[dict[str, Any]]:
    """One row an episode of a policy.

    Args:
        name: The policy.
        model: The model.
        preset: The preset.
        first: Number of the first episode.
        episodes: How many.
        requests: Requests of an episode.
    """
    kwargs = {"model": model, "preset": preset, "episode_requests": requests}
    system = ServerlessSystem.from_kwargs(split="eval", **kwargs)
    policy = make_policy(name, system, family="serverless_moe")
    bound = getattr(policy, "reward_bound", None)
    logs: dict[str, list[Any]] = {}
    found = []
    # Side by side, so that what a policy found out about each row is there afterwards.
    for row in evaluate(
        ENV_ID, [policy], episodes, DEFAULT_SEED + first, kwargs, num_envs=episodes, logs=logs
    ):
        log = logs[name][row["episode"]]
        late = log["ttft_violated"] + log["tpot_violated"]
        broken = log["main_memory"] + log["remote_memory"] + log["payload"] > 0
        row = row | {
            "cold_rate": 1.0 - row["main_warm_rate"],
            "cold_cost_share": float(log["cost_cold_usd"].sum() / log["cost_usd"].sum()),
            "penalty": system.penalty * float(np.where(broken, 2, late).mean()),
            "bound": bound(row["episode"]) / requests if bound else float("nan"),
        }
        about = {"model": model, "preset": preset, "policy": name, "seed": row["seed"]}
        found.append(about | {"requests": requests} | {key: float(row[key]) for key in KEYS})
    return found


def summarise(episodes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a model, preset and policy: means over episodes.

    The reward and the cost over MIX carry 95 % bootstrap intervals over episodes;
    ``over_mix_policy`` is the reward minus that of ``mix`` on the same episodes.
    """
    rows = []
    for model, preset, name in dict.fromkeys(
        (e["model"], e["preset"], e["policy"]) for e in episodes
    ):
        point = [e for e in episodes if (e["model"], e["preset"]) == (model, preset)]
        own = [e for e in point if e["policy"] == name]
        mix = {e["seed"]: e["mean_reward"] for e in point if e["policy"] == "mix"}
        row = {"model": model, "preset": preset, "policy": name, "episodes": len(own)}
        row["first_seed"], row["requests"] = own[0]["seed"], own[0]["requests"]
        for key in KEYS:
            values = np.array([e[key] for e in own])
            if key in ("mean_reward", "cost_over_mix"):
                row |= with_interval(key, values)
            else:
                row[key] = float(values.mean())
        paired = [e for e in own if e["seed"] in mix]
        difference = paired_difference(
            [e["mean_reward"] for e in paired], [mix[e["seed"]] for e in paired], mean
        )
        row |= dict(zip(("minus_mix", "minus_mix_low", "minus_mix_high"), difference, strict=True))
        rows.append(row)
    return rows


def policies(options: Options) -> None:
    """The table and its figure."""
    names = [info.name for info in list_policies("serverless_moe")]
    names = [name for name in names if name != "random"] + ["random"]
    path = options.out / "policies_episodes.csv"
    episodes = read_rows(path) if options.resume and path.exists() else []
    for model in MODELS:
        for preset in PRESETS:
            for name in names:
                number = options.slow_episodes if name in SLOW else options.episodes
                number = min(number, ALIKE) if preset == "seed" else number
                here: dict[str, Any] = {"model": model, "preset": preset, "policy": name}
                here["requests"] = options.requests
                done = sum(all(e[key] == v for key, v in here.items()) for e in episodes)
                for first in range(done, number, BLOCK):
                    block = min(BLOCK, number - first)
                    episodes += measure(name, model, preset, first, block, options.requests)
                    write_csv(path, episodes)
                    print(f"{model}, {preset}: {name}, {first + block} episodes", flush=True)
    order = {name: k for k, name in enumerate(names)}
    episodes.sort(key=lambda e: (e["model"], e["preset"], order[e["policy"]], e["seed"]))
    write_csv(path, episodes)
    rows = summarise(episodes)
    lines = []
    for model in MODELS:
        for preset in PRESETS:
            own = [row for row in rows if (row["model"], row["preset"]) == (model, preset)]
            _print(f"{model}, preset {preset}", own)
            lines += _verdicts(f"{model}, {preset}", own)
    lines.append(
        "remoe and remoe_cost rank experts anew for every prompt, so that functions seldom match "
        "what is warm; remoe_sticky plans for the shared order; grid_optimum takes the best action "
        "of the request at hand, lookahead plans the whole episode"
    )
    settings = {
        "environment": f"{ENV_ID}, split eval, {options.requests} requests an episode",
        "episodes": f"at least {options.episodes}, of {', '.join(SLOW)} at least "
        f"{options.slow_episodes}, in the preset seed {ALIKE} or as many as were there",
    }
    save(options, "policies", rows, _draw(rows), *lines, settings=settings)


def _print(title: str, rows: Sequence[dict[str, Any]]) -> None:
    print_table(
        title,
        [
            "policy",
            "reward",
            "95 %",
            "episodes",
            "cost/MIX",
            "late TTFT %",
            "late TPOT %",
            "infeasible %",
            "cold %",
            "cold cost %",
            "remote %",
            "minus mix",
        ],
        [
            [
                row["policy"],
                f"{row['mean_reward']:.3f}",
                f"{row['mean_reward_low']:.3f}..{row['mean_reward_high']:.3f}",
                str(row["episodes"]),
                f"{row['cost_over_mix']:.3f}",
                *(
                    f"{100 * row[key]:.1f}"
                    for key in (
                        "ttft_violation_rate",
                        "tpot_violation_rate",
                        "infeasible_rate",
                        "cold_rate",
                        "cold_cost_share",
                        "mean_remote_ratio",
                    )
                ),
                f"{row['minus_mix']:+.3f} [{row['minus_mix_low']:+.3f}, "
                f"{row['minus_mix_high']:+.3f}]",
            ]
            for row in sorted(rows, key=lambda row: -row["mean_reward"])
        ],
    )


def _verdicts(title: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """What a table says, in words."""
    by = {row["policy"]: row for row in rows}
    seeing, fixed = ("grid_optimum", "lookahead"), set(DEPLOYMENTS) - {"plan"}
    ranked, alike = (
        sorted(group, key=lambda row: -row["mean_reward"])
        for group in (
            [row for row in rows if row["policy"] not in {*seeing, *fixed}],
            [row for row in rows if row["policy"] in fixed],
        )
    )
    best = ranked[0]
    lines = [
        f"{title}: ranked by mean reward "
        + _order(ranked)
        + f"; deployments that decide nothing: {_order(alike)}; with the future known: "
        f"grid_optimum {by['grid_optimum']['mean_reward']:.3f}, "
        f"lookahead {by['lookahead']['mean_reward']:.3f}, no policy above "
        f"{by['lookahead']['bound']:.3f}",
        f"{title}: {best['policy']} is the best that sees what a controller sees; from MIX "
        f"({by['mix']['mean_reward']:.3f}) to lookahead it closes "
        f"{100 * _closed(best, by):.0f} % of the distance",
        f"{title}: even lookahead misses the TTFT limit of "
        f"{100 * by['lookahead']['ttft_violation_rate']:.0f} % and the TPOT limit of "
        f"{100 * by['lookahead']['tpot_violation_rate']:.0f} % of the requests",
    ]
    for name in READINGS:
        row, mix = by[name], by["mix"]
        low, high = row["minus_mix_low"], row["minus_mix_high"]
        how = "loses to" if high < 0 else "beats" if low > 0 else "cannot be told from"
        lines.append(
            f"{title}: {name} {how} MIX, {row['minus_mix']:+.3f} [{low:+.3f}, {high:+.3f}] on the "
            f"same episodes; of its requests {100 * row['cold_rate']:.0f} % start cold (MIX "
            f"{100 * mix['cold_rate']:.0f} %), starts are {100 * row['cold_cost_share']:.0f} % of "
            f"its cost (MIX {100 * mix['cold_cost_share']:.0f} %), penalties {row['penalty']:.3f} "
            f"a request (MIX {mix['penalty']:.3f}), the rest of its cost is "
            f"{_running(row):.2f} of MIX's cost cold (MIX {_running(mix):.2f})"
        )
    return lines


def _order(rows: Sequence[dict[str, Any]]) -> str:
    return " > ".join(f"{row['policy']} {row['mean_reward']:.3f}" for row in rows)


def _closed(row: dict[str, Any], by: dict[str, dict[str, Any]]) -> float:
    low, high = by["mix"]["mean_reward"], by["lookahead"]["mean_reward"]
    return (row["mean_reward"] - low) / (high - low)


def _running(row: dict[str, Any]) -> float:
    return row["cost_over_mix"] * (1.0 - row["cold_cost_share"])


def _draw(rows: Sequence[dict[str, Any]]) -> Any:
    """A panel a model and preset: minus the reward, split into cost and penalties."""
    plt = pyplot()
    models = list(dict.fromkeys(row["model"] for row in rows))
    size = (5.5 * len(models), 7.2)
    figure, axes = plt.subplots(2, len(models), figsize=size, squeeze=False, layout="constrained")
    points = [(model, preset) for preset in PRESETS for model in models]
    for axis, (model, preset) in zip(axes.flat, points, strict=True):
        own = [row for row in rows if (row["model"], row["preset"]) == (model, preset)]
        own.sort(key=lambda row: row["mean_reward"])
        at = np.arange(len(own))
        loss = np.array([-row["mean_reward"] for row in own])
        penalty = np.array([row["penalty"] for row in own])
        bars = [
            [-row["mean_reward"] + row["mean_reward_high"] for row in own],
            [row["mean_reward"] - row["mean_reward_low"] for row in own],
        ]
        colours = [_colour(row["policy"]) for row in own]
        axis.set_axisbelow(True)
        axis.barh(at, loss - penalty, color=colours)
        axis.barh(at, penalty, left=loss - penalty, color=colours, alpha=0.4)
        axis.errorbar(loss, at, xerr=np.maximum(bars, 0.0), fmt="none", ecolor="black", lw=0.9)
        axis.set_yticks(at, [row["policy"] for row in own], fontsize=8)
        (bound,) = (-row["bound"] for row in own if row["policy"] == "lookahead")
        axis.axvline(bound, color="black", lw=0.8, ls=":")
        axis.set_title(f"{model}, preset {preset}", fontsize=10)
        tidy(axis)
    for axis in axes[-1]:
        axis.set_xlabel("cost + penalties of a request / its MIX cost cold (less is better)")
    figure.suptitle(
        "Full: cost; pale: penalties; dotted: bound of all plans; red: the paper's controller and "
        "its readings, purple: deployments that decide nothing, green: knows the future",
        fontsize=9,
    )
    return figure


def _colour(name: str) -> str:
    if name in READINGS:
        return "tab:red"
    if name in DEPLOYMENTS:
        return "tab:purple"
    return {"grid_optimum": "tab:green", "lookahead": "tab:green", "random": "tab:gray"}.get(
        name, "tab:blue"
    )


FIGURES = {"policies": policies}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns 0."""
    parser = figure_parser(tuple(FIGURES), __doc__, MODULE, 20, OUT)
    parser.add_argument("--slow-episodes", type=int, help=f"episodes of {', '.join(SLOW)} (8)")
    parser.add_argument("--requests", type=int, help="requests of an episode (200)")
    parser.add_argument("--resume", action="store_true", help="keep what policies_episodes.csv has")
    options = command_line(parser, argv, Options())
    if options.slow_episodes is None:
        options.slow_episodes = min(8, options.episodes)
    if options.requests is None:
        options.requests = 10 if options.quick else 200
    for argument in ("slow_episodes", "requests"):
        if getattr(options, argument) < 1:
            given = getattr(options, argument)
            raise ValueError(f"{argument} is {given}; allowed is 1 or more")
    return run_chosen(FIGURES, options)


if __name__ == "__main__":
    run_main(main)
