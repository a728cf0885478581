"""Checks of the command-line arguments that the measurements share."""

from __future__ import annotations

import math


def whole_numbers(name: str, text: str) -> list[int]:
    """Parse ``1,2,4`` into sorted whole numbers, 1 or more.

    Args:
        name: The argument, for the message.
        text: What was given.

    Returns:
        The numbers, each once.

    Raises:
        ValueError: If one is no whole number of at least 1.
    """
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise ValueError(f"{name} is {text!r}; give whole numbers >= 1 such as 1,2,4")
    return numbers


def positive(name: str, value: float) -> float:
    """The value, if it is a finite number above zero.

    Raises:
        ValueError: If it is not.
    """
    if not math.isfinite(value) or value <= 0.0:
        raise ValueError(f"{name} is {value}; it must be a finite number > 0")
    return value
