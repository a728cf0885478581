"""LLM routing: an access point sends each request to one of N LLM experts, or drops it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from servegym.envs.llm_routing.replay import replay

__all__ = ["replay"]


def __getattr__(name: str) -> Any:
    # The engine is compiled code; it is loaded when it is asked for.
    if name == "replay":
        from servegym.envs.llm_routing.replay import replay

        globals()["replay"] = replay
        return replay
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
