"""The joint search for the fastest pair within a budget."""
