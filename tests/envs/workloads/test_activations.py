import dataclasses
from pathlib import Path

import numpy as np
import pytest

from servegym.envs.workloads.activations import (
    SKEWS,
    MoeModel,
    list_models,
    load_activations,
    load_model,
    make_toy_activations,
    read_activations,
)
from servegym.envs.workloads.build.activations import (
    build_deepseek,
    top_expert_share,
    write_activations,
)
from servegym.envs.workloads.expert_sets import ids_to_masks, masks_to_ids, set_bits
from servegym.envs.workloads.files import DATA_DIR


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
    assert model.token_bytes == 2 * model.hidden


def check(activations):
    """Everything that holds of any set."""
    a, model = activations, activations.model
    assert isinstance(model, MoeModel)
    prompts, layers = len(a.tokens), model.num_moe_layers
    for name, dtype, shape in [
        ("task", np.int16, (prompts,)),
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
    assert (np.bitwise_count(a.bank) == model.top_k).all()
    assert a.bank.max() < 1 << model.experts
    # Only experts that the prompt has used are in its bank, and no more often than it has.
    for p in range(prompts):
        sets = a.bank[a.bank_start[p] : a.bank_start[p + 1]]
        assert 1 <= len(sets) <= a.tokens[p]
        assert (set_bits(sets, model.experts).sum(axis=0) <= a.counts[p]).all()
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
        np.testing.assert_array_equal(set_bits(sets, 8).sum(axis=0), toy.counts[p])
    check(make_toy_activations(prompts=30, layers=3, experts=64, top_k=6, tasks=3, seed=2))


@pytest.mark.parametrize(("experts", "top_k"), [(64, 6), (32, 4), (8, 2), (5, 5)])
def test_sets_come_back(experts, top_k):
    rng = np.random.default_rng(1)
    ids = np.sort(
        [[rng.permutation(experts)[:top_k] for _ in range(3)] for _ in range(200)], axis=2
    )
    ids[0, 0] = np.arange(top_k)
    ids[1, 0] = np.arange(experts - top_k, experts)
    masks = ids_to_masks(ids)
    np.testing.assert_array_equal(masks_to_ids(masks, top_k), ids)


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


def test_unknown_names_are_refused():
    assert list_models() == list(SIZES)
    with pytest.raises(ValueError, match="deepseek-v2-lit.*Did you mean 'deepseek-v2-lite'"):
        load_model("deepseek-v2-lit")
    with pytest.raises(ValueError, match="Did you mean 'mixtral-8x7b'"):
        load_activations("mixtral")
    with pytest.raises(ValueError, match="skew='papers'.*Did you mean 'paper'"):
        load_activations("gpt2-moe", skew="papers")
    with pytest.raises(ValueError, match="seed=-1"):
        load_activations("gpt2-moe", seed=-1)


def test_written_files_come_back(toy, tmp_path):
    made = dataclasses.replace(toy, kind="recorded", name="gpt-oss-20b")
    write_activations(made, tmp_path)
    back = read_activations(tmp_path / "activations-gpt-oss-20b.json", made.model)
    for name in ("task", "split", "tokens", "counts", "bank", "bank_start"):
        np.testing.assert_array_equal(getattr(back, name), getattr(made, name))
    half = made.embeddings["token"].astype(np.float16)
    np.testing.assert_array_equal(back.embeddings["token"], half)


@pytest.mark.slow
def test_two_builds_give_the_same_files(tmp_path, measured, monkeypatch):
    monkeypatch.setenv("SERVEGYM_DATA", str(measured("esft_deepseek_v2_lite").parent))
    write_activations(build_deepseek(), tmp_path)
    made = sorted(tmp_path.glob("*.npz"))
    assert len(made) == 2
    for path in made:
        assert path.read_bytes() == (DATA_DIR / path.name).read_bytes(), path.name


def test_the_table_in_the_docs_is_what_is_shipped():
    path = Path(__file__).parents[3] / "docs" / "activations.md"
    if not path.is_file():
        pytest.skip("the documentation is not here")
    table = path.read_text(encoding="utf-8")
    for name in SIZES:
        a = load_activations(name)
        sizes = [a.num_prompts, a.tokens.sum(), len(a.bank)]
        both = [top_expert_share(load_activations(name, skew))["mean"] for skew in SKEWS]
        shares = [1 / a.model.experts, *both, 1 / a.model.top_k]
        row = [name, a.kind, *(f"{size:,}" for size in sizes)]
        row += [f"{a.model.num_moe_layers} x {a.model.experts}, {a.model.top_k}"]
        row += [f"{100 * share:.1f} %" for share in shares]
        assert f"| {' | '.join(row)} |" in table
