"""Policies inside gateways: LiteLLM, the Endpoint Picker of the Gateway API, and Ray Serve."""
