"""Policies for the serverless MoE environments; importing this registers them."""
