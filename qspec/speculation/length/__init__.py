"""How many tokens to draft next."""
