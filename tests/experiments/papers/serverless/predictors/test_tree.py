"""The tree of k-medoids and Algorithm 1 against a slow walk."""

import numpy as np
import pytest

from servegym.experiments.papers.serverless.predictors import make_predictor
from servegym.experiments.papers.serverless.predictors.base import unit_rows
from servegym.experiments.papers.serverless.predictors.similar_prompts import SimilarPromptsSearch

from .histories import TREES, made_up, soft_cosine


@pytest.mark.parametrize("name", TREES)
def test_the_tree_holds_every_prompt_once_below_its_medoids(name):
    embeddings, shares, _ = made_up(400)
    fitted = make_predictor(name, alpha=3, beta=20).fit(embeddings, shares)
    leaves = fitted.tree.leaves
    assert len(leaves) > 400 // 20
    assert max(map(len, leaves)) <= 20
    np.testing.assert_array_equal(np.sort(np.concatenate(leaves)), np.arange(400))
    distance = 1 - soft_cosine(embeddings, embeddings)
    if name == "vared":
        flat = shares.reshape(400, -1)
        distance = np.linalg.norm(flat[:, None] - flat, axis=2)
    children = np.zeros(len(fitted.tree.nodes), int)
    for medoid, parent, _, _, start, stop in fitted.tree.nodes[1:]:
        below = fitted.tree.order[start:stop]
        children[parent] += 1
        totals = distance[np.ix_(below, below)].sum(axis=1)
        at = np.flatnonzero(below == medoid)
        assert len(at) == 1
        assert totals[at[0]] == pytest.approx(totals.min(), abs=1e-4)
    assert children.max() <= 4 and (children[children > 0] >= 2).all()


def test_search_walks_to_the_leaf_and_ranks_before_cutting():
    """Against a slow walk: the leaf of the nearest medoids, filled from the nearest siblings."""
    embeddings, shares, _ = made_up(400, noise=1.0)
    fitted = SimilarPromptsSearch(alpha=15, beta=24).fit(embeddings[:350], shares[:350])
    tree, similarity = fitted.tree, soft_cosine(embeddings[350:], embeddings[:350])
    filled = 0
    prompts, near = fitted.search_units(unit_rows(embeddings[350:]))
    for row, known in enumerate(similarity):
        node = 0
        while tree.nodes[node, 3]:
            first, count = tree.nodes[node, 2:4]
            node = first + known[tree.nodes[first : first + count, 0]].argmax()
        below = tree.nodes[:, 4:]
        pool = list(tree.order[slice(*below[node])])
        filled += len(pool) < 15
        while len(pool) < 15:
            parent = tree.nodes[node, 1]
            siblings = [i for i in np.flatnonzero(tree.nodes[:, 1] == parent) if i != node]
            for i in sorted(siblings, key=lambda i: -known[tree.nodes[i, 0]]):
                if len(pool) < 15:
                    pool += list(tree.order[slice(*below[i])])
            node = parent
        expected = sorted(pool, key=lambda p: -known[p])[:15]
        np.testing.assert_array_equal(prompts[row], expected)
        np.testing.assert_allclose(near[row], known[expected], atol=1e-6)
    assert 5 < filled < 45  # both ways of the search were walked
