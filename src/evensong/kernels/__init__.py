"""The op set behind one dispatch table."""
