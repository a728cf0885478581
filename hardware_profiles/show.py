"""``servegym profiles``: what each hardware profile states of itself."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

from servegym.hardware_profiles import Profile, list_moe_layers, list_profiles, load, load_moe
from servegym.hardware_profiles.schema import STEP_KINDS, Z80


def main(argv: Sequence[str]) -> None:
    """Command line of ``servegym profiles``: one line a profile, or all facts of one of them."""
    parser = argparse.ArgumentParser(
        prog="servegym profiles",
        description="List hardware profiles: name, kind and fit error, one a line; or show one of "
        "them.",
    )
    text = "one profile, by name or file: what it states"
    parser.add_argument("name", nargs="?", help=text)
    name = parser.parse_args(argv).name
    if name is not None:
        show(load(name))
        return
    profiles: list[Any] = [load(name) for name in list_profiles()]
    profiles += [load_moe(name) for name in list_moe_layers()]
    width = max((len(profile.name) for profile in profiles), default=0)
    for profile in profiles:
        print(f"{profile.name:<{width}}  {profile.kind:<8}  {_fit_error(profile)}")


def show(profile: Profile) -> None:
    """Print what a profile states of itself, a fact a line."""
    print(f"{profile.name}: {profile.description}")
    print(f"{profile.kind}; {_fit_error(profile)}")
    for kind in STEP_KINDS if profile.step_error else ():
        error = profile.step_error[kind]
        low, high = (math.expm1(error["bias"] + z * error["sd"]) for z in (-Z80, Z80))
        print(f"{kind} steps: true time {low:+.1%} to {high:+.1%} of the law's, 80 % interval")
    if not profile.step_error:
        print("the error of whole steps is not stated")
    for b, x in ((1, 1024), (32, 1024), (8, 16384)):
        print(f"decode of {b} x {x} tokens: {1e3 * profile.decode_s(b, b * x):.2f} ms")
    for p in (512, 2048, 16384):
        print(f"prefill of {p} tokens: {1e3 * profile.prefill_s(p):.1f} ms")
    shares = ", ".join(f"{key} {value}" for key, value in profile.host.items())
    print(f"host: {shares or 'kernels alone'}")
    print(f"KV memory: {profile.kv_capacity_tokens} tokens of {profile.kv_bytes_per_token} bytes")
    print("domain: " + ", ".join(f"{key} {value}" for key, value in profile.domain.items()))
    print(f"source: {profile.provenance['source']}")


def _fit_error(profile: Any) -> str:
    """The error of the whole iterations that the law predicts worst; the file has them all.

    Those that mix prefill and decodes are left aside; without whole iterations the worst entry.
    """
    errors = profile.fit_error
    entries = [key for key, value in errors.items() if isinstance(value, dict) and "p90" in value]
    whole = [key for key in entries if "_iteration" in key and not key.startswith("mixed")]
    if not entries:
        return f"fit error: {errors.get('measure', 'none stated')}"
    key = max(whole or entries, key=lambda name: errors[name]["p90"])
    median, p90, largest = (100 * errors[key][name] for name in ("median", "p90", "max"))
    return (
        f"fit error: median {median:.2g} %, p90 {p90:.2g} %, max {largest:.2g} % "
        f"({key}, {errors[key]['points']} points)"
    )
