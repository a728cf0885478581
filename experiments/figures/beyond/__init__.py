"""Figures and tables that go beyond the three papers."""
