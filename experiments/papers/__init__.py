"""The papers' figures and tables that claims rest on, by one command, and those claims."""
