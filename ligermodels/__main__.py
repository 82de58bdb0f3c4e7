"""python -m ligermodels: the command `ligermodels`."""

import sys

from ligermodels.cli import main

sys.exit(main())
