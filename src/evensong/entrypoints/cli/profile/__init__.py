"""`evensong profile`: a trace of all ranks under load, its figures, and its picture."""
