"""What command lines share: ``--set key=value``, signals, how a user's mistakes are told."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

EXTRAS = {
    "matplotlib": "plots",
    "pandas": "plots",
    "PIL": "plots",
    "moviepy": "video",
    "pygame": "video",
    "wandb": "track",
    "optuna": "sweep",
    "ray": "ray",
    "yaml": "sweep",
    "aiohttp": "real",
    "grpc": "gateways",
    "envoy_data_plane": "gateways",
    "gguf": "real",
}
"""Library -> the extra that has it; the others are in ``agents``."""


def install_line(extra: str) -> str:
    """How an extra is installed."""
    return f"in a checkout of servegym: pip install '.[{extra}]'"


def in_words(error: Exception) -> str:
    """A user's mistake in one line; an error that is none is raised."""
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or "").partition(".")[0]
        if name == "servegym":
            raise error
        return f"{name} is not installed; {install_line(EXTRAS.get(name, 'agents'))}"
    if not isinstance(error, (ValueError, OSError)):
        raise error
    words = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        words += ": 'standard output'"  # every writer of a file names it
    return words


def add_settings(parser: argparse.ArgumentParser, whose: str = "the environment") -> None:
    """The option ``--set``, repeatable, which `parse_settings` reads."""
    text = f"argument of {whose}; repeatable"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)


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


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt with the number of a SIGINT or SIGTERM; ignore those that follow.

    So no child outlives its parent, and what cleans up is not interrupted.
    """

    def interrupt(number: int, _: Any) -> NoReturn:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt(number)

    if threading.current_thread() is not threading.main_thread():  # which alone is told of signals
        yield
        return
    before = {each: signal.signal(each, interrupt) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def run_main(main: Callable[[], Any]) -> NoReturn:
    """Exit with the status that ``main`` returns; a mistake is one line on stderr, status 2."""
    try:
        try:
            status = main()
        finally:  # after a parser's own exit, too
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough: what is left is dropped
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except (ValueError, OSError, ModuleNotFoundError) as mistake:
        print(f"servegym: error: {in_words(mistake)}", file=sys.stderr)
        raise SystemExit(2) from None
    raise SystemExit(status if isinstance(status, int) else 0)
