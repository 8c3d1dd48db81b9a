"""What an output must look like: schemas and grammars compiled into masks of tokens."""
