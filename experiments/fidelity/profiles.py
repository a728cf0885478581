"""Profiles for the comparisons: the shipped one that fits a run, and ones with a linear law."""

from __future__ import annotations

from servegym.experiments.fidelity.measured_run import MeasuredRun
from servegym.hardware_profiles import Profile, list_profiles, load
from servegym.hardware_profiles.schema import KINDS

__all__ = ["linear_profile", "matching_profile"]


def matching_profile(run: MeasuredRun) -> Profile:
    """The shipped profile of the run's device and model that is nearest to a measurement.

    Raises:
        ValueError: If there is none.
    """
    profiles = sorted(map(load, list_profiles()), key=lambda p: (KINDS.index(p.kind), p.name))
    for profile in profiles:
        if profile.device["name"] == run.device and profile.model["name"] == run.model:
            return profile
    raise ValueError(
        f"no profile of {run.model or 'the model'} on {run.device or 'the device'}: name one with "
        f"--profile (shipped: {', '.join(list_profiles())})"
    )


def linear_profile(
    profile: Profile,
    *,
    base_s: float | None = None,
    prefill_s_per_token: float = 0.0,
    decode_s_per_sequence: float = 0.0,
    decode_s_per_context_token: float = 0.0,
) -> Profile:
    """The profile with a linear law: the given one, or without ``base_s`` its own estimator.

    Args:
        profile: Gives everything but the law.
        base_s: Seconds of an empty iteration; None takes all four from the estimator.
        prefill_s_per_token: Seconds a prompt token.
        decode_s_per_sequence: Seconds a decoding sequence.
        decode_s_per_context_token: Seconds a KV token of a decode.

    Returns:
        The changed profile.
    """
    data = profile.to_dict()
    law = {
        "base_s": base_s,
        "prefill_s_per_token": prefill_s_per_token,
        "decode_s_per_sequence": decode_s_per_sequence,
        "decode_s_per_context_token": decode_s_per_context_token,
    }
    if base_s is None:
        law = dict(data["estimator"])
    else:
        # A law that stands for a textbook server holds everywhere.
        data["domain"] = dict.fromkeys(data["domain"], 10**9)
    data["law"] = {"kind": "linear", **law}
    return Profile.from_dict(data, profile.name)
