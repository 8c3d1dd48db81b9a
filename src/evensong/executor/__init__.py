"""One plan out to all ranks, one result back."""
