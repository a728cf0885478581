"""llm-d's benchmark with eight pods: what routing blind to caches costs, stage by stage.

Eight pods of Qwen3-32B on two H100 each, 307,328 tokens of KV cache a pod, 750 prompts of 150
groups over and over, stages of 3 to 60 requests/s. Two ways to choose a pod need no state of the
system and are replayed: at random, which is the report's ``random-scheduling``, and every group
pinned to one pod, which stands for its ``precise-scheduling``: all prompts fit, and each finds its
own. Its other two ways need a gateway::

    python -m servegym.experiments.figures.prefix.llm_d

As in the report the pods drain between stages and keep their caches, and an output has 1,000 tokens
(there 942 in the mean of a stage). The latency law is composed from kernel timings and nothing is
fitted to the report, which does not state the token budget: 8,192, vLLM's default on this card.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from servegym.envs.prefix_routing.replay import replay_prefix
from servegym.envs.prefix_routing.workloads import LLM_D_STAGES, Tenants
from servegym.experiments.figures.run import (
    FigureOptions,
    command_line,
    figure_parser,
    run_chosen,
    save,
)
from servegym.experiments.stats import student_interval
from servegym.experiments.tables import note
from servegym.hardware_profiles import Profile
from servegym.hardware_profiles.compose import compose

__all__ = ["PICTURES", "main"]

PODS = 8
KV_TOKENS = 307_328
BLOCK = 64
PAUSE_S = 1000.0
SEEDS = 10
COLLAPSE_S = 10.0
"""A collapse is a TTFT of this at 90 %."""
# Requests/s -> TTFT at 90 % (s) and output tokens/s, for each way of routing.
PUBLISHED: dict[float, tuple[tuple[float, float], tuple[float, float]]] = {
    3.0: ((0.498, 1219.1), (0.820, 1314.0)),
    10.0: ((0.600, 3902.1), (1.398, 3568.5)),
    15.0: ((0.400, 5761.1), (2.299, 3791.1)),
    20.0: ((0.600, 9184.5), (70.273, 4933.1)),
    22.0: ((0.500, 9382.0), (78.420, 4765.4)),
    25.0: ((0.583, 9242.2), (82.943, 4781.3)),
    30.0: ((0.509, 9221.8), (86.182, 4636.3)),
    35.0: ((0.500, 9780.6), (91.519, 4332.6)),
    40.0: ((0.488, 10270.8), (101.272, 4773.8)),
    43.0: ((0.500, 10054.8), (101.142, 4844.6)),
    46.0: ((0.589, 10128.7), (101.265, 4969.5)),
    49.0: ((0.600, 10296.5), (103.514, 4783.2)),
    52.0: ((0.507, 10284.6), (105.004, 4845.1)),
    55.0: ((0.600, 10140.9), (104.321, 4921.7)),
    57.0: ((0.600, 10313.9), (106.816, 4764.2)),
    60.0: ((0.500, 10496.9), (105.988, 4835.2)),
}
WAYS = ("pinned", "random")
MEMORY = (1.0, 2.0, 4.0, 16.0)
MEMORY_RATES = (15.0, 20.0, 40.0, 60.0)
NAMES = {"pinned": "precise-scheduling", "random": "random-scheduling"}
# The stage after the last one takes the requests that the draw has left.
STAGES = (*(x for stage in LLM_D_STAGES for x in (stage, (0.0, PAUSE_S))), (0.5, 1.0))


def _play(
    card: Profile, way: str, seed: int, memory: float = 1.0
) -> list[tuple[float, float, float, float]]:
    """Of each stage TTFT at 90 %, mean TTFT (s), output tokens/s and token hit rate.

    Args:
        card: The pods' profile.
        way: ``"pinned"``, ``"random"``, or ``"nothing shared"``: random, every prompt a new one.
        seed: Seed of the requests and the random pods.
        memory: Factor on the pods' KV cache.
    """
    rng = np.random.default_rng(seed)
    expected = sum(rate * seconds for rate, seconds in LLM_D_STAGES)
    count = int(expected + 6 * expected**0.5)
    tenants = Tenants(stages=STAGES)
    if way == "nothing shared":
        tenants = Tenants(1, 1, 0, 7200, questions="fresh", order="random", stages=STAGES)
    requests = tenants.draw(rng, count, 1.0, BLOCK, "trace")
    sent = requests.tenant % PODS if way == "pinned" else rng.integers(PODS, size=count)
    played = replay_prefix(
        card,
        requests,
        sent,
        num_replicas=PODS,
        max_num_batched_tokens=8192,
        kv_tokens=int(memory * KV_TOKENS),
    )
    ttft = played["first_token_s"] - played["arrival_s"]
    begins = np.cumsum([0.0, *(seconds + PAUSE_S for _, seconds in LLM_D_STAGES)])
    found = []
    for k in range(len(LLM_D_STAGES)):
        own = (played["arrival_s"] >= begins[k]) & (played["arrival_s"] < begins[k + 1])
        end = played["finish_s"][own].max()
        if end > begins[k + 1]:
            raise ValueError(f"PAUSE_S={PAUSE_S}: stage {k} has not drained before the next one.")
        found.append(
            (
                float(np.percentile(ttft[own], 90)),
                float(ttft[own].mean()),
                float(requests.output_tokens[own].sum() / (end - begins[k])),
                float(played["hit_tokens"][own].sum() / requests.prompt_tokens[own].sum()),
            )
        )
    return found


def stages(options: FigureOptions) -> None:
    """``llm_d``: TTFT and throughput of each stage beside the report's."""
    rows: list[dict[str, Any]] = []
    card = compose("h100", "qwen3-32b", tp=2)
    played = {way: [_play(card, way, seed) for seed in range(options.episodes)] for way in WAYS}
    for k, (rate, _) in enumerate(LLM_D_STAGES):
        if k == 0:  # the warm-up
            continue
        for place, way in enumerate(WAYS):
            values = np.array([one[k] for one in played[way]])
            p90, low, high = student_interval(values[:, 0])
            _, mean, speed, hit = values.mean(axis=0)
            published = PUBLISHED[rate][place]
            rows.append(
                {
                    "rate": rate,
                    "routing": way,
                    "report_ttft_p90_s": published[0],
                    "ttft_p90_s": float(f"{p90:.4g}"),
                    "low": float(f"{low:.4g}"),
                    "high": float(f"{high:.4g}"),
                    "ttft_mean_s": float(f"{mean:.4g}"),
                    "report_output_tokens_per_s": published[1],
                    "output_tokens_per_s": float(f"{speed:.5g}"),
                    "hit_percent": float(f"{100 * hit:.4g}"),
                    "seeds": options.episodes,
                }
            )
    blind = {row["rate"]: row for row in rows if row["routing"] == "random"}
    columns = ("ttft_p90_s", "report_ttft_p90_s")
    first = {
        column: min(
            (rate for rate, row in blind.items() if row[column] >= COLLAPSE_S), default=None
        )
        for column in columns
    }
    below = max(row[c] for row in blind.values() for c in columns if row[c] < COLLAPSE_S)
    above = min(row[c] for row in blind.values() for c in columns if row[c] >= COLLAPSE_S)
    last = {row["routing"]: row for row in rows if row["rate"] == 60.0}
    faster, report = (
        last["pinned"][column] / last["random"][column]
        for column in ("output_tokens_per_s", "report_output_tokens_per_s")
    )
    save(
        options,
        "llm_d",
        rows,
        note(
            f"Random routing collapses, to a TTFT of at least {COLLAPSE_S:g} s at 90 %, from "
            f"{first['ttft_p90_s']:g} requests/s on, in the report from "
            f"{first['report_ttft_p90_s']:g}; any limit from {below:.3g} to {above:.3g} s says the "
            "same.",
            collapse=first,
        ),
        note(
            f"At 60 requests/s pinned groups give {faster:.2f} times the output tokens/s of random "
            f"routing, precise-scheduling in the report {report:.2f} times.",
            ratio=faster,
            report_ratio=report,
        ),
        *(
            note(
                f"At 60 requests/s, {way}: TTFT at 90 % {row['ttft_p90_s']:.3g} s "
                f"[{row['low']:.3g}, {row['high']:.3g}], output {row['output_tokens_per_s']:,.0f} "
                f"tokens/s; {NAMES[way]} in the report {row['report_ttft_p90_s']:g} s and "
                f"{row['report_output_tokens_per_s']:,.0f}."
            )
            for way, row in last.items()
        ),
        settings={"profile": "h100, qwen3-32b, tp=2", "kv_tokens": KV_TOKENS, "block": BLOCK},
    )


def memory(options: FigureOptions) -> None:
    """``llm_d_memory``: what more KV memory changes, with and without shared prompts."""
    rows: list[dict[str, Any]] = []
    card = compose("h100", "qwen3-32b", tp=2)
    for way in ("pinned", "random", "nothing shared"):
        for factor in MEMORY:
            played = np.array([_play(card, way, seed, factor) for seed in range(options.episodes)])
            for k, (rate, _) in enumerate(LLM_D_STAGES):
                if k == 0 or rate not in MEMORY_RATES:
                    continue
                p90, low, high = student_interval(played[:, k, 0])
                rows.append(
                    {
                        "routing": way,
                        "memory": factor,
                        "rate": rate,
                        "ttft_p90_s": float(f"{p90:.4g}"),
                        "low": float(f"{low:.4g}"),
                        "high": float(f"{high:.4g}"),
                        "hit_percent": float(f"{100 * played[:, k, 3].mean():.4g}"),
                        "seeds": options.episodes,
                    }
                )
    at = {(row["routing"], row["memory"], row["rate"]): row["ttft_p90_s"] for row in rows}
    texts = [
        f"{way}: {', '.join(f'{at[way, m, 20.0]:.3g} s with {m:g} x' for m in MEMORY)}"
        for way in ("random", "nothing shared", "pinned")
    ]
    save(
        options,
        "llm_d_memory",
        rows,
        note(f"TTFT at 90 % at 20 requests/s by KV memory. {'; '.join(texts)}."),
        settings={"profile": "h100, qwen3-32b, tp=2", "kv_tokens": KV_TOKENS, "block": BLOCK},
    )


FIGURES = {"llm_d": stages, "memory": memory}
PICTURES = {}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; see the module's docstring."""
    module = "servegym.experiments.figures.prefix.llm_d"
    parser = figure_parser(list(FIGURES), __doc__, module, SEEDS)
    return run_chosen(FIGURES, PICTURES, command_line(parser, argv, FigureOptions()))


if __name__ == "__main__":
    sys.exit(main())
