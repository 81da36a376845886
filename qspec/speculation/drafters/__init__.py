"""Drafters: each proposes continuations of the committed sequence; none can change the output."""
