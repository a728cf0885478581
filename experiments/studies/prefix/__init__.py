"""Prefix-cache-aware routing: questions of our own."""
