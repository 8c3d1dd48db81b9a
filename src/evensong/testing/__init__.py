"""Fakes that ship: a scripted executor, a byte tokenizer, a clock, tiny random models."""
