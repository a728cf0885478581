"""A serverless episode as text or pixels: the last requests and what each of them cost.

A column a request: its cost from below as main function (blue), remote experts in the prefill
(orange) and while decoding (green), and cold starts (grey), in units of the cost with every expert
in the main function, which is the line. A red mark at the top: it missed an objective.
"""

from __future__ import annotations

from typing import Any

import numpy as np

WIDTH, HEIGHT, SHOWN = 480, 240, 40
_PAPER, _AXIS = (250, 250, 248), (120, 120, 120)
_PARTS = (
    ("cost_main_usd", (63, 94, 140)),
    ("cost_prefill_usd", (214, 150, 60)),
    ("cost_decode_usd", (90, 150, 110)),
    ("cost_cold_usd", (160, 160, 175)),
)
_LATE = (200, 60, 50)
_TOP = 2.0  # cost of MIX at the top edge


def render(batch: Any, row: int, mode: str) -> Any:
    """Draw one system.

    Args:
        batch: the systems.
        row: which.
        mode: ``ansi`` or ``rgb_array``.

    Returns:
        Text, or uint8 ``(240, 480, 3)`` pixels: a column for each of the last 40 requests, its cost
        over that of MIX (the line in the middle) by parts, a red mark where an SLO is missed.
    """
    log = batch.request_log(row)
    if mode == "ansi":
        return _text(batch, row, log)
    return _pixels(log[-SHOWN:])


def _text(batch: Any, row: int, log: np.ndarray) -> str:
    problem = batch.problem
    total = problem.episode_requests
    lines = [
        f"{problem.system.name} on {problem.system.gpu} GPU, request {len(log)} of {total}, "
        f"reward {log['reward'].sum():.3f}",
        "prompt output  remote/K  main MB  cost/MIX  TTFT s  TPOT ms  notes",
    ]
    for entry in log[-10:]:
        notes = [
            name
            for name in (
                "ttft_violated",
                "tpot_violated",
                "main_memory",
                "remote_memory",
                "payload",
                "main_warm",
            )
            if entry[name]
        ]
        lines.append(
            f"{entry['prompt_tokens']:6d} {entry['output_tokens']:6d}"
            f"  {problem.levels[entry['level']]:5d}/{problem.system.num_experts:<3d}"
            f" {entry['main_mb']:8.0f}  {entry['cost_usd'] / entry['mix_cost_usd']:8.3f}"
            f"  {entry['ttft_s']:6.2f}  {1000.0 * entry['tpot_s']:7.1f}  {' '.join(notes)}"
        )
    return "\n".join(lines) + "\n"


def _pixels(log: np.ndarray) -> np.ndarray:
    image = np.empty((HEIGHT, WIDTH, 3), dtype=np.uint8)
    image[:] = _PAPER
    wide = WIDTH // SHOWN
    for i, entry in enumerate(log):
        left, bottom = i * wide + 1, 0.0
        for name, colour in _PARTS:
            top = min(bottom + entry[name] / entry["mix_cost_usd"], _TOP)
            low, high = (round(HEIGHT * x / _TOP) for x in (bottom, top))
            image[HEIGHT - high : HEIGHT - low, left : left + wide - 2] = colour
            bottom = top
        if entry["ttft_violated"]:
            image[0:6, left : left + wide // 2 - 1] = _LATE
        if entry["tpot_violated"]:
            image[0:6, left + wide // 2 : left + wide - 2] = _LATE
    image[HEIGHT // 2] = _AXIS
    return image
