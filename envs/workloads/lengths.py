"""Laws of prompt and output lengths that were fitted to a trace: quantiles, linear in between."""

from __future__ import annotations

import numpy as np

from servegym._checks import choose
from servegym.envs.workloads.files import read_fitted

KINDS = ("prompt_tokens", "output_tokens")


def length_quantiles(trace: str, kind: str, cap: float = np.inf) -> np.ndarray:
    """Quantiles of a trace's lengths at equal steps from 0 to 100 %.

    Args:
        trace: ``azure``, ``mooncake`` or ``sharegpt``.
        kind: ``prompt_tokens`` or ``output_tokens``.
        cap: longer ones are cut to this many tokens.

    Returns:
        float64 (n,), rising; ``sample_lengths`` draws from it.

    Raises:
        ValueError: If there is no such trace or kind.
    """
    laws = read_fitted("lengths.json")["traces"]
    choose("trace", trace, laws)
    choose("kind", kind, KINDS)
    return np.minimum(np.asarray(laws[trace][kind]["quantiles"], dtype=np.float64), cap)


def sample_lengths(quantiles: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Lengths of uniform draws in [0, 1), by quantiles (n,) or one length: float64, whole."""
    return np.rint(np.interp(uniform, np.linspace(0.0, 1.0, len(quantiles)), quantiles))
