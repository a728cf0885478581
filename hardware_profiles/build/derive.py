"""Profiles of cards without kernel tables.

A card that has no kernel tables of its own takes the tables of the RTX 4090, scaled by two
ratios: one for what memory bandwidth bounds (small batches, decode attention, the head), one for
what arithmetic bounds (long prefills). Both ratios come from published figures; the file of
each card records them, what they were chosen from, and how far the result is from kernel
timings of that card where such exist.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.hardware_profiles.build.published import REFERENCE_KERNELS, save, vidur_layer_s
from servegym.hardware_profiles.calibrate.csv_tables import CsvTable
from servegym.hardware_profiles.calibrate.fitting import error_quantiles, estimated, rounded
from servegym.hardware_profiles.calibrate.kernel_tables import OPS_PER_LAYER, read_ops
from servegym.hardware_profiles.law import Profile
from servegym.hardware_profiles.load import load

BASE = "rtx4090-llama-3.1-8b"
# Iteration size at which the prefill ratio is defined: well above every card's ridge point.
PREFILL_TOKENS = 1024

_LLAMA_CPP = "gpu_benchmarks/llamacpp_llama3_tok_s.csv"
_SOURCES = (
    "XiongjieDai/GPU-Benchmarks-on-LLM-Inference @aa72e0ec86c3 (README tables); "
    "microsoft/vidur @7d47513363ec (mlp.csv); "
    "vendor data sheets (memory bandwidth, dense 16-bit tensor rate); "
    "tables scaled: profile rtx4090-llama-3.1-8b"
)
_LICENCES = "vidur MIT; GPU-Benchmarks: no licence stated, numbers only; LLMServingSim MIT"

# Memory as the driver reports it with ECC on; bandwidth and dense 16-bit tensor rate
# (float32 accumulation) from the vendor's data sheets.
CARDS: dict[str, dict[str, Any]] = {
    "rtx4090": {
        "name": "NVIDIA GeForce RTX 4090",
        "memory_bandwidth_bytes_per_s": 1.008e12,
        "tensor_flop_per_s": 165.2e12,
        "memory_bytes": 25_250_627_584,
        "multiprocessors": 128,
    },
    "a40": {
        "name": "NVIDIA A40",
        "memory_bytes": 46068 * 2**20,
        "memory_bandwidth_bytes_per_s": 6.96e11,
        "tensor_flop_per_s": 149.7e12,
    },
    "a10": {
        "name": "NVIDIA A10",
        "memory_bytes": 23028 * 2**20,
        "memory_bandwidth_bytes_per_s": 6.00e11,
        "tensor_flop_per_s": 125e12,
    },
}


def _llama_cpp(data: Path, card: str, phase: str) -> float:
    for _, row in CsvTable(data / _LLAMA_CPP, ("phase", "gpu", "model", "tokens_per_s")).rows:
        if (row["phase"], row["gpu"], row["model"]) == (phase, card, "8B F16"):
            return float(row["tokens_per_s"])
    raise ValueError(f"{data / _LLAMA_CPP}: no row for {phase}, {card}, 8B F16")


def published_ratios(data: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Time ratios of A40 and A10 to the RTX 4090 by card, bound and source; above 1 is slower."""
    base = CARDS["rtx4090"]
    out: dict[str, dict[str, dict[str, float]]] = {}
    for card in ("a40", "a10"):
        bandwidth, rate = (
            base[key] / CARDS[card][key]
            for key in ("memory_bandwidth_bytes_per_s", "tensor_flop_per_s")
        )
        out[card] = {"decode": {"data_sheet": bandwidth}, "prefill": {"data_sheet": rate}}
    ops = read_ops(data / REFERENCE_KERNELS / "dense.csv", "tokens")
    a100 = vidur_layer_s(data, "a100", "meta-llama/Meta-Llama-3-8B")
    a100_7b = vidur_layer_s(data, "a100", "meta-llama/Llama-2-7b-hf")
    a40_7b = vidur_layer_s(data, "a40", "meta-llama/Llama-2-7b-hf")
    for bound, phase, tokens in (
        ("decode", "generation_1024", 1),
        ("prefill", "prompt_1024", PREFILL_TOKENS),
    ):
        ratio = _llama_cpp(data, "4090 24GB", phase) / _llama_cpp(data, "A40 48GB", phase)
        out["a40"][bound]["llama_cpp_f16"] = ratio
        layer = sum(times * ops[op][tokens] for op, times in OPS_PER_LAYER.items())
        out["a40"][bound]["vidur"] = a100[tokens] / layer * a40_7b[tokens] / a100_7b[tokens]
    return out


def chosen_ratios(
    published: Mapping[str, Mapping[str, Mapping[str, float]]],
) -> dict[str, tuple[float, float, str, str]]:
    """Of each card the decode ratio, the prefill ratio and the reason of either."""
    p = published
    bandwidth = "memory bandwidth of the data sheets (both cards use GDDR6 or GDDR6X)"
    slower = (
        "; the timed ratios, vidur 1.65 and llama.cpp 1.60, are 11 to 14 % slower (an unloaded "
        "token of 27 ms) but compare different software on either card"
    )
    a40 = p["a40"]["prefill"]["vidur"]
    rates = CARDS["a40"]["tensor_flop_per_s"] / CARDS["a10"]["tensor_flop_per_s"]
    return {
        "a40": (
            p["a40"]["decode"]["data_sheet"],
            a40,
            bandwidth + slower,
            "vidur: A40 to A100 on Llama-2-7b times A100 to RTX 4090 on Llama-3-8B",
        ),
        "a10": (
            p["a10"]["decode"]["data_sheet"],
            a40 * rates,
            bandwidth,
            "the A40's ratio times the data sheets' tensor rates of A40 and A10",
        ),
    }


def derive_card(
    base: Profile,
    card: str,
    decode_ratio: float,
    prefill_ratio: float,
    provenance: Mapping[str, Any],
    errors: Callable[[Profile], Mapping[str, Any]],
) -> Profile:
    """Scale a profile's tables to another card.

    The dense table is ``decode_ratio * F + s * (dense(t) - F)`` with ``F = dense(1)`` and ``s``
    such that the ratio at 1,024 tokens is ``prefill_ratio``. Prefill attention takes
    ``prefill_ratio``, decode attention and the head take ``decode_ratio``.
    """
    floor, long = base.dense_s(1), base.dense_s(PREFILL_TOKENS)
    slope = (prefill_ratio * long - decode_ratio * floor) / (long - floor)
    t = base.tables()

    law = dict(base.law)
    law["dense_s"] = rounded(decode_ratio * floor + slope * (t.dense_s - floor))
    law["chunk_attention_s"] = rounded(prefill_ratio * t.chunk_attention_s)
    law["decode_attention_s"] = rounded(decode_ratio * t.decode_attention_s)
    law["head_s"] = rounded(decode_ratio * t.head_s)
    if "mixed_decode_attention_s" in law:
        law["mixed_decode_attention_s"] = rounded(decode_ratio * base.mixed_decode_attention_s())
    data = base.to_dict()
    data.pop("step_error", None)  # the base's, not the card's
    name = f"{card}-llama-3.1-8b"
    data.update(
        name=name,
        description=f"{CARDS[card]['name']}, {base.model['name']}, scaled from {base.name}",
        kind="derived",
        device=CARDS[card] | {"usable_memory_fraction": base.device["usable_memory_fraction"]},
        law=law,
        provenance=dict(provenance),
    )
    return estimated(data, errors)


def derive_cards(data: Path, base: Profile) -> dict[str, Profile]:
    """The cards without kernel tables, from the RTX 4090's profile and published ratios."""
    published = published_ratios(data)
    out: dict[str, Profile] = {}
    for card, (decode, prefill, why_decode, why_prefill) in chosen_ratios(published).items():
        provenance = {
            "source": _SOURCES,
            "licence": _LICENCES,
            "date": "2026-11-21",
            "command": "python -m servegym.hardware_profiles.build.derive DATA",
            "decode_ratio": float(f"{decode:.4g}"),
            "decode_ratio_reason": why_decode,
            "prefill_ratio": float(f"{prefill:.4g}"),
            "prefill_ratio_reason": why_prefill,
            "published_ratios": {
                bound: {source: float(f"{ratio:.4g}") for source, ratio in ratios.items()}
                for bound, ratios in published[card].items()
            },
            "notes": [
                "time ratios to the RTX 4090; above 1 is slower",
                "activation_reserve_bytes is the RTX 4090's",
            ],
        }
        errors = partial(_error_against_vidur, data, card)
        out[card] = derive_card(base, card, decode, prefill, provenance, errors)
    return out


def _error_against_vidur(data: Path, card: str, draft: Profile) -> dict[str, Any]:
    """Distance of a derived dense table from kernel timings of that card, 1 to 2,048 tokens.

    The A40 was timed with Llama-2-7b: times the ratio of the two models' layers on the A100.
    """
    if card != "a40":
        return {"measure": "no kernel timings of this card were to be had"}
    a40, a100 = (vidur_layer_s(data, c, "meta-llama/Llama-2-7b-hf") for c in ("a40", "a100"))
    large = vidur_layer_s(data, "a100", "meta-llama/Meta-Llama-3-8B")
    points = [m for m in a40 if m <= 2048 and m in a100 and m in large]
    layers = draft.model["layers"]
    timed = [layers * a40[m] * large[m] / a100[m] for m in points]
    error = np.array([draft.dense_s(m) / t - 1.0 for m, t in zip(points, timed, strict=True)])
    return {
        "measure": "absolute relative error against kernel timings of this card",
        "dense_against_vidur": error_quantiles(error),
        "dense_against_vidur_mean_signed": float(f"{error.mean():.4g}"),
        "dense_against_vidur_one_token_signed": float(f"{error[points.index(1)]:.4g}"),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: write the derived profiles."""
    parser = argparse.ArgumentParser(
        prog="python -m servegym.hardware_profiles.build.derive",
        description="Cards derived from the RTX 4090 by published ratios.",
    )
    parser.add_argument("data", type=Path, help="folder of the published tables")
    parser.add_argument("--out", type=Path, default=Path(), help="folder to write to")
    options = parser.parse_args(arguments)
    save(derive_cards(options.data, load(BASE)).values(), options.out)
    return 0


if __name__ == "__main__":
    run_main(main)
