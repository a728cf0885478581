"""The score and length predictor, fitted to made-up states."""

import csv

import numpy as np
import pytest

pytest.importorskip("torch", reason="the predictor needs torch")

from servegym.envs.workloads import Catalog, predictions  # noqa: E402
from servegym.envs.workloads.build import predictor  # noqa: E402

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] red green blue long short say it please".split()


def make_catalog(prompts=80, models=3):
    """Scores and lengths depend on the last word and the LLM alone: both can be learned."""
    random = np.random.default_rng(0)
    colour, size = random.integers(0, 3, prompts), random.integers(0, 2, prompts)
    table = np.array([[0.9, 0.7, 0.5], [0.1, 0.2, 0.3]])
    texts = [
        f"no{i} {WORDS[5 + c]} {WORDS[8 + d]}"
        for i, (c, d) in enumerate(zip(colour, size, strict=True))
    ]
    texts[1] = texts[-1]  # a train prompt that repeats an eval prompt
    lengths = np.where(size == 0, 200, 20)[:, None] + np.arange(models) * 10
    catalog = Catalog(
        name="toy",
        models=tuple("abc")[:models],
        prompt_tokens=np.full(prompts, 5),
        scores=table[size][:, :models],
        output_tokens=lengths,
        split=np.repeat([0, 1, 2], [prompts // 2, prompts // 4, prompts // 4]),
        max_output_tokens=300,
        provenance={},
        prompt_ids=np.arange(prompts) + 7,
    )
    return catalog, texts


def test_what_can_be_learned_is_learned_and_written(tmp_path, monkeypatch, capsys):
    """The language model's states tell the word that decides."""
    catalog, texts = make_catalog()
    monkeypatch.setattr(predictor, "load_catalog", lambda name: catalog)
    last = {word: row for word, row in zip(("long", "short"), np.eye(2), strict=True)}
    states = np.array([last[text.split()[-1]] for text in texts])
    monkeypatch.setattr(predictor, "read_states", lambda *arguments: states)
    path = tmp_path / "prompts.csv"
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["prompt_id", "instruction"])
        # In another order than the catalog's, with one more.
        writer.writerows((i + 7, text) for i, text in reversed(list(enumerate([*texts, "red"]))))
    out = tmp_path / "table.npz"
    shares = predictor.train(predictor.Args(prompts=path, language_model="none", out=out))
    assert min(shares["score"], shares["length"]) > 0.9
    assert "1 prompts of train and val nearly repeat" in capsys.readouterr().out
    for quantity, truth in (("score", catalog.scores), ("length", catalog.output_tokens)):
        said = predictions.predict(catalog, [0, 2], quantity, f"learned:{out}")
        error = abs(said - truth[:, [0, 2]])[catalog.rows("eval")].mean()
        assert error < 0.3 * abs(truth - truth.mean()).mean()
    with np.load(out) as archive:
        origin = str(archive["provenance"])
    assert "build/predictor" in origin and str(path.parent) not in origin
    blind = np.random.default_rng(1).normal(size=(len(texts), 4))
    monkeypatch.setattr(predictor, "read_states", lambda *arguments: blind)
    shares = predictor.train(predictor.Args(prompts=path, language_model="none"))
    assert max(shares["score"], shares["length"]) < 0.7
