"""Heuristics, planners and clairvoyant policies behind one protocol, in one registry."""
