"""Show a policy at work: text on the terminal, a picture, an animation or a video."""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from servegym._checks import whole
from servegym._command_line import add_settings, parse_settings
from servegym.envs.families import family_of
from servegym.experiments.cli import command_parser
from servegym.experiments.evaluation.output import check_writable, write_text
from servegym.experiments.evaluation.play import DEFAULT_SEED, open_envs, play, problem_of
from servegym.experiments.evaluation.reporting import report_of
from servegym.experiments.evaluation.resolve import resolve
from servegym.experiments.runs import read_args

STEPS = 100


def render_episode(
    env_id: str,
    policy: str | None,
    steps: int | None,
    env_kwargs: Mapping[str, Any],
    *,
    seed: int | None = None,
    fps: int = 10,
    out: Path | None = None,
) -> None:
    """Run one episode of at most ``steps`` decisions and show every state after a decision.

    ``policy`` is a name, or the path of a checkpoint or of a run's folder, by default the family's
    example; ``steps`` are by default `STEPS`, before a picture `Report.pictured`. ``out`` is a
    ``.gif`` or ``.mp4`` for all states, a ``.png`` for the last one before the end; None: text.
    """
    if out is not None and out.suffix.lower() == ".mp4":
        importlib.import_module("moviepy")  # before any work
    family = family_of(env_id)
    report = report_of(family)
    kwargs = {"split": "eval", **env_kwargs}
    picture = out is not None and out.suffix.lower() == ".png"
    if steps is None:
        steps = report.pictured if picture else STEPS
    problem, view = problem_of(family.env_id, kwargs), family.view_of(env_id)
    resolved = resolve(policy or report.example_policy, problem, family, view=view)
    envs = open_envs(family, resolved, 1, kwargs, "ansi" if out is None else "rgb_array")
    frames: list[Any] = []
    state: Any = None
    if out is not None:
        print(f"{resolved.name} plays {steps} decisions at most ...")
    try:
        episode = play(envs, resolved, DEFAULT_SEED if seed is None else seed)
        for number, step in enumerate(islice(episode, steps), 1):
            if out is None:
                choice = report.describe_action(step.actions)
                print(f"decision {number}: {choice}, reward {float(step.reward[0]):.3f}")
                print(str(envs.render()[0]).rstrip("\n") + "\n")
                continue
            if picture and step.ended[0] and state is not None:
                envs.unwrapped.restore_state(0, state)  # in the end there is nothing to see
            if not picture or step.ended[0] or number == steps:
                frames.append(envs.render()[0])
            else:
                state = envs.unwrapped.clone_state(0)
    finally:
        envs.close()
    if out is not None:
        if out.suffix.lower() == ".mp4":
            _write_video(frames, fps, out)
        else:
            write_text(out, _picture(frames, out.suffix.lower(), fps))
        print(f"{len(frames)} frame{'s' if len(frames) > 1 else ''} written to {out}")


def _picture(frames: list[Any], suffix: str, fps: int) -> bytes:
    from PIL import Image

    images = [Image.fromarray(np.asarray(frame)) for frame in frames]
    stream = io.BytesIO()
    if suffix == ".png":
        images[-1].save(stream, format="PNG")
    else:  # the same colours in all frames, so that only what has changed takes room in the file
        sheet = Image.fromarray(np.concatenate(frames[:: len(frames) // 8 + 1]))
        counted: Any = sheet.getcolors(1 << 24)
        frequent = [colour for _, colour in sorted(counted, reverse=True)[:256]]
        palette = Image.new("P", (1, 1))
        palette.putpalette(np.array(frequent, np.uint8).tobytes())
        images = [one.quantize(palette=palette, dither=Image.Dither.NONE) for one in images]
        images[0].save(
            stream,
            format="GIF",
            save_all=True,
            append_images=images[1:],
            duration=round(1000 / fps),
            loop=0,
        )
    return stream.getvalue()


def _write_video(frames: list[Any], fps: int, out: Path) -> None:
    """H.264 with an even number of rows and columns, which every player shows."""
    high, wide = (size // 2 * 2 for size in frames[0].shape[:2])
    moviepy: Any = importlib.import_module("moviepy")
    clip = moviepy.ImageSequenceClip([frame[:high, :wide] for frame in frames], fps=fps)
    clip.write_videofile(str(out), logger=None, pixel_format="yuv420p")


def main(argv: Sequence[str]) -> None:
    """Command line of ``servegym render``."""
    parser = command_parser("render")
    add = parser.add_argument
    add("env_id", nargs="?", metavar="ENV_ID", help="see `servegym list`; by default the run's")
    add("--policy", help="by name, or the path of a checkpoint or of a run's folder")
    add("--seed", type=int, help="seed of the episode")
    add("--steps", type=int, help="decisions to show (100; before a PNG as many as fill it)")
    add("--fps", type=int, default=10, help="frames a second of a GIF or MP4 (%(default)s)")
    add_settings(parser)
    text = "FILE.gif or .mp4 for all steps, FILE.png for the last (a run's GIF, else text)"
    add("--out", type=Path, metavar="FILE", help=text)
    options = parser.parse_args(argv)
    whole("seed", options.seed or 0, 0, 1 << 62)
    whole("steps", 1 if options.steps is None else options.steps, 1)
    whole("fps", options.fps, 1)
    env_id, out, settings = options.env_id, options.out, parse_settings(options.set)
    policy = options.policy
    run = Path(policy) if policy is not None and Path(policy).is_dir() else None
    if run is not None and out is None:
        out = run / f"{run.resolve().name}.gif"
    if out is not None:
        check_writable(out, (".gif", ".png", ".mp4"))
    if env_id is None:
        if run is None:
            raise ValueError("ENV_ID is missing: it is found in the folder of a run alone")
        trained = read_args(run)
        env_id, settings = trained["env_id"], trained["env_kwargs"] | settings
    seed, fps = options.seed, options.fps
    render_episode(env_id, policy, options.steps, settings, seed=seed, fps=fps, out=out)
