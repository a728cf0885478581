import copy
import json

import numpy as np
import pytest

from servegym.envs.workloads import MalformedFileError, load_catalog
from servegym.envs.workloads.mix_instruct import count_tokens


def record(k):
    return {
        "id": f"made_up/{k}",
        "instruction": "Say it again.",
        "input": "x" * (4 * k),
        "output": "x",
        "candidates": [
            {
                "decoding_method": "top_p_sampling",
                "model": model,
                "text": "word " * (k + j + 1),
                "scores": {"logprobs": -0.1, "bertscore": 0.5 + 0.01 * k + 0.1 * j, "bleu": 5.6},
            }
            for j, model in enumerate(("one-7b", "two-7b"))
        ],
    }


RECORDS = [record(k) for k in range(20)]


def write(path, records=RECORDS, lines=False):
    if lines:
        path.write_text("\n".join(json.dumps(item) for item in records) + "\n")
    else:
        path.write_text(json.dumps(records))
    return path


@pytest.mark.parametrize("lines", [False, True])
def test_reads_json_and_jsonl(tmp_path, lines):
    catalog = load_catalog("mix_instruct", path=write(tmp_path / "v.json", lines=lines))
    assert catalog.models == ("one-7b", "two-7b")
    np.testing.assert_allclose(catalog.scores[3], [0.53, 0.63], rtol=1e-6)
    # "Say it again." and a line break are 14 bytes, 12 more of input: 26 / 4 rounded up.
    assert catalog.prompt_tokens[3] == 7
    assert catalog.output_tokens[3].tolist() == [5, 7]
    assert [len(catalog.rows(s)) for s in ("train", "val", "eval")] == [12, 2, 6]
    again = load_catalog("mix_instruct", path=tmp_path / "v.json")
    assert np.array_equal(again.split, catalog.split)


def test_count_tokens():
    assert [count_tokens(text) for text in ("", "abc", "abcd", "abcde", "é" * 4)] == [1, 1, 1, 2, 2]


def test_tokenizer_precomputed_counts_cap_and_models(tmp_path):
    path = write(tmp_path / "v.json")
    catalog = load_catalog(
        "mix_instruct", path=path, tokenizer=str.split, models=["two-7b"], max_output_tokens=10
    )
    assert catalog.models == ("two-7b",)
    assert catalog.output_tokens[3].tolist() == [5]
    assert catalog.output_tokens.max() == 10
    counted = load_catalog("mix_instruct", path=path, tokenizer=len)
    assert counted.prompt_tokens[3] == 26
    given = copy.deepcopy(RECORDS)
    given[3]["prompt_tokens"] = 99
    given[3]["candidates"][1]["output_tokens"] = 77
    del given[3]["candidates"][1]["text"]
    catalog = load_catalog("mix_instruct", path=write(path, given))
    assert catalog.prompt_tokens[3] == 99
    assert catalog.output_tokens[3, 1] == 77


def test_folder_gives_the_splits(tmp_path):
    write(tmp_path / "train_data_prepared.jsonl", RECORDS[:9], lines=True)
    write(tmp_path / "val_data_prepared.jsonl", RECORDS[9:11], lines=True)
    with pytest.raises(ValueError, match="test_data_prepared"):
        load_catalog("mix_instruct", path=tmp_path)
    write(tmp_path / "test_data_prepared.json", RECORDS[11:])
    catalog = load_catalog("mix_instruct", path=tmp_path)
    assert [len(catalog.rows(s)) for s in ("train", "val", "eval")] == [9, 2, 9]


def test_missing_path_says_how_to_get_it(tmp_path):
    for kwargs in ({}, {"path": tmp_path / "nowhere"}):
        with pytest.raises(ValueError, match="llm-blender/mix-instruct"):
            load_catalog("mix_instruct", **kwargs)


def spoil(change):
    records = copy.deepcopy(RECORDS)
    change(records[2])
    return records


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda r: r.pop("candidates"), "candidates"),
        (lambda r: r["candidates"][1].pop("scores"), "candidates[two-7b].scores.bertscore"),
        (
            lambda r: r["candidates"][1]["scores"].update(bertscore=1.2),
            "candidates[two-7b].scores.bertscore",
        ),
        (lambda r: r["candidates"][1].pop("text"), "candidates[two-7b].text"),
        (lambda r: r["candidates"][1].update(output_tokens=-3), "candidates[two-7b].output_tokens"),
        (lambda r: r.update(instruction=None), "instruction"),
    ],
)
def test_malformed_records_name_place_and_field(tmp_path, change, field):
    path = write(tmp_path / "v.json", spoil(change))
    with pytest.raises(MalformedFileError) as caught:
        load_catalog("mix_instruct", path=path)
    assert str(caught.value).startswith(f"{path}:record 3: field {field!r}: ")
    path = write(tmp_path / "v.jsonl", spoil(change), lines=True)
    with pytest.raises(MalformedFileError) as caught:
        load_catalog("mix_instruct", path=path)
    assert str(caught.value).startswith(f"{path}:3: field {field!r}: ")


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ("[]", "", "no records"),
        (json.dumps(RECORDS[0]) + "\n{oops\n", ":2", "not JSON"),
        ("version https://git-lfs.github.com/spec/v1\n", ":1", "LFS"),
    ],
)
def test_malformed_files(tmp_path, text, where, words):
    path = tmp_path / "v.json"
    path.write_text(text)
    with pytest.raises(MalformedFileError) as caught:
        load_catalog("mix_instruct", path=path)
    assert str(caught.value).startswith(f"{path}{where}: ")
    assert words in str(caught.value)


def test_score_outside_the_unit_interval_is_refused(tmp_path):
    path = write(tmp_path / "v.json")
    with pytest.raises(MalformedFileError, match=r"scores.bleu.*5.6 is not in \[0, 1\]"):
        load_catalog("mix_instruct", path=path, score="bleu")
