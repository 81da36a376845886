"""Everything foreign: one home per external library, its formats and rules beside it."""
