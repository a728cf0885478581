"""Checkpoints: writing them, reading them as policies, and the ones that come with the package.

A safetensors file: weights, and as metadata ``agent``, its ``args`` (JSON), the ``setting`` of its
system, what ``load(meta, weights, system)`` of that agent needs besides, and a ``sha256``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from servegym._files import write_atomic
from servegym.baselines.protocol import BasePolicy

AGENTS = (
    "sac_han",
    "sac_rows",
    "td_afterstates",
    "ppo",
    "ppo_requests",
    "cem",
    "ppo_serverless",
    "ppo_placement",
    "mappo_placement",
)
SHIPPED = Path(__file__).resolve().parent.parent / "checkpoints"


class CheckpointPolicy(BasePolicy):
    """The greedy policy of a checkpoint.

    Args:
        name: Name shown in tables.
        env_view: ``graph``, ``flat`` or ``experts``, see `servegym.baselines.protocol.Policy`.
        args: Arguments of the training run.
        net: The network.
        decide: Actions for a batch of observations and their action masks; None in a subclass
            with an `act` of its own.
        training_env: Arguments of the training environment.

    Attributes:
        path: The file.
        agent: The file in ``agents`` that reads it, one of `AGENTS`.
    """

    path: Path = Path()
    agent: str = ""

    def __init__(
        self,
        name: str,
        env_view: str,
        args: Any,
        net: Any,
        decide: Callable[[Any, Any], Any] | None = None,
        training_env: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self.env_view = name, env_view
        self.args, self.net, self.decide = args, net.eval(), decide
        self.training_env = dict(training_env or {})

    def act(self, observation: Any, action_mask: Any = None) -> Any:
        """The likeliest legal action of every row."""
        import torch

        if self.decide is None:
            raise NotImplementedError(f"{type(self).__name__} must define act()")
        with torch.inference_mode():
            return self.decide(observation, action_mask)


def write_checkpoint(net: Any, meta: Mapping[str, str], path: Path) -> None:
    """Weights and metadata in one safetensors file, written atomically."""
    from safetensors.torch import save

    weights = {k: v.detach().contiguous().cpu() for k, v in net.state_dict().items()}
    content = save(weights, {**meta, "sha256": checksum(meta, weights)})
    write_atomic(path, lambda stream: stream.write(content))


def save_best_and_last(
    write: Callable[[Path], None], args: Any, run: Path, score: float, best: float
) -> float:
    """Write ``last.safetensors``, and ``best.safetensors`` for a new best; returns the best score.

    ``write`` writes the policy to a file in the folder of the run, if the agent's ``args`` have
    ``save_model``; the higher the score, the better.
    """
    if args.save_model:
        write(run / "last.safetensors")
        if score > best:
            write(run / "best.safetensors")
    return max(score, best)


def shipped(family: str) -> dict[str, Path]:
    """The checkpoints that come with the package: name -> file, by environment family.

    Next to each file lies its model card, ``NAME.md``.
    """
    return {path.stem: path for path in sorted((SHIPPED / family).glob("*.safetensors"))}


def card_sentence(path: Path) -> str:
    """The first sentence of a shipped file's card: what made it, what it sees, for which loads."""
    text = path.with_suffix(".md").read_text(encoding="utf-8").split("\n# ", 1)[1]
    first = " ".join(text.split("\n\n")[1].split()).replace("`", "")
    return re.split(r"(?<=[.]) (?=[A-Z])", first)[0]


def shipped_for(family: str, name: str, system: Any) -> Path | None:
    """The shipped file that a name means for a system, if there is one; None if none has the name.

    An agent's own name means its file for the system at hand where one was trained for it, as
    ``ppo_placement`` means ``ppo_placement_paper_testbed`` on the cluster of that scenario. Every
    other name means the file of that name.
    """
    files = shipped(family)
    if name not in files or name not in AGENTS or system is None:
        return files.get(name)
    others = [path for stem, path in files.items() if stem.startswith(f"{name}_")]
    for path in [files[name], *others]:
        meta, _ = read_content(path)
        if meta["agent"] == name and "setting" in meta and meta["setting"] == system.setting:
            return path
    return files[name]


def load_policy(path: str | os.PathLike[str], system: Any = None) -> CheckpointPolicy:
    """Read a checkpoint written by an agent.

    Args:
        path: The safetensors file, or a run's folder (its ``best.safetensors``, or its last).
        system: A `RoutingSystem`; its estimators replace those of the training fleet, so that the
            policy can serve other experts. Or a `PlacementSystem`: the cluster to place on.
            Default: that of the training.

    Returns:
        A greedy policy; its name says what was trained: ``sac_han``, ``sac_rows``,
        ``baseline_rl``, or that of the agent.

    Raises:
        ValueError: If there is no such file, or it is no checkpoint of these agents.
    """
    file = Path(path)
    if file.is_dir():
        best = file / "best.safetensors"
        file = best if best.exists() else file / "last.safetensors"
    if not file.exists():
        raise ValueError(f"path: no checkpoint at {file}")
    import torch
    from safetensors import SafetensorError

    torch.set_num_threads(1)
    try:
        meta, weights = read_content(file)
    except (SafetensorError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not a safetensors file ({error})") from error
    agent = meta.get("agent")
    if agent not in AGENTS:
        raise ValueError(
            f"{file}: field 'agent' is {agent!r}; it must be one of {', '.join(AGENTS)}"
        )
    for name, values in weights.items():
        if not torch.isfinite(values).all():
            raise ValueError(f"{file}: weight {name!r} is not finite")
    try:
        policy = import_module(f"servegym.agents.{agent}").load(meta, weights, system)
    except KeyError as error:
        raise ValueError(f"{file}: field {error} is missing from its metadata") from None
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: cannot be used as {agent!r}: {error}") from None
    policy.path, policy.agent = file, policy.agent or agent
    return policy


def checksum(meta: Mapping[str, str], weights: Mapping[str, Any]) -> str:
    """SHA-256 of a file's metadata, but for this number, and of its tensors (hexadecimal)."""
    parts = sorted(item for item in meta.items() if item[0] != "sha256")
    digest = hashlib.sha256(json.dumps(parts).encode())
    for name, values in sorted(weights.items()):
        digest.update(f"{name} {values.dtype} {list(values.shape)}".encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()


def read_content(file: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Metadata and weights of a checkpoint or a snapshot.

    ValueError if they are not what was written, by its checksum; older files have none.
    """
    from safetensors import safe_open

    with safe_open(file, framework="pt") as content:
        keys = content.keys()
        meta, weights = content.metadata() or {}, {key: content.get_tensor(key) for key in keys}
    if "sha256" in meta and meta["sha256"] != checksum(meta, weights):
        raise ValueError(f"{file}: field 'sha256' is of another content: damaged, copy it again")
    return meta, weights


def json_field(meta: Mapping[str, str], field: str) -> dict[str, Any]:
    """A metadata field that holds a JSON mapping; KeyError or ValueError if it does not."""
    try:
        value = json.loads(meta[field])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"field {field!r}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"field {field!r}: got {value!r}; it must be a mapping")
    return value


def saved_args(cls: type, saved: Mapping[str, Any]) -> Any:
    """Arguments of a training run, an agent's ``Args``, from the metadata field ``args``."""
    names = {f.name for f in fields(cls)}
    return cls(
        **{k: tuple(v) if isinstance(v, list) else v for k, v in saved.items() if k in names}
    )
