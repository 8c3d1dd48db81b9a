"""Structured output: what a request's tokens may be, position by position."""
