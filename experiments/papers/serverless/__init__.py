"""Figures and tables of Remoe, the serverless partitioning paper."""
