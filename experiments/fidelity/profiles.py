"""Profiles for the comparison: the shipped one that fits a run, and its linear estimator."""

from __future__ import annotations

from servegym.experiments.fidelity.measured_run import MeasuredRun
from servegym.hardware_profiles import Profile, list_profiles, load
from servegym.hardware_profiles.schema import KINDS

__all__ = ["check_devices", "devices_of", "linear_profile", "matching_profile"]


def matching_profile(run: MeasuredRun) -> Profile:
    """The shipped profile of the run's device and model that is nearest to a measurement.

    Raises:
        ValueError: If there is none.
    """
    profiles = sorted(map(load, list_profiles()), key=lambda p: (KINDS.index(p.kind), p.name))
    for profile in profiles:
        same = profile.device["name"] == run.device and profile.model["name"] == run.model
        if same and devices_of(profile) == run.tensor_parallel:
            return profile
    cards = f"{run.tensor_parallel} x " if run.tensor_parallel > 1 else ""
    make = f" --tp {run.tensor_parallel}" if run.tensor_parallel > 1 else ""
    raise ValueError(
        f"no profile of {run.model or 'the model'} on {cards}{run.device or 'the device'}: "
        f"name one with --profile (shipped: {', '.join(list_profiles())}), or compose it with "
        f"`servegym profile{make}`"
    )


def devices_of(profile: Profile) -> int:
    """Devices that share every layer, ``tensor_parallel`` of the profile's engine."""
    return int(profile.engine.get("tensor_parallel", 1))


def check_devices(run: MeasuredRun, profile: Profile) -> None:
    """Refuse a profile of another number of devices than the run's.

    Raises:
        ValueError: Naming both.
    """
    if devices_of(profile) != run.tensor_parallel:
        raise ValueError(
            f"run {run.name!r} has tensor_parallel_size {run.tensor_parallel}, but profile "
            f"{profile.name!r} is of {devices_of(profile)}: compose one with `servegym profile "
            f"--tp {run.tensor_parallel}`"
        )


def linear_profile(profile: Profile) -> Profile:
    """The profile with its own estimator, which is linear, as its law."""
    data = profile.to_dict()
    data["law"] = {"kind": "linear", **data["estimator"]}
    return Profile.from_dict(data, profile.name)
