"""Measure a machine: GPU kernels, CPU experts, a running server."""
