"""Measurements of a user's own device to a profile: what ``servegym calibrate`` runs."""
