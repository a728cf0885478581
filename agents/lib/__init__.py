"""Run plumbing of the agents: arguments, environments, logs, snapshots, checkpoints, evaluation.

`single_decision` computes a trained HAN for one request in numpy, faster than torch does.
"""
