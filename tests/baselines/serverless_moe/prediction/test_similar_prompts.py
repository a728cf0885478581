"""Saved searches and added prompts; files that are refused."""

import numpy as np
import pytest

from servegym.baselines.serverless_moe.prediction import (
    make_predictor,
)
from servegym.baselines.serverless_moe.prediction.similar_prompts import (
    SimilarPromptsSearch,
    VarED,
)

from .histories import made_up


def test_a_saved_tree_searches_and_grows_as_before(tmp_path):
    embeddings, shares, _ = made_up(300)
    fitted = make_predictor("sps", alpha=3, beta=20).fit(embeddings[:200], shares[:200])
    fitted.save(tmp_path / "tree.npz")
    again = SimilarPromptsSearch.load(tmp_path / "tree.npz")
    np.testing.assert_array_equal(fitted.predict(embeddings[200:]), again.predict(embeddings[200:]))
    again.add(embeddings[200:], shares[200:])
    assert len(again.tree) == 300
    assert [path.name for path in tmp_path.iterdir()] == ["tree.npz"]
    with pytest.raises(ValueError, match="'sps', not 'vared'"):
        VarED.load(tmp_path / "tree.npz")


@pytest.mark.parametrize(
    "damage",
    [
        lambda a: a.pop("nodes"),
        lambda a: a.update(order=np.zeros_like(a["order"])),
        lambda a: a["nodes"].__setitem__((1, 1), 7),
        lambda a: a["nodes"].__setitem__((0, 2), 0),
        lambda a: a["nodes"].__setitem__((-1, 5), 10**6),
        lambda a: a["nodes"].__setitem__((2, 0), 10**6),
        lambda a: a.update(nodes=a["nodes"][:, :5]),
        lambda a: a.update(settings=np.array([9, 3, 4, 0])),
        lambda a: a.update(shares=-a["shares"]),
        lambda a: a.update(vectors=a["vectors"][1:]),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, damage):
    embeddings, shares, _ = made_up(100)
    make_predictor("sps", alpha=3, beta=20).fit(embeddings, shares).save(tmp_path / "tree.npz")
    with np.load(tmp_path / "tree.npz") as file:
        arrays = dict(file)
    damage(arrays)
    np.savez(tmp_path / "tree.npz", **arrays)
    with pytest.raises(ValueError, match="tree.npz"):
        SimilarPromptsSearch.load(tmp_path / "tree.npz")


def test_files_that_cannot_be_used_are_refused(tmp_path):
    (tmp_path / "text.npz").write_text("no arrays")
    with pytest.raises(ValueError, match="cannot be used"):
        SimilarPromptsSearch.load(tmp_path / "text.npz")
    with pytest.raises(ValueError, match="is not a file"):
        SimilarPromptsSearch.load(tmp_path / "missing.npz")
    embeddings, shares, _ = made_up(10)
    with pytest.raises(ValueError, match=r"must end in \.npz"):
        make_predictor("sps").fit(embeddings, shares).save(tmp_path / "tree.txt")
    with pytest.raises(ValueError, match="must be fitted"):
        make_predictor("sps").save(tmp_path / "tree.npz")
