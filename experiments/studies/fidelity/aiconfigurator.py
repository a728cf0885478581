"""What ``aiconfigurator-core`` estimates of published runs of vLLM.

It is no dependency of this package and is imported by this script alone; give it an environment of
its own::

    python -m venv .venv-check && .venv-check/bin/pip install . aiconfigurator-core
"""

from __future__ import annotations

import functools
from typing import Any

from servegym.hardware_profiles.model_config import model_shape

# Cards and models of published runs by their names in aiconfigurator, and its words for formats.
SYSTEMS = {"h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm"}
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
    return (
        get_model(PATHS[model], config, "vllm"),
        get_database(SYSTEMS[card], "vllm", "0.24.0"),
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
