import sys

from bench.wan.cli import main

sys.exit(main(sys.argv[1:]))
