"""Pure functions on tensors: tensors in, tensors out; no module, configuration, I/O, log or random state."""
