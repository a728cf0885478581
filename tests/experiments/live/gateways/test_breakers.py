"""Bad servers beside bad clients: the breakers do what the committed table says."""

from pathlib import Path

import pytest

from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.studies.routing import bad_servers

TABLE = Path(bad_servers.__file__).parents[2] / "results" / "real" / "bad_servers.csv"


@pytest.mark.parametrize(
    ("server", "client"),
    [
        ("none", "429, 60 at once"),
        ("none", "401, 20/s"),
        ("none", "first tokens, 20/s"),
        ("401 to half", "none"),
        ("500 to a fifth", "first tokens, 20/s"),
        ("429 forever", "none"),
        ("always 401", "404, 40/s"),
        ("empty answers", "timeouts, 20/s"),
        ("never answers", "hang-ups, 20/s"),
        ("one token", "none"),
        ("resets", "none"),
        ("token, 503", "401, 20/s"),
    ],
)
def test_a_bad_server_gets_few_requests_and_is_back_in_seconds(server, client):
    policy = "least_outstanding"
    key = {"server": server, "client": client, "policy": policy}
    (row,) = (one for one in read_rows(TABLE) if key.items() <= one.items())
    del row["p99_ratio"]  # over another cell's
    assert bad_servers.play(server, client, policy) == row
