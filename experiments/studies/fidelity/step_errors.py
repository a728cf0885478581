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
models (`servegym.hardware_profiles.build.timed_steps`), published runs of vLLM (``published_rows``:
TPOT, and TTFT of runs with four clients at most, whose prompts seldom meet another; ``mlenergy``),
steps of our own live server and the RTX 4090's run. A set is of one card, model, engine (``ahead``
from vLLM 0.14 on, ``waiting`` before), number of cards and format. The interval of a class of steps
(`compose.step_class`) lies between the 10th and 90th percentile of the logarithms of its rows,
every card and each of its sets with the same weight: of the rows of as many cards of the kind under
the engine, of those of the card under it, or of all, whichever is the first with enough
(:func:`intervals`). ``--write`` puts them into the file of constants.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import shlex
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from servegym._command_line import run_main
from servegym._files import read_json, write_json
from servegym.experiments.evaluation.output import print_table, read_rows
from servegym.experiments.evaluation.tables import provenance, write_result
from servegym.experiments.fidelity.comparison import errors, simulate
from servegym.experiments.fidelity.measured_run import load_run
from servegym.hardware_profiles import Profile, list_profiles, load
from servegym.hardware_profiles.build.published import MODEL_FOLDERS
from servegym.hardware_profiles.build.timed_steps import CARD, compare, read_steps
from servegym.hardware_profiles.compose import (
    EVERYWHERE,
    Z80,
    Composer,
    compose,
    interval_places,
    step_class,
)
from servegym.hardware_profiles.constants import FILE
from servegym.hardware_profiles.kernels import list_cards, load_kernels
from servegym.hardware_profiles.load import data_path
from servegym.hardware_profiles.model_config import model_shape

__all__ = ["main", "step_errors"]

RESULTS = Path("experiments", "results")
P90_OF_SD = 1.645
"""90th percentile of the absolute value of a normal variable of deviation 1."""

ENGINES = ("waiting", "ahead")
"""Engines that plan an iteration when it starts, and that plan it ahead."""

FOLDS, LEAST_ROWS, ALONE = 5, 6, 4
LEAST_HALF = 0.05
"""Half width that engines add to kernels at least (`calibrate_server.LOAD_SD`)."""
# A half to a quarter of the simulated TPOT, by aiconfigurator as well.
_UNLIKELY = ("llama-3.1-8b", "0.12.0")

SD_OF_MEAN = math.sqrt(math.pi / 2.0)
"""Deviation of a normal variable over the mean of its absolute value."""

_RUN, _LIVE = ("rtx4090", "llama-3.1-8b"), ("h200", "llama-3.1-8b")
LIVE_STEPS = Path("vllm_h200", "prefix.steps.jsonl.gz")

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


def live_prompt_steps(path: Path, profile: Profile) -> list[float]:
    """Simulated over measured, minus 1, of a live server's steps with a prompt.

    A step takes the time from two calls of the scheduler before to three after it, in which no
    other had a prompt and none was idle, less four steps of decodes alone: the medians of as many
    sequences.

    Args:
        path: of calls ``[time_s, sequences, contexts, [[chunk, before], ...], ...]``.
        profile: of the server.
    """
    with gzip.open(path, "rt") as stream:
        calls = [json.loads(line)[:4] for line in stream]
    time_s = np.array([call[0] for call in calls])
    running = np.array([call[1] for call in calls])
    plain = np.array([not call[3] for call in calls]) & (running > 0)
    steps = np.diff(time_s)
    alone = np.array([plain[max(n - 2, 0) : n + 3].all() for n in range(len(steps))])
    medians = {
        count: float(np.median(steps[alone & (running[:-1] == count)]))
        for count in set(running[:-1][alone])
        if (alone & (running[:-1] == count)).sum() >= LEAST_ROWS - 1
    }
    errors_of = []
    for n in range(2, len(calls) - 3):
        beside = [n - 2, n - 1, n + 1, n + 2]
        if not calls[n][3] or not plain[[*beside, n + 3]].all():
            continue
        if all(running[k] in medians for k in beside):
            seconds = time_s[n + 3] - time_s[n - 2] - sum(medians[running[k]] for k in beside)
            chunks, batch = [tuple(chunk) for chunk in calls[n][3]], (running[n], calls[n][2])
            law = profile.mixed_step_s(chunks, *batch) if running[n] else profile.step_s(chunks)
            if seconds > 0.0:
                errors_of.append(law / seconds - 1.0)
    return errors_of


def left_out_sets(data: Path, wheel: Path) -> list[dict[str, Any]]:
    """Logarithms of measured over composed steps, and the fold of each, of every set.

    Args:
        data: folder of the published tables.
        wheel: of aiconfigurator-core, with published engine runs.
    """
    from servegym.experiments.studies.fidelity import mlenergy, published_rows

    sets: dict[tuple[Any, ...], list[tuple[float, int]]] = {}

    def add(key: tuple[Any, ...], run: Any, error: float) -> None:
        fold = zlib.crc32(repr(run).encode()) % FOLDS
        sets.setdefault(key, []).append((-math.log1p(error), fold))

    for (card, name), folder in MODEL_FOLDERS.items():
        if card != CARD:
            continue  # its kernel tables rest on these rows
        model, *more = name.split(" tp ")
        tp, kernels = int(more[0]) if more else 1, load_kernels(card)
        kernels.all_reduce_s = lambda *_: 0.0  # type: ignore[method-assign]
        composer = Composer(kernels, model_shape(model), tp)
        for n, row in enumerate(compare(composer, read_steps(data / folder, composer.shape))):
            kind = "decode" if row["step"] == "decode" else "prefill"
            if (kind, name) == ("decode", "llama-3.1-8b"):
                continue  # the tables' decodes rest on it
            for engine in ENGINES:  # kernels are without the host
                key = (kind, card, engine, model, tp, "bf16", f"kernels, {row['step']}")
                add(key, n, row["composed_s"] / row["timed_s"] - 1.0)
    rows = [row for row in published_rows.read_rows(wheel)[0] if row.engine == "vllm"]
    for one in published_rows.results(rows)[0]:
        row = one["row"]
        if (row.model, row.version) == _UNLIKELY:
            continue
        engine, run = ENGINES[row.plans_ahead], (row.prompt, row.output, row.clients)
        key = (row.card, engine, row.model, row.tp, row.dtype)
        add(("decode", *key, "vllm, tpot"), run, one["tpot"])
        if row.clients <= ALONE:
            add(("prefill", *key, "vllm, ttft"), run, one["ttft"])
    for row in mlenergy.step_rows(data / "mlenergy" / "text_v3.csv"):
        key = ("decode", row["card"], ENGINES[0], row["model"], row["tp"], row["dtype"])
        add((*key, "vllm, itl"), (row["task"], row["load"]), row["error"])
    for n, error in enumerate(
        live_prompt_steps(data / LIVE_STEPS, compose(*_LIVE, engine="vllm@0.25"))
    ):
        add(("prefill", _LIVE[0], ENGINES[1], _LIVE[1], 1, "bf16", "vllm, steps"), n, error)
    measured = load_run(data / MEASURED_RUN)
    whole = errors(measured, simulate(measured, compose(*_RUN, engine="vllm@0.19")))
    for kind, metric in (("prefill", "TTFT"), ("decode", "TPOT")):
        error = next(row["error_of_mean"] for row in whole if row["metric"] == metric)
        add((kind, _RUN[0], ENGINES[1], _RUN[1], 1, "bf16", f"vllm, {metric.lower()}"), 0, error)
    names = ("step", "card", "engine", "model", "tp", "dtype", "against")
    return [
        dict(zip(names, key, strict=True)) | {"logs": np.array(logs), "folds": np.array(folds)}
        for key, pairs in sets.items()
        for logs, folds in [zip(*pairs, strict=True)]
    ]


def _quantile(values: np.ndarray, weights: np.ndarray, share: float) -> float:
    order = np.argsort(values)
    sums = np.cumsum(weights[order])
    return float(values[order][min(np.searchsorted(sums, share * sums[-1]), len(order) - 1)])


def _share_of_rows(
    parts: Sequence[np.ndarray], share: float, of: Sequence[float] | None = None
) -> float:
    """A quantile of the rows of some parts, every part with the same weight or that given."""
    of = of or [1.0] * len(parts)
    weights = [np.full(len(p), w / len(p)) for p, w in zip(parts, of, strict=True)]
    return _quantile(np.concatenate(parts), np.concatenate(weights), share)


Table = dict[tuple[str, str, str], tuple[float, float, list[str]]]
"""Middle, half width and models of the rows behind it, by kind, class and place of an interval."""


def _table(sets: Sequence[Mapping[str, Any]]) -> Table:
    """Intervals as the rows have them, of every kind, class and place with rows enough."""
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for one in sets:
        if len(one["logs"]):
            for place in interval_places(one["card"], one["engine"], one["tp"]):
                groups.setdefault((*error_class(one), place), []).append(one)
    table = {}
    for key, some in groups.items():
        logs = [one["logs"] for one in some]
        if sum(map(len, logs)) >= LEAST_ROWS or key[2] == EVERYWHERE:
            cards = [one["card"] for one in some]
            weights = [1.0 / cards.count(card) for card in cards]
            low, high = (_share_of_rows(logs, share, weights) for share in (0.1, 0.9))
            models = sorted({one["model"] for one in some})
            table[key] = ((low + high) / 2.0, max((high - low) / 2.0, LEAST_HALF), models)
    return table


class LeftOut(NamedTuple):
    """Rows of a set and the interval that was made without them."""

    number: int  # of the set
    kind: str
    far: np.ndarray  # from the interval's middle
    half: float
    level: int  # 0, 1, 2: how general the interval's place is
    same: bool  # whether the set's model is among the place's


def _found(table: Table, one: Mapping[str, Any]) -> tuple[float, float, int, bool]:
    """Middle, half width, level and whether the model is there, of a set's interval.

    A class without an interval has the widest of its kind.
    """
    kind, name = error_class(one)
    for level, place in enumerate(interval_places(one["card"], one["engine"], one["tp"])):
        if (kind, name, place) in table:
            middle, half, models = table[kind, name, place]
            return middle, half, level, one["model"] in models
    return 0.0, max(half for key, (_, half, _) in table.items() if key[0] == kind), 2, False


def _left_out(
    sets: Sequence[Mapping[str, Any]], labels: Sequence[np.ndarray], everywhere: bool = False
) -> list[LeftOut]:
    """The rows of each label beside the intervals, or the most general ones, without them.

    ``labels`` has one a row of every set.
    """
    result = []
    for label in sorted({value for each in labels for value in each}):
        kept = [
            {**one, "logs": one["logs"][each != label]}
            for one, each in zip(sets, labels, strict=True)
        ]
        rest = _table(kept)
        if everywhere:
            rest = {key: value for key, value in rest.items() if key[2] == EVERYWHERE}
        for number, (one, each) in enumerate(zip(sets, labels, strict=True)):
            if (each == label).any():
                middle, half, level, same = _found(rest, one)
                far = np.abs(one["logs"][each == label] - middle)
                result.append(LeftOut(number, one["step"], far, half, level, same))
    return result


def intervals(sets: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """80 % intervals of composed steps, and how they hold on rows that they were made without.

    The half width of a place's rows has a factor by kind and level, such that the intervals hold
    80 % of the rows of a fifth left out in turn, or, everywhere, of a card left out. A model that
    is not among a place's adds a deviation, such that they hold 80 % of a card's model left out.

    Args:
        sets: as :func:`left_out_sets` returns them.

    Returns:
        A row a set with its interval, its rows' mean and deviation, and the shares of its rows
        ``inside``, a fifth left out in turn, and ``inside_other``, the card's model left out; and
        the constants ``step_error`` and ``other_model_sd``.
    """
    folds = _left_out(sets, [one["folds"] for one in sets])
    cards, models = (
        _left_out(sets, [np.full(len(one["logs"]), label(one)) for one in sets], everywhere)
        for label, everywhere in (
            (lambda one: one["card"], True),
            (lambda one: f"{one['card']} {one['model']}", False),
        )
    )
    factor = {}
    for kind in ("prefill", "decode"):
        for level, some in enumerate((folds, folds, cards)):
            ratios = [m.far / m.half for m in some if (m.kind, m.level) == (kind, level)]
            factor[kind, level] = _share_of_rows(ratios, 0.8) if ratios else 1.0
    # Prompts were timed with one model a card and class: one deviation for both kinds of step.
    lacks = [m.far**2 - (factor[m.kind, m.level] * m.half) ** 2 for m in models if m.level < 2]
    other = math.sqrt(max(_share_of_rows(lacks, 0.8), 0.0)) / Z80
    table, rows = _table(sets), []
    for number, one in enumerate(sets):
        kind = one["step"]
        parts = {"inside": [], "inside_other": []}
        for name, some in (("inside", folds), ("inside_other", models)):
            for m in (m for m in some if m.number == number):
                more = 0.0 if m.same or m.level == 2 else Z80 * other
                parts[name].append(m.far <= math.hypot(factor[kind, m.level] * m.half, more))
        middle, half, level, _ = _found(table, one)
        facts = {key: value for key, value in one.items() if key not in ("logs", "folds")}
        facts |= {"class": error_class(one)[1], "rows": len(one["logs"])}
        numbers = {"mean": one["logs"].mean(), "deviation": one["logs"].std(), "bias": middle}
        numbers |= {"sd": factor[kind, level] * half / Z80}
        numbers |= {name: np.concatenate(some).mean() for name, some in parts.items()}
        rows.append(facts | {key: round(float(value), 4) for key, value in numbers.items()})
    stated: dict[str, Any] = {"prefill": {}, "decode": {}}
    for (kind, name, place), (middle, half, seen) in sorted(table.items()):
        level = 2 if place == EVERYWHERE else 0 if " tp " in place else 1
        sd = factor[kind, level] * half / Z80
        entry = {"bias": round(middle, 3), "sd": round(sd, 3), "models": seen}
        stated[kind].setdefault(name, {})[place] = entry
    return rows, {"step_error": stated, "other_model_sd": round(other, 3)}


def _print_intervals(table: Sequence[Mapping[str, Any]]) -> None:
    """A line a kind and class of steps, card and engine over all models; a line a card and TP."""
    names = ["composed", "measured", "card", "engine", "models", "cards", "rows", "error"]
    names += ["80 % interval", "inside", "model left out"]
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in table:
        by = "kernels" if "kernels" in row["against"] else "engine"
        line = f"{row['step']}, {row['class']}"
        groups.setdefault((line, by, row["card"], row["engine"]), []).append(row)
        if by == "engine":
            line = f"{row['step']}, all"
            groups.setdefault((line, by, row["card"], f"tp {row['tp']}"), []).append(row)
    body = []
    for key, rows in sorted(groups.items()):
        count = np.array([row["rows"] for row in rows])
        shares = (np.average([row[k] for row in rows], weights=count) for k in
                  ("mean", "inside", "inside_other"))  # fmt: skip
        mean, inside, other = shares
        ends = [row["bias"] + sign * Z80 * row["sd"] for row in rows for sign in (-1, 1)]
        body.append(
            [
                *key,
                ", ".join(sorted({row["model"] for row in rows})),
                ", ".join(sorted({str(row["tp"]) for row in rows})),
                str(count.sum()),
                f"{100 * math.expm1(-mean):+.1f} %",
                f"{100 * math.expm1(min(ends)):+.0f} to {100 * math.expm1(max(ends)):+.0f} %",
                f"{100 * inside:.0f} %",
                f"{100 * other:.0f} %",
            ]
        )
    print_table(
        "Composed steps over measured, minus 1, and the interval of measured over composed",
        names,
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
        rows, constants = intervals(left_out_sets(data, wheel))
        if options.write:
            content = read_json(data_path(FILE))
            for name, value in constants.items():
                content["constants"][name]["value"] = value
            write_json(data_path(FILE), content)
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
