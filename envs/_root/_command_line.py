"""What command lines share: ``--set key=value``, and how modules end that run as scripts."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

__all__ = ["parse_settings", "run_main"]


def parse_settings(items: Sequence[str]) -> dict[str, Any]:
    """The arguments of an environment from ``--set key=value``.

    A value is JSON, or text where it is no JSON; one item may hold several settings.

    Args:
        items: For instance ``["rate=8", "split=eval", "rate=[4, 11] num_experts=3"]``.

    Raises:
        ValueError: If an item is not of that form, or a key is given twice.
    """
    settings: dict[str, Any] = {}
    for item in (one for several in items for one in re.split(r"\s+(?=\w+=)", several.strip())):
        key, equals, value = item.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"--set {item!r} is not of the form key=value")
        if key in settings:
            raise ValueError(f"--set {key} is given twice")
        try:
            settings[key] = json.loads(value)
        except json.JSONDecodeError:
            settings[key] = value
    return settings


def run_main(main: Callable[[], int]) -> NoReturn:
    """Exit with the status that ``main`` returns; a ValueError is one line on stderr, status 2."""
    try:
        raise SystemExit(main())
    except ValueError as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        raise SystemExit(2) from None
