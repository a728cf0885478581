"""Layer profiles from kernel tables: Mixtral-8x7B, Qwen3-30B-A3B, DeepSeek-V2-Lite.

The whole layer is the fused kernel as timed, tokens spread evenly over the experts (on the A100
only skewed routing was timed: power law, exponent 1.01). Weights that fit in the L2 cache were
still there from the call before when the kernels were timed; in a model another layer runs in
between, so such times are raised to ``base_s + active x expert_read_s``, fitted on the calls too
large for the cache.

DeepSeek-V2-Lite was not timed. Its layer is that of Qwen3-30B-A3B (same hidden size) with the
reading of weights scaled by the bytes of an expert and the rest taken at equal arithmetic; how
far this is off is stated by predicting two timed layers of other shapes in the same way.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym._files import write_json
from servegym.hardware_profiles.build.fit_cards import CARDS
from servegym.hardware_profiles.build.published import RTXPRO6000_EXPERTS
from servegym.hardware_profiles.calibrate.csv_tables import CsvTable
from servegym.hardware_profiles.calibrate.fitting import (
    as_integers,
    error_quantiles,
    interpolate_missing,
    random_third,
    rounded,
)
from servegym.hardware_profiles.interpolation import along

FORMAT = "servegym-moe-layer/1"
L2_BYTES = {"a100-80g": 40e6, "l40s": 96e6, "h100": 50e6, "rtxpro6000": 128e6}
ROUTING = {"a100-80g": "power_law_1.01"}
_DEVICE_FACTS = ("name", "memory_bytes", "memory_bandwidth_bytes_per_s", "tensor_flop_per_s")


def _model(
    name: str, layers: int, hidden: int, width: int, experts: int, top_k: int, shared: int
) -> dict[str, Any]:
    return {
        "name": name,
        "layers": layers,
        "hidden_size": hidden,
        "expert_intermediate_size": width,
        "experts": experts,
        "top_k": top_k,
        "shared_experts": shared,
        "bytes_per_value": 2,
        "expert_bytes": 3 * hidden * width * 2,
    }


MODELS = {
    "mixtral-8x7b": _model("Mixtral-8x7B", 32, 4096, 14336, 8, 2, 0),
    "qwen3-30b-a3b": _model("Qwen3-30B-A3B", 48, 2048, 768, 128, 8, 0),
    "deepseek-v2-lite": _model("DeepSeek-V2-Lite", 26, 2048, 1408, 64, 6, 2),
}
# Timed layers of other shapes: how far the way to DeepSeek-V2-Lite is off is judged on them.
OTHER_TIMED = {
    "2816x704": _model("2816x704", 1, 2816, 704, 128, 8, 0),
    "4096x1536": _model("4096x1536", 1, 4096, 1536, 128, 8, 0),
}

# A law through two points alone gives them back to rounding: such a call is not below the law.
_ROUNDING = 1e-9


def _read_layer(path: Path, model: Mapping[str, Any], routing: str) -> dict[int, float]:
    """``{tokens: seconds}`` of the fused layer with all experts on the card, empty if untimed."""
    names = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts")
    rows = CsvTable(path, (*names, "moe_tp_size", "moe_ep_size", "distribution", "latency"), 8)
    shape = tuple(
        model[key] for key in ("hidden_size", "expert_intermediate_size", "top_k", "experts")
    )
    out: dict[int, float] = {}
    for line, row in rows.rows:
        tokens, *sizes = (rows.count(line, row, name) for name in names)
        whole = (row["moe_tp_size"], row["moe_ep_size"], row["distribution"]) == ("1", "1", routing)
        if whole and tuple(sizes) == shape:
            out[tokens] = 1e-3 * rows.positive(line, row, "latency", "milliseconds")
    return dict(sorted(out.items()))


def _active(model: Mapping[str, Any], tokens: float) -> float:
    return min(float(model["experts"]), tokens * model["top_k"])


def small_call_law(
    times: Mapping[int, float], model: Mapping[str, Any], cache_bytes: float, even: bool
) -> tuple[float, float]:
    """``base_s`` and ``expert_read_s`` of the calls bound by reading the experts' weights.

    Calls whose weights fit in twice the L2 cache are left out. Where tokens do not spread evenly
    only one token and a saturated call tell how many experts are active.
    """
    full = model["experts"] / model["top_k"]
    fastest: dict[float, float] = {}
    for tokens, seconds in times.items():
        active = _active(model, tokens)
        certain = tokens <= 4 * full if even else tokens == 1 or tokens == 8 * full
        # Up to twice the cache a part of the weights is still found there.
        if certain and active * model["expert_bytes"] > 2.0 * cache_bytes:
            # More tokens on the same experts only add to the time, and so does scatter.
            fastest[active] = min(seconds, fastest.get(active, seconds))
    if not even:
        # One token counts even if its weights fit: there is no other small call.
        fastest[_active(model, 1)] = times[1]
    a, t = np.array(list(fastest.items())).T
    design = np.column_stack([np.ones_like(a), a]) / t[:, None]
    base, read = np.linalg.lstsq(design, np.ones_like(t), rcond=None)[0]
    if base < 0.0:
        base, read = 0.0, float(np.sum(a / t) / np.sum((a / t) ** 2))
    return float(base), float(read)


def _whole_layer(
    times: Mapping[int, float],
    model: Mapping[str, Any],
    law: tuple[float, float],
    cache_bytes: float,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Tokens, seconds with cached calls raised to the law, and how many were raised."""
    raised = 0
    out = []
    for tokens, seconds in times.items():
        active = _active(model, tokens)
        least = law[0] + active * law[1]
        cached = active * model["expert_bytes"] <= 2.0 * cache_bytes
        if cached and seconds < least * (1.0 - _ROUNDING):
            seconds, raised = least, raised + 1
        out.append(seconds)
    return np.array(list(times), float), np.array(out), raised


def other_shape(
    tokens: np.ndarray,
    seconds: np.ndarray,
    timed: Mapping[str, Any],
    law: tuple[float, float],
    other: Mapping[str, Any],
) -> tuple[np.ndarray, tuple[float, float]]:
    """Seconds at ``tokens``, ``base_s`` and ``expert_read_s`` of a layer from a timed one's."""
    base, read = law
    size = other["expert_bytes"] / timed["expert_bytes"]
    work = size * other["top_k"] / timed["top_k"]
    rest = seconds - base - np.array([_active(timed, t) for t in tokens]) * read
    rest = np.maximum(rest, 0.0)
    reading = base + np.array([_active(other, t) for t in tokens]) * read * size
    return reading + along(tokens, rest, tokens * work), (base, read * size)


def fit_layer(card: str, model: str, data: Path) -> dict[str, Any]:
    """The file of one layer on one card: ``"fitted"`` where it was timed, else ``"derived"``."""
    facts = MODELS[model]
    derived = model == "deepseek-v2-lite"
    timed = MODELS["qwen3-30b-a3b"] if derived else facts
    routing = ROUTING.get(card, "balanced")
    path = data / "aiconfigurator" / f"{CARDS[card]['file']}_vllm_moe_perf.csv"
    times = _read_layer(path, timed, routing)
    law = small_call_law(times, timed, L2_BYTES[card], routing == "balanced")
    tokens, seconds, raised = _whole_layer(times, timed, law, L2_BYTES[card])

    as_timed = seconds == np.array(list(times.values()))
    error: dict[str, Any] = {
        "measure": "absolute relative error; held-out rows unless said",
        "layer_random_third": _layer_error(tokens, seconds, as_timed),
    }
    if derived:
        error |= _other_shape_errors(path, routing, tokens, seconds, timed, law, card)
        seconds, law = other_shape(tokens, seconds, timed, law, facts)
    result = {
        "format": FORMAT,
        "name": f"{card}-{model}",
        "description": f"{CARDS[card]['name']}, one layer of {facts['name']}",
        "kind": "derived" if derived else "fitted",
        "device": {key: CARDS[card][key] for key in _DEVICE_FACTS} | {"l2_bytes": L2_BYTES[card]},
        "model": facts,
        "engine": {
            "name": "vLLM fused MoE",
            "version": f"{CARDS[card]['version']} (kernels)",
            "dtype": "bf16",
        },
        "law": {
            "base_s": float(f"{law[0]:.6g}"),
            "expert_read_s": float(f"{law[1]:.6g}"),
            "layer_tokens": as_integers(tokens),
            "layer_s": rounded(seconds),
        },
        "domain": {"max_layer_tokens": int(tokens[-1])},
        "fit_error": error,
        "provenance": _provenance(card, routing, raised, derived),
    }
    if (card, model) == ("rtxpro6000", "qwen3-30b-a3b"):
        error |= _against_profiler(data / RTXPRO6000_EXPERTS / "moe.csv", result)
    return result


def _layer_error(
    tokens: np.ndarray, seconds: np.ndarray, as_timed: np.ndarray
) -> dict[str, float | int]:
    """Errors of the layer at a third of its rows, interpolated from the others."""
    gone = random_third(seconds.shape, np.random.default_rng(0))
    guess = interpolate_missing(tokens, seconds, gone)
    return error_quantiles((guess / seconds - 1.0)[gone & as_timed])


def _other_shape_errors(
    path: Path,
    routing: str,
    tokens: np.ndarray,
    seconds: np.ndarray,
    timed: Mapping[str, Any],
    law: tuple[float, float],
    card: str,
) -> dict[str, Any]:
    """Errors of :func:`other_shape` on the timed layers of other shapes, as far as there are."""
    error = {}
    for label, shape in OTHER_TIMED.items():
        truth = _read_layer(path, shape, routing)
        if not truth:
            continue
        predicted, _ = other_shape(tokens, seconds, timed, law, shape)
        pairs = [
            (along(tokens, predicted, t), s)
            for t, s in truth.items()
            if _active(shape, t) * shape["expert_bytes"] > L2_BYTES[card]
        ]
        error[f"layer_of_{label}_predicted_from_qwen3"] = error_quantiles(
            np.array([a / b - 1.0 for a, b in pairs])
        )
    return error


def _provenance(card: str, routing: str, raised: int, derived: bool) -> dict[str, Any]:
    """The ``provenance`` field."""
    notes = [
        f"whole layer: fused kernel as timed, {routing.replace('_', ' ')} routing; gate and "
        "shared experts left out",
        f"{raised} calls whose weights fit in twice the L2 cache of {L2_BYTES[card] / 1e6:.0f} MB "
        "were raised to base_s + active x expert_read_s",
    ]
    if derived:
        notes.insert(
            0,
            "layer: from Qwen3-30B-A3B on this card; reading scaled by expert bytes, the rest at "
            "equal arithmetic",
        )
    return {
        "source": f"aiconfigurator-core 0.12.0: {CARDS[card]['file']} vLLM "
        f"{CARDS[card]['version']} moe",
        "licence": "aiconfigurator-core Apache-2.0",
        "commit": "aiconfigurator-core 0.12.0",
        "date": "2026-11-21",
        "command": "python -m servegym.hardware_profiles.build.fit_moe DATA",
        "notes": notes,
    }


def _layer_s(layer: Mapping[str, Any], tokens: float) -> float:
    """Seconds of the whole routed layer."""
    law = layer["law"]
    return along(np.array(law["layer_tokens"]), np.array(law["layer_s"]), tokens)


def _against_profiler(path: Path, layer: Mapping[str, Any]) -> dict[str, Any]:
    """Distance from another profiler's fused calls of all experts, by tokens."""
    rows, model = CsvTable(path, ("tokens", "activated_experts", "time_us"), 8), layer["model"]
    errors = [
        _layer_s(layer, float(row["tokens"])) / (1e-6 * float(row["time_us"])) - 1.0
        for _, row in rows.rows
        if int(row["activated_experts"]) == model["experts"]
    ]
    return {"layer_against_llmservingsim": error_quantiles(np.array(errors))}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: write the layer profiles."""
    parser = argparse.ArgumentParser(
        prog="python -m servegym.hardware_profiles.build.fit_moe",
        description="Mixture-of-experts layers from kernel tables.",
    )
    parser.add_argument("data", type=Path, help="folder of the published tables")
    parser.add_argument("--out", default=".", help="folder to write to")
    options = parser.parse_args(arguments)
    layers = [fit_layer(card, model, options.data) for card in L2_BYTES for model in MODELS]
    for layer in layers:
        write_json(Path(options.out) / f"moe-{layer['name']}.json", layer)
        law = layer["law"]
        print(
            f"{layer['name']}: layer, 1 and 256 tokens {1e6 * _layer_s(layer, 1):.0f} and "
            f"{1e6 * _layer_s(layer, 256):.0f} us; {1e6 * law['base_s']:.0f} + "
            f"{1e6 * law['expert_read_s']:.1f} us an active expert"
        )
    return 0


if __name__ == "__main__":
    run_main(main)
