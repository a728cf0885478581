"""The error of whole steps that shipped profiles state, and that composed ones get.

    python -m servegym.experiments.studies.fidelity.step_errors
    python -m servegym.experiments.studies.fidelity.step_errors --left-out DATA WHEEL

The first is from committed tables alone. For prefill and decode steps the logarithm of true seconds
over the law's has a standard deviation of the root of the sum of squares of what is known apart:

- ``rows``: whole iterations of held-out kernel timings (their 90th percentile over 1.645),
- ``method``: another composition or measurement of the same steps: against aiconfigurator (its
  mean absolute difference times 1.2533); for cards composed from single products also the same way
  of composing on the RTX PRO 6000; for derived cards the published ratios to the card they derive
  from,
- ``engine``: what an engine's steps were beyond their kernels, in the runs of the RTX 4090 (tables
  ``host``, ``errors`` and ``light``): two looks at each kind of step, and the standard error of the
  first.

- ``mixed``: what the law of `servegym.hardware_profiles.kernels.MixedAttention` adds to iterations
  of 8 and 32 decodes beside chunks, where a card has that law and the profile does not.

The RTX 4090 itself has the mean of its two looks as bias and their spread in place of ``engine``;
elsewhere the bias is 0, as one card's says nothing of the sign on another.

The second compares composed steps with measurements that they were not made from: kernels of whole
models (`servegym.hardware_profiles.build.timed_steps`: prefill, decode and mixed steps), published
runs of vLLM of the part ``fit`` (``published_rows``: TTFT, TPOT), and the RTX 4090's run; a set is
of one card, model and number of cards. A class of steps (`compose.step_class`) has a mean on every
card that it was seen on, and a deviation from it such that 80 % intervals hold 80 % of the rows of
sets that they were made without, every set with the same weight (:func:`intervals`). ``--write``
puts them into the file of constants.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.experiments.evaluation.output import print_table, read_rows
from servegym.experiments.evaluation.tables import provenance, write_result
from servegym.experiments.fidelity.comparison import errors, simulate
from servegym.experiments.fidelity.measured_run import load_run
from servegym.hardware_profiles import Profile, list_profiles, load
from servegym.hardware_profiles.build.published import MODEL_FOLDERS
from servegym.hardware_profiles.build.timed_steps import CARD, compare, read_steps
from servegym.hardware_profiles.compose import Z80, Composer, compose, step_class
from servegym.hardware_profiles.constants import FILE
from servegym.hardware_profiles.kernels import list_cards, load_kernels
from servegym.hardware_profiles.load import data_path
from servegym.hardware_profiles.model_config import model_shape
from servegym.hardware_profiles.schema import read_json, write_json

__all__ = ["main", "step_errors"]

RESULTS = Path("experiments", "results")
P90_OF_SD = 1.645
"""90th percentile of the absolute value of a normal variable of deviation 1."""

UNTIMED = "mxfp4 experts"
"""Class of steps whose kernels were not timed."""

SD_OF_MEAN = math.sqrt(math.pi / 2.0)
"""Deviation of a normal variable over the mean of its absolute value."""

# Error of composed steps in the RTX 4090's measured run (TTFT, TPOT), of a set of one row.
_RUN = ("rtx4090", "llama-3.1-8b")

ROWS = {
    "prefill": ("chunk_iteration_random_third", "fresh_prefill_iteration_random_third"),
    "decode": ("decode_iteration_random_third",),
}
MEASURED_CARD = "rtx4090-llama-3.1-8b"
MEASURED_RUN = Path("llmservingsim/bench/examples/RTX4090/Llama-3.1-8B/vllm")


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


def error_class(one: Mapping[str, Any]) -> tuple[str, str]:
    """Kind and class of a set's steps."""
    return one["step"], step_class(one["step"], model_shape(one["model"]), one["dtype"])


def _quantile(sets: Sequence[Mapping[str, Any]]) -> float:
    """80th percentile of the absolute logarithms, every set with the same weight."""
    size = np.concatenate([np.abs(one["logs"]) for one in sets])
    weight = np.concatenate([np.full(len(one["logs"]), 1 / len(one["logs"])) for one in sets])
    order = np.argsort(size)
    share = np.cumsum(weight[order]) / weight.sum()
    return float(size[order][np.searchsorted(share, 0.8)])


def left_out_sets(data: Path, wheel: Path, run: Path | None = None) -> list[dict[str, Any]]:
    """Logarithms of measured over composed steps: a set a card, model, tp and kind of step.

    Args:
        data: folder of the published tables.
        wheel: of aiconfigurator-core, with published engine runs.
        run: a measured run of the RTX 4090.
    """
    from servegym.experiments.studies.fidelity import published_rows

    sets: dict[tuple[Any, ...], list[float]] = {}

    def add(key: tuple[Any, ...], measured: float, composed: float) -> None:
        sets.setdefault(key, []).append(math.log(measured / composed))

    for (card, name), folder in MODEL_FOLDERS.items():
        if card != CARD:
            continue  # its kernel tables rest on these rows
        model, *more = name.split(" tp ")
        tp, kernels = int(more[0]) if more else 1, load_kernels(card)
        kernels.all_reduce_s = lambda *_: 0.0  # type: ignore[method-assign]
        composer = Composer(kernels, model_shape(model), tp)
        for row in compare(composer, read_steps(data / folder, composer.shape)):
            kind = "decode" if row["step"] == "decode" else "prefill"
            if (kind, name) == ("decode", "llama-3.1-8b"):
                continue  # the tables' decodes rest on it
            key = (kind, card, model, tp, "bf16", f"kernels, {row['step']}")
            add(key, row["timed_s"], row["composed_s"])
    rows = [row for row in published_rows.read_rows(wheel)[0] if not published_rows.is_test(row)]
    for one in published_rows.results(rows)[0]:
        row = one["row"]
        for kind, key in (("prefill", "ttft"), ("decode", "tpot")):
            at = (kind, row.card, row.model, row.tp, row.dtype, f"{row.engine}, {key}")
            add(at, 1.0, 1.0 + one[key])
    if run is not None:
        measured = load_run(run)
        whole = errors(measured, simulate(measured, compose(*_RUN)))
        for kind, metric in (("prefill", "TTFT"), ("decode", "TPOT")):
            error = next(row["error_of_mean"] for row in whole if row["metric"] == metric)
            add((kind, *_RUN, 1, "bf16", f"vllm, {metric.lower()}"), 1.0, 1.0 + error)
    names = ("step", "card", "model", "tp", "dtype", "against")
    return [
        dict(zip(names, key, strict=True)) | {"logs": np.array(logs)} for key, logs in sets.items()
    ]


def _means(sets: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean of the sets' medians by card."""
    by_card: dict[str, list[float]] = {}
    for one in sets:
        by_card.setdefault(one["card"], []).append(float(np.median(one["logs"])))
    return {card: float(np.mean(medians)) for card, medians in by_card.items()}


def _width(sets: Sequence[Mapping[str, Any]], means: Mapping[str, float]) -> float:
    return _quantile([{"logs": one["logs"] - means[one["card"]]} for one in sets])


def card_deviations(sets: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Root mean square of the cards' means by kind of step, classes whose kernels were timed."""
    deviations = {}
    for kind in ("prefill", "decode"):
        timed = [s for s in sets if error_class(s)[0] == kind and error_class(s)[1] != UNTIMED]
        classes = {error_class(one) for one in timed}
        means = [_means([s for s in timed if error_class(s) == name]) for name in classes]
        deviations[kind] = round(_rms([value for each in means for value in each.values()]), 3)
    return deviations


def intervals(sets: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How many rows of every set the 80 % interval holds that was made without its card and model.

    The width of a class is the 80th percentile of its rows' distance to the mean of their card
    times one factor a kind of step: the 80th percentile of the rows left out over the width without
    them. Where no other model ran on the card, zero is its mean and the cards' deviation widens the
    interval. Experts in MXFP4, which ran in kernels that were not timed, have no part in the
    factor.

    Args:
        sets: as :func:`left_out_sets` returns them.

    Returns:
        A row a set with its class, its card's mean (``bias``) and its class's deviation (``sd``),
        the deviation without its card and model (``sd_without``), its rows' mean and deviation, and
        the share of them inside; where a class has one card and model, the other numbers of cards
        stand for them.
    """
    others = card_deviations(sets)
    classes = [error_class(one) for one in sets]
    table: list[dict[str, Any]] = []
    for one, group in zip(sets, classes, strict=True):
        same = [s for s, kind in zip(sets, classes, strict=True) if kind == group]
        means = _means(same)
        rest = [s for s in same if (s["card"], s["model"]) != (one["card"], one["model"])]
        rest = rest or [s for s in same if s is not one] or same
        without = _means(rest)
        width = _width(rest, without)
        if one["card"] not in without:
            width = math.hypot(width, Z80 * others[group[0]])
        distance = np.abs(one["logs"] - without.get(one["card"], 0.0)) / width
        table.append({"class": group[1], "logs": distance, "sd_without": width / Z80}
                    | {"bias": means[one["card"]], "sd": _width(same, means) / Z80})  # fmt: skip
    factor = {}
    for kind in others:
        pairs = zip(table, classes, strict=True)
        factor[kind] = _quantile(
            [m for m, group in pairs if group[0] == kind and group[1] != UNTIMED]
        )
    for row, one, group in zip(table, sets, classes, strict=True):
        k = 1.0 if group[1] == UNTIMED else factor[group[0]]
        logs, distance = one["logs"], row.pop("logs")
        row |= {"rows": len(logs), "mean": logs.mean(), "deviation": logs.std()}
        row |= {"inside": (distance <= k).mean(), "sd": k * row["sd"]}
        row["sd_without"] *= k
        row |= {key: round(float(v), 4) for key, v in row.items() if key not in ("class", "rows")}
    facts = [{key: value for key, value in one.items() if key != "logs"} for one in sets]
    return [fact | row for fact, row in zip(facts, table, strict=True)]


def widths(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The constant ``step_sd`` of rows of :func:`intervals`."""
    constants: dict[str, Any] = {"prefill": {}, "decode": {}}
    for row in sorted(rows, key=lambda row: (row["class"], row["card"])):
        entry = constants[row["step"]].setdefault(
            row["class"], {"sd": round(row["sd"], 3), "cards": {}}
        )
        entry["cards"][row["card"]] = round(row["bias"], 3)
    return constants


def _print_intervals(table: Sequence[Mapping[str, Any]]) -> None:
    """A line a kind and class of steps, card and model, over all numbers of cards; the shares."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in table:
        names = ("step", "class", "card", "model")
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    body = []
    for (step, kind, card, model), rows in sorted(groups.items()):
        against = "kernels" if "kernels" in rows[0]["against"] else "engine"
        mean = np.average([row["mean"] for row in rows], weights=[row["rows"] for row in rows])
        bias, sd = rows[0]["bias"], rows[0]["sd"]
        ends = [100 * math.expm1(bias + sign * Z80 * sd) for sign in (-1, 1)]
        body.append(
            [
                f"{step}, {kind}",
                against,
                f"{model}, {card}",
                ", ".join(sorted({str(row["tp"]) for row in rows})),
                str(sum(row["rows"] for row in rows)),
                f"{100 * math.expm1(-mean):+.1f} %",
                f"{ends[0]:+.0f} to {ends[1]:+.0f} %",
                f"{100 * np.mean([row['inside'] for row in rows]):.0f} %",
            ]
        )
    names = ["composed", "measured", "model", "cards", "rows", "error"]
    print_table(
        "Composed steps over measured, minus 1, and the interval of measured over composed",
        [*names, "80 % interval", "inside"],
        body,
    )
    for kind in ("prefill", "decode"):
        timed = [row for row in table if row["step"] == kind and row["class"] != UNTIMED]
        inside = np.mean([row["inside"] for row in timed])
        print(f"{kind}: {inside:.0%} of the rows left out are inside, sets weighted equally")


def _mixed(profile: Profile, card: str, model: str) -> float:
    """Root mean square of what the card's law of mixed iterations adds to a profile without it."""
    if "mixed_decode_attention_s" in profile.law or load_kernels(card).mixed is None:
        return 0.0
    other = compose(card, model)
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
                mixed = _mixed(profile, card, "llama-3.1-8b")
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: compute the errors, write the table and the profiles' files."""
    parser = argparse.ArgumentParser(
        prog="python -m servegym.experiments.studies.fidelity.step_errors"
    )
    add = parser.add_argument
    add("--left-out", nargs=2, type=Path, metavar=("DATA", "WHEEL"), help="tables, engine runs")
    add("--write", action="store_true", help="with --left-out: write the constants' file, too")
    words = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(words)
    origin = provenance(shlex.join([*parser.prog.split(), *map(str, words)]))
    if options.left_out is not None:
        data, wheel = options.left_out
        sets = left_out_sets(data, wheel, data / MEASURED_RUN)
        rows = intervals(sets)
        if options.write:
            path = data_path(FILE)
            content = read_json(path)
            content["constants"]["step_sd"]["value"] = widths(rows)
            content["constants"]["card_sd"]["value"] = card_deviations(sets)
            write_json(content, path)
        _print_intervals(rows)
        write_result(RESULTS / "fidelity" / "intervals", rows, origin)
        return 0
    rows = step_errors()
    for name in dict.fromkeys(row["profile"] for row in rows):
        data = {**load(name).to_dict(), "step_error": stated(rows, name)}
        Profile.from_dict(data, name).save(data_path(f"{name}.json"))
    write_result(RESULTS / "fidelity" / "step_error", rows, origin)
    parts = ("bias", "sd", "rows", "method", "engine", "mixed")
    print_table(
        "Error of whole steps: log of true seconds over the law's, in per cent",
        ["profile", "step", *parts],
        [
            [row["profile"], row["step"], *(f"{100 * row[part]:.1f}" for part in parts)]
            for row in rows
        ],
    )
    return 0


if __name__ == "__main__":
    run_main(main)
