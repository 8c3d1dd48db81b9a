"""What a model's text says: reasoning, an answer, calls of tools."""
