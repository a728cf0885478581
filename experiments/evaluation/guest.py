"""Policies from outside, each in a process of its own that is asked for every decision.

It gets copies, and its answers, JSON of a bounded length, are checked field by field: what it does
to modules, clocks or arrays does not reach the world that it is measured in. This is no sandbox:
nothing keeps code from what its user may do to files, memory or the network.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.spaces import Dict
from numpy.typing import NDArray

from servegym.baselines.policy_file import PolicyError, failed_in_file, policy_from_file
from servegym.baselines.protocol import Observation, Policy
from servegym.experiments.evaluation.play import GUEST, EvaluatedPolicy


@dataclass(frozen=True)
class Guests:
    """How policies run whose code is not the package's.

    Attributes:
        time_limit_s: Seconds that one may take for one answer: to be made, or to decide for a
            batch.
        in_process: Run them in the evaluator's process, where no time is limited: for policies that
            you trust or that take the environment.

    Raises:
        ValueError: If the seconds are not above 0 and at most 1e6.
    """

    time_limit_s: float = 60.0
    in_process: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.time_limit_s <= 1e6:
            raise ValueError(
                f"time_limit_s is {self.time_limit_s}; allowed are seconds above 0, to 1e6"
            )


SLOW_S = 0.05
"""Seconds of a decision from which on its request waits for it, where requests wait for routers."""

_LENGTH = struct.Struct("!Q")  # before every message
_LONGEST, _OF_A_NUMBER = 1 << 16, 32  # bytes of an answer, and more for each number of an action
_SAID: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("name", "env_view"), lambda said: type(said) is str),
    **dict.fromkeys(
        ("clairvoyant", "needs_env", "needs_outcomes"), lambda said: type(said) is bool
    ),
    "env_kwargs": lambda said: (
        type(said) is dict and all(isinstance(v, str | float | int) for v in said.values())
    ),
    "observation_shapes": lambda said: (
        type(said) is dict
        and all(type(v) is list and {*map(type, v)} <= {int} for v in said.values())
    ),
}
"""What a policy says of itself, and whether that is of the right type."""

_START = "from servegym.experiments.evaluation.guest import serve; serve({})"


APART, IN_PROCESS = Guests(), Guests(in_process=True)


class GuestPolicy(EvaluatedPolicy):
    """A policy whose code runs in another process.

    A process serves one batch of episodes: every further `reset` ends it and makes the policy anew
    in a fresh one, so that what it remembered is gone. Pickled, the policy leaves its process
    behind and starts another where it is used next.

    The policy is a file as `policy_from_file` takes it, with the description of the system,
    or a policy that can be pickled.

    Raises:
        PolicyError: If the policy cannot be made, or cannot be pickled.
    """

    source = GUEST
    side_by_side = 1  # its time is that of single decisions
    _process: subprocess.Popen[bytes] | None = None
    _finalizer: Callable[[], object] = staticmethod(lambda: None)
    _batch: Any = None
    _parts: Mapping[str, Any] = {}
    _compiled: str = ""

    def __init__(
        self, policy: Path | Policy, system: Any, time_limit_s: float = APART.time_limit_s
    ) -> None:
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
                f"({type(error).__name__}: {error}); guests=IN_PROCESS runs it here"
            ) from error
        self._take(self._start())
        if self.needs_env:
            raise PolicyError(
                f"policy {self.name!r} has needs_env, but the environment is in another process; "
                "--in-process (guests=IN_PROCESS) runs it in this one, marked as clairvoyant"
            )

    def _start(self) -> dict[str, Any]:
        """Start the process and have the policy made; what it says of itself."""
        if not self._compiled:
            self._compiled = _folder_of_compiled_code()
            weakref.finalize(self, shutil.rmtree, self._compiled, ignore_errors=True)
        self._pipe, child = socket.socketpair()
        self._used, self._news = False, (None, None)
        paths = {"PYTHONPATH": os.pathsep.join(sys.path), "NUMBA_CACHE_DIR": self._compiled}
        with child:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START.format(child.fileno())],
                env=os.environ | paths,
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a guest prints is no part of the results
                pass_fds=[child.fileno()],
                start_new_session=True,
            )
        self._finalizer = weakref.finalize(self, _end, self._process, self._pipe)
        return self._ask("make", self._pickled)

    def _take(self, said: Mapping[str, Any]) -> None:
        """Take the fields of `_SAID`, all checked, and nothing else: ``source`` is not its to say.

        PolicyError if a field is missing, unknown or of another type.
        """
        for field in {**said, **_SAID}:
            if field not in _SAID or not _SAID[field](said.get(field)):
                wrong = f"says of itself {field:.60}={said.get(field)!r:.100}"
                raise self._failed(f"{wrong}; it must say {', '.join(_SAID)}, of their types")
        for field in _SAID:
            setattr(self, field, said[field])

    def bind(self, env: Any) -> None:
        """Learn what an action is, and let requests wait for slow decisions where they can."""
        space = env.action_space
        self._parts = space.spaces if isinstance(space, Dict) else {"": space}
        self._delay_s: Any = dict(env.unwrapped.problem.arguments).get("router_delay_s")
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
        numbers = sum(math.prod(part.shape) for part in self._parts.values())
        asked = (*self._news, observation, action_mask)
        answer = self._ask("act", asked, _LONGEST + _OF_A_NUMBER * numbers)
        seconds = time.perf_counter() - begin
        self._times_s.append(seconds)
        self._news = None, None
        if self._batch is not None:
            self._delays_s.append(self._delay_s + (seconds if seconds >= SLOW_S else 0.0))
            self._batch.config["router_delay_s"] = self._delays_s[-1]
        try:
            if set(answer) != set(self._parts):
                raise ValueError(f"the action has the parts {list(answer)!r:.200}")
            actions = {name: _array(answer[name], part) for name, part in self._parts.items()}
        except (TypeError, ValueError, OverflowError) as error:
            needed = ", ".join(f"{name} {part}".strip() for name, part in self._parts.items())
            raise self._failed(f"gave a wrong answer: {error}; needed is {needed:.500}") from None
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

    def _ask(self, request: str, argument: Any, longest: int = _LONGEST) -> dict[str, Any]:
        """The answer to a request, of at most so many bytes."""
        process: Any = self._process
        deadline = time.monotonic() + self.time_limit_s
        try:
            self._pipe.settimeout(self.time_limit_s)  # of all that is sent
            _send(self._pipe, pickle.dumps((request, argument)))
            answer = json.loads(_receive(self._pipe, longest, deadline))
            if not isinstance(answer, dict):
                raise ValueError(f"it is a {type(answer).__name__}")
        except TimeoutError:
            limit = f"time_limit_s={self.time_limit_s:g} s"
            raise self._failed(f"took more than {limit} for one answer") from None
        except (EOFError, OSError):
            self.close()
            status = process.returncode
            raise self._failed(f"has ended its process (exit status {status})") from None
        except (ValueError, RecursionError) as error:
            raise self._failed(f"gave a wrong answer: {error}") from None
        if "error" in answer:
            self.close()
            raise PolicyError(f"{answer['error']}")
        return answer

    def _failed(self, how: str) -> PolicyError:
        self.close()
        return PolicyError(f"policy {self.name!r} {how}")

    def __getstate__(self) -> dict[str, Any]:
        left = ("_process", "_pipe", "_finalizer", "_batch", "_parts", "_compiled")
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


def _folder_of_compiled_code() -> str:
    """A folder for what a guest compiles, with links to what has been compiled for the package."""
    from numba.core.caching import UserProvidedCacheLocator  # guests start faster without

    folder = tempfile.mkdtemp(prefix="servegym-guest-")
    shared = os.environ.get("NUMBA_CACHE_DIR")
    for file in Path(shared or Path(__file__).parents[2]).rglob("*.nb[ci]"):
        source = str(file.parents[1] / "x.py")  # beside the module's __pycache__
        name = UserProvidedCacheLocator.get_suitable_cache_subpath(source)
        copy = Path(folder, file.parent.name if shared else name)
        copy.mkdir(exist_ok=True)
        (copy / file.name).symlink_to(
            file.absolute()
        )  # numba replaces files, and never writes into them
    return folder


def _array(said: Any, space: Any) -> NDArray[Any]:
    """A part of an action from its shape and its numbers, integers or floats by the space.

    TypeError, ValueError or OverflowError if it is no such part.
    """
    shape, numbers = said
    whole = np.issubdtype(space.dtype, np.integer)
    kinds = {*map(type, numbers)}
    if not kinds <= ({int} if whole else {int, float}):
        raise ValueError(f"numbers are {', '.join(kind.__name__ for kind in kinds)}")
    return np.array(numbers, np.int64 if whole else np.float64).reshape(shape)


def _send(pipe: socket.socket, content: bytes) -> None:
    pipe.sendall(_LENGTH.pack(len(content)) + content)


def _receive(pipe: socket.socket, longest: float = math.inf, deadline: float = math.inf) -> bytes:
    """A message of at most ``longest`` bytes, whole before a ``deadline`` of `time.monotonic`.

    ValueError: it is longer, none is read. TimeoutError: not whole by then. EOFError: closed.
    """
    (length,) = _LENGTH.unpack(_read(pipe, _LENGTH.size, deadline))
    if length > longest:
        raise ValueError(f"it is {length} bytes long; allowed are {longest}")
    return _read(pipe, length, deadline)


def _read(pipe: socket.socket, length: int, deadline: float) -> bytes:
    content = bytearray()
    while len(content) < length:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        pipe.settimeout(None if math.isinf(left) else left)
        part = pipe.recv(min(length - len(content), _LONGEST))
        if not part:
            raise EOFError
        content += part
    return bytes(content)


def _end(process: subprocess.Popen[bytes], pipe: socket.socket) -> None:
    """End a guest's process and those of its group."""
    with suppress(PermissionError, ProcessLookupError):  # nothing of it is left
        os.killpg(process.pid, signal.SIGKILL)
    pipe.close()
    process.wait()


# ------------------------------------------------------------------------- in the guest's process


def serve(descriptor: int) -> None:
    """Answer the evaluator's requests until it closes the pipe, which ends the process's group."""
    pipe, policy = socket.socket(fileno=descriptor), None
    compiled = os.environ["NUMBA_CACHE_DIR"]
    threading.Thread(target=_end_with, args=[descriptor, compiled], daemon=True).start()
    with suppress(EOFError, OSError):  # the evaluator is gone
        while True:
            request, argument = pickle.loads(_receive(pipe))
            try:
                if request == "make":
                    made_from = pickle.loads(argument)
                    is_file = isinstance(made_from, dict)
                    policy = policy_from_file(**made_from) if is_file else made_from
                answer = json.dumps(_answer(policy, request, argument))
            except (Exception, SystemExit) as raised:
                error = failed_in_file(raised, policy) or raised
                if not isinstance(error, ValueError):
                    traceback.print_exc()
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                text, name = f"{kind}{error}", str(getattr(policy, "name", ""))
                if name not in text:
                    text = f"policy {name!r} failed: {text}"
                answer = json.dumps({"error": text[:4000]})
            _send(pipe, answer.encode())
    threading.Event().wait()  # for the thread to end the process


def _end_with(descriptor: int, compiled: str) -> None:
    """End this process and its group when the evaluator is gone, whatever the policy does."""
    gone = select.poll()
    gone.register(descriptor, 0)  # a closed end alone
    gone.poll()
    shutil.rmtree(compiled, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _answer(policy: Any, request: str, argument: Any) -> dict[str, Any]:
    """What the policy says of itself, or the shape and numbers of each part of its actions."""
    if request == "make":
        flags = ("clairvoyant", "needs_env", "needs_outcomes")
        return {
            "name": policy.name,
            "env_view": policy.env_view,
            **{name: bool(getattr(policy, name, False)) for name in flags},
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
    for name, part in arrays.items():
        arrays[name] = part.astype(np.int8) if part.dtype == bool else part
    return {name: (part.shape, part.ravel().tolist()) for name, part in arrays.items()}
