"""Expert placement as a single Gymnasium environment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from servegym.envs._batch import BatchEnv
from servegym.envs.expert_placement.arguments import PlacementArguments
from servegym.envs.expert_placement.config import Problem, problem_of
from servegym.envs.expert_placement.core import (
    OBSERVATION,
    PlacementBatch,
    action_space,
    check_action,
    observation_space,
)


def _observation_rows() -> Iterator[str]:
    """The rows of the docstring's table of the parts of an observation."""
    for name, (axes, high, text) in OBSERVATION.items():
        most = high if isinstance(high, str) else f"{high:g}"
        yield f"| `{name}` | ({', '.join(axes)}) | {text} [{most}] |"


class ExpertPlacementEnv(BatchEnv[Problem, PlacementBatch]):
    """Decide every epoch which server holds which experts of a mixture-of-experts model.

    A call to another server waits for the network, and moving experts takes the same GPUs and links.

    ## Description

    N edge servers with G GPUs in all serve a model of L layers of E experts. Tokens go to their experts
    on the request's server, else to a remote copy. Equations are Prism's (T. Wu et al.,
    arXiv:2508.12851). All chance is drawn at reset. `docs/placement.md` has scenarios and routers.

    ## Action Space

    A `Dict`: `migrate`, `Discrete(2)`, 1 adopts the plan; and `plan`, by `action_mode`:

    - `"layer_budget"` (default): `Box(0, 1, (N, L))`, over their sum a layer's shares of a server's
      slots; its counts choose the experts.
    - `"layer_height"`: `Box(0, 1, (N, L))`; a server fills its slots by score, the log of an expert's
      share of its `counts` of the layer plus 16 (number - 1/2).
    - `"expert_score"`: `Box(0, 1, (N, L, E))`, the scores themselves.
    - `"placement"`: `MultiBinary((G, L, E))`, which GPU holds which expert.

    All are decoded to a feasible placement.

    ## Observation Space

    A `Dict` of float32 arrays, clipped at the bounds:

    | Key | Shape | Content (highest) |
    |---|---|---|
    {observation}

    ## Rewards

    - `"latency"` (default): minus the request-seconds in the system during the epoch, over its expected
      arrivals.
    - `"log_latency"`: minus the log of each server's request-seconds over its expected arrivals (1 ms
      at least), averaged by expected arrivals.

    ## Starting State

    Experts are spread uniformly; `counts` has `history_requests` other requests of each server.

    ## Episode End

    After `epochs` decisions; the last reward counts what is still in the system.

    ## Information

    A step's `reward_terms` by server and `adopted`; in the end `episode_kpis`.
    `env.unwrapped.request_log()` lists the requests.

    ## Arguments

    The scenario stands for arguments that are none; `simulator.SimulatorArguments` has the engine's,
    with [2] MoE-Infinity (arXiv:2401.14361). Set first `scenario` and `model`, or to learn
    `config.LEARNING`.

    {arguments}

    >>> import gymnasium, servegym
    >>> env = gymnasium.make("servegym/ExpertPlacement-v0")
    >>> env.observation_space["counts"].shape
    (3, 26, 64)
    >>> env.action_space["plan"].shape
    (3, 26)

    ## Version History

    - v0: initial version
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 2}
    arguments = PlacementArguments
    problem_of = staticmethod(problem_of)
    make_batch = PlacementBatch
    make_observation_space = staticmethod(observation_space)
    make_action_space = staticmethod(action_space)

    def _put_action(self, action: Any) -> None:
        self._action = [check_action(action, self.action_space)]

    def _add_info(self, info: dict[str, Any]) -> None:
        info["adopted"] = bool(self.batch.adopted[0])

    @staticmethod
    def frame(batch: PlacementBatch, row: int, mode: str) -> Any:
        """Who holds which experts and how much is served where it arrives, as text or pixels."""
        from servegym.envs.expert_placement.render import render

        return render(batch.episodes[row], mode)


ExpertPlacementEnv.__doc__ = (ExpertPlacementEnv.__doc__ or "").replace(
    "{observation}", "\n".join(_observation_rows())
)
