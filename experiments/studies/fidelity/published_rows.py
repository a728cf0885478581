"""Latencies of serving engines that others measured, against composed profiles.

The wheel of ``aiconfigurator-core`` (Apache-2.0) carries a table of engine runs: mean TTFT and TPOT
of vLLM, TensorRT-LLM and SGLang by card, model, tensor parallelism, lengths and concurrency. Give
its path; neither the wheel nor a row of it is kept::

    pip download --no-deps aiconfigurator-core==0.12.0
    python -m servegym.experiments.studies.fidelity.published_rows WHEEL

Each row is replayed as it was measured: a number of requests for each of its concurrent clients,
the next sent when one ends, and the front end's time before the first token. Most are of InferenceX
(InferenceMAX), whose scripts send ten a client, draw the lengths and set the KV cache's format and
the tokens of an iteration; the others are taken to have the engines' defaults, and as requests of
equal lengths would stay in step, which a client's timing does not let them, theirs are spread
(``closed_loop`` in hardware_profiles/data/constants.json). On Hopper its
scripts run gpt-oss by other kernels (Marlin) than were timed, on B200 with activations in 8 bits.
No row says whether tokens were speculated. The split goes by model and version of the engine and
was fixed before anything was fitted (`FIT`): constants and intervals may look at the part ``fit``,
``test`` is for one look at the end.
"""

from __future__ import annotations

import argparse
import functools
import io
import math
import re
import shlex
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym._files import csv_rows
from servegym.envs.llm_routing import replay
from servegym.experiments.evaluation.tables import provenance, write_result
from servegym.hardware_profiles import Profile
from servegym.hardware_profiles.compose import compose
from servegym.hardware_profiles.constants import constant
from servegym.hardware_profiles.host import plans_ahead, without_api
from servegym.hardware_profiles.model_config import VALUE_BYTES, ModelShape, model_shape
from servegym.hardware_profiles.schema import Z80

OUT = Path("experiments", "results", "fidelity")
TABLE = "aiconfigurator_core/systems/silicon_sample.csv"
CARDS = {"h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200"}
# Models by the end of their name in the table, and formats of their weights by its `precision`.
MODELS = {
    "Llama-3.1-8B": "llama-3.1-8b",
    "Llama-3.1-70B": "llama-3.1-70b",
    "Qwen3-32B": "qwen3-32b",
    "Qwen3-235B-A22B": "qwen3-235b-a22b",
    "gpt-oss-120b": "gpt-oss-120b",
    "DeepSeek-R1": "deepseek-v3",
    "DeepSeek-V3": "deepseek-v3",
}
DTYPES = {"": "bf16", "bf16": "bf16", "fp8": "fp8", "fp4": "nvfp4"}
# Models and versions of vLLM of the part ``fit``, of all cards: one version that does not plan
# iterations ahead, one that does, and one that is not stated, whose scripts have it plan ahead.
FIT = {("llama-3.1-70b", ""), ("qwen3-32b", "0.12.0"), ("gpt-oss-120b", "0.15.1")}
REQUESTS_PER_CLIENT = 10
# These rows sent so many and drew both lengths uniformly from so much of the stated ones to all.
DRAWN_SOURCE, LEAST_LENGTH = re.compile(r"source_file=\d{4}-|db-dump/"), 0.8
# Requests wait for memory where those that run hold at least this share of it.
FULL = 0.8


@dataclass(frozen=True)
class Row:
    """One measured run: ``clients`` concurrent requests on ``tp`` cards; times in seconds.

    ``ep`` is ``tp`` if the experts were spread over the cards, else 1.
    """

    card: str
    model: str
    engine: str
    version: str
    dtype: str
    tp: int
    ep: int
    prompt: int
    output: int
    clients: int
    drawn: bool
    ttft_s: float
    tpot_s: float

    @property
    def run(self) -> tuple[Any, ...]:
        """All but the concurrency and what was measured."""
        return (self.card, self.model, self.engine, self.version, self.dtype, self.tp, self.ep,
                self.prompt, self.output, self.drawn)  # fmt: skip

    @property
    def batched_tokens(self) -> int:
        """Most tokens of an iteration: as the runs' public scripts set it, or the default."""
        if self.engine == "vllm" or not self.drawn:
            return 8192
        if self.engine == "sglang":
            return 32_768
        limits = {"gpt-oss-120b": 20_000, "deepseek-v3": self.clients + self.prompt + 64}
        return limits.get(self.model, 16_384)

    @property
    def kv_dtype(self) -> str:
        """Format of the KV cache that the runs' public scripts set; theirs is 16 bits else."""
        on_h200 = self.model == "llama-3.1-70b"
        on_h200 |= (self.model, self.engine) == ("deepseek-v3", "trtllm")
        set_there = self.card == "b200" or (self.card == "h200" and on_h200)
        return "fp8" if self.drawn and set_there else "bf16"

    @property
    def told(self) -> str | None:
        """Its version of vLLM, as `compose` takes it: one that plans ahead where none is stated."""
        return f"vllm@{self.version or '0.14'}" if self.engine == "vllm" else None

    @property
    def plans_ahead(self) -> bool:
        """Whether the engine overlaps its host with the device: vLLM since 0.14, by default."""
        stated = self.engine == "vllm" and not self.drawn
        return not stated or plans_ahead("vLLM", self.version) is not False


def is_test(row: Row) -> bool:
    """Whether a row is of the part that nothing may be fitted to: all but :data:`FIT`."""
    return row.engine != "vllm" or (row.model, row.version) not in FIT


def read_rows(wheel: Path) -> tuple[list[Row], dict[str, int]]:
    """The rows of one engine instance on a card and model that can be composed.

    Args:
        wheel: ``aiconfigurator_core-*.whl``.

    Returns:
        The rows, a repeated one once, and how many were left out by cause.
    """
    with zipfile.ZipFile(wheel) as archive:
        text = io.StringIO(archive.read(TABLE).decode())
    rows: dict[tuple[Any, ...], Row] = {}
    left_out: dict[str, int] = {}

    def leave(cause: str) -> None:
        left_out[cause] = left_out.get(cause, 0) + 1

    for _, raw in csv_rows(TABLE, stream=text):
        name = re.sub(r"(-Instruct)?(-FP8|-NVFP4)?$", "", raw["model_path"].rpartition("/")[2])
        stated = re.search(r"silicon_concurrency=(\d+)", raw["silicon_data_source"])
        if raw["mode"] != "agg":
            leave("prefill and decode on separate cards")
        elif raw["system"] not in CARDS or name not in MODELS or raw["precision"] not in DTYPES:
            leave("card, model or format without kernel tables")
        elif stated is None or stated[1] != raw["batch_size"]:
            leave("concurrency not stated, or of several replicas")
        elif raw["attention_dp_size"] not in ("", "1") or (
            max(int(raw["moe_ep_size"]), 1) not in (1, int(raw["tp_size"]))
        ):
            leave("data-parallel attention or experts spread over some cards")
        else:
            model = MODELS[name]
            dtype = "bf16" if model == "gpt-oss-120b" else DTYPES[raw["precision"]]
            # Qwen's own weights in 8 bits have a scale a block, NVIDIA's one a tensor.
            dtype += "_block" if raw["model_path"].startswith("Qwen/") and dtype == "fp8" else ""
            row = Row(
                CARDS[raw["system"]],
                model,
                raw["backend"],
                raw["backend_version"],
                dtype,
                int(raw["tp_size"]),
                max(int(raw["moe_ep_size"]), 1),
                *(int(raw[key]) for key in ("isl", "osl", "batch_size")),
                DRAWN_SOURCE.match(raw["silicon_data_source"]) is not None,
                *(1e-3 * float(raw[f"silicon_{key}_ms"]) for key in ("ttft", "tpot")),
            )
            if rows.setdefault((*row.run, row.clients), row) is not row:
                leave("repeated")
    return list(rows.values()), left_out


@functools.cache
def _composed(card: str, model: str, **options: Any) -> Profile | str:
    try:
        return compose(card, model, **options)
    except ValueError as error:
        return str(error)


def _profile(row: Row) -> Profile | str:
    """The profile of a row's cards, model and engine, or why there is none."""
    names = ("tp", "ep", "dtype", "kv_dtype")
    options = {name: getattr(row, name) for name in names}
    return _composed(row.card, row.model, engine=row.told, **options)


def least_s(row: Row, shape: ModelShape, profile: Profile) -> tuple[float, float]:
    """Seconds that TTFT and TPOT cannot be below: the arithmetic, and the reading of weights.

    Args:
        row: The run.
        shape: Its model.
        profile: Of the group of cards, for its peak and bandwidth.
    """
    device = profile.device
    width = VALUE_BYTES
    one = shape.expert_parameters
    met = shape.experts * (1.0 - (1.0 - shape.top_k / max(shape.experts, 1)) ** row.clients)
    read = shape.attention_parameters * width[row.dtype]
    read += one * max(met, 1.0) * width[shape.expert_dtype or row.dtype]
    active = shape.layers * (shape.attention_parameters + one * max(shape.top_k, 1))
    speed = 2.0 / min(width[row.dtype], width[shape.expert_dtype or row.dtype])
    prompt = row.prompt * (LEAST_LENGTH if row.drawn else 1.0)
    return (
        2.0 * active * prompt / (speed * device["tensor_flop_per_s"]),
        shape.layers * read / device["memory_bandwidth_bytes_per_s"],
    )


def why_not(row: Row, profile: Profile | str, others: Iterable[Row]) -> str | None:
    """Why a row cannot be what it says, or None.

    Args:
        row: The run.
        profile: Of its cards and model, or why there is none.
        others: The same run at other concurrencies.
    """
    if isinstance(profile, str):
        return "refused: " + profile.partition(":")[0]
    least = least_s(row, model_shape(row.model), profile)
    if row.ttft_s < least[0] or row.tpot_s < least[1]:
        return "faster than arithmetic or memory allows"
    decoding_s = row.output * row.tpot_s
    running = row.clients * decoding_s / (row.ttft_s + decoding_s)
    full = running * (row.prompt + row.output / 2.0) > FULL * profile.kv_capacity_tokens
    if row.ttft_s > decoding_s and not full:
        return "a queue for a limit that is not stated"
    if any(o.clients > row.clients and o.tpot_s < row.tpot_s / 1.1 for o in others):
        return "slower than at a higher concurrency"
    return None


def simulate(row: Row, profile: Profile) -> tuple[float, float]:
    """Mean TTFT and TPOT of the run in this engine, seconds.

    First come, first served with at most ``clients`` running is a closed loop: request n is sent
    when n - clients others have ended.
    """
    rng = np.random.default_rng(0)
    if row.drawn:
        count = REQUESTS_PER_CLIENT * row.clients
        prompts, outputs = (
            rng.integers(math.ceil(LEAST_LENGTH * length), length + 1, count)
            for length in (row.prompt, row.output)
        )
    else:
        loop = constant("closed_loop")
        count = loop["requests_per_client"] * row.clients
        spread = rng.uniform(1.0 - loop["spread"], 1.0 + loop["spread"], count)
        prompts = np.full(count, row.prompt)
        outputs = np.maximum(np.rint(row.output * spread), 1).astype(int)
    times = replay(
        np.zeros(count),
        prompts,
        outputs,
        profile=without_api(profile),  # `request_s` is what a client's clock adds
        max_num_seqs=row.clients,
        max_num_batched_tokens=row.batched_tokens,
        async_scheduling=row.plans_ahead,
    )
    sent = np.zeros(count)
    sent[row.clients :] = np.sort(times["finish_s"])[: count - row.clients]
    ttft = constant("request_s") + float(np.mean(times["ttft_s"] - sent))
    return ttft, float(np.nanmean(times["tpot_s"]))


def inside(profile: Profile, step: str, error: float) -> bool:
    """Whether the 80 % interval of a kind of step holds a relative error of the simulation."""
    stated = profile.step_error[step]
    return bool(abs(-math.log1p(error) - stated["bias"]) <= Z80 * stated["sd"])


def results(rows: Sequence[Row]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Errors (simulated over measured, minus 1) of every row that can be, and what was left out."""
    judged: list[dict[str, Any]] = []
    left_out: dict[str, int] = {}
    for row in rows:
        profile = _profile(row)
        cause = why_not(row, profile, [o for o in rows if o.run == row.run])
        if cause is not None or isinstance(profile, str):
            left_out[str(cause)] = left_out.get(str(cause), 0) + 1
            continue
        ttft, tpot = simulate(row, profile)
        errors = {"ttft": ttft / row.ttft_s - 1.0, "tpot": tpot / row.tpot_s - 1.0}
        steps = {"ttft": "prefill", "tpot": "decode"}
        covered = {f"{key}_in": inside(profile, steps[key], errors[key]) for key in errors}
        judged.append({"row": row, **errors, **covered})
    return judged, left_out


def _measures(some: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Errors of some rows."""
    line: dict[str, Any] = {"rows": len(some)}
    for name in ("ttft", "tpot"):
        error = np.array([one[name] for one in some])
        line[f"{name}_median"] = round(float(np.median(error)), 4)
        line[f"{name}_mape"] = round(float(np.abs(error).mean()), 4)
        line[f"{name}_in_80"] = round(float(np.mean([one[f"{name}_in"] for one in some])), 3)
    return line


def summary(judged: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One line for each part, card, model, version, format, TP and engine.

    Then, of vLLM, one for each card and TP, each part and both, and one for each other engine.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    totals: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for one in judged:
        row, part = one["row"], "test" if is_test(one["row"]) else "fit"
        dtype = model_shape(row.model).expert_dtype or row.dtype
        tp = f"{row.tp}, EP" if row.ep > 1 else f"{row.tp}"
        key = (part, row.card, row.model, row.version, dtype, tp, row.engine)
        groups.setdefault(key, []).append(one)
        for some in ("fit", "test", "both"):
            if some in (part, "both"):
                totals.setdefault((some, "all", "", "", "", "", row.engine), []).append(one)
        if row.engine == "vllm":
            key = ("both", row.card, "all", "", "", f"{row.tp}", "vllm")
            totals.setdefault(key, []).append(one)
    names = ("part", "card", "model", "version", "dtype", "tp", "engine")
    lines = [*sorted(groups.items()), *sorted(totals.items())]
    return [dict(zip(names, key, strict=True)) | _measures(some) for key, some in lines]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: replay both parts and write the table."""
    parser = argparse.ArgumentParser(
        prog="python -m servegym.experiments.studies.fidelity.published_rows",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("wheel", type=Path, help="aiconfigurator_core-0.12.0-*.whl")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder of the table ({OUT})")
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(words)
    rows, others = read_rows(options.wheel)
    judged, left_out = results(rows)
    origin = provenance(
        shlex.join([*parser.prog.split(), *words]),
        packages=("aiconfigurator-core",),
        settings={"left_out_of_the_table": others, "left_out_of_the_rows": left_out},
    )
    options.out.mkdir(parents=True, exist_ok=True)
    write_result(options.out / "published", summary(judged), origin)
    return 0


if __name__ == "__main__":
    run_main(main)
