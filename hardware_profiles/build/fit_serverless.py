"""Fit the constants of serverless serving to measurements.

    python -m servegym.hardware_profiles.build.fit_serverless DATA --cpu-expert FILE

FILE has times of experts on one CPU as `servegym.experiments.papers.serverless.expert_times` takes
them, in the columns model, threads, tokens, expert_params and ms_min; DATA holds
``moe_prefetch/x2_cpu_expert_cost.csv``, ``lambda_perf/lambda_cold_starts.csv``,
``serverlessllm/load_times.csv`` and ``serverless_pricing/prices.csv``.

Units: seconds, tokens, MB of 2**20 bytes, GB of 1024 MB, vCPUs, USD.
"""

from __future__ import annotations

import argparse
import math
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym._files import write_json
from servegym.hardware_profiles.calibrate.csv_tables import CsvTable
from servegym.hardware_profiles.calibrate.fitting import error_quantiles
from servegym.hardware_profiles.serverless import MB, SERVING

FORMAT = "servegym-serverless-constants/1"

# A law that explains less of the variance than this is refused.
MIN_R2 = 0.8


def r_squared(measured: np.ndarray, guess: np.ndarray) -> float:
    """Share of the variance of ``measured`` that ``guess`` explains."""
    around = measured - measured.mean()
    total = float(around @ around)
    rest = measured - guess
    return 1.0 - float(rest @ rest) / total if total > 0.0 else 0.0


def _require(r2: float, what: str) -> float:
    if not r2 >= MIN_R2:
        raise ValueError(
            f"{what}: the law explains {100 * max(r2, 0.0):.0f} % of the variance (R2 = {r2:.2f}); "
            f"at least {100 * MIN_R2:.0f} % is required: measure again on a quiet machine"
        )
    return float(f"{r2:.4g}")


def _line(tokens: np.ndarray, times: np.ndarray) -> tuple[float, float]:
    """``a + b n`` with a, b > 0 of least relative squares."""
    design = np.column_stack([1.0 / times, tokens / times])
    from scipy.optimize import nnls

    (floor, slope), _ = nnls(design, np.ones_like(times))
    return float(floor), float(slope)


def fit_experts(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Fit the time of one expert against tokens, from the fastest of the repeats.

    Args:
        path: CSV with ``model, threads, tokens, expert_params, ms_min``; rows of one thread.

    Returns:
        One entry a shape, seconds.

    Raises:
        ValueError: Naming file, line and field of bad input, or a law that explains too little.
    """
    table = CsvTable(Path(path), ("model", "threads", "tokens", "expert_params", "ms_min"), 4)
    points: dict[str, dict[int, float]] = defaultdict(dict)
    parameters: dict[str, int] = {}
    for line, row in table.rows:
        tokens = table.positive(line, row, "tokens")
        seconds = 1e-3 * table.positive(line, row, "ms_min")
        size = table.positive(line, row, "expert_params")
        if table.positive(line, row, "threads") != 1:
            continue
        points[row["model"]][int(tokens)] = seconds
        parameters[row["model"]] = int(size)
    out = {}
    for name, times in points.items():
        n = np.array(sorted(times)[1:], float)
        t = np.array([times[int(v)] for v in n])
        floor, slope = _line(n, t)
        left_out = []
        for i in range(len(n)):
            rest = np.arange(len(n)) != i
            a, b = _line(n[rest], t[rest])
            left_out.append((a + b * n[i]) / t[i] - 1.0)
        out[name] = {
            "parameters": parameters[name],
            "bytes_per_value": 4,
            "one_token_s": float(f"{times[1]:.5g}"),
            "batch_floor_s": float(f"{max(floor, 1e-9):.5g}"),
            "per_token_s": float(f"{max(slope, 1e-12):.5g}"),
            "max_tokens": int(n[-1]),
            "fit_error": {
                "r2": _require(r_squared(t, floor + slope * n), f"{table.path}: {name}"),
                "left_out_one_by_one": error_quantiles(np.array(left_out), 3),
            },
        }
    return out


def fit_threads(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Fit ``theta1 exp(-theta2 n) + theta3`` to the time of one call on n threads, T(1) = 1.

    Args:
        path: CSV with ``threads, experts_per_call, us_p50``.

    Returns:
        The law, relative to one thread, and its errors.

    Raises:
        ValueError: Naming file, line and field of bad input, or a law that explains too little.
    """
    from scipy.optimize import least_squares

    table = CsvTable(Path(path), ("threads", "experts_per_call", "us_p50"), 4)
    best: dict[int, float] = {}
    for line, row in table.rows:
        threads = int(table.positive(line, row, "threads"))
        time = table.positive(line, row, "us_p50")
        if table.positive(line, row, "experts_per_call") == 1 and threads <= SERVING.max_vcpus:
            best[threads] = min(time, best.get(threads, math.inf))
    n = np.array(sorted(best), float)
    t = np.array([best[int(v)] for v in n]) / best[1]

    def law(log_theta: np.ndarray, threads: np.ndarray) -> np.ndarray:
        theta1, theta2, theta3 = np.exp(log_theta)
        return theta1 * np.exp(-theta2 * threads) + theta3

    def solve(points: np.ndarray) -> np.ndarray:
        start = np.log([1.0, 1.0, max(float(t.min()), 0.1)])
        return least_squares(lambda x: law(x, n[points]) / t[points] - 1.0, start).x

    everything = np.ones(len(n), bool)
    solution = solve(everything)
    left_out = []
    for i in range(1, len(n)):
        found_without = solve(np.arange(len(n)) != i)
        left_out.append(float(law(found_without, n[i : i + 1])[0] / t[i] - 1.0))
    guess = law(solution, n)
    # The law is scaled so that one vCPU takes exactly the measured one-token time.
    theta1, theta2, theta3 = np.exp(solution)
    one = float(law(solution, np.ones(1))[0])
    return {
        "theta1_relative": float(f"{theta1 / one:.5g}"),
        "theta2_per_vcpu": float(f"{theta2:.5g}"),
        "theta3_relative": float(f"{theta3 / one:.5g}"),
        "max_vcpus": int(n[-1]),
        "fit_error": {
            "r2": _require(r_squared(t, guess), str(table.path)),
            "at_measured_points": error_quantiles(guess / t - 1.0, 3),
            "left_out_one_by_one": error_quantiles(np.array(left_out), 3),
        },
    }


def fit_starts(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Fit lognormal start times of Python functions; every third day is left out.

    Args:
        path: CSV with ``date, runtime, package, arch, memory_mb, init_ms_samples``.

    Returns:
        One law a package and architecture, pooled over memory sizes.

    Raises:
        ValueError: Naming file, line and field of bad input.
    """
    columns = ("date", "runtime", "package", "arch", "memory_mb", "init_ms_samples")
    table = CsvTable(Path(path), columns, 10)
    days = {row["date"] for _, row in table.rows}
    held_out = set(sorted(days)[2::3])
    groups: dict[str, list[tuple[bool, int, list[float]]]] = defaultdict(list)
    for line, row in table.rows:
        if not row["runtime"].startswith("python3"):
            continue
        memory = int(table.positive(line, row, "memory_mb"))
        samples = [1e-3 * float(text) for text in row["init_ms_samples"].split()]
        groups[f"{row['package']}-{row['arch']}"].append((row["date"] in held_out, memory, samples))
    return {name: _start_law(rows) for name, rows in sorted(groups.items())}


def _start_law(rows: list[tuple[bool, int, list[float]]]) -> dict[str, Any]:
    """One lognormal law of ``(held out, memory in MB, seconds)`` rows, and its errors."""
    from scipy.special import ndtri
    from scipy.stats import kstest

    fitted = np.array([s for left_out, _, samples in rows if not left_out for s in samples])
    left_out = np.array([s for gone, _, samples in rows if gone for s in samples])
    centre, sigma = float(np.log(fitted).mean()), float(np.log(fitted).std())
    distance = float(kstest((np.log(left_out) - centre) / sigma, "norm").statistic)
    sizes = sorted({memory for _, memory, _ in rows})
    by_memory = [
        np.median([s for _, memory, samples in rows if memory == size for s in samples])
        for size in sizes
    ]
    effect = np.abs(np.array(by_memory) / np.median(fitted) - 1).max()
    errors = {
        f"p{q:g}": float(f"{math.exp(centre + sigma * ndtri(q / 100)) / v - 1:.3g}")
        for q, v in zip((50, 90, 99), np.percentile(left_out, (50, 90, 99)), strict=True)
    }
    return {
        "median_s": float(f"{math.exp(centre):.4g}"),
        "sigma": float(f"{sigma:.4g}"),
        "samples": len(fitted),
        "largest_effect_of_memory": float(f"{effect:.3g}"),
        "memory_mb": sizes,
        "fit_error": {
            "held_out_samples": len(left_out),
            "kolmogorov_smirnov": float(f"{distance:.3g}"),
            "relative_error_of_quantile": errors,
        },
    }


# Published parameter counts of the loaded checkpoints, two bytes each.
_LOADED = {
    "facebook/opt-6.7b": 6_658_473_984,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": 32_763_876_352,
}


def fit_loads(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Median rate at which checkpoints are loaded.

    Args:
        path: CSV with ``testbed, mode, model, format, loading_time_s``.

    Returns:
        One entry a testbed, mode and format: ``mb_per_s`` and the relative errors of the times
        that it gives.

    Raises:
        ValueError: Naming file, line and field of bad input.
    """
    table = CsvTable(Path(path), ("testbed", "mode", "model", "format", "loading_time_s"), 2)
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for line, row in table.rows:
        seconds = table.positive(line, row, "loading_time_s")
        size = 2.0 * _LOADED[row["model"]] / MB
        key = f"{row['testbed'].partition('_')[0]}-{row['format']}"
        groups[key if row["mode"] == "random" else f"{key}-{row['mode']}"].append((size, seconds))
    out = {}
    for key, rows in sorted(groups.items()):
        size, seconds = np.array(rows).T
        rate = float(np.median(size / seconds))
        out[key] = {
            "mb_per_s": float(f"{rate:.4g}"),
            "p10_mb_per_s": float(f"{np.quantile(size / seconds, 0.1):.4g}"),
            "p90_mb_per_s": float(f"{np.quantile(size / seconds, 0.9):.4g}"),
            "fit_error": error_quantiles(size / rate / seconds - 1.0, 3),
        }
    return out


def read_prices(path: str | os.PathLike[str]) -> dict[str, float]:
    """List prices in USD per MB·s, and the ratio of GPU to CPU memory prices.

    Args:
        path: CSV with ``provider, item, value, unit, tier_or_note``.

    Returns:
        The prices; every key carries its unit.

    Raises:
        ValueError: If one is missing or no number.
    """
    table = CsvTable(Path(path), ("provider", "item", "value", "unit", "tier_or_note"), 5)

    def find(provider: str, item: str, note: str = "") -> float:
        for line, row in table.rows:
            same = (row["provider"], row["item"]) == (provider, item)
            if same and row["tier_or_note"].startswith(note):
                return table.positive(line, row, "value")
        raise ValueError(
            f"{table.path}: field 'item': no row of {provider}, {item} {note}".rstrip()
        )

    arm = find("AWS Lambda arm64", "memory-duration", "us-east-1") / 1024
    x86 = find("AWS Lambda x86_64", "memory-duration", "us-east-1") / 1024
    unit = find("Alibaba FC", "CU price", "tier 1")
    # A GB of memory comes with one vCPU.
    cpu = find("Alibaba FC", "active vCPU") + find("Alibaba FC", "memory")
    tesla, ada = (find("Alibaba FC", f"{card} GPU active") for card in ("Tesla", "Ada"))
    prices = {
        "aws_cpu_usd_per_mb_s": x86,
        "aws_cpu_arm_usd_per_mb_s": arm,
        "aws_request_usd": find("AWS Lambda", "requests") * 1e-6,
        "alibaba_cpu_usd_per_mb_s": unit * cpu / 1024,
        "alibaba_gpu_tesla_usd_per_mb_s": unit * tesla / 1024,
        "alibaba_gpu_ada_usd_per_mb_s": unit * ada / 1024,
        "alibaba_gpu_tesla_over_cpu": tesla / cpu,
        "alibaba_gpu_ada_over_cpu": ada / cpu,
        "alibaba_request_usd": find("Alibaba FC", "invocations") * unit * 1e-4,
    }
    return {key: float(f"{value:.6g}") for key, value in prices.items()}


def fit(
    folder: str | os.PathLike[str], cpu_expert: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    """Fit everything from a folder of measurements.

    Args:
        folder: See the module's docstring.
        cpu_expert: The CSV of CPU experts, by default that of the folder.

    Returns:
        The JSON object of the constants file.

    Raises:
        ValueError: Naming the file and field that cannot be used, and why.
    """
    root = Path(folder)
    experts = Path(cpu_expert or root / "local_cpu_expert" / "expert_ffn_ms.csv")
    data = {
        "format": FORMAT,
        "description": "CPU experts, container starts, model loading and prices of serverless "
        "serving; MB are 2**20 bytes, 1 GB of memory comes with one vCPU",
        "cpu_expert": {
            "kind": "fitted",
            "law": "one token: one_token_s; n > 1: batch_floor_s + n * per_token_s (one vCPU)",
            "shapes": fit_experts(experts),
            "provenance": {
                "source": "our own measurement: one expert feed-forward pass, float32, numpy with "
                "OpenBLAS, one pinned thread, a virtual machine on an AMD EPYC",
                "licence": "MIT (this project)",
                "date": "2026-11-21",
                "notes": [
                    "the fastest of 3 to 60 repeats: the machine was shared",
                    "two and more tokens leave the matrix-vector path of the library, hence the "
                    "jump after one token",
                ],
            },
        },
        "thread_scaling": {
            "kind": "fitted",
            "law": "T(n)/T(1) = theta1 exp(-theta2 n) + theta3, n vCPUs",
            **fit_threads(root / "moe_prefetch" / "x2_cpu_expert_cost.csv"),
            "paper_theta2_per_gb": {"deepseek-v2-lite": 2.4363, "gpt2-moe": 11.8665},
            "provenance": {
                "source": "everett6/moe-prefetch, artifacts/x2_cpu_expert_cost.csv: one "
                "Qwen3-30B-A3B expert, Q4_K_M, on an AMD Ryzen 9 7950X",
                "licence": "none stated (figures only)",
                "commit": "fd7da7a359da",
            },
        },
        "container_start": {
            "kind": "fitted",
            "law": "lognormal; hello-world function, Python runtimes, pooled over memory sizes",
            "laws": fit_starts(root / "lambda_perf" / "lambda_cold_starts.csv"),
            "provenance": {
                "source": "maxday/lambda-perf, data/: AWS Lambda, one day a month, 2024-01 to "
                "2026-08",
                "licence": "Apache-2.0",
                "commit": "6070b7947b5d",
            },
        },
        "model_load": {
            "kind": "fitted",
            "law": "seconds = MB / mb_per_s; the median of the runs",
            "rates": fit_loads(root / "serverlessllm" / "load_times.csv"),
            "provenance": {
                "source": "ServerlessLLM/ServerlessLLM: checkpoint loading on NVIDIA A5000 (2024) "
                "and H100 (2025), safetensors and its own format (sllm)",
                "licence": "Apache-2.0",
                "commit": "9f50241baa53",
                "notes": ["sizes are parameter counts times two bytes"],
            },
        },
        "prices": {
            "kind": "derived",
            "values": read_prices(root / "serverless_pricing" / "prices.csv"),
            "provenance": {
                "source": "list prices of AWS Lambda (us-east-1) and Alibaba Function Compute "
                "(first tier, from 2024-08-27)",
                "licence": "published list prices",
            },
        },
    }
    return data


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: fit the constants and write the file."""
    parser = argparse.ArgumentParser(
        prog="python -m servegym.hardware_profiles.build.fit_serverless",
        description="Fit the constants of serverless serving to measurements.",
    )
    parser.add_argument("folder", metavar="DATA", help="folder with the measured tables")
    parser.add_argument("--cpu-expert", help="CSV: model, threads, tokens, expert_params, ms_min")
    parser.add_argument("--out", default="constants.json", help="file to write")
    options = parser.parse_args(arguments)
    data = fit(options.folder, options.cpu_expert)
    write_json(options.out, data)
    for key, expert in data["cpu_expert"]["shapes"].items():
        print(f"{key}: {expert}")
    print(f"threads: {data['thread_scaling']}")
    for key, start in data["container_start"]["laws"].items():
        print(f"{key}: {start['median_s']:.3f} s, sigma {start['sigma']:.2f}; {start['fit_error']}")
    for key, rate in data["model_load"]["rates"].items():
        print(f"{key}: {rate['mb_per_s']:.0f} MB/s; {rate['fit_error']}")
    for key, value in data["prices"]["values"].items():
        print(f"{key}: {value:.6g}")
    return 0


if __name__ == "__main__":
    run_main(main)
