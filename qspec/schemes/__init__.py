"""The meaning of number formats for layers, devices, bytes and servers."""
