"""Show a policy at work: text on the terminal, a picture or an animation."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from servegym.baselines.registry import describe_system
from servegym.envs.families import family_of
from servegym.experiments.evaluation.evaluate import (
    DEFAULT_SEED,
    learner,
    make_envs,
    play_envs,
    policy_seed,
    resolve,
)
from servegym.experiments.evaluation.output import write_text
from servegym.experiments.evaluation.reporting import report_of

__all__ = ["render_episode"]


def render_episode(
    env_id: str,
    policy: str | None,
    steps: int,
    env_kwargs: Mapping[str, Any],
    *,
    seed: int | None = None,
    fps: int = 10,
    out: Path | None = None,
    echo: Callable[[str], object] = print,
) -> None:
    """Run one episode of at most ``steps`` decisions and show every state after a decision.

    Args:
        env_id: An id of one of the families.
        policy: Registered name or checkpoint path; the family's example by default.
        steps: Decisions to show.
        env_kwargs: Arguments of the environment; ``split`` is "eval" unless given.
        seed: Seed of the episode, by default the first one of an evaluation.
        fps: Frames a second of a GIF.
        out: ``.gif`` for all states, ``.png`` for the last one; None prints text.
        echo: Prints text.

    Raises:
        ValueError: If an argument, the policy's name or an environment's argument is not valid.
    """
    family = family_of(env_id)
    report = report_of(family)
    kwargs = {"split": "eval", **env_kwargs}
    mode = "ansi" if out is None else "rgb_array"
    envs = make_envs(family.env_id, 1, kwargs)
    system = describe_system(envs.unwrapped.problem, family=family.name)
    entered = resolve(policy or report.example_policy, system, family.name)
    envs.close()
    chosen = entered.policy
    envs = play_envs(family, entered, 1, kwargs, mode)
    frames: list[Any] = []
    try:
        first = DEFAULT_SEED if seed is None else seed
        observation, info = envs.reset(seed=[first])
        chosen.reset(1, seed=policy_seed(entered, first, 0))
        learn = learner(entered, envs)
        for step in range(steps):
            actions = chosen.act(observation, info.get("action_mask"))
            observation, reward, ended, _, info = envs.step(actions)
            learn(reward)
            if out is None:
                choice = report.describe_action(actions)
                echo(f"decision {step + 1}: {choice}, reward {float(reward[0]):.3f}")
                echo(str(envs.render()[0]).rstrip("\n") + "\n")
            elif out.suffix.lower() == ".gif" or ended[0] or step + 1 == steps:
                frames.append(envs.render()[0])
            if ended[0]:
                break
    finally:
        envs.close()
    if out is not None:
        write_text(out, _picture(frames, out.suffix.lower(), fps))
        echo(f"{len(frames)} frame{'s' if len(frames) > 1 else ''} written to {out}")


def _picture(frames: list[Any], suffix: str, fps: int) -> bytes:
    from PIL import Image

    images = [Image.fromarray(np.asarray(frame)) for frame in frames]
    stream = io.BytesIO()
    if suffix == ".png":
        images[-1].save(stream, format="PNG")
    else:
        images[0].save(
            stream,
            format="GIF",
            save_all=True,
            append_images=images[1:],
            duration=round(1000 / fps),
            loop=0,
        )
    return stream.getvalue()
