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
runs of vLLM (``published_rows``, both parts: TTFT, TPOT), and the RTX 4090's run; a set is of one
card, model and number of cards. No law has seen the part ``test``; widths have. The deviation of a
class of steps (:func:`error_class`) is such that 80 % intervals hold 80 % of the rows of sets that
they were made without, every set with the same weight (:func:`intervals`). `compose.STEP_SD` has
these deviations.
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
from servegym.experiments.studies.fidelity.markdown import Table, update_document
from servegym.hardware_profiles import Profile, list_profiles, load
from servegym.hardware_profiles.build.timed_steps import CARD, MODEL_FOLDERS, compare, read_steps
from servegym.hardware_profiles.compose import Z80, Composer, compose, prefill_class
from servegym.hardware_profiles.kernels import list_cards, load_kernels
from servegym.hardware_profiles.load import data_path
from servegym.hardware_profiles.model_config import model_shape

__all__ = ["main", "step_errors"]

RESULTS = Path("experiments", "results")
P90_OF_SD = 1.645
"""90th percentile of the absolute value of a normal variable of deviation 1."""

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
    found = [profile.fit_error[key]["p90"] for key in ROWS[kind] if key in profile.fit_error]
    return found[0] / P90_OF_SD if found else 0.0


def _ratios(profile: Profile, kind: str) -> list[float]:
    """Logarithms of other published ratios to the card that a profile is scaled from."""
    facts = profile.provenance
    return [
        math.log(value / facts[f"{kind}_ratio"])
        for value in facts.get("published_ratios", {}).get(kind, {}).values()
        if value != facts[f"{kind}_ratio"]
    ]


def error_class(kind: str, model: str, dtype: str) -> tuple[str, str]:
    """The class of steps that share a deviation: kind of step, and what the model computes."""
    shape = model_shape(model)
    if kind == "decode":
        return kind, "experts" if shape.experts else "dense"
    return kind, prefill_class(shape, dtype)


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
            key = (kind, card, model, tp, "bf16", f"kernels, {row['step']}")
            add(key, row["timed_s"], row["composed_s"])
    # Kernels are vLLM's, so another engine's steps are not meant. Laws saw the part ``fit`` alone.
    rows = [row for row in published_rows.read_rows(wheel)[0] if row.engine == "vllm"]
    for one in published_rows.results(rows)[0]:
        row = one["row"]
        for kind, key in (("prefill", "ttft"), ("decode", "tpot")):
            at = (kind, row.card, row.model, row.tp, row.dtype, f"{row.engine}, {key}")
            add(at, 1.0, 1.0 + one[key])
    if run is not None:
        measured = load_run(run)
        found = errors(measured, simulate(measured, compose(*_RUN)))
        for kind, metric in (("prefill", "TTFT"), ("decode", "TPOT")):
            error = next(row["error_of_mean"] for row in found if row["metric"] == metric)
            add((kind, *_RUN, 1, "bf16", f"vllm, {metric.lower()}"), 1.0, 1.0 + error)
    names = ("step", "card", "model", "tp", "dtype", "against")
    return [
        dict(zip(names, key, strict=True)) | {"logs": np.array(logs)} for key, logs in sets.items()
    ]


def intervals(sets: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How many rows of every set the 80 % interval holds that was made without its card and model.

    The width of a class is the 80th percentile of its rows times one factor a kind of step: the
    80th percentile of the rows left out over the width without them. Experts in MXFP4, which ran in
    kernels that were not timed, have no part in the factor.

    Args:
        sets: as :func:`left_out_sets` returns them.

    Returns:
        A row a set with its class, the deviation of its class (``sd``), that of the other sets
        (``sd_without``), its rows' mean and deviation, and the share of them inside; where a class
        has one card and model, the other numbers of cards stand for them.
    """
    classes = [error_class(one["step"], one["model"], one["dtype"]) for one in sets]
    width, without = [], []
    for one, own in zip(sets, classes, strict=True):
        same = [s for s, kind in zip(sets, classes, strict=True) if kind == own]
        rest = [s for s in same if (s["card"], s["model"]) != (one["card"], one["model"])]
        width.append(_quantile(same))
        without.append(_quantile(rest or [s for s in same if s is not one]))
    factor = {}
    for kind in ("prefill", "decode"):
        factor[kind] = _quantile(
            [
                {"logs": one["logs"] / q}
                for one, own, q in zip(sets, classes, without, strict=True)
                if own[0] == kind and own[1] != "mxfp4 experts"
            ]
        )
    made = []
    for one, own, whole, q in zip(sets, classes, width, without, strict=True):
        k = 1.0 if own[1] == "mxfp4 experts" else factor[own[0]]
        logs = one["logs"]
        made.append(
            {key: value for key, value in one.items() if key != "logs"}
            | {
                "class": own[1],
                "rows": len(logs),
                "mean": round(float(logs.mean()), 4),
                "deviation": round(float(logs.std()), 4),
                "sd_without": round(k * q / Z80, 4),
                "inside": round(float((np.abs(logs) <= k * q).mean()), 3),
                "sd": round(k * whole / Z80, 3),
            }
        )
    return made


def _interval_table(made: Sequence[Mapping[str, Any]]) -> Table:
    """A line a kind and class of steps, card and model, over all numbers of cards."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in made:
        names = ("step", "class", "card", "model")
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    body = []
    for (step, kind, card, model), rows in sorted(groups.items()):
        against = "kernels" if "kernels" in rows[0]["against"] else "engine"
        mean = np.average([row["mean"] for row in rows], weights=[row["rows"] for row in rows])
        ends = [100 * math.expm1(sign * Z80 * rows[0]["sd"]) for sign in (-1, 1)]
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
    return Table(
        "intervals",
        "Composed steps over measured, minus 1, and the interval of measured over composed",
        [*names, "80 % interval", "inside"],
        body,
    )


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
    own = {row["step"]: row for row in rows if row["profile"] == name}
    field = {kind: {"bias": row["bias"], "sd": row["sd"]} for kind, row in own.items()}
    return {**field, "source": "experiments/results/fidelity/step_error.csv"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: compute the errors, write the table and the profiles' files."""
    parser = argparse.ArgumentParser(
        prog="python -m servegym.experiments.studies.fidelity.step_errors"
    )
    add = parser.add_argument
    add("--document", type=Path, help="Markdown file whose table is replaced")
    add("--left-out", nargs=2, type=Path, metavar=("DATA", "WHEEL"), help="tables, engine runs")
    words = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(words)
    if options.left_out is not None:
        data, wheel = options.left_out
        made = intervals(left_out_sets(data, wheel, data / MEASURED_RUN))
        table = _interval_table(made)
        print_table(table.title, table.columns, table.rows)
        for kind in ("prefill", "decode"):
            own = [row for row in made if row["step"] == kind and row["class"] != "mxfp4 experts"]
            inside = np.mean([row["inside"] for row in own])
            print(f"{kind}: {inside:.0%} of the rows left out are inside, sets weighted equally")
        write_result(
            RESULTS / "fidelity" / "intervals",
            made,
            provenance(shlex.join([*parser.prog.split(), *map(str, words)])),
        )
        if options.document is not None:
            update_document(options.document, [table])
        return 0
    rows = step_errors()
    for name in dict.fromkeys(row["profile"] for row in rows):
        data = {**load(name).to_dict(), "step_error": stated(rows, name)}
        Profile.from_dict(data, name).save(data_path(f"{name}.json"))
    made = provenance(shlex.join([*parser.prog.split(), *map(str, words)]))
    write_result(RESULTS / "fidelity" / "step_error", rows, made)
    parts = ("bias", "sd", "rows", "method", "engine", "mixed")
    table = Table(
        "step_error",
        "Error of whole steps: log of true seconds over the law's, in per cent",
        ["profile", "step", *parts],
        [
            [row["profile"], row["step"], *(f"{100 * row[part]:.1f}" for part in parts)]
            for row in rows
        ],
    )
    print_table(table.title, table.columns, table.rows)
    if options.document is not None:
        short = Table(table.key, table.title, table.columns[:4], [line[:4] for line in table.rows])
        update_document(options.document, [short])
    return 0


if __name__ == "__main__":
    run_main(main)
