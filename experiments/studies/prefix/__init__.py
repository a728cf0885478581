"""Prefix routing: questions of our own."""
