"""python -m benchmarks [op ...] [--provider ...]: the same as `ligermodels bench`."""

import sys

from ligermodels.cli import main

sys.exit(main(["bench", *sys.argv[1:]]))
