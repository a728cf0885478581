"""Serverless partitioning: questions of our own."""
