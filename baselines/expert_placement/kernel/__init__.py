"""Jitted inner loops of the placement algorithms, one module a subject."""
