"""`python -m bbquic`, the same as `bbquic`."""

from bbquic.cli.main import run

run()
