import pickle

import numpy as np
import pytest

from servegym.envs.workloads._expert_sets import (
    draw_top_k,
    ids_to_masks,
    masks_to_ids,
    pack_sets,
    unpack_sets,
)
from servegym.envs.workloads.activations import (
    Activations,
    MoeModel,
    group_split,
    list_models,
    load_model,
    make_toy_activations,
    masks_to_counts,
    popcounts,
    sample_tokens,
)


def changed(record, **changes):
    fields = {name: getattr(record, name) for name in record.__dataclass_fields__}
    return type(record)(**(fields | changes))


@pytest.fixture(scope="module")
def toy():
    return make_toy_activations()


# Published parameter counts, and the share of weights that load_model should give back.
@pytest.mark.parametrize(
    ("name", "billion", "blocks", "moe", "experts", "top_k"),
    [
        ("deepseek-v2-lite", 15.71, 27, 26, 64, 6),
        ("mixtral-8x7b", 46.70, 32, 32, 8, 2),
    ],
)
def test_bfloat16_models_have_their_published_size(name, billion, blocks, moe, experts, top_k):
    model = load_model(name)
    assert (model.layers, model.num_moe_layers) == (blocks, moe)
    assert (model.experts, model.top_k) == (experts, top_k)
    assert model.total_mb * 2**20 / 2 == pytest.approx(billion * 1e9, rel=1e-3)
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
    assert oss.total_mb * 2**20 == pytest.approx(13.8e9, rel=5e-3)
    gpt2 = load_model("gpt2-moe")
    dense = gpt2.total_mb * 2**20 / 4 - 12 * (7 * gpt2.expert_bytes / 4 + 8 * 768)
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
        ({"experts": 65}, "experts=65"),
        ({"moe_layers": (1, 1)}, "moe_layers"),
        ({"moe_layers": (4,)}, "moe_layers"),
        ({"moe_layers": ()}, "moe_layers"),
        ({"non_expert_mb": np.ones(3)}, "non_expert_mb"),
        ({"non_expert_mb": -np.ones(4)}, "non_expert_mb"),
        ({"expert_bytes": 0}, "expert_bytes=0"),
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


def test_toy_tasks_differ_more_than_prompts_of_a_task(toy):
    f = toy.frequencies().reshape(toy.num_prompts, -1)
    apart = np.abs(f[:, None] - f[None]).sum(axis=2)
    same = toy.task[:, None] == toy.task[None]
    off = ~np.eye(toy.num_prompts, dtype=bool)
    assert apart[~same].mean() > 1.3 * apart[same & off].mean()


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


def test_a_set_does_not_share_memory_with_what_it_was_made_of(toy):
    counts = np.array(toy.counts)
    made = changed(toy, counts=counts)
    counts[:] = 0
    np.testing.assert_array_equal(made.counts, toy.counts)
    with pytest.raises(ValueError, match="read-only"):
        made.counts[0] = 0


def spoiled(array, place, value):
    array = np.array(array)
    array[place] = value
    return array


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {"kind": "measured"}, "kind='measured'"),
        (lambda a: {"tasks": ("a", "a")}, "tasks"),
        (lambda a: {"task": spoiled(a.task, 3, 2)}, r"task\[3\]=2"),
        (lambda a: {"split": spoiled(a.split, 5, 3)}, r"split\[5\]=3"),
        (lambda a: {"split": a.split[:-1]}, "split has shape"),
        (lambda a: {"tokens": spoiled(a.tokens, 1, 0)}, r"tokens\[1\]=0"),
        (lambda a: {"tokens": a.tokens.astype(float)}, "tokens has dtype"),
        (lambda a: {"counts": spoiled(a.counts, (2, 1, 0), 99)}, r"counts\[2, 1\] sums"),
        (lambda a: {"counts": spoiled(a.counts, (2, 1, 0), -1)}, r"counts\[2, 1, 0\]=-1"),
        (lambda a: {"bank": spoiled(a.bank, (4, 2), 7)}, r"bank\[4, 2\]=0x7"),
        (lambda a: {"bank": spoiled(a.bank, (4, 2), 257)}, r"bank\[4, 2\]=0x101"),
        (lambda a: {"bank": a.bank.astype(np.int64)}, "bank is int64"),
        (lambda a: {"bank": a.bank[:-1]}, "bank_start"),
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


def test_popcounts_match_python_bits():
    rng = np.random.default_rng(0)
    masks = rng.integers(0, 1 << 64, size=(50, 3), dtype=np.uint64)
    want = [[int(m).bit_count() for m in row] for row in masks]
    assert popcounts(masks).tolist() == want


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
