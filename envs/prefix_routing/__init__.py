"""Prefix routing: a gateway sends each request to one of N replicas that cache prompt prefixes."""
