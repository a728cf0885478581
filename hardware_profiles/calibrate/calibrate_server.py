"""Corrections of a profile by a few loads of a running server: ``servegym calibrate server``.

Learnt, as far as the loads tell: a factor on the step by the number of sequences (a Gaussian
process over the logarithm of the batch; its prior is the profile's ``step_error``), a time a
sequence, a factor on what prompts add, a constant before the first token.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import numpy as np

from servegym.hardware_profiles.calibrate.fitting import error_quantiles, estimated, tabulate
from servegym.hardware_profiles.calibrate.server_loads import Load, read_all
from servegym.hardware_profiles.compose import add_arguments, compose_chosen, possible_engines
from servegym.hardware_profiles.constants import constant
from servegym.hardware_profiles.host import with_engine
from servegym.hardware_profiles.law import Profile
from servegym.hardware_profiles.load import load as load_profile
from servegym.hardware_profiles.model_config import model_shape
from servegym.hardware_profiles.roofline import roofline
from servegym.hardware_profiles.schema import HOST_TIMES, LONGEST, MIXED_CHUNK, MIXED_TABLE, Z80

# Chosen on llm-d's and ML.ENERGY's runs (experiments/results/fidelity/judges.csv) and on the part
# `fit` of aiconfigurator-core's, each load left out once; the errors are flat around them.
LOAD_SD = 0.04
"""Deviation of the logarithm of a load's time over what the server's law would give."""
LENGTH = 1.5
"""Batches whose logarithms differ by this much have much of their correction in common."""
STATED = {"prefill": {"bias": 0.0, "sd": 0.2}, "decode": {"bias": 0.0, "sd": 0.1}}
"""Errors of a profile that states none."""
SEQUENCE_SD_S = 14e-6
"""Deviation of the time a sequence; an engine that does not plan ahead takes 50 us."""
FIRST_TOKEN_SD_S = 0.01
_LEAST_FIRST_TOKEN_S = 2e-4
_LEAST_STEPS = 100
# First tokens are seen late; the step after one is not used.
_SKIPPED, _LEAST_TOKENS = 2, 3
# Loads whose steps are mostly prefill say nothing of decodes.
_LEAST_SHARE = 0.2
_BOUND = 3.0
_LEAST_JUDGED, _LARGEST_SD = 3, 2.0
# Whether equal requests of a closed loop stay in step, or meet the prompts of all others, is not
# known where nobody noted when they were sent.
_IN_STEP_SD = 0.3


@dataclass(frozen=True)
class Point:
    """What a load says of a decode step.

    Attributes:
        name: the load's.
        batch: mean number of sequences.
        context: mean tokens in KV memory of each.
        step_s: seconds of a step, prompts left out.
        law_s: the profile's.
        sd: deviation of the logarithm of their ratio, the load's own scatter.
    """

    name: str
    batch: float
    context: float
    step_s: float
    law_s: float
    sd: float


def _steady(load: Load, profile: Profile) -> Point | None:
    """From stretches of tokens in which no request came or went; None where there are few."""
    if not any(map(len, load.token_s)):
        return None
    first = load.start_s + load.ttft_s
    end = first + load.decode_s
    pace = (load.output - 1.0) / np.maximum(load.decode_s, 1e-9)
    events = np.sort(np.concatenate([first, end]))

    def before(at: np.ndarray, when: np.ndarray, what: np.ndarray) -> np.ndarray:
        order = np.argsort(when)
        sums = np.concatenate([[0.0], np.cumsum(what[order])])
        return sums[np.searchsorted(when[order], at)]

    parts = []
    for k, after in enumerate(load.token_s):
        times = first[k] + after
        stretch = np.searchsorted(events, times)
        for number in np.unique(stretch):
            inside = np.flatnonzero(stretch == number)[_SKIPPED:]
            if len(inside) > _LEAST_TOKENS:
                parts.append((times[inside[0]], times[inside[-1]], len(inside) - 1))
    if not parts:
        return None
    begun, ended, steps = np.array(parts).T
    middle = (begun + ended) / 2.0
    batch, base, grown = (
        before(middle, first, what) - before(middle, end, what)
        for what in (np.ones(len(first)), load.prompt - first * pace, pace)
    )
    good = batch >= 1.0
    if steps[good].sum() < _LEAST_STEPS:
        return None
    begun, ended, steps, batch = begun[good], ended[good], steps[good], batch[good]
    context = (base + grown * middle)[good] / batch
    law = [profile.decode_s(b, b * x) for b, x in zip(batch, context, strict=True)]
    total = steps.sum()
    return Point(
        load.name,
        float(np.exp(steps @ np.log(batch) / total)),
        float(steps @ context / total),
        float((ended - begun).sum() / total),
        float(steps @ np.array(law) / total),
        LOAD_SD,
    )


def _mean(load: Load, profile: Profile) -> Point | None:
    """From the mean time of a token, less what the prompts of others take; None if nothing is left.

    Requests in flight are counted, or come by Little's law from the number of clients.
    """
    steps = load.output - 1.0
    known = np.isfinite(load.ttft_s)
    if not steps.sum() > 0.0:
        return None
    share = load.decode_s / (load.decode_s + np.where(known, load.ttft_s, 0.0))
    batch = load.clients if load.static else max(load.clients * float(share.mean()), 1.0)
    own = load.prompt + load.output / 2.0
    context, prompts = float(own.mean()), float((batch - share.mean()) * len(steps))
    if len(load.start_s):
        first = load.start_s + load.ttft_s
        end = first + load.decode_s
        times = np.concatenate([first, end])
        order = np.argsort(times)
        gaps = np.diff(times[order], append=times[order[-1]])
        ones = np.concatenate([np.ones(len(first)), -np.ones(len(first))])[order]
        running = np.cumsum(ones)
        tokens = np.cumsum(ones * np.concatenate([own, own])[order])
        # What a request sees while it decodes: integrals over its time, summed over the requests.
        seen = running * gaps
        batch = max(float(running @ seen / seen.sum()), 1.0) if seen.sum() > 0.0 else 1.0
        context = float(tokens @ seen / max(running @ seen, 1e-9))
    law = profile.decode_s(batch, batch * context)
    if len(load.start_s):
        # First tokens within a step of its own are of the same step.
        came = np.sort(first)
        inside = np.searchsorted(came, end, "right") - np.searchsorted(came, first + law, "right")
        prompts = float(np.maximum(inside, 0).sum())
    lengths, counts = np.unique(load.prompt, return_counts=True)
    beside = [profile.mixed_step_s([(p, 0.0)], batch, batch * context) - law for p in lengths]
    prefill = prompts * float(counts @ np.array(beside)) / len(steps)
    if load.static:
        prefill = 0.0
    seconds, total = float(load.decode_s.sum()), float(steps.sum())
    if seconds - prefill < _LEAST_SHARE * seconds:
        return None
    doubt = math.hypot(_stated(profile)["prefill"]["sd"], 0.0 if len(load.start_s) else _IN_STEP_SD)
    spread = doubt * prefill / (seconds - prefill)
    step = (seconds - prefill) / total
    return Point(load.name, batch, context, step, law, math.hypot(LOAD_SD, spread))


def _stated(profile: Profile) -> dict[str, Any]:
    return profile.step_error or STATED


def points_of(loads: Sequence[Load], profile: Profile) -> list[Point]:
    """What each load says of a decode step; loads that say nothing are left out."""
    points = [_steady(load, profile) or _mean(load, profile) for load in loads]
    return [point for point in points if point is not None]


def lone_prompts(loads: Sequence[Load]) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of prompts that met no other request, and the median seconds to their first token."""
    found: dict[float, list[float]] = {}
    for load in loads:
        if len(load.start_s):
            end = load.start_s + load.ttft_s + load.decode_s
            before = np.concatenate([[-np.inf], np.maximum.accumulate(end)[:-1]])
            after = np.append(load.start_s[1:], np.inf)
            alone = (before <= load.start_s) & (after >= load.start_s + load.ttft_s)
        else:
            alone = np.full(len(load.prompt), load.clients == 1)
        for i in np.flatnonzero(alone & np.isfinite(load.ttft_s)):
            found.setdefault(float(load.prompt[i]), []).append(float(load.ttft_s[i]))
    lengths = sorted(found)
    return np.array(lengths), np.array([np.median(found[length]) for length in lengths])


@dataclass(frozen=True)
class Steps:
    """The correction of decode steps: a Gaussian process on the logarithm of the ratio.

    Attributes:
        points: the loads that it was fitted to.
        bias: mean of the prior.
        sd: its deviation at a batch.
        least_s: the lowest time a sequence, seconds: what takes away the host's.
        common: deviation of a part that all batches have in common.
    """

    points: tuple[Point, ...]
    bias: float
    sd: float
    least_s: float
    common: float = 0.0

    @property
    def ratios(self) -> np.ndarray:
        """``(P,)`` logarithms of measured over predicted steps."""
        return np.log([p.step_s / p.law_s for p in self.points])

    def _smooth(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        gap = np.log(one)[:, None] - np.log(other)[None]
        return self.common**2 + self.sd**2 * np.exp(-0.5 * (gap / LENGTH) ** 2)

    def _solved(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        batch, law, noise = (
            np.array([getattr(p, key) for p in self.points]) for key in ("batch", "law_s", "sd")
        )
        slope = SEQUENCE_SD_S * batch / law
        kernel = self._smooth(batch, batch) + np.outer(slope, slope)
        inverse = np.linalg.inv(kernel + np.diag(noise**2))
        return batch, slope, inverse, inverse @ (self.ratios - self.bias)

    def left_out(self) -> np.ndarray:
        """``(P,)`` errors of the logarithm at each load, by the fit to the others."""
        _, _, inverse, weights = self._solved()
        return weights / np.diag(inverse)

    @property
    def sequence_s(self) -> tuple[float, float]:
        """The time a sequence, seconds, and its deviation."""
        _, slope, inverse, weights = self._solved()
        mean = SEQUENCE_SD_S * float(slope @ weights)
        sd = SEQUENCE_SD_S * math.sqrt(max(1.0 - float(slope @ inverse @ slope), 0.0))
        return min(max(mean, self.least_s), _BOUND * SEQUENCE_SD_S), sd

    def factor(self, batch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logarithm of the factor at batches ``(B,)`` and its deviation, the time a sequence apart.

        At the bound of the time a sequence the factor takes up the rest.
        """
        at, slope, inverse, weights = self._solved()
        cross = self._smooth(batch, at)
        rest = self.ratios - self.bias - self.sequence_s[0] / SEQUENCE_SD_S * slope
        noise = np.diag([p.sd**2 for p in self.points])
        mean = cross @ np.linalg.solve(self._smooth(at, at) + noise, rest)
        prior = self.sd**2 + self.common**2
        variance = prior - np.einsum("bi,ij,bj->b", cross, inverse, cross)
        limit = _BOUND * math.sqrt(prior)
        return self.bias + np.clip(mean, -limit, limit), np.sqrt(np.maximum(variance, 0.0))


def fit_steps(points: Sequence[Point], profile: Profile) -> Steps:
    """The correction of a profile's decode steps by what loads say of them."""
    stated = _stated(profile)["decode"]
    least = 0.0 - float(profile.host.get("sequence_s", 0.0))
    steps = Steps(tuple(points), stated["bias"], stated["sd"], least)
    # Loads further off than the profile says of itself are of a machine that is slower or faster.
    misfit = float((steps.ratios - steps.bias) @ steps._solved()[3]) / len(points)
    common = steps.sd * math.sqrt(max(misfit - 1.0, 0.0))
    return replace(steps, common=min(common, _LARGEST_SD))


def fit_first_token(
    lengths: np.ndarray, ttft_s: np.ndarray, profile: Profile, factor: float
) -> tuple[np.ndarray, np.ndarray]:
    """A constant before the first token, s, and a factor on what prompts add; their deviations.

    ``lengths`` and ``ttft_s`` ``(K,)`` are of lone prompts, ``factor`` is that of a step of one.
    """
    stated = _stated(profile)["prefill"]
    least = factor * (profile.dense_s(1) + profile.head_s(1))
    added = np.array([profile.prefill_s(p) for p in lengths]) - least / factor
    scale = np.array([FIRST_TOKEN_SD_S, math.exp(stated["bias"]) * stated["sd"]])
    known = profile.host.get("api_in_s", 0.0) + profile.host.get("api_out_s", 0.0)
    prior = np.array([known or constant("request_s"), math.exp(stated["bias"])])
    noise = np.hypot(_LEAST_FIRST_TOKEN_S, LOAD_SD * ttft_s)
    design = np.column_stack([np.ones_like(added), added]) * scale / noise[:, None]
    rest = (ttft_s - least - prior[0] - prior[1] * added) / noise
    covariance = np.linalg.inv(design.T @ design + np.eye(2))
    value = prior + scale * (covariance @ design.T @ rest)
    low, high = prior[1] * np.exp(np.array([-1.0, 1.0]) * _BOUND * stated["sd"])
    return np.array([max(value[0], 0.0), min(max(value[1], low), high)]), scale * np.sqrt(
        np.diag(covariance)
    )


def corrected_law(profile: Profile, steps: Steps, prompts: float) -> dict[str, Any]:
    """The ``law`` of a profile with the factor by batch and one on what prompts add.

    All decodes take the factor of the middle of the batches; what others differ by is a time by the
    number of sequences, at the mean context of the loads.
    """
    kernels = profile.with_host({})
    law: dict[str, Any] = kernels.tables()._asdict()
    extra = (MIXED_TABLE, MIXED_CHUNK, *LONGEST)
    law |= {key: np.array(profile.law[key]) for key in extra if key in profile.law}
    if profile.law["kind"] == "linear":
        # Two points far apart, as they are rounded.
        law["dense_tokens"] = np.array([1.0, profile.domain["max_iteration_tokens"]])
        law["dense_s"] = np.array([kernels.dense_s(t) for t in law["dense_tokens"]])
    batches = np.array([p.batch for p in steps.points])
    common = math.exp(float(steps.factor(batches)[0].mean()))
    dense = law["dense_s"] + (common - prompts) * (kernels.dense_s(1) / prompts)
    factors = dict.fromkeys(("decode_attention_s", "head_s", MIXED_TABLE, *LONGEST), common)
    factors |= dict.fromkeys(("chunk_attention_s", MIXED_CHUNK), prompts)
    law |= {key: factor * law[key] for key, factor in factors.items() if key in law}
    law["dense_s"] = prompts * dense
    last = profile.domain["max_decode_sequences"]
    knots = np.unique([1.0, *(2.0 ** np.arange(math.log2(last) + 1)), *np.rint(batches)])
    knots = np.unique([*law["head_sequences"], *knots])
    head = np.interp(knots, law["head_sequences"], law["head_s"])
    law["head_sequences"], law["head_s"] = knots, head
    draft = replace(profile, law=tabulate(law))
    context = float(np.exp(np.mean(np.log([p.context for p in steps.points]))))
    batches = np.maximum(knots, 1.0)
    head = head + [
        f * profile.decode_s(n, n * context) - draft.decode_s(n, n * context)
        for f, n in zip(np.exp(steps.factor(batches)[0]), batches, strict=True)
    ]
    # Every step has both parts, so a constant may go from one to the other: none is negative.
    moved = max(-float(head.min()), 0.0)
    head[-1] = max(head[-1], head[-2])
    law["head_s"], law["dense_s"] = head + moved, law["dense_s"] - moved
    if law["dense_s"].min() <= 0.0:
        raise ValueError("the loads contradict the profile: is it of the same model and cards?")
    return tabulate(law)


@dataclass(frozen=True)
class Calibration:
    """A calibrated profile and what is to be said of it.

    Attributes:
        profile: the profile to use: the corrected one, or the one it began with.
        kept: whether the fit was kept.
        lines: for people.
    """

    profile: Profile
    kept: bool
    lines: tuple[str, ...]


def _between(value: float, sd: float) -> str:
    """A value and its 80 % interval."""
    return f"{value:.3g} ({value - Z80 * sd:.3g} to {value + Z80 * sd:.3g})"


def calibrate_server(
    loads: Sequence[Load], profile: Profile, name: str, kv_tokens: int = 0
) -> Calibration:
    """Correct a profile by measured loads of the server that it is of.

    Args:
        loads: of :func:`read_all`.
        profile: what to begin with.
        name: of the result.
        kv_tokens: tokens that the server's KV memory holds, 0: the profile's.

    Raises:
        ValueError: If no load says anything of a step, or they contradict the profile.
    """
    points = points_of(loads, profile)
    if not points:
        raise ValueError("no load has decode steps to learn from: measure more output tokens")
    steps = fit_steps(points, profile)
    ratios, count = steps.ratios, len(points)
    alone = np.expm1(np.abs(ratios))
    lines = [f"{profile.name} alone: a step is off by {alone.mean():.1%} on average over {count} "
             f"load{'s' * (count > 1)}, {alone.max():.1%} at most"]  # fmt: skip
    kept, errors = True, {"loads_fitted_to": error_quantiles(alone)}
    if count >= _LEAST_JUDGED:
        left = np.expm1(np.abs(steps.left_out()))
        kept = float(left.mean()) < float(alone.mean())
        errors = {"loads_left_out": error_quantiles(left)}
        lines.append(f"each load left out of the fit once: off by {left.mean():.1%} on average"
                     + ("" if kept else ", which is no better: keep the composed one"))  # fmt: skip
    else:
        lines.append(f"fewer than {_LEAST_JUDGED} loads: too few to leave one out")
    data: dict[str, Any] = profile.to_dict() | {"name": name}
    if kv_tokens:
        data["engine"] |= {"kv_capacity_tokens": kv_tokens}
    if not kept:
        return Calibration(Profile.from_dict(data, name), False, tuple(lines))

    value, sd = steps.factor(np.array([p.batch for p in points]))
    for p, log, deviation in zip(points, value, sd, strict=True):
        low, high = np.exp(log + np.array([-Z80, Z80]) * deviation)
        lines.append(f"  {p.name}: batch {p.batch:.3g}, a step {1e3 * p.step_s:.3g} ms, "
                     f"predicted {1e3 * p.law_s:.3g}; factor {math.exp(log):.3f} "
                     f"({low:.3f} to {high:.3f})")  # fmt: skip
    sequence, sequence_sd = steps.sequence_s
    lines.append(f"  time a sequence: {_between(1e6 * sequence, 1e6 * sequence_sd)} us more")
    lengths, ttft = lone_prompts(loads)
    first, prompts, prefill = None, 1.0, _stated(profile)["prefill"]
    if len(lengths):
        at_one = math.exp(float(steps.factor(np.ones(1))[0][0]))
        (first, prompts), spread = fit_first_token(lengths, ttft, profile, at_one)
        lines += [f"  constant before the first token: {_between(1e3 * first, 1e3 * spread[0])} ms",
                  f"  factor on what prompts add: {_between(prompts, spread[1])}"]  # fmt: skip
        prompt_sd = math.hypot(spread[1] / prompts, LOAD_SD)
        prefill = {"bias": 0.0, "sd": float(f"{prompt_sd:.3g}")}
    else:
        lines.append("  no request was alone: nothing is learned of prompts and the first token")
    data["law"] = corrected_law(profile, steps, prompts)
    host = dict.fromkeys(HOST_TIMES, 0.0) | profile.host
    host["sequence_s"] = float(f"{host['sequence_s'] + sequence:.6g}")
    if first is not None:  # half of it before the scheduler, half behind the engine
        half = float(f"{first / 2.0:.6g}")
        shared = min(half, host.get("api_request_s", 0.0))
        host |= {"api_in_s": half, "api_request_s": shared, "api_out_s": half}
    data["host"] = host
    decode_sd = math.hypot(float(sd.mean()), LOAD_SD)
    data |= {
        "kind": "measured",
        "description": f"{profile.description}; corrected by {count} measured loads",
        "step_error": {
            "prefill": prefill,
            "decode": {"bias": 0.0, "sd": float(f"{decode_sd:.3g}"), "points": count},
        },
    }
    data["provenance"] = {
        "source": f"{count} measured loads on top of {profile.name}: "
        f"{profile.provenance['source']}",
        "licence": f"measured by the user; {profile.provenance['licence']}",
        "date": date.today().isoformat(),
        "command": "servegym calibrate server",
        "notes": [*lines, *profile.provenance.get("notes", ())],
    }
    measure = "absolute relative error of a decode step"
    corrected = estimated(data, lambda _: {"measure": measure, **errors})
    return Calibration(corrected, True, tuple(lines))


def _of_an_engine(options: argparse.Namespace, loads: Sequence[Load]) -> Profile:
    """The composed profile; of the engine that is nearest to the loads where none is told."""
    if options.engine:
        return compose_chosen(options)
    best, least = None, math.inf
    for name, version in possible_engines(options.card):
        told = argparse.Namespace(**vars(options) | {"engine": f"{name.lower()}@{version}"})
        profile = compose_chosen(told)
        points = points_of(loads, profile)
        off = np.mean([abs(math.log(p.step_s / p.law_s)) for p in points]) if points else 0.0
        print(f"as of vLLM {version}: a step is off by {math.expm1(off):.1%} on average")
        if off < least:
            best, least = profile, off
    assert best is not None
    print(f"engine not told: taken as {best.engine['name']} {best.engine['version']}")
    return best


def _begun_with(options: argparse.Namespace, loads: Sequence[Load]) -> Profile:
    """The profile that the command line names."""
    rooflined = options.bandwidth or options.tflops or options.memory_gb
    ways = {"--profile": options.profile, "--card": options.card, "--bandwidth": rooflined}
    if sum(bool(way) for way in ways.values()) != 1:
        raise ValueError(
            "name what to begin with: --card and --model, --profile, or --bandwidth, --tflops, "
            "--memory-gb and --model"
        )
    if options.profile:
        profile = load_profile(options.profile)
        return with_engine(profile, options.engine) if options.engine else profile
    if options.card:
        return _of_an_engine(options, loads)
    for flag in ("model", "bandwidth", "tflops", "memory_gb"):
        if not getattr(options, flag):
            raise ValueError(f"--{flag.replace('_', '-')}: missing; a roofline needs it")
    return roofline(
        model_shape(options.model),
        1e9 * options.bandwidth,
        1e12 * options.tflops,
        2**30 * options.memory_gb,
    )


def main(arguments: Sequence[str]) -> int:
    """Command line of ``servegym calibrate server``; `ValueError` names what cannot be used."""
    parser = argparse.ArgumentParser(
        prog="servegym calibrate server",
        description="Correct a hardware profile by a few measured loads of a running server.",
    )
    add = parser.add_argument
    add("files", nargs="+", help="of servegym measure server, vllm bench serve, GuideLLM, AIPerf, "
        "or a CSV of clients, prompt_tokens, output_tokens, tpot_ms, ttft_ms")  # fmt: skip
    add_arguments(parser)
    add("--profile", help="begin with this profile in place of a composed one")
    add("--bandwidth", type=float, help="of the memory in GB/s, where the card is not known")
    add("--tflops", type=float, help="of the card in 16 bits, where it is not known")
    add("--memory-gb", type=float, help="of the card, where it is not known")
    add("--kv-tokens", type=int, default=0, help="tokens of the KV memory (the profile's)")
    add("--name", default="calibrated", help="name of the profile")
    add("-o", "--out", help="file to write (default: NAME.json)")
    options = parser.parse_args(arguments)
    if options.kv_tokens < 0:
        raise ValueError(f"--kv-tokens: got {options.kv_tokens}; must be >= 16")
    out = options.out or f"{options.name}.json"
    loads = read_all(options.files)
    base = _begun_with(options, loads)
    result = calibrate_server(loads, base, options.name, options.kv_tokens)
    result.profile.save(out)
    print("\n".join(result.lines))
    print(f"{out}: " + (result.profile.name if result.kept else f"{base.name} as it was"))
    return 0
