"""The leaderboard on a Ray cluster: a job is a policy at a point.

Guests' files are sent along, so that they need to lie on this machine only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from servegym.experiments.cluster.jobs import cluster, run_jobs
from servegym.experiments.leaderboard import measure

__all__ = ["measured"]


def measured(
    jobs: Sequence[tuple[Any, str]], quick: bool, ray: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of policies at points.

    Args:
        jobs: A `leaderboard.Point`, and a policy: a name, or a checkpoint's or ``.py`` file's path.
        quick: As `leaderboard.measure`.
        ray: See `ray_cluster.check_ray`.

    Yields:
        Index of a job and its row, in the order in which they end.
    """
    tasks = [(point, policy, quick, _content(point, policy)) for point, policy in jobs]
    names = [f"{policy} at {point.name}" for point, policy in jobs]
    with cluster(ray):
        yield from run_jobs(_measure, tasks, names)


def _content(point: Any, policy: str) -> bytes | None:
    """The file that a guest is made from; a name of the family comes first, as in `measure`."""
    from servegym.experiments.leaderboard import policies_for

    path = Path(policy) / "best.safetensors" if Path(policy).is_dir() else Path(policy)
    known = policy in policies_for(point) or not path.is_file()
    return None if known else path.read_bytes()


def _measure(point: Any, policy: str, quick: bool, content: bytes | None) -> dict[str, Any]:
    """A job."""
    if content is None:
        return measure(point, policy, quick)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / (Path(policy).name if Path(policy).suffix else "best.safetensors")
        file.write_bytes(content)
        return measure(point, str(file), quick)
