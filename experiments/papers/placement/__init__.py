"""Figures and tables of Prism, the expert placement paper."""
