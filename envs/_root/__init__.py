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

_ROUTING = {
    "servegym/LLMRouting-v0": "LLMRouting",
    "servegym/LLMRoutingFlat-v0": "LLMRoutingFlat",
    "servegym/LLMRoutingExperts-v0": "LLMRoutingExperts",
}

ENV_IDS: tuple[str, ...] = tuple(_ROUTING)
"""Every Gymnasium id this package registers."""


def register_envs() -> None:
    """Register the environments with Gymnasium; ids already there are left alone."""
    for env_id, name in _ROUTING.items():
        if env_id not in _gymnasium.registry:
            _gymnasium.register(
                id=env_id,
                entry_point=f"servegym.envs.llm_routing.env:{name}Env",
                vector_entry_point=f"servegym.envs.llm_routing.vector_env:{name}VectorEnv",
            )


register_envs()
