"""servegym: Gymnasium and PettingZoo environments and an agent zoo for LLM serving control.

Importing the package registers every environment id and nothing more: numba, torch and the data
are loaded when an environment is made.
"""

from importlib import metadata as _metadata

import gymnasium as _gymnasium

try:
    __version__ = _metadata.version("serve-gym")
except _metadata.PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0+unknown"

_FAMILIES = {
    "llm_routing": ("LLMRouting", "LLMRoutingFlat", "LLMRoutingExperts"),
    "serverless_moe": ("ServerlessMoE", "ServerlessMoEFlat"),
    "expert_placement": ("ExpertPlacement",),
}

ENV_IDS: tuple[str, ...] = tuple(
    f"servegym/{name}-v0" for names in _FAMILIES.values() for name in names
)
"""Every Gymnasium id this package registers."""


def register_envs() -> None:
    """Register the environments with Gymnasium; ids already there are left alone."""
    for family, names in _FAMILIES.items():
        for name in names:
            if f"servegym/{name}-v0" not in _gymnasium.registry:
                _gymnasium.register(
                    id=f"servegym/{name}-v0",
                    entry_point=f"servegym.envs.{family}.env:{name}Env",
                    vector_entry_point=f"servegym.envs.{family}.vector_env:{name}VectorEnv",
                )


register_envs()
