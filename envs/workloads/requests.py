"""Files of requests: when each came, its lengths and how well each LLM answers it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from servegym._files import EPOCH_S, MalformedFileError, Times, csv_header, csv_rows, parse_number
from servegym.envs.workloads.catalog import Catalog

_MEANING = {
    "tokens": ("no token count", "give a whole number, 1 or more"),
    "score": ("no score", "give a number from 0 to 1"),
}


def read_columns(
    path: str | os.PathLike[str], choose: Callable[[Sequence[str]], Mapping[str, str]]
) -> dict[str, np.ndarray]:
    """Read columns of numbers of a CSV file with a header line; the others are ignored.

    Args:
        path: CSV file, UTF-8.
        choose: Of the header's names, those to read and what each is: ``"time"`` (seconds >= 0 or
            dates, non-decreasing; those since an epoch become seconds after the first),
            ``"tokens"`` (whole, >= 1) or ``"score"`` (0 to 1).

    Returns:
        The columns, each of shape ``(requests,)``; int64 for tokens, else float64.

    Raises:
        MalformedFileError: If the file is empty, a column is missing or twice, or a value is not
            usable; nothing of the file is returned.
        OSError: If the file cannot be opened.
    """
    header = csv_header(path)
    chosen = dict(choose(header))
    if (plain := _plain_columns(path, header, chosen)) is not None:
        return plain
    columns: dict[str, list[float]] = {name: [] for name in chosen}
    times = {name: Times(path, name) for name, kind in chosen.items() if kind == "time"}
    for line, row in csv_rows(path, tuple(chosen)):
        for name, kind in chosen.items():
            if kind == "time":
                times[name].add(line, row[name])
            else:
                columns[name].append(_number(path, line, name, kind, row[name]))
    columns |= {name: each.elapsed() for name, each in times.items()}
    if not all(columns.values()):
        raise MalformedFileError(
            path, None, None, "holds no request", "give at least one line below the header"
        )
    return {
        name: np.array(values, np.int64 if chosen[name] == "tokens" else np.float64)
        for name, values in columns.items()
    }


def _plain_columns(
    path: str | os.PathLike[str], header: Sequence[str], chosen: Mapping[str, str]
) -> dict[str, np.ndarray] | None:
    """:func:`read_columns` by numpy's reader, ten times as fast.

    None where a cell is quoted, a line has not as many cells as the header, times count from
    an epoch, or a value is not usable: the file is read line by line, which names what is wrong.
    """
    content = Path(path).read_bytes()
    codes = np.frombuffer(content.rstrip() + b"\n", np.uint8)
    ends = np.flatnonzero(codes == ord("\n"))
    cells = np.diff(np.cumsum(codes == ord(","))[ends], prepend=0) + 1
    odd = b'"' in content or content.count(b"\r") != content.count(b"\r\n")
    if odd or len(ends) < 2 or (cells != len(header)).any() or not set(chosen) <= set(header):
        return None
    places = [header.index(name) for name in chosen]
    try:
        table = np.loadtxt(
            path, delimiter=",", skiprows=1, usecols=places, ndmin=2, comments=None,
            encoding="utf-8-sig",
        )  # fmt: skip
    except ValueError:
        return None
    columns = dict(zip(chosen, table.T, strict=True))
    for name, kind in chosen.items():
        values = columns[name]
        low, high = {"tokens": (1, 2**31 - 1), "score": (0, 1), "time": (0, EPOCH_S - 1)}[kind]
        good = (values >= low) & (values <= high)
        if kind == "tokens":
            columns[name] = np.where(good, values, 0.0).astype(np.int64)
            good &= columns[name] == values
        elif kind == "time":
            good[1:] &= np.diff(values) >= 0.0
        if not good.all():
            return None
    return {name: np.ascontiguousarray(values) for name, values in columns.items()}


def _number(path: str | os.PathLike[str], line: int, field: str, kind: str, text: str) -> float:
    number = parse_number(text)
    value = math.nan if number is None else number
    good = number is not None
    if kind == "tokens":
        # Spreadsheets write whole numbers as 12.0; anything between is a mistake worth naming.
        good = good and value == int(value) and 1 <= value < 2**31
    else:
        good = good and 0.0 <= value <= 1.0
    if not good:
        problem, remedy = _MEANING[kind]
        raise MalformedFileError(path, line, field, f"{text!r} is {problem}", remedy)
    return value


@dataclass(frozen=True, eq=False)
class Requests:
    """A file of requests.

    Attributes:
        catalog: A row a request, in the file's order; all in the split ``train``.
        arrival_s: ``(J,)`` seconds, non-decreasing.
        predicted_scores: ``(J, M)``, or None if the file does not say.
        predicted_tokens: ``(J, M)``, or None if the file does not say.
    """

    catalog: Catalog
    arrival_s: np.ndarray
    predicted_scores: np.ndarray | None
    predicted_tokens: np.ndarray | None


def load_requests(path: str | os.PathLike[str]) -> Requests:
    """Read a file of requests with the score of each LLM.

    Columns: ``arrival_s``, ``prompt_tokens``; for each LLM ``score_NAME``, and
    ``output_tokens_NAME`` unless there is one column ``output_tokens`` for all; what a router
    predicts may stand in ``predicted_score_NAME`` and ``predicted_tokens_NAME``.

    Args:
        path: CSV file, UTF-8. Further columns are ignored.

    Returns:
        The requests; the LLMs are in the order of their score columns.

    Raises:
        MalformedFileError: Naming the file, the line and the field.
        OSError: If the file cannot be opened.
    """

    def choose(header: Sequence[str]) -> dict[str, str]:
        llms = [name.removeprefix("score_") for name in header if name.startswith("score_")]
        if not llms:
            raise MalformedFileError(
                path, 1, "score_NAME", "is missing from the header", "give a column for each LLM"
            )
        chosen = {"arrival_s": "time", "prompt_tokens": "tokens"}
        chosen |= {f"score_{name}": "score" for name in llms}
        lengths = [f"output_tokens_{name}" for name in llms]
        if "output_tokens" in header and not any(name in header for name in lengths):
            lengths = ["output_tokens"]
        chosen |= dict.fromkeys(lengths, "tokens")
        for prefix, kind in (("predicted_score_", "score"), ("predicted_tokens_", "tokens")):
            if any(name.startswith(prefix) for name in header):
                chosen |= {prefix + name: kind for name in llms}
        return chosen

    columns = read_columns(path, choose)
    llms = [name.removeprefix("score_") for name in columns if name.startswith("score_")]

    def table(prefix: str) -> np.ndarray | None:
        if prefix + llms[0] not in columns:
            return None
        return np.stack([columns[prefix + name] for name in llms], axis=1)

    tokens = table("output_tokens_")
    if tokens is None:
        tokens = np.repeat(columns["output_tokens"][:, None], len(llms), axis=1)
    count = len(tokens)
    catalog = Catalog(
        name=Path(path).stem,
        models=tuple(llms),
        prompt_tokens=columns["prompt_tokens"],
        scores=np.stack([columns[f"score_{name}"] for name in llms], axis=1),
        output_tokens=tokens,
        split=np.zeros(count, np.int8),
        max_output_tokens=int(tokens.max()),
        provenance={"source": os.fspath(path)},
    )
    return Requests(
        catalog, columns["arrival_s"], table("predicted_score_"), table("predicted_tokens_")
    )


@dataclass(frozen=True)
class FileArrivals:
    """The arrival times of a file, as often as asked for."""

    times: np.ndarray
    rate: float

    def sample(self, n: int, rng: np.random.Generator, rate: float | None = None) -> np.ndarray:
        """The first ``n`` times; see :meth:`Arrivals.sample`."""
        return self.times[:n].copy()
