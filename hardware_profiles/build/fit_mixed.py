"""Attention of mixed iterations and of unequal contexts, fitted to LLMServingSim's timings.

``servegym.hardware_profiles.kernels.MixedAttention`` is fitted to the rows of two cards (RTX 4090
and RTX PRO 6000, Llama-3.1-8B) that hold decodes of equal contexts beside one chunk without earlier
context, each card with the same weight, and what a longer context adds to ``skew.csv`` of the same
cards. Errors are stated for fits without one of the cards at that card, and for a model that no fit
saw, Qwen3-30B-A3B on the RTX PRO 6000.

    python -m servegym.hardware_profiles.build.fit_mixed DATA

writes the law into the cards' kernel tables, and its terms into the shipped profile of the RTX PRO
6000, which comes from the same timings; that of the RTX 4090 stays as the registered environments
know it.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym._files import read_json, write_json
from servegym.hardware_profiles.build.derive import CARDS as DERIVED_CARDS
from servegym.hardware_profiles.build.fit_cards import CARDS
from servegym.hardware_profiles.build.published import MODEL_FOLDERS
from servegym.hardware_profiles.build.timed_steps import MOST_DECODE_TOKENS
from servegym.hardware_profiles.calibrate.csv_tables import CsvTable
from servegym.hardware_profiles.calibrate.fitting import error_quantiles
from servegym.hardware_profiles.calibrate.kernel_tables import AttentionTable, read_attention
from servegym.hardware_profiles.compose import Composer
from servegym.hardware_profiles.kernels import MixedAttention, load_kernels
from servegym.hardware_profiles.law import Profile
from servegym.hardware_profiles.load import data_path, load
from servegym.hardware_profiles.model_config import model_shape

# Cards whose engine runs decodes and chunks in one kernel, and their L2 caches (NVIDIA's
# architecture white papers).
L2_BYTES = {
    "a100-80g": 40 * 2**20,
    "l40s": 96 * 2**20,
    "rtx4090": 72 * 2**20,
    "rtxpro6000": 128 * 2**20,
}
DEVICES = {"rtx4090": DERIVED_CARDS["rtx4090"], "rtxpro6000": CARDS["rtxpro6000"]}
# Query and KV heads of the timed shards.
HEADS = {"llama-3.1-8b": (32, 8), "llama-3.1-8b tp 2": (16, 4), "qwen3-30b-a3b": (32, 4)}
HEAD_SIZE = 128
FITTED = (("rtx4090", "llama-3.1-8b"), ("rtxpro6000", "llama-3.1-8b"))
UNSEEN = (("rtxpro6000", "qwen3-30b-a3b"), ("rtxpro6000", "llama-3.1-8b tp 2"))
_NAMES = ("block_s", "rate", "latency", "cache", "power", "empty_s")
# From 0.8 x 2 blocks a multiprocessor on, FlashAttention 2 no longer splits contexts.
_BLOCKS = (0.5, 1.59, 1.6, 4.0, 8.0, 16.0)
# The times of skew.csv are sums over three runs: at equal contexts they are 3.0 times those of
# attention.csv (medians by card and number of decodes 2.95 to 3.05).
SKEW_RUNS = 3


@functools.cache
def timed_attention(data: Path, card: str, model: str) -> AttentionTable:
    """The timings of a card and model, see `read_attention`."""
    return read_attention(data / MODEL_FOLDERS[card, model] / "attention.csv")


def pair_s(timed: Mapping[Any, float], heads: int) -> float:
    """Seconds a (query, key) pair of one head takes between prompts of 1,024 and 2,048."""
    return (timed[2048, 0, 0, 0] - timed[1024, 0, 0, 0]) / (1.5 * 1024**2) / heads


def mixed_rows(timed: AttentionTable) -> list[tuple[int, int, int, float, float, float]]:
    """Rows with both: chunk, decodes, context, and seconds of all, the chunk, the decodes alone."""
    return [
        (chunk, b, x, t, timed[chunk, 0, 0, 0], timed[0, 0, b, x])
        for (chunk, before, b, x), t in timed.items()
        if chunk and b and not before and b * x <= MOST_DECODE_TOKENS
        if (chunk, 0, 0, 0) in timed and (0, 0, b, x) in timed
    ]


def logs(law: MixedAttention, data: Path, card: str, model: str) -> np.ndarray:
    """Logarithms of the law's attention of mixed rows over the timed one."""
    timed = timed_attention(data, card, model)
    # A shard's chunks are too small to tell the card's rate.
    whole = timed if "tp" not in model else timed_attention(data, card, "llama-3.1-8b")
    heads, kv_heads = HEADS[model]
    pair = pair_s(whole, HEADS["llama-3.1-8b"][0])
    device = DEVICES[card]
    each = law.chunk_s(heads, device["multiprocessors"])
    return np.array(
        [
            np.log(
                (alone + b * chunk * each + law.decode_s(b, x, heads, kv_heads, HEAD_SIZE, pair,
                                                         device)) / seconds
            )
            for chunk, b, x, seconds, alone, _ in mixed_rows(timed)
        ]
    )  # fmt: skip


def fit(data: Path, timings: Sequence[tuple[str, str]] = FITTED) -> MixedAttention:
    """The law of these timings; its ``l2_bytes`` are those of the first card."""
    from scipy.optimize import least_squares

    start = np.array([3e-6, 0.9, 0.8, 0.7, 4.0, 0.7e-6])

    def law(x: np.ndarray, card: str) -> MixedAttention:
        values = dict(zip(_NAMES, map(float, x * start), strict=True))
        return MixedAttention(l2_bytes=L2_BYTES[card], **values)

    def residuals(x: np.ndarray) -> np.ndarray:
        parts = [logs(law(x, card), data, card, model) for card, model in timings]
        return np.concatenate([r / np.sqrt(len(r)) for r in parts])

    best = least_squares(residuals, np.ones(len(start)), bounds=(0.1, 4.0), diff_step=1e-3)
    return law(best.x, timings[0][0])


def skew_rows(data: Path, card: str) -> np.ndarray:
    """Rows of skew.csv whose chunk, if any, has no earlier context.

    Returns:
        ``(K, 5)``: decodes, chunk, longest less mean context, seconds at the mean, as measured.
    """
    path = data / MODEL_FOLDERS[card, "llama-3.1-8b"] / "skew.csv"
    names = ("n", "pc", "kp", "kv_big", "kv_mean", "t_mean_us", "t_skew_us")
    table = CsvTable(path, names, 8)
    rows = []
    for line, row in table.rows:
        if table.count(line, row, "kp") == 0:
            excess = float(row["kv_big"]) - float(row["kv_mean"])
            times = [1e-6 / SKEW_RUNS * table.positive(line, row, n) for n in names[-2:]]
            rows.append((float(row["n"]), float(row["pc"]), excess, *times))
    return np.array(rows)


def fit_longest(data: Path, law: MixedAttention, cards: Sequence[str]) -> dict[str, Any]:
    """The fields ``longest_blocks``, ``longest`` and ``longest_mixed``."""
    design, target, mixed = [], [], []
    heads, kv_heads = HEADS["llama-3.1-8b"]
    for card in cards:
        processors = DEVICES[card]["multiprocessors"]
        pair = pair_s(timed_attention(data, card, "llama-3.1-8b"), heads)
        token = law.token_s(pair, processors)
        for n, chunk, excess, mean_s, seconds in skew_rows(data, card):
            share = excess * token / mean_s
            if chunk:
                mixed.append((share, seconds / mean_s - 1.0))
                continue
            at = n * kv_heads / processors
            hats = [np.interp(at, _BLOCKS, np.eye(len(_BLOCKS))[k]) for k in range(len(_BLOCKS))]
            design.append(share * np.array(hats))
            target.append(seconds / mean_s - 1.0)
    units = np.linalg.lstsq(np.array(design), np.array(target), rcond=None)[0]
    x, y = np.array(mixed).T
    return {
        "longest_blocks": _BLOCKS,
        "longest": tuple(float(f"{max(v, 0.0):.3g}") for v in units),
        "longest_mixed": float(f"{np.median(y[x > 0.1] / x[x > 0.1]):.3g}"),
    }


def skew_logs(law: MixedAttention, data: Path, card: str) -> dict[str, np.ndarray]:
    """Logarithms over the timed attention of unequal contexts: ``(K, 2)`` with and without."""
    heads, kv_heads = HEADS["llama-3.1-8b"]
    processors = DEVICES[card]["multiprocessors"]
    pair = pair_s(timed_attention(data, card, "llama-3.1-8b"), heads)
    by_kind: dict[str, list[Any]] = {"decode": [], "mixed": []}
    for n, chunk, excess, mean_s, seconds in skew_rows(data, card):
        units = np.interp(n * kv_heads / processors, law.longest_blocks, law.longest)
        more = excess * law.token_s(pair, processors) * (law.longest_mixed if chunk else units)
        pairs = (np.log((mean_s + more) / seconds), np.log(mean_s / seconds))
        by_kind["mixed" if chunk else "decode"].append(pairs)
    return {kind: np.array(rows) for kind, rows in by_kind.items()}


def fit_all(data: Path) -> dict[str, dict[str, Any]]:
    """The field ``mixed`` of every card's kernel tables.

    Args:
        data: folder of the published tables.

    Returns:
        By card, the law's values and its errors by what it was fitted without.
    """
    law = fit(data)
    longest = fit_longest(data, law, [card for card, _ in FITTED])
    values = {name: float(f"{getattr(law, name):.4g}") for name in _NAMES} | longest
    errors = {}
    for k, (card, model) in enumerate(FITTED):
        other = replace(fit(data, [FITTED[1 - k]]), l2_bytes=L2_BYTES[card])
        errors[f"{card}_{model}_from_the_other_card"] = logs(other, data, card, model)
        skew = replace(other, **fit_longest(data, other, [FITTED[1 - k][0]]))
        for kind, logarithms in skew_logs(skew, data, card).items():
            errors[f"{card}_unequal_{kind}_from_the_other_card"] = logarithms[:, 0]
    for card, model in UNSEEN:
        mixed = MixedAttention(l2_bytes=L2_BYTES[card], **values)
        errors[f"{card}_{model}"] = logs(mixed, data, card, model)
    spreads = {key: error_quantiles(np.expm1(logarithms)) for key, logarithms in errors.items()}
    return {
        card: {"l2_bytes": size, **values, "errors": spreads} for card, size in L2_BYTES.items()
    }


def with_surplus(profile: Profile, card: str, model: str) -> Profile:
    """A profile with what the card's kernel tables say of mixed iterations and long contexts."""
    data = profile.to_dict()
    composer = Composer(load_kernels(card), model_shape(model))
    data["law"] |= composer.surplus(data["law"]["decode_sequences"])
    note = "longest chunk and longest context: as composed from kernel tables of the card"
    notes = data["provenance"]["notes"]
    data["provenance"]["notes"] = [*(n for n in notes if n != note), note]
    return Profile.from_dict(data, profile.name)


def with_mixed(content: Mapping[str, Any], mixed: Mapping[str, Any]) -> dict[str, Any]:
    """A card's kernel tables with a law of :func:`fit_all` in place of the one that they have."""
    content, values = dict(content), dict(mixed)
    content.pop("mixed", None)
    rest = {k: v for k, v in content["held_out"].items() if not k.startswith("mixed_attention")}
    content["held_out"] = rest | {
        f"mixed_attention_{key}": error for key, error in values.pop("errors").items()
    }
    at = list(content).index("held_out")
    return dict([*list(content.items())[:at], ("mixed", values), *list(content.items())[at:]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: write the law into the data files of the package."""
    parser = argparse.ArgumentParser(
        prog="python -m servegym.hardware_profiles.build.fit_mixed",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("data", type=Path, help="folder of the published tables")
    for card, mixed in fit_all(parser.parse_args(arguments).data).items():
        path = data_path("kernels") / f"{card}.json"
        write_json(path, with_mixed(read_json(path), mixed))
    name = "rtxpro6000-llama-3.1-8b"
    with_surplus(load(name), "rtxpro6000", "llama-3.1-8b").save(data_path(f"{name}.json"))
    return 0


if __name__ == "__main__":
    run_main(main)
