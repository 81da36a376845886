"""Target and draft as one unit: packaged, checked, opened."""
