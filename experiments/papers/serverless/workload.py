"""Remote experts' share of the time, prefill against decoding (Fig. 4, 5): model output.

``python -m servegym.experiments.papers.serverless.workload`` makes both. They are measurements in
the paper. Here they are **model output**: recorded routing of held-out prompts under the equations
and constants of the environment, which shows what these imply and not how a machine behaves.
Intervals are over held-out prompts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._command_line import run_main
from servegym.baselines.serverless_moe.remoe import remoe
from servegym.envs.serverless_moe.config import build_system, predict
from servegym.envs.serverless_moe.kernel.cost import remote_calls, transfer_s
from servegym.envs.serverless_moe.loads import Load
from servegym.envs.serverless_moe.outcomes import decode_layers, evaluate_plan, prefill_layers
from servegym.envs.serverless_moe.plans import make_plan, mix_plan
from servegym.envs.serverless_moe.records import Plan, Request
from servegym.envs.serverless_moe.sets import least_used, remote_count
from servegym.envs.serverless_moe.system import SystemModel
from servegym.envs.workloads.activations import load_activations
from servegym.experiments.evaluation.tables import Note
from servegym.experiments.papers.plotting import Lines
from servegym.experiments.papers.serverless.billing import (
    LIMITS,
    MODELS,
    N_IN,
    N_OUT,
    PROMPTS,
    TREM_S,
    held_out,
    recorded_request,
    verdict,
    with_interval,
)
from servegym.experiments.papers.study import Options, Study, command
from servegym.experiments.papers.verdicts import Rows, pick, split

CORES = (5, 10)
RATIOS = tuple(i / 16 for i in range(17))
OVERHEADS_S = (TREM_S, 1e-3)
TOKENS = (16, 32, 64, 128, 256, 512, 1024)
NEARLY_LINEAR = 0.95
"""R2 of a straight line from which on a curve is called nearly linear."""


def expert_times(
    system: SystemModel, request: Request, remote: NDArray[np.bool_], cores: int
) -> tuple[float, float, float]:
    """Expert part of a request with ``cores`` vCPUs in the main and in every remote function.

    The ``remote`` experts (L, K) have one replica a layer; a vCPU is a GB of memory.

    Returns:
        Prefill in s (sum of Eq. 2 over layers), a decode token in s (Eq. 5 likewise, mean over
        tokens), and the share of (token, layer) in which the remote path is the longer one.
    """
    mb, used, load = 1024.0 * cores, np.asarray(remote.any(axis=1)), Load.known(request)
    memory, replica = np.where(used, mb, 0.0), np.where(remote, 0, -1)
    plan = Plan(remote, mb, memory, used.astype(np.int64), replica)
    prefill = float(prefill_layers(system, load, plan).seconds.sum())
    decode = float(decode_layers(system, load, plan).seconds.sum())
    histogram = load.histogram(remote, system.top_k)
    call_s = system.expert_cpu_s(mb, 1) + transfer_s(system)
    calls, each_s = remote_calls(system, np.arange(system.top_k + 1), call_s, load.trem_s[:, None])
    local = np.arange(system.top_k, -1, -1) * system.expert_cpu_s(plan.main_mb, 1)
    slower = float((histogram * (calls * each_s > local)).sum() / histogram.sum())
    return prefill, decode / request.n_out, slower


def remote_ratios(name: str, ratios: Sequence[float], prompts: int) -> list[dict[str, Any]]:
    """Rows of Fig. 4: expert times of held-out prompts at every remote ratio."""
    activations, system = load_activations(name), build_system(name)
    queries = held_out(activations, prompts)
    predicted = predict(activations).astype(np.float64)
    scores = {
        "least used": predicted[queries],
        "random": np.random.default_rng(0).random((len(queries), *predicted.shape[1:])),
    }
    requests = {
        trem: [recorded_request(activations, int(q), trem_s=trem) for q in queries]
        for trem in OVERHEADS_S
    }
    rows = []
    for order, b in itertools.product(scores, ratios):
        count = int(remote_count(b, system.num_experts))
        remote = [least_used(score, count) for score in scores[order]]
        for trem, cores in itertools.product(OVERHEADS_S, CORES):
            pairs = zip(requests[trem], remote, strict=True)
            times = np.array([expert_times(system, *pair, cores) for pair in pairs]).T
            head = {"model": name, "remote_first": order, "cores": cores, "overhead_ms": 1e3 * trem}
            rows.append(
                head
                | {"b": b, "prompts": len(queries)}
                | with_interval("prefill_ms", 1e3 * times[0])
                | with_interval("decode_ms_per_token", 1e3 * times[1])
                | with_interval("remote_is_slower", times[2])
            )
    return rows


def _fig4_notes(name: str, rows: Rows) -> list[Note]:
    notes: list[Note] = []
    for trem in OVERHEADS_S:
        group = pick(rows, cores=CORES[0], overhead_ms=1e3 * trem)  # by rising b
        curves = {order: pick(group, remote_first=order) for order in ("random", "least used")}
        b = [r["b"] for r in curves["random"]]
        ms = {order: [r["decode_ms_per_token"] for r in part] for order, part in curves.items()}
        fit = {order: float(np.corrcoef(b, values)[0, 1] ** 2) for order, values in ms.items()}
        slow = [r["remote_is_slower"] for r in curves["least used"]]
        from_b = next((x for x, s in zip(b, slow, strict=True) if s >= 0.5), 1.0)
        half, least = len(b) // 2, ms["least used"]
        notes += [
            verdict(
                "expert time grows nearly linearly with the remote ratio",
                fit["random"] >= NEARLY_LINEAR,
                f"{name}, a decode token, overhead {1e3 * trem:g} ms: R2 of a straight line "
                f"{fit['random']:.3f} if experts go at random, {fit['least used']:.3f} if the "
                f"least used go first ({least[0]:.1f} ms at b = 0, {least[half]:.1f} at "
                f"{b[half]:g}, {least[-1]:.1f} at 1): few calls leave until b is large",
            ),
            verdict(
                "the remote path is the bottleneck in decoding, so Eq. 12 drops the max of Eq. 5",
                slow[half] >= 0.5,
                f"{name}, overhead {1e3 * trem:g} ms: with the least used experts remote their "
                f"path is the longer one in {100 * slow[half]:.0f} % of (token, layer) at "
                f"b = {b[half]:g}, in half of them from b = {from_b:g} on",
            ),
        ]
    return notes


def stage_times(
    system: SystemModel, request: Request, frequency: NDArray[np.float64], deployment: str
) -> tuple[float, float]:
    """PT and GT in s of a request, by predicted activations (L, K) and one of `DEPLOYMENTS`."""
    if deployment == "MIX":
        plan = mix_plan(system, request.n_out)
    elif deployment == "b = 0.5":  # with the least memory and the least replicas
        remote = least_used(frequency, int(remote_count(0.5, system.num_experts)))
        plan = make_plan(system, remote, request.n_in * system.top_k * frequency, request.n_out)
    else:
        load = Load.predicted(system, frequency, request.n_in, request.n_out, request.trem_s)
        plan = remoe(system, load, **LIMITS).plan
    outcome = evaluate_plan(system, request, plan)
    return outcome.bill.prefill_s, outcome.bill.decode_s


DEPLOYMENTS = ("MIX", "b = 0.5", "Remoe")


def stage_rows(name: str, prompts: int, sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Rows of Fig. 5: times of held-out prompts by GPU, tokens and deployment."""
    activations = load_activations(name)
    queries = held_out(activations, prompts)
    predicted = predict(activations).astype(np.float64)
    rows = []
    for gpu, (n_in, n_out) in itertools.product(("eager", "fused"), sizes):
        system = build_system(name, gpu, max_output_tokens=max(TOKENS))
        requests = [recorded_request(activations, int(q), n_in, n_out, TREM_S) for q in queries]
        for deployment in DEPLOYMENTS:
            prefill, decode = np.array(
                [
                    stage_times(system, request, predicted[q], deployment)
                    for request, q in zip(requests, queries, strict=True)
                ]
            ).T
            head = {"model": name, "gpu": gpu, "deployment": deployment}
            rows.append(
                head
                | {"prompt_tokens": n_in, "output_tokens": n_out, "prompts": len(queries)}
                | with_interval("prefill_s", prefill)
                | with_interval("decode_s", decode)
                | with_interval("prefill_over_decode", prefill / decode)
            )
    return rows


def _fig5_notes(name: str, rows: Rows) -> list[Note]:
    notes: list[Note] = []
    for deployment in DEPLOYMENTS:
        *equal, paper = pick(rows, deployment=deployment, gpu="eager")
        eta = [r["prefill_over_decode"] for r in equal]
        few, many = equal[0]["prompt_tokens"], equal[-1]["prompt_tokens"]
        notes.append(
            verdict(
                "prefill takes at most 0.1 of decoding",
                paper["prefill_over_decode_high"] <= 0.1,
                f"{name}, {deployment}, {N_IN} and {N_OUT} tokens: "
                f"{paper['prefill_over_decode']:.3f} "
                f"[{paper['prefill_over_decode_low']:.3f}, "
                f"{paper['prefill_over_decode_high']:.3f}]; with as many prompt as output tokens "
                f"{eta[0]:.2f} at {few}, {eta[-1]:.2f} at {many}",
            )
        )
    return notes


def _of_models(kind: str, notes: Callable[[str, Rows], Sequence[Note]]) -> Any:
    """The notes of a figure that is model output: those of each model."""

    def of_all(options: Options, rows: Rows) -> Iterator[Note]:
        yield f"Model output, not a measurement: {kind} on recorded routing."
        for at, part in split(rows, "model"):
            yield from notes(at["model"], part)

    return of_all


STUDIES = (
    Study(
        "fig04_expert_time",
        "fig4",
        lambda options, at, _: remote_ratios(
            at["model"], RATIOS[::4] if options.quick else RATIOS, options.episodes
        ),
        lambda options: [{"model": model} for model in MODELS],
        notes=_of_models("Eq. 2, 3 and 5", _fig4_notes),
        picture=Lines(
            x="b",
            y=("decode_ms_per_token", "prefill_ms"),
            line=("remote_first", "cores", "overhead_ms"),
            panels="model",
        ),
    ),
    Study(
        "fig05_prefill_decode",
        "fig5",
        lambda options, at, _: stage_rows(
            at["model"],
            options.episodes,
            [*((n, n) for n in (TOKENS[::3] if options.quick else TOKENS)), (N_IN, N_OUT)],
        ),
        lambda options: [{"model": model} for model in MODELS],
        notes=_of_models("Eq. 1 and 4", _fig5_notes),
        picture=Lines(
            x="prompt_tokens",
            y=("prefill_s", "decode_s", "prefill_over_decode"),
            line="deployment",
            panels=("model", "gpu"),
            where=lambda row: row["prompt_tokens"] == row["output_tokens"],
            log="xy",
        ),
    ),
)

main = command(__spec__.name, __doc__, STUDIES, PROMPTS)

if __name__ == "__main__":
    run_main(main)
