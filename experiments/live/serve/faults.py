"""Failures of simulated servers, as tests of gateways ask for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = {
    "error": "new requests are answered with an error (status=500)",
    "stall": "the answer of new requests begins and never goes on",
    "cut": "the connection of new requests breaks after a token of their answer",
    "freeze": "the server computes nothing",
    "refuse": "connections are refused; those that are there go on",
    "crash": "all connections break, requests and cache are lost, and connections are refused",
}
_PER_REQUEST = ("error", "stall", "cut")


@dataclass(frozen=True)
class Fault:
    """A failure; times are simulated seconds after the fleet's start."""

    kind: str  # one of `KINDS`
    server: str = ""  # its name; empty for all
    start_s: float = 0.0
    end_s: float = math.inf
    rate: float = 1.0  # share of the requests that meet it; 1 for what is none of single requests
    status: int = 500  # of an error

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"--fail {self.kind!r} is unknown; there are {', '.join(KINDS)}")
        times = f"from={self.start_s:g} must be at least 0 and before to={self.end_s:g}"
        single, rate = self.kind in _PER_REQUEST, f"rate={self.rate:g} must be in (0, 1]"
        for good, rule in (
            (0.0 <= self.start_s < self.end_s, times),
            (0.0 < self.rate <= 1.0, rate),
            (single or self.rate == 1.0, f"rate is for {', '.join(_PER_REQUEST)} only"),
            (400 <= self.status <= 599, f"status={self.status} must be in 400..599"),
        ):
            if not good:
                raise ValueError(f"--fail {self.kind}: {rule}")

    def at(self, now: float) -> bool:
        """Whether it lasts at a time, seconds."""
        return self.start_s <= now < self.end_s


_FIELDS = {
    "server": ("server", str),
    "from": ("start_s", float),
    "to": ("end_s", float),
    "rate": ("rate", float),
    "status": ("status", int),
}


def parse_fault(text: str, servers: Sequence[str]) -> Fault:
    """Read a failure such as ``error,server=a,rate=0.1,from=5,to=20,status=503``.

    ``servers`` are the names of the fleet's. A ValueError names the field and what is allowed.
    """
    kind, *more = text.split(",")
    values: dict[str, str | float] = {}
    for item in more:
        name, equals, value = item.partition("=")
        if name not in _FIELDS or not equals:
            raise ValueError(
                f"--fail {text!r}: {item!r} is not understood; write one of "
                f"{', '.join(_FIELDS)}, as in error,rate=0.1,from=5,to=20"
            )
        field, read = _FIELDS[name]
        try:
            values[field] = read(value)
        except ValueError:
            raise ValueError(f"--fail {text!r}: {name} is {value!r}; it must be a number") from None
    if values.get("server", servers[0]) not in servers:
        raise ValueError(
            f"--fail {text!r}: server {values['server']!r} is unknown; there are "
            f"{', '.join(servers)}"
        )
    return Fault(kind, **values)  # type: ignore[arg-type]
