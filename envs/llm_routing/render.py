"""Pictures of a routing system: a table of text, or an image of queues, memory and latency.

Both show, for each expert, the running requests (tokens so far over the predicted length, and
whether the latency so far is over L), the waiting queue, the KV memory in use, the latency per
token against L, and what became of the requests sent there.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from servegym.envs._frames import HEIGHT, INK, SOFT, WIDTH, blank_canvas, pixels
from servegym.envs.llm_routing.core import RoutingBatch, held
from servegym.envs.llm_routing.kernel import layout

RECENT = 20  # completed requests behind the "latest" latency of an expert

_FAINT, _LINE, _CARD, _EMPTY = "#9fb3c8", "#d9e2ec", "#ffffff", "#eef2f6"
_GOOD, _GOOD_CELL, _GOOD_LIGHT = "#2a9d8f", "#6cc5ba", "#d8efec"
_BAD, _BAD_CELL, _BAD_LIGHT = "#d64545", "#f09a9a", "#fbe3e3"
_WAIT, _TRANSIT, _PREEMPTED = "#7b8fd4", "#d5dcf5", "#b07cc6"
_MEMORY, _CHOSEN = "#e9a23b", "#3a5bc7"
_BLOCKS = "▁▂▃▄▅▆▇█"


class _Running(NamedTuple):
    """A running request: predicted progress in [0, 1], tokens so far, l_t in s per token."""

    progress: float
    tokens: int
    latency_s: float
    late: bool


@dataclass
class _Expert:
    """What is shown of one expert."""

    model: str
    device: str
    score: float
    length: float
    legal: bool
    latest_s: float
    sent: int
    on_time: int
    late: int
    rejected: int
    memory: float = 0.0
    running: list[_Running] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)  # "ready", "transit" or "preempted"

    @property
    def now_s(self) -> float:
        """Median l_t of the running requests that have a token, in s per token."""
        begun = [r.latency_s for r in self.running if r.tokens > 0]
        return statistics.median(begun) if begun else math.nan


@dataclass
class _Scene:
    """What is shown of a system."""

    now: float
    request: str
    done: float
    limit_s: float
    prompt: int | None
    figures: dict[str, str]
    last: str
    chosen: int
    running_capacity: int
    waiting_capacity: int
    experts: list[_Expert]


def render(batch: RoutingBatch, row: int, mode: str) -> str | np.ndarray:
    """A system as text (``ansi``) or uint8 ``(540, 960, 3)`` pixels (``rgb_array``).

    Raises:
        DependencyNotInstalled: pixels are asked for and matplotlib is missing.
    """
    scene = _look(batch, row)
    return _text(scene) if mode == "ansi" else _pixels(scene)


# ------------------------------------------------------------------------------ reading the state


def _look(batch: RoutingBatch, row: int) -> _Scene:
    problem, env, config = batch.problem, batch.env[row], batch.config_of(row)
    decided, total, limit_s = int(env["index"]), problem.episode_requests, _limit_s(batch, row)
    log = batch.request_log(row)
    current = int(batch.rows[row, decided]) if decided < total else None
    experts = [_expert(batch, row, n, log, current) for n in range(int(config["num_experts"]))]
    last, chosen = "", -1
    if decided and log["outcome"][-1] == layout.DROPPED:
        last = "dropped"
    elif decided:
        chosen = int(log["expert"][-1])
        became = "rejected by" if log["outcome"][-1] == layout.REJECTED else "sent to"
        last = f"{became} expert {chosen + 1}"
    return _Scene(
        now=float(env["now"]),
        request=f"request {min(decided + 1, total)}/{total}",
        done=decided / total,
        limit_s=limit_s,
        prompt=None if current is None else int(problem.table[current, 0, 0]),
        figures={
            "QoS": f"{batch.kpis(row)['avg_qos']:.3f}",
            "dropped": str(int(env["dropped"])),
            **{
                name.replace("_", " "): str(sum(getattr(x, name) for x in experts))
                for name in ("rejected", "late", "on_time")
            },
        },
        last=last,
        chosen=chosen,
        running_capacity=int(config["running_capacity"]),
        waiting_capacity=int(config["waiting_capacity"]),
        experts=experts,
    )


def _limit_s(batch: RoutingBatch, row: int) -> float:
    return float(batch.env[row]["latency_requirement"])


def _expert(batch: RoutingBatch, row: int, n: int, log: np.ndarray, current: int | None) -> _Expert:
    problem, now, limit_s = batch.problem, float(batch.env[row]["now"]), _limit_s(batch, row)
    e, lane = batch.expert[row, n], batch.slot[row, n]
    running, waiting = held(e, batch.queue[row, n])
    block = int(problem.cfg["block_size"][0])
    profile, model = problem.profiles[int(e["profile"])], int(e["model"])
    log = log[log["expert"] == n]
    done = log[log["outcome"] == layout.COMPLETED]
    latency = (done["finish_s"] - done["arrival_s"]) / np.maximum(done["output_tokens"], 1)
    latest = latency[np.argsort(done["finish_s"], kind="stable")][-RECENT:]
    on_time = int(np.count_nonzero(latency <= limit_s))
    rejected = int(np.count_nonzero(log["outcome"] == layout.REJECTED))
    shown = _Expert(
        model=problem.models[model % len(problem.models)],
        device=_card(str(profile.device.get("name", profile.name))),
        score=0.0 if current is None else float(problem.table[current, model, 3]),
        length=0.0 if current is None else float(problem.table[current, model, 4]),
        legal=bool(batch.action_mask[row, n + 1]),
        latest_s=float(latest.mean()) if len(latest) else math.nan,
        sent=len(log) - rejected,
        on_time=on_time,
        late=len(done) - on_time,
        rejected=rejected,
    )
    used = 0
    for r in lane[running]:
        tokens = int(e["emitted"] - r["origin"]) if r["decoding"] else int(r["generated"])
        in_memory = r["prompt"] + tokens if r["decoding"] else r["computed"] + r["chunk"]
        used += -(-int(in_memory) // block)
        so_far = (now - float(r["arrived"])) / max(tokens, 1)
        progress = min(tokens / max(float(r["predicted_output"]), 1.0), 1.0)
        shown.running.append(_Running(progress, tokens, so_far, so_far > limit_s))
    shown.memory = min(used / max(int(e["capacity"]), 1), 1.0)
    for r in lane[waiting]:
        coming = "transit" if r["available"] > now else "ready"
        shown.waiting.append("preempted" if r["preemptions"] else coming)
    return shown


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _card(device: str) -> str:
    """Name of the card without its maker."""
    for maker in ("NVIDIA GeForce ", "NVIDIA ", "AMD ", "Intel "):
        device = device.removeprefix(maker)
    return device


def _ms(seconds: float) -> str:
    return "–" if math.isnan(seconds) else f"{1000 * seconds:.1f}"


# ------------------------------------------------------------------------------------------- text

_WAITING_MARKS = {"ready": "o", "transit": ">", "preempted": "p"}


def _text(scene: _Scene) -> str:
    cells_r = max([scene.running_capacity] + [len(x.running) for x in scene.experts])
    cells_w = max([scene.waiting_capacity] + [len(x.waiting) for x in scene.experts])
    figures = scene.figures
    router = "at the router: nothing, the episode is over"
    if scene.prompt is not None:
        router = f"at the router: a prompt of {scene.prompt} tokens"
    if scene.last:
        router += f"   (the last one was {scene.last})"
    run_title, wait_title = "running".ljust(2 * cells_r), "waiting".ljust(cells_w)
    names = [_short(f"{x.model} ({x.device})", 44) for x in scene.experts]
    wide = max(len(name) for name in names)
    lines = [
        f"t = {scene.now:.3f} s   {scene.request}   "
        f"L = {1000 * scene.limit_s:.1f} ms/token   "
        + "   ".join(f"{name} {figures[name]}" for name in ("QoS", "dropped", "rejected", "late")),
        router,
        f"  # {'expert':<{wide}}  score  length  {'KV memory':<13}  ms/token  latest  "
        f"{run_title}  {wait_title}  sent  late  rejected",
    ]
    for n, x in enumerate(scene.experts):
        bar = "█" * round(8 * x.memory)
        running = "".join(
            _BLOCKS[min(int(8 * r.progress), 7)] + ("!" if r.late else " ") for r in x.running
        )
        running += "· " * (cells_r - len(x.running))
        waiting = "".join(_WAITING_MARKS[w] for w in x.waiting).ljust(cells_w, "·")
        mark = "→" if n == scene.chosen else (" " if x.legal else "x")
        score, length = "–", "–"
        if scene.prompt is not None:
            score, length = f"{x.score:.2f}", f"{x.length:.0f}"
        lines.append(
            f"{mark}{n + 1:>2} {names[n]:<{wide}}  {score:>5}  {length:>6}  "
            f"{bar:░<8} {100 * x.memory:3.0f}%  {_ms(x.now_s):>8}  {_ms(x.latest_s):>6}  "
            f"{running}  {waiting}  {x.sent:4d}  {x.late:4d}  {x.rejected:8d}"
        )
    lines.append(
        "running: ▁ to █ tokens so far / predicted length, ! over L so far; "
        "waiting: o ready, > on its way, p preempted; x cannot take this request"
    )
    return "\n".join(lines) + "\n"


# ----------------------------------------------------------------------------------------- pixels


class _Sheet:
    """Rectangles, dots and words on a canvas measured in pixels, y downward."""

    def __init__(self) -> None:
        self.canvas = blank_canvas()
        self.axes = self.canvas.figure.add_axes(
            (0.0, 0.0, 1.0, 1.0), xlim=(0, WIDTH), ylim=(HEIGHT, 0)
        )
        self.axes.set_axis_off()
        self._boxes: list[tuple[list[tuple[float, float]], str, str]] = []
        self._dots: list[tuple[float, float, float, str]] = []

    def box(self, x: float, y: float, w: float, h: float, fill: str, edge: str = "none") -> None:
        """A rectangle; later ones lie on top."""
        corners = [(x, y), (x + w, y), (x + w, y + h), (x, y + h)]
        self._boxes.append((corners, fill, edge))

    def dot(self, x: float, y: float, size: float, color: str) -> None:
        """A dot of ``size`` square points, above all rectangles."""
        self._dots.append((x, y, size, color))

    def word(self, x: float, y: float, text: str, size: float, color: str = INK, **look) -> None:
        """Text centred in height at y."""
        self.axes.text(x, y, text, fontsize=size, color=color, va="center_baseline", **look)

    def pixels(self) -> np.ndarray:
        """Draw everything: uint8 (HEIGHT, WIDTH, 3)."""
        from matplotlib.collections import PolyCollection

        boxes, fills, edges = zip(*self._boxes, strict=True)
        shapes = PolyCollection(boxes, facecolors=fills, edgecolors=edges, linewidths=0.8)
        self.axes.add_collection(shapes, autolim=False)
        if self._dots:
            x, y, size, color = zip(*self._dots, strict=True)
            self.axes.scatter(x, y, s=size, c=color, linewidths=0.5, edgecolors="white", zorder=3)
        return pixels(self.canvas)


# Left edge and width of each column.
_NAME, _REQUEST, _RUNNING, _WAITING = (26, 150), (186, 74), (272, 200), (484, 112)
_MEMORY_AT, _LATENCY, _COUNTS = (608, 62), (714, 126), (850, 86)


def _pixels(scene: _Scene) -> np.ndarray:
    sheet = _Sheet()
    _header(sheet, scene)
    top, bottom = 124.0, HEIGHT - 30.0
    pitch = min((bottom - top) / len(scene.experts), 92.0)
    gap = 6.0 if pitch > 40 else 3.0
    for n, expert in enumerate(scene.experts):
        _row(sheet, scene, n, expert, top + n * pitch, pitch - gap)
    _legend(sheet)
    return sheet.pixels()


def _header(sheet: _Sheet, scene: _Scene) -> None:
    sheet.box(0, 0, WIDTH, 44, INK)
    sheet.word(20, 22, "LLM routing", 13, "white", weight="bold")
    sheet.word(160, 22, f"t = {scene.now:.2f} s", 11, "white")
    sheet.word(262, 16, scene.request, 9, "white")
    sheet.box(262, 28, 150, 5, "#52606d")
    sheet.box(262, 28, 150 * scene.done, 5, _GOOD)
    shown = scene.figures | {"L": f"{1000 * scene.limit_s:.4g} ms/token"}
    for x, name, color in (
        (452, "QoS", "white"),
        (536, "on time", "#7fd8cc"),
        (606, "late", "#ff9d9d"),
        (676, "dropped", "#ffd48a"),
        (748, "rejected", "#ffd48a"),
        (836, "L", "white"),
    ):
        sheet.word(x, 14, name, 7.5, _FAINT)
        sheet.word(x, 30, shown[name], 11, color, weight="bold")

    sheet.box(16, 54, 386, 40, _CARD, _LINE)
    sheet.box(16, 54, 5, 40, _CHOSEN)
    sheet.word(30, 66, "at the router", 7.5, SOFT)
    waits = "the episode is over"
    if scene.prompt is not None:
        waits = f"a prompt of {scene.prompt} tokens"
        best = max(range(len(scene.experts)), key=lambda n: scene.experts[n].score)
        sheet.word(392, 66, f"best predicted score: expert {best + 1}", 7.5, SOFT, ha="right")
    sheet.word(30, 82, waits, 10.5, weight="bold")
    if scene.last:
        sheet.box(412, 54, 224, 40, _CARD, _LINE)
        sheet.word(424, 66, "the one before", 7.5, SOFT)
        bad = scene.chosen < 0 or scene.last.startswith("rejected")
        sheet.word(424, 82, scene.last, 10.5, _BAD if bad else INK, weight="bold")

    for (x, _), name in (
        (_NAME, "expert"),
        (_REQUEST, "prediction"),
        (_RUNNING, f"running (up to {scene.running_capacity})"),
        (_WAITING, f"waiting (up to {scene.waiting_capacity})"),
        (_MEMORY_AT, "KV memory"),
        (_LATENCY, "latency per token"),
        (_COUNTS, "sent"),
    ):
        sheet.word(x, 110, name, 7.5, SOFT)


def _row(sheet: _Sheet, scene: _Scene, n: int, x: _Expert, top: float, height: float) -> None:
    """An expert: in a high row each column has a second line of words."""
    middle = top + height / 2
    up = 9.0 if height > 36 else 0.0

    def below(at: float, text: str, color: str = SOFT, **look) -> None:
        if up:
            sheet.word(at, middle + 11, text, 7, color, **look)

    edge = _LINE if x.legal else _BAD
    sheet.box(12, top, WIDTH - 24, height, _CARD if x.legal else "#f7eded", _LINE)
    sheet.box(12, top, 5, height, _CHOSEN if n == scene.chosen else edge)
    left, _ = _NAME
    sheet.word(left, middle - up, f"{n + 1}  {_short(x.model, 21)}", 7.5, weight="bold")
    below(left + 12, _short(x.device, 25))

    if scene.prompt is not None:
        left, _ = _REQUEST
        sheet.box(left, middle - up - 4, 52, 8, _EMPTY)
        color = _CHOSEN if x.legal else _FAINT
        sheet.box(left, middle - up - 4, 52 * min(x.score, 1.0), 8, color)
        sheet.word(left + 56, middle - up, f"{x.score:.2f}", 7.5)
        if x.legal:
            below(left, f"≈ {x.length:.0f} tokens")
        else:
            below(left, "cannot take it", _BAD)

    _cells(sheet, scene, x, middle, min(height - 8.0, 46.0))

    left, width = _MEMORY_AT
    sheet.box(left, middle - 6, width, 12, _EMPTY)
    sheet.box(left, middle - 6, width * x.memory, 12, _MEMORY)
    sheet.word(left + width + 5, middle, f"{100 * x.memory:.0f} %", 7.5)

    left, width = _LATENCY
    _latency(sheet, scene, x, middle - up, 14.0 if up else 8.0)
    if not math.isnan(x.now_s):
        below(left, f"now {_ms(x.now_s)}", _BAD if x.now_s > scene.limit_s else _GOOD)
    if not math.isnan(x.latest_s):
        below(left + width, f"done {_ms(x.latest_s)} ms", _CHOSEN, ha="right")

    left, width = _COUNTS
    sheet.word(left, middle - up, str(x.sent), 8.5, weight="bold")
    if x.rejected:
        label = f"{x.rejected} rejected"
        sheet.word(left + width, middle - up, label, 7, "#b7791f", ha="right")
    if up:
        ended = x.on_time + x.late
        sheet.box(left, middle + 1, width, 4, _BAD if ended else _EMPTY)
        sheet.box(left, middle + 1, width * x.on_time / max(ended, 1), 4, _GOOD)
    below(left, f"{x.on_time} on time, {x.late} late")


def _cells(sheet: _Sheet, scene: _Scene, x: _Expert, middle: float, height: float) -> None:
    """A cell a running request, filled with tokens so far / predicted length; one a waiting one."""
    left, width = _RUNNING
    pitch = width / scene.running_capacity
    cell = pitch - (4 if pitch > 12 else 1)
    for i in range(scene.running_capacity):
        at = left + i * pitch
        if i >= len(x.running):
            sheet.box(at, middle - height / 2, cell, height, _EMPTY)
            continue
        r = x.running[i]
        dark, light = (_BAD_CELL, _BAD_LIGHT) if r.late else (_GOOD_CELL, _GOOD_LIGHT)
        sheet.box(at, middle - height / 2, cell, height, light)
        sheet.box(at, middle + height / 2, cell, -height * r.progress, dark)
        if cell > 24 and height > 22:
            sheet.word(at + cell / 2, middle, str(r.tokens or "prefill"), 7, ha="center")
    left, width = _WAITING
    slots = max(scene.waiting_capacity, len(x.waiting))  # preempted ones may exceed the capacity
    pitch, tall = width / slots, min(height, 30.0)
    cell = pitch - (4 if pitch > 12 else 1)
    fill = {"ready": _WAIT, "transit": _TRANSIT, "preempted": _PREEMPTED}
    for i in range(slots):
        state = x.waiting[i] if i < len(x.waiting) else ""
        edge = _WAIT if state == "transit" else "none"
        at = left + i * pitch
        sheet.box(at, middle - tall / 2, cell, tall, fill.get(state, _EMPTY), edge)


def _latency(sheet: _Sheet, scene: _Scene, x: _Expert, y: float, strip: float) -> None:
    """A logarithmic strip from L / 4 to 4 L: a dot a running request, a bar for the latest mean."""
    left, width = _LATENCY
    sheet.box(left, y - strip / 2, width / 2, strip, _GOOD_LIGHT)
    sheet.box(left + width / 2, y - strip / 2, width / 2, strip, _BAD_LIGHT)
    sheet.box(left + width / 2 - 0.75, y - strip / 2 - 3, 1.5, strip + 6, INK)

    def place(latency_s: float) -> float:
        share = math.log(max(latency_s, 1e-9) / max(scene.limit_s, 1e-9)) / math.log(4.0)
        return left + width * (0.5 + 0.5 * min(max(share, -0.97), 0.97))

    if not math.isnan(x.latest_s):
        sheet.box(place(x.latest_s) - 2, y - strip / 2 - 2, 4, strip + 4, _CHOSEN)
    for r in x.running:
        if r.tokens:
            sheet.dot(place(r.latency_s), y, 1.9 * strip, _BAD if r.late else _GOOD)


def _legend(sheet: _Sheet) -> None:
    y = HEIGHT - 14.0
    x = 20.0
    for color, name, advance in (
        (_GOOD_CELL, "within L so far (filled: tokens / predicted length)", 274),
        (_BAD_CELL, "over L so far", 94),
        (_WAIT, "waiting", 66),
        (_TRANSIT, "on its way", 80),
        (_PREEMPTED, "preempted", 84),
    ):
        sheet.box(x, y - 5, 10, 10, color, _WAIT if color == _TRANSIT else "none")
        sheet.word(x + 15, y, name, 7.5, SOFT)
        x += advance
    sheet.box(x, y - 7, 1.5, 14, INK)
    sheet.word(x + 6, y, "L", 7.5, SOFT)
    sheet.dot(x + 30, y, 26, _GOOD)
    sheet.word(x + 38, y, "running now", 7.5, SOFT)
    sheet.box(x + 112, y - 7, 4, 14, _CHOSEN)
    sheet.word(x + 120, y, f"mean of the last {RECENT} done", 7.5, SOFT)
