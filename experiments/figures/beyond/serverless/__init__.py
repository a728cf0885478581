"""Serverless partitioning beyond the paper."""
