"""What makes the shipped profiles from the tables of others; run once, offline."""
