import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from servegym._files import MalformedFileError
from servegym.envs.workloads.activations import (
    Activations,
    MoeModel,
    group_split,
    list_models,
    load_activations,
    load_model,
    make_toy_activations,
    masks_to_counts,
    popcounts,
    read_activations,
    read_law,
    sample_tokens,
)
from servegym.envs.workloads.build.activations import main as build
from servegym.envs.workloads.build.activations import (
    near_duplicates,
    pack_sets,
    top_expert_share,
    write_activations,
)
from servegym.envs.workloads.expert_sets import draw_top_k, ids_to_masks, masks_to_ids, unpack_sets
from servegym.envs.workloads.files import DATA_DIR
from servegym.envs.workloads.synthetic_activations import (
    SHARPEST,
    mixtral_targets,
    sharpen,
    solve_base,
    top_two_frequencies,
)


def changed(record, **changes):
    fields = {name: getattr(record, name) for name in record.__dataclass_fields__}
    return type(record)(**(fields | changes))


@pytest.fixture(scope="module")
def toy():
    return make_toy_activations()


# Published parameter counts, and the share of weights that load_model should give back.
def total_bytes(model):
    routed = model.num_moe_layers * model.experts * model.expert_bytes
    return routed + (model.non_expert_mb.sum() + model.embedding_mb) * 2**20


@pytest.mark.parametrize(
    ("name", "billion", "blocks", "moe", "experts", "top_k"),
    [("deepseek-v2-lite", 15.71, 27, 26, 64, 6), ("mixtral-8x7b", 46.70, 32, 32, 8, 2)],
)
def test_bfloat16_models_have_their_published_size(name, billion, blocks, moe, experts, top_k):
    model = load_model(name)
    assert (model.layers, model.num_moe_layers) == (blocks, moe)
    assert (model.experts, model.top_k) == (experts, top_k)
    assert total_bytes(model) / 2 == pytest.approx(billion * 1e9, rel=1e-3)
    assert model.expert_bytes == 3 * model.hidden * model.expert_intermediate * 2
    assert model.token_bytes == 2 * model.hidden


def test_deepseek_sizes():
    model = load_model("deepseek-v2-lite")
    assert model.expert_bytes == 17_301_504
    assert model.expert_mb == 16.5
    assert model.non_expert_mb.sum() == pytest.approx(1701, abs=1)
    assert model.non_expert_mb[0] > model.non_expert_mb[1]
    assert model.embedding_mb == pytest.approx(800, abs=0.1)
    assert model.kv_bytes_per_token_layer == 1152
    assert model.moe_layers == tuple(range(1, 27))


def test_other_sizes():
    assert load_model("mixtral-8x7b").expert_bytes == 352_321_536
    oss = load_model("gpt-oss-20b")
    routed = 24 * 32 * (3 * 2880 * 2880 + 3 * 2880)
    rest = (oss.non_expert_mb.sum() + oss.embedding_mb) * 2**20 / 2
    assert routed + rest == pytest.approx(20.91e9, rel=1e-3)
    # The checkpoint is 13.8 GB.
    assert total_bytes(oss) == pytest.approx(13.8e9, rel=5e-3)
    gpt2 = load_model("gpt2-moe")
    dense = total_bytes(gpt2) / 4 - 12 * (7 * gpt2.expert_bytes / 4 + 8 * 768)
    assert dense == pytest.approx(124.4e6, rel=1e-3)
    assert gpt2.token_bytes == 4 * 768


def test_unknown_model_is_refused_with_the_nearest():
    assert list_models() == ["deepseek-v2-lite", "gpt-oss-20b", "mixtral-8x7b", "gpt2-moe"]
    with pytest.raises(ValueError, match="deepseek-v2-lit.*Did you mean 'deepseek-v2-lite'"):
        load_model("deepseek-v2-lit")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 9}, "top_k=9"),
        ({"moe_layers": (4,)}, "moe_layers"),
        ({"non_expert_mb": -np.ones(4)}, "non_expert_mb"),
    ],
)
def test_bad_models_are_refused(toy, changes, message):
    with pytest.raises(ValueError, match=message):
        changed(toy.model, **changes)


def check(activations):
    """Everything that holds of any set."""
    a, model = activations, activations.model
    assert isinstance(model, MoeModel)
    prompts, layers = len(a.tokens), model.num_moe_layers
    for name, dtype, shape in [
        ("task", np.int16, (prompts,)),
        ("category", np.int16, (prompts,)),
        ("split", np.int8, (prompts,)),
        ("tokens", np.int32, (prompts,)),
        ("counts", np.int32, (prompts, layers, model.experts)),
        ("bank", np.uint64, (a.bank_start[-1], layers)),
        ("bank_start", np.int64, (prompts + 1,)),
    ]:
        array = getattr(a, name)
        assert (array.dtype, array.shape) == (dtype, shape), name
        assert not array.flags.writeable, name
    assert (a.counts.sum(axis=2) == (a.tokens * model.top_k)[:, None]).all()
    assert (popcounts(a.bank) == model.top_k).all()
    assert a.bank.max() < 1 << model.experts
    # Only experts that the prompt has used are in its bank, and no more often than it has.
    for p in range(prompts):
        sets = a.bank[a.bank_start[p] : a.bank_start[p + 1]]
        assert 1 <= len(sets) <= a.tokens[p]
        assert (masks_to_counts(sets, model.experts) <= a.counts[p]).all()
    np.testing.assert_allclose(a.frequencies().sum(axis=2), 1)
    parts = [a.rows(name) for name in ("train", "val", "eval")]
    assert sorted(np.concatenate(parts)) == list(a.rows("all")) == list(range(prompts))
    for t in range(len(a.tasks)):
        shares = [np.mean(a.task[part] == t) for part in parts]
        assert min(shares[0], shares[2]) > 0
    assert abs(len(parts[0]) - 0.6 * prompts) <= 2
    assert abs(len(parts[1]) - 0.1 * prompts) <= 2


def test_toy_holds_the_invariants(toy):
    check(toy)
    for p in range(toy.num_prompts):
        sets = toy.bank[toy.bank_start[p] : toy.bank_start[p + 1]]
        np.testing.assert_array_equal(masks_to_counts(sets, 8), toy.counts[p])


def test_toy_depends_on_the_seed_alone(toy):
    again, other = make_toy_activations(), make_toy_activations(seed=1)
    np.testing.assert_array_equal(again.bank, toy.bank)
    np.testing.assert_array_equal(again.embeddings["token"], toy.embeddings["token"])
    assert other.bank.shape != toy.bank.shape or (other.bank != toy.bank).any()


def test_toy_takes_other_sizes_and_refuses_bad_ones():
    check(make_toy_activations(prompts=30, layers=3, experts=64, top_k=6, tasks=3, seed=2))
    for argument, value in [("experts", 65), ("top_k", 9), ("prompts", 0), ("tasks", 0)]:
        with pytest.raises(ValueError, match=f"{argument}={value}"):
            make_toy_activations(**{argument: value})


def test_pickle_keeps_everything_read_only(toy):
    copy = pickle.loads(pickle.dumps(toy))
    assert isinstance(copy, Activations)
    np.testing.assert_array_equal(copy.bank, toy.bank)
    check(copy)
    assert not copy.model.non_expert_mb.flags.writeable


def spoiled(array, place, value):
    array = np.array(array)
    array[place] = value
    return array


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {"kind": "measured"}, "kind='measured'"),
        (lambda a: {"task": spoiled(a.task, 3, 2)}, r"task\[3\] is 2"),
        (lambda a: {"split": a.split[:-1]}, "split has shape"),
        (lambda a: {"counts": spoiled(a.counts, (2, 1, 0), 99)}, r"counts\[2, 1\] sums"),
        (lambda a: {"bank": spoiled(a.bank, (4, 2), 257)}, r"bank\[4, 2\]=0x101"),
        (lambda a: {"bank_start": spoiled(a.bank_start, 1, 0)}, "bank_start"),
        (lambda a: {"embeddings": {"output": np.full((40, 2), np.nan)}}, "embeddings"),
        (lambda a: {"embeddings": {"pooled": np.ones((40, 2))}}, "pooled"),
    ],
)
def test_bad_sets_are_refused(toy, change, message):
    with pytest.raises(ValueError, match=message):
        changed(toy, **change(toy))


def test_masks_by_hand():
    masks = ids_to_masks(np.array([[[0, 3], [63, 1]], [[3, 4], [1, 2]]]))
    assert masks.tolist() == [[0b1001, (1 << 63) | 2], [0b11000, 0b110]]
    assert popcounts(masks).tolist() == [[2, 2], [2, 2]]
    counts = masks_to_counts(masks, 64)
    assert counts.shape == (2, 64)
    assert counts[0, [0, 3, 4]].tolist() == [1, 2, 1]
    assert counts[1, [1, 2, 63]].tolist() == [2, 1, 1]
    assert counts.sum() == 8


@pytest.mark.parametrize(("experts", "top_k"), [(64, 6), (32, 4), (8, 2), (5, 5)])
def test_packed_sets_come_back(experts, top_k):
    rng = np.random.default_rng(1)
    ids = np.sort(
        [[rng.permutation(experts)[:top_k] for _ in range(3)] for _ in range(200)], axis=2
    )
    ids[0, 0] = np.arange(top_k)
    ids[1, 0] = np.arange(experts - top_k, experts)
    masks = ids_to_masks(ids)
    np.testing.assert_array_equal(masks_to_ids(masks, top_k), ids)
    planes = pack_sets(masks, top_k)
    np.testing.assert_array_equal(unpack_sets(planes, experts, top_k), masks)
    with pytest.raises(ValueError, match="rank"):
        unpack_sets(np.full((4, 1, 1), 127, dtype=np.uint8), experts, top_k)


def test_draw_top_k_follows_the_softmax():
    p = np.array([0.5, 0.3, 0.2])
    masks = draw_top_k(np.tile(np.log(p), (40000, 1)), 2, np.random.default_rng(0))
    got = masks_to_counts(masks[:, None], 3)[0] / 40000
    # An expert is drawn first, or second after another one.
    want = [p[i] + sum(p[j] * p[i] / (1 - p[j]) for j in range(3) if j != i) for i in range(3)]
    np.testing.assert_allclose(got, want, atol=0.01)


def test_sample_tokens_uses_the_bank_evenly(toy):
    rng = np.random.default_rng(0)
    sets = toy.bank[toy.bank_start[7] : toy.bank_start[8]]
    size = len(sets)
    whole_bank = sample_tokens(toy, 7, size, rng)
    assert sorted(map(tuple, whole_bank)) == sorted(map(tuple, sets))
    assert (whole_bank != sets).any()
    long = sample_tokens(toy, 7, 2 * size + 3, rng)
    extra = masks_to_counts(long, 8) - 2 * masks_to_counts(sets, 8)
    assert extra.min() >= 0 and extra.sum() == 3 * 2 * 4
    assert sample_tokens(toy, 7, 0, rng).shape == (0, 4)
    with pytest.raises(ValueError, match="prompt=40"):
        sample_tokens(toy, 40, 1, rng)


def test_groups_stay_in_one_split():
    rng = np.random.default_rng(0)
    group = rng.integers(0, 150, size=400)
    task = group % 4
    split = group_split(task, group, 3)
    for g in np.unique(group):
        assert len(set(split[group == g])) == 1
    np.testing.assert_allclose(np.bincount(split) / 400, [0.6, 0.1, 0.3], atol=0.02)
    assert (group_split(task, group, 4) != split).any()


SIZES = {
    "deepseek-v2-lite": (213, 26, 64, 4),
    "gpt-oss-20b": (461, 24, 32, 5),
    "mixtral-8x7b": (200, 32, 8, 5),
    "gpt2-moe": (240, 12, 8, 4),
}


@pytest.mark.parametrize("skew", ["measured", "paper"])
@pytest.mark.parametrize("name", SIZES)
def test_shipped_sets_hold_the_invariants(name, skew):
    a = load_activations(name, skew)
    check(a)
    assert (*a.counts.shape, len(a.tasks)) == SIZES[name]
    recorded = name in ("deepseek-v2-lite", "gpt-oss-20b") and skew == "measured"
    assert a.kind == ("recorded" if recorded else "synthetic")
    assert a.provenance["skew"] == skew
    want = a.provenance["top_expert_share"][skew]
    assert top_expert_share(a) == pytest.approx(want, abs=1e-4)
    assert load_activations(name, skew) is a


def test_known_totals():
    deepseek, oss = load_activations("deepseek-v2-lite"), load_activations("gpt-oss-20b")
    assert deepseek.tokens.sum() == 33_279
    assert np.bincount(deepseek.task).tolist() == [127, 33, 13, 40]
    assert oss.tokens.sum() == 148_205
    assert len(oss.categories) > 60
    assert oss.embeddings["output"].shape == oss.embeddings["token"].shape == (461, 384)
    assert deepseek.embeddings == {}


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "gpt-oss-20b"])
def test_bank_agrees_with_the_full_counts_within_sampling_error(name):
    a = load_activations(name)
    experts = a.model.experts
    pairs = zip(a.bank_start[:-1], a.bank_start[1:], strict=True)
    banked = np.array([masks_to_counts(a.bank[b:e], experts) for b, e in pairs])
    n = np.diff(a.bank_start)[:, None, None]
    total = a.tokens[:, None, None]
    q = a.counts / total
    # Sampling without replacement (hypergeometric).
    variance = q * (1 - q) / n * (total - n) / np.maximum(total - 1, 1)
    drawn = variance > 1e-9
    z = (banked / n - q)[drawn] / np.sqrt(variance[drawn])
    assert abs(z.mean()) < 0.02
    assert z.std() == pytest.approx(1, abs=0.03)
    # Fully banked prompts agree exactly.
    full = (n == total).ravel()
    np.testing.assert_array_equal(banked[full], a.counts[full])
    assert full.any()


def test_mixtral_keeps_the_measured_frequencies():
    a = load_activations("mixtral-8x7b")
    law = a.provenance["law"]
    targets = mixtral_targets(law, 32, 8)
    np.testing.assert_allclose(targets.sum(axis=2), 1)
    for layer, rows in law["measured"].items():
        np.testing.assert_allclose(targets[:, int(layer)], rows, atol=1e-5)
    sums = np.array([a.counts[a.task == t].sum(axis=0) for t in range(5)])
    error = sums / sums.sum(axis=2, keepdims=True) - targets
    assert np.abs(error).max() < 0.02
    assert np.abs(error.mean(axis=0)).mean() < 0.002
    # Layers apart from the measured three follow the popularity order of their experts.
    mean = targets.mean(axis=0)
    for layer in (3, 20):
        order = [e for where, e in law["order"] if where == layer]
        assert np.corrcoef(np.argsort(order), -mean[layer])[0, 1] > 0.6


def test_top_two_frequencies_and_base_by_hand():
    p = np.array([0.5, 0.3, 0.2])
    first_or_second = [
        p[i] + sum(p[j] * p[i] / (1 - p[j]) for j in range(3) if j != i) for i in range(3)
    ]
    np.testing.assert_allclose(top_two_frequencies(np.log(p)) * 2, first_or_second)
    target = np.array([[0.4, 0.3, 0.2, 0.1]])
    shifts = np.random.default_rng(0).normal(size=(50, 1, 4))
    base = solve_base(target, shifts)
    np.testing.assert_allclose(top_two_frequencies(base + shifts).mean(axis=0), target, atol=1e-4)


def test_generated_sets_depend_on_the_seed():
    a, b = load_activations("gpt2-moe"), load_activations("gpt2-moe", seed=1)
    assert a.bank.shape != b.bank.shape or (a.bank != b.bank).any()
    again = read_law(DATA_DIR / "activations-gpt2-moe.json", load_model("gpt2-moe"), 1)
    np.testing.assert_array_equal(again.bank, b.bank)
    # Both are of the same tasks: the seed changes prompts, not frequencies.
    for t in range(4):
        sums = [x.counts[x.task == t].sum(axis=0) for x in (a, b)]
        f, g = (s / s.sum(axis=1, keepdims=True) for s in sums)
        assert np.abs(f - g).max() < 0.06


@pytest.mark.parametrize("name", SIZES)
def test_paper_skew_raises_the_top_share_and_keeps_most_choices(name):
    plain, narrow = load_activations(name), load_activations(name, "paper")
    before, after = top_expert_share(plain), top_expert_share(narrow)
    assert all(after[task] > 1.2 * before[task] for task in plain.tasks)
    assert after["mean"] < 1 / plain.model.top_k
    np.testing.assert_array_equal(plain.tokens, narrow.tokens)
    np.testing.assert_array_equal(plain.split, narrow.split)
    kept = popcounts(plain.bank & narrow.bank).mean() / plain.model.top_k
    assert 0.4 < kept < 0.95


def test_sharpening_follows_its_law():
    rng = np.random.default_rng(0)
    bank = draw_top_k(np.zeros((6000, 5, 8)), 2, rng)
    before = masks_to_counts(bank, 8) / 6000
    frequencies = np.tile(np.linspace(2, 1, 8) / 12, (1, 5, 1))
    after = sharpen(bank, np.zeros(6000, int), frequencies, 2, np.random.default_rng(3))
    rho = np.random.default_rng(3).uniform(0, SHARPEST, size=(1, 5))[0]
    m = before[:, 0]
    got = masks_to_counts(after, 8)[:, 0] / 6000
    np.testing.assert_allclose(got, m + rho * (1 - m), atol=0.02)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="Did you mean 'mixtral-8x7b'"):
        load_activations("mixtral")
    with pytest.raises(ValueError, match="skew='papers'.*Did you mean 'paper'"):
        load_activations("gpt2-moe", skew="papers")
    with pytest.raises(ValueError, match="seed=-1"):
        load_activations("gpt2-moe", seed=-1)


@pytest.fixture
def written(tmp_path, toy):
    """The toy set as files; only its experts' sizes matter to the reader."""
    made = changed(toy, kind="recorded", name="gpt-oss-20b", provenance={"name": "toy"})
    paths = write_activations(made, tmp_path)
    return paths, made


def test_written_files_come_back(written):
    paths, made = written
    stem = "activations-gpt-oss-20b"
    assert [p.name for p in paths] == [
        f"{stem}.npz",
        f"{stem}-bank-0.npz",
        f"{stem}-embeddings.npz",
        f"{stem}.json",
    ]
    back = read_activations(paths[-1], made.model)
    for name in ("task", "split", "tokens", "counts", "bank", "bank_start", "category"):
        np.testing.assert_array_equal(getattr(back, name), getattr(made, name))
    half = made.embeddings["token"].astype(np.float16)
    np.testing.assert_array_equal(back.embeddings["token"], half)


def rewrite(path, **changes):
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    arrays |= changes
    kept = {name: array for name, array in arrays.items() if array is not None}
    np.savez_compressed(path, **kept)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p, a: p[0].unlink(), "cannot be read"),
        (lambda p, a: p[3].write_text('{"files": ["other.npz"]}'), "'other.npz' is unknown"),
        (lambda p, a: rewrite(p[0], counts=a.counts + 1), r"counts\[0, 0\] sums"),
        (lambda p, a: rewrite(p[1], sets=np.full((1, 5, 4), 28, np.uint8)), "rank 28"),
    ],
)
def test_malformed_files_are_refused(written, spoil, message):
    paths, made = written
    spoil(paths, made)
    with pytest.raises(MalformedFileError, match=message):
        read_activations(paths[-1], made.model)


def test_malformed_law_is_refused(tmp_path):
    path = tmp_path / "activations-gpt2-moe.json"
    law = json.loads((DATA_DIR / path.name).read_text())
    del law["law"]["kind_sd"]
    path.write_text(json.dumps(law))
    with pytest.raises(MalformedFileError, match="'law'.*kind_sd"):
        read_law(path, load_model("gpt2-moe"), 0)


def test_near_duplicates_join_chains():
    angle = np.radians([0, 5, 10, 90, 94, 180])
    vectors = np.stack([np.cos(angle), np.sin(angle)], axis=1) * 3
    assert near_duplicates(vectors, np.cos(np.radians(6))).tolist() == [0, 0, 0, 3, 3, 5]


@pytest.mark.slow
def test_two_builds_give_the_same_files(tmp_path, measured):
    data = measured("esft_deepseek_v2_lite", "token_routing.npz").parents[1]
    build([str(data), "--models", "deepseek-v2-lite", "--out", str(tmp_path)])
    made = sorted(tmp_path.glob("*.npz"))
    assert len(made) == 3
    for path in made:
        assert path.read_bytes() == (DATA_DIR / path.name).read_bytes(), path.name


def test_the_table_in_the_docs_is_what_the_command_prints(capsys):
    path = Path(__file__).parents[3] / "docs" / "activations.md"
    if not path.is_file():
        pytest.skip("the documentation is not here")
    build(["--shares"])
    assert capsys.readouterr().out.strip() in path.read_text(encoding="utf-8")
