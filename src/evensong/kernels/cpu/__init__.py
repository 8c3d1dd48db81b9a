"""Native kernels of the CPU."""
