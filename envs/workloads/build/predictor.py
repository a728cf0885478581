r"""Score and length predictors for the routers, trained on the prompts' texts.

Each sorts every (prompt, LLM) pair into 10 score and 10 length buckets:

* ``fine-tuned``: like the predictors of the QoS-aware routing paper (arXiv:2508.00234, Section
  IV-B) an encoder over the text with an expert token in front of it. Prompts attend only to
  themselves, so that one pass reads a prompt once and the tokens of all LLMs with it, and the
  layers that stay frozen run once per prompt.
* ``probe``: ridge regression on what a small instruction-tuned language model holds in its middle
  layers where its own answer would begin.

The texts come from a CSV file::

    python -m servegym.envs.workloads.build.predictor --prompts prompts.csv \
        --language_model FOLDER --out table.npz

writes a table that the environments take as ``score_predictor="learned:table.npz"``: the probe's,
or without a language model the fine-tuned encoder's. Prompts that nearly repeat an eval prompt are
left out of every fit. Comparisons: ridge regression on the frozen encoder's embeddings, an LLM's
most common bucket, and ``other answers``: ridge regression that is told the true values of all
other LLMs on the same prompt, which no predictor can know.
"""

from __future__ import annotations

import csv
import io
import re
import time
from collections.abc import Iterator, Mapping
from copy import deepcopy
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
from torch import Tensor, nn

from servegym._command_line import install_line, run_main
from servegym._files import write_atomic
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
    encoder: str = "sentence-transformers/all-MiniLM-L6-v2"
    """name or folder of a transformers encoder"""
    language_model: str | None = None
    """language model of the probe: name, folder or .gguf file (needs gguf and accelerate)"""
    state_layers: tuple[int, ...] = (16, 20, 24)
    """layers of the language model whose outputs the probe reads"""
    catalog: str = "alpaca_eval_7b"
    """catalog whose scores and lengths are to be predicted"""
    buckets: Literal["quantile", "width"] = "quantile"
    """how scores and lengths are bucketed"""
    folds: int = 2
    """train prompts are predicted by models that did not see them, in this many folds"""
    trained_layers: int = 2
    """layers of the encoder to fine-tune, from the top; those below stay frozen"""
    max_tokens: int = 64
    """tokens of a prompt that are read"""
    epochs: int = 6
    """passes over the train prompts; the best one on val counts; 0: no fine-tuning"""
    batch_size: int = 16
    """prompts, with all their LLMs, in a batch"""
    learning_rate: float = 1e-4
    """peak learning rate of the layers; the heads and expert tokens learn 10 times faster"""
    seed: int = 1
    """seed of the new weights, the folds and the order of the batches"""
    device: str = "cpu"
    """torch device"""
    out: Path | None = None
    """table to write, .npz"""
    results: Path | None = None
    """accuracies to write, .csv"""


class Predictor(nn.Module):
    """The top layers of an encoder over a prompt and a token for each of M LLMs, and two heads.

    The token of an LLM sees the prompt and itself, a prompt only itself: M sequences of an expert
    token before a prompt, but for what the prompt would learn from the expert.
    """

    def __init__(self, layers: nn.ModuleList, width: int, common: list[Tensor]) -> None:
        """Build it; ``common`` holds the (M, K) frequencies of the buckets, where it begins."""
        super().__init__()
        self.layers = layers
        self.expert = nn.Parameter(torch.randn(len(common[0]), width) * 0.2)
        self.heads = nn.ModuleList([nn.Linear(width, part.shape[1]) for part in common])
        self.bias = nn.ParameterList([torch.log(part + 0.01) for part in common])

    def forward(self, hidden: Tensor, mask: Tensor) -> list[Tensor]:
        """Logits of the buckets.

        Args:
            hidden: Input of the first trained layer, ``(B, T, width)``.
            mask: 1 where there is a token, ``(B, T)``.

        Returns:
            ``(B, M, K)`` for score and length.
        """
        rows, count = len(hidden), len(self.expert)
        # The tokens start from the prompt's own first one, which holds its summary.
        tokens = self.expert.expand(rows, -1, -1) + hidden[:, :1]
        seen = torch.zeros(rows, count + hidden.shape[1], count + hidden.shape[1])
        seen = seen.to(hidden.device)
        seen[:, :, count:] = mask[:, None, :]
        seen[:, :count, :count] = torch.eye(count, device=hidden.device)
        bias = ((1.0 - seen) * torch.finfo(hidden.dtype).min)[:, None]
        x = torch.cat([tokens, hidden], 1)
        for layer in self.layers:
            out = layer(x, bias)
            x = out[0] if isinstance(out, tuple) else out
        return [head(x[:, :count]) + bias for head, bias in zip(self.heads, self.bias, strict=True)]


def read_texts(path: Path, catalog: Catalog) -> list[str]:
    """The P texts in the order of the catalog's prompts.

    Raises:
        ValueError: the file, a column or a prompt is missing.
    """
    if not path.is_file():
        raise ValueError(f"prompts={str(path)!r} is not a file.")
    with path.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        for column in ("prompt_id", "instruction"):
            if column not in (reader.fieldnames or ()):
                raise ValueError(f"{path} has no column {column!r}; it has {reader.fieldnames}.")
        found = {row["prompt_id"]: row["instruction"] for row in reader}
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


def top_layers(encoder: nn.Module, count: int) -> nn.ModuleList:
    """Copies of the last ``count`` transformer layers.

    Raises:
        ValueError: the encoder has fewer layers, or no list of them.
    """
    total = int(encoder.config.num_hidden_layers)  # type: ignore[union-attr]
    stacks = [m for m in encoder.modules() if isinstance(m, nn.ModuleList) and len(m) == total]
    if not stacks:
        raise ValueError(f"no list of {total} layers in {type(encoder).__name__}.")
    if not 1 <= count <= total:
        raise ValueError(f"trained_layers={count} must be between 1 and {total}.")
    return deepcopy(nn.ModuleList(list(stacks[0])[total - count :]))


@torch.no_grad()
def read_prompts(
    encoder: nn.Module, tokenizer: Any, texts: list[str], trained: int, max_tokens: int, device: str
) -> tuple[list[Tensor], NDArray[np.float64]]:
    """What the frozen layers make of the texts, each read once.

    Returns:
        The input of the first trained layer, ``(tokens, width)`` for each text, and unit-length
        mean-pooled outputs of the whole encoder, float64 ``(P, width)``.
    """
    encoder.eval().to(device)
    hidden: list[Tensor] = []
    pooled: list[Tensor] = []
    for start in range(0, len(texts), 32):
        part = tokenizer(
            texts[start : start + 32],
            padding=True,
            truncation=True,
            max_length=max_tokens,
            return_tensors="pt",
        ).to(device)
        states = encoder(**part, output_hidden_states=True).hidden_states
        mask = part["attention_mask"]
        for row, length in enumerate(mask.sum(1).tolist()):
            hidden.append(states[-1 - trained][row, :length].clone())
            pooled.append(F.normalize(states[-1][row, :length].mean(0), dim=0))
    return hidden, torch.stack(pooled).double().cpu().numpy()


def _batches(
    rows: NDArray[np.int64], hidden: list[Tensor], size: int
) -> Iterator[tuple[NDArray[np.int64], Tensor, Tensor]]:
    for part in np.split(rows, range(size, len(rows), size)):
        states = nn.utils.rnn.pad_sequence([hidden[k] for k in part], batch_first=True)
        lengths = torch.tensor([len(hidden[k]) for k in part], device=states.device)
        mask = (torch.arange(states.shape[1], device=states.device) < lengths[:, None]).float()
        yield part, states, mask


def fit(
    model: Predictor,
    hidden: list[Tensor],
    classes: list[NDArray[np.int64]],
    rows: NDArray[np.int64],
    val: NDArray[np.int64],
    args: Args,
) -> int:
    """Fine-tune on the prompts ``rows`` and take the weights of the best epoch on ``val``.

    Returns:
        The best epoch, counted from 1.
    """
    layers = list(model.layers.parameters())
    new = [model.expert, *model.heads.parameters(), *model.bias.parameters()]
    optimizer = torch.optim.AdamW(
        [{"params": layers, "lr": args.learning_rate}, {"params": new}],
        lr=10 * args.learning_rate,
        weight_decay=0.01,
    )
    steps = args.epochs * -(-len(rows) // args.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [args.learning_rate, 10 * args.learning_rate], total_steps=steps, pct_start=0.1
    )
    truth = [torch.as_tensor(part, device=model.expert.device) for part in classes]
    shuffle = np.random.default_rng(args.seed)
    best_loss, best_weights, best_epoch = np.inf, deepcopy(model.state_dict()), 0
    for epoch in range(args.epochs):
        model.train()
        for part, states, mask in _batches(shuffle.permutation(rows), hidden, args.batch_size):
            logits = model(states, mask)
            loss = sum(
                F.cross_entropy(x.flatten(0, 1), y[part].flatten())
                for x, y in zip(logits, truth, strict=True)
            )
            assert isinstance(loss, Tensor)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        probabilities = predict(model, hidden, val, args.batch_size)
        loss_val = 0.0
        for probability, y in zip(probabilities, classes, strict=True):
            likelihood = np.take_along_axis(probability, y[val][..., None], -1)
            loss_val -= float(np.log(likelihood + 1e-9).mean())
        print(f"epoch {epoch + 1}: loss on val {loss_val:.4f}", flush=True)
        if loss_val < best_loss:
            best_loss, best_epoch = loss_val, epoch + 1
            best_weights = deepcopy(model.state_dict())
    model.load_state_dict(best_weights)
    return best_epoch


@torch.no_grad()
def predict(
    model: Predictor, hidden: list[Tensor], rows: NDArray[np.int64], size: int = 32
) -> list[NDArray[np.float64]]:
    """Probabilities of the score and of the length buckets, float64 ``(len(rows), M, K)``."""
    model.eval()
    parts = [
        [F.softmax(x, -1).double().cpu().numpy() for x in model(states, mask)]
        for _, states, mask in _batches(rows, hidden, size)
    ]
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def fine_tune(
    encoder: nn.Module,
    hidden: list[Tensor],
    classes: list[NDArray[np.int64]],
    counts: list[int],
    train: NDArray[np.int64],
    val: NDArray[np.int64],
    args: Args,
) -> tuple[list[NDArray[np.float64]], int]:
    """Probabilities for every prompt, ``(P, M, K)`` each, and the best epoch on ``val``."""

    def fitted(rows: NDArray[np.int64]) -> tuple[Predictor, int]:
        torch.manual_seed(args.seed)
        layers = top_layers(encoder, args.trained_layers)
        common = [
            torch.as_tensor(np.eye(k)[y[rows]].mean(axis=0), dtype=torch.float32)
            for y, k in zip(classes, counts, strict=True)
        ]
        model = Predictor(layers, hidden[0].shape[1], common).to(args.device)
        return model, fit(model, hidden, classes, rows, val, args)

    model, epoch = fitted(train)
    probabilities = predict(model, hidden, np.arange(len(hidden)))
    # A router trained on prompts that its predictor was fitted to would trust it too much.
    fold_of = np.random.default_rng(args.seed).permutation(len(train)) % args.folds
    for fold in range(args.folds):
        model, _ = fitted(train[fold_of != fold])
        rows = train[fold_of == fold]
        for every, held_out in zip(probabilities, predict(model, hidden, rows), strict=True):
            every[rows] = held_out
    return probabilities, epoch


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
    """Train, print the accuracies, write what was asked for.

    Returns:
        One row for each predictor, quantity and split: see `measure`. ``train_prompts`` is the
        number of prompts fitted to; ``learning curve`` is the mean over draws of that many.

    Raises:
        ValueError: an argument does not fit.
        ModuleNotFoundError: transformers is not installed.
    """
    if args.folds < 2:
        raise ValueError(f"folds={args.folds} must be at least 2.")
    if args.epochs < (args.language_model is None):
        raise ValueError(f"epochs={args.epochs} must be at least 1, or 0 with language_model.")
    for path, ending in ((args.out, ".npz"), (args.results, ".csv")):
        if path is not None:
            if Path(path).suffix != ending or not Path(path).resolve().parent.is_dir():
                raise ValueError(f"{path} must end in {ending} and lie in a folder that exists")
    try:
        from transformers import AutoModel, AutoTokenizer  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"transformers is not installed; {install_line('predict')}", name="transformers"
        ) from None

    catalog = load_catalog(args.catalog)
    texts = read_texts(args.prompts, catalog)
    begin = time.perf_counter()
    splits = {name: catalog.rows(name).astype(np.int64) for name in ("train", "val", "eval")}
    repeated = near_duplicates(
        texts, np.concatenate([splits["train"], splits["val"]]), splits["eval"]
    )
    fitted, val = (np.setdiff1d(splits[name], repeated) for name in ("train", "val"))
    tokenizer = AutoTokenizer.from_pretrained(args.encoder)
    encoder = AutoModel.from_pretrained(args.encoder)
    top_layers(encoder, args.trained_layers)  # refused before any work
    hidden, embeddings = read_prompts(
        encoder, tokenizer, texts, args.trained_layers, args.max_tokens, args.device
    )
    states = None
    if args.language_model is not None:
        states = read_states(args.language_model, texts, args.state_layers, args.device)
    truths = [catalog.scores.astype(float), catalog.output_tokens.astype(float)]
    classes, centres = [], []
    for quantity, truth in zip(QUANTITIES, truths, strict=True):
        edges, middle = bucket_edges(catalog, quantity, args.buckets)
        classes.append(np.searchsorted(edges, truth, side="right").astype(np.int64))
        centres.append(middle)
    counts = [len(middle) for middle in centres]
    tuned, epoch = None, 0
    if args.epochs:
        tuned, epoch = fine_tune(encoder, hidden, classes, counts, fitted, val, args)
    rows, tables = [], []
    for q, quantity in enumerate(QUANTITIES):
        target, means = np.eye(counts[q])[classes[q]], truths[q][fitted].mean(axis=0)

        def measured(probability: NDArray[np.float64], split: str) -> dict[str, float]:
            known = (classes[q], truths[q], centres[q], splits[split], means)  # noqa: B023
            return measure(probability, *known)

        found = simple_predictors(embeddings, target, truths[q], centres[q], fitted, val)
        if tuned is not None:
            found["fine-tuned"] = (tuned[q], f"epochs={epoch}, folds={args.folds}")
        if states is not None:
            found["probe"] = best_ridge(scaled(states, fitted), target, centres[q], fitted, val)
        tables.append(found["fine-tuned" if states is None else "probe"][0])
        head = {"quantity": quantity, "buckets": args.buckets, "train_prompts": len(fitted)}
        for name, (probability, label) in found.items():
            for split in splits:
                row = {"predictor": name, "split": split, **head, **measured(probability, split)}
                rows.append({**row, "parameters": label})
        if states is not None:
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
        text = io.StringIO()
        table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        write_atomic(args.results, lambda stream: stream.write(text.getvalue().encode()))
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
        if given[key] is not None and Path(given[key]).exists():
            given[key] = f"local {Path(given[key]).absolute().name!r}"
    return {"made_by": "envs/workloads/build/predictor.py", **given}


if __name__ == "__main__":
    run_main(lambda: train(tyro.cli(Args, config=(tyro.conf.FlagConversionOff,))))
