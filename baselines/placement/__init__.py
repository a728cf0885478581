"""Policies for the expert placement environments; importing this registers them."""
