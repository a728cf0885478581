"""The environments: one folder a family, their workloads, and what they share."""
