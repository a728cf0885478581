"""Simulated servers behind OpenAI's protocol: a fleet to test gateways with, without a GPU."""
