"""Predictors of activations: Eq. 11 to the letter, the tree's search, closed forms, refusals."""

import itertools

import numpy as np
import pytest

from servegym.baselines.serverless_moe.prediction import (
    PREDICTORS,
    js_divergence,
    kernel,
    make_predictor,
)
from servegym.baselines.serverless_moe.prediction.similar_prompts import (
    BruteForce,
    SimilarPromptsSearch,
    VarED,
)
from servegym.baselines.serverless_moe.prediction.tree import unit_rows
from servegym.envs.workloads.activations import make_toy_activations

WIDTH = 12


TREES = ["sps", "vared", "varpam"]


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
    return embeddings, calls / calls.sum(axis=2, keepdims=True), topic


def soft_cosine(first, second, sigma=1e-12):
    """Eq. 11 from pooled vectors (P, d) and (Q, d): (P, Q)."""
    norms = np.outer(np.linalg.norm(first, axis=1), np.linalg.norm(second, axis=1))
    return first @ second.T / (norms + sigma)


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


def test_js_divergence_has_known_values():
    assert js_divergence([1, 0], [0, 1]) == pytest.approx(1.0)
    assert js_divergence([0.2, 0.8], [0.2, 0.8]) == 0.0
    # H(0.75, 0.25) - H(0.5, 0.5) / 2 in bits
    expected = -(0.75 * np.log2(0.75) + 0.25 * np.log2(0.25)) - 0.5
    assert js_divergence([1, 0], [0.5, 0.5]) == pytest.approx(expected)
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(5), (4, 1)), rng.dirichlet(np.ones(5), 3)
    assert js_divergence(p, q).shape == (4, 3)
    np.testing.assert_allclose(js_divergence(p, q), js_divergence(q, p))


@pytest.mark.parametrize(
    ("p", "q", "said"),
    [
        ([0.5, 0.6], [0.5, 0.5], "p must sum to 1"),
        ([0.5, 0.5], [1.5, -0.5], "q must hold"),
        ([0.5, 0.5], [1.0, 0.0, 0.0], "q has 3"),
        ([np.nan, 1.0], [0.5, 0.5], "p must hold"),
        (1.0, [1.0], "p has shape"),
    ],
)
def test_js_divergence_refuses_what_is_no_distribution(p, q, said):
    with pytest.raises(ValueError, match=said):
        js_divergence(p, q)


@pytest.mark.parametrize("name", sorted(PREDICTORS))
def test_every_predictor_returns_distributions_and_repeats_itself(name):
    embeddings, shares, topic = made_up()
    found = [
        make_predictor(name)
        .fit(embeddings[:200], shares[:200], tasks=topic[:200])
        .predict(embeddings[200:], task=topic[200:])
        for _ in range(2)
    ]
    assert found[0].shape == (40, 3, 6) and found[0].dtype == np.float64
    assert (found[0] >= 0).all()
    np.testing.assert_allclose(found[0].sum(axis=2), 1.0, atol=1e-12)
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("name", ["bf", "sps", "vared", "category", "ridge", "fate"])
def test_predictors_that_look_at_the_prompt_beat_the_mean(name):
    embeddings, shares, topic = made_up()

    def error(predictor):
        predictor.fit(embeddings[:200], shares[:200], tasks=topic[:200])
        return js_divergence(
            predictor.predict(embeddings[200:], task=topic[200:]), shares[200:]
        ).mean()

    mean = error(make_predictor("dop"))
    assert error(make_predictor(name)) < 0.7 * mean < 0.7 * error(make_predictor("ef"))


def distances(points, seed, duplicates=0):
    rng = np.random.default_rng(seed)
    rows = unit_rows(rng.normal(size=(points, 3)))
    rows[:duplicates] = rows[0]
    return np.clip(1.0 - rows @ rows.T, 0.0, None) * (1.0 - np.eye(points, dtype=np.float32))


def textbook_pam(distance, k):
    """BUILD and SWAP as in the book: every exchange is tried by its whole loss."""

    def loss(medoids):
        return distance[medoids].min(axis=0).sum(dtype=np.float64)

    points = range(len(distance))
    medoids = []
    for _ in range(k):
        medoids.append(
            min((j for j in points if j not in medoids), key=lambda j: loss([*medoids, j]))
        )
    while True:
        swaps = [
            [*medoids[:i], j, *medoids[i + 1 :]]
            for j in points
            if j not in medoids
            for i in range(k)
        ]
        best = min(swaps, key=loss, default=medoids)
        if not loss(best) < loss(medoids) - 1e-9:
            return medoids, loss(medoids)
        medoids = best


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("points", "k"), [(7, 2), (9, 3), (14, 4)])
def test_pam_is_the_textbooks_and_no_exchange_improves_it(seed, points, k):
    distance = distances(points, seed, duplicates=seed % 3)
    medoids, nearest, loss = kernel.pam(distance, k)
    assert sorted(medoids) == sorted(textbook_pam(distance, k)[0]) and len(set(medoids)) == k
    assert loss == pytest.approx(textbook_pam(distance, k)[1], rel=1e-6)
    to_medoids = distance[medoids]
    np.testing.assert_array_equal(nearest, to_medoids.argmin(axis=0))
    assert loss == pytest.approx(to_medoids.min(axis=0).sum(), rel=1e-6)
    for i, j in itertools.product(range(k), range(points)):
        other = medoids.copy()
        other[i] = j
        assert distance[other].min(axis=0).sum() >= loss - 1e-6


def test_pam_mostly_finds_the_global_optimum_and_never_less():
    met = []
    for seed in range(40):
        distance = distances(10, seed)
        best = min(
            distance[list(some)].min(axis=0).sum() for some in itertools.combinations(range(10), 3)
        )
        loss = kernel.pam(distance, 3)[2]
        assert loss >= best - 1e-5
        met.append(loss <= best + 1e-5)
    assert np.mean(met) >= 0.75


def test_pam_finds_the_optimum_of_separate_clusters_and_its_ends():
    rng = np.random.default_rng(0)
    place = np.sort(np.concatenate([c + 0.1 * rng.random(6) for c in (0.0, 5.0, 9.0)]))
    distance = np.abs(place[:, None] - place).astype(np.float32)
    medoids, nearest, _ = kernel.pam(distance, 3)
    assert sorted(m // 6 for m in medoids) == [0, 1, 2]
    assert len({tuple(nearest[6 * c : 6 * c + 6]) for c in range(3)}) == 3
    assert kernel.pam(distance, 1)[0].tolist() == [int(distance.sum(axis=1).argmin())]
    assert kernel.pam(distance, 18)[2] == 0.0
    # SWAP leaves what BUILD found: the middle of three points is a poor first medoid for two.
    row = np.array([0.0, 0.1, 1.0, 2.0, 2.1])
    medoids, _, loss = kernel.pam(np.abs(row[:, None] - row).astype(np.float32), 2)
    assert loss == pytest.approx(1.1) and 2 not in medoids


def test_pam_agrees_with_the_package_kmedoids():
    package = pytest.importorskip("kmedoids")
    for seed, (points, k) in enumerate([(40, 4), (60, 5), (120, 4)]):
        distance = distances(points, seed)
        medoids, nearest, loss = kernel.pam(distance, k)
        other = package.pam(distance, k, init="build")
        assert loss == pytest.approx(other.loss, rel=1e-6)
        assert sorted(medoids) == sorted(other.medoids.tolist())


def test_counts_and_shares_are_the_same_history():
    toy = make_toy_activations()
    rng = np.random.default_rng(0)
    embeddings = rng.normal(size=(len(toy.counts), WIDTH))
    by_count = make_predictor("bf").fit(embeddings, toy.counts).predict(embeddings[:5])
    by_share = make_predictor("bf").fit(embeddings, toy.frequencies()).predict(embeddings[:5])
    np.testing.assert_allclose(by_count, by_share)


def test_brute_force_is_the_softmax_weighted_mean():
    embeddings, shares, _ = made_up()
    found = BruteForce(alpha=4).fit(embeddings[1:], shares[1:]).predict(embeddings[:1])[0]
    similarity = soft_cosine(embeddings[:1], embeddings[1:])[0]
    nearest = np.argsort(-similarity)[:4]
    weight = np.exp(similarity[nearest]) / np.exp(similarity[nearest]).sum()
    expected = np.einsum("j,jlk->lk", weight, shares[1:][nearest])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_dop_category_and_ef_are_the_plain_means():
    embeddings, shares, topic = made_up()
    whole, half = (embeddings, shares, topic), embeddings[:3]
    mean = make_predictor("dop").fit(*whole).predict(half)
    np.testing.assert_allclose(mean[1], shares.mean(axis=0))
    by_task = make_predictor("category").fit(*whole).predict(half, task=[3, 0, 99])
    np.testing.assert_allclose(by_task[0], shares[topic == 3].mean(axis=0))
    np.testing.assert_allclose(by_task[2], shares.mean(axis=0))  # a task without history
    assert (make_predictor("ef").fit(*whole).predict(half) == 1 / 6).all()


def test_ridge_is_the_closed_form_and_its_regulariser_comes_from_the_history():
    embeddings, shares, _ = made_up(noise=0.05)
    fitted = make_predictor("ridge", grid=(0.3,)).fit(embeddings, shares)
    units = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    x, y = units - units.mean(axis=0), shares.reshape(len(shares), -1)
    weights = np.linalg.solve(x.T @ x + 0.3 * np.eye(WIDTH), x.T @ (y - y.mean(axis=0)))
    expected = np.maximum(x[:4] @ weights + y.mean(axis=0), 0).reshape(4, 3, 6)
    expected /= expected.sum(axis=2, keepdims=True)
    np.testing.assert_allclose(fitted.predict(embeddings[:4]), expected, atol=1e-6)
    rng = np.random.default_rng(0)
    chosen = make_predictor("ridge", grid=(1e-3, 1e3)).fit(embeddings, shares)
    assert chosen.regulariser == 1e-3
    # Embeddings that say nothing about activations want all the shrinking there is.
    blind = make_predictor("ridge", grid=(1e-3, 1e3)).fit(rng.normal(size=(30, 40)), shares[:30])
    assert blind.regulariser == 1e3


def test_fate_finds_the_gates_that_made_the_shares():
    rng = np.random.default_rng(0)
    embeddings = rng.normal(size=(300, WIDTH))
    units = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    logits = np.tensordot(units, 2 * rng.normal(size=(WIDTH, 2, 5)), 1)
    shares = np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)
    fitted = make_predictor("fate", decay=0.0, iterations=500).fit(embeddings[:200], shares[:200])
    assert js_divergence(fitted.predict(embeddings[200:]), shares[200:]).max() < 1e-4


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
    prompts, near = fitted.search(embeddings[350:])
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
    np.testing.assert_array_equal(
        tree.search(embeddings[200:])[0], slow.search(embeddings[200:])[0]
    )
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
    assert make_predictor(name).fit(embeddings, shares).search(embeddings)[0].tolist() == [[0]]
    nothing = make_predictor(name).fit(np.zeros((4, 3)), np.ones((4, 1, 2)))
    np.testing.assert_allclose(nothing.predict(np.zeros((1, 3))), 0.5)


@pytest.mark.parametrize("name", TREES)
def test_new_prompts_join_the_tree_and_split_its_leaves(name):
    embeddings, shares, _ = made_up(400)
    fitted = make_predictor(name, alpha=3, beta=20).fit(embeddings[:100], shares[:100])
    before = len(fitted.tree.leaves)
    for start in range(100, 400, 60):
        fitted.add(embeddings[start : start + 60], shares[start : start + 60])
    leaves = fitted.tree.leaves
    assert len(leaves) > before and max(map(len, leaves)) <= 20
    np.testing.assert_array_equal(np.sort(np.concatenate(leaves)), np.arange(400))
    prompts, near = fitted.search(embeddings)
    # A prompt is its own nearest one unless the descent takes another branch.
    assert (prompts[:, 0] == np.arange(400)).mean() > 0.8
    np.testing.assert_allclose(
        near, np.take_along_axis(soft_cosine(embeddings, embeddings), prompts, 1), atol=1e-6
    )


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


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("spss", {}, "Did you mean 'sps'"),
        ("sps", {"alpha": 60}, "beta=60 must be above alpha=60"),
        ("sps", {"fork": 1}, "fork=1"),
        ("bf", {"alpha": 0}, "alpha=0"),
        ("bf", {"alhpa": 3}, "alhpa"),
        ("ridge", {"grid": ()}, "grid"),
        ("ridge", {"grid": (0.0,)}, "grid=0.0"),
        ("ridge", {"folds": 1}, "folds=1"),
        ("fate", {"decay": -1.0}, "decay=-1.0"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(name, settings, said):
    with pytest.raises(ValueError, match=said):
        make_predictor(name, **settings)


@pytest.mark.parametrize("name", ["bf", "sps", "ridge", "ef"])
def test_arrays_that_do_not_fit_are_refused(name):
    embeddings, shares, topic = made_up(20)
    predictor = make_predictor(name)
    with pytest.raises(ValueError, match="must be fitted"):
        predictor.predict(embeddings)
    for wrong, said in (
        ((embeddings[0], shares), "embeddings has shape"),
        ((embeddings[:0], shares[:0]), "embeddings has shape"),
        ((embeddings * np.nan, shares), "embeddings must hold"),
        ((embeddings, shares[:9]), "activations has shape"),
        ((embeddings, shares - 1), "activations must hold"),
        ((embeddings, shares * (np.arange(20) != 4)[:, None, None]), "prompt 4, layer 0"),
        ((embeddings, shares, topic[:9]), "tasks has shape"),
    ):
        with pytest.raises(ValueError, match=said):
            predictor.fit(*wrong)
    predictor.fit(embeddings, shares)
    with pytest.raises(ValueError, match="width 5"):
        predictor.predict(embeddings[:, :5])
    with pytest.raises(ValueError, match="task has shape"):
        predictor.predict(embeddings, task=topic[:3])


def test_the_category_needs_tasks():
    embeddings, shares, topic = made_up(20)
    with pytest.raises(ValueError, match="tasks is None"):
        make_predictor("category").fit(embeddings, shares)
    with pytest.raises(ValueError, match="task is None"):
        make_predictor("category").fit(embeddings, shares, topic).predict(embeddings)


def test_added_prompts_must_fit():
    embeddings, shares, _ = made_up(20)
    fitted = make_predictor("sps").fit(embeddings, shares)
    with pytest.raises(ValueError, match="width 5"):
        fitted.add(embeddings[:, :5], shares)
    with pytest.raises(ValueError, match="as fitted"):
        fitted.add(embeddings, shares[:, :2])
    assert len(fitted.tree) == 20
