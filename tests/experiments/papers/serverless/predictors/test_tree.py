"""The tree of k-medoids and Algorithm 1 against a slow walk; Eq. 11 to the letter."""

import numpy as np
import pytest

from servegym.experiments.papers.serverless.predictors import make_predictor
from servegym.experiments.papers.serverless.predictors.similar_prompts import SimilarPromptsSearch
from servegym.experiments.papers.serverless.predictors.tree import unit_rows

from .histories import TREES, WIDTH, made_up, soft_cosine


def literal_soft_cosine(first, second, sigma=1e-12):
    """Eq. 11 token by token: the matrix of all tokens' similarities and two marker columns."""
    tokens = np.vstack([first, second])
    rows = tokens / np.linalg.norm(tokens, axis=1, keepdims=True)
    gram = rows @ rows.T
    mine = np.r_[np.ones(len(first)), np.zeros(len(second))]
    other = 1.0 - mine
    scale = np.sqrt(mine @ gram @ mine) * np.sqrt(other @ gram @ other)
    return (mine @ gram @ other) / (scale + sigma)


def test_pooled_soft_cosine_is_the_token_by_token_one():
    rng = np.random.default_rng(1)
    prompts = [rng.normal(size=(rng.integers(1, 9), WIDTH)) for _ in range(7)]
    pooled = np.stack([(t / np.linalg.norm(t, axis=1, keepdims=True)).sum(axis=0) for t in prompts])
    literal = [[literal_soft_cosine(a, b) for b in prompts] for a in prompts]
    np.testing.assert_allclose(soft_cosine(pooled, pooled), literal, rtol=0, atol=1e-12)
    units = unit_rows(pooled)
    np.testing.assert_allclose(units @ units.T, literal, rtol=0, atol=1e-6)


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


def test_a_tree_of_one_leaf_is_brute_force():
    embeddings, shares, _ = made_up()
    tree = make_predictor("sps", alpha=7, beta=1000).fit(embeddings[:200], shares[:200])
    slow = make_predictor("bf", alpha=7).fit(embeddings[:200], shares[:200])
    units = unit_rows(embeddings[200:])
    np.testing.assert_array_equal(tree.search_units(units)[0], slow.search_units(units)[0])
    np.testing.assert_allclose(
        tree.predict(embeddings[200:]), slow.predict(embeddings[200:]), rtol=1e-6
    )


@pytest.mark.parametrize("name", TREES)
def test_equal_prompts_stay_one_leaf_and_short_histories_are_used_whole(name):
    embeddings, shares, _ = made_up(1)
    same = make_predictor(name, alpha=2, beta=5).fit(
        np.repeat(embeddings, 50, 0), np.repeat(shares, 50, 0)
    )
    assert len(same.tree.leaves) == 1
    np.testing.assert_allclose(same.predict(embeddings), shares)
    alone = make_predictor(name).fit(embeddings, shares)
    assert alone.search_units(unit_rows(embeddings))[0].tolist() == [[0]]
    nothing = make_predictor(name).fit(np.zeros((4, 3)), np.ones((4, 1, 2)))
    np.testing.assert_allclose(nothing.predict(np.zeros((1, 3))), 0.5)
