"""Expert placement over edge servers: which server holds which experts, and when to migrate.

`parallel_env` is loaded at first use: importing the package must not load the compiled engine. No
module has its name, since importing it would put it in the function's place.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from servegym.envs.expert_placement.pettingzoo_env import parallel_env

__all__ = ["parallel_env"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.pettingzoo_env"), name)
