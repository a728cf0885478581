"""A claim of a paper, its rule, and what reads the tables: shared by the three papers' claims."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = [
    "AGREES",
    "DIRECTION",
    "DISAGREES",
    "IN_PART",
    "OPEN",
    "Claim",
    "Finding",
    "Reader",
    "Rows",
    "holds",
    "judge",
    "percent",
    "pick",
    "span",
    "values",
]

AGREES, DIRECTION, DISAGREES, IN_PART, OPEN = (
    "agrees",
    "same direction",
    "disagrees",
    "in part",
    "open",
)

Rows = Sequence[Mapping[str, Any]]
Reader = Callable[[Rows], Iterable["Finding"]]


class Finding(NamedTuple):
    """A claim in one setting.

    Attributes:
        setting: Fleet, model, workload and so on.
        here: Our figure.
        verdict: ``agrees``, ``same direction``, ``disagrees``, ``in part`` or ``open``.
    """

    setting: str
    here: str
    verdict: str


class Claim(NamedTuple):
    """One claim of a paper.

    Attributes:
        family: Group of an environment family.
        place: Figure, table or statement of the paper.
        text: What is claimed.
        paper: The paper's figure.
        source: Name of the committed table that it is held against.
        read: Finds the verdicts in the rows of that table, setting by setting.
    """

    family: str
    place: str
    text: str
    paper: str
    source: str
    read: Reader


def judge(ours: float, paper: float, least: bool = False) -> str:
    """The verdict on a change of ``ours`` percent where the paper has ``paper`` percent.

    Args:
        ours: Our change, percent.
        paper: The paper's, percent, not zero.
        least: Whether the paper says "at least".
    """
    ratio = ours / paper
    if ratio <= 0:
        return DISAGREES
    return AGREES if ratio >= (1.0 if least else 0.5) and (least or ratio <= 2) else DIRECTION


def holds(cases: Iterable[bool]) -> str:
    """The verdict on a claim that is true or false case by case."""
    found = list(cases)
    return AGREES if all(found) else IN_PART if any(found) else DISAGREES


def percent(new: float, old: float) -> float:
    """Change from old to new, percent."""
    return 100 * (new / old - 1)


def pick(rows: Rows, **wanted: Any) -> list[Mapping[str, Any]]:
    """The rows with these values."""
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def values(rows: Rows, key: str) -> list[Any]:
    """The distinct values of a column, in their order."""
    return list(dict.fromkeys(row[key] for row in rows))


def span(numbers: Sequence[float], form: str = "+.1f", unit: str = " %") -> str:
    """Lowest to highest, or the one number."""
    low, high = format(min(numbers), form), format(max(numbers), form)
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"
