"""A prefix-routing system as text or pixels: load, cached prefix and recent TTFT of each replica.

A row a replica. From the left: requests that run (blue) and wait (orange) over the sequences that
it runs at most, KV memory in use (green), the share of the request's prompt that the index has for
it (violet), and its last requests, one mark each: completed within both objectives (green) or not
(red), brighter for a larger share of the prompt found cached.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from servegym.envs.prefix_routing import kernel

WIDTH, HEIGHT, SHOWN = 640, 360, 40
_PAPER, _EMPTY, _LINE = (250, 250, 248), (232, 234, 238), (120, 120, 120)
_RUNNING, _WAITING, _MEMORY, _MATCH = (63, 94, 140), (214, 150, 60), (90, 150, 110), (138, 91, 176)
_MET, _MISSED = np.array((42, 157, 143)), np.array((200, 60, 50))


def render(batch: Any, row: int, mode: str) -> Any:
    """Draw one system.

    Args:
        batch: the systems.
        row: which.
        mode: ``ansi`` or ``rgb_array``.

    Returns:
        Text, or uint8 ``(360, 640, 3)`` pixels.
    """
    return _text(batch, row) if mode == "ansi" else _pixels(batch, row)


def _met(batch: Any, log: np.ndarray) -> np.ndarray:
    """Which requests were completed within both objectives."""
    problem = batch.problem
    ttft = log["first_token_s"] - log["arrival_s"]
    spent = log["finish_s"] - log["first_token_s"]
    smooth = spent <= float(problem.settings["tpot_s"][0]) * (log["output_tokens"] - 1)
    done = log["outcome"] == kernel.COMPLETED
    return done & (ttft <= problem.ttft_slo_s(log["prompt_tokens"])) & smooth


def _text(batch: Any, row: int) -> str:
    log, problem = batch.request_log(row), batch.problem
    seen, engine = batch.gateway.replica[row], batch.systems.replica[row]
    met, routed = _met(batch, log), batch.episodes.row["index"][row]
    prompts = max(int(log["prompt_tokens"].sum()), 1)
    lines = [
        f"t = {batch.systems.env['now'][row]:.1f} s, request {routed} of "
        f"{problem.settings['decisions'][0]}, {met.mean() if len(log) else 0.0:.1%} within the "
        f"objectives, {log['hit_tokens'].sum() / prompts:.1%} of the prompts cached",
        "replica                     running waiting  KV in use  in flight  prefill tokens  match",
    ]
    for n, card in enumerate(problem.profiles):
        e, p = engine[n], seen[n]
        usage = 1.0 - e["free"] / e["capacity"]
        lines.append(
            f"{n:2d} {card.name[:22]:22s} {e['running']:9d} {e['waiting']:7d} {usage:10.1%} "
            f"{p['in_flight']:10d} {p['prefill']:15d} {p['match']:6d}"
        )
    return "\n".join(lines) + "\n"


def _pixels(batch: Any, row: int) -> np.ndarray:
    image = np.empty((HEIGHT, WIDTH, 3), dtype=np.uint8)
    image[:] = _PAPER
    log, problem = batch.request_log(row), batch.problem
    engine, seen = batch.systems.replica[row], batch.gateway.replica[row]
    met, most = _met(batch, log), int(problem.tables.config["max_running"][0])
    index = int(batch.systems.env["index"][row])
    prompt = int(batch.gateway.request["prompt"][row, index]) if index >= 0 else 0
    tall = HEIGHT // problem.num_replicas
    third = WIDTH // 4
    for n in range(problem.num_replicas):
        top, bottom = n * tall + 1, (n + 1) * tall - 1
        e, p = engine[n], seen[n]
        running, waiting = e["running"] / most, (e["running"] + e["waiting"]) / most
        used = 1.0 - e["free"] / e["capacity"]
        match = p["match"] / prompt if prompt else 0.0
        for place, parts in enumerate(
            (((waiting, _WAITING), (running, _RUNNING)), ((used, _MEMORY),), ((match, _MATCH),))
        ):
            left, wide = place * third + 2, third - 6
            image[top:bottom, left : left + wide] = _EMPTY
            for share, colour in parts:
                image[top:bottom, left : left + round(wide * min(share, 1.0))] = colour
        mine = np.flatnonzero((log["replica"] == n) & (log["outcome"] == kernel.COMPLETED))
        mark = third // SHOWN
        for i, k in enumerate(mine[-SHOWN:]):
            share = log["hit_tokens"][k] / log["prompt_tokens"][k]
            colour = (_MET if met[k] else _MISSED) * (0.45 + 0.55 * share)
            left = 3 * third + i * mark
            image[top:bottom, left : left + max(mark - 1, 1)] = colour
        image[bottom] = _LINE
    return image
