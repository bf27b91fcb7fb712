"""An emulator of a wide-area network: N hosts in network namespaces on one Linux machine, as root."""
