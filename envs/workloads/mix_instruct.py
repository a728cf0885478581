"""MixInstruct (LLM-Blender) as a catalog, from a copy of the data that the user has.

A record is ``{"id", "instruction", "input", "output", "candidates": [{"model", "decoding_method",
"text", "scores": {"bertscore": ...}}, ...]}``; the file is a JSON array of records or JSONL.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym._checks import choose, whole
from servegym._files import MalformedFileError, json_rows
from servegym.envs.workloads.catalog import MAX_OUTPUT_TOKENS, SPLITS, Catalog, make_split

HOW_TO_GET = (
    "download it with `hf download llm-blender/mix-instruct --repo-type dataset --local-dir DIR` "
    "and pass path=DIR, or one of its .json/.jsonl files"
)
_PARTS = {"train": "train", "val": "val", "eval": "test"}

Tokenizer = Callable[[str], int | Sequence[Any]]


def count_tokens(text: str) -> int:
    """Token count without a tokenizer: one per four UTF-8 bytes, rounded up, at least one."""
    return max(1, math.ceil(len(text.encode()) / 4))


def load_mix_instruct(
    path: str | os.PathLike[str] | None = None,
    models: Sequence[str] | None = None,
    score: str = "bertscore",
    tokenizer: Tokenizer | None = None,
    max_output_tokens: int = MAX_OUTPUT_TOKENS,
    seed: int = 0,
) -> Catalog:
    """Load MixInstruct.

    A token count is, in this order: the precomputed ``prompt_tokens`` of the record or
    ``output_tokens`` of the candidate; ``tokenizer(text)``; :func:`count_tokens`. The prompt's
    text is the instruction and the input, joined by a line break. Of several candidates of one
    LLM the first counts.

    Args:
        path: A ``.json``/``.jsonl`` file, split 60/10/30 by ``seed``, or a folder with
            ``{train,val,test}_data_prepared.json`` (or ``.jsonl``), which are the splits.
        models: LLMs of the catalog; those of the first record if None. Every record must have
            them all.
        score: Name of the score, one in [0, 1].
        tokenizer: Text -> number of tokens, or a sequence of them.
        max_output_tokens: Outputs are cut here, >= 1.
        seed: Seed of the split of a single file, >= 0.

    Returns:
        The catalog.

    Raises:
        ValueError: No path, no such file, or a bad argument.
        MalformedFileError: Names file, line or record, and field.
    """
    cap = whole("max_output_tokens", max_output_tokens, 1)
    seed = whole("seed", seed, 0)
    if path is None:
        raise ValueError(f"catalog 'mix_instruct' needs path=; {HOW_TO_GET}.")
    files = _files(Path(path))
    names = None if models is None else list(models)
    prompts: list[int] = []
    scores: list[list[float]] = []
    outputs: list[list[int]] = []
    split: list[int] = []
    for part, file in files.items():
        before = len(prompts)
        for place, record in _records(file):
            if names is None:
                names = _names(file, place, record)
            prompts.append(_prompt_tokens(file, place, record, tokenizer))
            row = [_candidate(file, place, record, n, score, tokenizer) for n in names]
            scores.append([value for value, _ in row])
            outputs.append([min(max(tokens, 1), cap) for _, tokens in row])
            split.append(SPLITS.index(part) if part else 0)
        if len(prompts) == before:
            raise MalformedFileError(file, None, None, "has no records", HOW_TO_GET)
    single = list(files) == [""]
    return Catalog(
        name="mix_instruct",
        models=tuple(names or ()),
        prompt_tokens=np.array(prompts),
        scores=np.array(scores),
        output_tokens=np.array(outputs),
        split=make_split(np.zeros(len(prompts)), seed) if single else np.array(split),
        max_output_tokens=cap,
        provenance={
            "kind": "measured",
            "source": "llm-blender/mix-instruct, the user's copy",
            "files": [file.name for file in files.values()],
            "score": score,
            "tokens": "tokenizer" if tokenizer else "one per four UTF-8 bytes if not precomputed",
        },
    )


def _files(path: Path) -> dict[str, Path]:
    """Split name -> file; "" for a single file."""
    if path.is_file():
        return {"": path}
    if not path.is_dir():
        raise ValueError(f"path={os.fspath(path)!r} does not exist; {HOW_TO_GET}.")
    files = {}
    for part, word in _PARTS.items():
        stem = path / f"{word}_data_prepared"
        found = [stem.with_suffix(end) for end in (".json", ".jsonl")]
        found = [file for file in found if file.is_file()]
        if not found:
            raise ValueError(
                f"path={os.fspath(path)!r} has no {stem.name}.json or .jsonl; {HOW_TO_GET}."
            )
        files[part] = found[0]
    return files


def _records(path: Path) -> Iterator[tuple[int | str, dict[str, Any]]]:
    fix = "the file must be a JSON array of records, or JSONL with one record a line"
    try:
        with path.open(encoding="utf-8-sig") as stream:
            first = next((line for line in stream if line.strip()), "")
            if first.startswith("version https://git-lfs"):
                raise MalformedFileError(path, 1, None, "is a Git LFS pointer", HOW_TO_GET)
            stream.seek(0)
            if first.lstrip().startswith("["):
                try:
                    rows = json.load(stream)
                except json.JSONDecodeError as error:
                    problem = f"is not JSON ({error.msg})"
                    raise MalformedFileError(path, error.lineno, None, problem, fix) from error
                except (ValueError, RecursionError) as error:  # numbers too long, nesting too deep
                    raise MalformedFileError(path, None, None, f"({error})", fix) from error
                numbered: Any = ((f"record {k}", row) for k, row in enumerate(rows, start=1))
            else:
                numbered = json_rows(path)
            for place, row in numbered:
                if not isinstance(row, dict):
                    raise MalformedFileError(path, place, None, "is not a JSON object", fix)
                yield place, row
    except UnicodeDecodeError as error:
        raise MalformedFileError(path, None, None, f"is not UTF-8 ({error})", fix) from error


def _candidates(path: Path, place: int | str, record: dict[str, Any]) -> list[dict[str, Any]]:
    found = record.get("candidates")
    fix = "give a non-empty list of {model, text, scores}"
    if not isinstance(found, list) or not found:
        raise MalformedFileError(path, place, "candidates", "is missing or empty", fix)
    for k, candidate in enumerate(found):
        if not isinstance(candidate, dict) or not isinstance(candidate.get("model"), str):
            raise MalformedFileError(path, place, f"candidates[{k}].model", "is missing", fix)
    return found


def _names(path: Path, place: int | str, record: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(item["model"] for item in _candidates(path, place, record)))


def _tokens(
    path: Path, place: int | str, name: str, given: Any, text: str, tokenizer: Tokenizer | None
) -> int:
    if given is not None:
        if isinstance(given, bool) or not isinstance(given, int) or given < 0:
            fix = "write a whole number of tokens >= 0, or leave it out"
            raise MalformedFileError(path, place, name, f"{given!r} is not a token count", fix)
        return given
    if tokenizer is None:
        return count_tokens(text)
    counted = tokenizer(text)
    return counted if isinstance(counted, int) else len(counted)


def _prompt_tokens(
    path: Path, place: int | str, record: dict[str, Any], tokenizer: Tokenizer | None
) -> int:
    parts = []
    for name in ("instruction", "input"):
        value = record.get(name, "")
        if not isinstance(value, str):
            fix = "write it as text, empty if there is none"
            raise MalformedFileError(path, place, name, f"{value!r} is not text", fix)
        parts.append(value)
    given = record.get("prompt_tokens")
    text = "\n".join(part for part in parts if part)
    if given is None and not text:
        fix = "give the prompt's text, or drop the record"
        raise MalformedFileError(path, place, "instruction", "and input are both empty", fix)
    return max(_tokens(path, place, "prompt_tokens", given, text, tokenizer), 1)


def _candidate(
    path: Path,
    place: int | str,
    record: dict[str, Any],
    model: str,
    score: str,
    tokenizer: Tokenizer | None,
) -> tuple[float, int]:
    """Score and output tokens of an LLM's candidate."""
    items = _candidates(path, place, record)
    names = [item["model"] for item in items]
    try:
        choose("model", model, names)
    except ValueError as error:
        fix = "drop the record, or pass models= with those that every record has"
        raise MalformedFileError(path, place, "candidates", str(error), fix) from None
    found = items[names.index(model)]
    name = f"candidates[{model}].scores.{score}"
    table = found.get("scores")
    value = table.get(score) if isinstance(table, dict) else None
    fix = "drop the record, or pass score= with one in [0, 1] that all have, such as bertscore"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MalformedFileError(path, place, name, f"{value!r} is not a number", fix)
    if not 0 <= value <= 1:  # NaN fails too
        raise MalformedFileError(path, place, name, f"{value!r} is not in [0, 1]", fix)
    text = found.get("text", "")
    given = found.get("output_tokens")
    if given is None and not isinstance(text, str):
        name = f"candidates[{model}].text"
        raise MalformedFileError(path, place, name, f"{text!r} is not text", "write it as text")
    if given is None and "text" not in found:
        name = f"candidates[{model}].text"
        raise MalformedFileError(path, place, name, "is missing", "add it, or output_tokens")
    name = f"candidates[{model}].output_tokens"
    return float(value), _tokens(path, place, name, given, text, tokenizer)
