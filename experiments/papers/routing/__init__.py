"""Figures and tables of the LLM routing paper."""
