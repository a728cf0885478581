"""Compilation of everything that environments and policies compile, ahead of their first use."""

from __future__ import annotations

import importlib
import time

import gymnasium

from servegym.envs.families import Family

__all__ = ["warm_family"]


def warm_family(family: Family) -> float:
    """Compile the engine and the policies of a family, or load them from the cache on disk.

    Environments compile when they are made; the compiled parts of ``baselines/<family>`` are those
    of its function ``compile_kernels``, if it has one.

    Returns:
        Seconds that it took.
    """
    start = time.perf_counter()
    for env_id in family.env_ids:
        gymnasium.make(env_id).close()
    compile_policies = getattr(
        importlib.import_module(f"servegym.baselines.{family.name}"), "compile_kernels", None
    )
    if compile_policies is not None:
        compile_policies()
    return time.perf_counter() - start
