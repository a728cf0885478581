"""Build the packaged activations from recorded routing.

    SERVEGYM_DATA=FOLDER python -m servegym.envs.workloads.build.activations

FOLDER holds ``esft_deepseek_v2_lite``, ``gpt_oss_20b_experts``, ``olmoe_routing``, ``fiddler`` and,
in ``minilm``, ``tokenizer.json`` and ``model.safetensors`` of all-MiniLM-L6-v2; the packages
``tokenizers`` and ``safetensors`` are needed. No prompt text is stored. Two builds from the same
files give the same bytes, but for the date in the ``.json``.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse.csgraph import connected_components

from servegym._command_line import run_main
from servegym._files import csv_rows, json_rows, write_atomic
from servegym.envs.workloads.activations import (
    SPLIT_SEED,
    SPLITS,
    Activations,
    load_model,
    read_law,
    sharpened,
    split_by_task,
)
from servegym.envs.workloads.build import measured_data, write_made
from servegym.envs.workloads.expert_sets import ids_to_masks, masks_to_ids
from servegym.envs.workloads.files import DATA_DIR, read_arrays
from servegym.envs.workloads.synthetic_activations import mixtral_targets, solve_base

BANK_SEED = 20240802
LAW_SEED = 20240803
BANK_TOKENS = {"deepseek-v2-lite": 96, "gpt-oss-20b": 56}
NEAR_DUPLICATE_COSINE = 0.98
_FIX = "fetch the file again, or pass the right folder"

# MMLU's own groups; MMLU-Pro's subjects by the same reading. Everything else is "other".
SUBJECTS = {
    "stem": (
        "abstract_algebra astronomy college_biology college_chemistry college_computer_science "
        "college_mathematics college_physics computer_security conceptual_physics "
        "electrical_engineering elementary_mathematics high_school_biology high_school_chemistry "
        "high_school_computer_science high_school_mathematics high_school_physics "
        "high_school_statistics machine_learning biology chemistry computer_science engineering "
        "math physics"
    ).split(),
    "humanities": (
        "formal_logic high_school_european_history high_school_us_history "
        "high_school_world_history international_law jurisprudence logical_fallacies "
        "moral_disputes moral_scenarios philosophy prehistory professional_law world_religions "
        "history law"
    ).split(),
    "social_sciences": (
        "econometrics high_school_geography high_school_government_and_politics "
        "high_school_macroeconomics high_school_microeconomics high_school_psychology "
        "human_sexuality professional_psychology public_relations security_studies sociology "
        "us_foreign_policy economics psychology"
    ).split(),
}
OSS_TASKS = (*SUBJECTS, "other", "safety")


def _rows(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    return [row for _, row in csv_rows(path, columns)]


def _recorded(
    folder: Path, chosen: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a folder has of the chosen prompts: `Activations.counts`, ``bank`` and ``bank_start``.

    At most ``most`` tokens of a prompt are banked, in the order of prompt and position.
    """
    raw = read_arrays(folder / "token_routing.npz", _FIX)
    counts = read_arrays(folder / "prompt_expert_counts.npz", _FIX)["counts"].astype(np.int64)
    rng = np.random.default_rng(BANK_SEED)
    rows = []
    for p in chosen:
        tokens = np.flatnonzero(raw["prompt"] == p)
        if len(tokens) > most:
            tokens = np.sort(rng.permutation(tokens)[:most])
        rows.append(tokens)
    start = np.concatenate([[0], np.cumsum([len(tokens) for tokens in rows])])
    return counts[chosen], ids_to_masks(raw["expert_ids"])[np.concatenate(rows)], start


def build_deepseek() -> Activations:
    """DeepSeek-V2-Lite: 213 prompts of 4 tasks, teacher-forced, without text."""
    folder = measured_data("esft_deepseek_v2_lite")
    model = load_model("deepseek-v2-lite")
    table = _rows(folder / "prompts.csv", ("prompt", "task", "tokens"))
    names = sorted({row["task"] for row in table})
    task = np.array([names.index(row["task"]) for row in table])
    chosen = np.arange(len(table))
    counts, bank, start = _recorded(folder, chosen, BANK_TOKENS[model.name])
    return Activations(
        name=model.name,
        model=model,
        kind="recorded",
        tasks=tuple(names),
        task=task,
        split=split_by_task(task, SPLIT_SEED),
        tokens=np.array([int(row["tokens"]) for row in table]),
        counts=counts,
        bank=bank,
        bank_start=start,
        embeddings={},
        provenance={
            "name": model.name,
            "kind": "recorded",
            "source": "deepseek-ai/ESFT, results/expert_scores/*/expert_weights_{1..26}.txt",
            "commit": "579a7711e4b3",
            "licence": "code MIT, model under its own licence; expert choices only, no text",
            "recorded": "ESFT-vanilla-lite, all 26 MoE layers, prompt and answer teacher-forced",
            "near_duplicates": "unknown: the source has no text of the prompts",
        },
    )


def first_of_each(vectors: np.ndarray) -> np.ndarray:
    """Of float (P, d) vectors the first of each group that a chain of near-duplicates joins."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    _, group = connected_components(unit @ unit.T > NEAR_DUPLICATE_COSINE, directed=False)
    return np.sort(np.unique(group, return_index=True)[1])


def token_sums(texts: list[str]) -> np.ndarray:
    """Sum of the normalised token embeddings of each text, u_p of Eq. 11: float32 (P, 384).

    All WordPiece tokens of a text count, without [CLS] and [SEP].
    """
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer  # pyright: ignore[reportMissingImports]

    tokenizer = Tokenizer.from_file(str(measured_data("minilm", "tokenizer.json")))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    weights = load_file(measured_data("minilm", "model.safetensors"))
    (name,) = (key for key in weights if key.endswith("word_embeddings.weight"))
    words = weights[name].astype(np.float64)
    words /= np.maximum(np.linalg.norm(words, axis=1, keepdims=True), 1e-12)
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return np.array([words[tokens].sum(axis=0) for tokens in ids], dtype=np.float32)


def _oss_task(row: dict[str, Any]) -> str:
    if row["dataset"].startswith("sorry_bench"):
        return "safety"
    if row["dataset"].startswith("gpqa"):
        return "stem"
    name = row["category"].lower().replace(" ", "_")
    return next((task for task, names in SUBJECTS.items() if name in names), "other")


def build_gpt_oss() -> Activations:
    """GPT-OSS-20B: generated tokens of prompts with text; repeating and doubled prompts dropped."""
    folder = measured_data("gpt_oss_20b_experts")
    model = load_model("gpt-oss-20b")
    table = [row for _, row in json_rows(folder / "prompts.jsonl")]
    vectors = np.load(folder / "prompt_embeddings_minilm.npy").astype(np.float32)
    clean = np.array([i for i, row in enumerate(table) if not row["has_repetition"]])
    chosen = clean[first_of_each(vectors[clean])]
    counts, bank, start = _recorded(folder, chosen, BANK_TOKENS[model.name])
    task = np.array([OSS_TASKS.index(_oss_task(table[i])) for i in chosen])
    sums = token_sums([table[i]["text"] for i in chosen])
    return Activations(
        name=model.name,
        model=model,
        kind="recorded",
        tasks=OSS_TASKS,
        task=task,
        split=split_by_task(task, SPLIT_SEED),
        tokens=counts[:, 0].sum(axis=1) // model.top_k,
        counts=counts,
        bank=bank,
        bank_start=start,
        # Shipped as float16, so these are too.
        embeddings={
            "output": vectors[chosen].astype(np.float16),
            "token": sums.astype(np.float16),
        },
        provenance={
            "name": model.name,
            "kind": "recorded",
            "source": "AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting, data/**/*_examples.json",
            "commit": "72b368f60045",
            "licence": "Apache-2.0; expert choices and embeddings only, no text",
            "recorded": "generated tokens only; used for the prompt's tokens too",
            "prompts": {
                "in_source": len(table),
                "dropped_repetition": len(table) - len(clean),
                "dropped_near_duplicates": len(clean) - len(chosen),
                "kept": len(chosen),
            },
            "near_duplicates": f"cosine of the output embeddings above {NEAR_DUPLICATE_COSINE}; "
            "the first of each group is kept",
            "tasks": "MMLU's groups of subjects, GPQA as stem, SORRY-Bench as safety, the rest as "
            "other",
            "embeddings": "all-MiniLM-L6-v2, float16: output = mean-pooled, normalised, cut at 256 "
            "tokens; token = sum of the normalised WordPiece embeddings of the whole prompt",
        },
    )


def prompt_spread(activations: Activations) -> dict[str, float]:
    """Log-normal spread of recorded frequencies over experts, tasks and prompts.

    Returns:
        ``base_sd``, log frequency over a layer's experts (mean over tasks); ``task_sd``, log ratio
        of a task to that mean; ``prompt_sd``, prompts in a task net of binomial noise. The last
        two over experts with at least half of the equal share.
    """
    f, k = activations.frequencies(), activations.model.top_k
    of = [f[activations.task == t] for t in range(len(activations.tasks))]
    mean = np.mean([rows.mean(axis=0) for rows in of], axis=0)
    task_sd, prompt_sd = [], []
    for t, rows in enumerate(of):
        share = rows.mean(axis=0)
        used = share > 0.5 / activations.model.experts
        task_sd.append(np.std(np.log(share[used] / mean[used])))
        shrink = np.mean(1 / (k * activations.tokens[activations.task == t]))
        noise = share * (1 - np.minimum(k * share, 1)) * shrink
        excess = np.maximum(rows.var(axis=0, ddof=1) - noise, 0)[used] / share[used] ** 2
        prompt_sd.append(np.sqrt(np.log1p(excess.mean())))
    return {
        "base_sd": round(float(np.log(np.maximum(mean, 1e-4)).std(axis=1).mean()), 4),
        "task_sd": round(float(np.mean(task_sd)), 4),
        "prompt_sd": round(float(np.mean(prompt_sd)), 4),
    }


def mutual_information(table: np.ndarray) -> float:
    """Mutual information of the two indexes of a table of counts, in bit."""
    p = table / table.sum()
    apart = p.sum(axis=1, keepdims=True) * p.sum(axis=0, keepdims=True)
    return float((p[p > 0] * np.log2(p[p > 0] / apart[p > 0])).sum())


def _drawn_information(
    targets: np.ndarray, prompt_sd: float, kind_sd: float, kinds: int, pairs: list[tuple[int, int]]
) -> float:
    """Mean mutual information between layers of generated tokens, choices of equal rank paired."""
    layers = sorted({layer for pair in pairs for layer in pair})
    rng = np.random.default_rng(LAW_SEED)
    experts = targets.shape[2]
    by_prompt = prompt_sd * rng.normal(size=(40, 1, len(layers), experts))
    by_kind = kind_sd * rng.normal(size=(1, kinds, len(layers), experts))
    shifts = (by_prompt + by_kind).reshape(-1, len(layers), experts)
    bits = []
    for target in targets[:, layers]:
        base = solve_base(target, shifts)
        utilities = np.repeat(base + shifts, 40, axis=0)
        order = np.argsort(-(utilities + rng.gumbel(size=utilities.shape)), axis=2)[..., :2]
        for a, b in pairs:
            first, second = order[:, layers.index(a)].ravel(), order[:, layers.index(b)].ravel()
            table = np.bincount(first * experts + second, minlength=experts**2)
            bits.append(mutual_information(table.reshape(experts, experts)))
    return float(np.mean(bits))


def mixtral_law(deepseek: Activations) -> dict[str, Any]:
    """Fit the law of ``mixtral-8x7b``: provenance with ``law``."""
    model = load_model("mixtral-8x7b")
    path = measured_data("olmoe_routing", "expert_counts.csv")
    columns = ("model", "domain", "layer", "expert", "count", "counting")
    cells: dict[tuple[str, int, int], int] = {}
    for row in _rows(path, columns):
        if row["model"] == "Mixtral-8x7B-v0.1" and row["counting"] == "top-k":
            cells[row["domain"], int(row["layer"]), int(row["expert"])] = int(row["count"])
    tasks = sorted({domain for domain, _, _ in cells})
    layers = sorted({layer for _, layer, _ in cells})
    measured = {}
    for layer in layers:
        counts = [[cells.get((t, layer, e), 0) for e in range(model.experts)] for t in tasks]
        rows = np.array(counts, dtype=float)
        measured[str(layer)] = np.round(rows / rows.sum(axis=1, keepdims=True), 6).tolist()
    path = measured_data("fiddler", "mixtral_popularity_order.csv")
    ranked = sorted(_rows(path, ("rank", "layer", "expert")), key=lambda row: int(row["rank"]))
    order = [[int(row["layer"]), int(row["expert"])] for row in ranked]
    tables: dict[tuple[str, int, int], np.ndarray] = {}
    path = measured_data("olmoe_routing", "mixtral_crosslayer_counts.csv")
    for row in _rows(path, ("domain", "layer_a", "layer_b", "expert_a", "expert_b", "count")):
        key = row["domain"], int(row["layer_a"]), int(row["layer_b"])
        table = tables.setdefault(key, np.zeros((model.experts, model.experts)))
        table[int(row["expert_a"]), int(row["expert_b"])] = float(row["count"])
    target = float(np.mean([mutual_information(table) for table in tables.values()]))
    pairs = sorted({(a, b) for _, a, b in tables})

    source = prompt_spread(deepseek)
    f = np.array([measured[str(layer)] for layer in layers])
    task_sd = float(np.log(f / f.mean(axis=1, keepdims=True)).std())
    prompt_sd = round(source["prompt_sd"] * task_sd / source["task_sd"], 4)
    law = {
        "tasks": tasks,
        "measured": measured,
        "order": order,
        "seed": LAW_SEED,
        "prompts_per_task": 40,
        "tokens": [48, 128],
        "kinds": 12,
        "prompt_sd": prompt_sd,
    }
    targets = mixtral_targets(law, model.layers, model.experts)
    low, high = 0.0, 3.0
    for _ in range(9):
        middle = (low + high) / 2
        if _drawn_information(targets, prompt_sd, middle, law["kinds"], pairs) < target:
            low = middle
        else:
            high = middle
    law["kind_sd"] = round((low + high) / 2, 3)
    drawn = _drawn_information(targets, prompt_sd, law["kind_sd"], law["kinds"], pairs)
    return {
        "name": model.name,
        "kind": "synthetic",
        "source": "allenai/OLMoE, scripts/routing_output (frequencies of layers 0, 7 and 15 and "
        "their joint counts); efeslab/fiddler, src/fiddler/mixtral.py (order of all 256 experts)",
        "commit": {"allenai/OLMoE": "357454f4f647", "efeslab/fiddler": "227715bfd6e8"},
        "licence": "Apache-2.0 (both)",
        "measured": "frequencies of 5 domains in layers 0, 7 and 15 of 32; popularity order",
        "generated": "frequencies of the other 29 layers, prompts, tokens, joint choices",
        "fit": {
            "mutual_information_bit": {"measured": round(target, 4), "law": round(drawn, 4)},
            "task_sd": round(task_sd, 4),
            "prompt_sd": "that of deepseek-v2-lite times the ratio of the tasks' spreads",
        },
        "law": law,
    }


def gpt2_law(deepseek: Activations, kind_sd: float) -> dict[str, Any]:
    """The law of ``gpt2-moe``: all of it made up, with spreads of recorded models."""
    return {
        "name": "gpt2-moe",
        "kind": "synthetic",
        "source": "no routing of this model is public; spreads over experts, tasks and prompts "
        "fitted to the recorded routing of deepseek-v2-lite, kinds of tokens to mixtral-8x7b",
        "generated": "everything",
        "law": {
            "tasks": ["task0", "task1", "task2", "task3"],
            "seed": LAW_SEED,
            "prompts_per_task": 60,
            "tokens": [48, 128],
            "kinds": 12,
            "kind_sd": kind_sd,
            **prompt_spread(deepseek),
        },
    }


def top_expert_share(activations: Activations) -> dict[str, float]:
    """Share of a task's choices that its most frequent expert of a layer gets, mean over layers.

    By task, and their mean as ``"mean"``: 1 / E with equal use, 1 / top_k at most.
    """
    shares = {}
    for t, name in enumerate(activations.tasks):
        counts = activations.counts[activations.task == t].sum(axis=0, dtype=np.int64)
        if counts.any():
            shares[name] = float((counts.max(axis=1) / counts.sum(axis=1)).mean())
    shares["mean"] = float(np.mean(list(shares.values())))
    return shares


def shares(activations: Activations) -> dict[str, dict[str, float]]:
    """Top-expert shares as measured and with ``skew="paper"`` (seed 0), 4 digits."""
    both = {"measured": activations, "paper": sharpened(activations, 0)}
    return {
        skew: {name: round(share, 4) for name, share in top_expert_share(variant).items()}
        for skew, variant in both.items()
    }


def write_activations(activations: Activations, folder: Path) -> None:
    """Write recorded activations as ``activations-<name>*.npz`` and one ``.json``."""
    a, stem = activations, f"activations-{activations.name}"
    contents: dict[str, dict[str, Any]] = {
        f"{stem}.npz": {
            "tasks": np.array(a.tasks),
            "task": a.task.astype(np.int8),
            "split": a.split,
            "tokens": a.tokens,
            "counts": a.counts.astype(np.uint16),
            "bank_start": a.bank_start.astype(np.int32),
        },
        # Compressed they are smallest in this order of axes.
        f"{stem}-bank.npz": {"sets": masks_to_ids(np.ascontiguousarray(a.bank.T), a.model.top_k)},
    }
    if a.embeddings:
        contents[f"{stem}-embeddings.npz"] = {
            name: vectors.astype(np.float16) for name, vectors in a.embeddings.items()
        }
    for name, arrays in contents.items():
        write_atomic(folder / name, lambda stream, arrays=arrays: _save(stream, arrays))
    about = {
        "counts": {
            "prompts": a.num_prompts,
            "tokens": int(a.tokens.sum()),
            "banked_tokens": len(a.bank),
            "prompts_per_task": {n: int(np.sum(a.task == t)) for t, n in enumerate(a.tasks)},
        },
        "split": {
            "rule": "60/10/30, stratified by task, near-duplicates together",
            "seed": SPLIT_SEED,
            "prompts": {name: len(a.rows(name)) for name in SPLITS},
        },
        "bank": {
            "rule": "tokens drawn without replacement, in their order",
            "tokens_per_prompt_at_most": BANK_TOKENS[a.name],
            "seed": BANK_SEED,
        },
        "top_expert_share": shares(a),
    }
    write_made(folder / f"{stem}.json", "activations", {**a.provenance, **about})


def _save(stream: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """As `numpy.savez_compressed`, by LZMA: a fifth less for the banks."""
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_LZMA) as archive:
        for name, array in arrays.items():
            info = zipfile.ZipInfo(f"{name}.npy")  # without the date
            info.compress_type = zipfile.ZIP_LZMA
            with archive.open(info, "w") as entry:
                np.lib.format.write_array(entry, np.asarray(array), allow_pickle=False)


def write_law(law: dict[str, Any]) -> None:
    """Write a synthetic model's law, then its shares, which are those of what the law gives."""
    path = DATA_DIR / f"activations-{law['name']}.json"
    write_made(path, "activations", law)
    drawn = read_law(path, load_model(law["name"]), 0)
    write_made(path, "activations", law | {"top_expert_share": shares(drawn)})


def main() -> None:
    """Write all of them."""
    deepseek = build_deepseek()
    write_activations(deepseek, DATA_DIR)
    write_activations(build_gpt_oss(), DATA_DIR)
    mixtral = mixtral_law(deepseek)
    write_law(mixtral)
    write_law(gpt2_law(deepseek, mixtral["law"]["kind_sd"]))


if __name__ == "__main__":
    run_main(main)
