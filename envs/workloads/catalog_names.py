"""Catalogs by name: the packaged one and synthetic ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from servegym._checks import choose, mapping
from servegym.envs.workloads.catalog import Catalog, read_catalog
from servegym.envs.workloads.files import DATA_DIR
from servegym.envs.workloads.synthetic_catalog import synthetic_catalog


@lru_cache(maxsize=1)
def _alpaca_eval() -> Catalog:
    return read_catalog(DATA_DIR / "alpaca_eval_7b.npz")


_LOADERS: dict[str, Callable[..., Catalog]] = {
    "alpaca_eval_7b": _alpaca_eval,
    "synthetic": synthetic_catalog,
}


def list_catalogs() -> list[str]:
    """Names that :func:`load_catalog` knows."""
    return sorted(_LOADERS)


def load_catalog(name: str, /, **kwargs: Any) -> Catalog:
    """Load a catalog by name.

    Args:
        name: ``"alpaca_eval_7b"`` (no arguments) or ``"synthetic"`` (``num_models``,
            ``num_prompts``, ``seed``, ``max_output_tokens``).
        **kwargs: Arguments of that catalog.

    Returns:
        The catalog; the packaged one is read once and shared (its arrays are read-only).

    Raises:
        ValueError: An unknown name or argument, with the nearest valid one.
    """
    load = _LOADERS[choose("catalog", name, list_catalogs())]
    mapping(f"catalog {name!r}", kwargs, inspect.signature(load).parameters)
    return load(**kwargs)
