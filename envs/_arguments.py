"""The arguments of an environment as a frozen record that checks what it is given.

A family declares one subclass of `Arguments` with a line an argument, such as

    rate: Range = span(5.0, "mean requests/s, or a range drawn from for each episode")

Each helper takes the default first and a line of meaning last. A default of None allows None.
Messages, the table in the environment's docstring and the tests' strategies come from these lines.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, Self

from servegym import _checks
from servegym._checks import LARGEST

Range = float | tuple[float, float]
"""A number, or the range (low, high) that it is drawn from."""
Options = dict[str, Any] | None
"""Keywords of something else."""


@dataclasses.dataclass(frozen=True)
class Argument:
    """What an argument may be.

    Attributes:
        default: What it is where it is not given.
        text: Its meaning in a line.
        check: Name and value as given -> value; ValueError naming both and what is allowed.
        kind: Name of the helper that made it.
        low: Least number.
        high: Largest number.
        open_low: Whether ``low`` itself is too little.
        choices: Names that are allowed.
        box: The default of the ids that show one Box, where it is another one; else None.
    """

    default: Any
    text: str
    check: Callable[[str, Any], Any]
    kind: str
    low: float = 0
    high: float = LARGEST
    open_low: bool = False
    choices: tuple[str, ...] = ()
    box: Any = None

    @property
    def optional(self) -> bool:
        """Whether None is allowed: it stands for a default that goes by something else."""
        return self.default is None or self.box is not None

    @property
    def shown(self) -> str:
        """The default in the table."""
        if self.default is None:
            return "none"
        quoted = json.dumps(self.default) if isinstance(self.default, str) else repr(self.default)
        return f"`{quoted}`" + ("" if self.box is None else f"; `{self.box}` with one Box")

    @property
    def allowed(self) -> str:
        """The bounds or names in words; "" where there are none."""
        if self.kind not in ("whole", "number", "span"):
            return ", ".join(f"`{name}`" for name in self.choices)
        least = f"{'above' if self.open_low else 'from'} {self.low:,g}"
        return least if self.high in (LARGEST, 1 << 31) else f"{least} to {self.high:,.9g}"


def _field(argument: Argument) -> Any:
    metadata = {"argument": argument}
    default = argument.default if argument.box is None else None
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def whole(default: int | None, low: int, text: str, *, high: int = 1 << 31) -> Any:
    """A whole number from ``low`` to ``high``."""
    check = partial(_checks.whole, low=low, high=high)
    return _field(Argument(default, text, check, "whole", low, high))


def number(
    default: float | None, low: float, text: str, *, high: float = LARGEST, open_low: bool = False
) -> Any:
    """A finite number from ``low`` to ``high``, or above ``low`` if ``open_low``."""
    check = partial(_checks.real, low=low, high=high, open_low=open_low)
    return _field(Argument(default, text, check, "number", low, high, open_low))


def span(default: Range, text: str, *, high: float = LARGEST) -> Any:
    """A positive number up to ``high``, or a range of them."""
    one = partial(_checks.real, low=0.0, high=high, open_low=True)
    check = partial(_checks.one_or_pair, check=one)
    return _field(Argument(default, text, check, "span", 0, high, open_low=True))


def ends(span: Range) -> tuple[float, float]:
    """Low and high end of a range; a number is both."""
    return span if isinstance(span, tuple) else (span, span)


def choice(default: str | None, names: Iterable[str], text: str, *, box: str | None = None) -> Any:
    """One of some names."""
    choices = tuple(names)
    check = partial(_checks.choose, allowed=choices)
    return _field(Argument(default, text, check, "choice", choices=choices, box=box))


def switch(default: bool | None, text: str, *, box: bool | None = None) -> Any:
    """True or False."""
    return _field(Argument(default, text, _checks.flag, "switch", box=box))


def options(text: str) -> Any:
    """A mapping of keyword to value, or None; who takes the keywords checks them."""
    return _field(Argument(None, text, _checks.mapping, "options"))


def other(default: Any, text: str, check: Callable[[str, Any], Any] | None = None) -> Any:
    """A value that ``check`` checks; by default who reads it does."""
    return _field(Argument(default, text, check or (lambda _, value: value), "other"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of a family, checked when the record is made.

    Attributes:
        view: What the id shows, 0 for the Dict. It is no argument, but defaults may go by it.
        headings: Of the table, by the first argument below each.
    """

    view: int = 0
    headings: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        defaults = self.defaults()
        for name, argument in self.described().items():
            value = getattr(self, name)
            if value is None:
                value = defaults.get(name)
            if value is not None or not argument.optional:
                value = argument.check(name, value)
            object.__setattr__(self, name, value)

    def defaults(self) -> Mapping[str, Any]:
        """What stands for None: defaults that go by the view, or by another argument."""
        boxes = {n: a for n, a in self.described().items() if a.box is not None}
        return {name: a.box if self.view else a.default for name, a in boxes.items()}

    @classmethod
    def fill(cls, arguments: Mapping[str, Any], view: int = 0) -> Self:
        """The record of what ``gymnasium.make`` was given.

        Raises:
            ValueError: naming the argument, what was given and what is allowed.
        """
        _checks.keywords(cls.described(), arguments)
        return cls(view=view, **cls.named(arguments))

    @classmethod
    def named(cls, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """What was given, with all that an argument stands for which names a whole setting."""
        return arguments

    @classmethod
    def described(cls) -> dict[str, Argument]:
        """The arguments by name."""
        fields = dataclasses.fields(cls)
        return {f.name: f.metadata["argument"] for f in fields if "argument" in f.metadata}

    def keys(self) -> Iterable[str]:
        """The names; with them ``dict(arguments)`` is what `fill` makes an equal record of."""
        return self.described()

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    @classmethod
    def table(cls) -> list[str]:
        """The lines of a Markdown table of the arguments."""
        rows = ["| | Name | Default | Allowed | Meaning |", "|---|---|---|---|---|"]
        for name, argument in cls.described().items():
            meaning = f"{argument.shown} | {argument.allowed} | {argument.text}"
            rows.append(f"| {cls.headings.get(name, '')} | `{name}` | {meaning} |")
        return rows
