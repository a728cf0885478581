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
from urllib.parse import SplitResult, urlsplit

import numpy as np

from servegym._command_line import install_line


def nearest(text: str, names: Iterable[str], least: float = 0.6) -> str | None:
    """The name that is probably meant: equal but for case and signs, alike, or one that has it.

    ``least`` is the least likeness, from 0 to 1, as `difflib` has it.
    """
    plain = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in reversed([*names])}
    bare = re.sub(r"[^a-z0-9]", "", text.lower())
    having = sorted((name for name in plain if len(bare) > 2 and bare in name), key=len)
    alike = difflib.get_close_matches(bare, plain, n=1, cutoff=max(least, 0.75))
    near = alike or having or difflib.get_close_matches(bare, plain, n=1, cutoff=least)
    return plain[near[0]] if near else None


def did_you_mean(text: str, names: Iterable[str], least: float = 0.6) -> str:
    """The sentence that asks for the `nearest` name, after a blank; empty if none is near."""
    near = nearest(text, names, least)
    return f" Did you mean {near!r}?" if near else ""


def choose(argument: str, value: Any, allowed: Iterable[str]) -> str:
    """Return ``value`` if it is one of ``allowed``; the message has the nearest of it, too."""
    names = list(allowed)
    if isinstance(value, str) and value in names:
        return value
    if missing_file(value):
        raise ValueError(f"{argument}={value!r}: no such file.")
    hint = did_you_mean(str(value), names)
    raise ValueError(f"{argument}={value!r} is unknown; choose one of {names}.{hint}")


_FILE = re.compile(r"^[.~]{0,2}/|\.(csv|gz|jsonl?|npz|parquet|pt|py|safetensors|toml|ya?ml|zip)$")


def missing_file(value: Any) -> bool:
    """Whether it looks like the path of a file, and there is none."""
    return isinstance(value, str) and bool(_FILE.search(value)) and not os.path.exists(value)


def given(argument: str, value: Any) -> str:
    """What was given, for a message; the place of a field in a file ends in a colon."""
    return f"{argument} got {value!r:.60};" if argument[-1:] == ":" else f"{argument}={value!r}"


def whole(argument: str, value: Any, low: int, high: float = 1 << 31) -> int:
    """Return ``value`` as an integer in [low, high]."""
    ok = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not ok or not low <= value <= high:
        limit = f"between {low} and {high}" if high < 1 << 31 else f"at least {low}"
        raise ValueError(f"{given(argument, value)} must be a whole number, {limit}.")
    return int(value)


def http_url(argument: str, text: str) -> SplitResult:
    """The parts of an http(s) URL that names a host and, at most, a port, a path and a query.

    What stands before or after an ``@``, a user or a rank of a router, is no part of an address.
    """
    try:
        parts = urlsplit(text)
        named = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError as error:
        raise ValueError(f"{argument} is {text!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not named:
        raise ValueError(f"{argument} is {text!r}; give one such as http://127.0.0.1:8000/v1")
    for what, there in (("a user or rank (@)", "@" in parts.netloc), ("a #", "#" in text)):
        if there:
            raise ValueError(f"{argument} is {text!r}; write it without {what}")
    return parts


# Beyond these, products of a few arguments are not finite.
TINY, LARGEST = 1e-50, 1e50


def real(
    argument: str, value: Any, low: float, high: float = LARGEST, open_low=False, unit: str = ""
) -> float:
    """Return ``value`` as a float in [low, high], or at least `TINY` above low if ``open_low``."""
    ok = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    try:
        number = float(value) if ok else math.nan
    except OverflowError:  # an integer beyond the largest float
        number = math.inf
    least = low + TINY if open_low else low
    if not math.isfinite(number) or not least <= number <= high or (open_low and number == low):
        lower = f"above {low:g}" if open_low else f"at least {low:g}"
        upper = f" and at most {high:g}" if high != LARGEST or number > high else ""
        what = f"a finite number {lower}{upper}{unit}"
        raise ValueError(f"{given(argument, value)} must be {what}.")
    return number


def flag(argument: str, value: Any) -> bool:
    """Return ``value``, True or False, as a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{given(argument, value)} must be True or False.")
    return bool(value)


def one_or_pair(argument: str, value: Any, check: Callable[[str, Any], Any]) -> Any:
    """Return ``value``, a number or a range (low, high) of them, as ``check`` gives each."""
    if not isinstance(value, (list, tuple)):
        return check(argument, value)
    if len(value) != 2:
        raise ValueError(f"{argument}={value!r} must be a number or a pair (low, high).")
    low, high = (check(argument, x) for x in value)
    if low > high:
        raise ValueError(f"{argument}={value!r}: the low end is above the high end.")
    return low, high


def mapping(argument: str, value: Any, allowed: Iterable[str] | None = None) -> dict[str, Any]:
    """Return ``value``, a mapping or None, as a dict with keys among ``allowed``."""
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{argument}={value!r} must be a mapping of keyword to value, or None.")
    result = {} if value is None else dict(value)
    for key in result:
        if not isinstance(key, str):
            raise ValueError(f"{argument}={value!r} has the key {key!r}, which is no keyword.")
    if allowed is not None:
        for key in result:
            try:
                choose("keyword", key, allowed)
            except ValueError as error:
                raise ValueError(f"{argument}: {error}") from None
    return result


class UnexpectedArgumentError(TypeError, ValueError):
    """A keyword that a function does not take.

    It is a `TypeError`, as Python's own, so that libraries that try keywords out (TorchRL does) see
    what they look for, and a `ValueError`, as all bad input is here.
    """


def keywords(allowed: Iterable[str], arguments: Iterable[str]) -> None:
    """Check that all ``arguments`` are among the ``allowed`` ones.

    Raises:
        UnexpectedArgumentError: naming the argument, the nearest of the allowed and all of them.
    """
    allowed = list(allowed)
    for name in arguments:
        if name not in allowed:
            hint = did_you_mean(name, allowed)
            raise UnexpectedArgumentError(
                f"unexpected keyword argument {name!r}.{hint} Known are {allowed}."
            )


def check_render_mode(value: str | None, allowed: Iterable[str]) -> str | None:
    """Return ``value`` if it is None or one of ``allowed``."""
    modes = list(allowed)
    if value is not None and not (isinstance(value, str) and value in modes):
        window = ""
        if isinstance(value, str) and value == "human":
            window = (
                " A window, with pygame, is shown around one environment of gymnasium.make; "
                f"{install_line('video')}."
            )
        raise ValueError(
            f"render_mode={value!r} is unknown; choose one of {modes} or None.{window}"
        )
    return value
