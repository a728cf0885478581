"""Hyper-parameter sweeps: wandb's sweep files, and what runs them without an account."""
