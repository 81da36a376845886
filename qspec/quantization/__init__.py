"""From a float model to codes."""
