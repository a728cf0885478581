"""Pictures of a routing system: a table of text, or an image of queues, memory and latency.

Both show, for each expert, the running requests (tokens so far over the predicted length, and
whether the latency so far is over L), the waiting queue, the KV memory in use, the latency per
token against L, and what became of the requests sent there.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

import numpy as np

from servegym.envs._frames import HEIGHT, WIDTH, blank_canvas, pixels
from servegym.envs.llm_routing.core import RoutingBatch, held
from servegym.envs.llm_routing.kernel import layout

RECENT = 20  # completed requests behind the "latest" latency of an expert

_INK, _SOFT, _FAINT, _LINE = "#1f2933", "#66788a", "#9fb3c8", "#d9e2ec"
_PAPER, _CARD, _EMPTY = "#f5f7fa", "#ffffff", "#eef2f6"
_GOOD, _GOOD_CELL, _GOOD_LIGHT = "#2a9d8f", "#6cc5ba", "#d8efec"
_BAD, _BAD_CELL, _BAD_LIGHT = "#d64545", "#f09a9a", "#fbe3e3"
_WAIT, _TRANSIT, _PREEMPTED = "#7b8fd4", "#d5dcf5", "#b07cc6"
_MEMORY, _CHOSEN = "#e9a23b", "#3a5bc7"
_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass
class _Running:
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
    memory: float
    running: list[_Running] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)  # "ready", "transit" or "preempted"
    latest_s: float = math.nan
    sent: int = 0
    on_time: int = 0
    late: int = 0
    rejected: int = 0


@dataclass
class _Scene:
    """What is shown of a system."""

    now: float
    decided: int
    total: int
    limit_s: float
    prompt: int | None
    dropped: int
    kpis: dict[str, float]
    last: str
    chosen: int
    running_capacity: int
    waiting_capacity: int
    experts: list[_Expert]


def render(batch: RoutingBatch, row: int, mode: str) -> str | np.ndarray:
    """Show one system of a batch.

    Args:
        batch: the systems.
        row: which of them.
        mode: ``"ansi"`` or ``"rgb_array"``.

    Returns:
        A table as text, or uint8 pixels ``(540, 960, 3)``.

    Raises:
        ValueError: ``mode`` is unknown.
        DependencyNotInstalled: pixels are requested and matplotlib is missing.
    """
    if mode == "ansi":
        return _text(_look(batch, row))
    if mode == "rgb_array":
        return _pixels(_look(batch, row))
    raise ValueError(f"mode={mode!r} is unknown; choose 'ansi' or 'rgb_array'.")


# ------------------------------------------------------------------------------ reading the state


def _look(batch: RoutingBatch, row: int) -> _Scene:
    problem = batch.problem
    v = batch.env[row]
    now, decided, limit = float(v["now"]), int(v["index"]), float(v["latency_requirement"])
    total = problem.episode_requests
    log = batch.request_log(row)
    current = int(batch.rows[row, decided]) if decided < total else None
    c = batch.config_of(row)
    count = int(c["num_experts"])
    experts = [_expert(batch, row, n, now, limit, current, log) for n in range(count)]
    last, chosen = "", -1
    if decided:
        entry = log[decided - 1]
        chosen = int(entry["expert"])
        if entry["outcome"] == layout.DROPPED:
            last, chosen = "dropped", -1
        elif entry["outcome"] == layout.REJECTED:
            last = f"rejected by expert {chosen + 1}"
        else:
            last = f"sent to expert {chosen + 1}"
    return _Scene(
        now=now,
        decided=decided,
        total=total,
        limit_s=limit,
        prompt=None if current is None else int(problem.table[current, 0, 0]),
        dropped=int(v["dropped"]),
        kpis=batch.kpis(row),
        last=last,
        chosen=chosen,
        running_capacity=int(c["running_capacity"]),
        waiting_capacity=int(c["waiting_capacity"]),
        experts=experts,
    )


def _expert(
    batch: RoutingBatch,
    row: int,
    n: int,
    now: float,
    limit: float,
    current: int | None,
    log: np.ndarray,
) -> _Expert:
    problem = batch.problem
    e, lane = batch.expert[row, n], batch.slot[row, n]
    running, waiting = held(e, batch.queue[row, n])
    block = int(problem.cfg["block_size"][0])
    profile, model = problem.profiles[int(e["profile"])], int(e["model"])
    done = log[(log["expert"] == n) & (log["outcome"] == layout.COMPLETED)]
    latency = (done["finish_s"] - done["arrival_s"]) / np.maximum(done["output_tokens"], 1)
    on_time = int(np.count_nonzero(latency <= limit))
    latest = latency[np.argsort(done["finish_s"], kind="stable")][-RECENT:]
    shown = _Expert(
        model=problem.models[model % len(problem.models)],
        device=str(profile.device.get("name", profile.name)),
        score=0.0 if current is None else float(problem.table[current, model, 3]),
        length=0.0 if current is None else float(problem.table[current, model, 4]),
        legal=bool(batch.action_mask[row, n + 1]),
        memory=0.0,
        latest_s=float(latest.mean()) if len(latest) else math.nan,
        sent=len(done)
        + int(e["running"])
        + int(e["waiting"])
        + int(np.count_nonzero((log["expert"] == n) & (log["outcome"] == layout.FAILED))),
        on_time=on_time,
        late=len(done) - on_time,
        rejected=int(np.count_nonzero((log["expert"] == n) & (log["outcome"] == layout.REJECTED))),
    )
    used = 0
    for r in lane[running]:
        tokens = int(e["emitted"] - r["origin"]) if r["decoding"] else int(r["generated"])
        in_memory = r["prompt"] + tokens if r["decoding"] else r["computed"] + r["chunk"]
        used += -(-int(in_memory) // block)
        so_far = (now - float(r["arrived"])) / max(tokens, 1)
        progress = min(tokens / max(float(r["predicted_output"]), 1.0), 1.0)
        shown.running.append(_Running(progress, tokens, so_far, so_far > limit))
    shown.memory = used / max(int(e["capacity"]), 1)
    for r in lane[waiting]:
        if r["preemptions"]:
            shown.waiting.append("preempted")
        else:
            shown.waiting.append("transit" if r["available"] > now else "ready")
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


def _running_latency(expert: _Expert) -> float:
    """Median l_t of the running requests that have a token, in s per token."""
    begun = [r.latency_s for r in expert.running if r.tokens > 0]
    return statistics.median(begun) if begun else math.nan


# ------------------------------------------------------------------------------------------- text

_WAITING_MARKS = {"ready": "o", "transit": ">", "preempted": "p"}


def _text(scene: _Scene) -> str:
    cells_r = max([scene.running_capacity] + [len(x.running) for x in scene.experts])
    cells_w = max([scene.waiting_capacity] + [len(x.waiting) for x in scene.experts])
    head = (
        f"t = {scene.now:.3f} s   request {min(scene.decided + 1, scene.total)}/{scene.total}   "
        f"L = {1000 * scene.limit_s:.1f} ms/token   QoS {scene.kpis['avg_qos']:.3f}   "
        f"dropped {scene.dropped}   rejected {sum(x.rejected for x in scene.experts)}   "
        f"late {sum(x.late for x in scene.experts)}"
    )
    if scene.prompt is None:
        router = "at the router: nothing, the episode is over"
    else:
        router = f"at the router: a prompt of {scene.prompt} tokens"
    if scene.last:
        router += f"   (the last one was {scene.last})"
    run_title, wait_title = "running".ljust(2 * cells_r), "waiting".ljust(cells_w)
    names = [_short(f"{x.model} ({_card(x.device)})", 44) for x in scene.experts]
    wide = max(len(name) for name in names)
    lines = [
        head,
        router,
        f"  # {'expert':<{wide}}  score  length  {'KV memory':<13}  ms/token  latest  "
        f"{run_title}  {wait_title}  sent  late  rejected",
    ]
    for n, x in enumerate(scene.experts):
        bar = "█" * round(8 * min(x.memory, 1.0))
        running = "".join(
            _BLOCKS[min(int(8 * r.progress), 7)] + ("!" if r.late else " ") for r in x.running
        )
        running += "· " * (cells_r - len(x.running))
        waiting = "".join(_WAITING_MARKS[w] for w in x.waiting).ljust(cells_w, "·")
        mark = " " if x.legal else "x"
        if n == scene.chosen:
            mark = "→"
        score, length = (
            ("–", "–") if scene.prompt is None else (f"{x.score:.2f}", f"{x.length:.0f}")
        )
        latency = _ms(_running_latency(x))
        lines.append(
            f"{mark}{n + 1:>2} {names[n]:<{wide}}  {score:>5}  {length:>6}  "
            f"{bar:░<8} {100 * x.memory:3.0f}%  {latency:>8}  {_ms(x.latest_s):>6}  "
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
        self.canvas = blank_canvas(_PAPER)
        self.axes = self.canvas.figure.add_axes((0.0, 0.0, 1.0, 1.0))
        self.axes.set_xlim(0, WIDTH)
        self.axes.set_ylim(HEIGHT, 0)
        self.axes.set_axis_off()
        self._boxes: list[list[tuple[float, float]]] = []
        self._fill: list[str] = []
        self._edge: list[str] = []
        self._dots: list[tuple[float, float, float, str]] = []
        self._words: list[tuple[float, float, str, float, str, str, str]] = []

    def box(self, x: float, y: float, w: float, h: float, fill: str, edge: str = "none") -> None:
        """A rectangle; later ones lie on top."""
        self._boxes.append([(x, y), (x + w, y), (x + w, y + h), (x, y + h)])
        self._fill.append(fill)
        self._edge.append(edge)

    def dot(self, x: float, y: float, size: float, color: str) -> None:
        """A dot of ``size`` square points, above all rectangles."""
        self._dots.append((x, y, size, color))

    def word(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 8.0,
        color: str = _INK,
        align: str = "left",
        weight: str = "normal",
    ) -> None:
        """Text centred in height at y."""
        self._words.append((x, y, text, size, color, align, weight))

    def pixels(self) -> np.ndarray:
        """Draw everything: uint8 (HEIGHT, WIDTH, 3)."""
        from matplotlib.collections import PolyCollection

        self.axes.add_collection(
            PolyCollection(
                self._boxes, facecolors=self._fill, edgecolors=self._edge, linewidths=0.8
            ),
            autolim=False,
        )
        if self._dots:
            x, y, size, color = zip(*self._dots, strict=True)
            self.axes.scatter(x, y, s=size, c=color, linewidths=0.5, edgecolors="white", zorder=3)
        self.canvas.draw()
        self._write()
        return pixels(self.canvas)

    def _write(self) -> None:
        # Straight to the renderer: Text artists lay out every word anew, twice the time.
        from matplotlib.font_manager import FontProperties

        renderer = self.canvas.get_renderer()
        fonts: dict[tuple[float, str], FontProperties] = {}
        for x, y, text, size, color, align, weight in self._words:
            if (size, weight) not in fonts:
                fonts[size, weight] = FontProperties(size=size, weight=weight)
            font = fonts[size, weight]
            if align != "left":
                width = renderer.get_text_width_height_descent(text, font, False)[0]
                x -= width if align == "right" else width / 2
            style = renderer.new_gc()
            style.set_foreground(color)
            # Digits and capitals are 0.73 of the font size high, and a point is 100 / 72 pixels.
            renderer.draw_text(style, round(x), round(y + 0.5 * size), text, font, 0.0)
            style.restore()


# Left edge and width of each column.
_NAME, _REQUEST, _RUNNING, _WAITING = (26, 150), (186, 74), (272, 200), (484, 112)
_MEMORY_AT, _LATENCY, _COUNTS = (608, 92), (714, 126), (850, 94)


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
    sheet.box(0, 0, WIDTH, 44, _INK)
    sheet.word(20, 22, "LLM routing", 13, "white", weight="bold")
    done = scene.decided / scene.total
    sheet.word(160, 22, f"t = {scene.now:.2f} s", 11, "white")
    sheet.word(
        262, 16, f"request {min(scene.decided + 1, scene.total)} of {scene.total}", 9, "white"
    )
    sheet.box(262, 28, 150, 5, "#52606d")
    sheet.box(262, 28, 150 * done, 5, _GOOD)
    rejected = sum(x.rejected for x in scene.experts)
    late = sum(x.late for x in scene.experts)
    on_time = sum(x.on_time for x in scene.experts)
    figures = [
        ("mean QoS", f"{scene.kpis['avg_qos']:.3f}", "white"),
        ("on time", str(on_time), "#7fd8cc"),
        ("late", str(late), "#ff9d9d"),
        ("dropped", str(scene.dropped), "#ffd48a"),
        ("rejected", str(rejected), "#ffd48a"),
        ("L", f"{1000 * scene.limit_s:.4g} ms/token", "white"),
    ]
    for x, (name, value, color) in zip((452, 536, 606, 676, 748, 836), figures, strict=True):
        sheet.word(x, 14, name, 7.5, _FAINT)
        sheet.word(x, 30, value, 11, color, weight="bold")

    sheet.box(16, 54, 386, 40, _CARD, _LINE)
    sheet.box(16, 54, 5, 40, _CHOSEN)
    sheet.word(30, 66, "at the router", 7.5, _SOFT)
    if scene.prompt is None:
        sheet.word(30, 82, "the episode is over", 10.5, weight="bold")
    else:
        sheet.word(30, 82, f"a prompt of {scene.prompt} tokens", 10.5, weight="bold")
        best = max(range(len(scene.experts)), key=lambda n: scene.experts[n].score)
        sheet.word(392, 66, f"best predicted score: expert {best + 1}", 7.5, _SOFT, "right")
    if scene.last:
        sheet.box(412, 54, 224, 40, _CARD, _LINE)
        sheet.word(424, 66, "the one before", 7.5, _SOFT)
        bad = scene.chosen < 0 or scene.last.startswith("rejected")
        sheet.word(424, 82, scene.last, 10.5, _BAD if bad else _INK, weight="bold")

    for (x, _), name in (
        (_NAME, "expert"),
        (_REQUEST, "prediction"),
        (_RUNNING, f"running (up to {scene.running_capacity})"),
        (_WAITING, f"waiting (up to {scene.waiting_capacity})"),
        (_MEMORY_AT, "KV memory"),
        (_LATENCY, "latency per token"),
        (_COUNTS, "sent"),
    ):
        sheet.word(x, 110, name, 7.5, _SOFT)


def _row(sheet: _Sheet, scene: _Scene, n: int, x: _Expert, top: float, height: float) -> None:
    middle = top + height / 2
    roomy = height > 36
    chosen = n == scene.chosen
    sheet.box(12, top, WIDTH - 24, height, _CARD if x.legal else "#f7eded", _LINE)
    sheet.box(12, top, 5, height, _CHOSEN if chosen else (_LINE if x.legal else _BAD))

    name = f"{n + 1}  {_short(x.model, 21)}"
    if roomy:
        sheet.word(_NAME[0], middle - 9, name, 7.5, weight="bold")
        sheet.word(_NAME[0] + 12, middle + 9, _short(_card(x.device), 25), 7.5, _SOFT)
    else:
        sheet.word(_NAME[0], middle, name, 7, weight="bold")

    if scene.prompt is not None:
        left, width = _REQUEST
        bar = 8.0 if roomy else 5.0
        sheet.box(left, middle - (bar + 3 if roomy else bar / 2), 52, bar, _EMPTY)
        sheet.box(
            left,
            middle - (bar + 3 if roomy else bar / 2),
            52 * min(x.score, 1.0),
            bar,
            _CHOSEN if x.legal else _FAINT,
        )
        up = 7.0 if roomy else 0.0
        sheet.word(left + 56, middle - up, f"{x.score:.2f}", 7.5)
        if roomy:
            length = f"≈ {x.length:.0f} tokens" if x.legal else "cannot take it"
            sheet.word(left, middle + 11, length, 7.5, _SOFT if x.legal else _BAD)

    _running(sheet, scene, x, middle, min(height - 8.0, 46.0))
    _waiting(sheet, scene, x, middle, min(height - 8.0, 46.0))

    left, width = _MEMORY_AT
    sheet.box(left, middle - 6, width - 30, 12, _EMPTY)
    sheet.box(left, middle - 6, (width - 30) * min(x.memory, 1.0), 12, _MEMORY)
    sheet.word(left + width - 25, middle, f"{100 * x.memory:.0f} %", 7.5)

    _latency(sheet, scene, x, middle, roomy)

    left, width = _COUNTS
    sheet.word(left, middle - (8 if roomy else 0), str(x.sent), 8.5, weight="bold")
    if x.rejected:
        sheet.word(
            left + 86, middle - (8 if roomy else 0), f"{x.rejected} rejected", 7, "#b7791f", "right"
        )
    if roomy:
        ended = max(x.on_time + x.late, 1)
        sheet.box(left, middle + 3, 86, 4, _EMPTY)
        if x.on_time + x.late:
            sheet.box(left, middle + 3, 86, 4, _BAD)
            sheet.box(left, middle + 3, 86 * x.on_time / ended, 4, _GOOD)
        sheet.word(left, middle + 16, f"{x.on_time} on time, {x.late} late", 6.5, _SOFT)


def _running(sheet: _Sheet, scene: _Scene, x: _Expert, middle: float, height: float) -> None:
    """A cell for each slot, filled from below with tokens so far / predicted length."""
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
        filled = height * r.progress
        sheet.box(at, middle + height / 2 - filled, cell, filled, dark)
        if cell > 24 and height > 22:
            label = f"{r.tokens}" if r.tokens else "prefill"
            sheet.word(at + cell / 2, middle, label, 7.5 if r.tokens else 6.5, _INK, "center")


def _waiting(sheet: _Sheet, scene: _Scene, x: _Expert, middle: float, height: float) -> None:
    """A cell for each waiting request; preempted ones may exceed the capacity."""
    left, width = _WAITING
    slots = max(scene.waiting_capacity, len(x.waiting))
    pitch = width / slots
    cell = pitch - (4 if pitch > 12 else 1)
    tall = min(height, 30.0)
    fill = {"ready": _WAIT, "transit": _TRANSIT, "preempted": _PREEMPTED}
    for i in range(slots):
        color = fill[x.waiting[i]] if i < len(x.waiting) else _EMPTY
        edge = _WAIT if i < len(x.waiting) and x.waiting[i] == "transit" else "none"
        sheet.box(left + i * pitch, middle - tall / 2, cell, tall, color, edge)


def _latency(sheet: _Sheet, scene: _Scene, x: _Expert, middle: float, roomy: bool) -> None:
    """A logarithmic strip from L / 4 to 4 L: a dot a running request, a bar for the latest mean."""
    left, width = _LATENCY
    strip = 14.0 if roomy else 8.0
    y = middle - 8 if roomy else middle
    sheet.box(left, y - strip / 2, width / 2, strip, _GOOD_LIGHT)
    sheet.box(left + width / 2, y - strip / 2, width / 2, strip, _BAD_LIGHT)
    sheet.box(left + width / 2 - 0.75, y - strip / 2 - 3, 1.5, strip + 6, _INK)

    def place(latency_s: float) -> float:
        share = math.log(max(latency_s, 1e-9) / max(scene.limit_s, 1e-9)) / math.log(4.0)
        return left + width * (0.5 + 0.5 * min(max(share, -0.97), 0.97))

    if not math.isnan(x.latest_s):
        sheet.box(place(x.latest_s) - 2, y - strip / 2 - 2, 4, strip + 4, _CHOSEN)
    for r in x.running:
        if r.tokens:
            sheet.dot(place(r.latency_s), y, 26 if roomy else 12, _BAD if r.late else _GOOD)
    if roomy:
        now = _running_latency(x)
        if not math.isnan(now):
            sheet.word(
                left, middle + 11, f"now {_ms(now)}", 7.5, _BAD if now > scene.limit_s else _GOOD
            )
        if not math.isnan(x.latest_s):
            sheet.word(
                left + width, middle + 11, f"done {_ms(x.latest_s)} ms", 7.5, _CHOSEN, "right"
            )


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
        sheet.word(x + 15, y, name, 7.5, _SOFT)
        x += advance
    sheet.box(x, y - 7, 1.5, 14, _INK)
    sheet.word(x + 6, y, "L", 7.5, _SOFT)
    sheet.dot(x + 30, y, 26, _GOOD)
    sheet.word(x + 38, y, "running now", 7.5, _SOFT)
    sheet.box(x + 112, y - 7, 4, 14, _CHOSEN)
    sheet.word(x + 120, y, f"mean of the last {RECENT} done", 7.5, _SOFT)
