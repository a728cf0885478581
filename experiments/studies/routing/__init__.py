"""Routing: questions of our own."""
