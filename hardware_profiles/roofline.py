"""A profile of a card that no kernel table is of: the reading of memory and the arithmetic.

    step = weight bytes / bandwidth + 2 x parameters x tokens / arithmetic
           + KV bytes of the decodes / bandwidth

It is where ``servegym calibrate server`` begins on an unknown card.
"""

from __future__ import annotations

from servegym.hardware_profiles.compose import USABLE_MEMORY, activation_reserve_bytes
from servegym.hardware_profiles.law import Profile
from servegym.hardware_profiles.model_config import ModelShape
from servegym.hardware_profiles.schema import FORMAT

# Composed over this law: three dense models on seven cards, decodes of 1 to 256 sequences of 256
# and 2,048 tokens, and prompts of 128 to 2,048; with the errors of composed steps on top.
STEP_ERROR = {"prefill": {"bias": 0.04, "sd": 0.35}, "decode": {"bias": 0.23, "sd": 0.2}}


def roofline(
    shape: ModelShape, bandwidth_bytes_per_s: float, flop_per_s: float, memory_bytes: float
) -> Profile:
    """The profile of a dense model on one card in 16 bits.

    Args:
        shape: the model.
        bandwidth_bytes_per_s: of the card's memory.
        flop_per_s: of its tensor cores, 16 bits.
        memory_bytes: of the card.

    Raises:
        ValueError: For a mixture of experts, numbers that cannot be a card's, or weights that
            leave no room for KV memory.
    """
    if shape.experts or shape.latent:
        raise ValueError(f"model: {shape.name} is no dense model; begin with --card or --profile")
    for name, value, least, most, unit in (
        ("bandwidth", bandwidth_bytes_per_s, 1e9, 1e14, "GB/s"),
        ("tflops", flop_per_s, 1e9, 1e17, "Tflop/s"),
    ):
        if not least <= value <= most:
            raise ValueError(f"{name}: got {value:g} a second; is it in {unit}?")
    facts = shape.facts()
    token_s = 2.0 * shape.parameters / flop_per_s
    linear = {
        "base_s": facts["weight_bytes"] / bandwidth_bytes_per_s,
        "prefill_s_per_token": token_s,
        "decode_s_per_sequence": token_s,
        "decode_s_per_context_token": facts["kv_bytes_per_token"] / bandwidth_bytes_per_s,
    }
    data = {
        "format": FORMAT,
        "name": f"roofline-{shape.name.lower()}",
        "description": f"{shape.name} by memory bandwidth and arithmetic",
        "kind": "derived",
        "device": {
            "name": "unknown card",
            "memory_bytes": memory_bytes,
            "usable_memory_fraction": USABLE_MEMORY,
        },
        "model": facts,
        "engine": {
            "name": "unknown",
            "version": "unknown",
            "dtype": "bf16",
            "activation_reserve_bytes": activation_reserve_bytes(shape, 1),
        },
        "law": {"kind": "linear", **linear},
        "estimator": linear,
        "domain": {
            "max_decode_sequences": 256,
            "max_iteration_tokens": 8192,
            "max_context_tokens": 32768,
        },
        "fit_error": {"measure": "nothing was measured"},
        "step_error": STEP_ERROR,
        "provenance": {
            "source": "memory bandwidth and arithmetic of the card, as the user states them",
            "licence": "none",
            "date": "undated",
            "command": "servegym calibrate server --bandwidth --tflops --memory-gb",
        },
    }
    return Profile.from_dict(data, "roofline")
