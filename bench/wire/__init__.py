"""Messages over emulated links: our transport, stock aioquic and kernel TCP, timed side by side."""
