"""How each engine of a fleet is started."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from servegym._command_line import install_line
from servegym.experiments.live import llama_server
from servegym.experiments.live.fleet_file import ServerSpec
from servegym.hardware_profiles import load

__all__ = ["START_S", "command"]

START_S = {"llama.cpp": 60.0, "vllm": 300.0, "simulated": 180.0}
"""Seconds that an engine may take until it is healthy."""


def command(spec: ServerSpec, model: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """The command of a server and its environment; ``model`` is its GGUF file or folder.

    Raises:
        ValueError: If the engine is not installed, or a simulated one's profile cannot be read.
    """
    python = spec.python or sys.executable
    if spec.python and not os.access(spec.python, os.X_OK):
        raise ValueError(f"server {spec.name!r}: python is {spec.python!r}; no program is there")
    threads = max(1, len(spec.cores))
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    more = [word for key, value in spec.options.items() for word in (f"--{key}", str(value))]
    if spec.engine == "llama.cpp":
        if not spec.python and importlib.util.find_spec("xllamacpp") is None:
            raise ValueError(
                f"server {spec.name!r}: xllamacpp is not installed; {install_line('real')}"
            )
        words = [python, str(Path(llama_server.__file__)), "--model", str(model)]
        words += ["--name", spec.name, "--host", spec.host, "--port", str(port)]
        words += ["--slots", str(spec.slots), "--context", str(spec.context)]
        words += ["--batched-tokens", str(spec.batched_tokens), "--threads", str(threads)]
        return words + more, environment
    if spec.engine == "vllm":
        words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        words += ["--served-model-name", spec.name, "--host", spec.host, "--port", str(port)]
        words += ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len", str(spec.context)]
        words += ["--max-num-seqs", str(spec.slots)]
        words += ["--max-num-batched-tokens", str(spec.batched_tokens)]
        environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        environment["VLLM_CPU_OMP_THREADS_BIND"] = (
            ",".join(map(str, spec.cores)) if spec.cores else "auto"
        )
        # The tree that runs servegym is no part of the other interpreter's.
        environment.pop("PYTHONPATH", None)
        return words + more, environment
    try:
        load(spec.profile)
    except ValueError as error:
        raise ValueError(f"server {spec.name!r}: {error}") from None
    words = [python, "-m", "servegym.experiments.live.serve.command", "--name", spec.name]
    words += ["--model", spec.model or spec.name, "--profile", spec.profile]
    words += ["--slots", str(spec.slots), "--context", str(spec.context)]
    words += ["--batched-tokens", str(spec.batched_tokens)]
    words += ["--host", spec.host, "--port", str(port)]
    names = [word.replace("_", "-") if word.startswith("--") else word for word in more]
    return words + names, environment
