"""Placement: questions of our own."""
