"""The arguments of an environment as a frozen record that checks what it is given.

A family declares one subclass of `Arguments` with a line an argument, such as

    rate: Range = span("workload", 5.0, "mean requests/s, or a range drawn from for each episode")

Each helper takes the argument's group first, then its default and a line of meaning last. A default
of None allows None. Messages, the table in the environment's docstring and the strategies of the
tests come from these lines.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from servegym import _checks
from servegym._checks import LARGEST

Range = float | tuple[float, float]
"""A number, or the range (low, high) that it is drawn from."""


@dataclasses.dataclass(frozen=True)
class Argument:
    """What an argument may be.

    Attributes:
        group: Its heading in the table.
        default: What it is where it is not given.
        text: Its meaning in a line.
        check: Name and value as given -> value; ValueError naming both and what is allowed.
        kind: Name of the helper that made it.
        low: Least number.
        high: Largest number.
        open_low: Whether ``low`` itself is too little.
        choices: Names that are allowed.
        by_view: View of the id -> default, where the ids of a family have different ones.
    """

    group: str
    default: Any
    text: str
    check: Callable[[str, Any], Any]
    kind: str
    low: float = 0
    high: float = LARGEST
    open_low: bool = False
    choices: tuple[str, ...] = ()
    by_view: Callable[[int], Any] | None = None

    @property
    def optional(self) -> bool:
        """Whether None is allowed."""
        return self.default is None

    @property
    def shown(self) -> str:
        """The default in the table."""
        if self.by_view is not None:
            return "by the id"
        quoted = json.dumps(self.default) if isinstance(self.default, str) else repr(self.default)
        return "none" if self.default is None else f"`{quoted}`"

    @property
    def allowed(self) -> str:
        """The bounds or names in words; "" where there are none."""
        if self.kind not in ("whole", "number", "span"):
            return ", ".join(f"`{name}`" for name in self.choices)
        least = f"{'above' if self.open_low else 'from'} {self.low:,g}"
        return least if self.high in (LARGEST, 1 << 31) else f"{least} to {self.high:,.9g}"


def _field(argument: Argument) -> Any:
    default, metadata = argument.default, {"argument": argument}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def whole(group: str, default: int | None, low: int, text: str, *, high: int = 1 << 31) -> Any:
    """A whole number from ``low`` to ``high``."""

    def check(name: str, given: Any) -> int:
        return _checks.whole(name, given, low, high)

    return _field(Argument(group, default, text, check, "whole", low, high))


def number(
    group: str,
    default: float | None,
    low: float,
    text: str,
    *,
    high: float = LARGEST,
    open_low: bool = False,
) -> Any:
    """A finite number from ``low`` to ``high``, or above ``low`` if ``open_low``."""

    def check(name: str, given: Any) -> float:
        return _checks.real(name, given, low, high, open_low)

    return _field(Argument(group, default, text, check, "number", low, high, open_low))


def span(group: str, default: Range, text: str, *, high: float = LARGEST) -> Any:
    """A positive number up to ``high``, or a range of them."""

    def check(name: str, given: Any) -> Range:
        pair = _checks.positive_range(name, given, high)
        return pair if isinstance(given, (list, tuple)) else pair[0]

    return _field(Argument(group, default, text, check, "span", 0, high, open_low=True))


def ends(span: Range) -> tuple[float, float]:
    """Low and high end of a range; a number is both."""
    return span if isinstance(span, tuple) else (span, span)


def choice(
    group: str,
    default: str | None,
    names: Iterable[str],
    text: str,
    *,
    by_view: Callable[[int], str] | None = None,
) -> Any:
    """One of some names."""
    choices = tuple(names)

    def check(name: str, given: Any) -> str:
        return _checks.choose(name, given, choices)

    return _field(Argument(group, default, text, check, "choice", choices=choices, by_view=by_view))


def switch(
    group: str, default: bool | None, text: str, *, by_view: Callable[[int], bool] | None = None
) -> Any:
    """True or False."""
    return _field(Argument(group, default, text, _checks.flag, "switch", by_view=by_view))


def options(group: str, text: str) -> Any:
    """A mapping of keyword to value, or None; who takes the keywords checks them."""
    return _field(Argument(group, None, text, _checks.mapping, "options"))


def other(
    group: str, default: Any, text: str, check: Callable[[str, Any], Any] | None = None
) -> Any:
    """A value that ``check`` checks; by default who reads it does."""
    return _field(Argument(group, default, text, check or (lambda _, given: given), "other"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of a family, checked when the record is made.

    Attributes:
        view: What the id shows. It is no argument, but defaults may depend on it.
    """

    view: int = 0

    def __post_init__(self) -> None:
        for name, argument in self.described().items():
            value = getattr(self, name)
            if value is None and argument.by_view is not None:
                value = argument.by_view(self.view)
            if value is not None or not argument.optional:
                value = argument.check(name, value)
            object.__setattr__(self, name, value)

    @classmethod
    def fill(cls, given: Mapping[str, Any], view: int = 0) -> Self:
        """The record of what ``gymnasium.make`` was given.

        Raises:
            ValueError: naming the argument, what was given and what is allowed.
        """
        _checks.keywords(cls.described(), given)
        return cls(view=view, **cls.named(given))

    @classmethod
    def named(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """What was given, with all that an argument stands for which names a whole setting."""
        return given

    @classmethod
    def described(cls) -> dict[str, Argument]:
        """The arguments by name."""
        fields = dataclasses.fields(cls)
        return {f.name: f.metadata["argument"] for f in fields if "argument" in f.metadata}

    def values(self, without: Iterable[str] = ()) -> dict[str, Any]:
        """The values by name; `fill` makes an equal record of them."""
        return {name: getattr(self, name) for name in self.described() if name not in without}

    @classmethod
    def table(cls) -> list[str]:
        """The lines of a Markdown table of the arguments."""
        rows = ["| | Name | Default | Allowed | Meaning |", "|---|---|---|---|---|"]
        group = ""
        for name, argument in cls.described().items():
            heading, group = "" if argument.group == group else argument.group, argument.group
            cells = heading, f"`{name}`", argument.shown, argument.allowed, argument.text
            rows.append(f"| {' | '.join(cells)} |")
        return rows
