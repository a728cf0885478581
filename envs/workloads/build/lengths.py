"""Fit the laws of prompt and output lengths to traces; writes ``data/lengths.json``.

    SERVEGYM_DATA=FOLDER python -m servegym.envs.workloads.build.lengths

A law is the quantiles of the lengths at 0, 5, ..., 100 %, rounded to whole tokens and linear in
between. Prompt and output lengths are drawn independently; the file records the correlation of
their logarithms that this leaves out, and the error of a law, as a whole and cut at the longest
lengths of those who draw from it: its Kolmogorov-Smirnov distance and that of its mean.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import ks_2samp

from servegym._command_line import run_main
from servegym.envs.workloads.build import measured_data, write_made
from servegym.envs.workloads.files import DATA_DIR
from servegym.envs.workloads.lengths import KINDS, sample_lengths
from servegym.envs.workloads.traces import read_requests

TRACES: dict[str, tuple[str, dict[str, str]]] = {
    "azure": (
        "azure_llm_2023/AzureLLMInferenceTrace_conv.csv",
        {
            "source": "Azure/AzurePublicDataset, data/AzureLLMInferenceTrace_conv.csv (2023)",
            "commit": "b469a113cedc",
            "licence": "CC-BY-4.0",
        },
    ),
    "mooncake": (
        "mooncake/conversation_trace.jsonl",
        {
            "source": "kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl",
            "commit": "3b5a59413395",
            "licence": "Apache-2.0",
        },
    ),
    "sharegpt": (
        "helix/shared_gpt_lengths.csv",
        {
            "source": "Thesys-lab/Helix-ASPLOS25, simulator/trace_generator/length_data",
            "commit": "148b733080c0",
            "licence": "Apache-2.0",
        },
    ),
}
STEPS = 20
CAPS = {
    "azure": {"prompt_tokens": 1024, "output_tokens": 400},
    "mooncake": {"prompt_tokens": 15_360, "output_tokens": 1024},
    "sharegpt": {"prompt_tokens": 2048, "output_tokens": 2048},
}
_GRID = (np.arange(100_000) + 0.5) / 100_000


def distance(lengths: np.ndarray, quantiles: np.ndarray) -> float:
    """Kolmogorov-Smirnov distance between lengths ``(n,)`` and their law ``(m,)``."""
    return float(ks_2samp(lengths, sample_lengths(quantiles, _GRID), method="asymp").statistic)


def fit(lengths: np.ndarray, cap: int, steps: int = STEPS) -> dict[str, Any]:
    """The law of lengths ``(n,)`` in ``steps`` steps and its errors, uncut and cut at ``cap``."""
    quantiles = np.rint(np.quantile(lengths, np.linspace(0.0, 1.0, steps + 1)))
    errors = {}
    for name, most in (("uncut", np.inf), (f"cut_at_{cap}", cap)):
        real, law = np.minimum(lengths, most), np.minimum(quantiles, most)
        mean = sample_lengths(law, _GRID).mean() / real.mean() - 1.0
        errors[name] = {
            "kolmogorov_smirnov": float(f"{distance(real, law):.3g}"),
            "relative_error_of_mean": float(f"{mean:.3g}"),
        }
    return {
        "quantiles": quantiles.astype(int).tolist(),
        "mean": float(f"{lengths.mean():.5g}"),
        "share_above_cap": float(f"{(lengths > cap).mean():.4g}"),
        "fit_error": errors,
    }


def read_lengths(path: Path) -> dict[str, np.ndarray]:
    """Prompt and output tokens of a trace, float64 (n,) each."""
    return read_requests(path, lambda _: dict.fromkeys(KINDS, "tokens")).columns


def main(out: Path = DATA_DIR / "lengths.json") -> None:
    """Write the laws."""
    traces = {}
    for name, (path, about) in TRACES.items():
        lengths = read_lengths(measured_data(path))
        prompt, output = lengths.values()
        correlation = np.corrcoef(np.log(prompt), np.log(output))[0, 1]
        traces[name] = {
            **about,
            "requests": len(prompt),
            "correlation_of_logarithms": float(f"{correlation:.3g}"),
            **{kind: fit(values, CAPS[name][kind]) for kind, values in lengths.items()},
        }
    content = {
        "kind": "fitted",
        "law": "quantiles at equal steps from 0 to 100 %, linear in between, rounded to tokens",
        "traces": traces,
    }
    write_made(out, "lengths", content)


if __name__ == "__main__":
    run_main(main)
