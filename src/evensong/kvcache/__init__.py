"""Where KV memory lives: blocks, their hashes and their owners."""
