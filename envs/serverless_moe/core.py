"""A batch of serverless systems: the state arrays behind the single and the vector environment."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from gymnasium import spaces

from servegym._jit import compile_kernels
from servegym.envs._batch import Batch
from servegym.envs.serverless_moe import kernel
from servegym.envs.serverless_moe.config import Problem
from servegym.envs.serverless_moe.kernel import layout
from servegym.envs.serverless_moe.records import Request, recorded_request
from servegym.envs.serverless_moe.rivals import serve
from servegym.envs.workloads.lengths import sample_lengths

REWARD_TERMS = ("cost", "ttft_penalty", "tpot_penalty")
STEP_VALUES = ("cost_usd", "cost_fees_usd", "cost_rounding_usd", "mix_cost_usd")
STEP_VALUES += ("ttft_s", "tpot_s", "cold_start_s")
VIOLATIONS = ("ttft", "tpot", "main_memory", "remote_memory", "payload")
_VIOLATION_FIELDS = ("ttft_violated", "tpot_violated", "main_memory", "remote_memory", "payload")

KNOWN_PLANS = 2039
"""Plans that a batch remembers, 3 KB each for 26 layers of 64 experts; a prime for the hashing."""

_LOG_FIELDS: list[tuple[str, str]] = [
    ("prompt", "i4"),
    ("prompt_tokens", "i4"),
    ("output_tokens", "i4"),
    ("gap_s", "f8"),
]
_LOG_FIELDS += [
    (name, "f8" if kind[0].kind == "f" else "i8")
    for name, kind in (layout.LOG.fields or {}).items()
]
_STATE = ("requests", "trem", "functions", "action", "log", "deployment")
REQUEST_LOG = np.dtype(_LOG_FIELDS)
"""Columns of ``request_log``: the request, then those of :data:`layout.LOG`.

``remote_mb`` and ``replicas`` are sums over layers."""


@dataclass
class ServerlessState:
    """Everything that one system is, as plain copies: ``clone_state`` gives it.

    Attributes:
        requests: ``(J,)`` records of the drawn requests.
        trem: ``(J + 1, L)`` invocation overheads, s.
        env: record of position, deployment and sums.
        functions: ``(L,)`` records of the remote functions deployed last.
        action: int64 ``(n,)`` the action that deployed them.
        log: ``(J,)`` records of the requests served.
        deployment: ``(J,)`` records of what the requests take of a deployment that is no plan.
        random: state of the generator that draws the next episodes, None in a bare batch.
        finished: whether the episode has ended.
    """

    requests: np.ndarray
    trem: np.ndarray
    env: np.ndarray
    functions: np.ndarray
    action: np.ndarray
    log: np.ndarray
    deployment: np.ndarray
    random: Any = None
    finished: bool = False


def observation_space(problem: Problem) -> spaces.Space:
    """The observation space of one system, by the problem's view."""
    c = problem.tables.cfg[0]
    if problem.arguments.view == layout.FLAT:
        return spaces.Box(0.0, 1.0, (flat_width(problem),), np.float32)
    layers, experts = int(c["layers"]), int(c["experts"])
    parts: dict[str, spaces.Space] = {
        "activations": spaces.Box(0.0, 1.0, (layers, experts), np.float32),
        "warm_remote": spaces.Box(0.0, 1.0, (layers, 2), np.float32),
    }
    for part, columns in groupby(layout.DICT_COLUMNS, lambda column: column.part):
        top = [c[x.high] if isinstance(x.high, str) else x.high for x in columns]
        high = np.array(top, dtype=np.float32)
        parts[part] = spaces.Box(np.zeros_like(high), high, dtype=np.float32)
    return spaces.Dict(parts)


def flat_width(problem: Problem) -> int:
    """Width of the flat view: its columns, and two for every order and remote ratio."""
    return len(layout.FLAT_COLUMNS) + 4 * len(problem.tables.members)


class ServerlessBatch(Batch):
    """B independent systems of one problem, advanced together by the kernel.

    Attributes:
        problem: what the systems share.
        observation: views of the buffers that the kernel writes: a dict, or one array for the flat
            view. Overwritten by every call.
    """

    def __init__(self, problem: Problem, num_rows: int) -> None:
        self.problem = problem
        self.num_rows = num_rows
        self.terms = REWARD_TERMS
        c = problem.tables.cfg[0]
        length, layers, experts = int(c["requests"]), int(c["layers"]), int(c["experts"])
        flat = np.zeros((num_rows, flat_width(problem)), dtype=np.float32)
        flat_scalars = np.zeros(num_rows, dtype=layout.FLAT_SCALARS)
        self.arrays = layout.Batch(
            requests=np.zeros((num_rows, length), dtype=layout.REQUEST),
            trem=np.zeros((num_rows, length + 1, layers)),
            env=np.zeros(num_rows, dtype=layout.ENV),
            functions=np.zeros((num_rows, layers), dtype=layout.FUNCTION),
            action=np.zeros((num_rows, len(problem.nvec)), dtype=np.int64),
            deployment=np.zeros(
                (num_rows, length * int(c["by_deployment"])), dtype=layout.DEPLOYMENT
            ),
            log=np.zeros((num_rows, length), dtype=layout.LOG),
            activations=np.zeros((num_rows, layers, experts), dtype=np.float32),
            scalars=np.zeros(num_rows, dtype=layout.SCALARS),
            warm_remote=np.zeros((num_rows, layers, 2), dtype=np.float32),
            flat=flat,
            flat_scalars=flat_scalars,
            flat_columns=flat_scalars.view(np.float32).reshape(num_rows, -1),
            action_mask=np.ones((num_rows, int(c["width"])), dtype=np.int8),
            out=np.zeros((num_rows, 4)),
            known=layout.KnownPlans(
                key=np.full(KNOWN_PLANS, -1),
                plan=np.zeros((KNOWN_PLANS, layers), dtype=layout.PLAN),
                replica=np.zeros((KNOWN_PLANS, layers, experts), dtype=np.int8),
            ),
            scratch=layout.Scratch(
                plan=np.zeros(layers, dtype=layout.PLAN),
                replica=np.zeros((layers, experts), dtype=np.int64),
                replica_s=np.zeros(int(c["z_max"])),
                replica_tokens=np.zeros(int(c["z_max"])),
                job_expert=np.zeros(experts, dtype=np.int64),
                job_s=np.zeros(experts),
                job_tokens=np.zeros(experts),
                tokens=np.zeros((layers, experts), dtype=np.int64),
                decoded=np.zeros((layers, int(c["top_k"]) + 1), dtype=np.int64),
                fresh=np.zeros(layers, dtype=np.int64),
            ),
        )
        self.action_mask = self.arrays.action_mask
        self.out = self.arrays.out
        self.env = self.arrays.env
        self.observation: Any
        if problem.arguments.view == layout.FLAT:
            self.observation = flat
        else:
            scalars = self.arrays.scalars.view(np.float32).reshape(num_rows, -1)
            of_column = np.array([column.part for column in layout.DICT_COLUMNS])
            parts = {"activations": self.arrays.activations}
            parts["warm_remote"] = self.arrays.warm_remote
            for part in dict.fromkeys(of_column):
                at = np.flatnonzero(of_column == part)
                parts[part] = scalars[:, at[0] : at[-1] + 1]
            # In the order of the space, which gymnasium sorts by key.
            self.observation = {name: parts[name] for name in sorted(parts)}
        which, actions = np.zeros(num_rows, np.int8), np.zeros((num_rows, len(problem.nvec)), int)
        shared = (problem.tables, self.arrays)
        compile_kernels(
            "serverless MoE engine",
            [
                (kernel.observe, (*shared, which)),
                (kernel.step, (*shared, actions, problem.nvec, which)),
            ],
        )

    def draw(self, row: int, random: np.random.Generator) -> None:
        """Draw the next episode of a row: requests, their lengths and SLOs, gaps and overheads."""
        p, a, r = self.problem, self.problem.arguments, self.arrays.requests[row]
        n = a.episode_requests
        prompts = p.rows[random.integers(0, len(p.rows), n)]
        start = p.tables.recorded.bank_start
        r["prompt"] = prompts
        r["offset"] = random.integers(0, start[prompts + 1] - start[prompts])
        for name, law in zip(("n_in", "n_out"), p.lengths, strict=True):
            r[name] = law[0] if len(law) == 1 else sample_lengths(law, random.random(n))
        error = random.standard_normal(n) * a.output_error
        r["n_out_predicted"] = np.clip(r["n_out"] * np.exp(error), 1.0, p.max_output_tokens)
        limits = p.slo[random.integers(0, len(p.slo), n)]
        r["ttft_limit"], r["tpot_limit"] = limits[:, 0], limits[:, 1]
        classes = np.searchsorted(
            np.cumsum([share for share, _ in a.idle_s])[:-1], random.random(n), side="right"
        )
        r["gap"] = (
            random.standard_exponential(n) * np.array([mean for _, mean in a.idle_s])[classes]
        )
        regimes = len(a.trem_s)
        moves = (random.random(n + 1) < a.trem_switch).astype(np.int64)
        if regimes > 1:
            moves *= random.integers(1, regimes, n + 1)
        regime = (random.integers(0, regimes) + np.cumsum(moves)) % regimes
        spread = random.standard_normal(self.arrays.trem.shape[1:]) * a.trem_sigma
        self.arrays.trem[row] = np.array(a.trem_s)[regime][:, None] * np.exp(spread)
        for index in range(self.arrays.deployment.shape[1]):
            served = serve(a.deployment, p.system, self.request(row, index))
            self.arrays.deployment[row, index] = served

    def request(self, row: int, index: int) -> Request:
        """A drawn request of a row with its true routing."""
        drawn = self.arrays.requests[row, index]
        names = ("prompt", "offset", "n_in", "n_out")
        prompt, offset, n_in, n_out = (int(drawn[name]) for name in names)
        trem = self.arrays.trem[row, index + 1].copy()
        return recorded_request(self.problem.activations, prompt, offset, n_in, n_out, trem)

    def begin(self, which: np.ndarray) -> None:
        """Start the drawn episodes of the rows with ``which`` (int8 ``(B,)``) set."""
        rows, a = which != 0, self.arrays
        a.env[rows], a.functions[rows], a.action[rows], a.out[rows] = (
            np.zeros((), part.dtype) for part in (a.env, a.functions, a.action, a.out)
        )
        a.env["idle_s"][rows] = a.requests["gap"][rows, 0]
        kernel.observe(self.problem.tables, a, which)

    def step(self, actions: np.ndarray, which: np.ndarray) -> int:
        """Serve the current request of the rows with ``which`` set; int64 ``(B, n)`` actions."""
        p = self.problem
        ended = kernel.step(p.tables, self.arrays, actions, p.nvec, which)
        if ended < 0:
            words = f"entries must be from 0 to below {p.nvec.tolist()}"
            raise self.out_of_range(actions, -1 - ended, words)
        return ended

    def values(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """What the last step of each row cost and took, and what it violated: ``(B,)`` arrays."""
        last = self.arrays.log[np.arange(self.num_rows), self.env["index"] - 1]
        values = {name: last[name] for name in STEP_VALUES}
        flags = {
            name: last[field] != 0
            for name, field in zip(VIOLATIONS, _VIOLATION_FIELDS, strict=True)
        }
        return values, flags

    def clone(self, row: int) -> ServerlessState:
        """Copy one system."""
        parts = {name: getattr(self.arrays, name)[row].copy() for name in _STATE}
        return ServerlessState(env=self.env[row : row + 1].copy(), **parts)

    def restore(self, row: int, state: ServerlessState) -> None:
        """Put a copied system back in a row and write its observation."""
        for name in _STATE:
            here, saved = getattr(self.arrays, name)[row], getattr(state, name)
            same = here.shape == saved.shape and here.dtype == saved.dtype
            self.check_state(name, here, saved, same)
        for name in _STATE:
            getattr(self.arrays, name)[row] = getattr(state, name)
        self.env[row] = state.env[0]
        which = np.zeros(self.num_rows, dtype=np.int8)
        which[row] = 1
        kernel.observe(self.problem.tables, self.arrays, which)

    def kpis(self, row: int) -> dict[str, float]:
        """Key figures of the episode so far; NaN before its first request."""
        e = self.env[row]
        count = int(e["index"])
        nan = float("nan")

        def mean(name: str) -> float:
            return float(e[name]) / count if count else nan

        return {
            "cost_usd": float(e["total_cost"]),
            "cost_over_mix": float(e["total_cost"]) / float(e["total_mix"]) if count else nan,
            "mean_cost_usd": mean("total_cost"),
            "mean_fees_usd": mean("total_fees"),
            "mean_rounding_usd": mean("total_rounding"),
            "mean_invocations": mean("invocations"),
            "mean_reward": mean("total_reward"),
            "mean_ttft_s": mean("total_ttft"),
            "mean_tpot_s": mean("total_tpot"),
            "mean_cold_start_s": mean("total_cold"),
            "mean_remote_ratio": mean("total_ratio"),
            "ttft_violation_rate": mean("late_ttft"),
            "tpot_violation_rate": mean("late_tpot"),
            "infeasible_rate": mean("infeasible"),
            "main_warm_rate": mean("main_hits"),
            "requests": float(count),
        }

    def request_log(self, row: int) -> np.ndarray:
        """One row per served request of the current episode, see :data:`REQUEST_LOG`."""
        count = int(self.env[row]["index"])
        log = np.zeros(count, dtype=REQUEST_LOG)
        served, drawn = self.arrays.log[row, :count], self.arrays.requests[row, :count]
        for name in served.dtype.names or ():
            log[name] = served[name]
        log["prompt"], log["gap_s"] = drawn["prompt"], drawn["gap"]
        log["prompt_tokens"], log["output_tokens"] = drawn["n_in"], drawn["n_out"]
        return log

    def __getstate__(self) -> dict[str, Any]:
        return {
            "problem": self.problem,
            "num_rows": self.num_rows,
            # Record scalars lose their class in some NumPy pickles; plain bytes do not.
            "arrays": [np.array(part) for part in self.arrays[:-2]],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Rebuilt so that the observation stays a view of the buffers.
        ServerlessBatch.__init__(self, state["problem"], state["num_rows"])
        for array, saved in zip(self.arrays[:-2], state["arrays"], strict=True):
            array[...] = saved
