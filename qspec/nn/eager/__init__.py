"""The torch engine: a decoder, its attention, caches and linear layers."""
