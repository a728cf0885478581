"""Predictors of activations: distributions, formulas, and the tree by a slow walk."""

import numpy as np

from servegym.experiments.papers.serverless.predictors.similar_prompts import (
    BruteForce,
    SimilarPromptsSearch,
    unit_rows,
)

WIDTH = 12


def made_up(prompts=240, layers=3, experts=6, topics=5, noise=0.3, seed=0):
    """Embeddings and activations that both depend on a topic and on a place within it."""
    rng = np.random.default_rng(seed)
    topic = rng.integers(topics, size=prompts)
    place = rng.normal(size=(prompts, 2))
    to_embedding = rng.normal(size=(2, WIDTH))
    to_logits = rng.normal(size=(2, layers * experts))
    embeddings = rng.normal(size=(topics, WIDTH))[topic] * 2 + noise * place @ to_embedding
    logits = rng.normal(size=(topics, layers * experts))[topic] + noise * place @ to_logits
    calls = np.exp(logits).reshape(prompts, layers, experts)
    return embeddings, calls / calls.sum(axis=2, keepdims=True)


def soft_cosine(first, second, sigma=1e-12):
    """Eq. 11 from pooled vectors (P, d) and (Q, d): (P, Q)."""
    norms = np.outer(np.linalg.norm(first, axis=1), np.linalg.norm(second, axis=1))
    return first @ second.T / (norms + sigma)


def test_brute_force_is_the_softmax_weighted_mean():
    embeddings, shares = made_up()
    found = BruteForce(alpha=4).fit(embeddings[1:], shares[1:]).predict(embeddings[:1])[0]
    similarity = soft_cosine(embeddings[:1], embeddings[1:])[0]
    nearest = np.argsort(-similarity)[:4]
    weight = np.exp(similarity[nearest]) / np.exp(similarity[nearest]).sum()
    expected = np.einsum("j,jlk->lk", weight, shares[1:][nearest])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_search_walks_to_the_leaf_and_ranks_before_cutting():
    """Against a slow walk: the leaf of the nearest medoids, filled from the nearest siblings."""
    embeddings, shares = made_up(400, noise=1.0)
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
