"""Policies inside gateways: LiteLLM and the Endpoint Picker of the Gateway API."""
