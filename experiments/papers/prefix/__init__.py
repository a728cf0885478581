"""Tables of the prefix-routing workloads."""
