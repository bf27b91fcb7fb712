"""bbquic: large language models over a handful of machines that are far apart."""

__version__ = "0.1.0"
