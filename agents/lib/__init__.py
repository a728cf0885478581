"""Run plumbing of the agents: arguments, environments, logs, snapshots, checkpoints, evaluation."""
