"""A look into models and pairs."""
