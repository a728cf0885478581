"""Policies inside real gateways: agreement with the environment, soaks, and servers that fail."""
