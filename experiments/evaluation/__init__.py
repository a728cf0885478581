"""Policies on the same episodes: evaluator, guests, tables, leaderboard, tuning, presubmit."""
