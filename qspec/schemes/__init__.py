"""What number formats mean for layers, devices, bytes and servers."""
