"""When guessing ahead pays: emulated, simulated, and by the paper's own figures."""
