"""Trained policies from their checkpoints, behind the protocol of the baselines."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.protocol import BasePolicy, Observation

AGENTS = (
    "sac_han",
    "ppo_han",
    "pqn",
    "rpi",
    "ppo",
    "ppo_serverless",
    "ppo_placement",
    "mappo_placement",
)
SHIPPED = Path(__file__).resolve().parent.parent / "checkpoints"


def shipped(family: str) -> dict[str, Path]:
    """The checkpoints that come with the package: name -> file, by environment family.

    Beside each file lies its model card, ``NAME.md``.
    """
    return {path.stem: path for path in sorted((SHIPPED / family).glob("*.safetensors"))}


class CheckpointPolicy(BasePolicy):
    """The greedy policy of a checkpoint.

    Attributes:
        path: The file.
        agent: The file in ``agents`` that wrote it, one of `AGENTS`.
        args: The arguments of its training run.
    """

    def __init__(
        self, name: str, env_view: str, path: Path, agent: str, args: Any, net: Any
    ) -> None:
        self.name, self.env_view = name, env_view
        self.path, self.agent, self.args, self.net = path, agent, args, net

    def _rows(self, observation: Observation) -> Any:
        return np.asarray(observation)

    def act(
        self, observation: Observation, action_mask: NDArray[np.integer[Any]]
    ) -> NDArray[np.int64]:
        """The likeliest legal action of every row."""
        import torch

        with torch.inference_mode():
            rows = torch.as_tensor(self._rows(observation)).float()
            logits = self._log_policy(rows, torch.as_tensor(np.asarray(action_mask)))
        return logits.argmax(-1).numpy().astype(np.int64)

    def _log_policy(self, rows: Any, mask: Any) -> Any:
        if rows.shape[-1] != self.net.columns or mask.shape[-1] != self.net.actions:
            raise ValueError(
                f"{self.path}: trained on {self.net.columns} columns and {self.net.actions} "
                f"actions, got {rows.shape[-1]} and {mask.shape[-1]}"
            )
        return self.net(rows, mask)[0]


class GraphPolicy(CheckpointPolicy):
    """A checkpoint of an agent over the graph, ``sac_han``, ``ppo_han``, ``pqn`` or ``rpi``.

    With a graph encoder it takes other capacities and fleets.
    """

    experts: int = 0
    single: Any = None
    """The same network for a batch of one, in numpy; None where the state is no graph."""

    def act(
        self, observation: Observation, action_mask: NDArray[np.integer[Any]]
    ) -> NDArray[np.int64]:
        """The likeliest legal action of every row; a batch of one takes the short way."""
        if self.single is None or len(action_mask) != 1:
            return super().act(observation, action_mask)
        rows = self._rows(observation)
        logits = self.single.logits(rows, self.net.layout)
        legal = np.asarray(action_mask)[0] != 0
        return np.array([np.where(legal, logits, -np.inf).argmax()], dtype=np.int64)

    def _rows(self, observation: Observation) -> Any:
        from servegym.agents.han import Layout

        running, waiting = observation["running"].shape, observation["waiting"].shape
        if running[1] != self.experts:
            raise ValueError(
                f"{self.path}: made for {self.experts} experts, got {running[1]}; "
                "a policy over the graph takes another fleet with load_policy(path, system)"
            )
        layout = Layout(running[1], running[2], waiting[2], self.net.layout.impact)
        self.net.layout = self.net.encoder.layout = layout
        return self.net.rows(observation)

    def _log_policy(self, rows: Any, mask: Any) -> Any:
        if self.agent == "sac_han":
            return self.net.log_policy(self.net.encode(rows), mask)
        return self.net(rows, mask)[0]


def load_policy(
    path: str | os.PathLike[str], system: Any = None, torch_threads: int | None = 1
) -> CheckpointPolicy:
    """Read a checkpoint written by an agent.

    Args:
        path: The safetensors file, or a run's folder (its ``best.safetensors`` is taken).
        system: A `RoutingSystem`; its estimators replace those of the training fleet, so that the
            policy can serve other experts. Or a `PlacementSystem`: the cluster to place on.
            Default: that of the training.
        torch_threads: Threads of torch from now on (None: leave them).

    Returns:
        A greedy policy; its name follows from what was trained (``sac_han``, ``baseline_rl``,
        ``baseline_rl_dsa``, ``ppo_han``, ``ppo_sets``, ``pqn``, ``rpi``, ``ppo``,
        ``ppo_serverless``).

    Raises:
        ValueError: If there is no such file, or it is no checkpoint of these agents.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "best.safetensors"
    if not file.exists():
        raise ValueError(f"path: no checkpoint at {file}")
    import torch
    from safetensors import SafetensorError

    if torch_threads is not None:
        torch.set_num_threads(torch_threads)
    try:
        meta, weights = _content(file)
    except (SafetensorError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not a safetensors file ({error})") from error
    kind = meta.get("agent")
    if kind not in AGENTS:
        raise ValueError(
            f"{file}: field 'agent' is {kind!r}; it must be one of {', '.join(AGENTS)}"
        )
    for name, values in weights.items():
        if not torch.isfinite(values).all():
            raise ValueError(f"{file}: weight {name!r} is not finite")
    try:
        return _LOADERS[kind](file, meta, weights, system)
    except KeyError as error:
        raise ValueError(f"{file}: field {error} is missing from its metadata") from None
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        if str(file) in str(error):
            raise
        raise ValueError(f"{file}: cannot be used as {kind!r}: {error}") from None


def _arguments(cls: type, text: str) -> Any:
    given, known = _mapping("args", text), {f.name for f in fields(cls)}
    return cls(
        **{k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if k in known}
    )


def _mapping(field: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"field {field!r}: not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"field {field!r}: got {found!r}; it must be a mapping")
    return found


def _fill(net: Any, weights: dict[str, Any]) -> None:
    """Put the weights into a network, whose ``law`` is that of the system at hand."""
    weights.pop("law", None)
    missing, unknown = net.load_state_dict(weights, strict=False)
    wrong = [name for name in missing if name != "law"] + unknown
    if wrong:
        raise ValueError(f"the weights {', '.join(wrong)} are missing or unknown")


def _load_sac(file: Path, meta: dict[str, str], weights: dict[str, Any], system: Any) -> Any:
    from servegym.agents import han, sac_han
    from servegym.agents.lib.run import env_kwargs
    from servegym.agents.lib.single_decision import SingleDecision
    from servegym.baselines.llm_routing.system import RoutingSystem

    args = _arguments(sac_han.Args, meta["args"])
    # Trained before there was one, without foresight.
    if "prior" not in _mapping("args", meta["args"]):
        args.prior, args.foresight = 0.0, False
    layout = han.Layout(**_mapping("layout", meta["layout"]))
    if system is None:
        system = RoutingSystem.from_kwargs(**env_kwargs(args))
    net = sac_han.Agent(layout, args, system)
    _check_experts(file, net.actor, layout, system)
    _fill(net, weights)
    name = "baseline_rl" if args.state == "expert" else "sac_han"
    if args.state == "han" and args.reward == "completed_qos":
        name = "baseline_rl_dsa"
    policy = GraphPolicy(name, "graph", file, "sac_han", args, net.eval())
    policy.experts = system.num_experts
    if net.graph and args.encoder == "han":
        policy.single = SingleDecision(net)
    return policy


def _check_experts(file: Path, actor: Any, layout: Any, system: Any) -> None:
    """An actor with one output per action is made for one number of experts."""
    if not getattr(actor, "per_expert", True) and system.num_experts != layout.experts:
        raise ValueError(f"{file}: made for {layout.experts} experts, got {system.num_experts}")


def _load_graph(file: Path, meta: dict[str, str], weights: dict[str, Any], system: Any) -> Any:
    from servegym.agents import han, ppo_han, pqn, rpi
    from servegym.agents.lib.run import env_kwargs
    from servegym.agents.lib.single_decision import SingleDecision
    from servegym.baselines.llm_routing.system import RoutingSystem

    kind = meta["agent"]
    module: Any = {"ppo_han": ppo_han, "pqn": pqn, "rpi": rpi}[kind]
    args = _arguments(module.Args, meta["args"])
    if system is None:
        system = RoutingSystem.from_kwargs(**env_kwargs(args))
    layout = han.Layout(**_mapping("layout", meta["layout"]))
    net = module.Agent(layout, args, system)
    _check_experts(file, getattr(net, "actor", None), layout, system)
    _fill(net, weights)
    name = f"ppo_{args.encoder}" if kind == "ppo_han" else kind
    policy = GraphPolicy(name, "graph", file, kind, args, net.eval())
    policy.experts = system.num_experts
    if kind != "pqn" and args.encoder == "han":
        policy.single = SingleDecision(net)
    return policy


def _load_ppo(file: Path, meta: dict[str, str], weights: dict[str, Any], system: Any) -> Any:
    from servegym.agents import ppo

    net = ppo.Agent(**_mapping("shape", meta["shape"]))
    net.load_state_dict(weights)
    args = _arguments(ppo.Args, meta["args"])
    view = "experts" if "Experts" in args.env_id else "flat"
    return CheckpointPolicy("ppo", view, file, "ppo", args, net.eval())


def _content(file: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Text and weights of a checkpoint."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as content:
        keys = content.keys()
        return content.metadata() or {}, {key: content.get_tensor(key) for key in keys}


_LOADERS = {
    "sac_han": _load_sac,
    "ppo_han": _load_graph,
    "pqn": _load_graph,
    "rpi": _load_graph,
    "ppo": _load_ppo,
}
