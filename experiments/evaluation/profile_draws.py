"""Does a ranking of policies survive the errors of the profiles it was measured on?

A draw has one factor a card, of the profile's ``step_error``, for iterations with prefill and one
for decodes alone. Engines take the drawn times; policies go on believing the profiles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from servegym.envs.families import family_of
from servegym.experiments.evaluation.evaluate import derived_seed, evaluate
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.evaluation.play import problem_of
from servegym.experiments.evaluation.reporting import report_of
from servegym.hardware_profiles import Profile


def draw_factors(profiles: Sequence[Profile], draws: int) -> list[dict[str, list[float]]]:
    """True over stated step times: of each draw ``[prefill, decode]`` by the profile's name.

    Experts of one profile share its factors. Profiles that state no error (the paper's linear laws
    have none by definition) are left out; ValueError if none states one.
    """
    stated = {profile.name: profile.step_error for profile in profiles if profile.step_error}
    if not stated:
        names = ", ".join(sorted({profile.name for profile in profiles}))
        raise ValueError(f"profile_draws={draws}, but no profile states a step_error: {names}")
    every = []
    for draw in range(draws):
        rng = np.random.default_rng([0, draw])
        factors = {}
        for name, error in sorted(stated.items()):
            factors[name] = [
                math.exp(error[kind]["bias"] + error[kind]["sd"] * float(z))
                for kind, z in zip(("prefill", "decode"), rng.standard_normal(2), strict=True)
            ]
        every.append(factors)
    return every


def drawn_worlds(env_id: str, env_kwargs: Mapping[str, Any], draws: int) -> list[dict[str, Any]]:
    """An environment's arguments in so many worlds drawn from its profiles' errors.

    ValueError where no profile of the family states an error.
    """
    family = family_of(env_id)
    if family.name != "llm_routing":
        raise ValueError(f"profile_draws is for llm_routing, not for {family.name}")
    if env_kwargs.get("step_factors") is not None:
        raise ValueError("profile_draws draws step_factors; leave them out of the arguments")
    profiles = problem_of(family.env_id, {"split": "eval", **env_kwargs}).profiles
    return [{**env_kwargs, "step_factors": one} for one in draw_factors(profiles, draws)]


def evaluate_in(
    worlds: Sequence[Mapping[str, Any]],
    plain: Sequence[Mapping[str, Any]],
    env_id: str,
    policies: Sequence[Any],
    **options: Any,
) -> list[dict[str, Any]]:
    """Rows of `evaluate` in each of `drawn_worlds`, draw after draw, ``profile_draw`` from 0.

    Every draw has the episodes of the rows ``plain``, of the profiles as they are. With a guest,
    which may remember those of another draw, each has its own, whose seeds derive from theirs.
    """
    seed = min(row["seed"] for row in plain)
    apart = any(row["source"] == "guest" for row in plain)
    rows = []
    for draw, kwargs in enumerate(worlds):
        first = derived_seed(seed, f"draw {draw}") if apart else seed
        results = evaluate(env_id, policies, seed=first, env_kwargs=kwargs, **options)
        rows += [{**row, "profile_draw": draw} for row in results]
    return rows


def ranking(
    rows: Sequence[Mapping[str, Any]], drawn: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """How often each policy stays ahead of the next, and by how much.

    A row for every policy but the last, best first on the ``rows`` of the profiles as they are:
    ``policy``, ``next``, ``difference`` of the means there (positive: ahead), ``share_ahead`` of
    the draws with a positive one, and ``low`` and ``high``, the 95 % interval of the difference
    over draws and episodes: each resample takes a draw, and in it episodes with replacement.
    """
    report = report_of(family_of(rows[0]["env_id"]))
    sign = 1.0 if report.higher_is_better else -1.0

    def by_episode(some: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
        numbered = ((r["episode"], sign * r[report.headline]) for r in some if r["policy"] == name)
        return np.array([value for _, value in sorted(numbered)])

    names = list(dict.fromkeys(row["policy"] for row in rows))
    names.sort(key=lambda name: -by_episode(rows, name).mean())
    worlds = [
        [row for row in drawn if row["profile_draw"] == draw]
        for draw in sorted({row["profile_draw"] for row in drawn})
    ]
    rng = np.random.default_rng(0)
    compared = []
    for name, after in zip(names, names[1:], strict=False):
        plain = by_episode(rows, name) - by_episode(rows, after)
        gaps = np.array([by_episode(w, name) - by_episode(w, after) for w in worlds])
        picked = rng.integers(len(gaps), size=2000)
        episodes = rng.integers(gaps.shape[1], size=(2000, gaps.shape[1]))
        low, high = np.quantile(gaps[picked[:, None], episodes].mean(axis=1), [0.025, 0.975])
        row = {"policy": name, "next": after, "difference": float(plain.mean())}
        row |= {"share_ahead": float((gaps.mean(axis=1) > 0).mean())}
        compared.append(row | {"low": float(low), "high": float(high)})
    return compared


def print_draws(rows: Sequence[Mapping[str, Any]], drawn: Sequence[Mapping[str, Any]]) -> None:
    """Print `ranking`, best policy first."""
    report = report_of(family_of(rows[0]["env_id"]))
    draws = len({row["profile_draw"] for row in drawn})
    cells = []
    for row in ranking(rows, drawn):
        interval = f"{row['low']:.4f} to {row['high']:.4f}"
        share = f"{100 * row['share_ahead']:.0f} %"
        cells.append([row["policy"], row["next"], f"{row['difference']:.4f}", interval, share])
    note = "by: on the profiles as they are; interval: over draws and episodes; ahead in: share "
    note += "of the draws with a positive mean difference over the same episodes."
    title = f"{report.heading} over {draws} draws of the profiles' errors"
    heads = ["policy", "ahead of", "by", "95 % interval", "ahead in"]
    print_table(title, heads, cells, [note])
