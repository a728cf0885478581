"""Options of a calibration as a frozen record: one line each, which the command line repeats."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, field, fields
from typing import Any


def option(text: str, default: Any = MISSING) -> Any:
    """A field of a record of options, and its help; one without a default must be named."""
    return field(default=default, metadata={"help": text})


def add_options(parser: argparse.ArgumentParser, record: type) -> None:
    """Add a flag for each field of a record; sequences are flags that may be repeated."""
    for each in fields(record):
        flag, text = f"--{each.name.replace('_', '-')}", each.metadata["help"]
        if each.default == ():
            parser.add_argument(flag[:-1], dest=each.name, action="append", help=text)
            continue
        kind = {"int": int, "float": float}.get(str(each.type), str)
        parser.add_argument(flag, type=kind, required=each.default is MISSING, help=text)
