"""The engine, seen from outside and inside."""
