"""The evensong command: one file a verb."""
