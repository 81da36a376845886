"""qspec: quantize, fuse, package, prove and measure a target and its draft as one speculative pair."""

__version__ = "0.1.0"
