"""Policies from outside, each in a process of its own that is asked for every decision.

The environment stays in the evaluator's process. A guest's gets copies: the description of the
system, observations, masks and rewards; its answers are JSON and never unpickled. So what a guest
does to modules, random numbers, clocks or arrays does not reach the world that it is measured in,
and one that hangs, ends or answers nonsense is an error that names it.

This is no sandbox: nothing keeps code from what its user may do to files, memory or the network.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.policy_file import PolicyError, policy_from_file
from servegym.baselines.protocol import Observation, Policy
from servegym.experiments.evaluation.play import GUEST, EvaluatedPolicy

TIME_LIMIT_S = 60.0
"""Seconds that a guest may take for one answer: to be made, or to decide for a batch."""

SLOW_S = 0.05
"""Seconds of a decision from which on its request waits for it, where requests wait for routers."""

_START = "from servegym.experiments.evaluation.guest import serve; serve({})"


class GuestPolicy(EvaluatedPolicy):
    """A policy whose code runs in another process.

    A process serves one batch of episodes: every further `reset` ends it and makes the policy anew
    in a fresh one, so that what it remembered is gone. Pickled, the policy leaves its process
    behind and starts another where it is used next.

    The policy is a file as `policy_from_file` takes it, with the description of the system,
    or a policy that can be pickled; one answer may take ``time_limit_s``.

    Raises:
        PolicyError: If the policy cannot be made, or cannot be pickled.
    """

    source = GUEST
    side_by_side = 1  # its time is that of single decisions
    _process: subprocess.Popen[bytes] | None = None
    _finalizer: Callable[[], object] = staticmethod(lambda: None)
    _batch: Any = None

    def __init__(
        self, policy: Path | Policy, system: Any, time_limit_s: float = TIME_LIMIT_S
    ) -> None:
        if not (math.isfinite(time_limit_s) and time_limit_s > 0):
            raise ValueError(f"time_limit_s is {time_limit_s}; allowed are seconds above 0")
        self.time_limit_s = float(time_limit_s)
        self._times_s: list[float] = []
        self._delays_s: list[float] = []
        if isinstance(policy, Path):
            self.name = str(policy)
            made_from = {"path": policy, "system": system, "content": policy.read_bytes()}
        else:
            self.name, made_from = str(policy.name), policy
        try:
            self._pickled = _pickle(made_from)
        except Exception as error:  # whatever the policy's own pickling raises
            raise PolicyError(
                f"policy {self.name!r} cannot be sent to a process of its own "
                f"({type(error).__name__}: {error}); in_process=True runs it in this one"
            ) from error
        vars(self).update(self._start())
        if self.needs_env:
            raise PolicyError(
                f"policy {self.name!r} has needs_env, but the environment is in another process; "
                "in_process=True (--in-process) runs it in this one, marked as clairvoyant"
            )

    def _start(self) -> dict[str, Any]:
        """Start the process and have the policy made; what it says of itself."""
        self._pipe, child = Pipe()
        self._used, self._news = False, (None, None)
        with child:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START.format(child.fileno())],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a guest prints is no part of the results
                pass_fds=[child.fileno()],
                start_new_session=True,
            )
        self._finalizer = weakref.finalize(self, _end, self._process, self._pipe)
        return self._ask("make", self._pickled)

    def bind(self, env: Any) -> None:
        """Let its requests wait for slow decisions, where requests wait for their router."""
        self._delay_s = env.unwrapped.problem.arguments.get("router_delay_s")
        self._batch = None if self._delay_s is None else env.unwrapped.batch

    def reset(self, num_envs: int, seed: int | None = None) -> None:
        """See `Policy.reset`."""
        if self._used or self._process is None:
            self.close()
            self._start()
        self._used, self._times_s, self._delays_s = True, [], []
        self._ask("reset", (num_envs, seed))

    def act(self, observation: Observation, action_mask: Any) -> Any:
        """See `Policy.act`; rewards and outcomes reach the guest with the next decision."""
        begin = time.perf_counter()
        answer = self._ask("act", (*self._news, observation, action_mask))
        seconds = time.perf_counter() - begin
        self._times_s.append(seconds)
        self._news = None, None
        if self._batch is not None:
            self._delays_s.append(self._delay_s + (seconds if seconds >= SLOW_S else 0.0))
            self._batch.config["router_delay_s"] = self._delays_s[-1]
        try:
            actions = {name: np.array(part, kind) for name, (kind, part) in answer.items()}
        except (TypeError, ValueError) as error:
            raise self._failed(f"gave a wrong answer: {error}") from None
        return actions[""] if list(actions) == [""] else actions

    def feedback(self, reward: NDArray[np.float64]) -> None:
        """See `Policy.feedback`."""
        self._news = self._news[0], reward

    def outcomes(self, ended: NDArray[Any]) -> None:
        """See `BasePolicy.outcomes`."""
        self._news = ended, None

    def times(self) -> dict[str, float]:
        """Mean and longest seconds of its decisions, with the way to the other process."""
        times = {
            "decision_s": float(np.mean(self._times_s)),
            "slowest_decision_s": max(self._times_s),
        }
        if self._delays_s:
            times["mean_routing_s"] = float(np.mean(self._delays_s))
        return times

    def close(self) -> None:
        """End the process; the next `reset` starts another."""
        self._process = None
        self._finalizer()

    def _ask(self, request: str, argument: Any) -> dict[str, Any]:
        """The answer to a request."""
        process: Any = self._process
        try:
            self._pipe.send((request, argument))
            if not self._pipe.poll(self.time_limit_s):
                limit = f"time_limit_s={self.time_limit_s:g} s"
                raise self._failed(f"took more than {limit} for one answer")
            answer = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            self.close()
            status = process.returncode
            raise self._failed(f"has ended its process (exit status {status})") from None
        if "error" in answer:
            self.close()
            raise PolicyError(answer["error"])
        return answer

    def _failed(self, how: str) -> PolicyError:
        self.close()
        return PolicyError(f"policy {self.name!r} {how}")

    def __getstate__(self) -> dict[str, Any]:
        left = ("_process", "_pipe", "_finalizer", "_batch")
        return {key: value for key, value in vars(self).items() if key not in left}


def _pickle(made_from: Any) -> bytes:
    """A policy, with the code of a module that another machine might not find."""
    import cloudpickle

    code = getattr(made_from, "_fn", type(made_from))
    module = sys.modules.get(getattr(code, "__module__", None) or "")
    file = getattr(module, "__file__", None) or "site-packages"
    if module is None or "site-packages" in file or module.__name__.startswith("servegym."):
        return cloudpickle.dumps(made_from)
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(made_from)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _end(process: subprocess.Popen[bytes], pipe: Connection) -> None:
    """End a guest's process and those of its group."""
    with suppress(PermissionError, ProcessLookupError):  # nothing of it is left
        os.killpg(process.pid, signal.SIGKILL)
    pipe.close()
    process.wait()


# ------------------------------------------------------------------------- in the guest's process


def serve(descriptor: int) -> None:
    """Answer the evaluator's requests until it closes the pipe."""
    pipe, policy = Connection(descriptor), None
    while True:
        try:
            request, argument = pipe.recv()
        except EOFError:
            return
        try:
            if request == "make":
                made_from = pickle.loads(argument)
                is_file = isinstance(made_from, dict)
                policy = policy_from_file(**made_from) if is_file else made_from
            answer = json.dumps(_answer(policy, request, argument))
        except (Exception, SystemExit) as error:
            if not isinstance(error, ValueError):
                traceback.print_exc()
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            text, name = f"{kind}{error}", str(getattr(policy, "name", ""))
            if name not in text:
                text = f"policy {name!r} failed: {text}"
            answer = json.dumps({"error": text})
        pipe.send_bytes(answer.encode())


def _answer(policy: Any, request: str, argument: Any) -> dict[str, Any]:
    """What the policy says of itself, or the type and values of each part of its actions."""
    if request == "make":
        names = ("name", "clairvoyant", "env_view", "needs_env", "needs_outcomes")
        return {
            **{name: getattr(policy, name, False) for name in names},
            "env_kwargs": dict(policy.env_kwargs),
            "observation_shapes": dict(policy.observation_shapes),
        }
    if request == "reset":
        policy.reset(*argument)
        return {}
    ended, reward, *inputs = argument
    if ended is not None:
        policy.outcomes(ended)
    if reward is not None:
        policy.feedback(reward)
    actions = policy.act(*inputs)
    parts = actions if isinstance(actions, Mapping) else {"": actions}
    arrays = {str(name): np.asarray(part) for name, part in parts.items()}
    return {name: (part.dtype.str, part.tolist()) for name, part in arrays.items()}
