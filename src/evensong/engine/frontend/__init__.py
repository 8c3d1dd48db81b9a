"""Text to tokens and back, in the caller's process."""
