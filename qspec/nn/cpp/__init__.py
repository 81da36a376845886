"""The C++ engine's Python half: packed weights, the model handed over, calls through ctypes."""
