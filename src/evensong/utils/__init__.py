"""Leaves: small helpers that know nothing of the engine."""
