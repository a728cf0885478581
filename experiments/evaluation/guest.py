"""Policies from outside in a process of their own, which is asked for every decision.

The evaluator's process owns the environment. A guest's process gets copies: the description of the
system, observations, masks and rewards. What it answers is read as plain arrays. So nothing that a
guest does to modules, catalogs, random numbers, clocks or arrays reaches the world that it is
measured in, and a guest that hangs, ends, takes too much memory or answers nonsense is an error
that names it. Its processes end with it; a file of the package that it changes is an error, too.

The process has the rights of the user who starts it: it is a fence against policies that look too
good, not a sandbox for programs that mean harm. Run those in a container.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import math
import os
import pickle
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.policy_file import PolicyError, policy_from_file
from servegym.baselines.protocol import BasePolicy, Observation, Policy

__all__ = [
    "MEMORY_LIMIT",
    "TIME_LIMIT_S",
    "GuestPolicy",
    "refuse_changes",
    "guarded",
    "package_files",
]

TIME_LIMIT_S = 60.0
"""Seconds that a guest may take for one answer: to be made, or to decide for a batch."""

MEMORY_LIMIT = 16 << 30
"""Bytes of writable memory that a guest's process may take."""

_MARK = "SERVEGYM_GUEST"  # in the environment of a guest's processes, by which they are found
_START = (
    f"import resource; resource.setrlimit(resource.RLIMIT_DATA, ({MEMORY_LIMIT}, {MEMORY_LIMIT})); "
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
    "from servegym.experiments.evaluation.guest import serve; serve(int(sys.argv[1]))"
)
_LENGTH = 8
_GET_DUMPABLE, _SET_DUMPABLE = 3, 4  # of prctl(2)
_LARGEST_ANSWER = 1 << 30
_FIELDS = {
    "name": str,
    "clairvoyant": bool,
    "env_view": str,
    "needs_env": bool,
    "needs_outcomes": bool,
    "env_kwargs": dict,
}
_DEFAULTS = {"needs_outcomes": (False,)}


class GuestPolicy(BasePolicy):
    """A policy whose code runs in another process.

    A process serves one batch of episodes: every further `reset` ends it and makes the policy anew
    in a fresh one, so that what it kept of the episodes before is gone. Pickled, the policy leaves
    its process behind and starts another where it is used next.

    Attributes:
        taken_s: Seconds of each `act` since the last `reset`, with the way to the other process.

    Args:
        source: A ``.py`` file as `policy_from_file` takes it, or a policy that can be pickled.
        system: Description of the system, for a file.
        time_limit_s: Seconds that one answer may take.

    Raises:
        PolicyError: If the policy cannot be made, or cannot be pickled.
    """

    def __init__(
        self, source: Path | Policy, system: Any, time_limit_s: float = TIME_LIMIT_S
    ) -> None:
        if not (math.isfinite(time_limit_s) and time_limit_s > 0):
            raise ValueError(f"time_limit_s is {time_limit_s}; allowed are seconds above 0")
        is_file = isinstance(source, Path)
        self.name = str(source) if is_file else str(source.name)
        content = (
            {"file": source, "content": source.read_bytes()} if is_file else {"policy": source}
        )
        try:
            self._source = _pickled({**content, "system": system}, source)
        except Exception as error:  # whatever the policy's own pickling raises
            raise PolicyError(
                f"policy {self.name!r} cannot be sent to a process of its own "
                f"({type(error).__name__}: {error}); in_process=True runs it in this one"
            ) from error
        self.time_limit_s = float(time_limit_s)
        self.taken_s: list[float] = []
        self._start()

    def _start(self) -> None:
        """Start the process and have the policy made."""
        ours, theirs = socket.socketpair()
        mark = secrets.token_hex(16)
        with theirs:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-BP",  # the package's folders stay as they are
                    "-c",
                    _START,
                    str(theirs.fileno()),
                    json.dumps([str(entry) for entry in sys.path]),
                ],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a guest prints is no part of the results
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=os.environ | {_MARK: mark, "PYTHONDONTWRITEBYTECODE": "1"},
            )
        self._socket, self._process = ours, process
        self._used = False
        self._reward: NDArray[np.float64] | None = None
        self._ended: NDArray[Any] | None = None
        self._finalizer = weakref.finalize(self, _end, process, ours, mark)
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

    def episode_start(self, mask: NDArray[np.bool_]) -> None:
        """See `Policy.episode_start`."""
        self._ask("episode_start", mask)

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

    def close(self) -> None:
        """End the process; the next `reset` starts another."""
        self._finalizer()
        self._process = None

    def _ask(self, request: str, argument: Any) -> tuple[dict[str, Any], bytes]:
        """Send a request; the answer's header and the bytes that follow it."""
        deadline = time.monotonic() + self.time_limit_s
        try:
            _send(self._socket, pickle.dumps((request, argument), protocol=5), deadline)
            (length,) = np.frombuffer(_receive(self._socket, _LENGTH, deadline), np.uint64)
            if length > _LARGEST_ANSWER:
                raise self._refused(f"{length} bytes are too many")
            answer = _receive(self._socket, int(length), deadline)
        except TimeoutError:
            self.close()
            raise PolicyError(
                f"policy {self.name!r} took more than time_limit_s={self.time_limit_s:g} s for one "
                "answer"
            ) from None
        except (EOFError, OSError):
            status = self._wait()
            self.close()
            raise PolicyError(
                f"policy {self.name!r} has ended its process (exit status {status})"
            ) from None
        head, _, body = answer.partition(b"\n")
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

    def _wait(self) -> int | None:
        """The process's exit status, None if it lives on without its end of the pipe."""
        try:
            return None if self._process is None else self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return None

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
        self.close()
        return PolicyError(f"policy {self.name!r} gave a wrong answer: {_printable(why)}")

    def __getstate__(self) -> dict[str, Any]:
        left = ("_process", "_socket", "_finalizer", "rng")
        state = {key: value for key, value in self.__dict__.items() if key not in left}
        return {**state, "_process": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._finalizer = lambda: None


def _pickled(content: Mapping[str, Any], source: Any) -> bytes:
    """The content, with the code of modules that another process might not find."""
    import cloudpickle

    codes = (*type(source).__mro__, getattr(source, "_fn", None))
    modules = {sys.modules.get(getattr(code, "__module__", None) or "") for code in codes}
    before = cloudpickle.list_registry_pickle_by_value()
    local = [
        module
        for module in modules
        if module is not None
        and module.__name__ not in before
        and module.__name__.partition(".")[0] not in ("__main__", "servegym")
        and "site-packages" not in (getattr(module, "__file__", None) or "site-packages")
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


def _end(process: subprocess.Popen[bytes], connection: socket.socket, mark: str) -> None:
    """End a guest's process and those that it started, in sessions of their own, too."""
    connection.close()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (PermissionError, ProcessLookupError):  # nothing of it is left
        pass
    process.wait()
    marked = f"{_MARK}={mark}".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marked in environment.read_bytes().split(b"\0"):
                os.kill(int(environment.parent.name), signal.SIGKILL)
        except OSError:  # another user's, or it has just ended
            continue


@cache
def _digest(path: Path, size: int, changed_ns: int) -> str:
    """Of a file's content, read again only when its inode has changed."""
    return hashlib.blake2b(path.read_bytes()).hexdigest()


def package_files() -> dict[str, str]:
    """Digest of each file of the package, by its place in it."""
    found: dict[str, str] = {}
    seen: set[Path] = set()
    for room in ("", ".envs", ".baselines", ".agents", ".experiments", ".hardware_profiles"):
        for root in map(Path, importlib.import_module(f"servegym{room}").__path__):
            for path in root.rglob("*"):
                if path.is_file() and path not in seen:
                    seen.add(path)
                    place = f"servegym{room}/{path.relative_to(root).as_posix()}"
                    about = path.stat()
                    found[place] = _digest(path, about.st_size, about.st_ctime_ns)
    return found


def refuse_changes(name: str, before: Mapping[str, str]) -> None:
    """PolicyError where the package's files are not as `package_files` saw them before a guest."""
    after = package_files()
    changed = sorted(x for x in before.keys() | after.keys() if before.get(x) != after.get(x))
    if changed:
        raise PolicyError(
            f"policy {name!r} has changed {changed[0]} of the installed package; install it anew "
            "before anything else is measured"
        )


@contextmanager
def guarded() -> Iterator[None]:
    """Keep this process from others of the same user while guests run.

    Its memory cannot be read by them (Linux), and Python writes no bytecode, so that every new file
    of the package is a guest's.
    """
    prctl: Any = getattr(ctypes.CDLL(None), "prctl", lambda *_: 0)
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    dumpable = prctl(_GET_DUMPABLE, 0, 0, 0, 0)
    prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    try:
        yield
    finally:
        sys.dont_write_bytecode = written
        if dumpable == 1:
            prctl(_SET_DUMPABLE, 1, 0, 0, 0)


def _left(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _send(connection: socket.socket, content: bytes, deadline: float | None) -> None:
    connection.settimeout(_left(deadline))
    connection.sendall(np.uint64(len(content)).tobytes() + content)


def _receive(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    """Exactly so many bytes, however slowly they drip, before the deadline."""
    content = bytearray()
    while len(content) < size:
        connection.settimeout(_left(deadline))
        part = connection.recv(min(size - len(content), 1 << 20))
        if not part:
            raise EOFError
        content += part
    return bytes(content)


# ------------------------------------------------------------------------- in the guest's process


_NOT_MADE: Any = object()


def serve(descriptor: int) -> None:
    """Answer the evaluator's requests until it closes the pipe."""
    connection = socket.socket(fileno=descriptor)
    policy: Any = _NOT_MADE
    while True:
        try:
            length = int(np.frombuffer(_receive(connection, _LENGTH, None), np.uint64)[0])
            request, argument = pickle.loads(_receive(connection, length, None))
        except EOFError:
            return
        header: dict[str, Any] = {}
        body = b""
        try:
            if request == "make":
                policy = _made(pickle.loads(argument))
                header["policy"] = {
                    field: getattr(policy, field, *_DEFAULTS.get(field, ())) for field in _FIELDS
                }
                header["policy"]["env_kwargs"] = dict(policy.env_kwargs)
            elif request == "reset":
                policy.reset(*argument)
            elif request == "episode_start":
                policy.episode_start(argument)
            else:
                ended, reward, *seen = argument
                if ended is not None:
                    policy.outcomes(ended)
                if reward is not None:
                    policy.feedback(reward)
                header["arrays"], body = _described(policy.act(*seen))
            head = json.dumps(header)
        except PolicyError as error:
            head, body = json.dumps({"error": str(error)}), b""
        except (Exception, SystemExit) as error:
            if not isinstance(error, ValueError):
                traceback.print_exc()
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            text = f"{kind}{error}"
            if policy is not _NOT_MADE and str(getattr(policy, "name", "")) not in text:
                text = f"policy {policy.name!r} failed: {text}"
            head, body = json.dumps({"error": text}), b""
        _send(connection, head.encode() + b"\n" + body, None)


def _made(source: Mapping[str, Any]) -> Policy:
    if "policy" in source:
        return source["policy"]
    return policy_from_file(source["file"], source["system"], source["content"])


def _described(actions: Any) -> tuple[list[list[Any]], bytes]:
    """Name, type and shape of an action's arrays, and their bytes."""
    parts = actions if isinstance(actions, Mapping) else {"": actions}
    arrays = {str(name): np.asarray(part) for name, part in parts.items()}
    described = [[name, part.dtype.str, list(part.shape)] for name, part in arrays.items()]
    return described, b"".join(part.tobytes() for part in arrays.values())
