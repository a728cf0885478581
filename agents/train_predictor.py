"""A score and length predictor for the routers: one encoder for all experts, two heads.

Like the predictors of the QoS-aware routing paper (arXiv:2508.00234, Section IV-B) it sorts each
(prompt, LLM) pair into 10 score and 10 length buckets from the prompt's text with an expert token
in front of it; any encoder of ``transformers`` serves. Prompts attend only to themselves, so that
one pass reads a prompt once and the tokens of all LLMs with it, and the layers that stay frozen
run once per prompt. The texts come from a CSV file::

    python agents/train_predictor.py --prompts prompts.csv --out table.npz

writes a table that the environments take as ``score_predictor="learned:table.npz"``, and prints
how often the bucket is right on each split, next to k-nearest-neighbour and ridge regression on the
frozen encoder's embeddings and what always naming an LLM's most common bucket gives.
"""

from __future__ import annotations

import csv
import io
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

from servegym.envs._files import write_atomic
from servegym.envs.workloads import Catalog, load_catalog
from servegym.envs.workloads.predictions import QUANTITIES, bucket_edges, write_table

# Published accuracies of the paper's DistilBERT predictors on MixInstruct, its own buckets.
PAPER = {"score": (0.6339, 0.9778), "length": (0.7297, 0.8471)}
NEIGHBOURS = (5, 10, 20, 40, 80)
PENALTIES = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@dataclass
class Args:
    """Command line of the predictor."""

    prompts: Path
    """CSV file with the text of every prompt of the catalog"""
    encoder: str = "sentence-transformers/all-MiniLM-L6-v2"
    """name or folder of a transformers encoder"""
    catalog: str = "alpaca_eval_7b"
    """catalog whose scores and lengths are to be predicted"""
    id_column: str = "prompt_id"
    """column of the CSV file with the catalog's prompt ids"""
    text_column: str = "instruction"
    """column of the CSV file with the texts"""
    buckets: Literal["quantile", "width"] = "quantile"
    """how scores and lengths are bucketed"""
    value: Literal["mean", "top"] = "mean"
    """what the table holds: the mean over the predicted buckets, or the likeliest one's centre"""
    folds: int = 2
    """train prompts are predicted by models that did not see them, in this many folds; 0: by one"""
    trained_layers: int = 2
    """layers of the encoder to fine-tune, from the top; those below stay frozen"""
    max_tokens: int = 64
    """tokens of a prompt that are read"""
    epochs: int = 6
    """passes over the train prompts; the best one on val counts"""
    batch_size: int = 16
    """prompts, with all their LLMs, in a batch"""
    learning_rate: float = 1e-4
    """peak learning rate of the layers; the heads and expert tokens learn 10 times faster"""
    weight_decay: float = 0.01
    """weight decay of AdamW"""
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


def read_texts(path: Path, catalog: Catalog, id_column: str, text_column: str) -> list[str]:
    """The P texts in the order of the catalog's prompts.

    Raises:
        ValueError: the file, a column or a prompt is missing.
    """
    if not path.is_file():
        raise ValueError(f"prompts={str(path)!r} is not a file.")
    with path.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        for column in (id_column, text_column):
            if column not in (reader.fieldnames or ()):
                raise ValueError(f"{path} has no column {column!r}; it has {reader.fieldnames}.")
        found = {row[id_column]: row[text_column] for row in reader}
    ids = [str(k) for k in np.asarray(catalog.prompt_ids)]
    missing = [k for k in ids if k not in found]
    if missing:
        raise ValueError(f"{path} lacks {len(missing)} prompts of {catalog.name!r}: {missing[:5]}")
    return [found[k] for k in ids]


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


def _by_length(
    rows: NDArray[np.int64], hidden: list[Tensor], size: int, random: np.random.Generator
) -> NDArray[np.int64]:
    """Rows reordered so that batches hold prompts of like length, in random order: less padding."""
    lengths = np.array([len(hidden[k]) for k in rows])
    ordered = rows[np.argsort(lengths, kind="stable")]
    parts = np.split(ordered, range(size, len(rows), size))
    return np.concatenate([parts[k] for k in random.permutation(len(parts))])


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
        weight_decay=args.weight_decay,
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
        order = _by_length(shuffle.permutation(rows), hidden, args.batch_size, shuffle)
        for part, states, mask in _batches(order, hidden, args.batch_size):
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
    catalog: Catalog,
    args: Args,
) -> tuple[list[NDArray[np.float64]], list[int]]:
    """Probabilities for every prompt, ``(P, M, K)`` each, and the epochs that each model took."""
    train, val = (catalog.rows(split).astype(np.int64) for split in ("train", "val"))
    everyone = np.arange(catalog.num_prompts)
    width = hidden[0].shape[1]

    def fitted(rows: NDArray[np.int64]) -> tuple[Predictor, int]:
        torch.manual_seed(args.seed)
        layers = top_layers(encoder, args.trained_layers)
        common = [
            torch.as_tensor(one_hot(y[rows], k).mean(axis=0), dtype=torch.float32)
            for y, k in zip(classes, counts, strict=True)
        ]
        model = Predictor(layers, width, common).to(args.device)
        return model, fit(model, hidden, classes, rows, val, args)

    model, epoch = fitted(train)
    probabilities, epochs = predict(model, hidden, everyone), [epoch]
    if args.folds > 1:
        # A router trained on prompts that its predictor was fitted to would trust it too much.
        fold_of = np.random.default_rng(args.seed).permutation(len(train)) % args.folds
        for fold in range(args.folds):
            model, epoch = fitted(train[fold_of != fold])
            epochs.append(epoch)
            rows = train[fold_of == fold]
            for every, held_out in zip(probabilities, predict(model, hidden, rows), strict=True):
                every[rows] = held_out
    return probabilities, epochs


def one_hot(classes: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """1 in the place of each class, float64 with one axis more."""
    return np.eye(count)[classes]


def nearest_neighbours(
    embeddings: NDArray[np.float64], target: NDArray[np.float64], train: NDArray[np.int64], k: int
) -> NDArray[np.float64]:
    """Mean ``target`` (P, M, K) of the k train prompts with the highest cosine, not itself."""
    likeness = embeddings @ embeddings[train].T
    likeness[train, np.arange(len(train))] = -np.inf
    found = train[np.argsort(-likeness, axis=1, kind="stable")[:, :k]]
    return target[found].mean(axis=1)


def ridge(
    embeddings: NDArray[np.float64],
    target: NDArray[np.float64],
    train: NDArray[np.int64],
    penalty: float,
) -> NDArray[np.float64]:
    """Ridge regression of ``target`` (P, M, K); train prompts get their leave-one-out fit."""
    centre, base = embeddings[train].mean(0), target[train].mean(0)
    x = embeddings - centre
    flat = target.reshape(len(target), -1)
    gram = x[train].T @ x[train] + penalty * np.eye(x.shape[1])
    fit = x @ np.linalg.solve(gram, x[train].T @ (flat[train] - base.ravel())) + base.ravel()
    leverage = np.einsum("ij,ij->i", x[train], np.linalg.solve(gram, x[train].T).T)
    leverage = leverage + 1.0 / len(train)
    fit[train] = flat[train] - (flat[train] - fit[train]) / (1.0 - leverage)[:, None]
    return fit.reshape(target.shape)


def embedding_baselines(
    embeddings: NDArray[np.float64], classes: NDArray[np.int64], count: int, catalog: Catalog
) -> dict[str, tuple[NDArray[np.float64], str]]:
    """Predictions without fine-tuning: name -> ((P, M, K), parameter); the best on val counts."""
    train, val = (catalog.rows(split).astype(np.int64) for split in ("train", "val"))
    target = one_hot(classes, count)
    common = np.broadcast_to(target[train].mean(axis=0), target.shape)
    found = {"most common": (common, "")}
    tries = {
        "nearest": [
            (f"k={k}", nearest_neighbours(embeddings, target, train, k)) for k in NEIGHBOURS
        ],
        "ridge": [(f"penalty={p:g}", ridge(embeddings, target, train, p)) for p in PENALTIES],
    }
    for name, options in tries.items():
        error = [float(((x[val] - target[val]) ** 2).mean()) for _, x in options]
        label, best = options[int(np.argmin(error))]
        found[name] = (best, label)
    return found


def measure(
    probabilities: NDArray[np.float64],
    classes: NDArray[np.int64],
    truth: NDArray[np.float64],
    centres: NDArray[np.float64],
    rows: NDArray[np.int64],
) -> dict[str, float]:
    """How good predictions are on some prompts.

    Returns:
        ``top1``, ``top3`` (the right one among the three likeliest), ``near`` (off by one bucket
        at most), ``mae`` (of the mean over the buckets, in the quantity's unit) and ``chosen`` (the
        mean truth of the LLM that is predicted highest: a router's share for scores).
    """
    probability, right = probabilities[rows], classes[rows]
    order = np.argsort(-probability, axis=-1, kind="stable")
    value = probability @ centres
    best = value.argmax(axis=1)
    return {
        "top1": float((order[..., 0] == right).mean()),
        "top3": float((order[..., :3] == right[..., None]).any(-1).mean()),
        "near": float((abs(order[..., 0] - right) <= 1).mean()),
        "mae": float(abs(value - truth[rows]).mean()),
        "chosen": float(truth[rows, best].mean()),
    }


def report(rows: list[dict[str, Any]], catalog: Catalog, note: str) -> None:
    """Print the accuracies on val and eval next to the paper's."""
    for quantity in QUANTITIES:
        lines = []
        for name in dict.fromkeys(row["predictor"] for row in rows):
            cells = [name]
            for split in ("val", "eval"):
                row = next(
                    r
                    for r in rows
                    if (r["predictor"], r["quantity"], r["split"]) == (name, quantity, split)
                )
                cells += [f"{100 * row[k]:.2f}" for k in ("top1", "top3", "near")]
                cells.append(f"{row['mae']:.4g}")
                if quantity == "score":
                    cells.append(f"{row['chosen']:.4f}")
            lines.append(cells)
        heads = ["top-1 %", "top-3 %", "within 1 %", "MAE"]
        heads += ["chosen"] if quantity == "score" else []
        first, third = PAPER[quantity]
        blank = [""] * (len(heads) - 2)
        paper = ["paper (its own data)", *[""] * len(heads)]
        lines.append([*paper, f"{100 * first:.2f}", f"{100 * third:.2f}", *blank])
        notes = [note]
        if quantity == "score":
            means = catalog.scores[catalog.rows("train")].mean(axis=0)
            on_eval = catalog.scores[catalog.rows("eval")]
            notes.append(
                "chosen: mean score of the LLM predicted best; on eval always the best of train "
                f"has {on_eval[:, means.argmax()].mean():.4f}, the best of each prompt "
                f"{on_eval.max(axis=1).mean():.4f}"
            )
        columns = ["predictor", *[f"{s} {h}" for s in ("val", "eval") for h in heads]]
        table = Table(title=f"{quantity} buckets ({rows[0]['buckets']})", caption="; ".join(notes))
        for column in columns:
            table.add_column(column, justify="left" if column == "predictor" else "right")
        for line in lines:
            table.add_row(*line)
        Console(width=160).print(table)  # numbers are not to be broken


def train(args: Args) -> list[dict[str, Any]]:
    """Train, print the accuracies, write what was asked for.

    Returns:
        One row for each predictor, quantity and split: see `measure`.

    Raises:
        ValueError: an argument does not fit.
        ModuleNotFoundError: transformers is not installed.
    """
    if args.folds < 0 or args.folds == 1:
        raise ValueError(f"folds={args.folds} must be 0 or at least 2.")
    for path, ending in ((args.out, ".npz"), (args.results, ".csv")):
        if path is not None:
            if Path(path).suffix != ending or not Path(path).resolve().parent.is_dir():
                raise ValueError(f"{path} must end in {ending} and lie in a folder that exists")
    try:
        from transformers import AutoModel, AutoTokenizer  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "transformers is not installed; pip install 'serve-gym[predict]'", name="transformers"
        ) from None

    catalog = load_catalog(args.catalog)
    texts = read_texts(args.prompts, catalog, args.id_column, args.text_column)
    begin = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(args.encoder)
    encoder = AutoModel.from_pretrained(args.encoder)
    top_layers(encoder, args.trained_layers)  # refused before any work
    hidden, embeddings = read_prompts(
        encoder, tokenizer, texts, args.trained_layers, args.max_tokens, args.device
    )
    truths = [catalog.scores.astype(float), catalog.output_tokens.astype(float)]
    classes, centres = [], []
    for quantity, truth in zip(QUANTITIES, truths, strict=True):
        edges, middle = bucket_edges(catalog, quantity, args.buckets)
        classes.append(np.searchsorted(edges, truth, side="right").astype(np.int64))
        centres.append(middle)
    counts = [len(middle) for middle in centres]
    probabilities, epochs = fine_tune(encoder, hidden, classes, counts, catalog, args)
    seconds = time.perf_counter() - begin

    rows: list[dict[str, Any]] = []
    for q, quantity in enumerate(QUANTITIES):
        found = embedding_baselines(embeddings, classes[q], counts[q], catalog)
        found["fine-tuned"] = (probabilities[q], f"epochs={epochs[0]}")
        for name, (probability, label) in found.items():
            for split in ("train", "val", "eval"):
                if name == "fine-tuned" and split == "train" and args.folds == 0:
                    label += ", not held out"
                values = measure(
                    probability, classes[q], truths[q], centres[q], catalog.rows(split)
                )
                row = {"predictor": name, "quantity": quantity, "split": split}
                rows.append({**row, "buckets": args.buckets, **values, "parameters": label})
    report(rows, catalog, f"{len(texts)} prompts, {catalog.num_models} LLMs, {seconds:.0f} s")
    if args.results is not None:
        text = io.StringIO()
        table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        write_atomic(args.results, lambda stream: stream.write(text.getvalue().encode()))
    if args.out is not None:
        write_table(
            args.out, catalog, table_values(probabilities, centres, args.value), _origin(args)
        )
        print(f"{args.out}: use score_predictor='learned:{args.out}', or length_predictor=.")
    return rows


def table_values(
    probabilities: list[NDArray[np.float64]], centres: list[NDArray[np.float64]], value: str
) -> dict[str, NDArray[np.float64]]:
    """Quantity -> (P, M) values for `write_table`."""
    return {
        quantity: probability @ middle if value == "mean" else middle[probability.argmax(-1)]
        for quantity, probability, middle in zip(QUANTITIES, probabilities, centres, strict=True)
    }


def _origin(args: Args) -> Mapping[str, Any]:
    """Provenance of the table, without this machine's folders."""
    given = {k: v for k, v in asdict(args).items() if k not in ("out", "results", "device")}
    given["prompts"] = args.prompts.name
    # A folder of weights is named by what it holds.
    if Path(args.encoder).is_dir():
        given["encoder"] = f"local folder {Path(args.encoder).resolve().name!r}"
    return {"made_by": "agents/train_predictor.py", **given}


if __name__ == "__main__":
    train(tyro.cli(Args, config=(tyro.conf.FlagConversionOff,)))
