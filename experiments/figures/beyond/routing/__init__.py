"""LLM routing beyond the paper."""
