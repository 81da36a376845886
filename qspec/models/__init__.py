"""A model as it came: found, read, its vocabulary and its layers."""
