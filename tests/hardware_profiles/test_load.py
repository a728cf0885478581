"""Shipped profiles and fleets: schema, facts, laws, interpolation, bad files."""

import pickle
import warnings

import numpy as np
import pytest

from servegym._files import read_json, write_json
from servegym.hardware_profiles import Profile, list_profiles, load, load_fleet
from servegym.hardware_profiles.law import WARNED_PROFILES
from servegym.hardware_profiles.load import data_path
from servegym.hardware_profiles.schema import LINEAR_FIELDS

RTX = "rtx4090-llama-3.1-8b"
TABULATED = [name for name in list_profiles() if not name.startswith("paper-linear")]


def _lookup(grid, values, x):
    """Independent piecewise-linear lookup: numpy inside, the end slopes outside."""
    if x > grid[-1]:
        slope = (values[-1] - values[-2]) / (grid[-1] - grid[-2])
        return values[-1] + slope * (x - grid[-1])
    return np.interp(x, grid, values)


def _lookup_2d(rows, columns, values, r, c):
    along = np.array([_lookup(columns, line, c) for line in values])
    return _lookup(rows, along, r)


@pytest.mark.parametrize("name", list_profiles())
def test_round_trip(name, tmp_path):
    profile = load(name)
    profile.save(tmp_path / "copy.json")
    again = load(tmp_path / "copy.json")
    assert again.to_dict() == profile.to_dict()
    assert [p.name for p in tmp_path.iterdir()] == ["copy.json"]
    assert data_path(f"{name}.json").stat().st_size < 100_000
    for ours, theirs in zip(profile.tables(), again.tables(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    thawed = pickle.loads(pickle.dumps(profile))
    assert thawed.decode_s(3, 700) == profile.decode_s(3, 700)


@pytest.mark.parametrize("name", TABULATED)
def test_interpolation_equals_numpy(name):
    profile, rng = load(name), np.random.default_rng(3)
    t = profile.tables()
    for _ in range(50):
        tokens, b = rng.uniform(1, 12_000), rng.uniform(1, 300)
        chunk, context, x = rng.uniform(1, 12_000), rng.uniform(0, 20_000), rng.uniform(1, 20_000)
        dense = _lookup(t.dense_tokens, t.dense_s, tokens)
        attention = _lookup_2d(
            t.chunk_tokens, t.context_tokens, t.chunk_attention_s, chunk, context
        )
        decode = _lookup_2d(t.decode_sequences, t.decode_context_tokens, t.decode_attention_s, b, x)
        head = _lookup(t.head_sequences, t.head_s, b)
        assert profile.dense_s(tokens) == pytest.approx(dense, rel=1e-12)
        assert profile.chunk_attention_s(chunk, context) == pytest.approx(attention, rel=1e-12)
        assert profile.decode_attention_s(b, x) == pytest.approx(decode, rel=1e-12)
        assert profile.head_s(b) == pytest.approx(head, rel=1e-12)
        assert min(dense, attention, decode, head) > 0


def test_linear_law_identity():
    base, k1, kb, k2 = 0.004, 7e-5, 3e-5, 2.5e-5
    raw = load("paper-linear-01").to_dict()
    raw["law"] = {"kind": "linear", **dict(zip(LINEAR_FIELDS, (base, k1, kb, k2), strict=True))}
    p, rng = Profile.from_dict(raw), np.random.default_rng(0)
    for _ in range(200):
        tokens, b = int(rng.integers(1, 9000)), int(rng.integers(1, 60))
        total = int(rng.integers(b, 4000))
        assert p.prefill_s(tokens) == pytest.approx(base + k1 * tokens, rel=1e-12)
        assert p.decode_s(b, total) == pytest.approx(base + kb * b + k2 * total, rel=1e-10)
        mixed = base + k1 * tokens + kb * b + k2 * total
        assert p.step_s([(tokens, 64)], b, total) == pytest.approx(mixed, rel=1e-10)


@pytest.mark.parametrize("index", range(1, 13))
def test_paper_linear_is_equations_13_and_14(index):
    p = load(f"paper-linear-{index:02d}")
    assert p.kind == "derived"
    assert (p.estimator.k1, p.estimator.k2) == pytest.approx((7e-5, 2.5e-5), rel=0.05)
    assert p.prefill_s(100) == pytest.approx(p.estimator.k1 * 100, rel=1e-12)
    assert p.decode_s(5, 1000) == pytest.approx(p.estimator.k2 * 1000, rel=1e-9)


def test_served_model_sets_the_kv_memory():
    fleet = load_fleet("edge-6-homogeneous")
    by_model = dict(zip(fleet.models, fleet.profiles, strict=True))
    # Same card: 32 KV heads take four times the bytes of 8, chatglm2's 2 a fraction.
    assert by_model["vicuna-7b-v1.5"].kv_bytes_per_token == 4 * 131_072
    assert by_model["chatglm2-6b"].kv_bytes_per_token == 28_672
    llama = by_model["Meta-Llama-3-8B-Instruct"]
    assert llama.kv_capacity_tokens == load(RTX).kv_capacity_tokens
    assert by_model["vicuna-7b-v1.5"].kv_capacity_tokens < llama.kv_capacity_tokens
    for profile in fleet.profiles:
        assert profile.kv_capacity_tokens % 16 == 0
        assert profile.decode_s(2, 500) == load(RTX).decode_s(2, 500)


def test_check_domain_warns_once():
    p = load("a10-llama-3.1-8b")
    WARNED_PROFILES.discard(p.name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert p.check_domain(batch=5, tokens=2048, context=1500)
    with pytest.warns(
        UserWarning, match=r"a10.*iteration_tokens <= 2048.*iteration_tokens 4096 > 2048"
    ):
        assert not p.check_domain(batch=5, tokens=4096)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not p.check_domain(batch=5, tokens=4096)


@pytest.mark.parametrize(
    ("given", "nearest"),
    [("rtx4090", RTX), ("paper-linear-1", "paper-linear-01"), ("a10-lama-3.1-8b", "a10-llama")],
)
def test_unknown_profile_names_the_nearest(given, nearest):
    with pytest.raises(ValueError, match=f"got '{given}'; did you mean '{nearest}"):
        load(given)


def _set(data, path, value):
    for key in path[:-1]:
        data = data[key]
    if value is _set:
        del data[path[-1]]
    else:
        data[path[-1]] = value


HOST = {"step_s": 0.003, "sequence_s": 2e-5, "token_s": 1e-6}
DAMAGE = [
    (("device", "memory_bytes"), _set, "field 'device.memory_bytes': missing"),
    (("device", "memory_bytes"), "24 GB", "'device.memory_bytes': got '24 GB'; must be a fi"),
    (("kind",), "guessed", "'kind': got 'guessed'; must be one of measured, fitted, derived"),
    (("nmae",), "x", "unknown field; did you mean 'name'"),
    (("law", "kind"), "quadratic", "must be one of linear, tabulated"),
    (("law", "dense_s", 2), -0.01, r"'law.dense_s\[2\]': got -0.01; must be .* at least 0"),
    (("law", "dense_s", 2), 15600.0, "is it in milliseconds"),
    (("law", "mixed_chunk_s"), 0.01, "'law.mixed_chunk_s': got 0.01.* at most 0.001 seconds"),
    (("law", "dense_tokens", 3), 2, r"'law.dense_tokens\[3\]': got 2; must exceed"),
    (("estimator", "base_s"), _set, "field 'estimator.base_s': missing"),
    (
        ("domain", "max_context_tokens"),
        0,
        "'domain.max_context_tokens': got 0; must be .* at least 1",
    ),
    (("fit_error", "dense_random_third"), {"points": 3}, "dense_random_third.median': missing"),
    (("engine",), [], r"field 'engine': got \[\]; must be an object"),
    (("host",), {**HOST, "step_s": 3.0}, r"'host.step_s'.*milliseconds"),
    # Sizes and orders that depend on other fields.
    (("device", "memory_bytes"), 12e9, "no KV block fits"),
    (("law", "dense_s", 2), 0, "no iteration takes no time"),
    (("law", "dense_s", -1), 0.001, "falls at the end of dense_tokens"),
    (("law", "dense_tokens", 0), 1.5, "must start at <= 1"),
    (("model", "kv_bytes_per_token"), 1000, "must be 2 x layers x kv_heads"),
    (("fit_error", "dense_random_third", "p90"), 9.0, "must not decrease"),
    (("law", "base_s"), -1e-3, "at least 0"),
    (("law", "decode_s_per_context_token"), 0.0, "take no time"),
]


@pytest.mark.parametrize(("path", "value", "message"), DAMAGE)
def test_bad_field_is_refused_with_file_field_and_reason(path, value, message):
    raw = load("paper-linear-01" if path[-1] in LINEAR_FIELDS and path[0] == "law" else RTX)
    raw = raw.to_dict()
    _set(raw, path, value)
    with pytest.raises(ValueError, match=message) as caught:
        Profile.from_dict(raw, "bad.json")
    assert "bad.json" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"name": ', r"bad.json:1: not valid JSON"),
        ('{"name": NaN}', "NaN is no JSON number"),
        ('{"a": 1, "a": 2}', "field 'a': given twice"),
        ("[1, 2]", "must be an object"),
    ],
)
def test_bad_file_is_refused(tmp_path, text, message):
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        load(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": []}, "non-empty list"),
        ({"experts": [{"profile": "a10", "model": "m"}]}, r"experts\[0\].profile'.*did you mean"),
        ({"experts": [{"profile": RTX, "model": "vicuna-7b"}]}, "did you mean 'vicuna-7b-v1.5'"),
        ({"memory": "shared"}, "must be one of profile, served_model"),
    ],
)
def test_bad_fleet_is_refused(tmp_path, change, message):
    fleet = read_json(data_path("fleet-edge-6-homogeneous.json")) | change
    write_json(tmp_path / "fleet.json", fleet)
    with pytest.raises(ValueError, match=message):
        load_fleet(tmp_path / "fleet.json")


def test_fleet_from_a_path(tmp_path):
    load(RTX).save(tmp_path / "mine.json")
    fleet = read_json(data_path("fleet-paper-linear.json"))
    fleet["experts"] = [{"profile": str(tmp_path / "mine.json"), "model": "my-model"}]
    write_json(tmp_path / "fleet.json", fleet)
    loaded = load_fleet(tmp_path / "fleet.json")
    assert (loaded.models, loaded.profiles[0].name) == (("my-model",), RTX)
