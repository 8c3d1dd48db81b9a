"""Ranks: where each stands, what it holds, and how they exchange what they compute."""
