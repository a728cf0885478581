"""A prefix-routing system as text or pixels: load, cached prefix and recent requests of replicas.

A row a replica. From the left: requests that run and wait over the sequences that it runs at most;
KV memory in use; the share of the request's prompt that the index has for it; and its last
completed requests, those of the warm-up too, the newest on the right: green if both objectives were
kept and red if not, dark if the prompt was cached and light if not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from servegym.envs._frames import INK, PAPER, SOFT, blank_canvas, panel, pixels
from servegym.envs.prefix_routing.kernel import layout

SHOWN, NAMED = 40, 25
_EMPTY = "#e4e9ef"
_RUNNING, _WAITING, _MEMORY, _MATCH = "#3f5e8c", "#d6963c", "#5a966e", "#8a5bb0"
_MET = np.array([[186, 228, 223], [18, 104, 94]]) / 255.0  # nothing cached, all cached
_MISSED = np.array([[247, 196, 192], [170, 35, 30]]) / 255.0


def render(batch: Any, row: int, mode: str) -> Any:
    """A system as text (``ansi``) or uint8 ``(540, 960, 3)`` pixels (``rgb_array``)."""
    return _text(batch, row) if mode == "ansi" else _pixels(batch, row)


def _met(batch: Any, log: np.ndarray) -> np.ndarray:
    """Which of these completed requests kept both objectives."""
    problem = batch.problem
    ttft = log["first_token_s"] - log["arrival_s"]
    spent = log["finish_s"] - log["first_token_s"]
    smooth = spent <= float(problem.settings["tpot_s"][0]) * (log["output_tokens"] - 1)
    return (ttft <= problem.ttft_slo_s(log["prompt_tokens"])) & smooth


def _words(batch: Any, row: int, done: np.ndarray) -> str:
    routed, decisions = batch.episodes.row["index"][row], batch.problem.arguments.episode_requests
    words = f"t = {batch.systems.env['now'][row]:.1f} s, request {routed} of {decisions}"
    if len(done):
        cached = done["hit_tokens"].sum() / done["prompt_tokens"].sum()
        words += (
            f"; of {len(done)} completed {_met(batch, done).mean():.1%} within the objectives, "
            f"{cached:.1%} of their prompts cached"
        )
    return words


def _text(batch: Any, row: int) -> str:
    log, problem = batch.request_log(row), batch.problem
    gateway, engine = batch.gateway.replica[row], batch.systems.replica[row]
    lines = [
        _words(batch, row, log[log["outcome"] == layout.COMPLETED]),
        "replica                     running waiting  KV in use  in flight  prefill tokens  match",
    ]
    for n, card in enumerate(problem.profiles):
        e, p = engine[n], gateway[n]
        usage = 1.0 - e["free"] / e["capacity"]
        lines.append(
            f"{n:2d} {card.name[:22]:22s} {e['running']:9d} {e['waiting']:7d} {usage:10.1%} "
            f"{p['in_flight']:10d} {p['prefill']:15d} {p['match']:6d}"
        )
    return "\n".join(lines) + "\n"


def _pixels(batch: Any, row: int) -> np.ndarray:
    log, problem = batch.request_log(row), batch.problem
    engine, gateway = batch.systems.replica[row], batch.gateway.replica[row]
    done = log[log["outcome"] == layout.COMPLETED]
    most = problem.arguments.max_num_seqs
    index = int(batch.systems.env["index"][row])
    prompt = int(batch.gateway.request["prompt"][row, index]) if index >= 0 else 0
    running, waiting = engine["running"] / most, engine["waiting"] / most
    used = 1.0 - engine["free"] / engine["capacity"]
    match = gateway["match"] / prompt if prompt else np.zeros(len(gateway))

    canvas = blank_canvas()
    figure = canvas.figure
    figure.text(0.02, 0.955, _words(batch, row, done), color=INK, fontsize=8.5, va="center")
    request = f"match, of {prompt:,} tokens" if prompt else "match: no request"
    panels = (
        ("requests: running, waiting", [(running, _RUNNING), (waiting, _WAITING)]),
        ("KV memory in use", [(used, _MEMORY)]),
        (request, [(match, _MATCH)]),
    )
    places = np.arange(problem.num_replicas)
    for k, (title, parts) in enumerate(panels):
        axis = _rows(figure, (0.15 + 0.2 * k, 0.10, 0.18, 0.77), title, "share", len(places))
        axis.set_facecolor(_EMPTY)
        left = np.zeros(len(places))
        for share, colour in parts:
            axis.barh(places, share, left=left, color=colour, height=0.8)
            left = left + share
        axis.set_xlim(0, 1)
        axis.set_xticks([0, 0.5, 1], ["0", ".5", "1"])
        if k == 0:
            names = [f"{n} {card.name}"[:22] for n, card in enumerate(problem.profiles)]
            some = slice(None, None, -(-len(places) // NAMED))
            axis.set_yticks(places[some], names[some], fontsize=7, color=INK)
            for left, word, colour in ((0.0, "running", _RUNNING), (0.5, "waiting", _WAITING)):
                axis.text(
                    left, -0.085, f"■ {word}", color=colour, fontsize=7, transform=axis.transAxes
                )
    title = "completed requests, newest right"
    axis = _rows(figure, (0.745, 0.10, 0.235, 0.77), title, "", len(places))
    finished = batch.finished(row)
    if not len(finished):
        axis.text(SHOWN / 2, (len(places) - 1) / 2, "none yet", color=SOFT, ha="center")
    axis.imshow(
        _marks(batch, finished),
        aspect="auto",
        interpolation="nearest",
        extent=(0.0, float(SHOWN), len(places) - 0.5, -0.5),
    )
    axis.vlines(np.arange(1, SHOWN), -0.5, len(places) - 0.5, color=PAPER, lw=1)
    axis.hlines(places[1:] - 0.5, 0, SHOWN, color=PAPER, lw=min(2.0, 50 / len(places)))
    axis.set_xticks([])
    for left, word, colour in (
        (0.0, "in time", _MET[1]),
        (0.27, "late", _MISSED[1]),
        (0.47, "lighter: less cached", SOFT),
    ):
        axis.text(left, -0.05, f"■ {word}", color=colour, fontsize=7, transform=axis.transAxes)
    return pixels(canvas)


def _marks(batch: Any, done: np.ndarray) -> np.ndarray:
    """Colours (N, SHOWN, 3) of the last completed requests of each replica, the newest last."""
    colours = np.ones((batch.problem.num_replicas, SHOWN, 3))
    done = done[np.argsort(done["finish_s"], kind="stable")]
    met, share = _met(batch, done), done["hit_tokens"] / np.maximum(done["prompt_tokens"], 1)
    for n in range(len(colours)):
        latest = np.flatnonzero(done["replica"] == n)[-SHOWN:]
        scale = np.where(met[latest, None, None], _MET, _MISSED)  # (K, 2, 3)
        part = share[latest, None]
        colours[n, : len(latest)] = (1.0 - part) * scale[:, 0] + part * scale[:, 1]
    return colours


def _rows(figure: Any, place: tuple[float, ...], title: str, unit: str, replicas: int) -> Any:
    """A panel with a row a replica."""
    axis = panel(figure, place, title, unit)
    axis.set_ylim(replicas - 0.5, -0.5)
    axis.set_yticks([])
    axis.spines[:].set_visible(False)
    return axis
