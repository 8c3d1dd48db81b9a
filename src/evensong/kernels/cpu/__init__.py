"""The native CPU backend: everything around the extension `evensong._native`. Free of torch."""
