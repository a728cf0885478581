"""Policies that a user's Python file defines."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from servegym.baselines.protocol import BasePolicy, CallablePolicy, Observation, Policy


class PolicyError(ValueError):
    """A policy from a file has failed; names the policy, the line and the error."""


class FilePolicy(BasePolicy):
    """A policy from a file: an error of its code is raised as `PolicyError`, with the line.

    Args:
        policy: What the file defines.
        file: The file.
    """

    def __init__(self, policy: Policy, file: Path) -> None:
        self.policy, self.file, self.name = policy, file, policy.name
        self.clairvoyant, self.needs_env = policy.clairvoyant, policy.needs_env
        self.env_view, self.env_kwargs = policy.env_view, policy.env_kwargs
        self.needs_outcomes = policy.needs_outcomes

    @contextmanager
    def _locating_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            line = _line_of(error, self.file)
            if line is None:  # not the file's doing
                raise
            where = f"policy {self.name!r} failed at {self.file}:{line}"
            raise PolicyError(f"{where}: {type(error).__name__}: {error}") from error

    def reset(self, num_envs: int, seed: int | None = None) -> None:
        """See `Policy.reset`."""
        with self._locating_errors():
            self._size(num_envs, seed)
            self.policy.reset(num_envs, seed)

    def episode_start(self, mask: Any) -> None:
        """See `Policy.episode_start`."""
        with self._locating_errors():
            self.policy.episode_start(mask)

    def act(self, observation: Observation, action_mask: Any) -> Any:
        """See `Policy.act`."""
        with self._locating_errors():
            return self.policy.act(observation, action_mask)

    def feedback(self, reward: Any) -> None:
        """See `Policy.feedback`."""
        with self._locating_errors():
            self.policy.feedback(reward)

    def outcomes(self, ended: Any) -> None:
        """See `Policy.outcomes`."""
        with self._locating_errors():
            self.policy.outcomes(ended)

    def bind(self, env: Any) -> None:
        """See `Policy.bind`."""
        with self._locating_errors():
            self.policy.bind(env)


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
    """The policy that a Python file defines.

    The file has ``Policy``, a subclass of `BasePolicy` that is made from the system's description
    and acts on batches, or ``act(observation, action_mask)``, which gets one decision and returns
    one action. The file is run: load only files that you trust. What its code raises later is
    raised as `PolicyError`.

    Args:
        path: A ``.py`` file.
        system: Description of the system, as for `make_policy`.
        content: What the file holds, where the file itself lies on another machine.

    Raises:
        ValueError: If the file has neither, or does not run.
    """
    file = Path(path)
    if content is None and not file.is_file():
        raise ValueError(f"path={str(file)!r} is not a file")
    try:
        names = runpy.run_path(str(file)) if content is None else _run(content, file)
        policy = names["Policy"](system) if "Policy" in names else None
    except (Exception, SystemExit) as error:  # whatever the file raises
        kind, line = type(error).__name__, _line_of(error, file)
        where = f" (line {line})" if line else ""
        raise ValueError(f"{str(file)!r} cannot be used{where}: {kind}: {error}") from error
    if policy is not None:
        own_act = getattr(type(policy), "act", None) is not BasePolicy.act
        if not (own_act and callable(getattr(policy, "act", None))):
            raise ValueError(f"{str(file)!r}: what Policy makes has no act()")
        if not isinstance(policy, Policy):
            raise ValueError(
                f"{str(file)!r}: Policy must derive from servegym.baselines.protocol.BasePolicy"
            )
        if policy.name == BasePolicy.name:
            policy.name = file.stem
    elif callable(names.get("act")):
        policy = CallablePolicy(names["act"], file.stem, batched=False)
    else:
        raise ValueError(
            f"{str(file)!r} defines neither act(observation, action_mask) nor a class Policy"
        )
    return FilePolicy(policy, file)
