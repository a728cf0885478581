import numpy as np
import pytest

from servegym.envs.workloads import MalformedFileError
from servegym.envs.workloads.requests import load_requests

HEADER = "arrival_s,prompt_tokens,output_tokens_a,output_tokens_b,score_a,score_b\n"
ROWS = "0.5,10,20,30,0.25,1\n0.5,11,21,31,0.5,0\n2,12,22,32,0.75,0.5\n"


def test_a_file_becomes_a_catalog_in_its_order(tmp_path):
    path = tmp_path / "requests.csv"
    path.write_text(HEADER + ROWS)
    requests = load_requests(path)
    assert requests.arrival_s.tolist() == [0.5, 0.5, 2.0]
    catalog = requests.catalog
    assert catalog.models == ("a", "b")
    assert catalog.prompt_tokens.tolist() == [10, 11, 12]
    assert catalog.output_tokens.tolist() == [[20, 30], [21, 31], [22, 32]]
    assert catalog.scores.tolist() == [[0.25, 1.0], [0.5, 0.0], [0.75, 0.5]]
    assert requests.predicted_scores is None and requests.predicted_tokens is None
    path.write_text(
        "arrival_s,prompt_tokens,output_tokens,score_b,score_a,predicted_tokens_a,"
        "predicted_tokens_b\n1,2,3,0.5,0.25,7,8\n"
    )
    requests = load_requests(path)
    assert requests.catalog.models == ("b", "a")
    assert requests.catalog.output_tokens.tolist() == [[3, 3]]
    assert np.array_equal(requests.predicted_tokens, [[8, 7]])


@pytest.mark.parametrize(
    ("old", "new", "line", "field"),
    [
        ("2,12", "1700000000000,12", 4, "arrival_s"),
        ("11,21", "0,21", 3, "prompt_tokens"),
        ("arrival_s,", "", 1, "arrival_s"),
        ("0.5,0\n", "0.5,1.5\n", 3, "score_b"),
        ("2,12", "0.1,12", 4, "arrival_s"),
        (ROWS, "", None, None),
    ],
)
def test_a_bad_file_is_refused_by_line_and_field(tmp_path, old, new, line, field):
    path = tmp_path / "requests.csv"
    path.write_text((HEADER + ROWS).replace(old, new))
    with pytest.raises(MalformedFileError) as error:
        load_requests(path)
    assert (error.value.line, error.value.field) == (line, field)
