"""Measure a machine: GPU kernels, the link of cards, a running server."""
