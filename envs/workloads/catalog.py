"""Catalogs: per prompt, its length and what each LLM would make of it.

A request of the routing environment is one row of a :class:`Catalog`: the prompt's tokens and, for
every LLM of the catalog, the quality score of its answer and the length of that answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from servegym._checks import choose, whole
from servegym._files import read_json
from servegym.envs.workloads.files import checked, read_arrays

SPLITS = ("train", "val", "eval")
SPLIT_SHARES = (0.6, 0.1, 0.3)
MAX_OUTPUT_TOKENS = 300


@dataclass(frozen=True, eq=False)
class Catalog:
    """Prompts x LLMs with scores and output lengths. The arrays are read-only.

    Attributes:
        name: Name of the catalog.
        models: The M LLM names.
        prompt_tokens: int32 (P,), tokens of each prompt, >= 1.
        scores: float32 (P, M), quality of each answer in [0, 1].
        output_tokens: int32 (P, M), tokens of each answer, in 1..``max_output_tokens``.
        split: int8 (P,), 0 train, 1 val, 2 eval.
        max_output_tokens: Cap on the output length, tokens.
        provenance: Where the numbers come from (source, licence, command, date).
        prompt_ids: int64 (P,), the prompts' ids in the source; their row numbers if not given.

    Raises:
        ValueError: A shape, range or NaN check fails; the message names the field and the place.
    """

    name: str
    models: tuple[str, ...]
    prompt_tokens: np.ndarray = field(repr=False)
    scores: np.ndarray = field(repr=False)
    output_tokens: np.ndarray = field(repr=False)
    split: np.ndarray = field(repr=False)
    max_output_tokens: int
    provenance: Mapping[str, Any] = field(repr=False)
    prompt_ids: np.ndarray | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        models = tuple(str(model) for model in self.models)
        if not models or len(set(models)) != len(models):
            raise ValueError(f"models={models!r} must be at least one name, each once.")
        cap = whole("max_output_tokens", self.max_output_tokens, 1)
        prompts = np.asarray(self.prompt_tokens).shape
        if len(prompts) != 1 or prompts[0] == 0:
            raise ValueError(f"prompt_tokens has shape {prompts}, it must be (P,) with P >= 1.")
        table = (prompts[0], len(models))
        arrays = {
            "prompt_tokens": checked(
                "prompt_tokens", self.prompt_tokens, prompts, 1, None, np.int32
            ),
            "scores": checked("scores", self.scores, table, 0, 1, np.float32),
            "output_tokens": checked("output_tokens", self.output_tokens, table, 1, cap, np.int32),
            "split": checked("split", self.split, prompts, 0, 2, np.int8),
        }
        ids = np.arange(prompts[0]) if self.prompt_ids is None else self.prompt_ids
        arrays["prompt_ids"] = checked("prompt_ids", ids, prompts, None, None, np.int64)
        for name, array in arrays.items():
            object.__setattr__(self, name, array)
        object.__setattr__(self, "models", models)
        object.__setattr__(self, "max_output_tokens", cap)

    @property
    def num_prompts(self) -> int:
        """P, the number of prompts."""
        return self.prompt_tokens.shape[0]

    @property
    def num_models(self) -> int:
        """M, the number of LLMs."""
        return len(self.models)

    def rows(self, split: str) -> np.ndarray:
        """Rows of ``train``, ``val``, ``eval`` or ``all``, int32 (n,); ValueError for another."""
        if choose("split", split, (*SPLITS, "all")) == "all":
            return np.arange(self.num_prompts, dtype=np.int32)
        return np.flatnonzero(self.split == SPLITS.index(split)).astype(np.int32)

    def columns(self, models: Sequence[str]) -> np.ndarray:
        """Columns intp (N,) of LLMs by name; a name may occur more than once (replicas).

        Raises:
            ValueError: A name that the catalog does not have, with the nearest one it has.
        """
        if isinstance(models, str):
            raise ValueError(f"models={models!r} must be a sequence of names, not one string.")
        for model in models:
            choose(f"catalog {self.name!r}: model", model, self.models)
        return np.array([self.models.index(model) for model in models], dtype=np.intp)


def make_split(groups: np.ndarray, seed: int) -> np.ndarray:
    """Assign prompts to train/val/eval, 60/10/30, stratified by group: int8 (P,), 0, 1 or 2.

    The prompts are ordered by (group, random key) and dealt out along that order, so that the
    totals are exact to one prompt and each group has its shares to within two prompts.
    """
    groups = np.asarray(groups)
    keys = np.random.default_rng(seed).random(len(groups))
    order = np.lexsort((keys, groups))
    position = np.arange(len(groups))
    split = np.empty(len(groups), dtype=np.int8)
    # Ten consecutive prompts of the order are dealt as 6 train, 1 val, 3 eval, interleaved.
    pattern = np.array([0, 2, 0, 0, 2, 0, 1, 0, 2, 0], dtype=np.int8)
    split[order] = pattern[position % 10]
    return split


def read_catalog(path: Path) -> Catalog:
    """Read a catalog ``.npz``, and the ``.json`` of the same name with its provenance."""
    remedy = "rebuild it with `python -m servegym.envs.workloads.build.catalog`"
    provenance = read_json(path.with_suffix(".json"), remedy)
    arrays = read_arrays(path, remedy)
    return Catalog(
        name=path.stem,
        models=tuple(arrays["models"].tolist()),
        max_output_tokens=int(arrays["max_output_tokens"]),
        provenance=provenance,
        prompt_ids=arrays["prompt_id"],
        **{key: arrays[key] for key in ("prompt_tokens", "scores", "output_tokens", "split")},
    )
