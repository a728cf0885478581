"""servegym."""
