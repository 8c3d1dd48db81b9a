"""A user's JSON Schema, checked and written anew in what the grammar library enforces exactly."""
