"""Modules that run: quantized linears, KV caches, the decoder."""
