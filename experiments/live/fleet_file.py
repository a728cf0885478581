"""FLEET.toml: the inference servers of a fleet, real ones and simulated ones.

Each is a ``[[server]]`` with the fields of `ServerSpec`, its engine ``llama.cpp``, ``simulated``,
or ``vllm`` for any server of yours that a gateway finds at its host and port. Relative paths are
relative to the file.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servegym._checks import mapping, whole
from servegym.envs import _arguments as arg
from servegym.envs._arguments import Arguments

ENGINES = ("llama.cpp", "vllm", "simulated")
LOOPBACK = "127.0.0.1"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def _name(argument: str, value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        form = "it must be of letters, digits, '-', '_' and '.'"
        raise ValueError(f"{argument} is {value!r}; {form}")
    return value


def _text(argument: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{argument} is {value!r}; it must be a text")
    return value


def _cores(argument: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{argument} is {value!r}; it must be a list of whole numbers")
    return tuple(whole(argument, core, 0, (os.cpu_count() or 1) - 1) for core in value)


@dataclass(frozen=True)
class ServerSpec(Arguments):
    """One server of a fleet: the fields of a ``[[server]]``.

    Raises:
        ValueError: Naming the field, what was given and what is allowed.
    """

    name: str = arg.other("", "also the model's name in requests", _name)
    engine: str = arg.choice("", ENGINES, "what serves")
    model: str = arg.other("", "random:LAYERSxWIDTH or a GGUF file; simulated: a name", _text)
    slots: int = arg.whole(8, 1, "requests that run at a time", high=4096)
    context: int = arg.whole(512, 2, "tokens of prompt and output of a request", high=1 << 24)
    cores: tuple[int, ...] = arg.other((), "processor cores; none are all", _cores)
    host: str = arg.other(LOOPBACK, "address that it listens on", _text)
    port: int = arg.whole(0, 0, "0 takes a free one", high=65535)
    batched_tokens: int = arg.whole(2048, 1, "most tokens of an iteration", high=1 << 24)
    profile: str = arg.other("", "hardware profile, by name or file", _text)
    options: Mapping[str, Any] = arg.other({}, "kv_tokens, block_size, async_scheduling", mapping)

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = {"simulated": "profile", "llama.cpp": "model"}.get(self.engine)
        if needed and not getattr(self, needed):
            raise ValueError(f"{needed} is missing; engine = {self.engine!r} needs one")

    def url(self, port: int) -> str:
        """The base address of OpenAI's protocol at a port, such as http://127.0.0.1:8000/v1."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{port}/v1"


def _spec(entry: object, folder: Path) -> ServerSpec:
    """One ``[[server]]``; relative files are taken from ``folder``."""
    if not isinstance(entry, Mapping):
        raise ValueError("must be a table: write [[server]]")
    values = dict(entry)
    for key in ("model", "profile"):
        value = values.get(key)
        if isinstance(value, str) and value and (folder / value).exists():
            values[key] = os.path.abspath(folder / value)
    return ServerSpec.fill(values)


def read_fleet(path: str | os.PathLike[str]) -> list[ServerSpec]:
    """The servers of FLEET.toml in the file's order; there is at least one.

    Raises:
        ValueError: Naming the file, the server and the field.
        OSError: If the file cannot be read.
    """
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not TOML: {error}") from None
    unknown = sorted(set(data) - {"server"})
    if unknown:
        raise ValueError(f"{path}: field {unknown[0]!r} is unknown; servers are [[server]]")
    entries = data.get("server")
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: no server; write at least one [[server]]")
    specs: list[ServerSpec] = []
    for number, entry in enumerate(entries, 1):
        try:
            specs.append(_spec(entry, path.parent))
        except ValueError as error:
            raise ValueError(f"{path}: server {number}: {error}") from None
    names: list[Any] = [spec.name for spec in specs]
    ports: list[Any] = [(spec.host, spec.port) for spec in specs if spec.port]
    for what, values in (("name", names), ("port", ports)):
        twice = [value for value in values if values.count(value) > 1]
        if twice:
            raise ValueError(f"{path}: {what} {twice[0]!r} is given to two servers")
    return specs
