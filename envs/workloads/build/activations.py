"""Build the packaged activations from recorded routing.

    python -m servegym.envs.workloads.build.activations DATA --minilm FOLDER

``DATA`` (or ``$SERVEGYM_DATA``) is the folder with ``esft_deepseek_v2_lite``,
``gpt_oss_20b_experts``, ``olmoe_routing`` and ``fiddler``; ``FOLDER`` has ``tokenizer.json`` and
``model.safetensors`` of all-MiniLM-L6-v2 and is needed for ``gpt-oss-20b`` alone, together with
the packages ``tokenizers`` and ``safetensors``. No prompt text is stored. Two builds from the same
files give the same bytes, but for the date in the ``.json``. With ``--shares`` nothing is built:
the sizes and top-expert shares of the packaged activations are printed as a Markdown table.
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse.csgraph import connected_components

from servegym._command_line import run_main
from servegym._files import (
    MalformedFileError,
    csv_rows,
    json_rows,
    measured_data,
    write_atomic,
    write_json,
)
from servegym.envs.workloads.activations import (
    SKEWS,
    SPLIT_SEED,
    SPLITS,
    Activations,
    group_split,
    list_models,
    load_activations,
    load_model,
    read_law,
    sharpened,
)
from servegym.envs.workloads.expert_sets import binomials, ids_to_masks, masks_to_ids
from servegym.envs.workloads.files import DATA_DIR, read_arrays
from servegym.envs.workloads.synthetic_activations import mixtral_targets, solve_base

BANK_SEED = 20240802
LAW_SEED = 20240803
BANK_TOKENS = {"deepseek-v2-lite": 96, "gpt-oss-20b": 56}
MAX_FILE_BYTES = 1_000_000
NEAR_DUPLICATE_COSINE = 0.98
COMMAND = "python -m servegym.envs.workloads.build.activations DATA --minilm FOLDER"
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


def _routing(folder: Path, chosen: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts (P, L, E) of the chosen prompts and all token sets (T, L), checked with each other."""
    path = folder / "token_routing.npz"
    raw = read_arrays(path, _FIX)
    ids, prompt = raw["expert_ids"], raw["prompt"]
    path = folder / "prompt_expert_counts.npz"
    counts = read_arrays(path, _FIX)["counts"].astype(np.int64)
    ordered = np.sort(ids, axis=2)
    if np.any(ordered[..., 1:] == ordered[..., :-1]) or ids.max() >= experts:
        raise MalformedFileError(
            folder / "token_routing.npz", None, "expert_ids", "repeated or too large", _FIX
        )
    layers = ids.shape[1]
    for p in chosen:
        tokens = ids[prompt == p].astype(np.int64)
        flat = (np.arange(layers)[None, :, None] * experts + tokens).ravel()
        sums = np.bincount(flat, minlength=layers * experts).reshape(layers, experts)
        if not np.array_equal(sums, counts[p]):
            problem = f"prompt {p} differs from the sums of token_routing.npz"
            raise MalformedFileError(path, None, "counts", problem, _FIX)
    return counts[chosen], ids_to_masks(ids)


def _bank(prompt: np.ndarray, chosen: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the banked tokens, in order of prompt and position, and where each prompt starts."""
    rng = np.random.default_rng(BANK_SEED)
    rows = []
    for p in chosen:
        tokens = np.flatnonzero(prompt == p)
        if len(tokens) > most:
            tokens = np.sort(rng.permutation(tokens)[:most])
        rows.append(tokens)
    return np.concatenate(rows), np.concatenate([[0], np.cumsum([len(tokens) for tokens in rows])])


def build_deepseek(data: Path) -> Activations:
    """DeepSeek-V2-Lite: 213 prompts of 4 tasks, teacher-forced, without text."""
    folder = data / "esft_deepseek_v2_lite"
    model = load_model("deepseek-v2-lite")
    table = _rows(folder / "prompts.csv", ("prompt", "task", "tokens"))
    names = sorted({row["task"] for row in table})
    task = np.array([names.index(row["task"]) for row in table])
    chosen = np.arange(len(table))
    counts, sets = _routing(folder, chosen, model.experts)
    prompt = read_arrays(folder / "token_routing.npz", _FIX)["prompt"]
    rows, start = _bank(prompt, chosen, BANK_TOKENS[model.name])
    return Activations(
        name=model.name,
        model=model,
        kind="recorded",
        tasks=tuple(names),
        task=task,
        split=group_split(task, chosen, SPLIT_SEED),
        tokens=np.array([int(row["tokens"]) for row in table]),
        counts=counts,
        bank=sets[rows],
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


def near_duplicates(vectors: np.ndarray, cosine: float) -> np.ndarray:
    """Group vectors that a chain of pairs with a cosine above ``cosine`` joins.

    Args:
        vectors: float (P, d).
        cosine: Threshold.

    Returns:
        int64 (P,), the least index of each one's group.
    """
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    _, group = connected_components(unit @ unit.T > cosine, directed=False)
    return np.unique(group, return_index=True)[1][group]


def token_sums(texts: list[str], folder: Path) -> np.ndarray:
    """Sum of the normalised token embeddings of each text, u_p of Eq. 11.

    Args:
        texts: P texts; all their WordPiece tokens count, without [CLS] and [SEP].
        folder: ``tokenizer.json`` and ``model.safetensors`` of all-MiniLM-L6-v2.

    Returns:
        float32 (P, 384).
    """
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer  # pyright: ignore[reportMissingImports]

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    weights = load_file(folder / "model.safetensors")
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


def build_gpt_oss(data: Path, minilm: Path) -> Activations:
    """GPT-OSS-20B: generated tokens of prompts with text; repeating and doubled prompts dropped."""
    folder = data / "gpt_oss_20b_experts"
    model = load_model("gpt-oss-20b")
    table = [row for _, row in json_rows(folder / "prompts.jsonl")]
    vectors = np.load(folder / "prompt_embeddings_minilm.npy").astype(np.float32)
    clean = np.array([i for i, row in enumerate(table) if not row["has_repetition"]])
    group = near_duplicates(vectors[clean], NEAR_DUPLICATE_COSINE)
    chosen = clean[group == np.arange(len(clean))]
    counts, sets = _routing(folder, chosen, model.experts)
    prompt = read_arrays(folder / "token_routing.npz", _FIX)["prompt"]
    rows, start = _bank(prompt, chosen, BANK_TOKENS[model.name])
    task = np.array([OSS_TASKS.index(_oss_task(table[i])) for i in chosen])
    fine = [table[i]["category"].lower().replace(" ", "_") for i in chosen]
    names = sorted(set(fine))
    sums = token_sums([table[i]["text"] for i in chosen], minilm)
    return Activations(
        name=model.name,
        model=model,
        kind="recorded",
        tasks=OSS_TASKS,
        task=task,
        split=group_split(task, chosen, SPLIT_SEED),
        tokens=counts[:, 0].sum(axis=1) // model.top_k,
        counts=counts,
        bank=sets[rows],
        bank_start=start,
        # Shipped as float16, so these are too.
        embeddings={
            "output": vectors[chosen].astype(np.float16),
            "token": sums.astype(np.float16),
        },
        categories=tuple(names),
        category=np.array([names.index(name) for name in fine]),
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
            "other; the source's own categories are in categories",
            "embeddings": "all-MiniLM-L6-v2, float16: output = mean-pooled, normalised, cut at 256 "
            "tokens; token = sum of the normalised WordPiece embeddings of the whole prompt",
        },
    )


def prompt_spread(activations: Activations) -> dict[str, float]:
    """Log-normal spread of frequencies over experts, tasks and prompts.

    Args:
        activations: Recorded activations.

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


def mixtral_law(data: Path, deepseek: Activations) -> dict[str, Any]:
    """Fit the law of ``mixtral-8x7b``: provenance with ``law``."""
    model = load_model("mixtral-8x7b")
    path = data / "olmoe_routing" / "expert_counts.csv"
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
        if not rows.all():
            raise MalformedFileError(path, None, "count", f"layer {layer} is incomplete", _FIX)
        measured[str(layer)] = np.round(rows / rows.sum(axis=1, keepdims=True), 6).tolist()
    path = data / "fiddler" / "mixtral_popularity_order.csv"
    ranked = sorted(_rows(path, ("rank", "layer", "expert")), key=lambda row: int(row["rank"]))
    order = [[int(row["layer"]), int(row["expert"])] for row in ranked]
    if len({tuple(pair) for pair in order}) != model.layers * model.experts:
        raise MalformedFileError(path, None, None, "does not have every expert once", _FIX)
    tables: dict[tuple[str, int, int], np.ndarray] = {}
    path = data / "olmoe_routing" / "mixtral_crosslayer_counts.csv"
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


def _finish(provenance: dict[str, Any], activations: Activations | None) -> dict[str, Any]:
    done = dict(provenance)
    if activations is not None:
        done["counts"] = {
            "prompts": activations.num_prompts,
            "tokens": int(activations.tokens.sum()),
            "banked_tokens": len(activations.bank),
            "prompts_per_task": {
                name: int(np.sum(activations.task == t)) for t, name in enumerate(activations.tasks)
            },
        }
        done["split"] = {
            "rule": "60/10/30, stratified by task, near-duplicates together",
            "seed": SPLIT_SEED,
            "prompts": {name: len(activations.rows(name)) for name in SPLITS},
        }
        done["bank"] = {
            "rule": "tokens drawn without replacement, in their order",
            "tokens_per_prompt_at_most": BANK_TOKENS[activations.name],
            "seed": BANK_SEED,
        }
        done["top_expert_share"] = shares(activations)
    done["command"] = COMMAND
    done["date"] = datetime.date.today().isoformat()
    return done


def top_expert_share(activations: Activations) -> dict[str, float]:
    """Share of a task's choices that its most frequent expert of a layer gets, mean over layers.

    Args:
        activations: The set.

    Returns:
        The share for each task, and their mean as ``"mean"``. With equal use it is 1 / E; it
        cannot exceed 1 / top_k.
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


def pack_sets(masks: np.ndarray, top_k: int) -> np.ndarray:
    """Pack sets as ranks of combinations, in planes of bytes that compress well: `unpack_sets`.

    Args:
        masks: uint64 (T, L), each with ``top_k`` bits.
        top_k: At least 1; C(64, top_k) must fit in 4 bytes.

    Returns:
        uint8 (bytes, T, L), lowest byte first, without high planes that are 0 everywhere.
    """
    table = binomials(top_k)
    ids = masks_to_ids(masks, top_k)
    ranks = sum(table[ids[..., j], j + 1] for j in range(top_k))
    planes = np.stack([(ranks >> (8 * i)) & 255 for i in range(4)]).astype(np.uint8)
    used = [i for i in range(4) if planes[i].any()]
    return planes[: used[-1] + 1 if used else 1]


def write_activations(activations: Activations, folder: str | Path) -> list[Path]:
    """Write recorded activations as ``activations-<name>*.npz`` and one ``.json``.

    Args:
        activations: The set.
        folder: An existing folder.

    Returns:
        The files, the ``.json`` last.

    Raises:
        ValueError: A file would be larger than :data:`MAX_FILE_BYTES`.
    """
    stem = f"activations-{activations.name}"
    folder = Path(folder)
    contents: dict[str, dict[str, Any]] = {
        f"{stem}.npz": {
            "tasks": np.array(activations.tasks),
            "task": activations.task.astype(np.int8),
            "categories": np.array(activations.categories),
            "category": np.asarray(activations.category),
            "split": activations.split,
            "tokens": activations.tokens,
            "counts": activations.counts.astype(np.uint16),
            "bank_start": activations.bank_start.astype(np.int32),
        }
    }
    planes = pack_sets(activations.bank, activations.model.top_k)
    # Packed sets hardly compress: their size says how many parts are needed.
    parts = -(-planes.size // (MAX_FILE_BYTES + MAX_FILE_BYTES // 10))
    for i, part in enumerate(np.array_split(planes, parts, axis=1)):
        contents[f"{stem}-bank-{i}.npz"] = {"sets": np.ascontiguousarray(part)}
    if activations.embeddings:
        contents[f"{stem}-embeddings.npz"] = {
            name: vectors.astype(np.float16) for name, vectors in activations.embeddings.items()
        }
    written = []
    for name, arrays in contents.items():
        path = folder / name
        write_atomic(path, lambda stream, arrays=arrays: np.savez_compressed(stream, **arrays))
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, above {MAX_FILE_BYTES}.")
        written.append(path)
    provenance = dict(activations.provenance) | {"files": list(contents)}
    path = folder / f"{stem}.json"
    write_json(path, _finish(provenance, activations))
    return [*written, path]


def main(argv: list[str] | None = None) -> None:
    """Command line entry; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("data", type=Path, nargs="?", help="measured data ($SERVEGYM_DATA)")
    parser.add_argument("--minilm", type=Path, help="folder of all-MiniLM-L6-v2, for gpt-oss-20b")
    parser.add_argument("--models", nargs="+", choices=list_models(), metavar="NAME")
    parser.add_argument("--out", type=Path, default=DATA_DIR, help="folder to write to")
    parser.add_argument("--shares", action="store_true", help="print a table of what is packaged")
    args = parser.parse_args(argv)
    if args.shares:
        print(share_table())
        return
    data = args.data or measured_data()
    if data is None:
        parser.error("give DATA, or set SERVEGYM_DATA to the folder with the measured data")
    models = args.models or list_models()
    written: list[Path] = []
    deepseek = build_deepseek(data)
    if "deepseek-v2-lite" in models:
        written += write_activations(deepseek, args.out)
    if "gpt-oss-20b" in models:
        if args.minilm is None:
            parser.error("gpt-oss-20b needs --minilm FOLDER; or leave it out with --models")
        written += write_activations(build_gpt_oss(data, args.minilm), args.out)
    if "mixtral-8x7b" in models or "gpt2-moe" in models:
        mixtral = mixtral_law(data, deepseek)
        laws = [mixtral, gpt2_law(deepseek, mixtral["law"]["kind_sd"])]
        for law in laws:
            if law["name"] in models:
                path = args.out / f"activations-{law['name']}.json"
                write_law(path, law)
                written.append(path)
    for path in written:
        print(f"{path} ({path.stat().st_size} bytes)")


def share_table() -> str:
    """Sizes and top-expert shares of the packaged activations, computed anew, as Markdown."""
    lines = [
        "| model | as measured | prompts | tokens | banked | L x E, top-k | equal use | measured "
        "| paper | greatest possible |",
        "| --- | --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for name in list_models():
        plain = load_activations(name)
        model = plain.model
        both = [top_expert_share(load_activations(name, skew))["mean"] for skew in SKEWS]
        shares = [1 / model.experts, *both, 1 / model.top_k]
        lines.append(
            f"| {name} | {plain.kind} | {plain.num_prompts:,} | {int(plain.tokens.sum()):,} | "
            f"{len(plain.bank):,} | {model.num_moe_layers} x {model.experts}, {model.top_k} | "
            + " | ".join(f"{100 * share:.1f} %" for share in shares)
            + " |"
        )
    return "\n".join(lines)


def write_law(path: Path, law: dict[str, Any]) -> None:
    """Write a synthetic model's law, then its shares, which are those of what the law gives."""
    write_json(path, law)
    drawn = read_law(path, load_model(law["name"]), 0)
    write_json(path, _finish(law | {"top_expert_share": shares(drawn)}, None))


if __name__ == "__main__":
    run_main(main)
