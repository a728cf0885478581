"""The error of whole steps that shipped profiles state.

It is from committed tables alone. For prefill and decode steps the logarithm of true seconds over
the law's has a standard deviation of the root of the sum of squares of what is known apart:

- ``rows``: whole iterations of held-out kernel timings (their 90th percentile over 1.645),
- ``method``: another composition or measurement of the same steps: against aiconfigurator (its
  mean absolute difference times 1.2533); for cards composed from single products also the same way
  of composing on the RTX PRO 6000; for derived cards the published ratios to the card they derive
  from,
- ``engine``: what an engine's steps were beyond their kernels, in the runs of the RTX 4090 (tables
  ``host``, ``errors`` and ``light``): two looks at each kind of step, and the standard error of the
  first,
- ``mixed``: what the law of `servegym.hardware_profiles.kernels.MixedAttention` adds to iterations
  of 8 and 32 decodes beside chunks, where a card has that law and the profile does not.

The RTX 4090 itself has the mean of its two looks as bias and their spread in place of ``engine``;
elsewhere the bias is 0, as one card's says nothing of the sign on another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.evaluation.tables import provenance, write_result
from servegym.hardware_profiles import Profile, list_profiles, load
from servegym.hardware_profiles.compose import compose
from servegym.hardware_profiles.kernels import list_cards, load_kernels
from servegym.hardware_profiles.load import data_path

RESULTS = Path("experiments", "results")
P90_OF_SD = 1.645
"""90th percentile of the absolute value of a normal variable of deviation 1."""
SD_OF_MEAN = math.sqrt(math.pi / 2.0)
"""Deviation of a normal variable over the mean of its absolute value."""
ROWS = {
    "prefill": ("chunk_iteration_random_third", "fresh_prefill_iteration_random_third"),
    "decode": ("decode_iteration_random_third",),
}
MEASURED_CARD = "rtx4090-llama-3.1-8b"
_LOOK = "log of {} iteration over the law"


def engine_looks(results: Path) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Logarithms of an engine's time over the law's, two a kind of step.

    Args:
        results: folder of the committed tables.

    Returns:
        The logarithms, and the standard error of the first of each kind.
    """
    rows = {row["quantity"]: row for row in read_rows(results / "host.csv")}
    host = {name: float(row["value"]) for name, row in rows.items()}
    whole = {
        row["metric"]: float(row["error_of_mean"])
        for row in read_rows(results / "errors.csv")
        if row["requests_from"] == "all"
    }
    light = {
        row["planned"]: float(row["error_of_mean"]) for row in read_rows(results / "light.csv")
    }
    other = {"prefill": light["one ahead"], "decode": whole["TPOT"]}
    looks = {kind: [host[_LOOK.format(kind)], -math.log1p(error)] for kind, error in other.items()}
    ends = {
        kind: [float(rows[_LOOK.format(kind)][end]) for end in ("low", "high")] for kind in other
    }
    return looks, {kind: (high - low) / (2 * 1.96) for kind, (low, high) in ends.items()}


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(float(np.mean(np.square(values))))


def _rows(profile: Profile, kind: str) -> float:
    spreads = [profile.fit_error[key]["p90"] for key in ROWS[kind] if key in profile.fit_error]
    return spreads[0] / P90_OF_SD if spreads else 0.0


def _ratios(profile: Profile, kind: str) -> list[float]:
    """Logarithms of other published ratios to the card that a profile is scaled from."""
    facts = profile.provenance
    return [
        math.log(value / facts[f"{kind}_ratio"])
        for value in facts.get("published_ratios", {}).get(kind, {}).values()
        if value != facts[f"{kind}_ratio"]
    ]


def _mixed(profile: Profile, card: str) -> float:
    """Root mean square of what the card's law of mixed iterations adds to a profile without it."""
    if "mixed_decode_attention_s" in profile.law or load_kernels(card).mixed is None:
        return 0.0
    other = compose(card, "llama-3.1-8b")
    points = [(chunk, b) for chunk in (128, 512) for b in (8, 32)]
    return _rms(
        [
            math.log(
                other.mixed_step_s([(chunk, 0)], b, 1024 * b)
                / other.step_s([(chunk, 0)], b, 1024 * b)
            )
            for chunk, b in points
        ]
    )


def step_errors(results: Path = RESULTS) -> list[dict[str, Any]]:
    """Bias and standard deviation of every shipped profile and kind of step, with their parts.

    Args:
        results: folder of the committed tables.

    Returns:
        Rows of ``profile``, ``step``, ``bias``, ``sd``, ``rows``, ``method``, ``engine``,
        ``mixed``.
    """
    looks, errors_of_look = engine_looks(results / "fidelity")
    against = {
        (row["profile"], row["step"]): float(row["mape"])
        for row in read_rows(results / "aiconfigurator" / "mape.csv")
    }
    profiles = [load(name) for name in list_profiles()]
    derived = [p for p in profiles if p.kind == "derived" and "published_ratios" in p.provenance]
    out = []
    for profile in profiles:
        if "linear_estimator_against_law" not in profile.fit_error:
            continue  # not of a real card
        for kind in ("prefill", "decode"):
            rows = _rows(profile, kind)
            method = [against.get((profile.name, kind), 0.0) * SD_OF_MEAN]
            composed = profile.fit_error.get(f"method_on_rtxpro6000_{kind}_iteration")
            if composed:
                method.append(composed["p90"] / P90_OF_SD)
            if profile in derived:
                # A card with one published ratio is as uncertain as those with several.
                ratios = _ratios(profile, kind) or [r for p in derived for r in _ratios(p, kind)]
                method.append(_rms(ratios))
                rows = _rows(load(MEASURED_CARD), kind)
            bias, engine = 0.0, _rms(looks[kind])
            if profile.name == MEASURED_CARD:
                bias, engine = float(np.mean(looks[kind])), float(np.std(looks[kind], ddof=1))
            engine = math.hypot(engine, errors_of_look[kind])
            mixed = 0.0
            card = profile.name.removesuffix("-llama-3.1-8b")
            if kind == "prefill" and card in list_cards():
                mixed = _mixed(profile, card)
            sd = math.hypot(rows, *method, engine, mixed)
            parts = {"rows": rows, "method": math.hypot(*method), "engine": engine, "mixed": mixed}
            row = {"profile": profile.name, "step": kind, "bias": bias, "sd": sd, **parts}
            out.append({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
    return out


def stated(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """The field ``step_error`` of a profile."""
    by_step = {row["step"]: row for row in rows if row["profile"] == name}
    field = {kind: {"bias": row["bias"], "sd": row["sd"]} for kind, row in by_step.items()}
    return {**field, "source": "experiments/results/fidelity/step_error.csv"}


def main() -> None:
    """Compute the errors; write the table and the profiles' files."""
    rows = step_errors()
    for name in dict.fromkeys(row["profile"] for row in rows):
        data = {**load(name).to_dict(), "step_error": stated(rows, name)}
        Profile.from_dict(data, name).save(data_path(f"{name}.json"))
    origin = provenance("python -m servegym.experiments.studies.fidelity.step_errors")
    write_result(RESULTS / "fidelity" / "step_error", rows, origin)


if __name__ == "__main__":
    run_main(main)
