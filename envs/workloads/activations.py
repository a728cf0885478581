"""MoE models and the experts their tokens activate.

An :class:`Activations` holds, for a set of prompts, how often every expert of every MoE layer was
chosen and a bank of whole tokens: the set of experts a token took in each layer at once. The bank
matters where the joint choice decides, as whether *any* of a token's experts is on another server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from servegym._checks import choose, whole
from servegym._files import read_json
from servegym.envs.workloads.catalog import SPLIT_SHARES, SPLITS
from servegym.envs.workloads.expert_sets import draw_top_k, ids_to_masks, set_bits
from servegym.envs.workloads.files import DATA_DIR, checked, frozen, read_arrays
from servegym.envs.workloads.moe_models import MoeModel, list_models, load_model
from servegym.envs.workloads.synthetic_activations import (
    generate_tokens,
    lognormal_targets,
    mixtral_targets,
    sharpen,
)

SKEWS = ("measured", "paper")
SPLIT_SEED = 20240801


@dataclass(frozen=True, eq=False)
class Activations:
    """Expert choices of P prompts in the L MoE layers of a model. The arrays are read-only.

    Attributes:
        name: Name of the set.
        model: The model, with E experts a layer and ``top_k`` of them a token.
        kind: ``"recorded"`` or ``"synthetic"``.
        tasks: Names of the tasks.
        task: int16 (P,), index into ``tasks``.
        split: int8 (P,), 0 train, 1 val, 2 eval; near-duplicates share one.
        tokens: int32 (P,), recorded tokens, >= 1.
        counts: int32 (P, L, E), tokens that took each expert; each (p, l) sums to
            ``tokens[p] * top_k``.
        bank: uint64 (T, L), the expert set of a banked token in each layer, bit e for expert e.
        bank_start: int64 (P + 1,), prompt p's tokens are ``bank[bank_start[p]:bank_start[p + 1]]``,
            at least one.
        embeddings: ``{}``, or float32 (P, d) arrays: ``"output"``, the pooled output of a sentence
            encoder, and ``"token"``, the sum of its normalised token embeddings (u_p of Eq. 11).
        provenance: Where the numbers come from (source, licence, command, date).

    Raises:
        ValueError: A shape, range or sum is wrong; the message names the field and the place.
    """

    name: str
    model: MoeModel = field(repr=False)
    kind: str
    tasks: tuple[str, ...]
    task: np.ndarray = field(repr=False)
    split: np.ndarray = field(repr=False)
    tokens: np.ndarray = field(repr=False)
    counts: np.ndarray = field(repr=False)
    bank: np.ndarray = field(repr=False)
    bank_start: np.ndarray = field(repr=False)
    embeddings: Mapping[str, np.ndarray] = field(repr=False)
    provenance: Mapping[str, Any] = field(repr=False)

    def __post_init__(self) -> None:
        choose("kind", self.kind, ("recorded", "synthetic"))
        tasks = tuple(str(name) for name in self.tasks)
        if not tasks or len(set(tasks)) != len(tasks):
            raise ValueError(f"tasks={tasks!r} must be at least one name, each once.")
        prompts = np.asarray(self.tokens).shape
        if len(prompts) != 1 or prompts[0] == 0:
            raise ValueError(f"tokens has shape {prompts}, it must be (P,) with P >= 1.")
        size, layers, experts = prompts[0], self.model.num_moe_layers, self.model.experts
        values = {
            "tasks": tasks,
            "tokens": checked("tokens", self.tokens, prompts, 1, None, np.int32),
            "task": checked("task", self.task, prompts, 0, len(tasks) - 1, np.int16),
            "split": checked("split", self.split, prompts, 0, 2, np.int8),
            "counts": checked("counts", self.counts, (size, layers, experts), 0, None, np.int32),
        }
        want = values["tokens"].astype(np.int64) * self.model.top_k
        bad = np.argwhere(values["counts"].sum(axis=2) != want[:, None])
        if len(bad):
            p, layer = bad[0]
            raise ValueError(
                f"counts[{p}, {layer}] sums to {values['counts'][p, layer].sum()}, it must be "
                f"tokens * top_k = {want[p]}."
            )
        start = np.asarray(self.bank_start)
        bank = np.asarray(self.bank)
        if bank.dtype != np.uint64 or bank.ndim != 2 or bank.shape[1] != layers:
            raise ValueError(f"bank is {bank.dtype} {bank.shape}, it must be uint64 (T, {layers}).")
        ends = start.shape == (size + 1,) and start[0] == 0 and start[-1] == len(bank)
        if not ends or np.any(np.diff(start) < 1):
            raise ValueError(
                f"bank_start must be ({size + 1},) ascending from 0 to {len(bank)}, at least one "
                "token a prompt."
            )
        bad = np.argwhere(np.bitwise_count(bank) != self.model.top_k)
        if len(bad) == 0 and experts < 64:
            bad = np.argwhere(bank >> np.uint64(experts) != 0)
        if len(bad):
            row, layer = bad[0]
            raise ValueError(
                f"bank[{row}, {layer}]={int(bank[row, layer]):#x} must have {self.model.top_k} "
                f"bits among the lowest {experts}."
            )
        values["bank"] = frozen(bank, np.uint64)
        values["bank_start"] = frozen(start, np.int64)
        vectors = {}
        for key, array in self.embeddings.items():
            choose("embeddings", key, ("output", "token"))
            array = frozen(array, np.float32)
            if array.ndim != 2 or len(array) != size or not np.all(np.isfinite(array)):
                raise ValueError(f"embeddings[{key!r}] must be ({size}, d) finite numbers.")
            vectors[key] = array
        values["embeddings"] = vectors
        for key, value in values.items():
            object.__setattr__(self, key, value)

    @property
    def num_prompts(self) -> int:
        """P, the number of prompts."""
        return len(self.tokens)

    def rows(self, split: str) -> np.ndarray:
        """Prompts of ``train``, ``val``, ``eval`` or ``all``, int64 (n,); else ValueError."""
        choose("split", split, (*SPLITS, "all"))
        if split == "all":
            return np.arange(self.num_prompts)
        return np.flatnonzero(self.split == SPLITS.index(split))

    def frequencies(self) -> np.ndarray:
        """Activation frequencies: float64 (P, L, E), each (p, l) sums to 1."""
        return self.counts / self.counts.sum(axis=2, keepdims=True)


def split_by_task(task: np.ndarray, seed: int) -> np.ndarray:
    """Split prompts 60/10/30 into train, val and eval, stratified by task (P,): int8 (P,).

    The seed decides the order within a task.
    """
    keys = np.random.default_rng(seed).random(len(task))
    filled = np.zeros(len(SPLITS))
    choice = np.zeros(len(task), dtype=np.int8)
    for p in np.lexsort((keys, task)):
        lack = np.array(SPLIT_SHARES) * (filled.sum() + 1) - filled
        choice[p] = np.argmax(lack)
        filled[choice[p]] += 1
    return choice


def make_toy_activations(
    prompts: int = 40,
    layers: int = 4,
    experts: int = 8,
    top_k: int = 2,
    tasks: int = 2,
    seed: int = 0,
) -> Activations:
    """Make a small synthetic set for tests and examples.

    Each task prefers some experts, each prompt deviates from its task and each token has one of
    three kinds, the same in all layers, which are MoE layers. All tokens (16 to 48 a prompt) are
    banked, so ``counts`` is exactly the sum of the bank. The embeddings (16 wide) tell tasks and
    prompts; prompt p is of task p modulo ``tasks``.
    """
    rng = np.random.default_rng([seed, 7])
    model = MoeModel(
        name="toy",
        layers=layers,
        moe_layers=tuple(range(layers)),
        experts=experts,
        top_k=top_k,
        hidden=1024,
        bytes_per_value=2.0,
        expert_bytes=3 * 1024 * 1408 * 2,
        non_expert_mb=np.full(layers, 20.0),
        embedding_mb=100.0,
        kv_bytes_per_token_layer=1152,
    )
    task = np.arange(prompts) % tasks
    by_task = rng.normal(scale=1.0, size=(tasks, layers, experts))
    by_prompt = rng.normal(scale=0.4, size=(prompts, layers, experts))
    by_kind = rng.normal(scale=0.8, size=(3, layers, experts))
    tokens = rng.integers(16, 49, size=prompts)
    bank = []
    for p in range(prompts):
        kind = rng.integers(0, 3, size=tokens[p])
        bank.append(draw_top_k(by_task[task[p]] + by_prompt[p] + by_kind[kind], top_k, rng))
    centre = rng.normal(size=(tasks, 16))
    shift = by_prompt.reshape(prompts, -1) @ rng.normal(size=(layers * experts, 16)) * 0.1
    output = centre[task] + shift
    output /= np.linalg.norm(output, axis=1, keepdims=True)
    token = (output + 0.1 * rng.normal(size=output.shape)) * tokens[:, None]
    return Activations(
        name="toy",
        model=model,
        kind="synthetic",
        tasks=tuple(f"task{i}" for i in range(tasks)),
        task=task,
        split=split_by_task(task, seed),
        tokens=tokens,
        counts=np.array([set_bits(sets, experts).sum(axis=0) for sets in bank]),
        bank=np.concatenate(bank),
        bank_start=np.concatenate([[0], np.cumsum(tokens)]),
        embeddings={"output": output, "token": token},
        provenance={"kind": "synthetic", "source": "make_toy_activations", "seed": seed},
    )


_FIX = "reinstall the package, or rebuild it with servegym.envs.workloads.build.activations"


def load_activations(model: str, skew: str = "measured", seed: int = 0) -> Activations:
    """Return the activations of a model.

    ``deepseek-v2-lite`` and ``gpt-oss-20b`` are recorded, ``mixtral-8x7b`` and ``gpt2-moe``
    generated. The result is made once for each combination of arguments and shared.

    Args:
        model: One of :func:`list_models`.
        skew: ``"measured"``, or ``"paper"`` for narrow tasks: in each (task, layer) the favourite
            experts are put into a random part of the token sets, and ``counts`` are those of the
            changed bank repeated to ``tokens`` tokens. Such a set is always ``"synthetic"``.
        seed: Seed of what is generated; without effect on recorded activations as measured.

    Returns:
        The activations; ``provenance["top_expert_share"]`` has the shares with both skews.

    Raises:
        ValueError: An argument is unknown or out of range.
        MalformedFileError: A packaged file is damaged.

    Example:
        >>> load_activations("deepseek-v2-lite").counts.shape
        (213, 26, 64)
    """
    choose("model", model, list_models())
    choose("skew", skew, SKEWS)
    return _load(model, skew, whole("seed", seed, 0))


@lru_cache(maxsize=16)
def _load(model: str, skew: str, seed: int) -> Activations:
    if skew == "paper":
        return sharpened(_load(model, "measured", seed), seed)
    path = DATA_DIR / f"activations-{model}.json"
    if model in _TARGETS:
        return read_law(path, load_model(model), seed)
    return read_activations(path, load_model(model))


_TARGETS = {"mixtral-8x7b": mixtral_targets, "gpt2-moe": lognormal_targets}


def read_law(path: Path, model: MoeModel, seed: int) -> Activations:
    """Generate synthetic activations by the ``law`` of a ``.json`` file.

    The tasks' frequencies do not depend on the seed; every generated token is banked.
    """
    provenance = read_json(path, _FIX)
    law = provenance["law"]
    targets = _TARGETS[model.name](law, model.num_moe_layers, model.experts)
    tokens, task, bank = generate_tokens(law, targets, seed)
    ends = np.concatenate([[0], np.cumsum(tokens)])
    pairs = zip(ends[:-1], ends[1:], strict=True)
    return Activations(
        name=model.name,
        model=model,
        kind="synthetic",
        tasks=tuple(law["tasks"]),
        task=task,
        split=split_by_task(task, SPLIT_SEED),
        tokens=tokens,
        counts=np.array([set_bits(bank[a:b], model.experts).sum(axis=0) for a, b in pairs]),
        bank=bank,
        bank_start=ends,
        embeddings={},
        provenance=provenance | {"seed": seed, "skew": "measured"},
    )


def sharpened(source: Activations, seed: int) -> Activations:
    """Activations of narrow tasks made of ``source``: what ``skew="paper"`` gives.

    The seed decides which layers are sharpened and which tokens change; prompts, tokens and splits
    stay.
    """
    model = source.model
    sizes = np.diff(source.bank_start)
    task = np.repeat(source.task, sizes)
    sums = np.array([source.counts[source.task == t].sum(axis=0) for t in range(len(source.tasks))])
    bank = sharpen(
        source.bank,
        task,
        sums / sums.sum(axis=2, keepdims=True),
        model.top_k,
        np.random.default_rng([seed, 3]),
    )
    counts = np.empty_like(source.counts)
    for p, (tokens, size) in enumerate(zip(source.tokens, sizes, strict=True)):
        sets = bank[source.bank_start[p] : source.bank_start[p + 1]]
        times, rest = divmod(int(tokens), int(size))
        members = set_bits(sets, model.experts)
        counts[p] = times * members.sum(axis=0) + members[:rest].sum(axis=0)
    return replace(
        source,
        name=f"{source.name} (paper skew)",
        kind="synthetic",
        counts=counts,
        bank=bank,
        provenance=dict(source.provenance) | {"seed": seed, "skew": "paper"},
    )


def read_activations(path: Path, model: MoeModel) -> Activations:
    """Read recorded activations.

    ``<stem>.json`` has the provenance, ``<stem>.npz`` counts, tasks and splits, ``<stem>-bank.npz``
    the experts of the banked tokens, uint8 (L, T, top_k), and ``<stem>-embeddings.npz`` the
    embeddings, if there are any.
    """
    arrays = read_arrays(path.with_suffix(".npz"), _FIX)
    vectors = path.with_name(f"{path.stem}-embeddings.npz")
    return Activations(
        name=model.name,
        model=model,
        kind="recorded",
        tasks=tuple(arrays.pop("tasks").tolist()),
        bank=ids_to_masks(read_arrays(path.with_name(f"{path.stem}-bank.npz"), _FIX)["sets"]).T,
        embeddings=read_arrays(vectors, _FIX) if vectors.is_file() else {},
        provenance=read_json(path, _FIX) | {"skew": "measured"},
        **arrays,
    )
