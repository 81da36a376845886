"""vLLM: a server of its own environment, and a plugin for heads that it does not run itself."""
