"""The host's share of an iteration and of a request: what an engine's CPU adds to the kernels.

Scheduling, input preparation and launches take ``step_s + sequence_s * sequences + token_s *
tokens`` seconds between two iterations, ``beyond_256_s`` for a sequence beyond the 256th; a
profile's law has them folded in. A client also waits ``api_in_s`` until a request is with the
scheduler (``api_request_s`` of it work of the API's event loop, one request after another) and
``api_out_s`` after an iteration: replays and simulated servers add these, environments do not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from servegym.hardware_profiles.constants import constant
from servegym.hardware_profiles.interpolation import along, union
from servegym.hardware_profiles.schema import API_TIMES

_AHEAD_SINCE = {"vLLM": (0, 14)}
# Sequences from which on `beyond_256_s` counts, and a point that shows the slope behind it.
_KNEE = np.array([256.0, 512.0])


def version_numbers(version: str) -> tuple[int, int] | None:
    """The first two numbers of a version; None where it has not as many."""
    numbers = re.match(r"v?(\d+)\.(\d+)", version)
    return numbers and (int(numbers[1]), int(numbers[2]))


def plans_ahead(name: str, version: str) -> bool | None:
    """Whether an engine plans an iteration while another runs, by default; None if not known."""
    numbers = version_numbers(version)
    if name not in _AHEAD_SINCE or numbers is None:
        return None
    return numbers >= _AHEAD_SINCE[name]


def parse_engine(text: str) -> tuple[str, str]:
    """Name and version of an engine as a command takes them, such as ``vllm@0.11``.

    Raises:
        ValueError: for an engine that is not known or a version that is no number.
    """
    name, _, version = text.partition("@")
    known = next((one for one in _AHEAD_SINCE if one.lower() == name.lower()), name)
    if plans_ahead(known, version) is None:
        raise ValueError(
            f"engine: got {text!r}; must be vllm@VERSION with a version of two numbers, such as "
            "vllm@0.11"
        )
    return known, version


def engine_host(name: str, version: str) -> dict[str, Any]:
    """The field ``host`` of a profile for an engine; empty where nothing is known of it."""
    ahead = plans_ahead(name, version)
    if ahead is None:
        return {}
    fitted = constant("host_ahead" if ahead else "host_waiting")
    api = constant("api") if ahead else {}
    since = ".".join(map(str, _AHEAD_SINCE[name]))
    how = "plans iterations ahead" if ahead else "plans an iteration when it starts"
    return {
        **fitted,
        "token_s": 0.0,
        **api,
        "source": f"{name} {'from' if ahead else 'before'} {since} {how}: published engine "
        "measurements less composed kernels (data/constants.json)",
    }


def fold_host(tables: Any, host: Mapping[str, Any]) -> Any:
    """The tables of a law with the host's share, the field ``host`` of a profile, in them."""
    dense_s = tables.dense_s + (host["step_s"] + host["token_s"] * tables.dense_tokens)
    sequences, head_s, each = tables.head_sequences, tables.head_s, host["sequence_s"]
    if "beyond_256_s" in host:
        sequences = union([sequences, _KNEE])
        head_s = along(tables.head_sequences, head_s, sequences)
    beyond = np.maximum(sequences - _KNEE[0], 0.0) * (host.get("beyond_256_s", each) - each)
    head_s = head_s + each * sequences + beyond
    for array in (dense_s, sequences, head_s):
        array.setflags(write=False)
    return tables._replace(dense_s=dense_s, head_sequences=sequences, head_s=head_s)


def with_engine(profile: Any, engine: str) -> Any:
    """A profile with the host's share of a told engine, as in :func:`parse_engine`."""
    name, version = parse_engine(engine)
    told = replace(profile, engine=profile.engine | {"name": name, "version": version})
    return told.with_host(engine_host(name, version))


def put_api(replicas: Any, profiles: Sequence[Any]) -> None:
    """Write the API's times of the profiles in an engine's records of replicas ``(..., N)``."""
    for name in API_TIMES:
        replicas[name] = [profile.host.get(name, 0.0) for profile in profiles]


def without_api(profile: Any) -> Any:
    """A profile whose host has no times of the API: what the engine's own clock sees."""
    kept = {key: value for key, value in profile.host.items() if key not in API_TIMES}
    return profile if kept == profile.host else profile.with_host(kept)
