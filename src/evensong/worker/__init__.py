"""One per device: runs the model and samples."""
