"""One external library per file."""
