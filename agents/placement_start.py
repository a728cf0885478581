"""Where a training run of a placement agent starts, and for which clusters that has a meaning."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from servegym.agents.lib.run import parse_settings
from servegym.baselines.expert_placement.start import Start, best_start
from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.envs.expert_placement.env import make_problem


def find_start(run: Path, args: Any) -> Start | None:
    """The start of a training run, kept in its folder; None if its base is not ``best``.

    The search knows the prompts of the training split only.
    """
    path = run / "start.json"
    if args.base != "best":
        return None
    if not path.exists():
        system = PlacementSystem.from_problem(make_problem(parse_settings(args.set)), own=True)
        found = best_start(system, tries=args.start_tries, steps=args.start_steps, seed=args.seed)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(found.to_json(), encoding="utf-8")
        temporary.replace(path)
    return Start.from_json(path.read_text(encoding="utf-8"))


def setting_word(system: Any) -> str:
    """A word that is the same where a start means the same.

    Slots, links, message costs, the speed of GPUs and host channels, the load and the tasks count.

    Args:
        system: A `Problem` or the description of one.
    """
    c = system.cluster
    numbers = (
        c.slots,
        c.gpu_server,
        c.link_bytes_s,
        c.latency_s,
        system.interarrival_s,
        c.expert_base_s,
        c.expert_token_s,
        c.dense_base_s,
        c.dense_token_s,
        [c.layers, c.experts, c.message_cost_s, c.pcie_bytes_s, c.pcie_latency_s],
    )
    words = [np.ascontiguousarray(part, dtype=np.float64).tobytes() for part in numbers]
    text = f"{c.model} {c.link_model} {c.messages} {system.migration_source} " + " ".join(
        system.tasks
    )
    return hashlib.sha256(b"".join([*words, text.encode()])).hexdigest()[:16]
