"""Policies from outside in a process of their own, which is asked for every decision.

The judge's process owns the environment. A guest's process gets copies: the description of the
system, observations, masks and rewards. Its answers are read as JSON and plain arrays, and never
unpickled. So what a guest does to modules, random numbers, clocks or arrays does not reach the
world that it is measured in, and one that hangs, ends, takes too much memory or answers nonsense is
an error that names it.

This is no sandbox: a guest may read and write what its user may, the judge's memory included, reach
the network and see the machine's load, unless the judge runs in a container without a network, as
another user.

The judge kills a guest's process group when it has measured, fails or ends. If the judge itself is
killed, a thread of the guest's process sees the pipe close and kills the group. What a guest takes
out of the group lives on, and all of it does if a guest stops that thread and the judge is killed.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.policy_file import PolicyError, policy_from_file
from servegym.baselines.protocol import BasePolicy, Observation, Policy

__all__ = ["MEMORY_LIMIT", "TIME_LIMIT_S", "GuestPolicy"]

TIME_LIMIT_S = 60.0
"""Seconds that a guest may take for one answer: to be made, or to decide for a batch."""

MEMORY_LIMIT = 16 << 30
"""Bytes of writable memory that a guest's process may take."""

_START = (
    f"import resource; resource.setrlimit(resource.RLIMIT_DATA, ({MEMORY_LIMIT}, {MEMORY_LIMIT})); "
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
    "from servegym.experiments.evaluation.guest import serve; serve(int(sys.argv[1]))"
)
_LENGTH = 8
_LARGEST_ANSWER = 1 << 26
_FIELDS = {
    "name": str,
    "clairvoyant": bool,
    "env_view": str,
    "needs_env": bool,
    "needs_outcomes": bool,
    "env_kwargs": dict,
}


class GuestPolicy(BasePolicy):
    """A policy whose code runs in another process.

    A process serves one batch of episodes: every further `reset` ends it and makes the policy anew
    in a fresh one, so that what it kept of the episodes before is gone. Pickled, the policy leaves
    its process behind and starts another where it is used next.

    Attributes:
        taken_s: Seconds of each `act` since the last `reset`, with the way to the other process.
        folders: Entries of the path that a guest's own modules may lie in: the current folder and
            the file's.

    Args:
        source: A ``.py`` file as `policy_from_file` takes it, or a policy that can be pickled.
        system: Description of the system, for a file.
        time_limit_s: Seconds that one answer may take.

    Raises:
        PolicyError: If the policy cannot be made, or cannot be pickled.
    """

    _process: subprocess.Popen[bytes] | None = None
    _finalizer: Callable[[], int | None] = staticmethod(lambda: None)

    def __init__(
        self, source: Path | Policy, system: Any, time_limit_s: float = TIME_LIMIT_S
    ) -> None:
        if not (math.isfinite(time_limit_s) and time_limit_s > 0):
            raise ValueError(f"time_limit_s is {time_limit_s}; allowed are seconds above 0")
        places = [Path.cwd()]
        if isinstance(source, Path):
            self.name = str(source)
            content = {"path": source, "system": system, "content": source.read_bytes()}
            places.append(source.resolve().parent)
        else:
            self.name, content = str(source.name), {"policy": source}
        try:
            self._source = _pickled(content, source)
        except Exception as error:  # whatever the policy's own pickling raises
            raise PolicyError(
                f"policy {self.name!r} cannot be sent to a process of its own "
                f"({type(error).__name__}: {error}); in_process=True runs it in this one"
            ) from error
        self.time_limit_s = float(time_limit_s)
        self.taken_s: list[float] = []
        self.folders = [entry for entry in sys.path if Path(entry).resolve() in places]
        self._start()

    def _start(self) -> None:
        """Start the process and have the policy made."""
        ours, theirs = socket.socketpair()
        path = json.dumps(list(dict.fromkeys([*self.folders, *map(str, sys.path)])))
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, str(theirs.fileno()), path],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a guest prints is no part of the results
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._socket, self._process = ours, process
        self._used = False
        self._reward: NDArray[np.float64] | None = None
        self._ended: NDArray[Any] | None = None
        self._finalizer = weakref.finalize(self, _end, process, ours)
        found = self._ask("make", self._source)[0].get("policy")
        for field, kind in _FIELDS.items():
            value = found.get(field) if isinstance(found, dict) else None
            if type(value) is not kind:
                raise self._refused(f"its {field} must be a {kind.__name__}, got {value!r:.80}")
            setattr(self, field, value)

    def reset(self, num_envs: int, seed: int | None = None) -> None:
        """See `Policy.reset`."""
        self._size(num_envs, seed)
        if self._used or self._process is None:
            self.close()
            self._start()
        self._used, self._reward, self._ended = True, None, None
        self.taken_s = []
        self._ask("reset", (num_envs, seed))

    def act(self, observation: Observation, action_mask: Any) -> Any:
        """See `Policy.act`; rewards and outcomes reach the guest with the next decision."""
        told = self._ended, self._reward
        self._ended = self._reward = None
        begin = time.perf_counter()
        header, body = self._ask("act", (*told, observation, action_mask))
        self.taken_s.append(time.perf_counter() - begin)
        arrays = self._arrays(header.get("arrays"), body)
        return arrays[""] if list(arrays) == [""] else arrays

    def feedback(self, reward: NDArray[np.float64]) -> None:
        """See `Policy.feedback`."""
        self._reward = reward

    def outcomes(self, ended: NDArray[Any]) -> None:
        """See `BasePolicy.outcomes`."""
        self._ended = ended

    def close(self) -> int | None:
        """End the process, and return its exit status; the next `reset` starts another."""
        self._process = None
        return self._finalizer()

    def _ask(self, request: str, argument: Any) -> tuple[dict[str, Any], bytes]:
        """Send a request; the answer's header and the bytes that follow it."""
        deadline = time.monotonic() + self.time_limit_s
        try:
            self._socket.settimeout(self.time_limit_s)
            self._socket.sendall(pickle.dumps((request, argument), protocol=5))
            length = int.from_bytes(self._receive(_LENGTH, deadline), "little")
            if length > _LARGEST_ANSWER:
                raise self._refused(f"{length} bytes are too many")
            head, _, body = self._receive(length, deadline).partition(b"\n")
        except TimeoutError:
            limit = f"time_limit_s={self.time_limit_s:g} s"
            raise self._failed(f"took more than {limit} for one answer") from None
        except (EOFError, OSError):
            raise self._failed(f"has ended its process (exit status {self.close()})") from None
        try:
            header = json.loads(head)
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict):
            raise self._refused("it is no header and arrays")
        if "error" in header:
            self.close()
            raise PolicyError(_printable(str(header["error"])))
        return header, body

    def _receive(self, size: int, deadline: float) -> bytes:
        """Exactly so many bytes, however slowly they drip, before the deadline."""
        content = bytearray()
        while len(content) < size:
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-6))
            part = self._socket.recv(min(size - len(content), 1 << 20))
            if not part:
                raise EOFError
            content += part
        return bytes(content)

    def _arrays(self, described: Any, body: bytes) -> dict[str, NDArray[Any]]:
        """Arrays of an answer, by name."""
        arrays, start = {}, 0
        try:
            for name, kind, shape in described:
                if not re.fullmatch(r"[<>|=][biuf][1248]", kind):
                    raise ValueError(f"{kind} is no number type")
                if min(shape, default=0) < 0:
                    raise ValueError(f"{shape} is no shape")
                dtype = np.dtype(kind)
                size = math.prod(shape) * dtype.itemsize
                values = np.frombuffer(body[start : start + size], dtype)
                arrays[name] = values.reshape(shape).copy()
                start += size
        except (TypeError, ValueError, IndexError) as error:
            raise self._refused(f"its arrays cannot be read ({error})") from None
        return arrays

    def _refused(self, why: str) -> PolicyError:
        return self._failed(f"gave a wrong answer: {_printable(why)}")

    def _failed(self, how: str) -> PolicyError:
        self.close()
        return PolicyError(f"policy {self.name!r} {how}")

    def __getstate__(self) -> dict[str, Any]:
        left = ("_process", "_socket", "_finalizer", "rng")
        return {key: value for key, value in self.__dict__.items() if key not in left}


def _pickled(content: Mapping[str, Any], source: Any) -> bytes:
    """The content, with the code of modules that another process might not find."""
    import cloudpickle

    codes = (*type(source).__mro__, getattr(source, "_fn", None))
    names = {getattr(code, "__module__", None) or "" for code in codes}
    known = cloudpickle.list_registry_pickle_by_value()
    local = [
        sys.modules[name]
        for name in names & sys.modules.keys() - known
        if name.partition(".")[0] not in ("__main__", "servegym")
        and "site-packages" not in (getattr(sys.modules[name], "__file__", None) or "site-packages")
    ]
    for module in local:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(content)
    finally:
        for module in local:
            cloudpickle.unregister_pickle_by_value(module)


def _printable(text: str) -> str:
    """A guest's text without control characters, and not too long."""
    return "".join(c if c.isprintable() else " " for c in text)[:2000]


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> int:
    """End a guest's process and those of its group."""
    with suppress(PermissionError, ProcessLookupError):  # nothing of it is left
        os.killpg(process.pid, signal.SIGKILL)
    connection.close()
    return process.wait()  # not before: until then its number is nobody else's


# ------------------------------------------------------------------------- in the guest's process


_NOT_MADE: Any = object()


def serve(descriptor: int) -> None:
    """Answer the judge's requests until it closes the pipe."""
    connection = socket.socket(fileno=descriptor)
    threading.Thread(target=_end_with_the_judge, args=(connection,), daemon=True).start()
    stream = connection.makefile("rwb")
    policy: Any = _NOT_MADE
    while True:
        try:
            request, argument = pickle.load(stream)
        except EOFError:
            os.killpg(0, signal.SIGKILL)
        header: dict[str, Any] = {}
        body = b""
        try:
            if request == "make":
                source = pickle.loads(argument)
                policy = source["policy"] if "policy" in source else policy_from_file(**source)
                header["policy"] = {field: getattr(policy, field, False) for field in _FIELDS}
                header["policy"]["env_kwargs"] = dict(policy.env_kwargs)
            elif request == "reset":
                policy.reset(*argument)
            else:
                ended, reward, *seen = argument
                if ended is not None:
                    policy.outcomes(ended)
                if reward is not None:
                    policy.feedback(reward)
                header["arrays"], body = _described(policy.act(*seen))
            head = json.dumps(header)
        except (Exception, SystemExit) as error:
            if not isinstance(error, ValueError):
                traceback.print_exc()
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            text = f"{kind}{error}"
            if policy is not _NOT_MADE and str(getattr(policy, "name", "")) not in text:
                text = f"policy {policy.name!r} failed: {text}"
            head, body = json.dumps({"error": text}), b""
        answer = head.encode() + b"\n" + body
        stream.write(len(answer).to_bytes(_LENGTH, "little") + answer)
        stream.flush()


def _end_with_the_judge(connection: socket.socket) -> None:
    """Kill the group once the judge's end of the pipe is closed, whatever the policy is doing."""
    hang_up = select.poll()
    hang_up.register(connection, 0)
    hang_up.poll()
    os.killpg(0, signal.SIGKILL)


def _described(actions: Any) -> tuple[list[list[Any]], bytes]:
    """Name, type and shape of an action's arrays, and their bytes."""
    parts = actions if isinstance(actions, Mapping) else {"": actions}
    arrays = {str(name): np.asarray(part) for name, part in parts.items()}
    described = [[name, part.dtype.str, list(part.shape)] for name, part in arrays.items()]
    return described, b"".join(part.tobytes() for part in arrays.values())
