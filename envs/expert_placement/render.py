"""A placement as text or pixels: who holds which experts, and how much is served where it arrives.

As pixels the first three servers have a map each, a row a layer and a column an expert.
"""

from __future__ import annotations

import math

import numpy as np

from servegym.envs._frames import INK, SOFT, blank_canvas, panel, pixels
from servegym.envs.expert_placement.core import PlacementEpisode

MAPPED_SERVERS = 3

_HELD = np.array([[216, 239, 236], [18, 104, 94]]) / 255.0  # little used, much used
_MISSING = np.array([[255, 255, 255], [214, 69, 69]]) / 255.0
_LOADING = np.array([233, 162, 59]) / 255.0
_LINES = ("#2a6fbb", "#c8553d", "#5a8f3c")
_BLOCKS = " ▁▂▃▄▅▆▇█"


def render(system: PlacementEpisode, mode: str) -> str | np.ndarray:
    """A system as text (``ansi``) or uint8 ``(540, 960, 3)`` pixels (``rgb_array``)."""
    return _text(system) if mode == "ansi" else _pixels(system)


def _words(system: PlacementEpisode) -> list[str]:
    arguments, kpis = system.problem.arguments, system.kpis()

    def number(key: str, form: str, scale: float = 1.0) -> str:
        return "–" if math.isnan(kpis[key]) else format(scale * kpis[key], form)

    return [
        f"{arguments.scenario}, {arguments.model}",
        f"t = {system.simulator.now:.0f} s, decision {system.epoch} of {arguments.epochs}",
        f"mean latency {number('mean_latency_s', '.2f')} s",
        f"local tokens {number('local_token_ratio', '.1f', 100)} %",
        f"{system.adopted} changes, {number('expert_loads', '.0f')} loads",
    ]


def _blocks(values: np.ndarray) -> str:
    """One character for each value in [0, 1], a space for none."""
    return "".join(
        "·" if math.isnan(x) else _BLOCKS[min(math.ceil(8 * x - 1e-9), 8)] for x in values.tolist()
    )


def _text(system: PlacementEpisode) -> str:
    cluster, sim = system.problem.cluster, system.simulator
    view = cluster.server_view(sim.placement())
    used = np.bincount(cluster.gpu_server, sim.state.gpu["used"], cluster.num_servers)
    past = system.local_ratio[: system.epoch]
    lines = [
        "   ".join(_words(system)),
        f"server  gpus  slots used  in system  {'experts of each layer':<{cluster.layers}}  "
        "local tokens, by epoch",
    ]
    for n in range(cluster.num_servers):
        lines.append(
            f"{n:6d}  {cluster.gpus[n]:4d}  {int(used[n]):4d}/{int(cluster.cap[n]):<5d}  "
            f"{int(sim.state.server['in_system'][n]):9d}  {_blocks(view[n].mean(axis=1))}  "
            f"{_blocks(past[:, n])}"
        )
    return "\n".join(lines) + "\n"


# ----------------------------------------------------------------------------------------- pixels


def _blend(ends: np.ndarray, share: np.ndarray) -> np.ndarray:
    return ends[0] + share[..., None] * (ends[1] - ends[0])


def expert_colours(resident: np.ndarray, coming: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Colours ``(L, E, 3)`` in [0, 1] of a server's map.

    Green is held, red is missing, both deeper the more the server's requests use the expert by
    ``counts``; yellow is being loaded.
    """
    share = np.sqrt(counts / max(float(counts.max()), 1.0))
    colours = np.where(resident[..., None], _blend(_HELD, share), _blend(_MISSING, share))
    colours[coming & ~resident] = _LOADING
    return colours


def _pixels(system: PlacementEpisode) -> np.ndarray:
    canvas = blank_canvas()
    figure = canvas.figure
    place = (0.02, 0.27, 0.475, 0.66, 0.82)
    for x, words in zip(place, _words(system), strict=True):
        weight = "bold" if x == place[0] else "normal"
        figure.text(x, 0.955, words, color=INK, fontsize=8.5, weight=weight, va="center")
    _maps(figure, system)
    _history(figure, system)
    return pixels(canvas)


def _maps(figure, system: PlacementEpisode) -> None:
    from matplotlib.patches import Rectangle

    cluster, sim = system.problem.cluster, system.simulator
    view, aims = cluster.server_view(sim.placement()), cluster.server_view(sim.target())
    counts = system.counts()
    servers = min(cluster.num_servers, MAPPED_SERVERS)
    used = np.bincount(cluster.gpu_server, sim.state.gpu["used"], cluster.num_servers)
    width = 0.95 / servers
    for n in range(servers):
        colours = expert_colours(view[n], aims[n] & ~view[n], counts[n])
        axis = panel(
            figure,
            (0.045 + n * width, 0.395, width - 0.035, 0.47),
            f"server {n}: {cluster.gpus[n]} GPU{'s' * (cluster.gpus[n] > 1)}, "
            f"{int(used[n])}/{int(cluster.cap[n])} slots, "
            f"{int(sim.state.server['in_system'][n])} in system",
            "expert",
            color=_LINES[n],
        )
        axis.imshow(colours, aspect="auto", interpolation="nearest")
        if n == 0:
            axis.set_ylabel("layer", fontsize=7.5, color=SOFT, labelpad=1)
    legend = {
        "held, little used": _HELD[0],
        "held, much used": _HELD[1],
        "missing and used": _MISSING[1],
        "being loaded": _LOADING,
    }
    for i, (words, colour) in enumerate(legend.items()):
        x = 0.98 - 0.13 * (len(legend) - i)
        figure.add_artist(Rectangle((x, 0.318), 0.010, 0.016, color=tuple(colour)))
        figure.text(x + 0.014, 0.326, words, fontsize=7, color=SOFT, va="center")


def _history(figure, system: PlacementEpisode) -> None:
    past = 100 * system.local_ratio[: system.epoch, :MAPPED_SERVERS]
    axis = panel(
        figure,
        (0.045, 0.085, 0.935, 0.19),
        f"tokens served where they arrive, % of each epoch, {past.shape[1]} of "
        f"{system.local_ratio.shape[1]} servers",
        "epoch",
        color=SOFT,
        fontsize=8,
        pad=3,
    )
    at = np.arange(1, system.epoch + 1)
    for n in range(past.shape[1]):
        axis.plot(at, past[:, n], "o-", color=_LINES[n], markersize=3, linewidth=1.4)
    axis.set_xlim(0.5, system.problem.arguments.epochs + 0.5)
    axis.set_ylim(0, 100)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
