"""The argument ``failures`` of the families whose replicas fail and are repaired."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from servegym._checks import mapping, real

MAX_FAILURES = 10_000_000
FAILURE_TIMES = ("mean_time_to_failure_s", "mean_time_to_repair_s")


def failure_times(failures: Mapping[str, Any]) -> tuple[float, float]:
    """Mean seconds to failure and to repair, of the argument ``failures``.

    Raises:
        ValueError: naming the argument, what was given and what is allowed.
    """
    times = mapping("failures", failures, FAILURE_TIMES)
    for name in FAILURE_TIMES:
        if name not in times:
            raise ValueError(f"failures={failures!r} lacks {name!r}; it takes {FAILURE_TIMES}.")
    uptime, downtime = (real(f"failures[{name!r}]", times[name], 1e-3) for name in FAILURE_TIMES)
    return uptime, downtime


def check_failures(failures: Mapping[str, Any], c: np.void, episode_s: float) -> None:
    """Refuse failures so frequent that an episode of so many seconds would never end."""
    times = episode_s / float(c["uptime_s"] + c["downtime_s"])
    if times > MAX_FAILURES:
        raise ValueError(
            f"failures={failures!r} make an expert fail {times:.3g} times in an episode of "
            f"{episode_s:.3g} s; at most {MAX_FAILURES} are allowed."
        )
