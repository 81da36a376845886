"""What a recipe would do, before compute is spent."""
