"""A recipe's outcome, predicted before compute is spent."""
