"""Simulations beside other simulators and published measurements, asked once."""
