"""Run plumbing of the agents: logging, snapshots, checkpoints, evaluation."""
