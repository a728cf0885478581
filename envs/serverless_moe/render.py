"""A serverless episode as text or pixels: the last requests and what each of them cost.

A column a request: its cost from below as main function, remote experts in the prefill and while
decoding, and cold starts, in units of the cost with every expert in the main function (MIX), which
is the line. A red mark at the top: it missed the objective of TTFT (left half) or TPOT (right).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from servegym.envs._frames import INK, PAPER, SOFT, blank_canvas, pixels

SHOWN = 40
_LATE = "#c83c32"
_PARTS = (
    ("cost_main_usd", "main function", "#3f5e8c"),
    ("cost_prefill_usd", "remote experts, prefill", "#d6963c"),
    ("cost_decode_usd", "remote experts, decoding", "#5a966e"),
    ("cost_cold_usd", "cold starts", "#a0a0af"),
)
_TOP = 2.0  # cost over that of MIX at the top edge


def render(batch: Any, row: int, mode: str) -> Any:
    """A system as text (``ansi``) or uint8 ``(540, 960, 3)`` pixels (``rgb_array``)."""
    log = batch.request_log(row)
    return _text(batch, log) if mode == "ansi" else _pixels(batch, log)


def _words(batch: Any, log: np.ndarray) -> str:
    problem = batch.problem
    return (
        f"{problem.system.name} on {problem.system.gpu} GPU, request {len(log)} of "
        f"{problem.arguments.episode_requests}, reward {log['reward'].sum():.3f}"
    )


def _text(batch: Any, log: np.ndarray) -> str:
    problem = batch.problem
    lines = [
        _words(batch, log),
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
            f"  {problem.tables.members[entry['level']]:5d}/{problem.system.num_experts:<3d}"
            f" {entry['main_mb']:8.0f}  {entry['cost_usd'] / entry['mix_cost_usd']:8.3f}"
            f"  {entry['ttft_s']:6.2f}  {1000.0 * entry['tpot_s']:7.1f}  {' '.join(notes)}"
        )
    return "\n".join(lines) + "\n"


def _pixels(batch: Any, log: np.ndarray) -> np.ndarray:
    canvas = blank_canvas()
    figure = canvas.figure
    figure.text(0.02, 0.955, _words(batch, log), color=INK, fontsize=10, va="center")
    axis = figure.add_axes((0.07, 0.11, 0.91, 0.73), facecolor=PAPER)
    shown = log[-SHOWN:]
    places = len(log) - len(shown) + 1 + np.arange(len(shown))
    bottom = np.zeros(len(shown))
    for name, label, colour in _PARTS:
        share = shown[name] / shown["mix_cost_usd"]
        axis.bar(places, share, 0.85, bottom, color=colour, label=label)
        bottom = bottom + share
    for name, label, side in (
        ("ttft_violated", "late: TTFT left, TPOT right", -0.22),
        ("tpot_violated", None, 0.22),
    ):
        late = places[shown[name] != 0] + side
        axis.bar(late, 0.04 * _TOP, 0.4, 0.96 * _TOP, color=_LATE, label=label)
    axis.axhline(1.0, color=SOFT, lw=1, label="MIX, all experts there")
    first = max(len(log) - SHOWN, 0)
    axis.set_xlim(first + 0.5, first + SHOWN + 0.5)
    axis.set_ylim(0, _TOP)
    axis.set_xlabel("request", color=INK, fontsize=9)
    axis.set_ylabel("cost, times that of MIX", color=INK, fontsize=9)
    axis.tick_params(labelsize=8, colors=SOFT)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(
        loc="upper left",
        bbox_to_anchor=(0.06, 0.94),
        ncols=6,
        fontsize=8,
        frameon=False,
        columnspacing=1.2,
        handlelength=1.2,
    )
    return pixels(canvas)
