"""What makes the shipped profiles from measurements; run once, offline."""
