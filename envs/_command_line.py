"""How the modules with a command line end when they are run as scripts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn


def run_main(main: Callable[[], int]) -> NoReturn:
    """Exit with the status that ``main`` returns; a ValueError is one line on stderr, status 2."""
    try:
        raise SystemExit(main())
    except ValueError as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        raise SystemExit(2) from None
