"""Every figure and table by one command, and the papers' claims held against them."""
