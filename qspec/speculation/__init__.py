"""The speculative engine: knows the `LM` protocol and no library."""
