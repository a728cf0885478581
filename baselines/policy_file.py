"""Policies that a user's file defines: a Python file, or one that Stable-Baselines3 saved."""

from __future__ import annotations

import inspect
import io
import json
import os
import sys
import traceback
import types
import zipfile
from pathlib import Path
from typing import Any

from servegym.baselines.protocol import (
    BasePolicy,
    CallablePolicy,
    Policy,
    PredictPolicy,
)

SUFFIXES = (".py", ".zip")
"""Of the files that `policy_from_file` takes."""


class PolicyError(ValueError):
    """A policy from a file has failed; names the policy, the line and the error."""


def failed_in_file(error: BaseException, policy: Any) -> PolicyError | None:
    """An error of a file's code as one that names the line; None if that code had no part in it."""
    file = getattr(policy, "file", None)
    line = file and _line_of(error, file)
    if not line:
        return None
    where = f"policy {policy.name!r} failed at {file}:{line}"
    return PolicyError(f"{where}: {type(error).__name__}: {error}")


def _line_of(error: BaseException, file: Path) -> int | None:
    """The innermost line of a file that an error passed through, or None."""
    lines = [
        at
        for frame, at in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == str(file)
    ]
    return lines[-1] if lines else None


def _run(content: bytes, file: Path) -> dict[str, Any]:
    """The names that a file defines, as a module of their own."""
    module = types.ModuleType("policy_file")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # where dataclasses and pickle look for its classes
    exec(compile(content, str(file), "exec"), module.__dict__)
    return module.__dict__


def policy_from_file(
    path: str | os.PathLike[str], system: Any, content: bytes | None = None
) -> Policy:
    """The policy that a file defines.

    A Python file has ``Policy``, a subclass of `BasePolicy` that is made from the system's
    description and acts on batches, or ``act(observation, action_mask)``, which gets one decision
    and returns one action. In the place of ``act``, either may have ``predict``, see
    `PredictPolicy`. Beside a function, ``env_view`` says what it reads. A ``.zip`` is what
    ``model.save`` of Stable-Baselines3 or sb3-contrib wrote.

    The file is run, a ``.zip`` unpickled, which runs code that it holds: load only files that you
    trust. The policy's ``file`` lets `failed_in_file` name the line of what its code raises later.

    Args:
        path: A ``.py`` or ``.zip`` file.
        system: Description of the system, as for `make_policy`.
        content: What the file holds, where the file itself lies on another machine.

    Raises:
        ValueError: If the file has none of these or does not run, or Stable-Baselines3 is missing.
    """
    file = Path(path)
    if content is None and not file.is_file():
        raise ValueError(f"path={str(file)!r} is not a file")
    if file.suffix == ".zip":
        predict = _saved_by_sb3(file, file.read_bytes() if content is None else content).predict
        return PredictPolicy(predict, file.stem)
    try:
        names = _run(file.read_bytes() if content is None else content, file)
        policy = names["Policy"](system) if "Policy" in names else None
    except (Exception, SystemExit) as error:  # whatever the file raises
        kind, line = type(error).__name__, _line_of(error, file)
        where = f" (line {line})" if line else ""
        raise ValueError(f"{str(file)!r} cannot be used{where}: {kind}: {error}") from error
    view = names.get("env_view", "")
    if policy is not None:
        own_act = getattr(type(policy), "act", None) is not BasePolicy.act
        if not (own_act and callable(getattr(policy, "act", None))):
            if not callable(getattr(policy, "predict", None)):
                raise ValueError(f"{str(file)!r}: what Policy makes has no act() or predict()")
            view = getattr(policy, "env_view", view)
            policy = PredictPolicy(policy.predict, getattr(policy, "name", file.stem), view)
        if not isinstance(policy, Policy):
            raise ValueError(
                f"{str(file)!r}: Policy must derive from servegym.baselines.protocol.BasePolicy"
            )
        if policy.name == BasePolicy.name:
            policy.name = file.stem
    elif callable(names.get("act")):
        policy = CallablePolicy(names["act"], file.stem, batched=False, env_view=view)
    elif callable(names.get("predict")):
        policy = PredictPolicy(names["predict"], file.stem, view)
    else:
        raise ValueError(
            f"{str(file)!r} defines neither act(observation, action_mask), predict(observation) "
            "nor a class Policy"
        )
    policy.file = file  # pyright: ignore[reportAttributeAccessIssue]
    return policy


def _saved_by_sb3(file: Path, content: bytes) -> Any:
    """The policy of a model that Stable-Baselines3 or sb3-contrib saved, without its algorithm."""
    parts = ("policy_class", "observation_space", "action_space", "policy_kwargs")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            weights, saved = archive.read("policy.pth"), json.loads(archive.read("data"))
        saved = {name: saved[name] for name in parts}
        library = saved["policy_class"]["__module__"].partition(".")[0]
    except Exception as error:  # whatever a damaged archive raises
        raise ValueError(
            f"{str(file)!r} is no model that Stable-Baselines3 saved by model.save: {error}"
        ) from None
    try:
        import torch
        from stable_baselines3.common.save_util import json_to_data

        if library == "sb3_contrib":
            import sb3_contrib  # noqa: F401
    except ImportError as error:
        needed, packages = str(error.name).partition(".")[0], "stable-baselines3 sb3-contrib"
        raise ValueError(f"{str(file)!r} needs {needed}: pip install {packages}") from None
    torch.set_num_threads(1)
    try:
        loaded = json_to_data(json.dumps(saved))
        make, more = loaded["policy_class"], dict(loaded["policy_kwargs"])
        if "lr_schedule" in inspect.signature(make).parameters:
            more["lr_schedule"] = lambda _: 0.0
        model = make(loaded["observation_space"], loaded["action_space"], **more)
        model.load_state_dict(torch.load(io.BytesIO(weights), "cpu", weights_only=True))
        model.predict(model.observation_space.sample())  # the first call takes longest
    except Exception as error:  # whatever unpickling and its own code raise
        kind = type(error).__name__
        raise ValueError(f"{str(file)!r} cannot be used: {kind}: {error}") from error
    return model
