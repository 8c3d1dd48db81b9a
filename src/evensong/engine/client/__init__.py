"""How a front end reaches cores."""
