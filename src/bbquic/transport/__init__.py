"""Messages between machines: framing, identity, and endpoints that carry them over QUIC."""
