"""Expert placement beyond the paper."""
