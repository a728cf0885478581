"""What an operator knows about a routing system before any request arrives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.protocol import Observation, SystemDescription
from servegym.hardware_profiles.interpolation import along, union

if TYPE_CHECKING:
    from servegym.envs.llm_routing.config import Problem

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TrainRequests:
    """The train split as an operator has it: measured once, used to fit priors.

    Attributes:
        prompt_tokens: (P,).
        predicted_scores: (P, N), what the router would have seen.
        predicted_lengths: (P, N) tokens, what the router would have seen.
        scores: (P, N) in [0, 1].
        output_tokens: (P, N).
    """

    prompt_tokens: Floats
    predicted_scores: Floats
    predicted_lengths: Floats
    scores: Floats
    output_tokens: Floats

    @classmethod
    def of(cls, rows: Floats) -> TrainRequests:
        """The train rows (P, N, 5) of `servegym.envs.llm_routing.config.Problem.table`."""
        scores, lengths, predicted_scores, predicted_lengths = np.moveaxis(rows[..., 1:], -1, 0)
        return cls(rows[:, 0, 0], predicted_scores, predicted_lengths, scores, lengths)


class Library(NamedTuple):
    """What experts are made of: laws of C cards, and answers of K models as predicted.

    Attributes:
        estimator: (C, 4) of the linear law: base_s, seconds per prefill token (k1), seconds per
            context token of a decode (k2), seconds per sequence of a decode.
        prefill_tokens: Grid (G,) of `prefill_s`.
        prefill_s: (C, G) seconds of a prefill iteration of so many prompt tokens.
        context_tokens: Grid (X,) of `decode_s`, mean context of the sequences.
        decode_s: (C, R + 1, X) seconds of a decode iteration with b = 0..R sequences.
        mean_score: (K,) train means of the score; `NO_SCORE` each where nothing predicts scores.
        mean_output_tokens: (K,) train means of the output length; half of ``max_output_tokens``
            each where nothing predicts lengths.
        train: The train split's requests with all K.
        predictors: Kinds of predictions; all models under the first one come first.
    """

    estimator: Floats
    prefill_tokens: Floats
    prefill_s: Floats
    context_tokens: Floats
    decode_s: Floats
    mean_score: Floats
    mean_output_tokens: Floats
    train: TrainRequests
    predictors: int = 1


class Placed(NamedTuple):
    """Which parts of a `Library` the experts of a batch of observations are made of.

    Attributes:
        card: (B, N) indexes of the laws, -1 where no expert is.
        model: (B, N) indexes of the model's answers.
        batch_limit: (B, N) requests that run together at most, see `RoutingSystem.batch_limit`.
        chunked: (B,) 1 for the scheduler ``chunked_prefill``.
        running_capacity: (B,) running slots of an expert.
    """

    card: NDArray[np.int64]
    model: NDArray[np.int64]
    batch_limit: NDArray[np.int64]
    chunked: NDArray[np.int64]
    running_capacity: NDArray[np.int64]


def _fitting(
    train: TrainRequests, paged: Any, mean_output: Floats, longest: int, kv: Floats, most: Any
) -> NDArray[np.int64]:
    """Requests that KV memories let run together, see `RoutingSystem.batch_limit`."""
    answer = np.where(paged, 0.5 * mean_output, float(longest))
    tokens = float(np.mean(train.prompt_tokens)) + answer
    return np.clip((kv / tokens).astype(np.int64), 1, most)


NO_SCORE = 0.5
"""What a score is taken to be by who knows nothing of it: the middle of its range."""


@dataclass(frozen=True, eq=False)
class RoutingSystem(SystemDescription):
    """Static description of N experts, their laws and the network.

    Attributes:
        experts: Names (N,), for messages.
        running_capacity: R, running slots of an expert.
        waiting_capacity: W, places in its waiting queue.
        library: The laws and answers of the experts, each one's own.
        kv_capacity_tokens: (N,) tokens of KV cache.
        max_output_tokens: No output is longer.
        router_delay_s: Constant network and routing delay.
        transfer_s_per_token: Transfer time of a prompt token.
        scheduler: ``"orca"`` or ``"chunked_prefill"``.
        memory_policy: ``"reserve"`` or ``"paged"``.
    """

    family = "llm_routing"

    experts: tuple[str, ...]
    running_capacity: int
    waiting_capacity: int
    library: Library
    kv_capacity_tokens: Floats
    max_output_tokens: int = 300
    router_delay_s: float = 0.005
    transfer_s_per_token: float = 3.2e-5
    scheduler: str = "orca"
    memory_policy: str = "reserve"

    @property
    def num_experts(self) -> int:
        """N."""
        return len(self.experts)

    @property
    def mean_score(self) -> Floats:
        """(N,), see `Library`."""
        return self.library.mean_score

    @property
    def mean_output_tokens(self) -> Floats:
        """(N,), see `Library`."""
        return self.library.mean_output_tokens

    def batch_limit(self) -> NDArray[np.int64]:
        """Requests that an expert's running slots and KV memory let run together on average, (N,).

        A request of the train split's mean prompt takes the longest answer besides where memory is
        reserved, and half of the expert's mean answer where it is paged.
        """
        paged = self.memory_policy == "paged"
        sizes = self.mean_output_tokens, self.max_output_tokens, self.kv_capacity_tokens
        return _fitting(self.library.train, paged, *sizes, self.running_capacity)

    @cached_property
    def _placed(self) -> Placed:
        """`placed` of one observation."""
        each, chunked = np.arange(self.num_experts)[None], self.scheduler == "chunked_prefill"
        sizes = np.array([[chunked], [self.running_capacity]], dtype=np.int64)
        return Placed(each, each, self.batch_limit()[None], *sizes)

    def placed(self, observation: Observation) -> Placed:
        """The parts of `library` that the experts of a batch of observations are made of."""
        batch = len(observation["request"])
        return Placed(*(part.repeat(batch, 0) for part in self._placed))

    def kv_tokens(self, observation: Observation) -> Floats:
        """KV tokens of the experts of a batch of observations, (B, N) or (1, N)."""
        return self.kv_capacity_tokens[None]

    @classmethod
    def from_problem(cls, problem: Problem) -> RoutingSystem:
        """Describe the system of a built routing problem.

        Of its requests only the train split is taken over, whatever split its episodes draw from.
        Under ``score_predictor="zero"`` and ``length_predictor="zero"`` the means are constants
        that say nothing of the experts: whoever has no predictions must not have their means
        either (``"mean"`` predicts these).

        Args:
            problem: As `servegym.envs.llm_routing.config.build_problem` returns it; where fleets
                are drawn, the result is a `FleetSystem`.
        """
        if problem.fleets is not None:
            return FleetSystem(problem)
        arguments, cfg, library = problem.arguments, problem.cfg[0], _library(problem)
        if arguments.score_predictor == "zero":
            library = library._replace(mean_score=np.full_like(library.mean_score, NO_SCORE))
        if arguments.length_predictor == "zero":
            half = np.full_like(library.mean_output_tokens, problem.max_output_tokens / 2)
            library = library._replace(mean_output_tokens=half)
        return cls(
            experts=tuple(
                f"{profile.name}:{model}"
                for profile, model in zip(problem.profiles, problem.models, strict=True)
            ),
            running_capacity=arguments.running_capacity,
            waiting_capacity=arguments.waiting_capacity,
            library=library,
            kv_capacity_tokens=np.array([float(p.kv_capacity_tokens) for p in problem.profiles]),
            max_output_tokens=problem.max_output_tokens,
            router_delay_s=float(cfg["router_delay_s"]),
            transfer_s_per_token=float(cfg["delay_s_per_token"]),
            scheduler=arguments.scheduler,
            memory_policy=arguments.memory_policy,
        )


def _library(problem: Problem, predictors: int = 1) -> Library:
    """What the experts of a problem are made of."""
    train = TrainRequests.of(problem.table[problem.catalog.rows("train")].astype(np.float64))
    return Library(
        coefficients([p.estimator for p in problem.profiles]),
        *laws([p.tables() for p in problem.profiles], problem.arguments.running_capacity),
        train.scores.mean(axis=0),
        train.output_tokens.mean(axis=0),
        train,
        predictors,
    )


def laws(tables: Sequence[Any], running_capacity: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Sample the laws of N experts on common grids; exact, as these are the union of their own.

    ``prefill_s(P) = dense(P) + chunk_attention(P, 0) + head(1)`` and
    ``decode_s(b, x) = dense(b) + decode_attention(b, x) + head(b)`` with mean context x.

    Returns:
        Prompt tokens (G,), prefill seconds (N, G), context tokens (X,), decode seconds
        (N, R + 1, X).
    """
    tokens = union([*(t.dense_tokens for t in tables), *(t.chunk_tokens for t in tables)])
    contexts = union(t.decode_context_tokens for t in tables)
    batch = np.arange(running_capacity + 1, dtype=np.float64)
    prefill, decode = [], []
    for t in tables:
        first = along(t.context_tokens, t.chunk_attention_s, [0.0])[:, 0]
        prefill.append(
            along(t.dense_tokens, t.dense_s, tokens)
            + along(t.chunk_tokens, first, tokens)
            + along(t.head_sequences, t.head_s, [1.0])
        )
        by_context = along(t.decode_context_tokens, t.decode_attention_s, contexts)
        attention = along(t.decode_sequences, by_context.T, batch).T
        others = along(t.dense_tokens, t.dense_s, batch) + along(t.head_sequences, t.head_s, batch)
        decode.append(others[:, None] + attention)
    return tokens, np.array(prefill), contexts, np.array(decode)


def coefficients(estimators: Sequence[Any]) -> Floats:
    """(N, 4) of profiles' estimators."""
    names = ("base_s", "prefill_s_per_token", "decode_s_per_context_token", "decode_s_per_sequence")
    return np.array([[float(getattr(each, name)) for name in names] for each in estimators])


class FleetSystem(RoutingSystem):
    """What is known of systems with ``fleet="random"`` or a setting, before a fleet is seen.

    It has the sizes that observations are padded to and a library of all that experts are made of;
    ``observation["fleet"]`` shows of what each is. Other fields of `RoutingSystem` are refused.

    Args:
        problem: A routing problem with `Problem.fleets`.
    """

    def __init__(self, problem: Problem) -> None:
        assert problem.fleets is not None
        cfg = problem.cfg[0]
        values = {
            "experts": tuple(f"expert {n + 1}" for n in range(problem.num_experts)),
            "running_capacity": problem.arguments.running_capacity,
            "waiting_capacity": problem.arguments.waiting_capacity,
            "max_output_tokens": problem.max_output_tokens,
            "router_delay_s": float(cfg["router_delay_s"]),
            "transfer_s_per_token": float(cfg["delay_s_per_token"]),
            "library": _library(problem, len(problem.fleets.predictors)),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    mean_score = property(lambda self: self.__getattr__("mean_score"))
    mean_output_tokens = property(lambda self: self.__getattr__("mean_output_tokens"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("mean_") or name in {field.name for field in fields(RoutingSystem)}:
            raise ValueError(
                f"system.{name} is known once a fleet is: fleets are drawn for each episode, and "
                "this policy is made for one system. Take one setting by arguments, or a policy "
                "that reads observation['fleet'] or the view 'summary'."
            )
        raise AttributeError(name)

    def placed(self, observation: Observation) -> Placed:
        """See `RoutingSystem.placed`; the fleets are those of ``observation["fleet"]``."""
        fleet, train = observation["fleet"], self.library.train
        there, running = fleet[..., 0] > 0, fleet[..., 4].astype(np.int64)
        card, model = (np.where(there, fleet[..., k], 0).astype(np.int64) for k in (1, 2))
        sizes = self.library.mean_output_tokens[model], self.max_output_tokens, fleet[..., 3]
        limit = _fitting(train, fleet[..., 7] > 0, *sizes, np.maximum(running, 1))
        chunked = np.asarray((fleet[..., 6] > 0).any(-1), dtype=np.int64)
        return Placed(np.where(there, card, -1), model, limit, chunked, running.max(-1))

    def kv_tokens(self, observation: Observation) -> Floats:
        """See `RoutingSystem.kv_tokens`."""
        return np.maximum(observation["fleet"][..., 3], 1.0).astype(np.float64)
