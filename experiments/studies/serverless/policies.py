"""Every policy of the serverless family on held-out prompts: reward, cost, SLOs, cold starts.

``python -m servegym.experiments.studies.serverless.policies`` runs all of them on the
registered environment, both models and both presets, on the same episodes of the eval split: the
presets ``dynamic`` (functions stay warm, cold starts are billed, t_rem changes, tight SLOs) and
``seed`` (the paper's: every request cold, nothing billed for it). Policies that enumerate all
actions of every request run fewer episodes, ``--slow-episodes``. ``policies_episodes.csv`` keeps
the episodes; ``--resume`` goes on from there after a run that was cut off, but measures anew the
policies that ``--again`` names, for the models that ``--models`` names.

``--figure gpus`` plays the default model with every GPU profile, chosen and derived.

`lookahead` plans with the whole episode known, and its plans can be carried out: it is a reference.
What no policy exceeds is the column ``bound``: every function warm. `warm_planner` knows the
constants of the environment that generates the requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from servegym._checks import choose
from servegym._command_line import run_main
from servegym.baselines.registry import list_policies, make_policy
from servegym.baselines.serverless_moe.system import ServerlessSystem
from servegym.envs.serverless_moe.config import DEPLOYMENTS
from servegym.experiments.evaluation.evaluate import DEFAULT_SEED, evaluate
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.evaluation.stats import mean, paired_difference
from servegym.experiments.evaluation.tables import Note, Table, note
from servegym.experiments.papers.plotting import pyplot, tidy
from servegym.experiments.papers.run import (
    FigureOptions,
    Pictures,
    command_line,
    figure_parser,
    first_and_last,
    run_chosen,
    save,
)
from servegym.experiments.papers.serverless.common import (
    GPUS,
    MODELS,
    gpu_kind,
    with_interval,
)

__all__ = ["Options", "main", "measure", "summarise"]

MODULE = "servegym.experiments.studies.serverless.policies"
ENV_ID = "servegym/ServerlessMoE-v0"
PRESETS = ("dynamic", "seed")
SLOW = ("remoe_cost", "remoe_sticky", "grid_optimum", "lookahead")
BLOCK = 5
"""Episodes that run side by side; the table grows by as many."""
ALIKE = 5
"""Most episodes in the preset ``seed``, whose requests differ by little."""
CARD_POLICIES = ("mix", "gpu", "fetch", "greedy_warm", "warm_planner")
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
        models: Models to measure.
        again: Policies whose rows of these models are measured anew.
    """

    slow_episodes: int
    models: Sequence[str]
    again: Sequence[str]
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
        head = {"model": model, "preset": preset, "policy": name, "seed": row["seed"]}
        found.append(head | {"requests": requests} | {key: float(row[key]) for key in KEYS})
    return found


def cards(options: Options) -> None:
    """The default model with every GPU profile: does the planner beat what a GPU alone does?"""
    rows: list[dict[str, Any]] = []
    for gpu in first_and_last(options, GPUS):
        found = {}
        for name in CARD_POLICIES:
            kwargs = {"gpu": gpu, "episode_requests": options.requests}
            system = ServerlessSystem.from_kwargs(split="eval", **kwargs)
            policy = make_policy(name, system, family="serverless_moe")
            played = evaluate(
                ENV_ID, [policy], options.episodes, env_kwargs=kwargs, num_envs=options.episodes
            )
            found[name] = np.array([row["mean_reward"] for row in played])
            print(f"{gpu}: {name}", flush=True)
        for name, values in found.items():
            row = {"gpu": gpu, "gpu_kind": gpu_kind(gpu), "policy": name, "episodes": len(values)}
            row |= with_interval("mean_reward", values)
            more = paired_difference(values, found["fetch"], mean)
            ends = ("minus_fetch", "minus_fetch_low", "minus_fetch_high")
            rows.append(row | dict(zip(ends, more, strict=True)))
    notes = []
    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        own = sorted(
            (row for row in rows if row["gpu"] == gpu), key=lambda row: -row["mean_reward"]
        )
        notes.append(f"{gpu} GPU ({gpu_kind(gpu)}), by mean reward: {_order(own)}.")
    settings = {"environment": f"{ENV_ID}, preset dynamic, split eval"}
    save(options, "policies_gpus", rows, *notes, settings=settings)


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
    key = ("model", "preset", "policy", "requests", "seed")
    table = Table(options.out / "policies_episodes.csv", key, load=options.resume)
    order = {name: k for k, name in enumerate(names)}
    table.discard(lambda e: e["model"] in options.models and e["policy"] in options.again)
    for model in options.models:
        for preset in PRESETS:
            for name in names:
                number = options.slow_episodes if name in SLOW else options.episodes
                number = min(number, ALIKE) if preset == "seed" else number
                head = (model, preset, name, options.requests)
                wanted = [(*head, DEFAULT_SEED + episode) for episode in range(number)]
                while missing := table.missing(wanted):
                    first, block = missing[0][-1] - DEFAULT_SEED, min(BLOCK, len(missing))
                    fresh = measure(name, model, preset, first, block, options.requests)
                    table.update(
                        fresh, lambda e: (e["model"], e["preset"], order[e["policy"]], e["seed"])
                    )
                    print(f"{model}, {preset}: {name}, {first + block} episodes", flush=True)
    episodes = table.rows
    rows = summarise(episodes)
    notes: list[Note] = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for preset in PRESETS:
            own = [row for row in rows if (row["model"], row["preset"]) == (model, preset)]
            _print(f"{model}, preset {preset}", own)
            notes += _findings(f"{model}, {preset}", own)
    notes.append(
        "remoe and remoe_cost rank experts anew for every prompt, so that functions seldom match "
        "what is warm; remoe_sticky plans for the shared order; grid_optimum takes the best action "
        "of the request at hand, and lookahead plans the whole episode. warm_planner knows the "
        "constants of the generator of the requests (lengths, gaps, overheads, keep-alive), which "
        "no controller of a real platform does."
    )
    settings = {
        "environment": f"{ENV_ID}, split eval, {options.requests} requests an episode",
        "episodes": f"at least {options.episodes}, of {', '.join(SLOW)} at least "
        f"{options.slow_episodes}, in the preset seed {ALIKE} or as many as were there",
    }
    save(options, "policies", rows, *notes, settings=settings)


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


def _findings(title: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The order of the policies, the best against the clairvoyant ones, and Remoe against MIX."""
    by = {row["policy"]: row for row in rows}
    seeing, fixed = ("grid_optimum", "lookahead"), set(DEPLOYMENTS) - {"plan"}
    ranked, alike = (
        sorted(group, key=lambda row: -row["mean_reward"])
        for group in (
            [row for row in rows if row["policy"] not in {*seeing, *fixed}],
            [row for row in rows if row["policy"] in fixed],
        )
    )
    best, ahead = ranked[0], by["lookahead"]
    closed = _closed(best, by)
    notes = [
        note(
            f"{title}: {best['policy']} has the highest mean reward of the policies that see what "
            f"a controller sees; from MIX ({by['mix']['mean_reward']:.3f}) to lookahead "
            f"({ahead['mean_reward']:.3f}) it closes {100 * closed:.0f} % of the distance.",
            best=best["policy"],
            closed=closed,
        ),
        note(
            f"{title}, by mean reward: {_order(ranked)}; deployments that decide nothing: "
            f"{_order(alike)}; with the future known: grid_optimum "
            f"{by['grid_optimum']['mean_reward']:.3f}, lookahead {ahead['mean_reward']:.3f}, and "
            f"no policy is above {ahead['bound']:.3f}.",
            ranking=[row["policy"] for row in ranked],
            deployments=[row["policy"] for row in alike],
            bound=ahead["bound"],
        ),
        note(
            f"{title}: even lookahead misses the TTFT limit of "
            f"{100 * ahead['ttft_violation_rate']:.0f} % and the TPOT limit of "
            f"{100 * ahead['tpot_violation_rate']:.0f} % of the requests.",
            ttft_violation_rate=ahead["ttft_violation_rate"],
            tpot_violation_rate=ahead["tpot_violation_rate"],
        ),
    ]
    for name in READINGS:
        row, mix = by[name], by["mix"]
        low, high = row["minus_mix_low"], row["minus_mix_high"]
        how = "loses to" if high < 0 else "beats" if low > 0 else "is not distinguished from"
        text = (
            f"{title}: {name} {how} MIX, {row['minus_mix']:+.3f} [{low:+.3f}, {high:+.3f}] on the "
            f"same episodes; {100 * row['cold_rate']:.0f} % of its requests start cold (MIX "
            f"{100 * mix['cold_rate']:.0f} %), starts are {100 * row['cold_cost_share']:.0f} % of "
            f"its cost (MIX {100 * mix['cold_cost_share']:.0f} %), penalties {row['penalty']:.3f} "
            f"a request (MIX {mix['penalty']:.3f}), and the rest of its cost is "
            f"{_running(row):.2f} of MIX's cost cold (MIX {_running(mix):.2f})."
        )
        notes.append(note(text, policy=name, minus_mix=[row["minus_mix"], low, high]))
    return notes


def _order(rows: Sequence[dict[str, Any]]) -> str:
    return " > ".join(f"{row['policy']} {row['mean_reward']:.3f}" for row in rows)


def _closed(row: dict[str, Any], by: dict[str, dict[str, Any]]) -> float:
    low, high = by["mix"]["mean_reward"], by["lookahead"]["mean_reward"]
    return (row["mean_reward"] - low) / (high - low)


def _running(row: dict[str, Any]) -> float:
    return row["cost_over_mix"] * (1.0 - row["cold_cost_share"])


def _plot(rows: Sequence[dict[str, Any]]) -> Any:
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


FIGURES = {"policies": policies, "gpus": cards}
PICTURES: Pictures = {"policies": _plot}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns 0."""
    parser = figure_parser(tuple(FIGURES), __doc__, MODULE, 20)
    parser.add_argument("--slow-episodes", type=int, help=f"episodes of {', '.join(SLOW)} (8)")
    parser.add_argument("--requests", type=int, help="requests of an episode (200)")
    parser.add_argument("--resume", action="store_true", help="measure only what is missing")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="which (all)")
    parser.add_argument("--again", nargs="+", default=(), help="policies to measure anew")
    options = command_line(parser, argv, Options())
    if options.slow_episodes is None:
        options.slow_episodes = min(8, options.episodes)
    if options.requests is None:
        options.requests = 10 if options.quick else 200
    for argument in ("slow_episodes", "requests"):
        if getattr(options, argument) < 1:
            given = getattr(options, argument)
            raise ValueError(f"{argument} is {given}; allowed is 1 or more")
    known = [info.name for info in list_policies("serverless_moe")]
    options.again = [choose("again", name, known) for name in options.again]
    return run_chosen(FIGURES, PICTURES, options)


if __name__ == "__main__":
    run_main(main)
