"""Serverless MoE partitioning as a single Gymnasium environment."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from servegym.envs._batch import BatchEnv
from servegym.envs.serverless_moe.arguments import ServerlessArguments
from servegym.envs.serverless_moe.config import Problem, problem_of
from servegym.envs.serverless_moe.core import (
    STEP_VALUES,
    VIOLATIONS,
    ServerlessBatch,
    observation_space,
)
from servegym.envs.serverless_moe.kernel import layout


def action_space(problem: Problem) -> spaces.MultiDiscrete:
    """The action space of one system."""
    return spaces.MultiDiscrete(problem.nvec)


def _dict_lines() -> str:
    """Lines of the docstring on the parts of `DICT_COLUMNS`, with the most where it is not 1."""
    parts: dict[str, list[str]] = {}
    for column in layout.DICT_COLUMNS:
        most = "" if isinstance(column.high, str) or column.high == 1.0 else f" [{column.high:g}]"
        parts.setdefault(column.part, []).append(column.text + most)
    return "\n".join(f"- `{part}` ({len(x)},): {'; '.join(x)}" for part, x in parts.items())


class ServerlessMoEEnv(BatchEnv[Problem, ServerlessBatch]):
    """Choose, request by request, which experts of a MoE model run as remote functions.

    ## Description

    A model of L layers of K experts runs in functions billed by memory and time. The main function
    holds the non-expert modules on a GPU and *local* experts on CPU; each layer has one, in z replicas,
    for its *remote* experts. A remote call pays an overhead t_rem. MIX has every expert local.
    Equations are Remoe's (W. Liu et al.). All chance is drawn at reset. `docs/serverless.md` has
    presets, fees and constants.

    ## Action Space

    `MultiDiscrete([levels, 2, n_w, n_y, n_z])`, by default `[17, 2, 6, 7, 6]`, of indices:

    | Part | Values | Meaning |
    |---|---|---|
    | b | 0, K/16, ..., K experts (K < 16: 0, 1, ..., K) | remote experts of a layer, those of least predicted activation |
    | order | 0, 1 | prediction of this prompt, or mean of the training prompts, which repeats plans |
    | w | 0, 500, 1000, 2000, 4000, 8000 MB (`w_headroom_mb`) | memory of the main function above the least (10f) |
    | y | 0, 200, 400, 800, 1200, 1600, 2400 MB (`y_headroom_mb`) | of a remote function (10e) |
    | z | 0, 1, 2, 3, 5, 7 (`z_headroom`) | replicas above the least that `payload_mb` allows (10g) |

    `granularity="per_layer"` has y and z for each layer; `keep_action=True` adds a part that keeps the
    warm plan. `info["action_mask"]` (int8, 38 entries by default) is 0 for a b that memory or payload
    rule out. An infeasible plan is served by a cold MIX, at both penalties.

    ## Observation Space

    A `Dict` of float32 arrays, clipped at the bounds:

    - `activations` (L, K): predicted activation frequencies
    - `warm_remote` (L, 2): if warm: memory and replicas of each layer, over the largest
    {observation}

    ## Rewards

    -(`cost` + `ttft_penalty` + `tpot_penalty`), in costs of a cold MIX for the request; see `penalty`.

    ## Starting State

    Nothing is deployed.

    ## Episode End

    After `episode_requests` requests.

    ## Information

    A step's `reward_terms`, `cost_usd`, `mix_cost_usd`, `ttft_s`, `tpot_s`, `cold_start_s`,
    `violations` and more; in the end `episode_kpis`. `env.unwrapped.request_log()` lists the requests.

    ## Arguments

    The preset stands for arguments that are none.

    {arguments}

    `model` (L x K): `deepseek-v2-lite` (26 x 64), `gpt-oss-20b` (24 x 32), `mixtral-8x7b` (32 x 8),
    `gpt2-moe` (12 x 8), `toy` (4 x 8).

    >>> import gymnasium, servegym
    >>> env = gymnasium.make("servegym/ServerlessMoE-v0", model="toy")
    >>> env.reset(seed=0)[0]["activations"].shape, env.action_space.nvec.tolist()
    ((4, 8), [9, 2, 6, 7, 6])

    ## Version History

    - v0: initial version
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}
    view = layout.DICT
    arguments = ServerlessArguments
    problem_of = staticmethod(problem_of)
    make_batch = ServerlessBatch
    make_observation_space = staticmethod(observation_space)
    make_action_space = staticmethod(action_space)

    def _put_action(self, action: Any) -> None:
        actions = np.asarray(action)
        if actions.shape != self.problem.nvec.shape or actions.dtype.kind not in "iu":
            raise ValueError(
                f"action={action!r} must be whole numbers of shape {self.problem.nvec.shape}."
            )
        self._action[0] = actions

    def _add_info(self, info: dict[str, Any]) -> None:
        values, flags = self.batch.values()
        info.update({name: float(values[name][0]) for name in STEP_VALUES})
        info["violations"] = {name: bool(flags[name][0]) for name in VIOLATIONS}

    @staticmethod
    def frame(batch: ServerlessBatch, row: int, mode: str) -> Any:
        """Memory and cost of the last requests, as text or pixels."""
        from servegym.envs.serverless_moe.render import render

        return render(batch, row, mode)


ServerlessMoEEnv.__doc__ = (ServerlessMoEEnv.__doc__ or "").replace("{observation}", _dict_lines())


class ServerlessMoEFlatEnv(ServerlessMoEEnv):
    """Choose, request by request, which experts of a MoE model run as remote functions.

    They save memory that is billed all the time, but a call of one takes time, and each request has
    limits on its latency.

    ## Description

    The system is that of `ServerlessMoEEnv`: functions are billed by memory and time, start cold and
    stay warm for a while. A discount of about 0.9 helps to learn.

    ## Action Space

    `MultiDiscrete`, by default `[17, 2, 6, 7, 6, 2]`: the parts of `ServerlessMoEEnv`, then 1 to keep
    the warm plan.

    ## Observation Space

    A float32 `Box(0, 1, (15 + 4 levels,))`:

    {observation}
    - for both orders and each b: predicted share of the tokens' experts that is remote, mean and
      largest over layers

    ## Rewards

    Minus cost and penalties for missed limits, in costs of the request with every expert local and
    cold.

    ## Starting State

    Nothing is deployed.

    ## Episode End

    After `episode_requests` requests; `info["episode_kpis"]` then has costs and violations.

    ## Arguments

    Those of `servegym/ServerlessMoE-v0`, with another default: `keep_action=True`. Set first `model`
    and `preset`.

    >>> import gymnasium, servegym
    >>> env = gymnasium.make("servegym/ServerlessMoEFlat-v1")
    >>> env.reset(seed=0)[0].shape, env.action_space.nvec.tolist()
    ((83,), [17, 2, 6, 7, 6, 2])

    ## Version History

    - v1: `keep_action=True` is the default
    """

    view = layout.FLAT


ServerlessMoEFlatEnv.__doc__ = (ServerlessMoEFlatEnv.__doc__ or "").replace(
    "{observation}", "\n".join(f"- `{name}`: {text}" for name, text in layout.FLAT_COLUMNS)
)
