"""Snapshots, from which a stopped run goes on exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from servegym._files import write_atomic


def save_snapshot(path: Path, **content: Any) -> None:
    """Write the state of a run atomically."""
    write_atomic(path, lambda stream: torch.save(content, stream))


def load_snapshot(resume: bool, path: Path) -> dict[str, Any] | None:
    """The state to resume from; None, with a message where one was asked for, if there is none."""
    if not resume:
        return None
    if not path.exists():
        print(f"no snapshot at {path}: the run begins anew", flush=True)
        return None
    return torch.load(path, weights_only=False)
