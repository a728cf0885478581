"""A router's pull request against published rules, in a minute and without a GPU.

``servegym presubmit my_policy.py --scenario gie-709`` plays a policy and the baselines of published
gateways on the same episodes at several rates. ``gie-709`` is the simulation that issue 709 of the
Gateway API inference extension asks for (project kubernetes-sigs/gateway-api-inference-extension):
six H100 with Llama-3.1-8B, the lengths of ShareGPT's prompts and answers, rates at which 50 to
100 % of the KV memory is in use, and the normalised time per output token (end-to-end seconds over
output tokens, the mean over the requests). The other scenarios are those of
``servegym/PrefixRouting-v0``.

Against every baseline of ``--against`` the policy must not be worse at any rate: a rate fails where
the 95 % interval of the paired difference lies below ``--margin`` of the SLO attainment, or that of
the ratio of the times above ``--margin-time``. Exit status 0: passed; 1: failed; 2: bad input.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._checks import choose, real, whole
from servegym._command_line import run_main
from servegym._files import write_json
from servegym.envs.prefix_routing.scenarios import SCENARIOS
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.guest import TIME_LIMIT_S
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.evaluation.stats import mean, paired_difference, stratified_bootstrap

__all__ = ["RATES", "main", "presubmit"]

ENV_ID = "servegym/PrefixRouting-v0"
GIE = "gie-709"
KV_RATES = {50: 225.0, 60: 260.0, 70: 290.0, 80: 315.0, 90: 345.0, 100: 385.0}
"""Share of the KV memory in use (%) -> requests/s of ``gie-709``: where `llm_d` has it."""
SHARES = (0.8, 1.0, 1.15)
"""Of a scenario's own rate, for the others."""
RATES: dict[str, tuple[float, ...]] = {
    name: tuple(KV_RATES.values())
    if name == GIE
    else tuple(round(share * arguments["rate"], 3) for share in SHARES)
    for name, arguments in SCENARIOS.items()
}
"""Requests/s of each scenario."""
AGAINST = ("llm_d", "least_load")
REQUESTS = {GIE: 2000}
SEED = 709
Row = dict[str, Any]


def time_per_token(log: NDArray[Any]) -> float:
    """Mean of end-to-end seconds over output tokens of the completed requests; NaN if none was."""
    done = np.isfinite(log["finish_s"]) & (log["output_tokens"] > 0)
    taken = log["finish_s"][done] - log["arrival_s"][done]
    return float(np.mean(taken / log["output_tokens"][done])) if done.any() else float("nan")


def _played(
    policies: Sequence[str], scenario: str, rate: float, episodes: int, seed: int, limit_s: float
) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Attainment and time per token (E,) of each policy's episodes, the first policy first."""
    logs: dict[str, list[NDArray[Any]]] = {}
    arguments = {
        "scenario": scenario,
        "rate": rate,
        "episode_requests": REQUESTS.get(scenario, 1000),
    }
    rows = evaluate(ENV_ID, policies, episodes, seed, arguments, logs=logs, time_limit_s=limit_s)
    found = {}
    for name in dict.fromkeys(row["policy"] for row in rows):
        met = np.array([row["attainment"] for row in rows if row["policy"] == name])
        found[name] = met, np.array([time_per_token(log) for log in logs[name]])
    return found


def presubmit(
    policy: str,
    scenario: str = GIE,
    *,
    rates: Sequence[float] | None = None,
    against: Sequence[str] = AGAINST,
    episodes: int = 4,
    seed: int = SEED,
    margin: float = 0.02,
    margin_time: float = 0.1,
    time_limit_s: float = TIME_LIMIT_S,
) -> list[Row]:
    """Play a policy and baselines on the same episodes.

    Args:
        policy: What `servegym.experiments.evaluation.evaluate.evaluate` takes; a file runs in a
            process of its own.
        scenario: One of `RATES`.
        rates: Requests/s; None: those of the scenario.
        against: Baselines.
        episodes: Episodes at each rate.
        seed: Seed of the first.
        margin: How much lower the attainment may be.
        margin_time: How much longer, relatively, the time per output token may be.
        time_limit_s: Seconds that one answer of the policy may take.

    Returns:
        A row a rate and baseline: ``rate``, ``baseline``, ``attainment``, ``attainment_baseline``,
        ``gain`` and its interval ``gain_low``, ``gain_high``, ``time_per_token_s``,
        ``time_per_token_baseline_s``, their ``ratio`` with ``ratio_low``, ``ratio_high``, and
        ``passed``.

    Raises:
        ValueError: An argument out of range, before anything is played.
        PolicyError: The policy fails.
    """
    choose("scenario", scenario, RATES)
    whole("episodes", episodes, 2, 1000)
    real("margin", margin, 0.0, 1.0)
    real("margin_time", margin_time, 0.0, 100.0)
    chosen = [real("rates", rate, 0.0, open_low=True) for rate in rates or RATES[scenario]]
    rows = []
    for rate in chosen:
        played = _played([policy, *against], scenario, rate, episodes, seed, time_limit_s)
        (met, times), *others = played.values()
        for name, (base_met, base_times) in zip(list(played)[1:], others, strict=True):
            gain = paired_difference(met, base_met, mean)
            logs = np.log(times / base_times)
            ratio = stratified_bootstrap(logs[np.isfinite(logs)], mean) if _some(logs) else gain
            slower = _some(logs) and float(np.exp(ratio.low)) > 1 + margin_time
            rows.append(
                {
                    "rate": rate,
                    "baseline": name,
                    "attainment": float(met.mean()),
                    "attainment_baseline": float(base_met.mean()),
                    "gain": gain.value,
                    "gain_low": gain.low,
                    "gain_high": gain.high,
                    "time_per_token_s": float(np.nanmean(times)) if _some(times) else None,
                    "time_per_token_baseline_s": float(np.nanmean(base_times)),
                    "ratio": float(np.exp(ratio.value)) if _some(logs) else None,
                    "ratio_low": float(np.exp(ratio.low)) if _some(logs) else None,
                    "ratio_high": float(np.exp(ratio.high)) if _some(logs) else None,
                    "passed": not (gain.high < -margin or slower or not _some(times)),
                }
            )
    return rows


def _some(values: NDArray[np.float64]) -> bool:
    return bool(np.isfinite(values).any())


def _print(policy: str, scenario: str, rows: Sequence[Row]) -> None:
    kv = {rate: share for share, rate in KV_RATES.items()} if scenario == GIE else {}

    def ratio(row: Row) -> str:
        if row["ratio"] is None:
            return "nothing completed"
        return f"{row['ratio']:.2f} [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}]"

    cells = [
        [
            f"{row['rate']:g}" + (f" ({kv[row['rate']]} % KV)" if row["rate"] in kv else ""),
            row["baseline"],
            f"{row['attainment']:.3f}",
            f"{row['gain']:+.3f} [{row['gain_low']:+.3f}, {row['gain_high']:+.3f}]",
            "" if row["time_per_token_s"] is None else f"{1e3 * row['time_per_token_s']:.1f}",
            ratio(row),
            "pass" if row["passed"] else "FAIL",
        ]
        for row in rows
    ]
    print_table(
        f"{policy}, scenario {scenario}",
        ["requests/s", "against", "attainment", "gain", "ms/token", "its ratio", "verdict"],
        cells,
        left=2,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="servegym presubmit",
        description=(__doc__ or "").partition("\n")[0],
        epilog="Exit status 0: passed, 1: worse than a baseline at some rate, 2: bad input.",
    )
    parser.add_argument("policy", help="a policy's .py file, a checkpoint or a name")
    parser.add_argument("--scenario", default=GIE, choices=list(RATES), help=f"({GIE})")
    parser.add_argument("--rates", type=float, nargs="+", help="requests/s (the scenario's)")
    parser.add_argument(
        "--against", nargs="+", default=list(AGAINST), help=f"baselines ({' '.join(AGAINST)})"
    )
    parser.add_argument("--episodes", type=int, default=4, help="episodes a rate (4)")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the first episode ({SEED})")
    parser.add_argument(
        "--margin", type=float, default=0.02, help="attainment that may be lost (.02)"
    )
    parser.add_argument(
        "--margin-time", type=float, default=0.1, help="relative time a token that may be lost (.1)"
    )
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=TIME_LIMIT_S,
        help=f"seconds that one answer of the policy may take ({TIME_LIMIT_S:g})",
    )
    args = parser.parse_args(argv)
    rows = presubmit(
        args.policy,
        args.scenario,
        rates=args.rates,
        against=args.against,
        episodes=args.episodes,
        seed=args.seed,
        margin=args.margin,
        margin_time=args.margin_time,
        time_limit_s=args.time_limit,
    )
    _print(args.policy, args.scenario, rows)
    passed = all(row["passed"] for row in rows)
    if args.json is not None:
        settings: Mapping[str, Any] = {"policy": args.policy, "scenario": args.scenario}
        write_json(args.json, {**settings, "seed": args.seed, "passed": passed, "rows": rows})
    failed = sorted({row["rate"] for row in rows if not row["passed"]})
    at = ", ".join(f"{rate:g}" for rate in failed)
    print("passed" if passed else f"failed at {at} requests/s")
    return 0 if passed else 1


if __name__ == "__main__":
    run_main(main)
