"""A measured run against its replay: errors of latencies, course over time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.experiments.fidelity.measured_run import MeasuredRun
from servegym.experiments.replay import replayed
from servegym.hardware_profiles import Profile, list_profiles, load
from servegym.hardware_profiles.host import plans_ahead, with_engine, without_api
from servegym.hardware_profiles.schema import KINDS

METRICS = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "end to end"}
"""Latency of a request -> its name in the tables."""

WINDOW_S = 5.0
_MEASURES = (
    "measured_mean_s",
    "simulated_mean_s",
    "error_of_mean",
    "median_error",
    "p90_error",
    "p99_error",
)
QUANTITIES = ("running", "waiting", "kv_use")
"""Quantities of a course over time."""


def matching_profile(run: MeasuredRun) -> Profile:
    """The shipped profile of the run's device and model that is nearest to a measurement.

    Raises:
        ValueError: If there is none.
    """
    profiles = sorted(map(load, list_profiles()), key=lambda p: (KINDS.index(p.kind), p.name))
    for profile in profiles:
        same = profile.device["name"] == run.device and profile.model["name"] == run.model
        if same and _devices(profile) == run.devices:
            return profile
    if not run.device:
        raise ValueError(
            f"run {run.name!r}: meta.json has no hardware.device_name; write the card's name there "
            "as nvidia-smi gives it, or name a profile with --profile"
        )
    tensor, data, _ = run.devices
    count = tensor * data
    cards, make = f"{count} x " if count > 1 else "", _options(run)
    raise ValueError(
        f"no profile of {run.model or 'the model'} on {cards}{run.device}: "
        f"name one with --profile (shipped: {', '.join(list_profiles())}), or compose it with "
        f"`servegym profile{make}`"
    )


def of_engine(profile: Profile, run: MeasuredRun, engine: str | None) -> Profile:
    """A profile with the host's share of a named engine, or, if it has one, of the run's."""
    if engine:
        return with_engine(profile, engine)
    known = plans_ahead("vLLM", run.version) is not None and profile.engine["name"] == "vLLM"
    return with_engine(profile, f"vllm@{run.version}") if profile.host and known else profile


def _devices(profile: Profile) -> tuple[int, int, bool]:
    """Devices that share every layer, replicas of them, and whether experts are spread."""
    engine = profile.engine
    sizes = (int(engine.get(f"{kind}_parallel", 1)) for kind in ("tensor", "data", "expert"))
    tensor, data, expert = sizes
    return tensor, data, expert > 1


def _options(run: MeasuredRun) -> str:
    """Options of ``servegym profile`` for the run's devices, each after a space."""
    tensor, data, spread = run.devices
    named = {"tp": tensor, "dp": data, "ep": tensor * data if spread else 1}
    return "".join(f" --{name} {size}" for name, size in named.items() if size > 1)


def check_devices(run: MeasuredRun, profile: Profile) -> None:
    """Refuse a profile of other devices or formats than the run's, with a ValueError."""
    weights, cache = run.formats
    wide = profile.engine.get("dtype") == "bf16", profile.model.get("bytes_per_value", 2) == 2
    for name, value, other, option in (
        ("quantization", weights, wide[0], "--dtype"),
        ("kv_cache_dtype", cache if cache.startswith("fp8") else "", wide[1], "--kv-dtype fp8"),
    ):
        if value and other:
            raise ValueError(
                f"run {run.name!r} has {name} {value!r}, but profile {profile.name!r} is of 16 "
                f"bits: compose one with {option}"
            )
    if _devices(profile) != run.devices:
        words = "tensor_parallel_size {}, data_parallel_size {}, experts spread: {}"
        raise ValueError(
            f"run {run.name!r} has {words.format(*run.devices)}, but profile {profile.name!r} "
            f"{words.format(*_devices(profile))}: compose one with "
            f"`servegym profile{_options(run)}`"
        )


def simulate(run: MeasuredRun, profile: Profile, **changes: Any) -> np.ndarray:
    """Replay the run: ``(J,)`` structured array of `replayed`.

    Times are on the engine's clock, as those of a run. ``changes`` are arguments of the replay that
    differ from the run's engine.
    """
    settings = {**run.engine, "profile": without_api(profile), **changes}
    return replayed(run.arrival_s, run.prompt_tokens, run.output_tokens, **settings)


def errors(
    run: MeasuredRun, simulated: np.ndarray, mask: NDArray[np.bool_] | None = None
) -> list[dict[str, Any]]:
    """Errors of the three latencies, simulated against measured, of the requests in ``mask`` (J,).

    Returns:
        One row a metric: ``requests``, ``measured_mean_s``, ``simulated_mean_s``,
        ``error_of_mean`` (signed, relative) and the quantiles ``median_error``, ``p90_error`` and
        ``p99_error`` of the requests' absolute relative errors. Of requests that both served; a
        row without any holds their number alone.
    """
    rows = []
    for key, label in METRICS.items():
        measured, guess = getattr(run, key), simulated[key]
        use = np.isfinite(measured) & (measured > 0) & np.isfinite(guess)
        if mask is not None:
            use &= mask
        if not use.any():
            rows.append({"metric": label, "requests": 0} | dict.fromkeys(_MEASURES))
            continue
        measured, guess = measured[use], guess[use]
        size = np.abs(guess / measured - 1.0)
        means = measured.mean(), guess.mean(), guess.mean() / measured.mean() - 1.0
        values = map(float, (*means, *np.quantile(size, [0.5, 0.9, 0.99])))
        row = {"metric": label, "requests": int(use.sum())}
        rows.append(row | dict(zip(_MEASURES, values, strict=True)))
    return rows


def latency_quantiles(run: MeasuredRun, simulated: np.ndarray) -> list[dict[str, Any]]:
    """The distributions of the three latencies: a row a metric and percentile, in seconds."""
    shares = np.linspace(0.0, 1.0, 101)
    rows = []
    for key, label in METRICS.items():
        both = [values[np.isfinite(values)] for values in (getattr(run, key), simulated[key])]
        if not all(values.size for values in both):
            continue
        quantiles = [np.quantile(values, shares) for values in both]
        rows += [
            {
                "metric": label,
                "share": round(float(share), 2),
                "measured_s": round(float(measured), 5),
                "simulated_s": round(float(guess), 5),
            }
            for share, measured, guess in zip(shares, *quantiles, strict=True)
        ]
    return rows


def trajectory(run: MeasuredRun, profile: Profile, times_s: Any, **changes: Any) -> np.ndarray:
    """Running requests, waiting requests and KV use of the replay, see `simulate`.

    Args:
        run: The measured run.
        profile: Whose law gives the iterations' times.
        times_s: ``(T,)`` seconds since the run began, non-decreasing.
        **changes: Arguments of the replay that differ from the run's engine.

    Returns:
        ``(T,)`` structured array: ``t_s``, ``running``, ``waiting``, ``kv_use`` (blocks in use
        over all blocks). Requests that have not arrived yet do not wait.
    """
    from servegym.envs.llm_routing import replay_timeline
    from servegym.envs.llm_routing.trace_replay import TIMELINE
    from servegym.envs.prefix_routing.live import LiveEngine

    card, settings = without_api(profile), run.engine | changes
    requests = run.arrival_s, run.prompt_tokens, run.output_tokens
    if not settings.pop("prefix_caching", False):
        return replay_timeline(*requests, times_s, profile=card, **settings)
    engine = LiveEngine(card, max_requests=len(run.arrival_s), **settings)
    course, sent, token = np.empty(len(times_s), dtype=TIMELINE), 0, 0
    for k, now in enumerate(times_s):
        while sent < len(run.arrival_s) and run.arrival_s[sent] <= now:
            arrival, first = float(run.arrival_s[sent]), token + int(run.prompt_tokens[sent])
            end = first + int(run.output_tokens[sent])
            # Who arrives at the moment is there when an iteration begins then.
            engine.work(np.nextafter(arrival, -np.inf))
            engine.submit(arrival, range(token, first), range(first, end))  # nobody else's tokens
            sent, token = sent + 1, end
        engine.work(now)
        course[k] = now, engine.running, engine.waiting, engine.kv_usage
    return course


def compare_series(measured: np.ndarray, simulated: np.ndarray) -> list[dict[str, Any]]:
    """Means of two courses ``(T,)`` at the same times, their mean difference and correlation.

    One row a quantity; no correlation where one of the courses is constant.
    """
    rows = []
    for name in QUANTITIES:
        a, b = measured[name], simulated[name]
        varies = bool(np.ptp(a) > 0 and np.ptp(b) > 0)
        rows.append(
            {
                "quantity": name,
                "measured_mean": float(a.mean()),
                "simulated_mean": float(b.mean()),
                "mean_absolute_difference": float(np.abs(b - a).mean()),
                "correlation": float(np.corrcoef(a, b)[0, 1]) if varies else None,
            }
        )
    return rows


def course_means(measured: np.ndarray, simulated: np.ndarray) -> list[dict[str, Any]]:
    """Means of two courses ``(T,)`` over windows of `WINDOW_S`, for a plot.

    One row a window that has samples: ``t_s`` (its middle), and ``measured_`` and ``simulated_`` of
    each quantity.
    """
    window = (measured["t_s"] // WINDOW_S).astype(int)
    rows = []
    for index in np.unique(window):
        row = {"t_s": WINDOW_S * (float(index) + 0.5)}
        for source, course in (("measured", measured), ("simulated", simulated)):
            for name in QUANTITIES:
                row[f"{source}_{name}"] = round(float(course[name][window == index].mean()), 4)
        rows.append(row)
    return rows
