"""Checks of arguments that everybody shares.

Each raises ValueError naming the argument, what was given and what is allowed.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from servegym._command_line import install_line


def nearest(given: str, names: Iterable[str]) -> str | None:
    """The name that is probably meant: equal but for case and signs, alike, or one that has it."""
    plain = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in reversed([*names])}
    wanted = re.sub(r"[^a-z0-9]", "", given.lower())
    having = sorted((name for name in plain if len(wanted) > 2 and wanted in name), key=len)
    alike = difflib.get_close_matches(wanted, plain, n=1, cutoff=0.75)
    near = alike or having or difflib.get_close_matches(wanted, plain, n=1, cutoff=0.6)
    return plain[near[0]] if near else None


def choose(argument: str, given: Any, allowed: Iterable[str]) -> str:
    """Return ``given`` if it is one of ``allowed``; the message has the nearest of it, too."""
    names = list(allowed)
    if isinstance(given, str) and given in names:
        return given
    if missing_file(given):
        raise ValueError(f"{argument}={given!r}: no such file.")
    near = nearest(str(given), names)
    hint = f" Did you mean {near!r}?" if near else ""
    raise ValueError(f"{argument}={given!r} is unknown; choose one of {names}.{hint}")


_FILE = re.compile(r"^[.~]{0,2}/|\.(csv|gz|json|jsonl|npz|parquet|pt|py|safetensors|toml|ya?ml)$")


def missing_file(given: Any) -> bool:
    """Whether it looks like the path of a file, and there is none."""
    return isinstance(given, str) and bool(_FILE.search(given)) and not os.path.exists(given)


def whole(argument: str, given: Any, low: int, high: int = 1 << 31) -> int:
    """Return ``given`` as an integer in [low, high]."""
    ok = isinstance(given, (int, np.integer)) and not isinstance(given, bool)
    if not ok or not low <= given <= high:
        limit = f"at least {low}" if high == 1 << 31 else f"between {low} and {high}"
        raise ValueError(f"{argument}={given!r} must be a whole number, {limit}.")
    return int(given)


# Beyond these, products of a few arguments are not finite.
TINY, LARGEST = 1e-50, 1e50


def real(argument: str, given: Any, low: float, high: float = LARGEST, open_low=False) -> float:
    """Return ``given`` as a float in [low, high], or at least `TINY` above low if ``open_low``."""
    ok = isinstance(given, (int, float, np.integer, np.floating)) and not isinstance(given, bool)
    try:
        value = float(given) if ok else math.nan
    except OverflowError:  # an integer beyond the largest float
        value = math.inf
    least = low + TINY if open_low else low
    if not math.isfinite(value) or not least <= value <= high or (open_low and value == low):
        lower = f"above {low:g}" if open_low else f"at least {low:g}"
        upper = f" and at most {high:g}" if high != LARGEST or value > high else ""
        raise ValueError(f"{argument}={given!r} must be a finite number {lower}{upper}.")
    return value


def flag(argument: str, given: Any) -> bool:
    """Return ``given``, True or False, as a bool."""
    if not isinstance(given, (bool, np.bool_)):
        raise ValueError(f"{argument}={given!r} must be True or False.")
    return bool(given)


def one_or_pair(argument: str, given: Any, check: Callable[[str, Any], Any]) -> Any:
    """Return ``given``, a number or a range (low, high) of them, as ``check`` gives each."""
    if not isinstance(given, (list, tuple)):
        return check(argument, given)
    if len(given) != 2:
        raise ValueError(f"{argument}={given!r} must be a number or a pair (low, high).")
    low, high = (check(argument, x) for x in given)
    if low > high:
        raise ValueError(f"{argument}={given!r}: the low end is above the high end.")
    return low, high


def mapping(argument: str, given: Any, allowed: Iterable[str] | None = None) -> dict[str, Any]:
    """Return ``given``, a mapping or None, as a dict with keys among ``allowed``."""
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"{argument}={given!r} must be a mapping of keyword to value, or None.")
    found = {} if given is None else dict(given)
    for key in found:
        if not isinstance(key, str):
            raise ValueError(f"{argument}={given!r} has the key {key!r}, which is no keyword.")
    if allowed is not None:
        for key in found:
            try:
                choose("keyword", key, allowed)
            except ValueError as error:
                raise ValueError(f"{argument}: {error}") from None
    return found


class UnexpectedArgumentError(TypeError, ValueError):
    """A keyword that a function does not take.

    It is a `TypeError`, as Python's own, so that libraries that try keywords out (TorchRL does) see
    what they look for, and a `ValueError`, as all bad input is here.
    """


def keywords(known: Iterable[str], given: Iterable[str]) -> None:
    """Check that all names that are ``given`` are among the ``known`` ones.

    Raises:
        UnexpectedArgumentError: naming the argument, the nearest of the known and all of them.
    """
    names = list(known)
    for name in given:
        if name not in names:
            near = nearest(name, names)
            hint = f" Did you mean {near!r}?" if near else ""
            raise UnexpectedArgumentError(
                f"unexpected keyword argument {name!r}.{hint} Known are {names}."
            )


def check_render_mode(given: str | None, allowed: Iterable[str]) -> str | None:
    """Return ``given`` if it is None or one of ``allowed``."""
    modes = list(allowed)
    if given is not None and not (isinstance(given, str) and given in modes):
        window = ""
        if isinstance(given, str) and given == "human":
            window = (
                " A window, with pygame, is shown around one environment of gymnasium.make; "
                f"{install_line('video')}."
            )
        raise ValueError(
            f"render_mode={given!r} is unknown; choose one of {modes} or None.{window}"
        )
    return given
