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
    """The language model's states tell the word that decides; the encoder's tell nothing."""
    catalog, texts = make_catalog()
    monkeypatch.setattr(predictor, "load_catalog", lambda name: catalog)
    last = {word: row for word, row in zip(("long", "short"), np.eye(2), strict=True)}
    states = np.array([last[text.split()[-1]] for text in texts])
    monkeypatch.setattr(predictor, "read_states", lambda *given: states)
    blind = np.random.default_rng(1).normal(size=(len(texts), 4))
    monkeypatch.setattr(predictor, "read_embeddings", lambda *given: blind)
    path = tmp_path / "prompts.csv"
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["prompt_id", "instruction"])
        # In another order than the catalog's, with one more.
        writer.writerows((i + 7, text) for i, text in reversed(list(enumerate([*texts, "red"]))))
    out, results = tmp_path / "table.npz", tmp_path / "results.csv"
    args = predictor.Args(prompts=path, language_model="none", out=out, results=results)
    rows = predictor.train(args)
    found = {(r["predictor"], r["quantity"], r["split"]): r for r in rows}
    for quantity in ("score", "length"):
        probe = found["probe", quantity, "eval"]
        assert probe["top1"] > 0.9
        assert probe["top1"] > found["most common", quantity, "eval"]["top1"] + 0.2
        assert probe["top1"] > found["ridge", quantity, "eval"]["top1"] + 0.2
        assert probe["top1"] <= probe["top3"] <= 1
    shown = capsys.readouterr().out
    assert "63.39" in shown and "72.97" in shown and "97.78" in shown and "84.71" in shown
    with results.open() as stream:
        assert len(list(csv.DictReader(stream))) == len(rows) == 2 * 4 * 3
    for quantity, truth in (("score", catalog.scores), ("length", catalog.output_tokens)):
        said = predictions.predict(catalog, [0, 2], quantity, f"learned:{out}")
        error = abs(said - truth[:, [0, 2]])[catalog.rows("eval")].mean()
        assert error < 0.3 * abs(truth - truth.mean()).mean()
    with np.load(out) as archive:
        origin = str(archive["provenance"])
    assert "build/predictor" in origin and str(path.parent) not in origin


def test_the_ridge_leaves_the_prompt_itself_out():
    random = np.random.default_rng(1)
    features = random.normal(size=(30, 4))
    target = random.random((30, 2, 3))
    train = np.arange(20)
    whole = predictor.ridge(features, target, train, 0.5)
    without = predictor.ridge(features, target, np.delete(train, 6), 0.5)
    # The closed form keeps the centring of all; it differs from a refit by O(1/n).
    assert whole[6] == pytest.approx(without[6], abs=0.05)
    assert whole[25] != pytest.approx(target[25], abs=1e-3)
    x, y = features[train] - features[train].mean(0), target[train].reshape(20, -1)
    weights = np.linalg.solve(x.T @ x + 0.5 * np.eye(4), x.T @ (y - y.mean(0)))
    plain = (features[25] - features[train].mean(0)) @ weights + y.mean(0)
    assert whole[25].ravel() == pytest.approx(plain)
    assert predictor.ridge(features, target, train, 1e9)[25] == pytest.approx(
        target[train].mean(0), abs=1e-6
    )
    scaled = predictor.scaled(np.column_stack([features * [1, 9, 0.1, 3], np.ones(30)]), train)
    assert np.square(scaled[train]).sum(1).mean() == pytest.approx(1)


def test_prompts_that_nearly_repeat_others_are_found():
    texts = [
        "List three red fruits, please!",
        "list THREE red fruits please",  # the same words
        "List three red fruits that grow in the north",  # 2 of 3 three-word sequences
        "Name three red fruits of the north",  # 1 of 3
        "Hello",
        "hello!",
        "Hi",
    ]
    found = predictor.near_duplicates(texts, np.array([1, 2, 3, 5, 6]), np.array([0, 4]))
    assert found.tolist() == [1, 2, 5]


def test_measures_of_a_small_case():
    probabilities = np.array([[[0.1, 0.6, 0.3], [0.5, 0.3, 0.2]]])
    classes, truth = np.array([[2, 0]]), np.array([[0.8, 0.1]])
    centres = np.array([0.0, 0.5, 1.0])
    means = np.array([0.6, 0.2])
    found = predictor.measure(probabilities, classes, truth, centres, np.array([0]), means)
    assert found["top1"] == 0.5 and found["top3"] == 1.0 and found["near"] == 1.0
    assert found["mae"] == pytest.approx((abs(0.6 - 0.8) + abs(0.35 - 0.1)) / 2)
    assert found["chosen"] == pytest.approx(0.8)
    # Errors -.2 and .25, of the means -.2 and .1; of the differences .25 against .7 and .4.
    assert found["r2"] == pytest.approx(1 - (0.04 + 0.0625) / (0.04 + 0.01))
    assert found["r2_between"] == pytest.approx(1 - (0.7 - 0.25) ** 2 / (0.7 - 0.4) ** 2)
    values = predictor.table_values([probabilities, -probabilities], [centres, centres])
    assert values["score"].tolist() == [pytest.approx([0.6, 0.35])]
    assert values["length"].tolist() == [[0.0, 0.0]]
