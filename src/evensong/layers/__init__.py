"""Blocks that models are declared from."""
