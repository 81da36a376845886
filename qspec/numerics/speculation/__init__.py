"""Probabilities, acceptance, verification and the gain of drafts."""
