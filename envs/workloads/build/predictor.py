r"""Score and length predictors for the routers, fitted to the prompts' texts.

Each sorts every (prompt, LLM) pair into 10 score and 10 length buckets by ridge regression on what
a small instruction-tuned language model holds in its middle layers where its own answer would
begin. The texts come from a CSV file::

    python -m servegym.envs.workloads.build.predictor --prompts prompts.csv \
        --language_model FOLDER --out table.npz

writes a table, which the environments take as ``score_predictor="learned:table.npz"``. Prompts that
nearly repeat an eval prompt are left out of every fit. How it compares with other predictors is in
``experiments/results/routing/learned_predictors.csv`` (code: commit 8d547154).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from numpy.typing import NDArray

from servegym._command_line import run_main
from servegym._files import csv_rows
from servegym.envs.workloads import Catalog, load_catalog
from servegym.envs.workloads.predictions import QUANTITIES, bucket_edges, write_table

PENALTIES = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
GRAM, SHARE = 3, 0.5
MAX_CHARACTERS = 2000  # of a prompt that the language model reads


@dataclass
class Args:
    """Command line of the predictor."""

    prompts: Path
    """CSV file with the text of every prompt of the catalog: columns prompt_id, instruction"""
    language_model: str
    """language model of the probe: name, folder or .gguf file (needs gguf and accelerate)"""
    state_layers: tuple[int, ...] = (16, 20, 24)
    """layers of the language model whose outputs the probe reads"""
    catalog: str = "alpaca_eval_7b"
    """catalog whose scores and lengths are to be predicted"""
    device: str = "cpu"
    """torch device"""
    out: Path | None = None
    """table to write, .npz"""


def read_texts(path: Path, catalog: Catalog) -> list[str]:
    """The P texts in the order of the catalog's prompts.

    Raises:
        ValueError: the file, a column or a prompt is missing.
    """
    if not path.is_file():
        raise ValueError(f"prompts={str(path)!r} is not a file.")
    rows = csv_rows(path, ("prompt_id", "instruction"))
    by_id = {row["prompt_id"]: row["instruction"] for _, row in rows}
    ids = [str(k) for k in np.asarray(catalog.prompt_ids)]
    missing = [k for k in ids if k not in by_id]
    if missing:
        raise ValueError(f"{path} lacks {len(missing)} prompts of {catalog.name!r}: {missing[:5]}")
    return [by_id[k] for k in ids]


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
    repeats = []
    for row in rows:
        these = grams(texts[row])
        if any(len(these & other) >= SHARE * min(len(these), len(other)) for other in others):
            repeats.append(row)
    return np.array(repeats, dtype=np.int64)


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
    where, file = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (name, {})
    tokenizer = AutoTokenizer.from_pretrained(where, **file)
    model = AutoModel.from_pretrained(where, **file, dtype=torch.float32).eval().to(device)
    total = int(model.config.num_hidden_layers)
    if not layers or not all(1 <= layer <= total for layer in layers):
        raise ValueError(f"state_layers={layers} must be layers from 1 to {total}.")
    states = []
    for text in texts:
        messages = [{"role": "user", "content": text[:MAX_CHARACTERS]}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        part = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").to(device)
        hidden = model(**part, output_hidden_states=True, use_cache=False).hidden_states
        states.append(torch.cat([hidden[layer][0, -1] for layer in layers]))
    return torch.stack(states).double().cpu().numpy()


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
) -> NDArray[np.float64]:
    """The `ridge` whose means over the buckets err least on ``val``."""
    tries = [ridge(features, target, train, penalty) for penalty in PENALTIES]
    return min(tries, key=lambda fit: float((((fit[val] - target[val]) @ centres) ** 2).mean()))


def train(args: Args) -> dict[str, float]:
    """Fit, print the accuracies on eval prompts, write the table.

    Returns:
        Quantity -> share of the eval pairs whose likeliest bucket is the right one.

    Raises:
        ValueError: an argument does not fit.
        ModuleNotFoundError: transformers is not installed.
    """
    out = args.out
    if out is not None and (out.suffix != ".npz" or not out.resolve().parent.is_dir()):
        raise ValueError(f"out={str(out)!r} must end in .npz and lie in a folder that exists")
    catalog = load_catalog(args.catalog)
    texts = read_texts(args.prompts, catalog)
    splits = {name: catalog.rows(name).astype(np.int64) for name in ("train", "val", "eval")}
    fitted_to = np.concatenate([splits["train"], splits["val"]])
    repeated = near_duplicates(texts, fitted_to, splits["eval"])
    fitted, val = (np.setdiff1d(splits[name], repeated) for name in ("train", "val"))
    states = scaled(read_states(args.language_model, texts, args.state_layers, args.device), fitted)
    values, shares = {}, {}
    print(f"{len(repeated)} prompts of train and val nearly repeat eval prompts and are left out")
    for quantity, truth in zip(QUANTITIES, (catalog.scores, catalog.output_tokens), strict=True):
        edges, centres = bucket_edges(catalog, quantity, "quantile")
        right = np.searchsorted(edges, truth.astype(float), side="right")
        fit = best_ridge(states, np.eye(len(centres))[right], centres, fitted, val)
        hits = fit.argmax(axis=-1) == right
        shares[quantity] = float(hits[splits["eval"]].mean())
        print(f"{quantity}: the right bucket for {100 * shares[quantity]:.1f} % of the eval pairs")
        # Cut, as a ridge may overshoot.
        values[quantity] = np.clip(fit @ centres, centres[0], centres[-1])
    if out is not None:
        write_table(out, catalog, values, _origin(args))
        print(f"{out}: use score_predictor='learned:{out}', or length_predictor=.")
    return shares


def _origin(args: Args) -> Mapping[str, Any]:
    """Provenance of the table, without this machine's folders."""
    options = {k: v for k, v in asdict(args).items() if k not in ("out", "device")}
    options["prompts"] = args.prompts.name
    if Path(args.language_model).exists():
        options["language_model"] = f"local {Path(args.language_model).absolute().name!r}"
    return {"made_by": "envs/workloads/build/predictor.py", **options}


if __name__ == "__main__":
    run_main(lambda: train(tyro.cli(Args, config=(tyro.conf.FlagConversionOff,))))
