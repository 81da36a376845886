"""Drafts learn from their target."""
