"""Damaged files: every loader refuses them with the file's name, and nothing half read is used.

Each loader gets a good file and copies of it that were cut, flipped at a bit, emptied, overwritten
or exchanged for a folder, and with every value of it replaced by what does not belong there.
`SERVEGYM_EXAMPLES=200` tries that many random cuts and flips instead of a few.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from servegym import hardware_profiles
from servegym.envs.workloads import load_catalog, predictions
from servegym.envs.workloads.traces import load_trace, read_requests
from servegym.experiments.evaluation.leaderboard import read_board
from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.replay import REPLAYED as FIELDS
from servegym.hardware_profiles.load import data_path
from servegym.hardware_profiles.measure.table import ResumableTable

FLIPS = int(os.environ.get("SERVEGYM_EXAMPLES", 0)) or 3
SAMPLE = 100_000 if "SERVEGYM_EXAMPLES" in os.environ else 50
NAN = float("nan")
HUGE = 10**30


class Loader(NamedTuple):
    """What writes a good file, and what belongs to it, into a folder; and what reads it."""

    write: Callable[[Path], Path]
    read: Callable[[Path], Any]
    free: tuple[str, ...] = ()  # words of places where anything may stand (text, notes)


def _text(name: str, text: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_text(text, encoding="utf-8")
        return folder / name

    return write


def _shipped(name: str) -> Callable[[Path], Path]:
    return _text(name, data_path(name).read_text(encoding="utf-8"))


SMALL = load_catalog("synthetic", num_models=2, num_prompts=12)


def _table(folder: Path) -> Path:
    predictions.write_table(folder / "table.npz", SMALL, {"score": SMALL.scores})
    return folder / "table.npz"


REQUESTS = "arrival_s,prompt_tokens,output_tokens\n0.5,12,30\n0.7,3,8\n2,4,5\n"
TRACE = "timestamp,prompt_tokens,output_tokens\n0.5,12,30\n0.7,3,8\n2,4,5\n"
JSONL = "".join(
    json.dumps({"timestamp": t, "input_length": 5, "output_length": 7, "hash_ids": [1]}) + "\n"
    for t in (0, 40, 90)
)
ROWS = "policy,value,note\nrandom,0.5,\ngreedy,0.75,good\n"
BOARD = "point,policy,value,low,high,episodes\nrouting,random,0.5,0.4,0.6,20\n"
CARD = "rtx4090-llama-3.1-8b"


LOADERS: dict[str, Loader] = {
    "profile": Loader(_shipped(f"{CARD}.json"), hardware_profiles.load),
    "fleet": Loader(_shipped("fleet-edge-6-heterogeneous.json"), hardware_profiles.load_fleet),
    "trace": Loader(_text("trace.csv", TRACE), load_trace, free=("tokens",)),
    "trace lines": Loader(_text("trace.jsonl", JSONL), load_trace),
    "requests": Loader(
        _text("requests.csv", REQUESTS), lambda path: read_requests(path, lambda _: FIELDS)
    ),
    "prediction table": Loader(
        _table,
        lambda path: predictions.predict(SMALL, [0, 1], "score", "learned", table=path),
        free=("catalog",),
    ),
    "rows": Loader(_text("rows.csv", ROWS), read_rows, free=("value",)),
    "leaderboard": Loader(
        _text("board.csv", BOARD), read_board, free=("low", "high", "nan", "inf")
    ),
    "measured": Loader(
        _text("measured.csv", "op,tokens,time_us\nqkv,1,3.5\nqkv,2,4\n"),
        lambda path: ResumableTable(path, ("op", "tokens", "time_us"), ("op", "tokens")),
        free=("tokens", "time_us"),
    ),
}


Damage = tuple[str, Callable[[Path], object]]


def _overwrite(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def byte_damages(content: bytes, suffix: str) -> Iterator[Damage]:
    """What may befall any file."""
    random = np.random.default_rng(len(content))
    yield "missing", Path.unlink
    yield "a folder", _folder
    yield "empty", _overwrite(b"")
    yield "one byte", _overwrite(content[:1])
    yield "zeros", _overwrite(bytes(len(content)))
    yield "noise", _overwrite(random.bytes(len(content)))
    yield "UTF-16", _overwrite("timestamp,x\n1,2\n".encode("utf-16"))
    yield "not UTF-8", _overwrite(b"\xff\xfe\xfd" + content)
    yield "LFS pointer", _overwrite(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    yield "another kind", _overwrite(b"PK\x03\x04" if suffix != ".npz" else b"{}")
    if suffix in (".json", ".jsonl"):
        yield "deep", _overwrite(b"[" * 100_000)
        yield "deep mapping", _overwrite(b'{"a":' * 100_000)
        yield "long number", _overwrite(b"9" * 5000)
        yield "a number", _overwrite(b"3")
        yield "a list", _overwrite(b"[1, 2]")
        yield "null", _overwrite(b"null")
        yield "nothing in it", _overwrite(b"{}")
    if suffix == ".csv":
        yield "header alone", _overwrite(content.splitlines()[0])
        yield "long line", _overwrite(content + b"9" * 200_000 + b"\n")
        yield "zero byte", _overwrite(content + b"1,\0,2\n")
        yield "open quote", _overwrite(content + b'"1,2,3\n')
        yield "ragged", _overwrite(content + b"1\n")
        yield "wide", _overwrite(content + b",".join([b"5"] * 40) + b"\n")
    for at in random.integers(1, len(content), FLIPS).tolist():
        yield f"cut at {at}", _overwrite(content[:at])
    for at in random.integers(0, 8 * len(content), 2 * FLIPS).tolist():
        flipped = bytearray(content)
        flipped[at // 8] ^= 1 << at % 8
        yield f"bit {at}", _overwrite(bytes(flipped))


def _leaves(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Places in a JSON value; of long lists the first and last."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = [(i, value[i]) for i in {0, len(value) - 1} if value]
    else:
        return
    for key, inner in items:
        yield (*at, key)
        yield from _leaves(inner, (*at, key))


def _at(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        value = value[key]
    return value


JSON_JUNK = [None, True, "x", "", [], [[]], {}, {"x": 1}, NAN, float("inf"), -1, 0, 0.5, HUGE]


def json_damages(content: bytes) -> Iterator[tuple[str, bytes, bool]]:
    """Damaged contents, and whether they must be refused: a number turned into none."""
    good = json.loads(content)
    for place in _leaves(good):
        old, word = _at(good, place), "/".join(map(str, place))
        number = isinstance(old, (int, float)) and not isinstance(old, bool)
        for new in JSON_JUNK:
            changed = json.loads(content)
            _at(changed, place[:-1])[place[-1]] = new
            must = number and (not isinstance(new, (int, float)) or new != new)
            yield f"{word} = {new!r}", json.dumps(changed).encode(), must
        if isinstance(place[-1], str):
            changed = json.loads(content)
            del _at(changed, place[:-1])[place[-1]]
            yield f"no {word}", json.dumps(changed).encode(), False


CSV_JUNK = ["", "x", "nan", "inf", "-1", "0", "0.5", "1e400", "9" * 400, "True", "'", " "]


def csv_damages(content: bytes) -> Iterator[tuple[str, bytes, bool]]:
    """The same of every cell of the first row, and every column renamed or dropped."""
    rows = list(csv.reader(io.StringIO(content.decode())))

    def text(changed: list[list[str]]) -> bytes:
        stream = io.StringIO()
        csv.writer(stream, lineterminator="\n").writerows(changed)
        return stream.getvalue().encode()

    for column, title in enumerate(rows[0]):
        for cell in CSV_JUNK:
            changed = [list(row) for row in rows]
            changed[1][column] = cell
            must = rows[1][column].replace(".", "").isdigit() and cell in ("", "x", "nan", "inf")
            yield f"{title} = {cell[:9]!r}", text(changed), must
        yield f"no {title}", text([row[:column] + row[column + 1 :] for row in rows]), False
        twice = [[*row, cell] for row, cell in zip(rows, [title, *"12345678"], strict=False)]
        yield f"{title} twice", text(twice), False


def npz_damages(content: bytes) -> Iterator[tuple[str, bytes, bool]]:
    """Every array missing, of another shape, type or range."""
    with np.load(io.BytesIO(content)) as archive:
        arrays = {name: archive[name] for name in archive.files}

    def packed(changed: dict[str, Any]) -> bytes:
        stream = io.BytesIO()
        np.savez(stream, **changed)
        return stream.getvalue()

    for name, array in arrays.items():
        number = array.dtype.kind in "iuf"
        yield f"no {name}", packed({k: v for k, v in arrays.items() if k != name}), True
        changes: dict[str, tuple[Any, bool]] = {
            "objects": (np.array([None, {}], dtype=object), True),
            "one more axis": (array[None], True),
            "as text": (array.astype(str), number),
        }
        if array.ndim:
            changes |= {"cut": (array[:-1], True), "one value": (array.ravel()[0], True)}
        if number:
            changes |= {f"all {x}": (np.full(array.shape, x), x != 0) for x in (NAN, -1, 1e300, 0)}
        for word, (changed, must) in changes.items():
            yield f"{name}: {word}", packed(arrays | {name: changed}), must


DAMAGES = {".json": json_damages, ".csv": csv_damages, ".npz": npz_damages}


def refusal(read: Callable[[Path], Any], path: Path) -> str | None:
    """What a reader says, None if it reads; any other error than the two is the test's."""
    try:
        read(path)
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def judged(
    read: Callable[[Path], Any],
    path: Path,
    damages: Iterable[Damage],
    always: Container[str],
) -> list[str]:
    """What went wrong: another error, a message without the file, or one of ``always`` accepted."""
    wrong, content = [], path.read_bytes()
    for word, damage in damages:
        damage(path)
        try:
            said = refusal(read, path)
        except Exception as error:  # noqa: BLE001 - reported, with what was done to the file
            wrong.append(f"{word}: {type(error).__name__}: {str(error)[:120]}")
        else:
            if said is not None and path.name not in said:
                wrong.append(f"{word}: the file is not named: {said[:150]}")
            if said is None and word in always:
                wrong.append(f"{word}: accepted")
        if path.is_dir():
            path.rmdir()
        path.write_bytes(content)
    return wrong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOADERS)
def test_damaged_files_are_refused_by_name(name, tmp_path):
    loader = LOADERS[name]
    good = loader.write(tmp_path)
    content = good.read_bytes()
    assert refusal(loader.read, good) is None
    always = ("a folder", "noise", *(["missing"] if name not in NEW else []))
    damages = byte_damages(content, good.suffix)
    wrong = judged(loader.read, good, damages, always)
    changes = list(DAMAGES.get(good.suffix, lambda _: iter(()))(content))
    if len(changes) > SAMPLE:
        picked = np.random.default_rng(0).choice(len(changes), SAMPLE, replace=False)
        changes = [changes[i] for i in sorted(picked)]
    damages = [(word, _overwrite(changed)) for word, changed, _ in changes]
    must = {word for word, _, must in changes if must}
    must = {word for word in must if not any(place in word for place in loader.free)}
    wrong += judged(loader.read, good, damages, must)
    assert not wrong, "\n".join(wrong)


NEW = ("measured", "leaderboard")  # begin a table where there is none
