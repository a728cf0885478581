"""A claim of a paper, its rule, and what reads the tables: shared by the three papers' claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from servegym.experiments.evaluation.tables import Note, note

Verdict = Literal["agrees", "same direction", "in part", "disagrees", "open", "elsewhere"]
"""``elsewhere`` is no verdict: the finding is at a setting that the paper does not name."""

Rows = Sequence[Mapping[str, Any]]
Reader = Callable[[Rows], Iterable["Finding"]]


class Finding(NamedTuple):
    """A claim in one setting.

    Attributes:
        setting: Fleet, model, workload and so on.
        here: Our figure.
        verdict: See `judge` and `holds`.
    """

    setting: str
    here: str
    verdict: Verdict


class Claim(NamedTuple):
    """One claim of a paper.

    Attributes:
        place: Figure, table or statement of the paper.
        text: What is claimed.
        paper: The paper's figure.
        source: Name of the committed table that it is held against.
        read: Finds the verdicts in the rows of that table, setting by setting.
        family: Group of its environment family, in `claims.CLAIMS`.
    """

    place: str
    text: str
    paper: str
    source: str
    read: Reader
    family: str = ""


def claim(place: str, text: str, paper: str, source: str) -> Callable[[Reader], Claim]:
    """A decorator: what reads the table becomes the claim that it judges."""
    return lambda read: Claim(place, text, paper, source, read)


def found_for(
    claims: Sequence[Claim], table: str, *first: str
) -> Callable[[Any, Rows], Iterator[Note]]:
    """The notes of a study: the sentences ``first``, then what the claims find in its table."""

    def notes(options: Any, rows: Rows) -> Iterator[Note]:
        yield from first
        for claim in (claim for claim in claims if claim.source == table):
            for one in claim.read(rows):
                where = f"{one.setting}: " if one.setting else ""
                text = f"{claim.place}, {claim.text} (paper: {claim.paper}): {where}{one.here}"
                yield note(f"{text}; {one.verdict}.", claim=claim.text, verdict=one.verdict)

    return notes


def judge(
    ours: float, paper: float, least: bool = False, interval: tuple[float, float] | None = None
) -> Verdict:
    """The verdict on a change of ``ours`` percent where the paper has ``paper`` percent.

    A change of c percent leaves 1 + c / 100 of a quantity. With the ratio of the logarithms of what
    remains, r = ln(1 + ours / 100) / ln(1 + paper / 100), the verdict is one word:

    - *agrees*: r is from 1/2 to 2; where the paper says "at least", 1 or more;
    - *same direction*: r is above 0 and outside that range;
    - *disagrees*: r is 0 or below.

    Latency cut to .06 is no agreement with the paper's .45: r is 3.5, although 94 % is less than
    twice 55 %. Where our 95 % interval is known and holds no change at all, the mean's r counts for
    nothing: *disagrees* if no r of the interval agrees, else *open*.

    Args:
        ours: Our change, percent; a saving is negative.
        paper: The paper's, percent, neither zero nor -100 or less.
        least: Whether the paper says "at least".
        interval: Ends of the interval of our change, percent.
    """

    def ratio(change: float) -> float:
        left = 1 + change / 100
        return (math.log(left) if left > 0 else -math.inf) / math.log1p(paper / 100)

    lowest, highest = (1.0, math.inf) if least else (0.5, 2.0)
    if interval is not None and interval[0] <= 0 <= interval[1]:
        return "disagrees" if max(map(ratio, interval)) < lowest else "open"
    r = ratio(ours)
    return "agrees" if lowest <= r <= highest else "same direction" if r > 0 else "disagrees"


def holds(cases: Iterable[bool]) -> Verdict:
    """The verdict on a claim that is true or false case by case: *in part* where some are true."""
    true = list(cases)
    return "agrees" if all(true) else "in part" if any(true) else "disagrees"


def percent(new: float, old: float) -> float:
    """Change from old to new, percent; NaN from 0."""
    return 100 * (new / old - 1) if old else float("nan")


def pick(rows: Rows, **columns: Any) -> list[Mapping[str, Any]]:
    """The rows with these values."""
    return [row for row in rows if all(row[key] == value for key, value in columns.items())]


def values(rows: Rows, key: str) -> list[Any]:
    """The distinct values of a column, in their order."""
    return list(dict.fromkeys(row[key] for row in rows))


def split(rows: Rows, *columns: str) -> list[tuple[dict[str, Any], list[Mapping[str, Any]]]]:
    """The rows apart by the values of some columns, in their order: these values, these rows."""
    parts: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        parts.setdefault(tuple(row[column] for column in columns), []).append(row)
    return [(dict(zip(columns, at, strict=True)), part) for at, part in parts.items()]


def span(numbers: Sequence[float], form: str = "+.1f", unit: str = " %") -> str:
    """Lowest to highest, or the one number."""
    low, high = format(min(numbers), form), format(max(numbers), form)
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"
