"""What the tests of servers and gateways share."""

import gc

import pytest


@pytest.fixture(autouse=True)
def nothing_to_look_through():
    """A simulated fleet looks for garbage at its start, and thaws all that is there at its end."""
    gc.freeze()
