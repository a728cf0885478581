"""Learning agents: runnable single files, and the loader of their checkpoints."""

from servegym.agents.lib.checkpoint import load_policy, shipped

__all__ = ["load_policy", "shipped"]
