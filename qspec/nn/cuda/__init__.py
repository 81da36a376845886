"""The GPU engine: static caches, captured passes, the speculative loop on the device."""
