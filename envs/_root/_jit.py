"""The decorators of every compiled function, their compilation ahead of use, and their cache.

numba's cache on disk is an index of signatures with a data file for each. Processes that start
together on an empty or outdated cache read and write it at the same time, and an index is written
before its data: a process can then take a file that holds another signature, or the code from
before a change of the source, and returns its numbers without a word. Here every data file says
what it holds; what is not what was asked for is compiled anew.

numba notices edits of the file that a function stands in. Here the contents count in place of the
time of the last change, and those of all kernels of the environments with them, for every function:
compiled code has the functions in it that it calls.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from numba import njit
from numba.core import cgutils, config, event, types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.registry import CPUDispatcher
from numba.core.runtime.nrt import rtsys
from numba.extending import intrinsic, register_jitable

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

NOTICE_AFTER_S = 2.0
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


class _Cache(FunctionCache):
    """numba's cache of a function, in files of `_LabelledFile`.

    It takes code from the disk without numba's declarations: numba imports those of all of numpy
    and scipy before it looks, longer than all the rest takes; compiling needs them and imports them
    itself.
    """

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        stamp = _source_digest(Path(function.__code__.co_filename))
        self._cache_file = _LabelledFile(self._cache_path, self._impl.filename_base, stamp)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        rtsys.initialize(target_context)  # part of what is left out: the code allocates arrays
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)


class _LabelledFile(IndexDataCacheFile):
    """numba's files of a function, each with the source's stamp and the signature it is of.

    What cannot be read, or is not what was written, counts as missing: it is compiled anew, and the
    file with it. What cannot be written is compiled by the next process, too.
    """

    def save(self, key: Any, data: Any) -> None:
        payload = self._dump(data)
        label = self._source_stamp, key, hashlib.sha256(payload).digest()
        try:
            super().save(key, (*label, payload))
        except OSError as error:
            text = f"servegym: {self._cache_path}: compiled code cannot be kept: {error.strerror}"
            warnings.warn(text, stacklevel=2)

    def load(self, key: Any) -> Any:
        try:
            entry: Any = super().load(key)
            stamp, of, digest, payload = entry
        except Exception:  # unpickling raises anything; there may be nothing
            return None
        right = (stamp, of, digest) == (self._source_stamp, key, hashlib.sha256(payload).digest())
        return pickle.loads(payload) if right else None

    def _load_index(self) -> Any:
        try:
            return super()._load_index()
        except Exception:  # as above
            return {}


@cache
def _source_digest(path: Path) -> str:
    """Digest of a source file, or of the package ``kernel/`` that it is in, and of all kernels."""
    sources = {path, *(path.parent.glob("*.py") if path.parent.name == "kernel" else ())}
    spec: Any = find_spec("servegym.envs")
    for folder in spec.submodule_search_locations:
        sources |= set(Path(folder).glob("*/kernel/*.py"))
    digest = hashlib.sha256()
    for source in sorted(sources):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


class _Dispatcher(CPUDispatcher):
    """What `numba.njit` makes, with this module's cache."""

    def enable_caching(self) -> None:
        self._cache = _Cache(self.py_func)


@cache
def _with_entry(function: Any) -> Any:
    return njit(**_OPTIONS)(function)


class _InnerDispatcher(_Dispatcher):
    """It has no entry for Python, and a call without one crashes; tests call a twin that has it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _with_entry(self.py_func)(*args, **kwargs)


def _compiled(function: F, kind: type[_Dispatcher], **options: Any) -> F:
    if config.DISABLE_JIT:  # pyright: ignore[reportAttributeAccessIssue]
        return function
    options |= {"nopython": True, "boundscheck": None, "no_cfunc_wrapper": True, **_OPTIONS}
    dispatcher: Any = kind(function, targetoptions=options)
    dispatcher.enable_caching()
    return dispatcher


def jit(function: F) -> F:
    """Compile a function: cached on disk, without the interpreter's lock, divisions as in numpy."""
    return _compiled(function, _Dispatcher)


def inner(function: F) -> F:
    """As `jit`, for compiled functions to call: without an entry for Python it compiles faster."""
    return _compiled(function, _InnerDispatcher, no_cpython_wrapper=True)


def inline(function: F) -> F:
    """As `inner`, and its body takes the place of every call.

    Array arguments are passed by value, seven words each: it pays on the hot path.
    """
    return _compiled(function, _InnerDispatcher, no_cpython_wrapper=True, forceinline=True)


def formula(function: F) -> F:
    """Compile a function where compiled ones call it; called from Python it is as it is written.

    Of plain numbers in a kernel, of arrays that broadcast in numpy.
    """
    return register_jitable(nogil=True, error_model="numpy")(function)


def record(*fields: tuple[str, str]) -> np.dtype:
    """A type of records, with access by attribute with the compilation switched off, too."""
    return np.dtype((np.record, np.dtype(list(fields), align=True)))


def _without_owner(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """An array without the fields that name its owner, or a tuple of such arrays."""
    if isinstance(kind, types.BaseTuple):
        members: Any = kind
        parts = [
            _without_owner(context, builder, each, builder.extract_value(value, i))
            for i, each in enumerate(members)
        ]
        return context.make_tuple(builder, kind, parts)
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value)
        array.meminfo = cgutils.get_null_value(array.meminfo.type)
        array.parent = cgutils.get_null_value(array.parent.type)
        return array._getvalue()
    return value


def _borrowed(typing_context: Any, arrays: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _without_owner(context, builder, signature.args[0], arguments[0])

    return arrays(arrays), code


def borrowed(arrays: T) -> T:
    """In a compiled entry point: the same tuple of arrays, whose references are not counted.

    The caller holds the arrays for as long as the call lasts. Counted, each use of an array of a
    tuple costs two atomic operations: half the time of a routing step.
    """
    return arrays


if not config.DISABLE_JIT:  # pyright: ignore[reportAttributeAccessIssue]
    borrowed = intrinsic(_borrowed)  # pyright: ignore[reportAssignmentType]


def compile_kernels(
    engine: str, calls: Iterable[tuple[Any, tuple[Any, ...]]]
) -> list[Callable[..., Any]]:
    """Compile functions for the types of these arguments, or load them from the cache on disk.

    The functions are not called. Where compiling takes longer than two seconds, a line on stderr
    says what is compiled. Batches call it when they are built, so that no reset or step compiles; a
    package of baselines does it in ``compile_kernels()``, which ``servegym warm`` calls.

    Args:
        engine: What the functions are, for the line on stderr, such as ``"LLM routing engine"``.
        calls: Functions of `jit` with the arguments of a call; scalars must be of the type that
            the callers pass.

    Returns:
        The compiled functions. A call skips the look at the types of the arguments, half a
        microsecond for tuples of arrays, so these must be of the types given here.
    """
    functions = [
        (function, tuple(numba.typeof(argument) for argument in arguments))
        for function, arguments in calls
    ]
    if not all(hasattr(function, "overloads") for function, _ in functions):
        return [function for function, _ in functions]  # NUMBA_DISABLE_JIT
    missing = [each for each in functions if each[1] not in each[0].overloads]
    if missing:
        notice = _Notice(engine)
        try:
            with event.install_listener("numba:compile", notice):
                for function, signature in missing:
                    function.compile(signature)
        finally:
            notice.timer.cancel()
    return [function.overloads[signature].entry_point for function, signature in functions]


class _Notice(event.Listener):
    """Says that something is compiled, which loading from the cache is not."""

    def __init__(self, engine: str) -> None:
        text = f"servegym: compiling the {engine}, once per machine (`servegym warm` does it ahead)"
        how = {"file": sys.stderr, "flush": True}
        self.timer = threading.Timer(NOTICE_AFTER_S, print, [f"{text} ..."], how)
        self.timer.daemon = True
        self.begun = False

    def on_start(self, event: Any) -> None:
        if not self.begun:
            self.begun = True
            self.timer.start()

    def on_end(self, event: Any) -> None:
        pass
