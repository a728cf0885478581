"""One bad server and one bad client behind a gateway: some pairs of the table."""

import pytest

from servegym.experiments.studies.routing.bad_servers import play

POLICY = "least_outstanding"
PAIRS = [
    ("always 401", "404, 40/s"),
    ("429 forever", "429, 60 at once"),
    ("never answers", "timeouts, 20/s"),
    ("fails one in two", "hang-ups, 20/s"),
]


@pytest.mark.parametrize(("server", "client"), PAIRS)
def test_a_bad_server_gets_little_and_a_bad_client_harms_nobody(server, client):
    row, alone = play(server, client, POLICY), play(server, "none", POLICY)
    assert row["share_to_bad"] < 0.05 and alone["share_to_bad"] < 0.05
    assert row["refused"] == 0 and row["not_serving"] == 0
    assert row["p99_s"] <= 1.5 * alone["p99_s"]
    assert row["good_closed"] < 0.05


def test_a_bad_client_alone_closes_no_server_and_a_server_that_heals_is_back():
    for client in ("404, 40/s", "hang-ups, 20/s"):
        row = play("none", client, POLICY)
        assert row["refused"] == row["not_serving"] == 0
        assert 0.2 < row["share_to_bad"] < 0.35  # of four like servers
        assert row["good_closed"] < 0.02
    assert play("dies and returns", "none", POLICY)["share_after_return"] > 0.05
