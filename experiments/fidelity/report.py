"""How far the engine is from a measured serving run: ``servegym fidelity --data FOLDER``.

The run is replayed request by request on a profile that was fitted to kernel timings alone;
nothing is tuned to the run. It prints the errors of TTFT, TPOT and end-to-end latency and the
course over time, and writes to ``--out``, with the provenance of each table, ``errors``, and
``latencies`` and ``course`` with the picture ``fidelity.png``.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from servegym.experiments.cli import command_parser
from servegym.experiments.evaluation.output import print_table, read_rows, write_text
from servegym.experiments.evaluation.tables import provenance, write_result
from servegym.experiments.fidelity import comparison
from servegym.experiments.fidelity.measured_run import MeasuredRun, load_run
from servegym.experiments.papers.plotting import as_png, pyplot
from servegym.hardware_profiles import Profile, load

RUN_FOLDER = ("llmservingsim", "bench", "examples", "RTX4090", "Llama-3.1-8B", "vllm")
"""Where the measured run lies below the data folder."""

OUT = Path("experiments", "results", "fidelity")

START_UP_S = 1.0
"""Seconds of arrivals that the errors without the engine's start-up leave out."""


def draw(folder: Path) -> bytes:
    """The picture of the tables in a folder, as PNG: courses over time, and distributions."""
    colours = {"measured": "#222222", "simulated": "#d1495b"}
    figure, axes = pyplot().subplots(3, 2, figsize=(10, 7.5), gridspec_kw={"width_ratios": [2, 1]})
    course = read_rows(folder / "course.csv") if (folder / "course.csv").exists() else []
    latencies = read_rows(folder / "latencies.csv")
    left = {
        "running": (1.0, "running requests"),
        "waiting": (1.0, "waiting requests"),
        "kv_use": (100.0, "KV use, %"),
    }
    right = {
        "TTFT": (1.0, "TTFT, s"),
        "TPOT": (1e3, "TPOT, ms"),
        "end to end": (1.0, "end to end, s"),
    }
    for source, colour in colours.items():
        style = {"color": colour, "label": source}
        for axis, (name, (scale, title)) in zip(axes[:, 0], left.items(), strict=True):
            values = [scale * row[f"{source}_{name}"] for row in course]
            axis.plot([row["t_s"] for row in course], values, **style)
            axis.set(ylabel=title, ylim=(0, None))
        for axis, (metric, (scale, title)) in zip(axes[:, 1], right.items(), strict=True):
            rows = [row for row in latencies if row["metric"] == metric]
            values = [scale * row[f"{source}_s"] for row in rows]
            axis.plot(values, [row["share"] for row in rows], **style)
            axis.set(xlabel=title, ylabel="share of requests", ylim=(0, 1))
    axes[2, 0].set_xlabel("seconds since the run began (means of 5 s)")
    for axis in axes[:, 0] if not course else ():
        axis.set_axis_off()
    for axis in axes.ravel():
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 1].legend(frameon=False, loc="lower right")
    figure.tight_layout()
    return as_png(figure)


def _cell(key: str, value: Any) -> str:
    """How a value of a column is printed."""
    if value is None:
        return "—"
    if key.endswith("_s"):
        return f"{value:.4f} s"
    if "error" in key:
        return f"{100 * value:{'+' * (key == 'error_of_mean')}.2f} %"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    shown = [{key: _cell(key, row[key]) for key in row if key != "requests"} for row in rows]
    names = [key.removesuffix("_s").replace("_", " ") for key in shown[0]]
    print_table(title, names, [list(row.values()) for row in shown])


def describe_settings(run: MeasuredRun, profile: Profile) -> str:
    """The replay's settings, and where one comes from that the run's ``meta.json`` lacks."""
    tensor, data, _ = run.devices
    values = {**run.engine, "tensor_parallel": tensor}
    if data > 1:
        values["data_parallel"] = data
    if values["kv_tokens"] is None:
        values["kv_tokens"] = profile.kv_capacity_tokens
    return ", ".join(
        f"{name} {value}" + (f" ({run.assumed[name]})" if name in run.assumed else "")
        for name, value in values.items()
    )


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("fidelity")
    add = parser.add_argument
    add("--data", type=Path, help="folder of the measured data (default: $SERVEGYM_DATA)")
    add("--run", type=Path, help="folder of another run: requests.jsonl, meta.json")
    add("--profile", help="profile, by name or file (default: that of the run's device and model)")
    add("--engine", help="vllm@VERSION of a composed profile (default: the run's)")
    add("--out", type=Path, default=OUT, help=f"folder for tables and plot (default: {OUT})")
    add("--no-plot", action="store_true", help="do without matplotlib")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Command line: replay the measured run, print and write the errors."""
    options = _parser().parse_args(arguments)
    data = options.data or os.environ.get("SERVEGYM_DATA", "")
    folder = options.run or Path(data, *RUN_FOLDER)
    if not folder.is_dir():
        raise ValueError(
            f"no measured run in {str(folder)!r}: name its folder with --run, or the "
            "data's with --data or SERVEGYM_DATA"
        )
    run = load_run(folder)
    profile = load(options.profile) if options.profile else comparison.matching_profile(run)
    profile = comparison.of_engine(profile, run, options.engine)
    comparison.check_devices(run, profile)
    simulated = comparison.simulate(run, profile)
    late = run.arrival_s - run.arrival_s[0] >= START_UP_S
    by_start = {
        "all": comparison.errors(run, simulated),
        "later": comparison.errors(run, simulated, late),
    }
    tables = {
        "errors": [
            {"requests_from": start, **row} for start, rows in by_start.items() for row in rows
        ],
        "latencies": comparison.latency_quantiles(run, simulated),
    }
    first = [float(times[0]) for times in (run.ttft_s, simulated["ttft_s"])]
    print(f"run {run.name}, profile {profile.name} ({profile.kind})")
    print(f"settings: {describe_settings(run, profile)}")
    print(f"first request: TTFT measured {first[0]:.3f} s, simulated {first[1]:.3f} s (start-up)\n")
    _show("All requests", by_start["all"])
    _show(f"Without the first {START_UP_S:g} s of arrivals", by_start["later"])
    if run.series is not None and len(run.series) > 1:
        course = comparison.trajectory(run, profile, run.series["t_s"])
        _show("Course over time", comparison.compare_series(run.series, course))
        tables["course"] = comparison.course_means(run.series, course)

    options.out.mkdir(parents=True, exist_ok=True)
    about = {
        "run": run.name,
        "profile": profile.name,
        "kind": profile.kind,
        "replay": describe_settings(run, profile),
        "first_ttft_measured_s": first[0],
        "first_ttft_simulated_s": first[1],
    }
    origin = provenance(shlex.join(["servegym", "fidelity", *arguments]), settings=about)
    for stem, rows in tables.items():
        write_result(options.out / stem, rows, origin)
    if not options.no_plot:
        write_text(options.out / "fidelity.png", draw(options.out))
    print(f"written to {options.out}")
    return 0
