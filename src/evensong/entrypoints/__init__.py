"""Where people come in."""
