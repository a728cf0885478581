"""Files: written whole or not at all, and where the measured data lie."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO


def write_atomic(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
    """Write a file through a temporary one in the same folder, so that none is ever half there.

    Args:
        path: The file to write; its folder must exist.
        write: Writes the content to the binary stream that it is given.
    """
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            write(stream)
        # mkstemp makes the file private to its owner; give it the usual mode of a new file.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_text(path: str | os.PathLike[str], text: str | bytes) -> None:
    """Write UTF-8 text or bytes with :func:`write_atomic`; line ends stay as they are."""
    data = text.encode() if isinstance(text, str) else text
    write_atomic(path, lambda stream: stream.write(data))


def write_json(path: str | os.PathLike[str], content: Any) -> None:
    """Write ``content`` as indented JSON with :func:`write_atomic`."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def measured_data(*parts: str) -> Path | None:
    """Path of a measured file below ``$SERVEGYM_DATA``, or None when the variable is not set."""
    root = os.environ.get("SERVEGYM_DATA")
    return Path(root).joinpath(*parts) if root else None
