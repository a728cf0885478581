"""Tables as the tests of the papers' figures read them: text, so that what stands there is seen."""

import csv


def rows_of(path):
    """The rows of a CSV, values as text."""
    with open(path, newline="") as stream:
        return list(csv.DictReader(stream))
