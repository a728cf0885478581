"""Fit the laws of prompt and output lengths to traces; writes ``data/lengths.json``.

    python -m servegym.envs.workloads.build.lengths --data FOLDER

FOLDER (default: ``$SERVEGYM_DATA``) holds ``azure_llm_2023/AzureLLMInferenceTrace_conv.csv``,
``mooncake/conversation_trace.jsonl`` and ``helix/shared_gpt_lengths.csv``.

A law is the quantiles of the lengths at 0, 5, ..., 100 %, rounded to whole tokens and linear in
between. Prompt and output lengths are drawn independently; the file records the correlation of
their logarithms that this leaves out. The error of a law is its Kolmogorov-Smirnov distance to the
lengths and the relative error of its mean, as a whole and cut at the longest lengths of those who
draw from it.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import ks_2samp

from servegym._command_line import run_main
from servegym._files import write_json
from servegym.envs.workloads.build.options import fit_arguments
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
    """The law of lengths ``(n,)`` in ``steps`` steps and its errors, uncut and cut at ``cap``.

    Raises:
        ValueError: If there are fewer lengths than steps, or one is below 1.
    """
    if len(lengths) <= steps:
        raise ValueError(f"lengths has {len(lengths)} values; more than {steps} are needed.")
    if lengths.min() < 1:
        raise ValueError(f"lengths holds {lengths.min()}; at least 1 token is allowed.")
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
    """Prompt and output tokens of a trace, float64 (n,) each.

    Raises:
        MalformedFileError: A trace that cannot be used.
    """
    return read_requests(path, lambda _: dict.fromkeys(KINDS, "tokens")).columns


def main(argv: list[str] | None = None) -> None:
    """Command line entry; see the module's docstring."""
    paths, out = fit_arguments(__doc__, "lengths.json", [path for path, _ in TRACES.values()], argv)
    traces = {}
    for (name, (_, about)), path in zip(TRACES.items(), paths, strict=True):
        lengths = read_lengths(path)
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
        "command": "python -m servegym.envs.workloads.build.lengths --data FOLDER",
        "date": datetime.date.today().isoformat(),
    }
    write_json(out, content)
    print(out)


if __name__ == "__main__":
    run_main(main)
