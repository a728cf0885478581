"""LLM routing: an access point sends each request to one of N LLM experts, or drops it.

The functions are loaded at first use: importing the package must not load the compiled engine. No
module has the name of one of them, since importing it would put it in the function's place.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from servegym.envs.llm_routing.pettingzoo_env import parallel_env
    from servegym.envs.llm_routing.trace_replay import replay, replay_timeline

__all__ = ["parallel_env", "replay", "replay_timeline"]

_MODULES = {
    "parallel_env": "pettingzoo_env",
    "replay": "trace_replay",
    "replay_timeline": "trace_replay",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
