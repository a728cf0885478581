"""Every policy of the serverless family on held-out prompts: reward, cost, SLOs, cold starts.

``python -m servegym.experiments.studies.serverless.policies`` runs all of them on the
registered environment, both models and both presets, on the same episodes of the eval split: the
presets ``dynamic`` (functions stay warm, cold starts are billed, t_rem changes, tight SLOs) and
``seed`` (the paper's: every request cold, nothing billed for it). Policies that enumerate all
actions of every request run fewer episodes. ``--resume`` goes on after a run that was cut off.

``--figure gpus`` plays the default model with every GPU profile, chosen and derived.

`lookahead` plans with the whole episode known, and its plans can be carried out: it is a reference.
What no policy exceeds is the column ``bound``: every function warm. `warm_planner` knows the
constants of the environment that generates the requests.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.baselines.registry import list_policies, make_policy
from servegym.baselines.serverless_moe.system import ServerlessSystem
from servegym.envs.serverless_moe.arguments import DEPLOYMENTS
from servegym.experiments.evaluation.evaluate import DEFAULT_SEED, evaluate
from servegym.experiments.evaluation.stats import mean, paired_difference
from servegym.experiments.evaluation.tables import Note, note
from servegym.experiments.papers.plotting import Bars
from servegym.experiments.papers.serverless.billing import MODELS, gpu_kind, with_interval
from servegym.experiments.papers.study import Options, Study, command, ends, interval_columns
from servegym.experiments.papers.verdicts import split
from servegym.hardware_profiles.serverless import GPUS

__all__ = ["STUDIES", "main", "measure", "summarise"]

ENV_ID = "servegym/ServerlessMoE-v0"
PRESETS = ("dynamic", "seed")
SLOW = ("remoe_cost", "remoe_sticky", "grid_optimum", "lookahead")
SLOW_EPISODES = 8
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


def _requests(options: Options) -> int:
    """Requests of an episode."""
    return 10 if options.quick else 200


@functools.cache
def measure(
    name: str, model: str, preset: str, episodes: int, requests: int
) -> list[dict[str, Any]]:
    """One row an episode of a policy.

    Args:
        name: The policy.
        model: The model.
        preset: The preset.
        episodes: How many.
        requests: Requests of an episode.
    """
    kwargs = {"model": model, "preset": preset, "episode_requests": requests}
    system = ServerlessSystem.from_kwargs(split="eval", **kwargs)
    policy = make_policy(name, system, family="serverless_moe")
    bound = getattr(policy, "reward_bound", None)
    # Side by side, so that what a policy found out about each row is there afterwards.
    results = evaluate(ENV_ID, [policy], episodes, DEFAULT_SEED, kwargs, num_envs=episodes)
    found = []
    for row, log in zip(results, results.logs[name], strict=True):
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


def summarise(
    point: Mapping[str, Any], episodes: Sequence[Mapping[str, Any]], mix: Sequence[Any]
) -> dict[str, Any]:
    """A row: means over episodes, 95 % bootstrap intervals of the reward and the cost over MIX.

    Args:
        point: Columns put first.
        episodes: Rows of `measure`.
        mix: Those of the deployment ``mix``, whose rewards on the same episodes are subtracted in
            ``minus_mix``.
    """
    row = {**point, "episodes": len(episodes), "first_seed": episodes[0]["seed"]}
    row["requests"] = episodes[0]["requests"]
    for key in KEYS:
        values = np.array([episode[key] for episode in episodes])
        if key in ("mean_reward", "cost_over_mix"):
            row |= with_interval(key, values)
        else:
            row[key] = float(values.mean())
    rewards = ([one["mean_reward"] for one in part] for part in (episodes, mix[: len(episodes)]))
    return row | interval_columns("minus_mix", paired_difference(*rewards, mean))


def _policies(options: Options, at: dict[str, str], _: Sequence[str]) -> list[dict[str, Any]]:
    """A policy on a model and preset."""
    slow = min(SLOW_EPISODES, options.episodes)
    number = slow if at["policy"] in SLOW else options.episodes
    number = min(number, ALIKE) if at["preset"] == "seed" else number
    played, mix = (
        measure(name, at["model"], at["preset"], number, _requests(options))
        for name in (at["policy"], "mix")
    )
    return [summarise(at, played, mix)]


def _settings(options: Options) -> list[dict[str, str]]:
    names = [info.name for info in list_policies("serverless_moe") if info.name != "random"]
    return [
        {"model": model, "preset": preset, "policy": name}
        for model in MODELS
        for preset in PRESETS
        for name in (*names, "random")
    ]


def _notes(options: Options, rows: Sequence[dict[str, Any]]) -> Iterator[Note]:
    for at, own in split(rows, "model", "preset"):
        yield from _findings(f"{at['model']}, {at['preset']}", own)
    yield (
        "remoe and remoe_cost rank experts anew for every prompt, so that functions seldom match "
        "what is warm; remoe_sticky plans for the shared order; grid_optimum takes the best action "
        "of the request at hand, and lookahead plans the whole episode. warm_planner knows the "
        "constants of the generator of the requests (lengths, gaps, overheads, keep-alive), which "
        "no controller of a real platform does."
    )


def _findings(title: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
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


def _order(rows: Sequence[Mapping[str, Any]]) -> str:
    return " > ".join(f"{row['policy']} {row['mean_reward']:.3f}" for row in rows)


def _closed(row: Mapping[str, Any], by: Mapping[str, Mapping[str, Any]]) -> float:
    low, high = by["mix"]["mean_reward"], by["lookahead"]["mean_reward"]
    return (row["mean_reward"] - low) / (high - low)


def _running(row: Mapping[str, Any]) -> float:
    return row["cost_over_mix"] * (1.0 - row["cold_cost_share"])


def _cards(options: Options, at: dict[str, str], policies: Sequence[str]) -> Iterator[Any]:
    """The default model with a GPU: does the planner beat what a GPU alone does?"""
    kwargs = {"gpu": at["gpu"], "episode_requests": _requests(options)}
    system = ServerlessSystem.from_kwargs(split="eval", **kwargs)
    found = {}
    for name in policies:
        policy = make_policy(name, system, family="serverless_moe")
        played = evaluate(
            ENV_ID, [policy], options.episodes, env_kwargs=kwargs, num_envs=options.episodes
        )
        found[name] = np.array([row["mean_reward"] for row in played])
    for name, values in found.items():
        more = paired_difference(values, found["fetch"], mean)
        row = {**at, "policy": name, "episodes": len(values)}
        row |= with_interval("mean_reward", values)
        yield row | interval_columns("minus_fetch", more)


def _card_notes(options: Options, rows: Sequence[dict[str, Any]]) -> Iterator[Note]:
    for at, own in split(rows, "gpu", "gpu_kind"):
        ranked = sorted(own, key=lambda row: -row["mean_reward"])
        yield f"{at['gpu']} GPU ({at['gpu_kind']}), by mean reward: {_order(ranked)}."


STUDIES = (
    Study(
        "policies",
        "policies",
        _policies,
        _settings,
        notes=_notes,
        picture=Bars(x="policy", y=("mean_reward", "penalty"), panels=("model", "preset")),
        facts=lambda options: {
            "environment": f"{ENV_ID}, split eval, {_requests(options)} requests an episode"
        },
        key=("model", "preset", "policy"),
    ),
    Study(
        "policies_gpus",
        "gpus",
        _cards,
        lambda options: [{"gpu": gpu, "gpu_kind": gpu_kind(gpu)} for gpu in ends(options, GPUS)],
        CARD_POLICIES,
        _card_notes,
        facts=lambda options: {"environment": f"{ENV_ID}, preset dynamic, split eval"},
    ),
)

main = command(__spec__.name, __doc__, STUDIES, 20)

if __name__ == "__main__":
    run_main(main)
