"""``servegym profiles``: what each hardware profile states of itself."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

from servegym.hardware_profiles import list_moe_layers, list_profiles, load, load_moe
from servegym.hardware_profiles.law import headline_error


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
        _show(load(name))
        return
    profiles: list[Any] = [load(name) for name in list_profiles()]
    profiles += [load_moe(name) for name in list_moe_layers()]
    width = max((len(profile.name) for profile in profiles), default=0)
    for profile in profiles:
        print(f"{profile.name:<{width}}  {profile.kind:<8}  {_fit_error(profile)}")


def _show(profile: Any) -> None:
    """What a profile states of itself, a fact a line."""
    print(f"{profile.name}: {profile.description}")
    print(f"{profile.kind}; {_fit_error(profile)}")
    for kind, error in profile.step_error.items():
        if kind == "source":
            continue
        low, high = (
            100 * math.expm1(error["bias"] + sign * 1.2816 * error["sd"]) for sign in (-1, 1)
        )
        print(
            f"{kind} steps: true time {low:+.1f} % to {high:+.1f} % of the law's, 80 % interval "
            f"(bias {100 * error['bias']:.1f} %, deviation {100 * error['sd']:.1f} %)"
        )
    if not profile.step_error:
        print("the error of whole steps is not stated")
    shares = ", ".join(f"{key} {value}" for key, value in profile.host.items())
    print(f"host: {shares or 'kernels alone'}")
    print(f"KV memory: {profile.kv_capacity_tokens} tokens")
    print("domain: " + ", ".join(f"{key} {value}" for key, value in profile.domain.items()))
    print(f"source: {profile.provenance['source']}")


def _fit_error(profile: Any) -> str:
    """The error on whole iterations of held-out rows, worst entry; the file has them all."""
    headline = headline_error(profile.fit_error)
    if headline is None:
        return f"fit error: {profile.fit_error.get('measure', 'none stated')}"
    key, value = headline
    return (
        f"fit error: median {100 * value['median']:.2g} %, p90 {100 * value['p90']:.2g} %, "
        f"max {100 * value['max']:.2g} % ({key}, {value['points']} points)"
    )
