"""Serverless MoE partitioning: which experts run as remote functions, with how much memory."""
