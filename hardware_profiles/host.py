"""The host's share of an iteration and of a request: what an engine's CPU adds to the kernels.

Between two iterations the host takes up the sampled tokens, schedules, prepares inputs and launches
kernels. That takes ``step_s + sequence_s * sequences + token_s * tokens`` seconds, which add to the
device's. They are folded into the tables of the law when a profile gives them, so that the engines
need to know nothing of it.

A client sees more than the engine's clock. HTTP, checks and the queue between the processes take
``api_in_s`` until a request is with the scheduler; ``api_request_s`` of them are work of the API's
event loop, which takes one request after another. A token is with the client ``api_out_s`` after
its iteration. Replays and simulated servers add these times, environments do not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from servegym.hardware_profiles.constants import constant
from servegym.hardware_profiles.schema import API_TIMES

_AHEAD_SINCE = {"vLLM": (0, 14)}


def plans_ahead(name: str, version: str) -> bool | None:
    """Whether an engine plans an iteration while another runs, by default; None if not known.

    Args:
        name: the engine's; vLLM is known.
        version: its version, of at least two numbers.
    """
    numbers = re.match(r"v?(\d+)\.(\d+)", version)
    if name not in _AHEAD_SINCE or numbers is None:
        return None
    return (int(numbers[1]), int(numbers[2])) >= _AHEAD_SINCE[name]


def engine_host(name: str, version: str) -> dict[str, Any]:
    """The host's share of an engine, as the field ``host`` of a profile.

    Args:
        name: the engine's; vLLM is known.
        version: its version, of at least two numbers.

    Returns:
        The field; empty where nothing is known of the engine.
    """
    ahead = plans_ahead(name, version)
    if ahead is None:
        return {}
    fitted = constant("host_ahead" if ahead else "host_waiting")
    api = constant("api") if ahead else {}
    since = ".".join(map(str, _AHEAD_SINCE[name]))
    how = "plans iterations ahead" if ahead else "plans an iteration when it starts"
    return {
        "step_s": fitted["step_s"],
        "sequence_s": fitted["sequence_s"],
        "token_s": 0.0,
        **api,
        "source": f"{name} {'from' if ahead else 'before'} {since} {how}: published engine "
        "measurements less composed kernels (data/constants.json)",
    }


def fold_host(tables: Any, host: Mapping[str, Any]) -> Any:
    """The tables of a law with the host's share, the field ``host`` of a profile, in them."""
    dense_s = tables.dense_s + (host["step_s"] + host["token_s"] * tables.dense_tokens)
    head_s = tables.head_s + host["sequence_s"] * tables.head_sequences
    for array in (dense_s, head_s):
        array.setflags(write=False)
    return tables._replace(dense_s=dense_s, head_s=head_s)


def put_api(replicas: Any, profiles: Sequence[Any]) -> None:
    """Write the API's times of the profiles in an engine's records of replicas ``(..., N)``."""
    for name in API_TIMES:
        replicas[name] = [profile.host.get(name, 0.0) for profile in profiles]


def without_api(profile: Any) -> Any:
    """A profile whose host has no times of the API: what the engine's own clock sees."""
    kept = {key: value for key, value in profile.host.items() if key not in API_TIMES}
    return profile if kept == profile.host else profile.with_host(kept)
