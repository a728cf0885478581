"""Evaluations, figures, sweeps and RLlib on a Ray cluster."""
