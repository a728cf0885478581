"""The decorators of every compiled function, and a cache of theirs that processes can share.

numba's cache on disk is an index of signatures with a data file for each. Processes that start
together on an empty or outdated cache read and write it at the same time, and an index is written
before its data: a process can then take a file that holds another signature, or the code from
before a change of the source, and returns its numbers without a word. Here every data file says
what it holds; what is not what was asked for is compiled anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit
from numba.core.caching import IndexDataCacheFile

__all__ = ["inline", "jit"]

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy"}


class _LabelledFile(IndexDataCacheFile):
    """numba's files of a function, each with the source's stamp and the signature it is of."""

    def save(self, key: Any, data: Any) -> None:
        super().save(key, (self._source_stamp, key, data))

    def load(self, key: Any) -> Any:
        found = super().load(key)
        if not isinstance(found, tuple) or len(found) != 3:
            return None
        stamp, held, data = found
        return data if (stamp, held) == (self._source_stamp, key) else None


def _compiled(function: F, **options: Any) -> F:
    dispatcher: Any = njit(**_OPTIONS, **options)(function)
    # Absent without compilation (NUMBA_DISABLE_JIT) or where no folder can be written.
    files = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if type(files) is IndexDataCacheFile:
        files.__class__ = _LabelledFile
    return dispatcher


def jit(function: F) -> F:
    """Compile a function: cached on disk, without the interpreter's lock, divisions as in numpy."""
    return _compiled(function)


def inline(function: F) -> F:
    """As `jit`, and its body takes the place of every call.

    Array arguments are passed by value, seven words each: it pays on the hot path.
    """
    return _compiled(function, forceinline=True)
