"""Step latencies of our profiles against those of ``aiconfigurator-core``, and its own estimates.

``aiconfigurator-core`` composes an iteration from kernel latencies that NVIDIA measured under
vLLM. It is no dependency of this package and is imported by this script alone; give it an
environment of its own::

    python -m venv .venv-check && .venv-check/bin/pip install . aiconfigurator-core
    .venv-check/bin/python -m servegym.experiments.studies.fidelity.aiconfigurator

A profile of ours may rest on the same kernel timings: then this checks how an iteration is put
together and interpolated, not the measurement. The column ``source`` marks these profiles.
"""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.experiments.evaluation.output import check_writable, print_table
from servegym.experiments.evaluation.tables import provenance, write_result
from servegym.hardware_profiles import Profile, list_profiles, load
from servegym.hardware_profiles.model_config import model_shape

__all__ = ["compare", "main"]

MODULE = "servegym.experiments.studies.fidelity.aiconfigurator"

# Our devices and models by their names in aiconfigurator.
SYSTEMS = {
    "a100": "a100_sxm",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "l40s": "l40s",
    "rtxpro6000": "rtx_pro_6000_server",
}
MODELS = {
    "Llama-3.1-8B": "meta-llama/Meta-Llama-3.1-8B",
    "Meta-Llama-3-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
}
PROMPTS = (64, 128, 256, 512, 1024, 2048, 4096)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 512, 1024, 2048, 4096)
CHUNKS = (256, 512, 1024)


# Models of published runs by their names in aiconfigurator, and its words for formats.
PATHS = {
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "gpt-oss-120b": "openai/gpt-oss-120b",
}
FORMATS = {"bf16": "bfloat16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4"}


@functools.cache
def _backend(card: str, model: str, tp: int, ep: int, dtype: str, kv_dtype: str) -> Any:
    """Its model, database and backend of a published run's cards."""
    from aiconfigurator_core.sdk.backends.factory import (  # type: ignore[import-not-found]
        get_backend,
    )
    from aiconfigurator_core.sdk.config_builders import (  # type: ignore[import-not-found]
        build_model_config,
    )
    from aiconfigurator_core.sdk.models import get_model  # type: ignore[import-not-found]
    from aiconfigurator_core.sdk.perf_database import (  # type: ignore[import-not-found]
        get_database,
    )

    experts = model_shape(model).experts > 0
    options = {"gemm_quant_mode": FORMATS[dtype], "kvcache_quant_mode": FORMATS[kv_dtype]}
    if model == "gpt-oss-120b":
        del options["gemm_quant_mode"]  # as its checkpoint says
    elif experts and dtype == "fp8_block":
        options["moe_quant_mode"] = "fp8_block"
    shares = {"moe_tp_size": tp // ep if experts else 1, "moe_ep_size": ep}
    config = build_model_config(tp_size=tp, pp_size=1, attention_dp_size=1, **shares, **options)
    system = next(name for key, name in SYSTEMS.items() if card.startswith(key))
    return (
        get_model(PATHS[model], config, "vllm"),
        get_database(system, "vllm", "0.24.0"),
        get_backend("vllm"),
    )


def estimate(row: Any) -> tuple[float, float] | None:
    """TTFT and TPOT of a published run of vLLM by aiconfigurator-core itself, seconds.

    Args:
        row: A row of ``published_rows``. A mixed step has one prompt.

    Returns:
        The estimate of its aggregated serving; None where it has none.
    """
    from aiconfigurator_core.sdk.config import RuntimeConfig  # type: ignore[import-not-found]

    if row.engine != "vllm" or row.model not in PATHS:
        return None
    model, database, backend = _backend(
        row.card, row.model, row.tp, row.ep, row.dtype, row.kv_dtype
    )
    load = RuntimeConfig(batch_size=row.clients, isl=row.prompt, osl=row.output)
    totals = backend.run_agg(model, database, load, ctx_tokens=row.prompt).get_summary_df().iloc[0]
    return 1e-3 * float(totals["ttft"]), 1e-3 * float(totals["tpot"])


def system_of(profile: Profile) -> str | None:
    """The system's name in aiconfigurator, or None if it has none."""
    squeezed = "".join(c for c in profile.name.lower() if c.isalnum())
    return next((name for key, name in SYSTEMS.items() if squeezed.startswith(key)), None)


def compare(profile: Profile, engine: Any) -> list[dict[str, Any]]:
    """Relative differences of the profile's steps, ours over theirs minus 1.

    Args:
        profile: One of ours.
        engine: An ``EngineHandle`` of aiconfigurator for the same device and model.

    Returns:
        One row a step: ``step``, ``batch``, ``tokens``, ``ours_ms``, ``theirs_ms``,
        ``difference``.
    """
    steps = [
        ("prefill", 1, n, profile.prefill_s(n), engine.predict_prefill_latency(1, n))
        for n in PROMPTS
    ]
    for batch in BATCHES:
        for context in CONTEXTS:
            # Generating 2 tokens after `context` prompt tokens is one decode step.
            theirs_ms = engine.predict_decode_latency(batch, context, 2)
            ours_s = profile.decode_s(batch, batch * (context + 1))
            steps.append(("decode", batch, context, ours_s, theirs_ms))
    for batch in (8, 32):
        for chunk in CHUNKS:
            # Their mixed step has decodes about as long as the prompt.
            ours_s = profile.mixed_step_s([(chunk, 0)], batch, batch * (chunk + 1))
            theirs_ms = engine.mixed_step_latency(chunk, batch, chunk, 2)
            steps.append(("mixed", batch, chunk, ours_s, theirs_ms))
    return [
        {"step": step, "batch": batch, "tokens": tokens, "ours_ms": 1e3 * ours_s}
        | {"theirs_ms": theirs_ms, "difference": 1e3 * ours_s / theirs_ms - 1.0}
        for step, batch, tokens, ours_s, theirs_ms in steps
    ]


def summary(profile: Profile, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean absolute, mean signed and largest difference of each kind of step."""
    out = []
    for step in dict.fromkeys(row["step"] for row in rows):
        difference = np.array([row["difference"] for row in rows if row["step"] == step])
        out.append(
            {
                "profile": profile.name,
                "kind_of_profile": profile.kind,
                "step": step,
                "points": len(difference),
                "mape": float(np.abs(difference).mean()),
                "bias": float(difference.mean()),
                "largest": float(np.abs(difference).max()),
                "source": "aiconfigurator" in str(profile.provenance).lower(),
            }
        )
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: compare every profile that aiconfigurator knows the device and model of.

    Args:
        arguments: The command line; ``sys.argv`` by default.

    Returns:
        0, or 1 when the package is missing.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, help="write the summary to FILE.csv")
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(words)
    if options.out is not None:
        check_writable(options.out, (".csv",))
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle  # type: ignore[import-not-found]
    except ImportError:
        print("aiconfigurator-core is not installed; pip install aiconfigurator-core")
        return 1
    rows: list[dict[str, Any]] = []
    for name in list_profiles():
        profile = load(name)
        system, model = system_of(profile), MODELS.get(profile.model["name"])
        if system is not None and model is not None:
            engine = EngineHandle.compile(model, system, "vllm")
            rows += summary(profile, compare(profile, engine))
    shares = ("mape", "bias", "largest")
    print_table(
        "Step latency against aiconfigurator-core",
        ["profile", "step", "points", *shares, "same kernel timings"],
        [
            [row["profile"], row["step"], str(row["points"])]
            + [f"{100 * row[key]:.1f} %" for key in shares]
            + ["yes" if row["source"] else "no"]
            for row in rows
        ],
    )
    if options.out is not None:
        command = shlex.join([*parser.prog.split(), *words])
        write_result(options.out, rows, provenance(command, packages=("aiconfigurator-core",)))
    return 0


if __name__ == "__main__":
    run_main(main)
