"""Model families, their registry and the weight loader."""
