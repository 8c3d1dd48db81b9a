"""What crosses a process line: small typed records, their codec, and the errors that users can meet."""
