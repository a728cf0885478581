"""Compilation of everything that environments and policies compile, ahead of their first use."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence

import gymnasium
import numpy as np

from servegym.envs.families import FAMILIES, Family, family_named
from servegym.envs.llm_routing import replay
from servegym.envs.prefix_routing.live import LiveEngine
from servegym.envs.prefix_routing.replay import replay_prefix
from servegym.envs.prefix_routing.workloads import make_prefix_workload
from servegym.experiments.cli import command_parser
from servegym.hardware_profiles import load


def warm_family(family: Family) -> float:
    """Compile a family's engine and policies, or load them from the cache; seconds that it took.

    Environments, replays and live engines compile when they are made; the compiled parts of
    ``baselines/<family>`` are those of its function ``compile_kernels``, if it has one.
    """
    start = time.perf_counter()
    for env_id in family.env_ids:
        gymnasium.make(env_id).close()
    if family.name == "expert_placement":
        gymnasium.make(family.env_id, serving="offload").close()  # caches are compiled apart
    if family.name == "llm_routing":
        replay([0.0], [1], [1])
    if family.name == "prefix_routing":
        requests = make_prefix_workload("tenants").draw(np.random.default_rng(0), 1, 1.0, 16)
        replay_prefix("h100-llama-3.1-8b", requests)
        LiveEngine(load("h100-llama-3.1-8b"), max_num_seqs=8)
    compile_policies = getattr(
        importlib.import_module(f"servegym.baselines.{family.name}"), "compile_kernels", None
    )
    if compile_policies is not None:
        compile_policies()
    return time.perf_counter() - start


def main(argv: Sequence[str]) -> None:
    """Command line of ``servegym warm``."""
    parser = command_parser("warm")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="see `servegym list` (all)")
    names = parser.parse_args(argv).families
    for family in [family_named(name) for name in names] or FAMILIES:
        print(f"{family.name}: {warm_family(family):.1f} s", flush=True)
