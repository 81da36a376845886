"""Hot operations: an eager reference for each, and the fast kernels that must equal it."""
