"""The same requests through this engine, other simulators and a measured engine.

    python -m servegym.experiments.studies.fidelity.parity --rival ai-dynamo=/path/to/python

Two comparisons:

- ``parity``: drawn lists under a constant law, which every simulator can take: an iteration that
  prefills or decodes takes 20 ms, one that does both 40 ms, as the rivals' fixed law counts it. So
  they differ by their scheduling alone.
- ``parity_measured``: a measured run under a hardware profile. ai-dynamo gets it as tables of
  prefill and decode iterations; it adds the two where an iteration does both, so the weights'
  reading is counted twice. With ``marginal prefill`` its prefill table holds only what a prefill
  adds to a decode iteration. This engine runs by the same inputs too.

``lacks`` says what of the profile and the engine a simulator cannot be told, ``coverage`` which
share of the requests it served. ``tpot_s`` is the mean over requests of (last token - first token)
/ (tokens - 1), a request's mean inter-token latency; it is computed from the times of both tokens
for all, as simulators' own ITL may weigh long answers more.

A rival runs under the Python of an environment of its own, which the user makes; without it its
rows are left out and named. `RIVALS` has what to install.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from servegym._command_line import run_main
from servegym.envs.llm_routing import replay
from servegym.envs.workloads.arrivals import make_arrivals
from servegym.envs.workloads.lengths import length_quantiles, sample_lengths
from servegym.experiments.evaluation.tables import note, provenance, versions, write_result
from servegym.experiments.fidelity.comparison import METRICS, matching_profile
from servegym.experiments.fidelity.measured_run import MeasuredRun, load_run
from servegym.experiments.fidelity.report import RUN_FOLDER, data_folder
from servegym.hardware_profiles import Profile, load
from servegym.hardware_profiles.host import without_api
from servegym.hardware_profiles.schema import TABLE_AXES

__all__ = ["RIVALS", "Times", "World", "constant_profile", "main", "rival_tables", "run_rival"]

Array = NDArray[np.float64]

OUT = Path("experiments", "results", "fidelity")
STEP_S = 0.02
"""Seconds of an iteration under the constant law."""

RIVALS = {
    "ai-dynamo": "pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1 "
    "aisimulate==0.13.0.dev202610270000000085 && pip install numpy pydantic uvloop msgspec pyyaml "
    "psutil ijson typing_extensions tqdm packaging pandas pyarrow scipy",
    "aisimulate": "the environment of ai-dynamo",
}
"""What an environment of a rival holds, after ``python -m venv FOLDER``."""

LOADS = {"light": 0.5, "at capacity": 0.95, "overload": 1.5}
"""Arrival rate as a share of what the engine serves when all requests wait from the beginning."""

_SAME = "servegym, inputs of ai-dynamo"
_LACKS = dict.fromkeys(
    (_SAME, "ai-dynamo", "ai-dynamo, marginal prefill"),
    "context of chunks, attention of mixed iterations, planning ahead",
)
# Prompts and answers are cut so that a request stays inside the range of the profiles' laws.
_CAPS = {"prompt_tokens": 15_360, "output_tokens": 1_024}
# Lengths -> the profile that serves them, arrival processes.
_LISTS = {
    "azure": ("rtx4090-llama-3.1-8b", ("poisson", "bursts")),
    "mooncake": ("h100-llama-3.1-8b", ("poisson",)),
}


@dataclass(frozen=True)
class World:
    """A list of requests, the limits of the engine that serves them, and what is known of it.

    Attributes:
        about: Columns that name the world.
        arrival_s: ``(J,)`` seconds, non-decreasing.
        prompt_tokens: ``(J,)``.
        output_tokens: ``(J,)``.
        engine: ``max_num_seqs``, ``max_num_batched_tokens``, ``kv_tokens``, ``block_size``,
            ``prefix_caching``.
        profile: Hardware profile of the profile law; None for the constant law.
        measured: The measured run, if it is one.
    """

    about: Mapping[str, Any]
    arrival_s: Array
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    engine: Mapping[str, Any]
    profile: Profile | None = None
    measured: MeasuredRun | None = None


class Times(NamedTuple):
    """What a simulator says of a world: ``(J,)`` seconds, NaN for a request it did not serve."""

    simulator: str
    version: str
    ttft_s: Array
    tpot_s: Array
    e2e_s: Array
    seconds: float = math.nan
    """Seconds of one core that the simulation took."""


@dataclass
class _Rivals:
    """Pythons of the rivals by name, and the errors of those that failed."""

    pythons: Mapping[str, str]
    repeats: int = 3
    failed: dict[str, str] = field(default_factory=dict)


def constant_profile(step_s: float = STEP_S) -> Profile:
    """A profile whose iterations take ``step_s``, twice that where they prefill and decode."""
    data = load("rtx4090-llama-3.1-8b").to_dict()
    unit, none = [0.0, 1.0], [[0.0, 0.0], [0.0, 0.0]]
    data["law"] = {
        "kind": "tabulated",
        "dense_tokens": unit,
        "dense_s": [step_s, step_s],
        "chunk_tokens": unit,
        "context_tokens": unit,
        "chunk_attention_s": none,
        "decode_sequences": unit,
        "decode_context_tokens": unit,
        "decode_attention_s": none,
        "head_sequences": unit,
        "head_s": [0.0, 0.0],
        "mixed_decode_attention_s": [[step_s, step_s], [step_s, step_s]],
    }
    data["domain"] = dict.fromkeys(data["domain"], 10**9)
    return Profile.from_dict(data, "constant")


def told_rivals(world: World) -> World:
    """A world of a profile as ai-dynamo is told of it: see `_LACKS`."""
    assert world.profile is not None
    data = world.profile.to_dict()
    law = {key: data["law"][key] for key in ("kind", *TABLE_AXES)}
    table = np.array(law["chunk_attention_s"])
    law["chunk_attention_s"] = np.broadcast_to(table[:, :1], table.shape).tolist()
    profile = Profile.from_dict({**data, "law": law}, world.profile.name)
    return replace(world, profile=profile, engine={**world.engine, "async_scheduling": False})


def rival_tables(
    profile: Profile, engine: Mapping[str, Any], marginal: bool = False
) -> dict[str, Any]:
    """A profile as ai-dynamo reads it: prefill by tokens, decode by KV tokens and mean context.

    Args:
        profile: Whose law it is.
        engine: The engine's limits.
        marginal: Whether a prefill costs only what it adds to a decode iteration, which holds the
            time of an iteration of one token.

    Returns:
        The ``law`` of a job, see ``rival.py``.
    """
    budget = int(engine["max_num_batched_tokens"])
    grid = np.unique(np.concatenate([profile.tables().dense_tokens, np.geomspace(1, budget, 60)]))
    prefill = grid[(grid >= 1) & (grid <= budget)]
    seconds = np.array([profile.prefill_s(tokens) for tokens in prefill])
    if marginal:
        seconds = np.maximum(seconds - profile.dense_s(1) - profile.head_s(1), 1e-9)
    cache, most = int(engine["kv_tokens"]), int(engine["max_num_seqs"])
    kv = np.unique(np.concatenate([np.geomspace(16, cache, 60), np.linspace(16, cache, 60)]))
    context = np.geomspace(16, min(cache, profile.domain["max_context_tokens"]), 60)
    decode = [
        [
            profile.decode_s(b, b * x)
            for x in context
            for b in [float(np.clip(total / x, 1.0, most))]
        ]
        for total in kv
    ]
    return {
        "kind": "tables",
        "prefill_tokens": prefill.tolist(),
        "prefill_s": seconds.tolist(),
        "decode_kv_tokens": kv.tolist(),
        "decode_context_tokens": context.tolist(),
        "decode_s": decode,
    }


def run_own(world: World, repeats: int = 3) -> Times:
    """This engine's times, and the seconds of the fastest of ``repeats`` runs."""
    profile = without_api(world.profile or constant_profile())
    settings = {"async_scheduling": False, **world.engine, "profile": profile}
    seconds = []
    requests = (world.arrival_s, world.prompt_tokens, world.output_tokens)
    result = replay(*requests, **settings)
    for _ in range(repeats):
        began = time.process_time()
        result = replay(*requests, **settings)
        seconds.append(time.process_time() - began)
    columns = (result[key].copy() for key in METRICS)
    return Times("servegym", versions()["serve-gym"], *columns, seconds=min(seconds))


def run_rival(
    name: str, python: str, worlds: Sequence[tuple[World, bool]], repeats: int = 3
) -> list[Times]:
    """A rival's times, under its own Python.

    Args:
        name: One of `RIVALS`.
        python: Its interpreter.
        worlds: The worlds, each with ``marginal`` of `rival_tables`.
        repeats: Runs whose fastest gives the speed.

    Returns:
        Its times a world; the requests it did not serve are NaN.

    Raises:
        RuntimeError: The rival failed, with the end of what it wrote.
    """
    jobs = [
        {
            "requests": {
                "arrival_s": world.arrival_s.tolist(),
                "prompt_tokens": [int(n) for n in world.prompt_tokens],
                "output_tokens": [int(n) for n in world.output_tokens],
            },
            "engine": dict(world.engine),
            "law": {"kind": "constant", "step_s": STEP_S}
            if world.profile is None
            else rival_tables(world.profile, world.engine, marginal),
            "repeats": repeats,
        }
        for world, marginal in worlds
    ]
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "jobs.json"), Path(folder, "out.json")
        source.write_text(json.dumps(jobs), encoding="utf-8")
        command = [python, str(Path(__file__).with_name("rival.py")), name, str(source), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(" ".join(done.stderr.split())[-300:] or f"exit {done.returncode}")
        answers = json.loads(out.read_text(encoding="utf-8"))
    times = []
    for (world, marginal), one in zip(worlds, answers, strict=True):
        first = np.array(one["first_token_s"], dtype=np.float64)
        finish = np.array(one["finish_s"], dtype=np.float64)
        more = np.where(world.output_tokens > 1, world.output_tokens - 1, np.nan)
        times.append(
            Times(
                f"{name}, marginal prefill" if marginal else name,
                one["version"],
                first - world.arrival_s,
                (finish - first) / more,
                finish - world.arrival_s,
                one["seconds"],
            )
        )
    return times


def simulate(worlds: Sequence[World], rivals: _Rivals) -> list[list[Times]]:
    """This engine's times of each world, and those of every rival that takes the world's law.

    Under a profile the engine serves once more by the inputs of ai-dynamo, which says what of its
    difference is due to them.
    """
    results = [[run_own(world, rivals.repeats)] for world in worlds]
    for world, times in zip(worlds, results, strict=True):
        if world.profile is not None:
            same = run_own(told_rivals(world), rivals.repeats)
            times.append(same._replace(simulator=_SAME))
    for name, python in rivals.pythons.items():
        jobs = [
            (row, marginal)
            for row, world in enumerate(worlds)
            for marginal in (False, True)
            if (name == "ai-dynamo" or world.profile is None) and (world.profile or not marginal)
        ]
        chosen = [(worlds[row], marginal) for row, marginal in jobs]
        try:
            times = run_rival(name, python, chosen, rivals.repeats)
        except (RuntimeError, OSError) as error:
            rivals.failed[name] = str(error)
            continue
        for (row, _), one in zip(jobs, times, strict=True):
            results[row].append(one)
    return results


def _about(world: World, one: Times) -> dict[str, Any]:
    lacks = "" if world.profile is None else _LACKS.get(one.simulator, "")
    return {**world.about, "simulator": one.simulator, "version": one.version, "lacks": lacks}


def rows_of(world: World, results: Sequence[Times]) -> list[dict[str, Any]]:
    """One row a simulator; differences are to the measured run or, without one, to this engine.

    ``*_difference`` is that of the means, relative. ``median_e2e_difference`` and
    ``largest_e2e_difference`` are of the requests' absolute relative differences.
    """
    truth, rows = results[0], []
    if world.measured is not None:
        run = world.measured
        truth = Times("measured", run.name, run.ttft_s, run.tpot_s, run.e2e_s)
        results = [truth, *results]
    for one in results:
        served = np.isfinite(one.e2e_s)
        count = int(served.sum())
        row = _about(world, one) | {"requests": len(served), "coverage": count / len(served)}
        for key in METRICS:
            row[key] = float(np.nanmean(getattr(one, key))) if count else None
        span = np.nanmax(world.arrival_s + one.e2e_s) - world.arrival_s[0] if count else math.nan
        row["throughput_rps"] = float(count / span) if count else None
        fast = len(served) / one.seconds
        row["requests_per_core_s"] = float(f"{fast:.4g}") if math.isfinite(fast) else None
        for key in METRICS:
            both = np.isfinite(getattr(one, key)) & np.isfinite(getattr(truth, key))
            means = [float(getattr(x, key)[both].mean()) for x in (one, truth)] if count else []
            difference = means[0] / means[1] - 1.0 if count else None
            row[f"{key.removesuffix('_s')}_difference"] = difference
        both = served & np.isfinite(truth.e2e_s)
        size = np.abs(one.e2e_s[both] / truth.e2e_s[both] - 1.0)
        row["median_e2e_difference"] = float(np.median(size)) if count else None
        row["largest_e2e_difference"] = float(size.max()) if count else None
        rows.append(row)
    return rows


def measured_world(run: MeasuredRun, profile: Profile) -> World:
    """A measured run as a world; the KV memory is the profile's where the run does not tell it."""
    engine = {**run.engine, "kv_tokens": run.engine["kv_tokens"] or profile.kv_capacity_tokens}
    lists = run.arrival_s, run.prompt_tokens, run.output_tokens
    return World({"run": run.name}, *lists, engine, profile, run)


def capacity_rps(world: World) -> float:
    """Requests/s that this engine serves when all of them wait from the beginning."""
    waiting = replace(world, arrival_s=np.zeros(len(world.arrival_s)))
    return len(waiting.arrival_s) / float(run_own(waiting, 1).e2e_s.max())


def request_lists(requests: int, seed: int = 0) -> list[World]:
    """The drawn worlds: lengths, arrivals and loads under the constant law.

    Args:
        requests: Requests of a list.
        seed: Of lengths and arrivals; lists of one seed differ in their arrivals alone.
    """
    worlds = []
    for row, (lengths, (name, processes)) in enumerate(_LISTS.items()):
        rng, profile = np.random.default_rng([seed, 12 * row]), load(name)
        prompts, outputs = (
            np.maximum(
                sample_lengths(length_quantiles(lengths, kind, cap), rng.random(requests)), 1
            ).astype(np.int64)
            for kind, cap in _CAPS.items()
        )
        engine = {
            "max_num_seqs": 256,
            "max_num_batched_tokens": 2048,
            "kv_tokens": profile.kv_capacity_tokens,
            "block_size": 16,
            "prefix_caching": False,
        }
        base = World({}, np.zeros(requests), prompts, outputs, engine)
        capacity = capacity_rps(base)
        for process in processes:
            kind = "mmpp" if process == "bursts" else process
            unit = make_arrivals(kind, 1.0).sample(requests, np.random.default_rng(seed))
            for load_name, share in LOADS.items():
                about = {"lengths": lengths, "arrivals": process, "load": load_name}
                about["rate_rps"] = share * capacity
                worlds.append(replace(base, about=about, arrival_s=unit / (share * capacity)))
    return worlds


def speed_notes(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How many times as fast this engine is as each other simulator, over the worlds of a table."""
    ours, ratios = math.nan, {}
    for row in rows:
        if row["simulator"] == "servegym":
            ours = row["requests_per_core_s"]
        elif row["requests_per_core_s"] is not None and row["simulator"] != _SAME:
            ratios.setdefault(row["simulator"], []).append(ours / row["requests_per_core_s"])
    return [
        note(
            f"servegym simulates {np.median(each):.1f} times the requests per core-second of "
            f"{name} (median of {len(each)} worlds, {min(each):.1f} to {max(each):.1f})",
            rival=name,
            worlds=len(each),
            median=float(np.median(each)),
            least=float(min(each)),
            most=float(max(each)),
        )
        for name, each in ratios.items()
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m servegym.experiments.studies.fidelity.parity",
        description="Serve the same requests by this engine and by other simulators.",
    )
    add = parser.add_argument
    add(
        "--rival",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help=f"interpreter of an environment that holds a rival ({', '.join(RIVALS)}); repeatable",
    )
    add("--requests", type=int, default=2000, help="requests of a drawn list; 0 leaves them out")
    add("--data", type=Path, help="folder of the measured data (default: $SERVEGYM_DATA)")
    add("--seed", type=int, default=0, help="seed of lengths and arrivals")
    add("--repeats", type=int, default=3, help="timed runs, of which the fastest counts")
    add("--out", type=Path, default=OUT, help=f"folder for the tables (default: {OUT})")
    return parser


def _rival_pythons(texts: Sequence[str]) -> dict[str, str]:
    pythons = {}
    for text in texts:
        name, _, python = text.partition("=")
        if name not in RIVALS or not python:
            raise ValueError(
                f"--rival is {text!r}; it must be NAME=PYTHON with a name of {', '.join(RIVALS)}"
            )
        if not Path(python).is_file():
            raise ValueError(f"--rival is {text!r}, but there is no file {python!r}")
        pythons[name] = python
    return pythons


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: run every simulator at hand, print and write the tables.

    Args:
        arguments: The command line; ``sys.argv`` by default.

    Returns:
        0.

    Raises:
        ValueError: If an argument cannot be used.
    """
    parser, words = _parser(), sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(words)
    for name, least in (("requests", 0), ("repeats", 1)):
        if getattr(options, name) < least:
            raise ValueError(f"--{name} is {getattr(options, name)}; it must be at least {least}")
    if 0 < options.requests < 100:
        raise ValueError(f"--requests is {options.requests}; it must be 0 or above 99")
    rivals = _Rivals(_rival_pythons(options.rival), options.repeats)
    worlds: dict[str, list[World]] = {}
    if options.requests:
        worlds["parity"] = request_lists(options.requests, options.seed)
    folder = data_folder(options.data).joinpath(*RUN_FOLDER)
    if folder.is_dir():
        run = load_run(folder)
        worlds["parity_measured"] = [measured_world(run, matching_profile(run))]
    else:
        print(f"no measured run in {str(folder)!r}: name the data's folder with --data")
    every = [world for some in worlds.values() for world in some]
    times = iter(simulate(every, rivals))
    tables = {
        stem: [row for world in some for row in rows_of(world, next(times))]
        for stem, some in worlds.items()
    }
    for name, install in RIVALS.items():
        if name not in rivals.pythons:
            print(f"{name}: not run; python -m venv FOLDER, {install}, --rival {name}=PYTHON")
    for name, error in rivals.failed.items():
        print(f"{name}: failed: {error}")
    origin = provenance(
        shlex.join([*parser.prog.split(), *map(str, words)]),
        settings={"constant_step_s": STEP_S, "failed": rivals.failed},
    )
    options.out.mkdir(parents=True, exist_ok=True)
    for stem, rows in tables.items():
        notes = speed_notes(rows)
        write_result(options.out / stem, rows, origin, notes)
        for one in notes:
            print(f"{stem}: {one['text']}")
    print(f"written to {options.out}")
    return 0


if __name__ == "__main__":
    run_main(main)
