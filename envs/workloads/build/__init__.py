"""What makes the shipped workload files; run once, offline."""
