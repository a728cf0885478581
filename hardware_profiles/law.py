"""Latency laws: how long one iteration of a serving engine takes on one device.

A law is ``linear`` (the routing paper's Eq. 13 and 14, with a constant) or ``tabulated``; both are
evaluated through :class:`LawTables`. Times are seconds, sizes bytes, lengths tokens.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from servegym._files import write_json
from servegym.hardware_profiles.host import fold_host, plans_ahead
from servegym.hardware_profiles.interpolation import along, bilinear
from servegym.hardware_profiles.schema import (
    ESTIMATOR_FIELDS,
    FORMAT,
    LINEAR_FIELDS,
    LONGEST,
    MIXED_CHUNK,
    MIXED_TABLE,
    TABLE_AXES,
    Fields,
    check_host,
    check_model,
    check_profile,
    copy_json,
    kv_capacity_tokens,
)


class LawTables(NamedTuple):
    """The tables a law is evaluated from; every array is float64 and read-only.

    One iteration takes
    ``dense(tokens) + sum over chunks of chunk_attention(chunk, context before it)
    + decode_attention(b, T / b) + head(sequences)``,
    with linear (bilinear) interpolation inside a grid and the slope of the outermost cell
    beyond it, and what :class:`Surplus` adds.

    Attributes:
        dense_tokens: ``(G1,)`` scheduled tokens of an iteration (prefill + decode).
        dense_s: ``(G1,)`` seconds of everything that depends on that number alone.
        chunk_tokens: ``(G2,)`` tokens of one prefill chunk.
        context_tokens: ``(G3,)`` tokens of the same request computed before the chunk.
        chunk_attention_s: ``(G2, G3)`` seconds of the chunk's attention, whole model.
        decode_sequences: ``(G5,)`` decoding sequences ``b``.
        decode_context_tokens: ``(G4,)`` mean tokens in KV memory per sequence, ``x = T / b``.
        decode_attention_s: ``(G5, G4)`` seconds of the decodes' attention, whole model.
        head_sequences: ``(G6,)`` sequences that go through the language-model head.
        head_s: ``(G6,)`` seconds of head and sampler.
    """

    dense_tokens: np.ndarray
    dense_s: np.ndarray
    chunk_tokens: np.ndarray
    context_tokens: np.ndarray
    chunk_attention_s: np.ndarray
    decode_sequences: np.ndarray
    decode_context_tokens: np.ndarray
    decode_attention_s: np.ndarray
    head_sequences: np.ndarray
    head_s: np.ndarray


class Surplus(NamedTuple):
    """What mixed iterations and unequal contexts add to a law; all zero where it says nothing.

    Attributes:
        chunk_s: seconds that every decode and token of the longest prefill chunk add to an
            iteration with both.
        decode_s: ``(B,)`` seconds that every token by which the longest context of the decodes
            exceeds their mean adds to an iteration of ``B`` numbers of decodes alone.
        mixed_s: ``(B,)`` the same beside prefill chunks.
    """

    chunk_s: float
    decode_s: np.ndarray
    mixed_s: np.ndarray


@dataclass(frozen=True)
class Estimator:
    """Linear estimate of the law (Eq. 13 and 14 of the routing paper, with a constant).

    ``prefill(P) = base_s + prefill_s_per_token * P + experts(P)`` and ``decode(b, T) = base_s +
    decode_s_per_sequence * b + decode_s_per_context_token * T + experts(b)``, where ``experts(n) =
    experts_s * (1 - (1 - expert_share) ** n)`` is the reading of the experts that n tokens meet.

    Attributes:
        base_s: seconds of an iteration that does nothing.
        prefill_s_per_token: the paper's k1, seconds per prompt token.
        decode_s_per_context_token: the paper's k2, seconds per token held in KV memory.
        decode_s_per_sequence: seconds per decoding sequence.
        experts_s: seconds of reading all experts; 0 for a dense model.
        expert_share: the share of the experts that one token meets.
    """

    base_s: float
    prefill_s_per_token: float
    decode_s_per_context_token: float
    decode_s_per_sequence: float = 0.0
    experts_s: float = 0.0
    expert_share: float = 0.0

    def prefill_s(self, tokens: Any) -> Any:
        """Seconds of a prefill iteration of so many tokens, a number or an array."""
        return self.base_s + self.prefill_s_per_token * tokens + self._experts_read_s(tokens)

    def decode_s(self, sequences: Any, context_tokens: Any) -> Any:
        """Seconds of a decode iteration; ``context_tokens`` are those of all sequences."""
        linear = self.decode_s_per_sequence * sequences
        linear = linear + self.decode_s_per_context_token * context_tokens
        return self.base_s + linear + self._experts_read_s(sequences)

    def _experts_read_s(self, tokens: Any) -> Any:
        return self.experts_s * (1.0 - (1.0 - self.expert_share) ** tokens)

    @property
    def k1(self) -> float:
        """Seconds per prompt token (Eq. 13)."""
        return self.prefill_s_per_token

    @property
    def k2(self) -> float:
        """Seconds per KV token of a decode iteration (Eq. 14)."""
        return self.decode_s_per_context_token


def law_tables(law: Mapping[str, Any]) -> LawTables:
    """The tables of a checked law; a linear one is exact on four corners."""
    if law["kind"] == "tabulated":
        arrays = {key: np.array(law[key], dtype=np.float64) for key in TABLE_AXES}
    else:
        base, k1, kb, k2 = (float(law[key]) for key in LINEAR_FIELDS)
        # (kb - k1) b + k2 b x is bilinear, so its four corners hold it everywhere.
        arrays = {key: np.array([0.0, 1.0]) for key, axes in TABLE_AXES.items() if not axes} | {
            "dense_s": np.array([base, base + k1]),
            "chunk_attention_s": np.zeros((2, 2)),
            "decode_attention_s": np.array([[0.0, 0.0], [kb - k1, kb - k1 + k2]]),
            "head_s": np.zeros(2),
        }
    for array in arrays.values():
        array.setflags(write=False)
    return LawTables(**arrays)


@dataclass(frozen=True, eq=False)
class Profile:
    """One device running one model under one engine.

    Make one with :func:`load` or :meth:`from_dict`; both check every field.

    Attributes:
        name: the profile's name, also its file name.
        kind: ``"measured"``, ``"fitted"`` or ``"derived"``.
        device: device facts (``memory_bytes``, ``usable_memory_fraction``, ...).
        model: model facts (``layers``, ``kv_heads``, ``weight_bytes``, ...).
        engine: engine facts (``activation_reserve_bytes``, ...).
        kv_capacity_tokens: tokens that fit in the KV memory, whole blocks of 16.
        estimator: linear estimate of the law.
        domain: largest batch, iteration and context that the data behind the law cover.
        fit_error: relative errors of the law on rows it was not built from.
        provenance: source, licence, commit or date, command, notes.
        law: the law as it stands in the file.
        step_error: for ``"prefill"`` and ``"decode"`` steps the ``bias`` and the standard deviation
            ``sd`` of log(true seconds / the law's seconds); empty where the file has none.
        host: the host's share of an iteration, see `servegym.hardware_profiles.host`; empty where
            the file has none.
        description: one line for people.
    """

    name: str
    kind: str
    device: dict[str, Any]
    model: dict[str, Any]
    engine: dict[str, Any]
    kv_capacity_tokens: int
    estimator: Estimator
    domain: dict[str, Any]
    fit_error: dict[str, Any]
    provenance: dict[str, Any]
    law: dict[str, Any] = field(repr=False)
    description: str = ""
    step_error: dict[str, Any] = field(default_factory=dict)
    host: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "<profile>") -> Profile:
        """Check a profile's JSON object and build the profile.

        Args:
            data: the decoded JSON object.
            where: the file's name, for error messages.

        Raises:
            ValueError: naming ``where``, the field, what was given and what is allowed.
        """
        fields = check_profile(data, where)
        fields["estimator"] = Estimator(**{k: float(v) for k, v in fields["estimator"].items()})
        at = f"{where}: field 'device.memory_bytes'"
        tokens = kv_capacity_tokens(fields["device"], fields["model"], fields["engine"], at)
        return cls(**fields, kv_capacity_tokens=tokens)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object; ``Profile.from_dict(p.to_dict())`` is the same profile."""
        facts = ("name", "description", "kind", "device", "model", "engine", "law")
        parts = {key: getattr(self, key) for key in (*facts, "estimator", "domain", "fit_error")}
        estimator = asdict(self.estimator).items()
        parts["estimator"] = {k: v for k, v in estimator if k in ESTIMATOR_FIELDS or v}
        stated = {key: getattr(self, key) for key in ("step_error", "host") if getattr(self, key)}
        return copy_json({"format": FORMAT, **parts, **stated, "provenance": self.provenance})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile's JSON file in one move."""
        write_json(path, self.to_dict())

    def tables(self) -> LawTables:
        """Return the law's tables (float64, read-only, seconds and tokens).

        They hold the host's share of an iteration where the profile gives one.
        """
        return self._tables

    @cached_property
    def _tables(self) -> LawTables:
        tables = law_tables(self.law)
        return fold_host(tables, self.host) if self.host else tables

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in KV memory."""
        return int(self.model["kv_bytes_per_token"])

    @property
    def plans_ahead(self) -> bool:
        """Whether its engine plans an iteration while another runs, by default."""
        name, version = (str(self.engine.get(key, "")) for key in ("name", "version"))
        return bool(plans_ahead(name, version))

    def with_host(self, host: Mapping[str, Any]) -> Profile:
        """Return this profile with a host's share of an iteration in place of its own.

        Args:
            host: as the ``host`` field of a profile file: seconds ``step_s`` an iteration,
                ``sequence_s`` a sequence and ``token_s`` a token of it, and times in the API; an
                empty mapping leaves the kernels alone.

        Raises:
            ValueError: naming the field, what was given and what is allowed.
        """
        if host:
            check_host(Fields(host, "<host>", "host"))
        return replace(self, host=copy_json(dict(host)))

    def with_model(self, model: Mapping[str, Any], where: str = "<model>") -> Profile:
        """Return this profile holding another model's weights and KV cache.

        The latency law stays; only the KV bytes per token and the capacity change.

        Args:
            model: model facts, as in the ``model`` field of a profile file.
            where: the file's name, for error messages.

        Raises:
            ValueError: if a fact is missing or wrong, or the weights do not fit.
        """
        if "kv_capacity_tokens" in self.engine:
            raise ValueError(
                f"{where}: profile {self.name!r} gives its KV memory in tokens, so another model's "
                "share of it is not known"
            )
        check_model(Fields(model, where, "model"))
        facts = copy_json(dict(model))
        at = f"{where}: field 'weight_bytes'"
        tokens = kv_capacity_tokens(self.device, facts, self.engine, at)
        return replace(self, model=facts, kv_capacity_tokens=tokens)

    # -- a clear, slow evaluation of the law ------------------------------------------------

    def dense_s(self, tokens: float) -> float:
        """Seconds of an iteration's dense part for ``tokens`` scheduled tokens."""
        t = self.tables()
        return along(t.dense_tokens, t.dense_s, tokens)

    def chunk_attention_s(self, chunk: float, context: float) -> float:
        """Seconds of the attention of a ``chunk`` of prompt tokens after ``context`` tokens."""
        t = self.tables()
        return bilinear(t.chunk_tokens, t.context_tokens, t.chunk_attention_s, chunk, context)

    def decode_attention_s(self, sequences: float, mean_context: float) -> float:
        """Seconds of the attention of ``sequences`` decodes of ``mean_context`` tokens each."""
        t = self.tables()
        axes = t.decode_sequences, t.decode_context_tokens
        return bilinear(*axes, t.decode_attention_s, sequences, mean_context)

    def head_s(self, sequences: float) -> float:
        """Seconds of the language-model head and sampler for ``sequences``."""
        t = self.tables()
        return along(t.head_sequences, t.head_s, sequences)

    def prefill_s(self, tokens: Any) -> Any:
        """Seconds of prefill iterations of so many tokens, a number or an array (Eq. 13)."""
        return self.step_s([(tokens, 0.0)])

    def decode_s(self, sequences: float, context_tokens: float) -> float:
        """Seconds of one decode iteration of equal contexts (Eq. 14's quantity).

        Args:
            sequences: ``b >= 1`` running sequences, one new token each.
            context_tokens: ``T``, tokens in KV memory summed over them.
        """
        return self.step_s((), sequences, context_tokens)

    def step_s(
        self,
        chunks: Iterable[tuple[float, float]] = (),
        sequences: float = 0,
        context_tokens: float = 0.0,
    ) -> float:
        """Seconds of one mixed iteration of the chunked-prefill scheduler.

        Args:
            chunks: ``(tokens, context)`` of every prefill chunk: its own tokens, and the
                tokens of the same request computed before.
            sequences: decoding sequences ``b``, one token each.
            context_tokens: ``T``, tokens in KV memory summed over the decodes.
        """
        parts = list(chunks)
        total = self.dense_s(sum(chunk for chunk, _ in parts) + sequences)
        total += sum(self.chunk_attention_s(chunk, context) for chunk, context in parts)
        if sequences >= 1:
            total += self.decode_attention_s(sequences, context_tokens / sequences)
        return total + self.head_s(sequences + len(parts))

    def mixed_decode_attention_s(self) -> np.ndarray:
        """``(G5, G4)`` seconds of the decodes' attention in an iteration that also prefills.

        There the decodes run in the prefill kernel, without splitting their contexts over the
        multiprocessors. Read-only; the decode table itself where nothing else was measured.
        """
        if MIXED_TABLE not in self.law:
            return self.tables().decode_attention_s
        table = np.array(self.law[MIXED_TABLE], dtype=np.float64)
        table.setflags(write=False)
        return table

    def surplus(self, sequences: Any) -> Surplus:
        """What the law adds in mixed iterations and for unequal contexts, at ``(B,)`` decodes."""
        at = np.asarray(sequences, dtype=np.float64)
        longest = [
            np.interp(at, self.law["decode_sequences"], self.law[key])
            if key in self.law
            else np.zeros_like(at)
            for key in LONGEST
        ]
        return Surplus(float(self.law.get(MIXED_CHUNK, 0.0)), *longest)

    def mixed_step_s(
        self, chunks: Iterable[tuple[float, float]], sequences: float, context_tokens: float
    ) -> float:
        """`step_s` with the decodes' attention as it is together with prefill chunks.

        There are one chunk and one sequence at least; all contexts are as long.
        """
        parts, t, mean = list(chunks), self.tables(), context_tokens / sequences
        alone = self.decode_attention_s(sequences, mean)
        axes = t.decode_sequences, t.decode_context_tokens
        mixed = bilinear(*axes, self.mixed_decode_attention_s(), sequences, mean)
        longest = max(chunk for chunk, _ in parts)
        mixed += self.surplus(sequences).chunk_s * sequences * longest
        return self.step_s(parts, sequences, context_tokens) - alone + mixed

    def check_domain(self, batch: int, tokens: int, context: int = 0) -> bool:
        """Warn, once per profile, when a setting leaves the range the law was built on.

        Args:
            batch: the most decoding sequences that may run together.
            tokens: the most tokens of one iteration.
            context: the longest context of one sequence.

        Returns:
            Whether the setting is inside the domain.
        """
        setting = {"decode_sequences": batch, "iteration_tokens": tokens, "context_tokens": context}
        limits = {what: self.domain[f"max_{what}"] for what in setting}
        outside = [f"{w} {v} > {limits[w]}" for w, v in setting.items() if v > limits[w]]
        if outside and self.name not in WARNED_PROFILES:
            WARNED_PROFILES.add(self.name)
            domain = ", ".join(f"{what} <= {limit}" for what, limit in limits.items())
            warnings.warn(
                f"profile {self.name!r} is used outside its domain ({domain}): "
                f"{', '.join(outside)}; the last slope of its tables is extended there",
                UserWarning,
                stacklevel=2,
            )
        return not outside


# Names of the profiles that have warned; each warns once a process.
WARNED_PROFILES: set[str] = set()
