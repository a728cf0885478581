r"""Score and length predictors for the routers, fitted to the prompts' texts.

Each sorts every (prompt, LLM) pair into 10 score and 10 length buckets. ``probe`` is ridge
regression on what a small instruction-tuned language model holds in its middle layers where its own
answer would begin. The texts come from a CSV file::

    python -m servegym.envs.workloads.build.predictor --prompts prompts.csv \
        --language_model FOLDER --out table.npz

writes the probe's table, which the environments take as ``score_predictor="learned:table.npz"``.
Prompts that nearly repeat an eval prompt are left out of every fit. Comparisons: ridge regression
on a frozen encoder's embeddings, an LLM's most common bucket, and ``other answers``: ridge
regression that is told the true values of all other LLMs on the same prompt, which no predictor can
know.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from servegym._command_line import run_main
from servegym._files import csv_rows, write_csv
from servegym.envs.workloads import Catalog, load_catalog
from servegym.envs.workloads.predictions import QUANTITIES, bucket_edges, write_table

# Published accuracies of the paper's DistilBERT predictors on MixInstruct, its own buckets.
PAPER = {"score": (0.6339, 0.9778), "length": (0.7297, 0.8471)}
PENALTIES = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
CURVE = (60, 120, 240)
DRAWS, GRAM, SHARE = 5, 3, 0.5
MAX_CHARACTERS = 2000  # of a prompt that the language model reads


@dataclass
class Args:
    """Command line of the predictor."""

    prompts: Path
    """CSV file with the text of every prompt of the catalog: columns prompt_id, instruction"""
    language_model: str
    """language model of the probe: name, folder or .gguf file (needs gguf and accelerate)"""
    encoder: str = "sentence-transformers/all-MiniLM-L6-v2"
    """name or folder of the transformers encoder of the comparison"""
    state_layers: tuple[int, ...] = (16, 20, 24)
    """layers of the language model whose outputs the probe reads"""
    catalog: str = "alpaca_eval_7b"
    """catalog whose scores and lengths are to be predicted"""
    buckets: Literal["quantile", "width"] = "quantile"
    """how scores and lengths are bucketed"""
    max_tokens: int = 64
    """tokens of a prompt that the encoder reads"""
    seed: int = 1
    """seed of the learning curve's draws"""
    device: str = "cpu"
    """torch device"""
    out: Path | None = None
    """table to write, .npz"""
    results: Path | None = None
    """accuracies to write, .csv"""


def read_texts(path: Path, catalog: Catalog) -> list[str]:
    """The P texts in the order of the catalog's prompts.

    Raises:
        ValueError: the file, a column or a prompt is missing.
    """
    if not path.is_file():
        raise ValueError(f"prompts={str(path)!r} is not a file.")
    rows = csv_rows(path, ("prompt_id", "instruction"))
    found = {row["prompt_id"]: row["instruction"] for _, row in rows}
    ids = [str(k) for k in np.asarray(catalog.prompt_ids)]
    missing = [k for k in ids if k not in found]
    if missing:
        raise ValueError(f"{path} lacks {len(missing)} prompts of {catalog.name!r}: {missing[:5]}")
    return [found[k] for k in ids]


def near_duplicates(
    texts: list[str], rows: NDArray[np.int64], held_out: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Those of ``rows`` whose text nearly repeats one of ``held_out``.

    A text does if half of the three-word sequences of the shorter of the two are in both, case
    and punctuation apart; texts of fewer words are compared whole.
    """

    def grams(text: str) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", text.lower())
        return {tuple(words[k : k + GRAM]) for k in range(max(1, len(words) - GRAM + 1))}

    others = [grams(texts[k]) for k in held_out]
    found = []
    for row in rows:
        own = grams(texts[row])
        if any(len(own & other) >= SHARE * min(len(own), len(other)) for other in others):
            found.append(row)
    return np.array(found, dtype=np.int64)


@torch.no_grad()
def read_states(
    name: str, texts: list[str], layers: tuple[int, ...], device: str
) -> NDArray[np.float64]:
    """States of a language model at the last token before its answer, ``(P, layers x width)``.

    Raises:
        ValueError: the model has no such layer.
    """
    from transformers import AutoModel, AutoTokenizer  # pyright: ignore[reportMissingImports]

    path = Path(name)
    where, given = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (name, {})
    tokenizer = AutoTokenizer.from_pretrained(where, **given)
    model = AutoModel.from_pretrained(where, **given, dtype=torch.float32).eval().to(device)
    total = int(model.config.num_hidden_layers)
    if not layers or not all(1 <= layer <= total for layer in layers):
        raise ValueError(f"state_layers={layers} must be layers from 1 to {total}.")
    states = []
    for text in texts:
        asked = [{"role": "user", "content": text[:MAX_CHARACTERS]}]
        prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        part = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").to(device)
        hidden = model(**part, output_hidden_states=True, use_cache=False).hidden_states
        states.append(torch.cat([hidden[layer][0, -1] for layer in layers]))
    return torch.stack(states).double().cpu().numpy()


@torch.no_grad()
def read_embeddings(
    name: str, texts: list[str], max_tokens: int, device: str
) -> NDArray[np.float64]:
    """Mean-pooled outputs of an encoder, of unit length: float64 ``(P, width)``."""
    from transformers import AutoModel, AutoTokenizer  # pyright: ignore[reportMissingImports]

    tokenizer = AutoTokenizer.from_pretrained(name)
    encoder = AutoModel.from_pretrained(name).eval().to(device)
    pooled = []
    for start in range(0, len(texts), 32):
        part = tokenizer(
            texts[start : start + 32],
            padding=True,
            truncation=True,
            max_length=max_tokens,
            return_tensors="pt",
        ).to(device)
        states = encoder(**part).last_hidden_state
        for row, length in enumerate(part["attention_mask"].sum(1).tolist()):
            pooled.append(F.normalize(states[row, :length].mean(0), dim=0))
    return torch.stack(pooled).double().cpu().numpy()


def ridge(
    features: NDArray[np.float64],
    target: NDArray[np.float64],
    train: NDArray[np.int64],
    penalty: float,
) -> NDArray[np.float64]:
    """Ridge regression of ``target`` (P, M, K); train prompts get their leave-one-out fit."""
    base, flat = target[train].mean(0).ravel(), target.reshape(len(target), -1)
    x = features - features[train].mean(0)
    kernel = x @ x[train].T
    inverse = np.linalg.inv(kernel[train] + penalty * np.eye(len(train)))
    fit = kernel @ (inverse @ (flat[train] - base)) + base
    leverage = np.einsum("ij,ji->i", kernel[train], inverse) + 1.0 / len(train)
    fit[train] = flat[train] - (flat[train] - fit[train]) / (1.0 - leverage)[:, None]
    return fit.reshape(target.shape)


def scaled(features: NDArray[np.float64], train: NDArray[np.int64]) -> NDArray[np.float64]:
    """Features of mean 0 on ``train`` and equal spread, rows of length 1 in the square mean."""
    x = features - features[train].mean(0)
    spread = x[train].std(0)
    return x / np.where(spread > 1e-9, spread, np.inf) / np.sqrt(max(1, (spread > 1e-9).sum()))


def best_ridge(
    features: NDArray[np.float64],
    target: NDArray[np.float64],
    centres: NDArray[np.float64],
    train: NDArray[np.int64],
    val: NDArray[np.int64],
) -> tuple[NDArray[np.float64], str]:
    """The `ridge` whose means over the buckets err least on ``val``, and its penalty in words."""
    tries = {p: ridge(features, target, train, p) for p in PENALTIES}
    errors = {p: ((found[val] - target[val]) @ centres) ** 2 for p, found in tries.items()}
    best = min(tries, key=lambda p: float(errors[p].mean()))
    return tries[best], f"penalty={best:g}"


def simple_predictors(
    embeddings: NDArray[np.float64],
    target: NDArray[np.float64],
    truth: NDArray[np.float64],
    centres: NDArray[np.float64],
    train: NDArray[np.int64],
    val: NDArray[np.int64],
) -> dict[str, tuple[NDArray[np.float64], str]]:
    """Comparisons: name -> ((P, M, K), parameter)."""
    common = np.broadcast_to(target[train].mean(axis=0), target.shape)
    told = np.empty_like(target)
    for m in range(target.shape[1]):
        others = np.delete(np.arange(target.shape[1]), m)
        known = np.concatenate([truth[:, others], target[:, others].reshape(len(truth), -1)], 1)
        own = target[:, [m]]
        told[:, [m]] = best_ridge(scaled(known, train), own, centres, train, val)[0]
    return {
        "most common": (common, ""),
        "ridge": best_ridge(embeddings, target, centres, train, val),
        "other answers": (told, "a penalty for each LLM"),
    }


def measure(
    probabilities: NDArray[np.float64],
    classes: NDArray[np.int64],
    truth: NDArray[np.float64],
    centres: NDArray[np.float64],
    rows: NDArray[np.int64],
    means: NDArray[np.float64],
) -> dict[str, float]:
    """How good predictions are on the prompts ``rows``; ``means`` (M,) are the LLMs' on train.

    Returns:
        ``top1`` with ``low`` and ``high`` (95 % interval by bootstrap over prompts), ``top3`` (the
        right one among the three likeliest), ``near`` (off by one bucket at most), ``mae`` (of the
        mean over the buckets, in the quantity's unit), ``r2`` (share of the squared error of
        ``means`` that the predictions take away), ``r2_between`` (the same for the differences
        between the LLMs on one prompt, all that the choice of an LLM depends on) and ``chosen``
        (the mean truth of the LLM that is predicted highest: a router's share for scores).
    """
    probability, right, true = probabilities[rows], classes[rows], truth[rows]
    order = np.argsort(-probability, axis=-1, kind="stable")
    value = probability @ centres
    best = value.argmax(axis=1)
    hits = (order[..., 0] == right).mean(axis=1)
    drawn = np.random.default_rng(0).integers(len(rows), size=(2000, len(rows)))
    low, high = np.quantile(hits[drawn].mean(axis=1), [0.025, 0.975])

    def explained(said: NDArray[np.float64], base: NDArray[np.float64]) -> float:
        error, blind = ((said - true) ** 2).sum(), ((base - true) ** 2).sum()
        return float(1.0 - error / blind)

    level, own = (x.mean(axis=1, keepdims=True) for x in (true, value))
    return {
        "top1": float(hits.mean()),
        "low": float(low),
        "high": float(high),
        "top3": float((order[..., :3] == right[..., None]).any(-1).mean()),
        "near": float((abs(order[..., 0] - right) <= 1).mean()),
        "mae": float(abs(value - true).mean()),
        "r2": explained(value, np.broadcast_to(means, true.shape)),
        "r2_between": explained(value - own + level, means - means.mean() + level),
        "chosen": float(truth[rows, best].mean()),
    }


def report(rows: list[dict[str, Any]], note: str) -> None:
    """Print the accuracies on eval prompts next to the paper's."""
    keys = {"top1": "top-1 %", "low": "from", "high": "to", "top3": "top-3 %", "near": "within 1 %"}
    plain = {"mae": "MAE", "r2": "R2", "r2_between": "between LLMs", "chosen": "chosen"}
    for quantity in QUANTITIES:
        table = Table(title=f"{quantity} buckets ({rows[0]['buckets']}), eval", caption=note)
        for column in ("predictor", "prompts", *keys.values(), *plain.values()):
            table.add_column(column, justify="left" if column == "predictor" else "right")
        for row in rows:
            if (row["quantity"], row["split"]) == (quantity, "eval"):
                cells = [f"{100 * row[key]:.2f}" for key in keys]
                cells += [f"{row[key]:.4g}" for key in plain]
                table.add_row(row["predictor"], str(row["train_prompts"]), *cells)
        first, third = (f"{100 * share:.2f}" for share in PAPER[quantity])
        table.add_row("paper, its own data", "", first, "", "", third)
        Console(width=160).print(table)


def train(args: Args) -> list[dict[str, Any]]:
    """Fit, print the accuracies, write what was asked for.

    Returns:
        One row for each predictor, quantity and split: see `measure`. ``train_prompts`` is the
        number of prompts fitted to; ``learning curve`` is the mean over draws of that many.

    Raises:
        ValueError: an argument does not fit.
        ModuleNotFoundError: transformers is not installed.
    """
    for path, ending in ((args.out, ".npz"), (args.results, ".csv")):
        if path is not None:
            if Path(path).suffix != ending or not Path(path).resolve().parent.is_dir():
                raise ValueError(f"{path} must end in {ending} and lie in a folder that exists")
    catalog = load_catalog(args.catalog)
    texts = read_texts(args.prompts, catalog)
    begin = time.perf_counter()
    splits = {name: catalog.rows(name).astype(np.int64) for name in ("train", "val", "eval")}
    repeated = near_duplicates(
        texts, np.concatenate([splits["train"], splits["val"]]), splits["eval"]
    )
    fitted, val = (np.setdiff1d(splits[name], repeated) for name in ("train", "val"))
    states = read_states(args.language_model, texts, args.state_layers, args.device)
    embeddings = read_embeddings(args.encoder, texts, args.max_tokens, args.device)
    truths = [catalog.scores.astype(float), catalog.output_tokens.astype(float)]
    classes, centres = [], []
    for quantity, truth in zip(QUANTITIES, truths, strict=True):
        edges, middle = bucket_edges(catalog, quantity, args.buckets)
        classes.append(np.searchsorted(edges, truth, side="right").astype(np.int64))
        centres.append(middle)
    counts = [len(middle) for middle in centres]
    rows, tables = [], []
    for q, quantity in enumerate(QUANTITIES):
        target, means = np.eye(counts[q])[classes[q]], truths[q][fitted].mean(axis=0)

        def measured(probability: NDArray[np.float64], split: str) -> dict[str, float]:
            known = (classes[q], truths[q], centres[q], splits[split], means)  # noqa: B023
            return measure(probability, *known)

        found = simple_predictors(embeddings, target, truths[q], centres[q], fitted, val)
        found["probe"] = best_ridge(scaled(states, fitted), target, centres[q], fitted, val)
        tables.append(found["probe"][0])
        head = {"quantity": quantity, "buckets": args.buckets, "train_prompts": len(fitted)}
        for name, (probability, label) in found.items():
            for split in splits:
                row = {"predictor": name, "split": split, **head, **measured(probability, split)}
                rows.append({**row, "parameters": label})
        random = np.random.default_rng(args.seed)
        for count in (count for count in CURVE if count < len(fitted)):
            tries = []
            for _ in range(DRAWS):
                some = random.permutation(fitted)[:count]
                probability = best_ridge(scaled(states, some), target, centres[q], some, val)[0]
                tries.append(measured(probability, "eval"))
            row = {"predictor": "learning curve", "split": "eval", **head}
            row |= {key: float(np.mean([one[key] for one in tries])) for key in tries[0]}
            rows.append({**row, "train_prompts": count, "parameters": f"draws={DRAWS}"})
    seconds = time.perf_counter() - begin
    note = f"{len(repeated)} prompts of train and val nearly repeat eval prompts and are left out"
    report(rows, f"{note}; {catalog.num_models} LLMs, {seconds:.0f} s")
    if args.results is not None:
        write_csv(args.results, rows)
    if args.out is not None:
        write_table(args.out, catalog, table_values(tables, centres), _origin(args))
        print(f"{args.out}: use score_predictor='learned:{args.out}', or length_predictor=.")
    return rows


def table_values(
    probabilities: list[NDArray[np.float64]], centres: list[NDArray[np.float64]]
) -> dict[str, NDArray[np.float64]]:
    """Quantity -> (P, M) means over the buckets, for `write_table`."""
    parts = zip(QUANTITIES, probabilities, centres, strict=True)  # cut: a ridge may overshoot
    return {name: np.clip(part @ middle, middle[0], middle[-1]) for name, part, middle in parts}


def _origin(args: Args) -> Mapping[str, Any]:
    """Provenance of the table, without this machine's folders."""
    given = {k: v for k, v in asdict(args).items() if k not in ("out", "results", "device")}
    given["prompts"] = args.prompts.name
    for key in ("encoder", "language_model"):
        if Path(given[key]).exists():
            given[key] = f"local {Path(given[key]).absolute().name!r}"
    return {"made_by": "envs/workloads/build/predictor.py", **given}


if __name__ == "__main__":
    run_main(lambda: train(tyro.cli(Args, config=(tyro.conf.FlagConversionOff,))))
