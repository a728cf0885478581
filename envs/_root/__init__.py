"""servegym: Gymnasium and PettingZoo environments and an agent zoo for LLM serving control.

Importing the package registers every environment id and nothing more: numba, torch and the data
are loaded when an environment is made.
"""

from importlib import metadata as _metadata

import gymnasium as _gymnasium

from servegym.envs.families import FAMILIES as _FAMILIES

try:
    __version__ = _metadata.version("serve-gym")
except _metadata.PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0+unknown"

ENV_IDS: tuple[str, ...] = tuple(env_id for family in _FAMILIES for env_id in family.env_ids)
"""Every Gymnasium id this package registers."""


def register_envs() -> None:
    """Register the environments with Gymnasium; ids already there are left alone."""
    for family in _FAMILIES:
        module = f"servegym.envs.{family.name}"
        for env_id in family.env_ids:
            name = env_id.removeprefix("servegym/").rpartition("-v")[0]
            if env_id not in _gymnasium.registry:
                _gymnasium.register(
                    id=env_id,
                    entry_point=f"{module}.env:{name}Env",
                    vector_entry_point=f"{module}.vector_env:{name}VectorEnv",
                )


register_envs()
