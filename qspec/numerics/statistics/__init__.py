"""How sure a measured number is."""
