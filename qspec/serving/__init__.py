"""An API in front of a pair: qspec's own engine, or vLLM."""
