"""Pictures of a routing system: a table of text, or an image of queues, memory and latency.

Both show, for each expert, the running requests (tokens so far over the predicted length, and
whether the latency so far is over L), the waiting queue, the KV memory in use, the latency per
token against L, and what became of the requests sent there.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from servegym.envs._frames import INK, SOFT, blank_canvas, panel, pixels
from servegym.envs.llm_routing.core import RoutingBatch, held
from servegym.envs.llm_routing.kernel import layout

RECENT = 20  # completed requests behind the "latest" latency of an expert
NAMED = 12  # experts up to which each has words of its own
_GOOD, _LATE, _CHOSEN, _MEMORY, _EMPTY = "#2a9d8f", "#d64545", "#3a5bc7", "#e9a23b", "#e4e9ef"
_WAITING = {"o": "#7b8fd4", ">": "#b9c1e8", "p": "#b07cc6"}  # ready, on its way, preempted
_BLOCKS = "▁▂▃▄▅▆▇█"


class _Running(NamedTuple):
    """A running request."""

    progress: float  # tokens so far / predicted length, at most 1
    tokens: int
    latency_s: float  # l_t, per token
    late: bool


class _Expert(NamedTuple):
    """What is shown of one expert; latencies in s per token, NaN where there is none."""

    model: str
    device: str
    score: float
    length: float
    legal: bool
    now_s: float  # median l_t of the running requests that have a token
    latest_s: float
    sent: int
    on_time: int
    late: int
    rejected: int
    memory: float
    running: list[_Running]
    waiting: list[str]  # keys of `_WAITING`


class _Scene(NamedTuple):
    head: str  # two lines of words
    limit_s: float
    request: bool  # one is at the router
    chosen: int
    running_capacity: int
    waiting_capacity: int
    experts: list[_Expert]


def render(batch: RoutingBatch, row: int, mode: str) -> str | np.ndarray:
    """A system as text (``ansi``) or uint8 ``(540, 960, 3)`` pixels (``rgb_array``)."""
    scene = _look(batch, row)
    return _text(scene) if mode == "ansi" else _pixels(scene)


def _look(batch: RoutingBatch, row: int) -> _Scene:
    problem, env, config = batch.problem, batch.env[row], batch.config_of(row)
    decided, total = int(env["index"]), problem.arguments.episode_requests
    limit_s, log = float(env["latency_requirement"]), batch.request_log(row)
    current = int(batch.rows[row, decided]) if decided < total else None
    experts = [_expert(batch, row, n, log, current) for n in range(int(config["num_experts"]))]
    router, chosen = "at the router: nothing, the episode is over", -1
    if current is not None:
        router = f"at the router: a prompt of {int(problem.table[current, 0, 0])} tokens"
    if decided and log["outcome"][-1] == layout.DROPPED:
        router += "   (the last one was dropped)"
    elif decided:
        chosen = int(log["expert"][-1])
        became = "rejected by" if log["outcome"][-1] == layout.REJECTED else "sent to"
        router += f"   (the last one was {became} expert {chosen + 1})"
    return _Scene(
        f"t = {env['now']:.3f} s   request {min(decided + 1, total)}/{total}   "
        f"L = {1000 * limit_s:.1f} ms/token   QoS {batch.kpis(row)['avg_qos']:.3f}   "
        f"dropped {env['dropped']}   rejected {sum(x.rejected for x in experts)}   "
        f"late {sum(x.late for x in experts)}\n{router}",
        limit_s,
        current is not None,
        chosen,
        int(config["running_capacity"]),
        int(config["waiting_capacity"]),
        experts,
    )


def _expert(batch: RoutingBatch, row: int, n: int, log: np.ndarray, current: int | None) -> _Expert:
    problem, env, e = batch.problem, batch.env[row], batch.expert[row, n]
    now, limit_s = float(env["now"]), float(env["latency_requirement"])
    lane, block, used = batch.slot[row, n], int(problem.cfg["block_size"][0]), 0
    places, queued = held(e, batch.queue[row, n])
    running = []
    for r in lane[places]:
        tokens = int(e["emitted"] - r["origin"]) if r["decoding"] else int(r["generated"])
        in_memory = r["prompt"] + tokens if r["decoding"] else r["computed"] + r["chunk"]
        used += -(-int(in_memory) // block)
        so_far = (now - float(r["arrived"])) / max(tokens, 1)
        progress = min(tokens / max(float(r["predicted_output"]), 1.0), 1.0)
        running.append(_Running(progress, tokens, so_far, so_far > limit_s))
    log = log[log["expert"] == n]
    rejected = int(np.count_nonzero(log["outcome"] == layout.REJECTED))
    done = log[log["outcome"] == layout.COMPLETED]
    latency = (done["finish_s"] - done["arrival_s"]) / np.maximum(done["output_tokens"], 1)
    latest = latency[np.argsort(done["finish_s"], kind="stable")][-RECENT:]
    on_time = int(np.count_nonzero(latency <= limit_s))
    profile, model = problem.profiles[int(e["profile"])], int(e["model"])
    score, length = (0.0, 0.0) if current is None else map(float, problem.table[current, model, 3:])
    device = str(profile.device.get("name", profile.name))
    for maker in ("NVIDIA GeForce ", "NVIDIA ", "AMD ", "Intel "):
        device = device.removeprefix(maker)
    return _Expert(
        model=problem.models[model % len(problem.models)],
        device=device,
        score=score,
        length=length,
        legal=bool(batch.action_mask[row, n + 1]),
        now_s=float(np.median([r.latency_s for r in running if r.tokens] or [math.nan])),
        latest_s=float(latest.mean()) if len(latest) else math.nan,
        sent=len(log) - rejected,
        on_time=on_time,
        late=len(done) - on_time,
        rejected=rejected,
        memory=min(used / max(int(e["capacity"]), 1), 1.0),
        running=running,
        waiting=[
            "p" if r["preemptions"] else ">" if r["available"] > now else "o" for r in lane[queued]
        ],
    )


def _ms(seconds: float) -> str:
    return "–" if math.isnan(seconds) else f"{1000 * seconds:.1f}"


def _text(scene: _Scene) -> str:
    cells_r = max([scene.running_capacity] + [len(x.running) for x in scene.experts])
    cells_w = max([scene.waiting_capacity] + [len(x.waiting) for x in scene.experts])
    names = [f"{x.model} ({x.device})" for x in scene.experts]
    names = [name if len(name) <= 44 else f"{name:.43}…" for name in names]
    wide = max(map(len, names))
    lines = [
        scene.head,
        f"  # {'expert':<{wide}}  score  length  {'KV memory':<13}  ms/token  latest  "
        f"{'running':<{2 * cells_r}}  {'waiting':<{cells_w}}  sent  late  rejected",
    ]
    for n, x in enumerate(scene.experts):
        running = "".join(
            _BLOCKS[min(int(8 * r.progress), 7)] + ("!" if r.late else " ") for r in x.running
        )
        running += "· " * (cells_r - len(x.running))
        waiting = "".join(x.waiting).ljust(cells_w, "·")
        mark = "→" if n == scene.chosen else " " if x.legal else "x"
        score, length = (f"{x.score:.2f}", f"{x.length:.0f}") if scene.request else ("–", "–")
        lines.append(
            f"{mark}{n + 1:>2} {names[n]:<{wide}}  {score:>5}  {length:>6}  "
            f"{'█' * round(8 * x.memory):░<8} {100 * x.memory:3.0f}%  {_ms(x.now_s):>8}  "
            f"{_ms(x.latest_s):>6}  {running}  {waiting}  {x.sent:4d}  {x.late:4d}  {x.rejected:8d}"
        )
    lines.append(
        "running: ▁ to █ tokens so far / predicted length, ! over L so far; "
        "waiting: o ready, > on its way, p preempted; x cannot take this request"
    )
    return "\n".join(lines) + "\n"


def _pixels(scene: _Scene) -> np.ndarray:
    canvas, experts = blank_canvas(), scene.experts
    figure, rows, many = canvas.figure, np.arange(len(experts)), len(experts) > NAMED
    figure.text(0.02, 0.91, scene.head, color=INK, fontsize=9, linespacing=1.8)

    def column(place: float, width: float, title: str, words: list[str], most: float = 1.0) -> Any:
        """Axes with a row an expert, and where there is room words below its bars."""
        axis = panel(figure, (place, 0.08, width, 0.76), title, "", fontsize=8)
        axis.set(xticks=[], yticks=[], xlim=(0, most), ylim=(len(rows) - 0.5, -0.5))
        axis.spines[:].set_visible(False)
        for n, told in enumerate([] if many else words):
            axis.text(0, n + 0.25, told, fontsize=7, color=SOFT, va="center")
        return axis

    def queue(place: float, width: float, name: str, most: int, colours: list[list[str]]) -> Any:
        """A cell a place: those taken, then empty ones."""
        places = max(most, *map(len, colours))  # preempted requests may exceed the capacity
        axis = column(place, width, f"{name} (up to {most})", [], places)
        for n, row in enumerate(colours):
            colour = row + [_EMPTY] * (places - len(row))
            axis.broken_barh([(i, 0.9) for i in range(places)], (n - 0.42, 0.84), facecolors=colour)
        return axis

    def hue(r: _Running) -> str:
        return _LATE if r.late else _GOOD

    def bars(axis: Any, sizes: Any, colour: Any, left: Any = 0.0) -> None:
        axis.barh(rows - 0.12, sizes, left=left, color=colour, height=0.25)

    words = [f"{x.score:.2f}, ≈ {x.length:.0f} tokens" for x in experts]
    scores = column(0.17, 0.09, "predicted score", words if scene.request else [])
    bars(scores, [x.score for x in experts], [_CHOSEN if x.legal else _LATE for x in experts])
    for n in range(0, len(rows), -(-len(rows) // NAMED)):
        name = f"{n + 1} {experts[n].model:.22}\n{experts[n].device:.24}"
        colour = _CHOSEN if n == scene.chosen else INK
        scores.text(-0.05, n, name, color=colour, fontsize=7, ha="right", va="center")
    deep = [[f"{hue(r)}{round(60 + 195 * r.progress):02x}" for r in x.running] for x in experts]
    running = queue(0.28, 0.2, "running", scene.running_capacity, deep)
    flat = [[_WAITING[state] for state in x.waiting] for x in experts]
    queue(0.495, 0.12, "waiting", scene.waiting_capacity, flat)
    memory = column(0.63, 0.075, "KV memory", [f"{x.memory:.0%}" for x in experts])
    memory.set_facecolor(_EMPTY)
    bars(memory, [x.memory for x in experts], _MEMORY)
    words = [f"now {_ms(x.now_s)}, done {_ms(x.latest_s)} ms" for x in experts]
    latency = column(0.72, 0.13, "latency per token", words)  # L / 4 to 4 L, logarithmic
    bars(latency, [0.5] * len(rows), f"{_GOOD}30")
    bars(latency, [0.5] * len(rows), f"{_LATE}30", 0.5)
    for n, x in enumerate(experts):
        marks = [(r.latency_s, "o", 4, hue(r)) for r in x.running if r.tokens]
        for seconds, mark, size, colour in (*marks, (x.latest_s, "|", 12, _CHOSEN)):
            share = 0.5 + 0.5 * math.log(max(seconds, 1e-9) / max(scene.limit_s, 1e-9), 4.0)
            latency.plot(min(max(share, 0.02), 0.98), n - 0.12, mark, color=colour, ms=size, mew=2)
        for i, r in enumerate([] if many or scene.running_capacity > 8 else x.running):
            running.text(i + 0.45, n, r.tokens or "prefill", fontsize=7, ha="center", va="center")
    words = [f"{x.on_time} on time, {x.late} late, {x.rejected} rej." for x in experts]
    sent = column(0.865, 0.12, "sent", words, max(x.sent + x.rejected for x in experts) or 1)
    ends = np.cumsum([(0, x.on_time, x.late, x.rejected) for x in experts], axis=1).T
    for k, colour in enumerate((_GOOD, _LATE, _MEMORY)):
        bars(sent, ends[k + 1] - ends[k], colour, ends[k])
    for place, colour, name in (
        (0.02, _GOOD, "within L so far, deeper: more of the predicted length"),
        (0.34, _LATE, "over L so far, cannot take it"),
        (0.52, _WAITING["o"], "waiting"),
        (0.58, _WAITING[">"], "on its way"),
        (0.66, _WAITING["p"], "preempted"),
        (0.735, _CHOSEN, f"the one before; mean of the last {RECENT} done"),
    ):
        figure.text(place, 0.03, f"■ {name}", color=colour, fontsize=7)
    return pixels(canvas)
