"""An ordered list of small steps from logits to a token."""
