"""llm-d's benchmark with eight pods: what routing blind to caches costs, stage by stage.

Eight pods of Qwen3-32B on two H100 each, 307,328 tokens of KV cache a pod, 750 prompts of 150
groups over and over, stages of 3 to 60 requests/s between which pods drain and keep their caches.
``precise`` and ``estimated`` weigh prefix, KV use and queue 3:2:2 and 1:1:1, ``load`` looks at the
latter two, ``random`` at none. An output has 1,000 tokens (there 942 in the mean of a stage).
Nothing is fitted to the report, which does not state the token budget: 8,192, vLLM's default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.baselines.prefix_routing.plugins import GatewayPolicy
from servegym.baselines.prefix_routing.system import PrefixSystem
from servegym.envs.families import family_named
from servegym.envs.prefix_routing.vector_env import PrefixRoutingVectorEnv
from servegym.envs.prefix_routing.workloads import LLM_D_STAGES
from servegym.experiments.evaluation.play import play
from servegym.experiments.evaluation.resolve import resolve
from servegym.experiments.evaluation.stats import student_interval
from servegym.experiments.papers.prefix.claims import CLAIMS
from servegym.experiments.papers.study import Options, Study, command
from servegym.experiments.papers.verdicts import found_for

PODS = 8
KV_TOKENS = 307_328
BLOCK = 64
PAUSE_S = 400.0
SEEDS = 10
RATES = tuple(rate for rate, _ in LLM_D_STAGES[1:])
# Stage by stage: TTFT at 90 % (s), output tokens/s.
PUBLISHED: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "precise": (
        (0.498, 0.6, 0.4, 0.6, 0.5, 0.583, 0.509, 0.5)
        + (0.488, 0.5, 0.589, 0.6, 0.507, 0.6, 0.6, 0.5),
        (1219.1, 3902.1, 5761.1, 9184.5, 9382.0, 9242.2, 9221.8, 9780.6)
        + (10270.8, 10054.8, 10128.7, 10296.5, 10284.6, 10140.9, 10313.9, 10496.9),
    ),
    "estimated": (
        (0.497, 0.499, 0.4, 0.6, 0.7, 0.609, 0.708, 2.459)
        + (43.018, 43.515, 44.93, 46.335, 47.284, 50.108, 49.93, 50.226),
        (1310.9, 3842.4, 5152.9, 8082.6, 8415.7, 8445.1, 8435.9, 7443.5)
        + (8045.9, 7969.6, 7695.2, 7455.9, 7452.3, 7100.7, 7013.8, 7247.9),
    ),
    "load": (
        (1.609, 4.124, 7.002, 77.707, 72.972, 85.979, 83.806, 88.086)
        + (100.911, 101.524, 105.884, 105.015, 108.572, 110.681, 113.278, 110.184),
        (1274.8, 3607.0, 3348.4, 4902.5, 4785.5, 4872.8, 4888.7, 4660.7)
        + (4946.4, 4973.3, 4723.6, 4004.8, 3991.0, 4671.9, 3866.5, 4745.1),
    ),
    "random": (
        (0.82, 1.398, 2.299, 70.273, 78.42, 82.943, 86.182, 91.519)
        + (101.272, 101.142, 101.265, 103.514, 105.004, 104.321, 106.816, 105.988),
        (1314.0, 3568.5, 3791.1, 4933.1, 4765.4, 4781.3, 4636.3, 4332.6)
        + (4773.8, 4844.6, 4969.5, 4783.2, 4845.1, 4921.7, 4764.2, 4835.2),
    ),
}
WAYS: dict[str, tuple[tuple[float, float, float], str]] = {
    "precise": ((2.0, 2.0, 3.0), "precise"),
    "estimated": ((1.0, 1.0, 1.0), "approximate"),
    "load": ((1.0, 1.0, 0.0), "none"),
    "random": ((0.0, 0.0, 0.0), "none"),
}
"""Way of routing -> its weights of `SCORERS`, and the gateway's index."""
SCORERS: tuple[str, ...] = ("queue-scorer", "kv-cache-utilization-scorer", "prefix-cache-scorer")
# The stage after the last one takes the requests that the draw has left.
STAGES = (*(x for stage in LLM_D_STAGES for x in (stage, (0.0, PAUSE_S))), (0.5, 1.0))


def _stages(played: np.ndarray, prompt: np.ndarray, output: np.ndarray) -> np.ndarray:
    """What became of the requests (J,) of each stage, if it has drained before the next one.

    ``(K, 4)``: TTFT at 90 %, mean TTFT (s), output tokens/s and token hit rate.
    """
    ttft = played["first_token_s"] - played["arrival_s"]
    begins = np.cumsum([0.0, *(seconds + PAUSE_S for _, seconds in LLM_D_STAGES)])
    stages = np.empty((len(LLM_D_STAGES), 4))
    for k, stage in enumerate(stages):
        mask = (played["arrival_s"] >= begins[k]) & (played["arrival_s"] < begins[k + 1])
        end = played["finish_s"][mask].max()
        if end > begins[k + 1]:
            raise ValueError(f"PAUSE_S={PAUSE_S}: stage {k} has not drained before the next one.")
        stage[:2] = np.percentile(ttft[mask], 90), ttft[mask].mean()
        stage[2] = output[mask].sum() / (end - begins[k])
        stage[3] = played["hit_tokens"][mask].sum() / prompt[mask].sum()
    return stages


def _route(way: str, seeds: int) -> list[np.ndarray]:
    """What became of the stages (K, 4) of each seed."""
    weights, index = WAYS[way]
    expected = sum(rate * seconds for rate, seconds in LLM_D_STAGES)
    envs = PrefixRoutingVectorEnv(
        num_envs=seeds,
        autoreset_mode="Disabled",
        copy=False,
        workload_kwargs={"stages": STAGES},
        dispatch="trace",
        rate=1.0,
        episode_requests=int(expected + 6 * expected**0.5),
        warmup_requests=0,
        profiles={"card": "h100", "model": "qwen3-32b", "tp": 2},
        num_replicas=PODS,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        block_size=BLOCK,
        kv_tokens=KV_TOKENS,
        index=index,
    )
    setting = dict(zip(SCORERS, weights, strict=True))
    policy = GatewayPolicy(PrefixSystem.from_env(envs), "llm-d", setting)
    for _ in play(envs, resolve(policy, envs.problem, family_named("prefix_routing")), seed=0):
        pass
    logs = [envs.request_log(row) for row in range(seeds)]
    envs.close()
    return [_stages(log, log["prompt_tokens"], log["output_tokens"]) for log in logs]


def _ways(options: Options, at: Mapping[str, Any], ways: Sequence[str]) -> Iterator[dict[str, Any]]:
    """TTFT and throughput of each stage beside the report's."""
    seeds = options.episodes
    for way in ways:
        runs = np.array(_route(way, seeds))
        ttfts, speeds = PUBLISHED[way]
        for k, (rate, _) in enumerate(LLM_D_STAGES[1:], 1):  # after the warm-up
            _, mean, speed, hit = runs[:, k].mean(axis=0)
            interval = [float(f"{value:.4g}") for value in student_interval(runs[:, k, 0])]
            yield {
                "routing": way,
                "rate": rate,
                "report_ttft_p90_s": ttfts[RATES.index(rate)],
                **dict(zip(("ttft_p90_s", "low", "high"), interval, strict=True)),
                "ttft_mean_s": float(f"{mean:.4g}"),
                "report_output_tokens_per_s": speeds[RATES.index(rate)],
                "output_tokens_per_s": float(f"{speed:.5g}"),
                "hit_percent": float(f"{100 * hit:.4g}"),
                "seeds": seeds,
            }


STUDIES = (
    Study(
        "llm_d",
        "llm_d",
        _ways,
        policies=tuple(WAYS),
        notes=found_for(CLAIMS, "llm_d"),
        facts=lambda options: {
            "profile": "h100, qwen3-32b, tp=2",
            "kv_tokens": KV_TOKENS,
            "block": BLOCK,
        },
    ),
)

main = command(__spec__.name, __doc__, STUDIES, SEEDS)

if __name__ == "__main__":
    run_main(main)
