"""Files of requests: when each came, its lengths and how well each LLM answers it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from servegym._files import MalformedFileError
from servegym.envs.workloads.catalog import Catalog
from servegym.envs.workloads.traces import Kinds, is_called, read_requests


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
    """Read a CSV or JSONL file of requests with the score of each LLM, in the columns' order.

    Columns, under any of their `NAMES`: ``arrival_s``, ``prompt_tokens``; for each LLM
    ``score_NAME``, and ``output_tokens_NAME`` unless there is one column ``output_tokens`` for all;
    what a router predicts may stand in ``predicted_score_NAME`` and ``predicted_tokens_NAME``.
    """

    def kinds(header: Sequence[str]) -> Kinds:
        llms = [name.removeprefix("score_") for name in header if name.startswith("score_")]
        if not llms:
            raise MalformedFileError(
                path, 1, "score_NAME", "is missing from the header", "give a column for each LLM"
            )
        chosen = {"arrival_s": "time", "prompt_tokens": "tokens"}
        chosen |= {f"score_{name}": "score" for name in llms}
        lengths = [f"output_tokens_{name}" for name in llms]
        one = any(is_called(name, "output_tokens") for name in header)
        if one and not any(name in header for name in lengths):
            lengths = ["output_tokens"]
        chosen |= dict.fromkeys(lengths, "outputs")
        for prefix, kind in (("predicted_score_", "score"), ("predicted_tokens_", "tokens")):
            if any(name.startswith(prefix) for name in header):
                chosen |= {prefix + name: kind for name in llms}
        return chosen

    columns = read_requests(path, kinds).columns
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
    """The arrival times of a file, at the file's own rate, as often as asked for."""

    times: np.ndarray

    def sample(self, n: int, rng: np.random.Generator, rate: float) -> np.ndarray:
        """The first ``n`` times; see :meth:`Arrivals.sample`."""
        return self.times[:n].copy()
