"""Kinds of drafts: one object each, for everything that the rest of qspec has to know of a kind."""
