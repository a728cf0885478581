"""The host's share of an iteration: what a serving engine's CPU adds to the kernels.

Between two iterations the host takes up the sampled tokens, schedules, prepares inputs and launches
kernels. That takes ``step_s + sequence_s * sequences + token_s * tokens`` seconds:

- without overlap the device waits for the host, and both times add up;
- with overlap (asynchronous scheduling) the host prepares an iteration while the device computes
  the one before, and a decode iteration takes the longer of the two. An iteration with prefill
  chunks is taken to be longer on the device.

CUDA graphs are captured for some numbers of tokens; an iteration of at most the largest of them is
padded to the next.

Both are folded into the tables of the law when a profile gives them, so that the engines need to
know nothing of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.hardware_profiles.interpolation import along

Floats = NDArray[np.float64]


def vllm_graph_sizes(largest: int = 512) -> list[int]:
    """Token counts that vLLM captures: 1, 2, 4, then multiples of 8 to 256, then of 16.

    Args:
        largest: the largest; vLLM takes twice ``max_num_seqs``, at most 512.

    Returns:
        Those up to ``largest``, rising.
    """
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    return [size for size in sizes if size <= largest]


# Seconds an iteration and a sequence beyond the kernels, middle of the ranges seen on 2, 4 and 8
# cards, where iterations are planned ahead and where not.
_AHEAD, _WAITING = (5e-5, 7e-6), (1.4e-3, 5e-5)
_RANGES = {
    True: "0 to 0.1 ms a step and 0.004 to 0.010 ms a sequence",
    False: "1.4 ms a step and 0.045 to 0.056 ms a sequence",
}
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
    """The host's share of an iteration of an engine, as the field ``host`` of a profile.

    Args:
        name: the engine's; vLLM is known.
        version: its version, of at least two numbers.

    Returns:
        The field; empty where nothing is known of the engine.
    """
    ahead = plans_ahead(name, version)
    if ahead is None:
        return {}
    step_s, sequence_s = _AHEAD if ahead else _WAITING
    since = ".".join(map(str, _AHEAD_SINCE[name]))
    how = "plans iterations ahead" if ahead else "plans an iteration when it starts"
    return {
        "step_s": step_s,
        "sequence_s": sequence_s,
        "token_s": 0.0,
        "overlap": False,
        "source": f"{name} {'from' if ahead else 'before'} {since} {how}: published engine "
        f"measurements less composed kernels, {_RANGES[ahead]}",
    }


def host_s(host: Mapping[str, Any], sequences: Any, tokens: Any) -> Any:
    """Seconds of the host for an iteration of so many ``sequences`` and ``tokens`` in all."""
    return host["step_s"] + host["sequence_s"] * sequences + host["token_s"] * tokens


def _padded(grid: Floats, values: Floats, sizes: Sequence[int]) -> tuple[Floats, Floats]:
    """The dense table as a staircase: exact at every whole number of tokens."""
    top = np.array(sizes, dtype=np.float64)
    first = np.concatenate([[min(1.0, grid[0])], top[:-1] + 1.0])  # tokens padded to each size
    beyond = np.concatenate([[top[-1] + 1.0], grid[grid > top[-1] + 1.0]])
    times = along(grid, values, top)
    stairs = np.column_stack([first, top]).ravel()
    stair_s = np.column_stack([times, times]).ravel()
    keep = np.concatenate([[True], np.diff(stairs) > 0.0])  # sizes 1 and 2 have one point each
    # One point more, so that the last segment keeps the law's slope.
    end = np.concatenate([beyond, [beyond[-1] + 1.0]]) if len(beyond) < 2 else beyond
    return (
        np.concatenate([stairs[keep], end]),
        np.concatenate([stair_s[keep], along(grid, values, end)]),
    )


def fold_host(tables: Any, host: Mapping[str, Any]) -> Any:
    """The tables of a law with the host's share.

    Args:
        tables: `servegym.hardware_profiles.LawTables` of the kernels alone.
        host: the field ``host`` of a profile: ``step_s``, ``sequence_s``, ``token_s``, ``overlap``
            and perhaps ``graph_sizes``.

    Returns:
        The tables. Without overlap they are exact. With overlap the decode table has a row for
        every number of sequences; it is exact at its contexts, and between two where only one
        share is the longer.
    """
    dense_x, dense_s = tables.dense_tokens, tables.dense_s
    if host.get("graph_sizes"):
        dense_x, dense_s = _padded(dense_x, dense_s, host["graph_sizes"])
    rows, head_s = tables.decode_sequences, tables.head_s
    attention = tables.decode_attention_s
    if not host["overlap"]:
        dense_s = dense_s + host_s(host, 0.0, dense_x)
        head_s = head_s + host["sequence_s"] * tables.head_sequences
    else:
        every = np.arange(rows[0], rows[-1] + 1.0)
        attention, rows = along(rows, attention.T, every).T, every
        rest = along(dense_x, dense_s, rows) + along(tables.head_sequences, head_s, rows)
        waits = host_s(host, rows, rows) - rest
        attention = np.maximum(attention, waits[:, None])
    folded = tables._replace(
        dense_tokens=dense_x,
        dense_s=dense_s,
        decode_sequences=rows,
        decode_attention_s=attention,
        head_s=head_s,
    )
    for array in folded:
        array.setflags(write=False)
    return folded
